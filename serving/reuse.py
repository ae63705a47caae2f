"""How far a row can be rolled back, and how long a prefix of it another text can reuse.

Draft tokens that turn out wrong are taken back, and a new request reuses what a row has read of the same
prefix. A cache that keeps all tokens sets no limit to either. A ring overwrites its oldest tokens, so its
size and what a query sees set the limits. A state changes with each token: a row goes back by as many tokens
as its states have spare ones, and a text can go on from where a row has a state, now or in one of the places
in which serving/ keeps some.
"""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array

from model import Config, Mask, Recurrent

INT32_MAX = jnp.iinfo(jnp.int32).max


def with_room(cfg: Config, drafts: int | None = None, kept: int | None = None) -> Config:
    """The same model, whose rows can take back so many draft tokens, and keep states in so many places.

    None: as many as before.
    """
    given = {name: n for name, n in dict(spare=drafts, kept=kept).items() if n is not None}
    kinds = (
        dataclasses.replace(kind, mask=dataclasses.replace(kind.mask, **given))
        if isinstance(kind.mask, Recurrent)
        else kind
        for kind in cfg.layers
    )
    return dataclasses.replace(cfg, layers=tuple(kinds))


def places(masks: Iterable[Mask | Recurrent]) -> int:
    """In how many places the states of a row are kept; 0 if no layer has one."""
    return max((mask.kept for mask in masks if isinstance(mask, Recurrent)), default=0)


def goes_back(masks: Iterable[Mask | Recurrent]) -> bool:
    """Whether a row can take back the last token that it has read."""
    return all(mask.spare for mask in masks if isinstance(mask, Recurrent))


def rollback_limit(mask: Mask | Recurrent, length: Array) -> Array:
    """How many more tokens rows of these lengths may read so that all but the next can still be rolled back.

    [b] -> [b] int32.
    """
    if isinstance(mask, Recurrent):
        return jnp.full_like(length, 1 + mask.spare)
    if mask.ring is None:
        return jnp.full_like(length, INT32_MAX)
    if mask.window:
        return jnp.full_like(length, drafts_in_ring(mask))
    # Up to the end of the block: tokens of the next block would overwrite slots that this block's tokens need
    # after a rollback.
    return mask.ring - length % mask.ring


def reusable_prefix(mask: Mask | Recurrent, n: int, latest: int, states: Iterable[int] = ()) -> int:
    """How many of a row's first n tokens another row can reuse, when the row has read `latest` tokens.

    states: after how many tokens the row has states.
    """
    if isinstance(mask, Recurrent):
        return max((position for position in states if position <= n), default=0)
    first = mask.first_visible(n)
    if mask.ring is None:
        return n
    if mask.window:
        oldest = latest + drafts_in_ring(mask) - mask.ring  # older tokens may have been overwritten
        return n if first >= oldest else 0
    # Only the latest block is still there. Otherwise the prefix ends where the block of position n starts:
    # from there on a row sees no earlier block.
    return n if first == mask.first_visible(latest) else first


def drafts_in_ring(mask: Mask) -> int:
    """How many draft tokens a window's ring has slots for.

    They are half of the ring's spare slots. The other half lets another row reuse a prefix that ends up to
    that many tokens before the latest one.
    """
    return (mask.ring - mask.window) // 2
