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
    low = jnp.zeros_like(length)
    if gap is not None:  # a ring that does not wrap around has its gap at the beginning
        low = jnp.where(gap[0] <= 0, gap[1], low)
    return flash(q, kv, (low, length, *(gap or ())), row)


def attend_causal(q: Array, kv: KV, segment: Array, window: int | None = None):
    """`attention.attend_causal` by `flash`, where it is supported."""
    if not by_flash(q, kv):
        return attention.attend_causal(q, kv, segment, window)
    i = jnp.arange(q.shape[1])
    low = lax.cummax(jnp.where(segment == jnp.roll(segment, 1, 1), 0, i), 1)  # where its segment begins
    low = low if window is None else jnp.maximum(low, i - window + 1)
    high = jnp.broadcast_to(i + 1, segment.shape)
    return flash(q, kv, (low, high))


def by_flash(q: Array, kv: KV) -> bool:
    H = q.shape[-1]
    return H in WIDTHS and kv.layout == key_beside_value(H) and gpu.supports(kv.values)


def flash(q: Array, kv: KV, bounds: tuple[Array, ...], row: Array | None = None):
    """Attention of each query to the slots low <= s < high, except those of a gap: -> (o, lse).

    q: [B,T,K,G,H]. bounds: low and high, and where the gap begins and ends, if there is one; [B,T] int32
    each. row: [B] int32, the rows of the cache; without it, all, in order. A tile of queries reads the slots
    from its smallest low to its largest high, each part an equal share of them.
    """
    B, T, K, G, H = q.shape
    S, C = kv.values.shape[2:]
    R, N = B * K, T * G
    rows = min(128, max(16, pl.next_power_of_2(N)))
    tiles = pl.cdiv(N, rows)
    in_16_bits = q.dtype.itemsize == kv.values.dtype.itemsize == 2
    block = LARGE_BLOCK if rows == 128 and in_16_bits else BLOCK
    parts = previous_power_of_2(min(gpu.PROGRAMS // (R * tiles), pl.cdiv(S, block), MOST_PARTS))
    padding = tiles * rows - N
    q = jnp.pad(q.swapaxes(1, 2).reshape(R, N, H), ((0, 0), (0, padding), (0, 0)))
    low, high, *gap = bounds
    limits = jnp.stack([low, jnp.minimum(high, S), *gap])
    limits = jnp.pad(jnp.repeat(limits, G, 2), ((0, 0), (0, 0), (0, padding)))
    cache = kv.values.reshape(-1, S, C), None if kv.scale is None else kv.scale.reshape(-1, 2, S)
    heads = None if row is None else (row[:, None] * K + jnp.arange(K)).reshape(R).astype(jnp.int32)

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i, part, r: (0,) * x.ndim)

    inputs = q, limits, *cache, heads
    in_specs = (
        pl.BlockSpec((None, rows, H), lambda i, part, r: (r, i, 0)),
        pl.BlockSpec((len(limits), None, rows), lambda i, part, r: (0, lax.div(r, K), i)),
        *jax.tree.map(whole, (*cache, heads)),
    )
    o, lse = pl.pallas_call(
        partial(_flash, parts=parts, block=block),
        grid=(tiles, parts, R),
        in_specs=in_specs,
        out_shape=(
            result((parts, R, tiles * rows, H), jnp.float32, *jax.tree.leaves(inputs)),
            result((parts, R, tiles * rows), jnp.float32, *jax.tree.leaves(inputs)),
        ),
        out_specs=(
            pl.BlockSpec((None, None, rows, H), lambda i, part, r: (part, r, i, 0)),
            pl.BlockSpec((None, None, rows), lambda i, part, r: (part, r, i)),
        ),
        compiler_params=gpu.CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=2),
        name="flash",
    )(*inputs)
    o, lse = (o[0], lse[0]) if parts == 1 else merge_parts(o, lse, N)
    return tuple(x[:, :N].reshape(B, K, T, G, *x.shape[2:]).swapaxes(1, 2) for x in (o, lse))


def previous_power_of_2(n: int) -> int:
    return 1 << max(1, n).bit_length() - 1


def _flash(q, limits, values, scale, heads, o, lse, *, parts: int, block: int):
    """The kernel: one tile of queries, one part of the slots that they see, one row and key/value head."""
    rows, H = q.shape
    head = pl.program_id(2)
    head = head if heads is None else heads[head]
    low, high, *gap = (limits[i] for i in range(limits.shape[0]))
    seen = low < high
    end = jnp.max(jnp.where(seen, high, 0))
    begin = jnp.min(jnp.where(seen, low, end))
    first, last = lax.div(begin, block), lax.div(end + block - 1, block)
    share = lax.div(last - first + parts - 1, parts)
    first = first + pl.program_id(1) * share
    last = jnp.minimum(first + share, last)
    dtype = jnp.promote_types(q.dtype, values.dtype)
    query = q[...].astype(dtype)
    unit = H**-0.5 * math.log2(math.e)  # the kernel works with exp2
    if gap:
        nobody_from = jnp.max(jnp.where(seen, gap[0], 0))
        nobody_to = jnp.min(jnp.where(seen, gap[1], end))
        whole_from = whole_to = last
    else:  # blocks of which all queries that see anything see every slot need no mask
        whole_from = jnp.clip(pl.cdiv(jnp.max(jnp.where(seen, low, 0)), block), first, last)
        whole_to = jnp.clip(lax.div(jnp.min(jnp.where(seen, high, end)), block), whole_from, last)

    def step(i, state, masked: bool):
        peak, total, acc = state
        at = i * block
        slots = at + lax.broadcasted_iota(jnp.int32, (block,), 0)
        inside = (slots >= begin) & (slots < end)  # what is outside may be NaN
        visible = (slots >= low[:, None]) & (slots < high[:, None])
        if gap:
            inside &= (slots < nobody_from) | (slots >= nobody_to)
            visible &= (slots < gap[0][:, None]) | (slots >= gap[1][:, None])

        def read(column: int) -> Array:
            x = values.at[head, pl.ds(at, block), pl.ds(column, H)]
            return load_some(x, inside[:, None] if masked else None).astype(dtype)

        def factor(which: int) -> Array:
            x = scale.at[head, pl.ds(which, 1), pl.ds(at, block)]
            return load_some(x, inside[None] if masked else None).astype(jnp.float32)

        scores = dot(query, read(0).T) * unit
        if scale is not None:
            scores = scores * factor(0)
        scores = jnp.where(visible, scores, MASKED) if masked else scores
        # A row that has seen nothing yet counts MASKED as 1; its first true score makes that 0 again.
        new = jnp.maximum(peak, jnp.max(scores, 1))
        p, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(peak - new)
        total = total * shrink + jnp.sum(p, 1)
        if scale is not None:
            p = p * factor(1)
        return new, total, acc * shrink[:, None] + dot(p.astype(dtype), read(H))

    state = jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((rows, H))
    state = lax.fori_loop(first, whole_from, partial(step, masked=True), state)
    state = lax.fori_loop(whole_from, whole_to, partial(step, masked=False), state)
    peak, total, acc = lax.fori_loop(whole_to, last, partial(step, masked=True), state)
    any_seen = seen & (peak > MASKED)
    total = jnp.where(any_seen, total, 1)
    o[...] = jnp.where(any_seen[:, None], acc / total[:, None], 0)
    lse[...] = jnp.where(any_seen, peak * math.log(2) + jnp.log(total), -jnp.inf)


def load_some(x, mask: Array | None) -> Array:
    """What a ref has where mask is true, and 0 elsewhere; without a mask all of it."""
    return gpu.load(x) if mask is None else gpu.load(x, mask=mask, other=0)


def merge_parts(o: Array, lse: Array, N: int) -> tuple[Array, Array]:
    """`attention.merge` of the parts of the first N queries, in one kernel, where XLA makes three.

    o: [P,R,n,H], lse: [P,R,n], of n queries of which N count -> [R,n,H], [R,n], the others undefined.
    """
    P, R, n, H = o.shape
    rows = min(n, max(1, MERGED // (P * H)))
    return pl.pallas_call(
        _merge_parts,
        grid=(pl.cdiv(N, rows), R),
        in_specs=[
            pl.BlockSpec((P, None, rows, H), lambda i, r: (0, r, i, 0)),
            pl.BlockSpec((P, None, rows), lambda i, r: (0, r, i)),
        ],
        out_shape=(result((R, n, H), jnp.float32, o), result((R, n), jnp.float32, o)),
        out_specs=(
            pl.BlockSpec((None, rows, H), lambda i, r: (r, i, 0)),
            pl.BlockSpec((None, rows), lambda i, r: (r, i)),
        ),
        compiler_params=gpu.CompilerParams(num_warps=8, num_stages=1),
        name="merge_parts",
    )(o, lse)


def _merge_parts(o, lse, merged, merged_lse):
    """The kernel: some queries of one row and key/value head."""
    logs = lse[...]
    peak = jnp.max(logs, 0)
    weight = jnp.exp(logs - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weight, 0)
    one = jnp.where(total == 0, 1, total)
    merged[...] = jnp.sum(o[...] * weight[..., None], 0) / one[:, None]
    merged_lse[...] = peak + jnp.log(one)
