"""Attention over rows of different lengths: the reference, which runs on every platform.

../ragged_attention.py chooses between these functions and the kernels that a platform has in cpu.py,
gpu_attention.py, tpu.py and ../ragged_attention.py. Letters as in model.py: B rows, T queries, S cached
slots, K key/value heads, G queries per key/value head, H width of keys, C columns of a slot; all uppercase,
as these are this device's sizes. Attention returns the pair (o, lse):

    o:   [B,T,K,G,width of values] float32, the attention output over the keys that this call saw; of the
         kernel for GPUs it has the queries' type
    lse: [B,T,K,G] float32, the natural log of the sum of exp(score) over them, -inf if it saw none

so that `merge` can join partial results: of blocks of one cache, of a cache and the new tokens, or of the
shards of a cache that is split over devices (Source: arXiv 2205.14135, section 3.1).
"""

import functools
import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from ops.kv_cache import KV, SlotLayout, map_slots
from ops.platform import varying

BLOCK = 1024  # cached slots per step of attend_cached
QUERIES = 64  # per step of attend_in_parts: its scores are B·K·G·QUERIES·BLOCK floats
DECODE_BLOCK = 256  # slots per step if T = 1, so that few empty slots are read
MASKED = -1e30  # in kernels: a score whose exponential is 0, without the NaN of inf - inf


def scores(q: Array, k: Array) -> Array:
    """[B,T,K,G,H], [B,K,S,H] -> [B,K,G,T,S] float32."""
    dtype = jnp.promote_types(q.dtype, k.dtype)
    q, k = q.astype(dtype), k.astype(dtype)
    return jnp.einsum("BTKGH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32)


def weighted_sum(p: Array, v: Array) -> Array:
    """[B,K,G,T,S] float32, [B,K,S,H] -> [B,T,K,G,H] float32."""
    # In float32, at the cost of a copy: XLA's CPU backend has no such product from bfloat16 to float32.
    return jnp.einsum("BKGTS,BKSH->BKGTH", p, v.astype(jnp.float32)).transpose(0, 3, 1, 2, 4)


def attend(q: Array, kv: KV, mask: Array, scores: Callable = scores, weighted_sum=weighted_sum, clean=False):
    """Attention of each query to the keys that its mask admits. Slots that no query sees may hold NaN.

    q: [B,T,K,G,H]. kv: S slots. mask: [B,T,S] bool. scores, weighted_sum: the two products. clean: no slot
    holds NaN.
    """
    k, v, k_scale, v_scale = keys_and_values(kv)
    if not clean:  # 0 * NaN is NaN: a slot that no query may see must not reach the second product
        v = jnp.where(jnp.any(mask, 1)[:, None, :, None], v, 0)
    mask = mask[:, None, None]  # BKGTS
    s = scores(q, k) * kv.layout.scale
    if k_scale is not None:
        s = s * k_scale[:, :, None, None, :].astype(jnp.float32)
    s = jnp.where(mask, s, -jnp.inf)
    peak = jnp.max(s, -1, keepdims=True)
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    p = jnp.exp(s - peak)
    total = jnp.moveaxis(jnp.sum(p, -1), -1, 1)  # BTKG
    lse = jnp.moveaxis(peak[..., 0], -1, 1) + jnp.log(total)
    if v_scale is not None:
        p = jnp.where(mask, p * v_scale[:, :, None, None, :].astype(jnp.float32), 0)
    return weighted_sum(p, v) / jnp.where(total == 0, 1, total)[..., None], lse


def attend_whole_slots(q: Array, kv: KV, mask: Array):
    """`attend` with all columns of a slot as key and as value: more arithmetic, but XLA copies neither."""
    C = kv.values.shape[-1]
    q = jnp.pad(q, [(0, 0)] * 4 + [(0, C - q.shape[-1])])
    values = jnp.where(jnp.any(mask, 1)[:, None, :, None], kv.values, 0)  # see `attend`
    slots = KV(values, kv.scale, SlotLayout(C, (0, C), kv.layout.scale))
    o, lse = attend(q, slots, mask, clean=True)
    return o[..., slice(*kv.layout.value)], lse


def attend_in_parts(q: Array, kv: KV, mask: Array):
    """`attend` of a few queries at a time: the scores of all are slow to write and read."""
    B, T = q.shape[:2]
    if T <= QUERIES or T % QUERIES:
        return attend(q, kv, mask)
    parts = tuple(x.reshape(B, -1, QUERIES, *x.shape[2:]).swapaxes(0, 1) for x in (q, mask))
    parts = lax.map(lambda part: attend(part[0], kv, part[1]), parts)
    return tuple(x.swapaxes(0, 1).reshape(B, T, *x.shape[3:]) for x in parts)


def merge(*parts: tuple[Array, Array], stacked: bool = False):
    """Join partial attentions over disjoint keys: pairs (o, lse) -> (o, lse) over all of them.

    stacked: each pair is a stack of several, along a first axis.
    """

    def over(reduce: Callable, x: Array) -> Array:
        return reduce(x, 0) if stacked else x

    peak = functools.reduce(jnp.maximum, (over(jnp.max, lse) for _, lse in parts))
    finite = jnp.where(peak == -jnp.inf, 0, peak)
    weighted = [(o, jnp.exp(lse - finite)) for o, lse in parts]
    total = sum(over(jnp.sum, weight) for _, weight in weighted)
    o = sum(over(jnp.sum, o * weight[..., None]) for o, weight in weighted)
    return o / jnp.where(total == 0, 1, total)[..., None], peak + jnp.log(total)


def attend_cached(
    q: Array, kv: KV, length: Array, gap: tuple[Array, Array] | None = None, row: Array | None = None
):
    """Attention to the first `length` cached slots of each row, a block at a time: -> (o, lse).

    q: [B,T,K,G,H]. length: [B,T] int32, of each query; without `gap`, the queries of a row that see any
    slots see the same. gap: (from, to), [B,T] int32 each: slots that a query does not see. row: [B] int32,
    the rows of the cache; without it, all, in order.
    """
    T, S = q.shape[1], kv.values.shape[2]
    block = min(BLOCK if T > 1 else DECODE_BLOCK, S)
    runs = [(0, q.shape[0])] if row is None else [(r, 1) for r in row]
    return attend_blocks(q, kv, length, gap, block, partial(read_block, kv, runs, block))


def attend_blocks(
    q: Array, kv: KV, length: Array, gap, block: int, read: Callable, attend: Callable | None = None
):
    """`attend_cached` block by block, as far as the longest row is filled.

    read: the number of a block -> a KV, and the slots that it holds. attend: of one block, (KV, mask
    [B,T,block], filled [B,block], the slots that some query of the row sees) -> (o, lse).
    """
    T, longest = q.shape[1], jnp.max(length, 1)[:, None]

    def attend_all(part: KV, mask: Array, filled: Array):
        return attend_whole_slots(q, part, mask) if T == 1 else attend_in_parts(q, part, mask)

    def attend_block(i):
        part, slots = read(i)
        filled = (slots >= i * block) & (slots < longest)
        mask = (slots < length[..., None]) & filled[:, None]  # BTS
        if gap is not None:
            mask &= (slots < gap[0][..., None]) | (slots >= gap[1][..., None])
        return (attend or attend_all)(part, mask, filled)

    def step(i, carry):
        return merge(carry, attend_block(i))

    n_blocks = (jnp.max(length) + block - 1) // block
    if T == 1:
        first = attend_block(0)
        return lax.fori_loop(1, n_blocks, step, first) if kv.values.shape[2] > block else first
    nothing = jnp.zeros((*q.shape[:-1], kv.layout.value_width)), jnp.full(q.shape[:-1], -jnp.inf)
    return lax.fori_loop(0, n_blocks, step, lax.pcast(nothing, tuple(varying(q, kv.values)), to="varying"))


def read_block(kv: KV, runs: list, block: int, i: Array) -> tuple[KV, Array]:
    """Block i of some rows, and the slots that it holds; the last block may overlap the one before.

    runs: pairs (first row, number of rows), for rows that lie side by side.
    """
    S = kv.values.shape[2]
    first = jnp.minimum(i * block, S - block) if block < S else 0

    def read(axis: int, x: Array) -> Array:
        def read_run(row: Array | int, rows: int) -> Array:
            starts, sizes = [row, *[0] * (x.ndim - 1)], [rows, *x.shape[1:]]
            starts[axis], sizes[axis] = first, block
            return lax.dynamic_slice(x, starts, sizes)

        return jnp.concatenate([read_run(*run) for run in runs])

    return map_slots(read, kv), first + jnp.arange(block)


def attend_causal(q: Array, kv: KV, segment: Array, window: int | None = None):
    """Attention among T consecutive tokens: to itself and those before, in the same segment and window.

    q: [B,T,K,G,H]. kv: values [B,K,T,C]. segment: [B,T] int32, each without gaps. window: of positions, the
    own one counted.
    """
    T = q.shape[1]
    back = jnp.arange(T)[:, None] - jnp.arange(T)
    mask = (back >= 0) & (back < (window or T)) & (segment[:, :, None] == segment[:, None])
    return attend_in_parts(q, kv, mask)


def write(kv: KV, new: KV, place: Array, row: Array | None = None, window: int = 1, ring: bool = False) -> KV:
    """Put T new tokens per row, values [B,K,T,C], into the slots place [B,T]; nowhere if that is S.

    row: [B] int32, the rows of the cache; None: all, in order. window: a row's places lie within this many
    slots; in a ring, those before its end and those after its start each do.
    """
    row = jnp.arange(place.shape[0]) if row is None else row

    # One row per index: a wider scatter window makes XLA copy the whole cache.
    def put(axis: int, cache: Array, new: Array) -> Array:
        heads = math.prod(cache.shape[1:axis])  # of keys, of values, and of the scales of each
        rows = cache.reshape(-1, *cache.shape[axis:])
        new = new.astype(cache.dtype).reshape(-1, place.shape[1], *rows.shape[2:])
        to = (row[:, None] * heads + jnp.arange(heads)).reshape(-1, 1)
        return rows.at[to, jnp.repeat(place, heads, 0)].set(new, mode="drop").reshape(cache.shape)

    return map_slots(put, kv, new)


def keys_and_values(kv: KV) -> tuple[Array, Array, Array | None, Array | None]:
    """Keys [B,K,S,H] and values, and their scales [B,K,S], if there are any."""
    scales = (None, None) if kv.scale is None else (kv.scale[:, :, 0], kv.scale[:, :, 1])
    return kv.values[..., : kv.layout.key], kv.values[..., slice(*kv.layout.value)], *scales
