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
