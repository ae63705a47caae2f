"""Kernels for GPUs: attention that never writes its scores, and products of sorted rows and experts or int4.

They use Pallas' Triton backend. Letters as in model.py, uppercase for this device's share. In both kernels
several programs compute one output: each sums over a part, and XLA adds or merges the parts.
"""

import functools
import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ops import attention
from ops.attention import MASKED
from ops.kv_cache import KV, key_beside_value
from ops.tiles import find_tile, tile_rows
from ops.tpu import precision, result
from quantize import QuantizedArray, nibbles

try:
    from jax.experimental.pallas.triton import CompilerParams, load, store

    missing = None
except (ImportError, AttributeError) as e:  # deprecated since jax 0.11
    missing = e

PROGRAMS = 512  # enough to keep a GPU busy: a few on each of its 100 to 150 processors
BLOCK = 64  # slots that a program of `flash` reads at a time
COLUMNS = 128  # of M, of a program of `grouped_dot`
WIDTHS = (64, 128)  # of keys, that `flash` supports


def supports(x: Array) -> bool:
    """Whether the kernels can read x: Pallas indexes up to 4 GiB with 32 signed bits.

    int4 is read as pairs, see `grouped_dot`.
    """
    if missing:
        say_slow()
    each = 2 if x.dtype == jnp.int4 else 1
    count = x.size // each
    return not (missing or x.shape[-1] % each) and (count < 1 << 31 or count * x.dtype.itemsize > 1 << 32)


@functools.cache  # once
def say_slow() -> None:
    """Say once that this GPU runs without the kernels, by the products and attention of any device."""
    slow = "attention writes its scores to memory, experts multiply each row by all of them, int4 by floats"
    print(f"slow on this GPU: {slow}, as Pallas' Triton backend is missing ({missing})", file=sys.stderr)


def attend_cached(q: Array, kv: KV, length: Array, gap=None, row: Array | None = None):
    """`attention.attend_cached` by `flash`, on both sides of a gap, where it is supported."""
    if not by_flash(q, kv):
        return attention.attend_cached(q, kv, length, gap, row)
    kv = kv if row is None else jax.tree.map(lambda x: x[row], kv)
    begin = jnp.zeros_like(length)
    ranges = [(begin, length)]
    if gap is not None:
        ranges = [(begin, jnp.minimum(length, gap[0])), (gap[1], length)]
    return attention.merge(*(flash(q, kv.values, kv.scale, *seen) for seen in ranges), stacked=True)


def attend_causal(q: Array, kv: KV, segment: Array, window: int | None = None):
    """`attention.attend_causal` by `flash`, where it is supported."""
    if not by_flash(q, kv):
        return attention.attend_causal(q, kv, segment, window)
    i = jnp.arange(q.shape[1])
    low = lax.cummax(jnp.where(segment == jnp.roll(segment, 1, 1), 0, i), 1)  # where its segment begins
    low = low if window is None else jnp.maximum(low, i - window + 1)
    high = jnp.broadcast_to(i + 1, segment.shape)
    return attention.merge(flash(q, kv.values, kv.scale, low, high), stacked=True)


def by_flash(q: Array, kv: KV) -> bool:
    H = q.shape[-1]
    return H in WIDTHS and kv.layout == key_beside_value(H) and supports(kv.values)


def flash(q: Array, values: Array, scale: Array | None, low: Array, high: Array):
    """Attention of each query to the slots low <= s < high: -> (o, lse) in P parts, stacked, to be merged.

    q: [B,T,K,G,H]. values, scale: as in KV, int8 or float. low, high: [B,T] int32. A tile of queries reads
    the slots from its smallest low to its largest high, each part an equal share of them.
    """
    B, T, K, G, H = q.shape
    R, N, S = B * K, T * G, values.shape[2]
    rows = min(128, max(16, pl.next_power_of_2(N)))
    tiles = pl.cdiv(N, rows)
    parts = max(1, min(PROGRAMS // (R * tiles), pl.cdiv(S, BLOCK)))
    padding = tiles * rows - N
    q = jnp.pad(q.swapaxes(1, 2).reshape(R, N, H), ((0, 0), (0, padding), (0, 0)))
    low, high = (jnp.pad(jnp.repeat(x, G, 1), ((0, 0), (0, padding))) for x in (low, jnp.minimum(high, S)))

    def of_row(x):
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, part, r: (r, 0, 0))

    bound = pl.BlockSpec((None, rows), lambda i, part, r: (lax.div(r, K), i))
    values, scale = (jax.tree.map(lambda x: x.reshape(R, *x.shape[2:]), x) for x in (values, scale))
    o, lse = pl.pallas_call(
        partial(_flash, parts=parts),
        grid=(tiles, parts, R),
        in_specs=[
            pl.BlockSpec((None, rows, H), lambda i, part, r: (r, i, 0)),
            of_row(values),
            None if scale is None else of_row(scale),
            bound,
            bound,
        ],
        out_shape=(
            result((parts, R, tiles * rows, H), jnp.float32, q, values, low, high),
            result((parts, R, tiles * rows), jnp.float32, q, values, low, high),
        ),
        out_specs=(
            pl.BlockSpec((None, None, rows, H), lambda i, part, r: (part, r, i, 0)),
            pl.BlockSpec((None, None, rows), lambda i, part, r: (part, r, i)),
        ),
        compiler_params=CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=2),
        name="flash",
    )(q, values, scale, low, high)
    return tuple(x[:, :, :N].reshape(parts, B, K, T, G, *x.shape[3:]).swapaxes(2, 3) for x in (o, lse))


def _flash(q, values, scale, low, high, o, lse, *, parts: int):
    """The kernel: one tile of queries, one part of the slots that they see, one row and key/value head."""
    rows, H = q.shape
    low, high = low[...], high[...]
    seen = low < high
    end = jnp.max(jnp.where(seen, high, 0))
    begin = jnp.min(jnp.where(seen, low, end))
    first, last = lax.div(begin, BLOCK), lax.div(end + BLOCK - 1, BLOCK)
    share = lax.div(last - first + parts - 1, parts)
    first = first + pl.program_id(1) * share
    last = jnp.minimum(first + share, last)
    dtype = jnp.promote_types(q.dtype, values.dtype)
    dot = partial(jnp.dot, precision=precision(dtype), preferred_element_type=jnp.float32)
    query = q[...].astype(dtype)
    unit = H**-0.5 * math.log2(math.e)  # the kernel works with exp2

    def step(i, state):
        peak, total, acc = state
        at = i * BLOCK
        slots = at + lax.broadcasted_iota(jnp.int32, (BLOCK,), 0)
        inside = (slots >= begin) & (slots < end)  # what is outside may be NaN

        def read(column: int) -> Array:
            x = values.at[pl.ds(at, BLOCK), pl.ds(column, H)]
            return load(x, mask=inside[:, None], other=0).astype(dtype)

        def factor(which: int) -> Array:
            x = scale.at[pl.ds(which, 1), pl.ds(at, BLOCK)]
            return load(x, mask=inside[None], other=0).astype(jnp.float32)

        scores = dot(query, read(0).T) * unit
        if scale is not None:
            scores = scores * factor(0)
        visible = (slots >= low[:, None]) & (slots < high[:, None])
        scores = jnp.where(visible, scores, MASKED)
        # A row that has seen nothing yet counts MASKED as 1; its first true score makes that 0 again.
        new = jnp.maximum(peak, jnp.max(scores, 1))
        p, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(peak - new)
        total = total * shrink + jnp.sum(p, 1)
        if scale is not None:
            p = p * factor(1)
        return new, total, acc * shrink[:, None] + dot(p.astype(dtype), read(H))

    state = jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((rows, H))
    peak, total, acc = lax.fori_loop(first, last, step, state)
    any_seen = peak > MASKED
    total = jnp.where(any_seen, total, 1)
    o[...] = jnp.where(any_seen[:, None], acc / total[:, None], 0)
    lse[...] = jnp.where(any_seen, peak * math.log(2) + jnp.log(total), -jnp.inf)


def grouped_dot(x: Array, w: Array | QuantizedArray, sizes: Array) -> Array:
    """`lax.ragged_dot`, which reads no expert without rows and no weight in another type: -> [N,M] float32.

    x: [N,D], the rows of expert 0, then those of expert 1... w: [E,D,M], float or int8 values; or int4,
    values [E,D,I,M] where D counts groups, and M is even. sizes: [E] int32. Rows beyond their sum are left
    undefined.
    """
    (N, D), E, M = x.shape, sizes.size, jax.tree.leaves(w)[0].shape[-1]
    rows = tile_rows(N, E, 16, 128)
    deep = 64 if x.dtype.itemsize < 4 else 32
    scale, each = None, 1  # each: columns in an entry of w
    if isinstance(w, QuantizedArray):
        deep, each = min(deep, w.values.shape[2]), 2
        w, scale = (part.reshape(*part.shape[:-1], M // 2, 2) for part in (w.values, w.scale))
        # XLA holds int4 two a byte, the first in the low bits: nothing moves.
        w = lax.bitcast_convert_type(w, jnp.int8).reshape(E, D, M // 2)
    tiles = min(N, N // rows + min(E, N))
    tile = jnp.stack(find_tile(jnp.arange(tiles), sizes, rows))

    columns = pl.cdiv(M, COLUMNS)
    parts = max(1, min(PROGRAMS // (tiles * columns), D // (4 * deep)))
    y = pl.pallas_call(
        partial(_grouped_dot, rows=rows, deep=deep, parts=parts),
        grid=(tiles, columns, parts),
        out_shape=result((parts, N, M // each, each), jnp.float32, x, w, tile),
        compiler_params=CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=3),
        name="grouped_dot",
    )(x, w, scale, tile)
    return jnp.sum(y, 0).reshape(N, M)


def _grouped_dot(x, w, scale, tile, y, *, rows: int, deep: int, parts: int):
    """The kernel: one tile of rows, COLUMNS columns, and one part of D."""
    i, j, part = (pl.program_id(axis) for axis in range(3))
    (D, entries), each = w.shape[1:], y.shape[-1]
    width = COLUMNS // each
    columns = pl.ds(j * width, width)
    expert, first, end = tile[0, i], tile[1, i], tile[2, i]
    share = pl.cdiv(pl.cdiv(D, deep), parts)
    steps = jnp.where(first < end, jnp.int32(share), 0)
    dot = partial(jnp.dot, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    used = (first + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)) < end
    inside = j * width + lax.broadcasted_iota(jnp.int32, (1, width), 1) < entries

    def step(n, sums):
        at = (part * share + n) * deep
        depth = at + lax.broadcasted_iota(jnp.int32, (deep,), 0) < D
        a = x.at[pl.ds(first, rows), pl.ds(at, deep)]
        a = load(a, mask=used & depth[None], other=0)
        b = w.at[expert, pl.ds(at, deep), columns]
        b = load(b, mask=depth[:, None] & inside, other=0)

        def product(which: int, values: Array) -> Array:
            y = dot(a, values.astype(a.dtype))
            if scale is None:
                return y
            group = lax.div(at, D // scale.shape[1])
            unit = scale.at[expert, pl.ds(group, 1), columns, jnp.int32(which)]
            return y * load(unit, mask=inside & (at < D), other=0).astype(jnp.float32)

        pair = [b] if scale is None else nibbles(b)
        return [total + product(*half) for total, half in zip(sums, enumerate(pair), strict=True)]

    sums = lax.fori_loop(0, steps, step, [jnp.zeros((rows, width))] * each)
    for which, total in enumerate(sums):
        store(y.at[part, pl.ds(first, rows), columns, jnp.int32(which)], total, mask=used & inside)
