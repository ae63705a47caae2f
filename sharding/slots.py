"""Which slots of a row's cache a device holds, which of them a query sees, and which a token is written to.

Letters as in model.py. Where n devices share a key/value head, slot s is on device s % n, at local index
s // n. chunk: a model.Chunk. mask: a model.Mask. These functions run inside shard_map.
"""

import jax.numpy as jnp
from jax import Array, lax

from sharding.mesh import SLOTS


def visible_slots(chunk, mask, end: Array) -> tuple[Array, tuple[Array, Array] | None]:
    """Which of this device's slots each query sees, of a cache that a row's first end[b] tokens went into.

    -> (length [b,T], gap): a query sees the slots before `length`, except those in [gap[0], gap[1]), [b,T]
    each. A gap of None leaves nothing out.

    For example, a window of 4 has a ring of 6 slots. After 9 tokens they hold positions 6, 7, 8, 3, 4, 5. The
    query at position 8 sees 5 to 8: the length is 6 and the gap [3, 5).
    """
    first, filled = mask.first_visible(chunk.positions), end[:, None]
    any_visible = (first < filled) & (chunk.count > 0)[:, None]
    if not mask.ring:
        return jnp.where(any_visible, local_slots(filled), 0), None
    # If the visible slots do not wrap around, they are [low, high): length is high, the gap is [0, low).
    # If they do, they are [0, high) and [low, ring): length is ring, the gap is [high, low).
    low, high = first % mask.ring, filled % mask.ring
    wraps = high <= low
    length = jnp.where(wraps, jnp.minimum(filled, mask.ring), high)
    length = jnp.where(any_visible, local_slots(length), 0)
    if not mask.window:  # in a block's ring the first visible slot is 0
        return length, None
    return length, (jnp.where(wraps, local_slots(high), 0), local_slots(low))


def slot_mapping(chunk, mask, capacity: int) -> Array:
    """The slot of this device that each token is written to, [b,T]; `capacity` if it is written to none."""
    slot, keep, sharing = chunk.positions, chunk.valid, lax.axis_size(SLOTS)
    if mask.ring:  # a ring keeps the chunk's last tokens; earlier ones would be written to the same slots
        keep = keep & (slot >= (chunk.start + chunk.count)[:, None] - mask.ring)
        slot = slot % mask.ring
    return jnp.where(keep & (slot % sharing == lax.axis_index(SLOTS)), slot // sharing, capacity)


def local_slots(n: Array) -> Array:
    """How many of a head's first n slots are on this device."""
    sharing = lax.axis_size(SLOTS)
    return (n + sharing - 1 - lax.axis_index(SLOTS)) // sharing
