"""Attention for GPUs that never writes its scores.

Several programs of `flash` may compute one output, each over a part of the slots; `merge_parts` merges them.
Letters as in model.py, uppercase for this device's share.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ops import attention, gpu
from ops.attention import MASKED
from ops.gpu import dot
from ops.kv_cache import KV, key_beside_value
from ops.tpu import result

BLOCK = 64  # slots that a program of `flash` reads at a time
LARGE_BLOCK = 128  # the same, of many queries and a cache in 16 bits: more would not fit into registers
WIDTHS = (64, 128)  # of keys, that `flash` supports
MERGED = 8192  # numbers in a program of `merge_parts`; of MOST_PARTS of width 128 twice as many
MOST_PARTS = 128  # in which programs of `flash` divide the slots that a tile of queries sees


def attend_cached(q: Array, kv: KV, length: Array, gap=None, row: Array | None = None):
    """`attention.attend_cached` by `flash`, if supported. The queries of a row may see different slots."""
    if not by_flash(q, kv):
        return attention.attend_cached(q, kv, length, gap, row)
    return flash(q, kv, cached_bounds(length, gap), row)[0]


def decode(q: Array, new: KV, kv: KV, length: Array, place: Array, gap=None, row: Array | None = None):
    """`ragged_attention.ragged_decode` by `flash`, which must support it."""
    return flash(q, kv, cached_bounds(length, gap), row, new, place)


def attend_causal(q: Array, kv: KV, segment: Array, window: int | None = None):
    """`attention.attend_causal` by `flash`, where it is supported."""
    if not by_flash(q, kv):
        return attention.attend_causal(q, kv, segment, window)
    i = jnp.arange(q.shape[1])
    low = lax.cummax(jnp.where(segment == jnp.roll(segment, 1, 1), 0, i), 1)  # where its segment begins
    low = low if window is None else jnp.maximum(low, i - window + 1)
    high = jnp.broadcast_to(i + 1, segment.shape)
    return flash(q, kv, (low, high))[0]


def by_flash(q: Array, kv: KV) -> bool:
    H = q.shape[-1]
    return H in WIDTHS and kv.layout == key_beside_value(H) and gpu.supports(kv.values)


def cached_bounds(length: Array, gap: tuple[Array, Array] | None) -> tuple[Array, ...]:
    """`flash`'s bounds of queries that see the first `length` slots except those in the gap."""
    if gap is None:
        return jnp.zeros_like(length), length
    low = jnp.where(gap[0] <= 0, gap[1], 0)  # a ring that does not wrap around has its gap at the beginning
    return low, length, *gap


def flash(
    q: Array, kv: KV, bounds: tuple[Array, ...], row: Array | None = None,
    new: KV | None = None, place: Array | None = None,
) -> tuple[tuple[Array, Array], KV | None]:  # fmt: skip
    """Attention of each query to the slots low <= s < high, except those of a gap: -> (o, lse), the cache.

    q: [B,T,K,G,H]. bounds: low and high, and where the gap begins and ends, if there is one; [B,T] int32
    each. row: [B] int32, the rows of the cache; without it, all, in order. A tile of queries reads the slots
    from its smallest low to its largest high, each part an equal share of them.
    new, place: a token of each row, values [B,K,1,C], that is written to a slot, [B,1] int32, which its
    queries see; nowhere if that is S. Without them the cache is None.
    """
    B, T, K, G, H = q.shape
    S = kv.values.shape[2]
    R, N = B * K, T * G
    rows = min(128, max(16, pl.next_power_of_2(N)))
    tiles = pl.cdiv(N, rows)
    in_16_bits = q.dtype.itemsize == kv.values.dtype.itemsize == 2
    block = LARGE_BLOCK if rows == 128 and in_16_bits else BLOCK
    parts = previous_power_of_2(min(gpu.PROGRAMS // (R * tiles), pl.cdiv(S, block), MOST_PARTS))
    low, high, *gap = bounds
    limits = [low, jnp.minimum(high, S), *gap]
    heads = None if row is None else (row[:, None] * K + jnp.arange(K)).reshape(R).astype(jnp.int32)
    cache, new = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (kv, new))
    vectors, scale = q.swapaxes(1, 2).reshape(R, N, H), None
    if new is not None:
        # A token stands behind its row's queries: XLA makes all of them in one kernel. int8 is exact there.
        token, scale = new.values.reshape(R, 2, H), new.scale
        dtype = q.dtype if scale is not None else jnp.promote_types(q.dtype, token.dtype)
        vectors = jnp.concatenate([vectors.astype(dtype), token.astype(dtype)], 1)
        limits.append(place)
    inputs = vectors, cache, jnp.repeat(jnp.stack(limits), G, 2), heads, scale
    arrays = jax.tree.leaves(inputs)
    written = None if new is None else jax.tree.map(lambda x: result(x.shape, x.dtype, *arrays), cache)
    o, lse, written = pl.pallas_call(
        partial(_flash, rows=rows, parts=parts, block=block),
        grid=(tiles, parts, R),
        out_shape=(
            result((parts, R, N, H), q.dtype if parts == 1 else jnp.float32, *arrays),
            result((parts, R, N), jnp.float32, *arrays),
            written,
        ),
        input_output_aliases={1 + i: 2 + i for i in range(len(jax.tree.leaves(written)))},
        compiler_params=gpu.CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=2),
        name="flash",
    )(*inputs)
    o, lse = (o[0], lse[0]) if parts == 1 else merge_parts(o, lse, q.dtype)
    o, lse = (x.reshape(B, K, T, G, *x.shape[2:]).swapaxes(1, 2) for x in (o, lse))
    return (o, lse), None if new is None else jax.tree.map(lambda x, like: x.reshape(like.shape), written, kv)


def previous_power_of_2(n: int) -> int:
    return 1 << max(1, n).bit_length() - 1


def _flash(
    vectors, cache: KV, limits, heads, scale, o, lse, written: KV | None, *,
    rows: int, parts: int, block: int,
):  # fmt: skip
    """The kernel: one tile of queries, one part of the slots that they see, one row and key/value head.

    vectors: the queries, and behind them the key and the value of a new token. limits: the bounds, and the
    token's place. scale: those of the token, if the cache is int8. written: the cache's memory again.
    """
    (_, R, N, H), B = o.shape, limits.shape[1]
    part, r = pl.program_id(1), pl.program_id(2)
    b, head = lax.div(r, R // B), r if heads is None else heads[r]
    tile = pl.ds(pl.program_id(0) * rows, rows)
    used = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0) < N
    limit = (limits.at[jnp.int32(i), b, tile] for i in range(limits.shape[0]))
    low, high, *more = (gpu.load(x, mask=used, other=0) for x in limit)
    gap, place = (more, None) if written is None else (more[:-1], jnp.max(more[-1]))
    seen = low < high
    end = jnp.max(jnp.where(seen, high, 0))
    begin = jnp.min(jnp.where(seen, low, end))
    first, last = lax.div(begin, block), lax.div(end + block - 1, block)
    share = lax.div(last - first + parts - 1, parts)
    first = first + part * share
    last = jnp.minimum(first + share, last)
    dtype = jnp.promote_types(vectors.dtype, cache.dtype)
    query = gpu.load(vectors.at[r, tile], mask=used[:, None], other=0).astype(dtype)
    unit = H**-0.5 * math.log2(math.e)  # the kernel works with exp2
    if gap:
        nobody_from = jnp.max(jnp.where(seen, gap[0], 0))
        nobody_to = jnp.min(jnp.where(seen, gap[1], end))
        whole_from = whole_to = last
    else:  # blocks of which all queries that see anything see every slot need no mask
        whole_from = jnp.clip(pl.cdiv(jnp.max(jnp.where(seen, low, 0)), block), first, last)
        whole_to = jnp.clip(lax.div(jnp.min(jnp.where(seen, high, end)), block), whole_from, last)

    peak, total, acc = jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((rows, H))
    if written is not None:
        whole_to = jnp.clip(lax.div(place, block), whole_from, whole_to)
        key, value = (vectors[r, pl.ds(N + which, 1)] for which in range(2))
        # No other part reads the token's slot. The last block may go beyond the cache, where S is no slot.
        own = (first * block <= place) & (place < jnp.minimum(last * block, cache.values.shape[1]))

        @pl.when(own)
        def _():
            for which, x in enumerate((key, value)):
                written.values[head, place, pl.ds(which * H, H)] = x[0].astype(cache.dtype)
            if scale is not None:
                written.scale[head, :, place] = scale[r, :, 0]

        # The part that writes the token begins with it, and need not read it.
        factors = (1, 1) if scale is None else [scale[r, which, 0].astype(jnp.float32) for which in range(2)]
        score = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), 1) * (unit * factors[0])
        peak, total = jnp.where(own, score, peak), jnp.where(own, 1, total)
        acc = jnp.where(own, value.astype(jnp.float32) * factors[1], acc)

    def step(i, state, masked: bool):
        peak, total, acc = state
        at = i * block
        slots = at + lax.broadcasted_iota(jnp.int32, (block,), 0)
        inside = (slots >= begin) & (slots < end)  # what is outside may be NaN
        visible = (slots >= low[:, None]) & (slots < high[:, None])
        if gap:
            inside &= (slots < nobody_from) | (slots >= nobody_to)
            visible &= (slots < gap[0][:, None]) | (slots >= gap[1][:, None])
        if written is not None:
            inside, visible = inside & (slots != place), visible & (slots != place)

        def read(which: int) -> Array:
            """A block of keys, 0, or of values, 1: [block,H]."""
            x = cache.values.at[head, pl.ds(at, block), pl.ds(which * H, H)]
            return load_some(x, inside[:, None] if masked else None).astype(dtype)

        def factor(which: int) -> Array:
            """Their scales: [1,block]."""
            x = cache.scale.at[head, pl.ds(which, 1), pl.ds(at, block)]
            return load_some(x, inside[None] if masked else None).astype(jnp.float32)

        scores = dot(query, read(0).T) * unit
        if cache.scale is not None:
            scores = scores * factor(0)
        scores = jnp.where(visible, scores, MASKED) if masked else scores
        # A row that has seen nothing yet counts MASKED as 1; its first true score makes that 0 again.
        higher = jnp.maximum(peak, jnp.max(scores, 1))
        p, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(peak - higher)
        total = total * shrink + jnp.sum(p, 1)
        if cache.scale is not None:
            p = p * factor(1)
        return higher, total, acc * shrink[:, None] + dot(p.astype(dtype), read(1))

    state = lax.fori_loop(first, whole_from, partial(step, masked=True), (peak, total, acc))
    state = lax.fori_loop(whole_from, whole_to, partial(step, masked=False), state)
    peak, total, acc = lax.fori_loop(whole_to, last, partial(step, masked=True), state)
    any_seen = seen & (peak > MASKED)
    total = jnp.where(any_seen, total, 1)
    acc = jnp.where(any_seen[:, None], acc / total[:, None], 0)
    gpu.store(o.at[part, r, tile], acc.astype(o.dtype), mask=used[:, None])
    peak = jnp.where(any_seen, peak * math.log(2) + jnp.log(total), -jnp.inf)
    gpu.store(lse.at[part, r, tile], peak, mask=used)


def load_some(x, mask: Array | None) -> Array:
    """What a ref has where mask is true, and 0 elsewhere; without a mask all of it."""
    return gpu.load(x) if mask is None else gpu.load(x, mask=mask, other=0)


def merge_parts(o: Array, lse: Array, dtype) -> tuple[Array, Array]:
    """`attention.merge` of parts, o [P,R,N,H] and lse [P,R,N], in one kernel, where XLA makes three.

    -> o [R,N,H] in dtype, lse [R,N].
    """
    P, R, N, H = o.shape
    rows = min(pl.next_power_of_2(N), max(1, MERGED // (P * H)))
    return pl.pallas_call(
        partial(_merge_parts, rows=rows),
        grid=(pl.cdiv(N, rows), R),
        out_shape=(result((R, N, H), dtype, o), result((R, N), jnp.float32, o)),
        compiler_params=gpu.CompilerParams(num_warps=8, num_stages=1),
        name="merge_parts",
    )(o, lse)


def _merge_parts(o, lse, merged, merged_lse, *, rows: int):
    """The kernel: some queries of one row and key/value head."""
    i, r = pl.program_id(0), pl.program_id(1)
    tile = pl.ds(i * rows, rows)
    used = i * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0) < o.shape[2]
    logs = gpu.load(lse.at[:, r, tile], mask=used[None], other=0)
    peak = jnp.max(logs, 0)
    weight = jnp.exp(logs - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weight, 0)
    one = jnp.where(total == 0, 1, total)
    parts = gpu.load(o.at[:, r, tile], mask=used[None, :, None], other=0)
    joined = jnp.sum(parts * weight[..., None], 0) / one[:, None]
    gpu.store(merged.at[r, tile], joined.astype(merged.dtype), mask=used[:, None])
    gpu.store(merged_lse.at[r, tile], peak + jnp.log(one), mask=used)
