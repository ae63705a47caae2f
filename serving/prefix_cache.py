"""Prefixes in host memory: the memories of rows that other requests have taken.

Before a row takes a new text, the memory of its old text is copied to the host. When a later prompt begins
like that text, the copy is put into the row that takes the prompt, which then reads only the rest. When the
memory for copies is full, the least recently used ones are dropped.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ops.kv_cache import KV, map_slots

MIN_SAVED = 64  # tokens; computing fewer again costs less than copying a row to the host


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One array of a row's memory, of a cache as far as its slots are filled.

    shape, dtype, sharding: of the array [n,...] with one row for each data shard. parts: {device: [1,...]},
    the row of one data shard, on this process's devices. axis: of the slots, of which the empty ones are left
    out; None for an array of a state.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    parts: dict[jax.Device, np.ndarray]
    axis: int | None


@dataclasses.dataclass(eq=False)
class SavedPrefix:
    """The memory of a row of one data shard that another text has replaced.

    text: [n] int32, the tokens that it has computed. latest: the most tokens that it may have computed: in a
    ring, later tokens overwrite earlier ones. bytes: on all hosts. states: after how many tokens it has
    states, see scheduler.Row; in the places of the row's own.
    """

    text: np.ndarray
    latest: int
    bytes: int
    states: tuple[int, ...] = (0,)
    copies: list[HostCopy] = dataclasses.field(default_factory=list)
    arrays: list[tuple[jax.Array, int | None]] = dataclasses.field(default_factory=list)
    shard: int = 0

    def start_copying(self, arrays: list[tuple[jax.Array, int | None]], shard: int) -> None:
        """Start to copy row `shard` of arrays to the host. arrays: (an array [n,...], its axis of slots)."""
        self.arrays, self.shard = arrays, shard
        for x, _ in arrays:
            x.copy_to_host_async()

    def finish_copying(self) -> None:
        """Keep what has arrived, and free the arrays on the devices. Waits for them if necessary."""
        self.copies += [self._copy(x, axis) for x, axis in self.arrays]
        self.arrays = []

    def _copy(self, x: jax.Array, axis: int | None) -> HostCopy:
        parts, index = {}, ()
        for shard in x.addressable_shards:
            if (shard.index[0].start or 0) == self.shard:
                if axis is not None:  # devices that share a head hold its slots in turn
                    slots = x.shape[axis]
                    filled = -(-min(self.latest, slots) * shard.data.shape[axis] // slots)
                    index = (slice(None),) * axis + (slice(filled),)
                parts[shard.device] = np.array(np.asarray(shard.data)[index])
        return HostCopy(x.shape, x.dtype, x.sharding, parts, axis)


class PrefixCache:
    """The saved prefixes of one data shard. limit: bytes that they may take, on all hosts together."""

    def __init__(self, limit: int):
        self.limit, self.saved = limit, []  # the least recently used first

    def add(
        self, text: np.ndarray, latest: int, size: int, states: tuple[int, ...] = (0,)
    ) -> SavedPrefix | None:
        """Make room for a row of `size` bytes: -> what will keep its memory.

        None if it does not fit, or if a saved text begins with this one. Texts with which this one begins are
        dropped: a conversation that goes on takes the place of its beginning.
        """
        n = len(text)
        if size > self.limit or any(np.array_equal(x.text[:n], text) for x in self.saved):
            return None
        self.saved = [x for x in self.saved if not np.array_equal(x.text, text[: len(x.text)])]
        while sum(x.bytes for x in self.saved) + size > self.limit:
            self.saved.pop(0)
        self.saved.append(SavedPrefix(text.copy(), latest, size, states))
        return self.saved[-1]

    def forget(self, text: np.ndarray) -> None:
        """Drop the texts that begin with this one."""
        self.saved = [x for x in self.saved if not np.array_equal(x.text[: len(text)], text)]

    def use(self, prefix: SavedPrefix) -> None:
        """Count it as the most recently used."""
        self.saved.remove(prefix)
        self.saved.append(prefix)


def slot_axes(memories: Any) -> list[tuple[jax.Array, int | None]]:
    """The arrays in a tree of layers' memories, each with the axis of its slots; None for a state's."""
    found: list[tuple[jax.Array, int | None]] = []
    for memory in jax.tree.leaves(memories, is_leaf=lambda x: isinstance(x, KV)):
        if isinstance(memory, KV):
            axes = jax.tree.leaves(map_slots(lambda axis, x: axis, memory))
            found += zip(jax.tree.leaves(memory), axes, strict=True)
        else:
            found.append((memory, None))
    return found


def memory_bytes(arrays: list[tuple[jax.Array, int | None]], tokens: int) -> int:
    """Bytes of a row's states, and of the slots that so many tokens fill in it. arrays: see `slot_axes`."""
    total = 0
    for x, axis in arrays:
        size, slots = math.prod(x.shape[1:]), x.shape[axis] if axis is not None else tokens
        total += (size * min(tokens, slots) // slots if slots else size) * x.dtype.itemsize
    return total


def on_devices(saved: list[SavedPrefix | None]) -> list[jax.Array]:
    """The arrays [n,...] of which data shard i has what `saved[i]` keeps, and zeros where that is None."""
    for prefix in saved:
        if prefix is not None:
            prefix.finish_copying()
    like = next(prefix for prefix in saved if prefix is not None).copies
    return [_on_devices([x and x.copies[i] for x in saved], copy) for i, copy in enumerate(like)]


def _on_devices(copies: list[HostCopy | None], like: HostCopy) -> jax.Array:
    parts = {device: part for copy in copies if copy for device, part in copy.parts.items()}
    arrays = []
    for device in like.sharding.addressable_devices:
        whole = np.zeros(like.sharding.shard_shape(like.shape), like.dtype)
        if device in parts:
            part = parts[device]
            whole[tuple(slice(n) for n in part.shape)] = part
        arrays.append(jax.device_put(whole, device))
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
