"""Kernels for GPUs: attention that never writes its scores, and products of few rows, and of sorted rows.

They use Pallas' Triton backend. Letters as in model.py, uppercase for this device's share. Several programs
of a kernel may compute one output, each over a part of what is summed. XLA adds the parts of products, and
`merge_parts` merges those of attention.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ops import attention
from ops.attention import MASKED
from ops.kv_cache import KV, key_beside_value
from ops.tiles import find_tile, tile_rows
from ops.tpu import precision, result
from quantize import (
    INT8_MAX,
    PAIR,
    PART,
    TILE,
    QuantizedArray,
    e2m1_words,
    int8_parts,
    join_parts,
    power_of_two,
    values_and_scale,
)

try:
    from jax.experimental.pallas.triton import CompilerParams, load, store

    missing = None
except (ImportError, AttributeError) as e:  # deprecated since jax 0.11
    missing = e

PROGRAMS = 512  # enough to keep a GPU busy: a few on each of its 100 to 150 processors
BLOCK = 64  # slots that a program of `flash` reads at a time
LARGE_BLOCK = 128  # the same, of many queries and a cache in 16 bits: more would not fit into registers
COLUMNS = 128  # of M, of a program of `grouped_dot`
PROCESSORS = 128  # of a GPU, about: each should have a program of `joined_dot`
FEW_ROWS = 256  # up to which `ragged_dot` multiplies integers in place of converted weights
FEWEST_ROWS = 16  # up to which kernels make integers of rows: each program does so for what it reads of them
WIDTHS = (64, 128)  # of keys, that `flash` supports
MERGED = 8192  # numbers in a program of `merge_parts`; of MOST_PARTS of width 128 twice as many
MOST_PARTS = 128  # in which programs of `flash` divide the slots that a tile of queries sees


def supports(x: Array) -> bool:
    """Whether the kernels can read x: Pallas uses signed 32-bit offsets for arrays of up to 4 GiB.

    So int8 arrays of 2 to 4 GiB are out of reach. Packed weights are read in larger units, see `Packing`.
    """
    if missing:
        say_slow()
    each = packing_of(x.dtype).each
    count = x.size // each
    return not (missing or x.shape[-1] % each) and (count < 1 << 31 or count * x.dtype.itemsize > 1 << 32)


@functools.cache  # once
def say_slow() -> None:
    """Say once that this GPU runs without the kernels, by the products and attention of any device."""
    slow = (
        "attention writes its scores to memory, experts multiply each row by all of them, integers by floats"
    )
    print(f"slow on this GPU: {slow}, as Pallas' Triton backend is missing ({missing})", file=sys.stderr)


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
    return H in WIDTHS and kv.layout == key_beside_value(H) and supports(kv.values)


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
    parts = previous_power_of_2(min(PROGRAMS // (R * tiles), pl.cdiv(S, block), MOST_PARTS))
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
        compiler_params=CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=2),
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
    return load(x) if mask is None else load(x, mask=mask, other=0)


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
        compiler_params=CompilerParams(num_warps=8, num_stages=1),
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


def joined_dot(x: Array, matrices: Sequence[Array]) -> list[Array]:
    """Few rows times several matrices, in one kernel that reads them as they are: -> [P,N,M] for each.

    x: [N,D], of the matrices' type, or float beside int8: then the kernel makes integers of each tile of x.
    matrices: [M,D]. The P parts are to be added: float32, or int32 if x is int8. The program uses it for int8
    alone, benchmarks/gpu_forms.py also for bfloat16, which XLA multiplies otherwise.
    """
    (N, D), rows = x.shape, max(16, pl.next_power_of_2(len(x)))
    deep = (256 if rows <= 32 else 128) // matrices[0].dtype.itemsize  # more do not fit into shared memory
    deep = min(deep, max(32, pl.next_power_of_2(D)))
    # Fewer outputs for each program, rather than parts, which would be written and added.
    outputs = next((n for n in (64, 32) if sum(pl.cdiv(len(w), n) for w in matrices) >= PROCESSORS), 16)
    blocks = [pl.cdiv(len(w), outputs) for w in matrices]
    parts = max(1, min(PROCESSORS // sum(blocks), D // (4 * deep)))
    return pl.pallas_call(
        partial(_joined_dot, rows=rows, deep=deep, outputs=outputs, parts=parts),
        grid=(sum(blocks), parts),
        out_shape=[result((parts, N, len(w)), sum_dtype(x), x, *matrices) for w in matrices],
        compiler_params=CompilerParams(num_warps=4, num_stages=4),
        name="joined_dot",
    )(x, *matrices)


def _joined_dot(x, *refs, rows: int, deep: int, outputs: int, parts: int):
    """The kernel: some outputs of one matrix, and one part of D. refs: the matrices, then their products."""
    (N, D), count = x.shape, len(refs) // 2
    i, part = pl.program_id(0), pl.program_id(1)
    share = pl.cdiv(pl.cdiv(D, deep), parts)
    read = 1 if N == 1 else rows  # a single row is repeated only where the product needs more

    def first_rows(n: int) -> tuple[pl.Slice, Array]:
        """A slice, and which of its rows there are. jax refuses a constant slice that is longer than x."""
        return pl.ds(0 * i, n), lax.broadcasted_iota(jnp.int32, (n, 1), 0) < N

    def multiply(w, y, first: int) -> None:
        here = pl.ds((i - first) * outputs, outputs)
        place = (i - first) * outputs + lax.broadcasted_iota(jnp.int32, (1, outputs), 1)
        inside = place < w.shape[0]

        def step(n, total):
            at = (part * share + n) * deep
            depth = at + lax.broadcasted_iota(jnp.int32, (1, deep), 1) < D
            which, used = first_rows(read)
            a = load(x.at[which, pl.ds(at, deep)], mask=used & depth, other=0)
            b = load(w.at[here, pl.ds(at, deep)], mask=inside.T & depth, other=0)
            if a.dtype == b.dtype:
                return total + times_all_rows(b, a)
            both, unit = integer_tile(a)
            return total + joined(*(times_all_rows(b, half) for half in both)) * unit.T

        def times_all_rows(b: Array, a: Array) -> Array:
            return dot(b, jnp.broadcast_to(a, (rows, deep)).T)

        total = lax.fori_loop(0, share, step, jnp.zeros((outputs, rows), y.dtype))
        which, used = first_rows(rows)
        store(y.at[part, which, here], total.T, mask=used & inside)

    matrices = zip(refs[:count], refs[count:], strict=True)
    run_one(i, [(partial(multiply, w, y), pl.cdiv(w.shape[0], outputs)) for w, y in matrices])


def run_one(i, functions: Sequence[tuple[Callable[[int], None], int]]) -> None:
    """Program i of a kernel: the function whose programs it is among, with the number of their first one.

    functions: each with its number of programs, which follow those of the function before.
    """
    first = 0
    for function, count in functions:
        pl.when((first <= i) & (i < first + count))(partial(function, first))
        first += count


def dot(a: Array, b: Array) -> Array:
    """The product of two tiles of one type."""
    return jnp.dot(a, b, precision=precision(a.dtype), preferred_element_type=sum_dtype(a))


def sum_dtype(x: Array) -> Any:
    """The type of sums of products with x."""
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32


def integer_tile(x: Array) -> tuple[list[Array], Array]:
    """Rows of a tile [n,d] as two int8 parts, see `int8_parts`, and the tile's unit of each row [n,1]."""
    x = x.astype(jnp.float32)
    # As integers magnitudes have the same order, and NaN, which a maximum of floats passes over, comes last.
    largest = jnp.max(lax.bitcast_convert_type(jnp.abs(x), jnp.int32), 1, keepdims=True)
    unit = lax.bitcast_convert_type(largest, jnp.float32) / INT8_MAX
    x = x * (1 / unit)  # NaN in a row of zeros, whose unit, 0, makes zeros of whatever integers these become
    first = nearest_integer(x)
    second = nearest_integer((x - first.astype(jnp.float32)) * PART)
    return [first.astype(jnp.int8), second.astype(jnp.int8)], unit


def joined(first: Array, second: Array) -> Array:
    """The sum of the products of both parts, float32, in the unit of the first."""
    return first.astype(jnp.float32) + second.astype(jnp.float32) * (1 / PART)


def nearest_integer(x: Array) -> Array:
    """int32, of float32 in -2**22..2**22: by an addition, which takes a GPU less time than a conversion."""
    bits = lax.bitcast_convert_type(x + 1.5 * 2**23, jnp.int32)  # one more is one more in the lowest bit
    return bits - 0x4B400000


def integer_products(x: Array, matrices: Sequence[Array]) -> list[Array]:
    """Few float rows [N,D] times int8 matrices [M,D], by integers: -> [N,M] float32 for each.

    The tensor cores multiply a weight as it is stored. Converting one takes several instructions; with few
    rows these take longer than reading it.
    """
    if len(x) <= FEWEST_ROWS:
        return [jnp.sum(y, 0) for y in joined_dot(x, matrices)]
    parts, unit = int8_parts(x)
    sums = (jnp.sum(y, 0).astype(jnp.float32) for y in joined_dot(parts, matrices))
    return [join_parts(y) * unit for y in sums]


@dataclasses.dataclass(frozen=True)
class Packing:
    """How `grouped_dot` reads a weight: in entries, which hold several of its numbers.

    each, blocks: an entry has numbers of so many columns, and in each column of so many blocks of D.
    entry: the type as which entries are read; None: as that of the weight.
    unpack: a tile of entries [d,m] -> for each block and each column a tile of numbers [d,m].
    times: so many times as large as the weight's numbers these are.
    exponents: whether scales are those of powers of two.
    """

    each: int = 1
    blocks: int = 1
    entry: Any = None
    unpack: Callable[[Array], Sequence[Sequence[Array]]] = lambda entries: [[entries]]
    times: int = 1
    exponents: bool = False

    def entries(self, values: Array, scale: Array | None, D: int) -> tuple[Array, Array | None]:
        """A weight's components -> entries [E,D/blocks,M/each], and scales [E,groups,M/each,each] or None.

        The exponents of MXFP4 become words of four, [E,rows,M/each,1]. Nothing moves: XLA holds int4 two a
        byte, the first in the low bits.
        """
        if scale is None:
            return values, None
        E, M = len(values), values.shape[-1] // self.each
        values = lax.bitcast_convert_type(values.reshape(E, D // self.blocks, M, self.each), self.entry)
        scale = scale.reshape(E, -1, M, self.each)
        if self.exponents:
            scale = lax.bitcast_convert_type(scale, self.entry)[..., None]
        return values, scale


def high_nibbles(pairs: Array) -> list[list[Array]]:
    """16 times each of the two int4 values in an int8, the one in its low bits first, as int8.

    Dividing by 16 at the end is cheaper than extracting the values, as `quantize.nibbles` does.
    """
    return [[pairs << 4, pairs & -16]]


def e2m1_columns(words: Array) -> list[list[Array]]:
    """4 times the numbers of a pair of blocks in four columns, [block][column] of bfloat16 [d,m].

    words: int32 [d,m], a byte per column.
    """

    def half(word: Array, high: int) -> Array:
        return lax.bitcast_convert_type((word >> 16 * high).astype(jnp.int16), jnp.bfloat16)

    return [[half(word, high) for high in range(2) for word in block] for block in e2m1_words(words)]


def packing_of(dtype) -> Packing:
    """Of weights whose values have this type."""
    int4 = Packing(each=2, entry=jnp.int8, unpack=high_nibbles, times=16)
    mxfp4 = Packing(each=4, blocks=2, entry=jnp.int32, unpack=e2m1_columns, times=4, exponents=True)
    return {"int4": int4, "uint8": mxfp4}.get(str(jnp.dtype(dtype)), Packing())


def ragged_dot(x: Array, weights: Sequence[Array | QuantizedArray], sizes: Array) -> list[Array]:
    """`grouped_dot`; of few rows in bfloat16 and weights in int8 or int4 by integers, see `integer_products`.

    More than FEWEST_ROWS become two rows of integers each, which stand together, as both are for one expert.
    """
    dtype = values_and_scale(weights[0])[0].dtype
    if len(x) > FEW_ROWS or x.dtype != jnp.bfloat16 or dtype not in (jnp.int8, jnp.int4):
        return grouped_dot(x, weights, sizes)
    if len(x) <= FEWEST_ROWS:
        return grouped_dot(x, weights, sizes, by_integers=True)
    parts, unit = int8_parts(x)
    pairs = parts.reshape(2, *x.shape).swapaxes(0, 1).reshape(-1, x.shape[1])
    sums = (y.reshape(len(x), 2, -1).swapaxes(0, 1) for y in grouped_dot(pairs, weights, 2 * sizes))
    return [join_parts(y.reshape(len(pairs), -1)) * unit for y in sums]


def grouped_dot(
    x: Array, weights: Sequence[Array | QuantizedArray], sizes: Array, by_integers: bool = False
) -> list[Array]:
    """`lax.ragged_dot` with each of the weights, in one kernel: -> [N,M] float32 for each.

    It reads no expert without rows, and no weight in another type.

    x: [N,D], the rows of expert 0, then those of expert 1...; it may be int8 if weights are int8 or int4.
    weights, of one format: [E,D,M], float or int8 values. Or int4, values [E,D,I,M] where D counts groups; M
    is even. Or MXFP4, of whole pairs of blocks; M is a multiple of 4.
    sizes: [E] int32. Rows beyond their sum are left undefined.
    by_integers: the kernel makes integers of each tile of a float x.
    """
    (N, D), E = x.shape, sizes.size
    values, scales = zip(*map(values_and_scale, weights), strict=True)
    packing = packing_of(values[0].dtype)
    rows = tile_rows(N, E, 16, 128)
    deep = 128 // (1 if by_integers else x.dtype.itemsize)
    if scales[0] is not None:
        deep = min(deep, values[0].shape[2])
    if packing.blocks == 2:
        x = in_order_of_bytes(x)
    tiles = min(N, N // rows + min(E, N))
    tile = jnp.stack(find_tile(jnp.arange(tiles), sizes, rows))

    each, columns = packing.each, [y.shape[-1] for y in values]
    values, scales = zip(*(packing.entries(*w, D) for w in zip(values, scales, strict=True)), strict=True)
    blocks = sum(pl.cdiv(M, COLUMNS) for M in columns)
    parts = max(1, min(PROGRAMS // (tiles * blocks), values[0].shape[1] // (4 * deep)))
    options = dict(rows=rows, deep=deep, parts=parts, packing=packing, by_integers=by_integers)
    products = pl.pallas_call(
        partial(_grouped_dot, **options),
        grid=(tiles, blocks, parts),
        out_shape=[result((parts, N, M // each, each), jnp.float32, x, *values, tile) for M in columns],
        compiler_params=CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=3),
        name="grouped_dot",
    )(x, values, scales, tile)
    return [jnp.sum(y, 0).reshape(N, M) for y, M in zip(products, columns, strict=True)]


def times(tiles: Sequence[Array], units: Sequence[Array], dtype) -> list[Array]:
    """Each tile times its unit, in dtype."""
    return [x.astype(dtype) * unit.astype(dtype) for x, unit in zip(tiles, units, strict=True)]


def in_order_of_bytes(x: Array) -> Array:
    """x [N,D] with the entries of each block of D where the bytes of MXFP4 have them, see ExpertsInMXFP4."""
    blocks = x.reshape(len(x), -1, 2, 8, 2)  # block, j, i, h
    return jnp.moveaxis(blocks, 2, 4).reshape(x.shape)


def _grouped_dot(
    x, weights, scales, tile, *products,
    rows: int, deep: int, parts: int, packing: Packing, by_integers: bool,
):  # fmt: skip
    """The kernel: one tile of rows, COLUMNS columns of one matrix, and one part of the entries along D."""
    i, j, part = (pl.program_id(axis) for axis in range(3))
    expert, begin, end = tile[0, i], tile[1, i], tile[2, i]
    read = 1 if len(x) == 1 else rows  # a single row is repeated only where the product needs more
    width = COLUMNS // packing.each

    def used(n: int) -> Array:
        return (begin + lax.broadcasted_iota(jnp.int32, (n, 1), 0)) < end

    def all_rows_times(a: Array, b: Array) -> Array:
        return dot(jnp.broadcast_to(a, (rows, a.shape[1])), b.astype(a.dtype))

    def multiply(w, scale, y, first: int) -> None:
        D, entries = w.shape[1:]  # D counts entries here
        share = pl.cdiv(pl.cdiv(D, deep), parts)
        columns = pl.ds((j - first) * width, width)
        inside = (j - first) * width + lax.broadcasted_iota(jnp.int32, (1, width), 1) < entries

        def units_of(at, block: int) -> list[Array]:
            """The scales of a tile's numbers, for each column of an entry [1,width] float32."""

            def read_scale(row, which: int) -> Array:
                numbers = scale.at[expert, pl.ds(row, 1), columns, jnp.int32(which)]
                return load(numbers, mask=inside & (at < D), other=0)

            if not packing.exponents:  # a scale for each group
                group = lax.div(at, D // scale.shape[1])
                return [read_scale(group, which).astype(jnp.float32) for which in range(packing.each)]
            pair = lax.div(at, PAIR // 2)  # two of them have a TILE of exponents
            exponents = read_scale(lax.div(pair, 2) * TILE + 2 * lax.rem(pair, 2) + block, 0)
            return [power_of_two((exponents >> 8 * which) & 255) for which in range(packing.each)]

        def step(n, sums):
            at = (part * share + n) * deep
            depth = at + lax.broadcasted_iota(jnp.int32, (deep,), 0) < D
            b = load(w.at[expert, pl.ds(at, deep), columns], mask=depth[:, None] & inside, other=0)
            for block, tiles in enumerate(packing.unpack(b)):
                a = x.at[pl.ds(begin, read), pl.ds(at * packing.blocks + block * deep, deep)]
                a = load(a, mask=used(read) & depth[None], other=0)
                units = None if scale is None else units_of(at, block)
                if packing.exponents:  # the product of a number and a power of two is exact
                    tiles, units = times(tiles, units, a.dtype), None
                if by_integers:
                    both, unit = integer_tile(a)
                    found = [joined(*(all_rows_times(half, b) for half in both)) * unit for b in tiles]
                else:
                    found = [all_rows_times(a, b) for b in tiles]
                found = found if units is None else times(found, units, jnp.float32)
                sums = [total + y for total, y in zip(sums, found, strict=True)]
            return sums

        steps = jnp.where(begin < end, jnp.int32(share), 0)
        zeros = jnp.zeros((rows, width), sum_dtype(x) if scale is None else jnp.float32)
        sums = lax.fori_loop(0, steps, step, [zeros] * packing.each)
        for which, total in enumerate(sums):
            total = total.astype(jnp.float32) * (1 / packing.times)
            here = y.at[part, pl.ds(begin, rows), columns, jnp.int32(which)]
            store(here, total, mask=used(rows) & inside)

    matrices = zip(weights, scales, products, strict=True)
    run_one(j, [(partial(multiply, *matrix), pl.cdiv(matrix[0].shape[2], width)) for matrix in matrices])
