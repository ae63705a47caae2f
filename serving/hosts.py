"""What the processes of one computation, one per host, tell one another.

Values travel as JSON, in bytes. jax would make the numbers of an array 32 bits wide: 15.75 GiB, counted in
bytes, would arrive as -0.25 GiB.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.errors import UserError


def gather(value) -> list:
    """This value of every process, in their order. value: what JSON holds. All processes must call it."""
    if jax.process_count() == 1:
        return [value]
    data = _bytes_of(value)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    rows = multihost_utils.process_allgather(np.pad(data, (0, sizes.max() - data.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def from_first(function: Callable[[], Any]):
    """What function() returns in the first process, in all; the others do not call it. All must call this.

    It returns what JSON holds. If it raises an exception there, all leave: the others with a UserError.
    """
    if jax.process_count() == 1:
        return function()
    found, failure = {}, None
    if jax.process_index() == 0:
        try:
            found = dict(value=function())
        except Exception as e:
            found, failure = dict(error=str(e)), e
    data = _bytes_of(found)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    sent = np.resize(data, size)  # only what the first process holds is looked at
    found = json.loads(multihost_utils.broadcast_one_to_all(sent).tobytes())
    if failure is not None:
        raise failure
    if "error" in found:
        raise UserError(found["error"])
    return found["value"]


def _bytes_of(value) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def start_fetching(tree, mesh: Mesh):
    """Arrays that every process will look at, on their way there; later computations do not delay them."""
    if jax.process_count() > 1:
        tree = _replicated(tree, mesh=mesh)
    for x in jax.tree.leaves(tree):
        x.copy_to_host_async()
    return tree


@partial(jax.jit, static_argnames="mesh")
def _replicated(tree, *, mesh: Mesh):
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))
