"""What the processes of a computation tell one another.

Values travel as JSON through the key-value store of jax's coordination service, which process 0 holds. No
device takes part, so nothing is compiled for it, and no number is cut to the 32 bits that jax's arrays have.
"""

import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

from jax._src.distributed import global_state  # jax has no public name for the store

from checkpoints.errors import UserError
from distributed.watch import DAY

_exchanges = itertools.count()  # the same in all processes: they exchange the same things in the same order


def process_count() -> int:
    """As jax.process_count(), but before there are devices, too."""
    return global_state.num_processes


def process_index() -> int:
    return global_state.process_id


def hostname() -> str:
    return socket.gethostname()


def gather(value) -> list:
    """This value of every process, in their order. value: what JSON holds. All processes must call it."""
    if process_count() == 1:
        return [value]
    key = f"exchange/{next(_exchanges)}"
    _put(f"{key}/{process_index()}", value)
    return [_get(f"{key}/{i}") for i in range(process_count())]


def from_first(function: Callable[[], Any]):
    """What function() returns in the first process, in all; the others do not call it. All must call this.

    It returns what JSON holds. If it raises an exception there, all leave: the others with a UserError.
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
    """What the first process says to all others, again and again, for as long as it likes.

    Now and then the others note what they have heard, and the first deletes it.
    """

    NOTED = 64  # messages between two notes

    def __init__(self):
        self.number, self.deleted = 0, 0

    def say(self, value) -> None:
        """value: what JSON holds."""
        _put(f"say/{self.number}", value)
        self.number += 1
        if self.number % self.NOTED == 0:
            notes = global_state.client.key_value_dir_get("heard/")
            heard = min((int(n) for _, n in notes), default=0) if len(notes) == process_count() - 1 else 0
            for number in range(self.deleted, heard):
                global_state.client.key_value_delete(f"say/{number}")
            self.deleted = max(self.deleted, heard)

    def hear(self):
        """The next message; it waits for it."""
        value = _get(f"say/{self.number}")
        self.number += 1
        if self.number % self.NOTED == 0:
            key = f"heard/{process_index()}"
            global_state.client.key_value_set(key, str(self.number), allow_overwrite=True)
        return value


def flag(name: str) -> None:
    """Any process may raise it, for the first."""
    if process_count() > 1:
        global_state.client.key_value_set(f"flag/{name}", "", allow_overwrite=True)


def wait_for_flag(name: str, then: Callable[[], None]) -> None:
    """Call `then` when a process has raised it: in a thread of its own, for it waits."""
    while process_count() > 1:
        try:
            global_state.client.blocking_key_value_get(f"flag/{name}", DAY * 1000)
        except Exception as e:  # of a type of jaxlib's
            if "DEADLINE_EXCEEDED" in str(e):
                continue
            return  # the processes have parted
        return then()


def agree(values: dict[str, Any], remedy: str) -> None:
    """Raises a UserError in every process unless all have the same values; all must call this.

    values: what JSON holds, by what it is. remedy: what to do about a difference.
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
    """It waits as long as it must: watch.py ends this process if the one that is to put it is gone."""
    return json.loads(global_state.client.blocking_key_value_get_bytes(key, DAY * 1000))
