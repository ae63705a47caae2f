"""How devices share a key/value head: the slots of a row's cache that each has, and what they exchange.

Letters as in model.py. Where n devices share a head, slot s is on device s % n, at local index s // n. Each
device has some of the columns of the matrices that project the head's key and value, and some of its queries.
chunk: a model.Chunk. mask: a model.Mask. These functions run inside shard_map.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ops.attention import merge
from ops.platform import plain_kinds, platform
from sharding.mesh import SLOTS


def visible_slots(chunk, mask, has_chunk: bool) -> tuple[Array, tuple[Array, Array] | None]:
    """Which of this device's slots each query sees, of a cache that all tokens before the chunk went into.

    has_chunk: the cache has the chunk's own tokens, too; a query sees those up to itself. With a ring only
    for chunks of one token, as a longer one may overwrite what its first tokens see.
    -> (length [b,T], gap): a query sees the slots before `length`, except those in [gap[0], gap[1]), [b,T]
    each. A gap of None leaves nothing out.

    For example, a window of 4 has a ring of 6 slots. After 9 tokens they hold positions 6, 7, 8, 3, 4, 5. The
    query at position 8 sees 5 to 8: the length is 6 and the gap [3, 5).
    """
    first, filled = mask.first_visible(chunk.positions), chunk.start[:, None]
    if has_chunk:
        filled = jnp.minimum(chunk.positions + 1, filled + chunk.count[:, None])
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


def whole_heads(q: Array, *kv: Array) -> list[Array]:
    """q: [b,T,k,g,H] -> [b,T,k,G,H], and keys and values [b,T,k,h] -> [b,T,k,H].

    Each device has computed some columns h of a head's key and value, and some of its queries g.
    """
    if lax.axis_size(SLOTS) == 1:
        # Without a barrier XLA applies rotate's reshape to w.q, and copies that weight in each step. For GPUs
        # the barrier is before the product, in ops/matmul.py, and rotate can be fused with the product.
        before = platform() == "gpu" and "matmul" not in plain_kinds()
        return [q, *kv] if before else lax.optimization_barrier([q, *kv])
    *bTk, g, H = q.shape
    q, *whole = gather_shared_head(q.reshape(*bTk, g * H), *kv)
    return [q.reshape(*bTk, -1, H), *whole]


def gather_shared_head(*parts: Array) -> list[Array]:
    """Gather arrays whose last axis is split over the n devices that share a key/value head.

    [...,c] each -> [...,n*c] each, with one all-gather for all of them.
    """
    whole = lax.all_gather(jnp.concatenate(parts, -1), SLOTS, axis=parts[0].ndim - 1)  # [...,n,c+c+..]
    split = jnp.split(whole, np.cumsum([x.shape[-1] for x in parts])[:-1], -1)
    return [x.reshape(*x.shape[:-2], -1) for x in split]


def merge_slots(o: Array, lse: Array) -> tuple[Array, Array]:
    """Each device has attended with all queries to its own slots: merge, and keep this device's queries.

    o: [b,T,k,G,U], lse: [b,T,k,G] -> (o [b,T,k,g,U], lse [b,T,k,g]). One all-to-all of the partial results.
    """
    sharing = lax.axis_size(SLOTS)
    if sharing == 1:
        return o, lse
    parts = jnp.concatenate([o, lse[..., None]], -1)
    parts = parts.reshape(*o.shape[:3], sharing, -1, parts.shape[-1])
    parts = lax.all_to_all(parts, SLOTS, 3, 0)  # [sharing,b,T,k,g,U+1]
    return merge(*((part[..., :-1], part[..., -1]) for part in parts))
