"""Products for GPUs: of few rows with matrices as they are stored, and of sorted rows with experts.

Several programs of a kernel may compute one output, each over a part of what is summed. XLA adds the parts.
Letters as in model.py, uppercase for this device's share.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ops import gpu
from ops.gpu import dot, sum_dtype
from ops.tiles import find_tile, tile_rows
from ops.tpu import result
from quantize import (
    INT8_MAX,
    PAIR,
    PART,
    TILE,
    QuantizedArray,
    e2m1_words,
    power_of_two,
    values_and_scale,
)

COLUMNS = 128  # of M, of a program of `grouped_dot`
PROCESSORS = 128  # of a GPU, about: each should have a program of `joined_dot`
FEW_ROWS = 256  # up to which `ragged_dot` multiplies integers in place of converted weights
FEWEST_ROWS = 16  # up to which kernels make integers of rows: each program does so for what it reads of them


def supports(values: Array) -> bool:
    """Whether the kernels can read a weight's values, see `gpu.supports`. Packed ones are read in entries."""
    return gpu.supports(values, packing_of(values.dtype).each)


def joined_dot(
    x: Array, matrices: Sequence[Array], unit: Array | None = None, scales: Sequence[Array | None] = (),
    then: Callable | None = None, dtype=None,
) -> list[Array]:  # fmt: skip
    """Few rows times several matrices, in one kernel that reads them as they are: -> [P,N,M] for each.

    x: [N,D], of the matrices' type, or float beside int8: then the kernel makes integers of each tile of x.
    x and unit may also be what `integer_rows` returns. matrices: [M,D]. scales: factors of the products, [M]
    each. The P parts are to be added: float32, or int32 if x is int8 without a unit. The program uses it for
    int8 alone, benchmarks/gpu_forms.py also for bfloat16, which XLA multiplies otherwise.
    then, dtype: an elementwise function of all products, and the type of its value, which is then the only
    result, in one part. The matrices have one size.
    """
    x = x[:, None] if unit is None else x
    (N, _, D), rows = x.shape, max(16, pl.next_power_of_2(len(x)))
    few = x.shape[1] * rows <= 32
    deep = (256 if few else 128) // matrices[0].dtype.itemsize  # more do not fit into shared memory
    deep = min(deep, max(32, pl.next_power_of_2(D)))
    each = len(matrices) if then else 1  # matrices of a program
    sizes = [len(w) for w in matrices[::each]]
    # Fewer outputs for each program, rather than parts, which would be written and added.
    widths = (max(16, n // pl.next_power_of_2(each)) for n in (64, 32))
    outputs = next((n for n in widths if sum(pl.cdiv(M, n) for M in sizes) >= PROCESSORS), 16)
    blocks = sum(pl.cdiv(M, outputs) for M in sizes)
    parts = 1 if then else max(1, min(PROCESSORS // blocks, D // (4 * deep)))
    dtype = dtype or (sum_dtype(x) if unit is None else jnp.float32)
    return pl.pallas_call(
        partial(_joined_dot, then=then, rows=rows, deep=deep, outputs=outputs, parts=parts),
        grid=(blocks, parts),
        out_shape=[result((parts, N, M), dtype, x, *matrices) for M in sizes],
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=4),
        name="joined_dot",
    )(x, unit, matrices, scales or [None] * len(matrices))


def _joined_dot(
    x, unit, matrices, scales, *results,
    then: Callable | None, rows: int, deep: int, outputs: int, parts: int,
):  # fmt: skip
    """The kernel: some outputs of one matrix, or of all for `then`, and one part of D."""
    N, halves, D = x.shape
    i, part = pl.program_id(0), pl.program_id(1)
    share = pl.cdiv(pl.cdiv(D, deep), parts)
    read = 1 if N == 1 else rows  # a single row is repeated only where the product needs more

    def first_rows(n: int) -> tuple[pl.Slice, Array]:
        """A slice, and which of its rows there are. jax refuses a constant slice that is longer than x."""
        return pl.ds(0 * i, n), lax.broadcasted_iota(jnp.int32, (n, 1), 0) < N

    def multiply(weights, y, first: int) -> None:
        """weights: pairs of a matrix and its scale. y: their result."""
        here = pl.ds((i - first) * outputs, outputs)
        place = (i - first) * outputs + lax.broadcasted_iota(jnp.int32, (1, outputs), 1)
        inside = place < y.shape[2]

        def step(n, sums):
            """sums: for each matrix, and each half of x, [outputs,rows]."""
            at = (part * share + n) * deep
            depth = at + lax.broadcasted_iota(jnp.int32, (1, deep), 1) < D
            which, used = first_rows(read)
            a = [x.at[which, jnp.int32(half), pl.ds(at, deep)] for half in range(halves)]
            a = [gpu.load(half, mask=used & depth, other=0) for half in a]
            b = [gpu.load(w.at[here, pl.ds(at, deep)], mask=inside.T & depth, other=0) for w, _ in weights]
            if a[0].dtype == b[0].dtype:
                found = [[times_all_rows(tile, half) for half in a] for tile in b]
            else:
                both, tile_unit = integer_tile(a[0])
                found = [[joined(*(times_all_rows(tile, half) for half in both)) * tile_unit.T] for tile in b]
            return jax.tree.map(jnp.add, sums, found)

        def times_all_rows(b: Array, a: Array) -> Array:
            return dot(b, jnp.broadcast_to(a, (rows, deep)).T)

        zeros = jnp.zeros((outputs, rows), jnp.int32 if x.dtype == jnp.int8 else jnp.float32)
        sums = lax.fori_loop(0, share, step, [[zeros] * halves for _ in weights])
        which, used = first_rows(rows)
        if unit is None:
            products = [total.T for (total,) in sums]
        else:
            of_rows = gpu.load(unit.at[which, pl.ds(0 * i, 1)], mask=used, other=0)
            products = [joined(*both).T * of_rows for both in sums]
        for n, (_, scale) in enumerate(weights):
            if scale is not None:
                products[n] = products[n] * gpu.load(scale.at[here], mask=inside[0], other=0)
        value = then(*products) if then else products[0]
        gpu.store(y.at[part, which, here], value.astype(y.dtype), mask=used & inside)

    weights = list(zip(matrices, scales, strict=True))
    groups = zip([weights] if then else [[w] for w in weights], results, strict=True)
    run_one(i, [(partial(multiply, group, y), pl.cdiv(y.shape[2], outputs)) for group, y in groups])


def run_one(i, functions: Sequence[tuple[Callable[[int], None], int]]) -> None:
    """Program i of a kernel: the function whose programs it is among, with the number of their first one.

    functions: each with its number of programs, which follow those of the function before.
    """
    first = 0
    for function, count in functions:
        pl.when((first <= i) & (i < first + count))(partial(function, first))
        first += count


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


def integer_rows(x: Array) -> tuple[Array, Array]:
    """`integer_tile` of whole rows [N,D]: -> [N,2,D] int8, [N,1] float32; by XLA two kernels."""
    N, D = x.shape
    width = pl.next_power_of_2(D)
    return pl.pallas_call(
        partial(_integer_rows, width=width),
        grid=(N,),
        out_shape=(result((N, 2, D), jnp.int8, x), result((N, 1), jnp.float32, x)),
        compiler_params=gpu.CompilerParams(num_warps=min(16, max(4, width // 1024)), num_stages=1),
        name="integer_rows",
    )(x)


def _integer_rows(x, parts, unit, *, width: int):
    """The kernel: one row."""
    row, columns = pl.ds(pl.program_id(0), 1), pl.ds(0 * pl.program_id(0), width)
    inside = lax.broadcasted_iota(jnp.int32, (1, width), 1) < x.shape[1]
    both, unit[row] = integer_tile(gpu.load(x.at[row, columns], mask=inside, other=0))
    for which, half in enumerate(both):
        gpu.store(parts.at[row, jnp.int32(which), columns], half, mask=inside)


def integer_products(
    x: Array, matrices: Sequence[Array], scales: Sequence[Array], then: Callable | None = None
) -> list[Array]:
    """Few float rows [N,D] times int8 matrices [M,D], by integers: -> [N,M] float32 for each.

    The tensor cores multiply a weight as it is stored. Converting one takes several instructions; with few
    rows these take longer than reading it. scales, then: see `joined_dot`; the function's value has x's type.
    """
    parts, unit = (x, None) if len(x) <= FEWEST_ROWS else integer_rows(x)
    dtype = x.dtype if then else jnp.float32
    return [jnp.sum(y, 0) for y in joined_dot(parts, matrices, unit, scales, then, dtype)]


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
    if len(x) > FEW_ROWS or not has_integers(x, values_and_scale(weights[0])[0]):
        return grouped_dot(x, weights, sizes)
    if len(x) <= FEWEST_ROWS:
        return grouped_dot(x, weights, sizes, by_integers=True)
    parts, unit = integer_rows(x)
    sums = grouped_dot(parts.reshape(-1, x.shape[1]), weights, 2 * sizes)
    return [joined(y[::2], y[1::2]) * unit for y in sums]


def grouped_dot(
    x: Array, weights: Sequence[Array | QuantizedArray], sizes: Array, by_integers: bool = False
) -> list[Array]:
    """`lax.ragged_dot` with each of the weights: -> [N,M] float32 for each.

    x: [N,D], the rows of expert 0, then those of expert 1... sizes: [E] int32. Rows beyond their sum are left
    undefined. weights, by_integers: see `dot_of_tiles`.
    """
    N, E = len(x), sizes.size
    rows = tile_rows(N, E, 16, 128)
    tiles = min(N, N // rows + min(E, N))
    tile = jnp.stack(find_tile(jnp.arange(tiles), sizes, rows))
    return dot_of_tiles(x, weights, tile, rows, 1 if N == 1 else rows, by_integers)


def dot_by_row(x: Array, weights: Sequence[Array | QuantizedArray], expert: Array) -> list[Array]:
    """Each row times the matrix of its own expert, for each of the weights: -> [N,M] float32 for each.

    x: [N,D], few rows. expert: [N] int32; a row of E is left undefined. No two rows should have one expert,
    which would be read twice. weights: see `dot_of_tiles`. Up to FEWEST_ROWS rows are multiplied by integers.
    """
    values, row = values_and_scale(weights[0])[0], jnp.arange(len(x))
    tile = jnp.stack([jnp.minimum(expert, len(values) - 1), row, row + (expert < len(values))])
    by_integers = len(x) <= FEWEST_ROWS and has_integers(x, values)
    read = 1 if by_integers else 16  # to repeat a row costs less than to make integers of 16, but is not free
    return dot_of_tiles(x, weights, tile.astype(jnp.int32), 16, read, by_integers)


def has_integers(x: Array, values: Array) -> bool:
    """Whether products are computed by integers, if rows are few."""
    return x.dtype == jnp.bfloat16 and values.dtype in (jnp.int8, jnp.int4)


def dot_of_tiles(
    x: Array, weights: Sequence[Array | QuantizedArray], tile: Array, rows: int, read: int, by_integers: bool
) -> list[Array]:
    """Tiles of rows, each times the matrix of an expert, in one kernel for all weights: -> [N,M] for each.

    It reads no expert without rows, and no weight in another type.

    x: [N,D]; it may be int8 if weights are int8 or int4.
    weights, of one format: [E,D,M], float or int8 values. Or int4, values [E,D,I,M] where D counts groups; M
    is even. Or MXFP4, of whole pairs of blocks; M is a multiple of 4.
    tile: [3,tiles] int32, of each tile the expert, its first row, and where the expert's rows end.
    rows: of a tile at most. read: how many rows the kernel reads of each; one that it has read it repeats.
    by_integers: the kernel makes integers of each tile of a float x.
    """
    (N, D), tiles = x.shape, tile.shape[1]
    values, scales = zip(*map(values_and_scale, weights), strict=True)
    packing = packing_of(values[0].dtype)
    deep = 128 // (1 if by_integers else x.dtype.itemsize)
    if scales[0] is not None:
        deep = min(deep, values[0].shape[2])
    if packing.blocks == 2:
        x = in_order_of_bytes(x)

    each, columns = packing.each, [y.shape[-1] for y in values]
    values, scales = zip(*(packing.entries(*w, D) for w in zip(values, scales, strict=True)), strict=True)
    blocks = sum(pl.cdiv(M, COLUMNS) for M in columns)
    parts = max(1, min(gpu.PROGRAMS // (tiles * blocks), values[0].shape[1] // (4 * deep)))
    options = dict(rows=rows, read=read, deep=deep, parts=parts, packing=packing, by_integers=by_integers)
    products = pl.pallas_call(
        partial(_grouped_dot, **options),
        grid=(tiles, blocks, parts),
        out_shape=[result((parts, N, M // each, each), jnp.float32, x, *values, tile) for M in columns],
        compiler_params=gpu.CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=3),
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
    rows: int, read: int, deep: int, parts: int, packing: Packing, by_integers: bool,
):  # fmt: skip
    """The kernel: one tile of rows, COLUMNS columns of one matrix, and one part of the entries along D."""
    i, j, part = (pl.program_id(axis) for axis in range(3))
    expert, begin, end = tile[0, i], tile[1, i], tile[2, i]
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
                return gpu.load(numbers, mask=inside & (at < D), other=0)

            if not packing.exponents:  # a scale for each group
                group = lax.div(at, D // scale.shape[1])
                return [read_scale(group, which).astype(jnp.float32) for which in range(packing.each)]
            pair = lax.div(at, PAIR // 2)  # two of them have a TILE of exponents
            exponents = read_scale(lax.div(pair, 2) * TILE + 2 * lax.rem(pair, 2) + block, 0)
            return [power_of_two((exponents >> 8 * which) & 255) for which in range(packing.each)]

        def step(n, sums):
            at = (part * share + n) * deep
            depth = at + lax.broadcasted_iota(jnp.int32, (deep,), 0) < D
            b = gpu.load(w.at[expert, pl.ds(at, deep), columns], mask=depth[:, None] & inside, other=0)
            for block, tiles in enumerate(packing.unpack(b)):
                a = x.at[pl.ds(begin, read), pl.ds(at * packing.blocks + block * deep, deep)]
                a = gpu.load(a, mask=used(read) & depth[None], other=0)
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
            gpu.store(here, total, mask=used(rows) & inside)

    matrices = zip(weights, scales, products, strict=True)
    run_one(j, [(partial(multiply, *matrix), pl.cdiv(matrix[0].shape[2], width)) for matrix in matrices])
