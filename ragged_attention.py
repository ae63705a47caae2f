"""Attention over rows of unlike length: the reference, and the one place that picks an implementation.

Letters as in model.py: B rows, T queries, S cached slots, K key/value heads, G queries per key/value head,
H head width; here, uppercase, each is what this device has. Each function returns the pair (o, lse):

    o:   [B,T,K,G,H] float32, the attention output over the keys that this call saw
    lse: [B,T,K,G] float32, the natural log of the sum of exp(score) over them, -inf if it saw none

so that `merge` can join parts that were computed apart: blocks of one cache, a cache and the new tokens, or
the shards of a cache that is split over devices (Source: arXiv 2205.14135, section 3.1). A score is
q.k / sqrt(H).
"""

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 1024  # cached slots per step of the reference: bounds its scores to B·K·G·T·BLOCK floats


def attend(q: Array, k: Array, v: Array, mask: Array, k_scale=None, v_scale=None):
    """Attention of each query to the keys that its mask admits. What no query may see may be NaN.

    q: [B,T,K,G,H]. k, v: [B,K,S,H], float or int8 with scales [B,K,S]. mask: [B,T,S] bool.
    """
    mask = mask[:, None, None]  # BKGTS
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    if k_scale is not None:
        scores = scores * k_scale[:, :, None, None, :].astype(jnp.float32)
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.max(scores, -1, keepdims=True)
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    p = jnp.exp(scores - peak)
    total = jnp.sum(p, -1)
    if v_scale is not None:
        p = jnp.where(mask, p * v_scale[:, :, None, None, :].astype(jnp.float32), 0)
    # 0 * NaN is NaN: a slot that no query may see must not reach the product.
    v = jnp.where(jnp.any(mask, (1, 2, 3))[:, None, :, None], v, 0)
    # In float32, at the cost of a copy: XLA's CPU backend has no such product from bfloat16 to float32.
    o = jnp.einsum("BKGTS,BKSH->BTKGH", p, v.astype(jnp.float32))
    total = jnp.moveaxis(total, -1, 1)
    lse = jnp.moveaxis(peak[..., 0], -1, 1) + jnp.log(total)
    return o / jnp.where(total == 0, 1, total)[..., None], lse


def merge(*parts: tuple[Array, Array]):
    """Join partial attentions over disjoint keys: pairs (o, lse) -> (o, lse) over all of them."""
    o, lse = (jnp.stack(group) for group in zip(*parts, strict=True))
    peak = jnp.max(lse, 0)
    weight = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weight, 0)
    o = jnp.sum(o * weight[..., None], 0) / jnp.where(total == 0, 1, total)[..., None]
    return o, peak + jnp.log(total)


def attend_cached(q: Array, kv: Array, scale: Array | None, start: Array, length: Array):
    """Attention to the cached slots start <= s < length, a block at a time, as far as the longest row.

    q: [B,T,K,G,H]. kv: [B,K,2,S,H] (keys, values), float or int8 with scale [B,K,2,S].
    start: [B,T] int32, the first slot that each query sees. length: [B] int32, one past the last.
    """
    capacity = kv.shape[3]
    block = min(BLOCK, capacity)

    def attend_block(i):
        first = jnp.minimum(i * block, capacity - block)  # the last block may overlap the one before
        slots = first + jnp.arange(block)
        mask = (slots >= i * block) & (slots >= start[..., None]) & (slots < length[:, None, None])
        kv_block = jax.lax.dynamic_slice_in_dim(kv, first, block, 3)
        scales = (None, None)
        if scale is not None:
            scale_block = jax.lax.dynamic_slice_in_dim(scale, first, block, 3)
            scales = scale_block[:, :, 0], scale_block[:, :, 1]
        return attend(q, kv_block[:, :, 0], kv_block[:, :, 1], mask, *scales)

    def step(i, carry):
        return merge(carry, attend_block(i))

    if block == capacity:
        return attend_block(0)
    return jax.lax.fori_loop(1, jnp.max(length + block - 1) // block, step, attend_block(0))


def ragged_decode(q: Array, kv: Array, scale: Array | None, length: Array):
    """Decode attention: one query per row, over the row's first `length` slots.

    The model calls this, whatever computes it: so far the reference does, on every platform.

    q: [B,1,K,G,H]. kv: [B,K,2,S,H], float or int8 with scale [B,K,2,S]. length: [B] int32.
    """
    return attend_cached(q, kv, scale, jnp.zeros_like(length)[:, None], length)
