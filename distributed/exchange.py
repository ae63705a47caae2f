"""How the processes of a computation exchange values.

Values travel as JSON through the key-value store of jax's coordination service, which runs in process 0. No
device takes part, so nothing is compiled, and no number is cut to the 32 bits of jax's arrays.
"""

import functools
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

from jax._src.distributed import global_state  # jax has no public name for the store

from distributed.watch import DAY
from feedback.errors import UserError
from feedback.progress import print_line

_exchanges = itertools.count()  # the same number in all processes: they exchange values in the same order


def process_count() -> int:
    """The same as jax.process_count(), which would initialize the devices."""
    return global_state.num_processes


def process_index() -> int:
    return global_state.process_id


@functools.cache
def warn(text: str) -> None:
    """Print a warning to stderr, in the first process only, and the same text once."""
    if process_index() == 0:
        print_line(f"warning: {text}")


def hostname() -> str:
    return socket.gethostname()


def gather(value) -> list:
    """The values of all processes, by process index. value: anything that JSON holds. All must call this."""
    if process_count() == 1:
        return [value]
    key = f"exchange/{next(_exchanges)}"
    _put(f"{key}/{process_index()}", value)
    return [_get(f"{key}/{i}") for i in range(process_count())]


def from_first(function: Callable[[], Any]):
    """Call the function in process 0 and return its result in all processes. All must call this.

    The result must be something that JSON holds. An exception of the function is raised in process 0, and in
    the others a UserError with the same message.
    """
    if process_count() == 1:
        return function()
    key, failure = f"exchange/{next(_exchanges)}", None
    if process_index() == 0:
        try:
            found = dict(value=function())
        except Exception as e:
            found, failure = dict(error=str(e)), e
        _put(key, found)
    found = _get(key)
    if "error" in found:
        raise failure or UserError(found["error"])
    return found["value"]


class Broadcast:
    """Messages from process 0 to all others, any number of them.

    The store keeps every message. So after every ACKNOWLEDGED messages each receiver writes how many it has
    read into the store, and process 0 deletes those that all have read.
    """

    ACKNOWLEDGED = 64  # messages

    def __init__(self):
        self.number, self.deleted = 0, 0  # the next message; the first that is not deleted

    def say(self, value) -> None:
        """Send a message, in process 0. value: anything that JSON holds."""
        _put(f"say/{self.number}", value)
        self.number += 1
        if self.number % self.ACKNOWLEDGED == 0:
            counts = [int(count) for _, count in global_state.client.key_value_dir_get("heard/")]
            heard_by_all = min(counts) if len(counts) == process_count() - 1 else 0
            for number in range(self.deleted, heard_by_all):
                global_state.client.key_value_delete(f"say/{number}")
            self.deleted = max(self.deleted, heard_by_all)

    def hear(self):
        """Wait for the next message and return it, in the other processes."""
        value = _get(f"say/{self.number}")
        self.number += 1
        if self.number % self.ACKNOWLEDGED == 0:
            key = f"heard/{process_index()}"
            global_state.client.key_value_set(key, str(self.number), allow_overwrite=True)
        return value


def flag(name: str) -> None:
    """Raise the flag of this name, in any process; `wait_for_flag` sees it in any other."""
    if process_count() > 1:
        global_state.client.key_value_set(f"flag/{name}", "", allow_overwrite=True)


def wait_for_flag(name: str, then: Callable[[], None]) -> None:
    """Wait until a process raises the flag of this name, and call `then`. It blocks: give it a thread."""
    while process_count() > 1:
        try:
            global_state.client.blocking_key_value_get(f"flag/{name}", DAY * 1000)
        except Exception as e:  # jaxlib's, whose type is not public
            if "DEADLINE_EXCEEDED" in str(e):
                continue
            return  # the processes have ended
        return then()


def reach(milestone: str) -> None:
    """Say that this process has reached a milestone, without waiting for the others."""
    if process_count() > 1:
        _put(f"reached/{milestone}/{process_index()}", True)


def wait_for_all(milestone: str) -> None:
    """Wait until every process has reached a milestone. It blocks: give it a thread."""
    if process_count() > 1:
        for i in range(process_count()):
            _get(f"reached/{milestone}/{i}")


def agree(values: dict[str, Any], remedy: str) -> None:
    """Raise the same UserError in every process if their values differ. All must call this.

    values: by the names that users know them by; anything that JSON holds. remedy: what to do about a
    difference.
    """
    first, *others = gather([hostname(), values])
    for i, other in enumerate(others, 1):
        for name in sorted({*first[1], *other[1]}):
            (here, a), (there, b) = ((host, json.dumps(found.get(name))) for host, found in (first, other))
            if a != b:
                where = f"{a} in process 0 (on {here}) and {b} in process {i} (on {there})"
                raise UserError(f"{name} is {where}; {remedy}")


def _put(key: str, value) -> None:
    global_state.client.key_value_set_bytes(key, json.dumps(value).encode())


def _get(key: str):
    """Wait for the value of this key, without a limit: watch.py ends this process if its sender is gone."""
    return json.loads(global_state.client.blocking_key_value_get_bytes(key, DAY * 1000))
