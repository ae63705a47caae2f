"""Attention over rows of different lengths: the reference, and the choice between it and the kernels.

Letters as in model.py: B rows, T queries, S cached slots, K key/value heads, G queries per key/value head,
H width of keys, C columns of a slot; all uppercase, as these are this device's sizes. Attention returns the
pair (o, lse):

    o:   [B,T,K,G,width of values] float32, the attention output over the keys that this call saw
    lse: [B,T,K,G] float32, the natural log of the sum of exp(score) over them, -inf if it saw none

so that `merge` can join partial results: of blocks of one cache, of a cache and the new tokens, or of the
shards of a cache that is split over devices (Source: arXiv 2205.14135, section 3.1).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh

from ops import cpu
from ops.gpu import flash, supports
from ops.kv_cache import KV, key_beside_value, map_slots
from ops.platform import on_cpu, on_gpu, on_tpu
from ops.tpu import LANES, put_slots, take_slots, varying
from ragged_attention import DECODE_BLOCKS, MASKED, ragged_attention_tpu

BLOCK = 1024  # cached slots per step of attend_cached
QUERIES = 64  # per step of attend: its scores are B·K·G·QUERIES·BLOCK floats
DECODE_BLOCK = 256  # slots per step if T = 1, so that few empty slots are read
CPU_BLOCK = 96 * 1024  # numbers in a row's block of slots on a CPU, where a core's cache should hold it
CPU_ROWS = 2  # that a CPU attends to side by side: more would occupy more cores, and read more empty slots
FEW_QUERIES = 128  # T·G, queries per key/value head, up to which the decode kernel is used
FLASH = (64, 128)  # widths of keys that the GPU's kernel supports


def attend(q: Array, kv: KV, mask: Array, in_place: bool = False):
    """Attention of each query to the keys that its mask admits. Slots that no query sees may hold NaN.

    q: [B,T,K,G,H]. kv: S slots. mask: [B,T,S] bool. in_place: T is 1, and keys and values are not copied: a
    CPU may read them by loops of its own (see cpu.py); else all columns of a slot are used as key and as
    value, for more arithmetic.
    """
    B, T, _, G, H = q.shape
    by_loops = in_place and on_cpu() and cpu.reads_in_place(G, H)
    if T > QUERIES and T % QUERIES == 0:  # a part at a time: the scores of all are slow to write and read
        parts = (x.reshape(B, -1, QUERIES, *x.shape[2:]).swapaxes(0, 1) for x in (q, mask))
        parts = lax.map(lambda part: attend(part[0], kv, part[1]), tuple(parts))
        return tuple(x.swapaxes(0, 1).reshape(B, T, *x.shape[3:]) for x in parts)
    k, v, k_scale, v_scale = keys_and_values(kv)
    # 0 * NaN is NaN: a slot that no query may see must not reach the second product.
    seen = jnp.any(mask, 1)[:, None, :, None]
    whole = in_place and not by_loops
    if whole:
        k = v = jnp.where(seen, kv.values, 0)
        q = jnp.pad(q, [(0, 0)] * 4 + [(0, k.shape[-1] - H)])
    else:
        v = jnp.where(seen, v, 0)
    mask = mask[:, None, None]  # BKGTS
    if by_loops:
        scores = cpu.scores(q[:, 0], k)[:, :, :, None]
    else:
        dtype = jnp.promote_types(q.dtype, k.dtype)
        q, k = q.astype(dtype), k.astype(dtype)
        scores = jnp.einsum("BTKGH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores *= kv.layout.scale
    if k_scale is not None:
        scores = scores * k_scale[:, :, None, None, :].astype(jnp.float32)
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.max(scores, -1, keepdims=True)
    peak = jnp.where(peak == -jnp.inf, 0, peak)
    p = jnp.exp(scores - peak)
    total = jnp.sum(p, -1)
    if v_scale is not None:
        p = jnp.where(mask, p * v_scale[:, :, None, None, :].astype(jnp.float32), 0)
    if by_loops:
        o = cpu.weighted_sum(p[:, :, :, 0], v)[:, None]
    else:
        # In float32, at the cost of a copy: XLA's CPU backend has no such product from bfloat16 to float32.
        o = jnp.einsum("BKGTS,BKSH->BKGTH", p, v.astype(jnp.float32)).transpose(0, 3, 1, 2, 4)
    total = jnp.moveaxis(total, -1, 1)
    lse = jnp.moveaxis(peak[..., 0], -1, 1) + jnp.log(total)
    o = o[..., slice(*kv.layout.value)] if whole else o
    return o / jnp.where(total == 0, 1, total)[..., None], lse


def merge(*parts: tuple[Array, Array]):
    """Join partial attentions over disjoint keys: pairs (o, lse) -> (o, lse) over all of them."""
    if len(parts) == 1:
        return parts[0]
    if not on_cpu():
        return merge_stacked(*(jnp.stack(group) for group in zip(*parts, strict=True)))
    # A CPU would write the stacked parts to memory, in each round of a loop over blocks.
    peak = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    finite = jnp.where(peak == -jnp.inf, 0, peak)
    weights = [jnp.exp(lse - finite) for _, lse in parts]
    total = sum(weights)
    o = sum(o * weight[..., None] for (o, _), weight in zip(parts, weights, strict=True))
    return o / jnp.where(total == 0, 1, total)[..., None], peak + jnp.log(total)


def merge_stacked(o: Array, lse: Array):
    """`merge` of partial results that are stacked along a first axis."""
    peak = jnp.max(lse, 0)
    weight = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weight, 0)
    o = jnp.sum(o * weight[..., None], 0) / jnp.where(total == 0, 1, total)[..., None]
    return o, peak + jnp.log(total)


def write(kv: KV, new: KV, place: Array, row: Array | None = None, window: int = 1, ring: bool = False) -> KV:
    """Put T new tokens per row, values [B,K,T,C], into the slots place [B,T]; nowhere if that is S.

    row: [B] int32, the rows of the cache; None: all, in order. window: a row's places lie within this many
    slots; in a ring, those before its end and those after its start each do.
    """
    row = jnp.arange(place.shape[0]) if row is None else row
    if on_tpu():
        if not ring:
            return write_window(kv, new, place, row, window)
        first = jnp.take_along_axis(place, jnp.argmax(place < kv.values.shape[2], 1, keepdims=True), 1)
        before_end = jnp.where(place >= first, place, kv.values.shape[2])
        after_end = jnp.where(place < first, place, kv.values.shape[2])
        kv = write_window(kv, new, before_end, row, window)
        return write_window(kv, new, after_end, row, window)

    # One row per index: a wider scatter window makes XLA copy the whole cache.
    def put(axis: int, cache: Array, new: Array) -> Array:
        heads = math.prod(cache.shape[1:axis])  # of keys, of values, and of the scales of each
        rows = cache.reshape(-1, *cache.shape[axis:])
        new = new.astype(cache.dtype).reshape(-1, place.shape[1], *rows.shape[2:])
        to = (row[:, None] * heads + jnp.arange(heads)).reshape(-1, 1)
        return rows.at[to, jnp.repeat(place, heads, 0)].set(new, mode="drop").reshape(cache.shape)

    return map_slots(put, kv, new)


def write_window(kv: KV, new: KV, place: Array, row: Array, window: int) -> KV:
    """`write` on a TPU: read the slots around each row's places, put the tokens in, and write them back.

    To scatter into an int8 array, or to slice it at a position known only at run time, XLA would first copy
    the whole array into another layout.
    """
    blocks = kv.values.shape[2] // LANES
    n = min(pl.cdiv(window, LANES) + 1, blocks)
    first = jnp.minimum(jnp.min(place, 1) // LANES, blocks - n)
    slots = first[:, None] * LANES + jnp.arange(n * LANES)
    matches = place[:, None] == slots[..., None]  # [B,slots,T]
    token, written = jnp.argmax(matches, 2)[:, None], jnp.any(matches, 2)[:, None]  # [B,1,slots]

    def put(axis: int, cache: Array, new: Array) -> Array:
        index, mask = (jnp.expand_dims(x, 5 - axis) for x in (token, written))  # the axis that is not slots
        new = jnp.take_along_axis(new, index, axis).astype(cache.dtype)
        merged = jnp.where(mask, new, take_slots(cache, row, first, LANES, n, axis))
        return put_slots(cache, merged, row, first, LANES, axis)

    return map_slots(put, kv, new)


def read_block(kv: KV, row: Array | None, rows: int, i: Array, block: int) -> tuple[KV, Array]:
    """Block i of so many rows, and the slots that it holds; the last block may overlap the one before.

    row: as of `attend_cached`.
    """
    S = kv.values.shape[2]
    if on_tpu() and (block < S or row is not None):
        row = jnp.arange(rows) if row is None else row
        at = jnp.full(row.shape, i)
        part = map_slots(lambda axis, x: take_slots(x, row, at, block, 1, axis), kv)
        return part, i * block + jnp.arange(block)
    first = jnp.minimum(i * block, S - block) if block < S else 0

    def read(axis: int, x: Array) -> Array:
        def neighbors(row: Array | int, rows: int) -> Array:
            starts, sizes = [row, *[0] * (x.ndim - 1)], [rows, *x.shape[1:]]
            starts[axis], sizes[axis] = first, block
            return lax.dynamic_slice(x, starts, sizes)

        if row is None or row.ndim == 0:
            return neighbors(0 if row is None else row, rows)
        return jnp.concatenate([neighbors(r, 1) for r in row])

    return map_slots(read, kv), first + jnp.arange(block)


def block_size(kv: KV, T: int) -> int:
    """How many cached slots of a row `attend_cached` reads at a time for T queries."""
    _, K, S, C = kv.values.shape
    if T > 1 or not on_cpu():
        return min(BLOCK if T > 1 else DECODE_BLOCK, S)
    slots = min(max(CPU_BLOCK // (K * C), cpu.TERMS), S)
    return slots - slots % cpu.TERMS or S  # which `cpu.weighted_sum` divides into equal parts


def attend_cached(
    q: Array, kv: KV, length: Array, gap: tuple[Array, Array] | None = None, row: Array | None = None
):
    """Attention to the first `length` cached slots, a block at a time, as far as the longest row; few queries
    on a TPU by `ragged_attention_tpu`, each row as far as it is filled, and one query on a CPU: each pair of
    rows as far as the longer one.

    q: [B,T,K,G,H]. length: [B,T] int32, of each query; without `gap`, the queries of a row that see any
    slots see the same. gap: (from, to), [B,T] int32 each: slots that a query does not see. row: [B] int32,
    the rows of the cache; without it, all, in order; a scalar, on a CPU: the first of B neighbors.
    """
    B, T, _, G, H = q.shape
    S, sees, longest = kv.values.shape[2], length > 0, jnp.max(length, 1)
    block = block_size(kv, T)
    if use_ragged(kv) and T * G <= FEW_QUERIES:
        if gap is None or T == 1:
            gap = jax.tree.map(lambda x: x[:, 0], gap)
            (o, lse), _ = ragged_attention_tpu(q, kv, longest, gap, row)
        else:  # each query as a row of its own, for each sees other slots
            row = jnp.repeat(jnp.arange(B) if row is None else row, T)
            one = jax.tree.map(lambda x: x.reshape(B * T, *x.shape[2:]), (length, gap))
            (o, lse), _ = ragged_attention_tpu(q.reshape(B * T, 1, *q.shape[2:]), kv, *one, row)
            o, lse = (x.reshape(B, T, *x.shape[2:]) for x in (o, lse))
        return jnp.where(sees[..., None, None, None], o, 0), jnp.where(sees[..., None, None], lse, -jnp.inf)
    if use_flash(q, kv):
        kv = kv if row is None else jax.tree.map(lambda x: x[row], kv)
        begin = jnp.zeros_like(length)
        ranges = [(begin, length)]
        if gap is not None:
            ranges = [(begin, jnp.minimum(length, gap[0])), (gap[1], length)]
        parts = [flash(q, kv.values, kv.scale, *seen) for seen in ranges]
        return merge_stacked(*map(jnp.concatenate, zip(*parts, strict=True)))

    side_by_side = math.gcd(B, CPU_ROWS) if cpu.reads_in_place(G, H) else 1
    if T == 1 and on_cpu() and B > side_by_side:
        first = jnp.arange(0, B, side_by_side) if row is None else row.reshape(-1, side_by_side)
        groups = jax.tree.map(lambda x: x.reshape(-1, side_by_side, *x.shape[1:]), (q, length, gap))
        o, lse = lax.map(lambda x: attend_cached(x[0], kv, *x[1:]), (*groups, first))
        return o.reshape(B, *o.shape[2:]), lse.reshape(B, *lse.shape[2:])

    def attend_block(i):
        part, slots = read_block(kv, row, B, i, block)
        filled = (slots >= i * block) & (slots < longest[:, None])  # BS
        if use_splash(q) and gap is None:
            k, v = (jnp.where(filled[:, None, :, None], x, 0).astype(q.dtype) for x in dequantized(part))
            segments = jnp.where(sees, 1, 2), filled.astype(jnp.int32)
            return splash(q, k, v, kv.layout.scale, masks.FullMask((T, block)), *segments)
        mask = (slots < length[..., None]) & filled[:, None]  # BTS
        if gap is not None:
            mask &= (slots < gap[0][..., None]) | (slots >= gap[1][..., None])
        return attend(q, part, mask, in_place=T == 1)

    def step(i, carry):
        return merge(carry, attend_block(i))

    n_blocks = (jnp.max(length) + block - 1) // block
    if T == 1:
        return lax.fori_loop(1, n_blocks, step, attend_block(0)) if S > block else attend_block(0)
    nothing = jnp.zeros((*q.shape[:-1], kv.layout.value_width)), jnp.full(q.shape[:-1], -jnp.inf)
    return lax.fori_loop(0, n_blocks, step, lax.pcast(nothing, tuple(varying(q, kv.values)), to="varying"))


def attend_causal(q: Array, kv: KV, segment: Array, window: int | None = None):
    """Attention among T consecutive tokens: to itself and those before, in the same segment and window.

    q: [B,T,K,G,H]. kv: values [B,K,T,C]. segment: [B,T] int32, each without gaps. window: of positions, the
    own one counted.
    """
    T = q.shape[1]
    if use_flash(q, kv):
        i = jnp.arange(T)
        low = lax.cummax(jnp.where(segment == jnp.roll(segment, 1, 1), 0, i), 1)  # where its segment begins
        low = low if window is None else jnp.maximum(low, i - window + 1)
        high = jnp.broadcast_to(i + 1, segment.shape)
        return merge_stacked(*flash(q, kv.values, kv.scale, low, high))
    if use_splash(q):
        k, v = (x.astype(q.dtype) for x in dequantized(kv))
        shape = (T, T)
        mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
        return splash(q, k, v, kv.layout.scale, mask, segment, segment)
    back = jnp.arange(T)[:, None] - jnp.arange(T)
    mask = (back >= 0) & (back < (window or T)) & (segment[:, :, None] == segment[:, None])
    return attend(q, kv, mask)


def declares_vma(mesh: Mesh, T: int) -> bool:
    """Whether shard_map can check that every psum is there, for a program that attends with T queries.

    It cannot on TPUs if LANES divides T: jax's splash attention kernel, which attends then, does not declare
    over which mesh axes its result varies.
    """
    return T % LANES != 0 or not on_tpu(mesh)


def keys_and_values(kv: KV) -> tuple[Array, Array, Array | None, Array | None]:
    """Keys [B,K,S,H] and values, and their scales [B,K,S], if there are any."""
    scales = (None, None) if kv.scale is None else (kv.scale[:, :, 0], kv.scale[:, :, 1])
    return kv.values[..., : kv.layout.key], kv.values[..., slice(*kv.layout.value)], *scales


def dequantized(kv: KV) -> tuple[Array, Array]:
    """Keys and values in float32."""
    k, v, *scales = keys_and_values(kv)
    factors = (1 if s is None else s[..., None].astype(jnp.float32) for s in scales)
    return tuple(x.astype(jnp.float32) * factor for x, factor in zip((k, v), factors, strict=True))


def use_flash(q: Array, kv: KV) -> bool:
    H = q.shape[-1]
    return on_gpu() and H in FLASH and kv.layout == key_beside_value(H) and supports(kv.values)


def use_splash(q: Array) -> bool:
    return on_tpu() and q.shape[1] % LANES == 0


def use_ragged(kv: KV) -> bool:
    return on_tpu() and (kv.values.shape[3], kv.values.dtype.itemsize) in DECODE_BLOCKS


def splash(
    q: Array, k: Array, v: Array, scale: float, mask, q_segment: Array, kv_segment: Array, interpret=False
):
    """jax's flash attention for TPUs: each query to the keys of its segment that `mask` admits.

    q: [B,T,K,G,H]. k, v: [B,K,S,H], without NaN. scale: the factor of scores. q_segment: [B,T], kv_segment:
    [B,S] int32.
    """
    T, G, S = q.shape[1], q.shape[3], k.shape[2]
    block_q, block_kv = math.gcd(T, 512), math.gcd(S, 1024)
    kernel = splash_attention.make_splash_mqa(
        masks.MultiHeadMask([mask] * G),
        block_sizes=splash_attention.BlockSizes(block_q, block_kv, block_kv),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )

    def per_head(q: Array, k: Array, v: Array, q_segment: Array, kv_segment: Array):
        o, (lse,) = kernel(q, k, v, splash_attention.SegmentIds(q_segment, kv_segment))
        return o, lse

    q = (q * scale).transpose(0, 2, 3, 1, 4)  # BKGTH
    per_row = jax.vmap(per_head, (0, 0, 0, None, None))
    o, lse = jax.vmap(per_row)(q.astype(k.dtype), k, v, q_segment, kv_segment)
    lse = jnp.where(lse < MASKED / 2, -jnp.inf, lse).transpose(0, 3, 1, 2)
    return jnp.where(lse[..., None] == -jnp.inf, 0, o.astype(jnp.float32).transpose(0, 3, 1, 2, 4)), lse


def ragged_decode(q: Array, new: KV, kv: KV, length: Array, place: Array, gap=None, row=None):
    """Write one new token per row, then attend to the row's first `length` slots: -> (o, lse), KV.

    q: [B,1,K,G,H]. new: the token as the cache stores it, values [B,K,1,C]. place: [B,1] int32, its slot, or
    S if another device holds it. length, gap, row: see `attend_cached`; the new token is among the slots that
    are attended to. Slots in its tile of 32 that are not attended to may become zeros.
    """
    if use_ragged(kv):
        length, place, gap = jax.tree.map(lambda x: x[:, 0], (length, place, gap))
        return ragged_attention_tpu(q, kv, length, gap, row, new=new, place=place)
    kv = write(kv, new, place, row)
    return attend_cached(q, kv, length, gap, row), kv
