"""How far a row can be rolled back, and how long a prefix of it another row can reuse.

Draft tokens that turn out wrong are taken back, and a new request reuses what a row has read of the same
prefix. A cache that keeps all tokens allows any of both. A ring overwrites its oldest tokens, so its size and
what a query sees set the limits.
"""

import jax.numpy as jnp
from jax import Array

from model import Mask

INT32_MAX = jnp.iinfo(jnp.int32).max


def rollback_limit(mask: Mask, length: Array) -> Array:
    """How many more tokens rows of these lengths can read and still take back: [b] -> [b] int32."""
    if mask.ring is None:
        return jnp.full_like(length, INT32_MAX)
    if mask.window:
        return jnp.full_like(length, drafts_in_ring(mask))
    # Up to the end of the chunk: the next chunk's tokens overwrite what this chunk's next tokens see.
    return mask.ring - length % mask.ring


def reusable_prefix(mask: Mask, n: int, latest: int) -> int:
    """How many of a row's first n tokens another row can reuse, when the row has read `latest` tokens."""
    first = mask.first_visible(n)
    if mask.ring is None:
        return n
    if mask.window:
        oldest = latest + drafts_in_ring(mask) - mask.ring  # older tokens may have been overwritten
        return n if first >= oldest else 0
    # Only the latest chunk is still there. A row that goes on from a chunk's start needs no earlier chunk.
    return n if first == mask.first_visible(latest) else first


def drafts_in_ring(mask: Mask) -> int:
    """How many draft tokens a window's ring has slots for.

    They are half of the slots that no query sees. The other half allows another row to reuse a prefix that
    ends as many tokens earlier.
    """
    return (mask.ring - mask.window) // 2
