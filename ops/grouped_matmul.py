"""Routed experts: each row goes through the experts chosen for it; only experts that have rows are read.

Letters as in model.py, uppercase for this device's share: R rows (all tokens of all rows of the batch), A
choices per row, D model width, E experts, M width of an expert. Weights may be quantized. In int4 the
contracted D or M becomes D,I or M,I: the first counts groups, I is the place in a group.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.dtypes import itemsize_bits
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops import cpu, gpu_products
from ops.matmul import scheme_of
from ops.platform import choose, plain_kinds, platform
from ops.tpu import in_hbm, precision, result
from quantize import (
    CHUNK,
    QuantizedArray,
    e2m1_words,
    int8_parts,
    join_parts,
    power_of_two,
    values_and_scale,
)

VMEM_BYTES = 48 << 20  # of VMEM that the kernel may use; with few rows half of it for blocks of weights
ROW_TILE = 8  # rows of a float32 tile
TILES = 32, 64  # rows that an expert multiplies at a time, if there are many
FEW_ROWS = max(TILES)  # up to which an expert multiplies all rows, about as fast as int8 weights are read


Biases = tuple[Array | None, Array | None, Array | None]  # of gate and up [E,M], and of down [E,D]
Weights = Sequence[Array | QuantizedArray]
Products = list[tuple[Array, Array | None]]  # of rows and each weight, and the scale that is missing


def expert_mlp(
    x: Array, expert: Array, factor: Array, gate, up, down, biases: Biases, activation: Callable, scales: str,
    summed: bool = True,
) -> Array:  # fmt: skip
    """The sum over a row's experts of MLP(factor · x), or of factor · MLP(x): [R,D] -> [R,D] float32.

    expert: [R,A] int32, E for an expert of another device. factor: [R,A]. scales: "input" or "output".
    gate, up: [E,D,M], down: [E,M,D], float or quantized. biases: only where the factor scales the output.
    activation: of gate and up to the hidden units, elementwise.
    summed: False for the addends of the sum, [A,R,D]: 0 for an expert of another device.
    No row is dropped, however the rows are distributed. On TPUs rows go through `active_experts`, if it has a
    kernel for the weights and all that it keeps in VMEM fits, see `block_width`; the addends of many rows
    have no kernel. On GPUs a single row is not sorted.
    """
    function = way_of(x, gate, up, down, summed)
    return function(x, expert, factor, gate, up, down, biases, activation, scales, summed)


def way_of(x: Array, gate, up, down, summed: bool) -> Callable:
    """The function by which rows go through their experts, see `expert_mlp`."""
    if "experts" in plain_kinds():
        return sorted_rows
    if platform() == "tpu" and block_width(gate, down, x) and (summed or len(x) <= FEW_ROWS):
        return active_experts
    weights = gate, up, down
    on_gpu = platform() == "gpu" and all(("gpu", scheme_of(w)) in RAGGED_DOTS for w in weights)
    return one_row if on_gpu and len(x) == 1 and read_by_gpu(weights) else sorted_rows


def sorted_rows(
    x: Array, expert: Array, factor: Array, gate, up, down, biases: Biases, activation: Callable, scales: str,
    summed: bool = True,
) -> Array:  # fmt: skip
    """`expert_mlp` by a ragged product over the pairs (row, choice), in the order of their expert."""
    A = expert.shape[1]
    E = jax.tree.leaves(gate)[0].shape[0]
    chosen = expert.reshape(-1)
    order = jnp.argsort(chosen)  # pairs with other devices' experts come last
    sizes = jnp.bincount(chosen, length=E + 1)[:E]
    pairs = x[order // A], chosen[order], factor.reshape(-1, 1)[order]

    def multiply(x: Array, weights: Sequence) -> Products:
        key = platform(), scheme_of(weights[0])
        return choose("experts", RAGGED_DOTS, key, plain_ragged_dot)(x, weights, sizes)

    y = mlp_of_pairs(*pairs, (gate, up, down), biases, activation, scales, multiply)
    y = jnp.where((chosen < E)[:, None], jnp.zeros_like(y).at[order].set(y), 0)
    y = y.reshape(-1, A, y.shape[-1])
    return y.sum(1) if summed else y.swapaxes(0, 1)


def one_row(
    x: Array, expert: Array, factor: Array, gate, up, down, biases: Biases, activation: Callable, scales: str,
    summed: bool = True,
) -> Array:  # fmt: skip
    """`expert_mlp` of a single row. Each of its choices has another expert: there is nothing to sort."""
    E = jax.tree.leaves(gate)[0].shape[0]
    chosen = expert[0]
    pairs = jnp.repeat(x, len(chosen), 0), chosen, factor.reshape(-1, 1)

    def multiply(x: Array, weights: Sequence) -> Products:
        return dots_on_gpu(gpu_products.dot_by_row, x, weights, chosen)

    y = mlp_of_pairs(*pairs, (gate, up, down), biases, activation, scales, multiply)
    y = jnp.where((chosen < E)[:, None], y, 0)
    return y.sum(0, keepdims=True) if summed else y[:, None]


def mlp_of_pairs(
    x: Array, chosen: Array, factor: Array, matrices, biases: Biases, activation: Callable, scales: str,
    multiply: Callable,
) -> Array:  # fmt: skip
    """Each pair through its expert: x [P,D], chosen [P], factor [P,1] -> [P,D] float32.

    multiply: rows and several weights of one scheme -> for each the products, and the scale by which they are
    still to be multiplied, [E,M], or None.
    """
    x = (x * factor).astype(x.dtype) if scales == "input" else x

    def of_pairs(per_expert: Array) -> Array:
        return per_expert.at[chosen].get(mode="clip")

    def dots(x: Array, *pairs: tuple) -> list[Array]:
        """Of pairs (weight, bias)."""
        weights, biases = zip(*pairs, strict=True)
        if len({scheme_of(w) for w in weights}) > 1:
            return [y for pair in pairs for y in dots(x, pair)]
        found = []
        for (y, scale), bias in zip(multiply(x, weights), biases, strict=True):
            y = y if scale is None else y * of_pairs(scale)
            found.append(y if bias is None else y + of_pairs(bias))
        return found

    (gate, up, down), (gate_bias, up_bias, down_bias) = matrices, biases
    h = activation(*dots(x, (gate, gate_bias), (up, up_bias)))
    (y,) = dots(h.astype(x.dtype), (down, down_bias))
    return y * factor if scales == "output" else y


# The functions below multiply sorted rows by their experts' matrices, of several weights of one scheme. They
# return for each weight ([N,M] float32, the scale [E,M] by which it is still to be multiplied, or None).


def plain_ragged_dot(x: Array, weights: Weights, sizes: Array) -> Products:
    """On any platform."""

    def dot(w: Array | QuantizedArray) -> tuple[Array, Array | None]:
        quantized = isinstance(w, QuantizedArray)
        matrices, scale = w.format.expert_matrices(w, x.dtype) if quantized else (w.astype(x.dtype), None)
        return lax.ragged_dot(x, matrices, sizes, preferred_element_type=jnp.float32), scale

    return [dot(w) for w in weights]


def ragged_dot_on_tpu(x: Array, weights: Weights, sizes: Array) -> Products:
    """Without converting int8, which would write all experts to memory again."""
    dot = partial(lax.ragged_dot, preferred_element_type=jnp.float32)
    return [(dot(x, values, sizes), scale) for values, scale in map(values_and_scale, weights)]


def ragged_dot_on_cpu(x: Array, weights: Weights, sizes: Array) -> Products:
    """Expert by expert: XLA's product multiplies each row by all of them."""
    return [(cpu.grouped_dot(x, values, sizes), scale) for values, scale in map(values_and_scale, weights)]


def ragged_dot_on_gpu(x: Array, weights: Weights, sizes: Array) -> Products:
    """By a kernel: XLA's product multiplies each row by all experts."""
    if read_by_gpu(weights):
        return dots_on_gpu(gpu_products.ragged_dot, x, weights, sizes)
    if scheme_of(weights[0]) in PACKED:
        return ragged_dot_on_gpu(x, [w.format.expert_matrices(w, x.dtype)[0] for w in weights], sizes)
    return plain_ragged_dot(x, weights, sizes)


def dots_on_gpu(dot: Callable, x: Array, weights: Weights, where: Array) -> Products:
    """By the kernel, which also multiplies by the scales of weights in four bits. where: see `dot`."""
    if scheme_of(weights[0]) in PACKED:
        return [(y, None) for y in dot(x, weights, where)]
    values, scales = zip(*map(values_and_scale, weights), strict=True)
    return list(zip(dot(x, values, where), scales, strict=True))


def read_by_gpu(weights: Weights) -> bool:
    """Whether the GPU's kernel can read them."""
    return all(gpu_products.supports(values_and_scale(w)[0]) for w in weights)


PACKED = "int4", "mxfp4"
# By platform and scheme; all others use `plain_ragged_dot`.
RAGGED_DOTS = {
    ("tpu", "float"): ragged_dot_on_tpu,
    ("tpu", "int8"): ragged_dot_on_tpu,
    ("cpu", "float"): ragged_dot_on_cpu,
    ("cpu", "int8"): ragged_dot_on_cpu,
    ("gpu", "float"): ragged_dot_on_gpu,
    ("gpu", "int8"): ragged_dot_on_gpu,
    ("gpu", "int4"): ragged_dot_on_gpu,
    ("gpu", "mxfp4"): ragged_dot_on_gpu,
}


def active_experts(
    x: Array, expert: Array, factor: Array, gate, up, down, biases: Biases, activation: Callable, scales: str,
    summed: bool = True, interpret=False,
) -> Array:  # fmt: skip
    """`expert_mlp` as one Pallas call for TPUs, which reads each expert that has rows once.

    The grid goes over these experts and over blocks of M. The rest of the grid asks for the last block again,
    and so fetches nothing. What an expert multiplies is all rows, if they are few (`_all_rows`), or only its
    own ones (`_own_rows`).
    """
    scheme = SCHEMES[scheme_of(gate)]
    weights, units = zip(*map(values_and_scale, (gate, up, down)), strict=True)
    E, M = weights[0].shape[0], weights[0].shape[-1]
    (R, D), width, steps = x.shape, block_width(gate, down, x), min(E, expert.size)
    if not interpret:
        weights, units = in_hbm((weights, units))
    chosen = expert[..., None] == jnp.arange(E)  # RAE
    factor = factor.astype(jnp.float32)
    factors = jnp.where(chosen, factor[..., None], 0)  # RAE
    factors = jnp.sum(factors, 1)[None] if summed else factors.swapaxes(0, 1)  # 1RE, or ARE
    *hidden_biases, down_bias = biases
    scalars = active_first(jnp.any(chosen, (0, 1)), steps)
    if R <= FEW_ROWS:
        padding = ((0, -R % scheme.row_tile), (0, 0))
        x, factors = jnp.pad(x, padding), jnp.pad(factors, ((0, 0), *padding))
        kernel, rows, scratch = _all_rows, (*scheme.inputs(x), factors), ()
    else:
        order = jnp.argsort(expert.reshape(-1))  # pairs (row, choice); those of other devices' experts last
        end = jnp.cumsum(jnp.sum(chosen, (0, 1), dtype=jnp.int32))
        scalars += end, (order // expert.shape[1]).astype(jnp.int32), factor.reshape(-1)[order]
        kernel, rows = partial(_own_rows, dtype=x.dtype), (x.astype(jnp.float32),)
        scratch = (pltpu.VMEM((max(TILES), D), jnp.float32),) * 2

    def block(i, j, active, n_active, *_):
        """(expert, block of M) at a point of the grid."""
        return active[i], jnp.where(i < n_active[0], j, M // width - 1)

    def spec(*shape: int | None, at) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *point: at(*block(*point)))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))

    def columns(array: Array) -> pl.BlockSpec:
        """Of an array [E,...,M] of gate or up: `width` columns. One of [E,M] has no whole tile in a row."""
        if array.ndim == 2:
            return spec(min(E, ROW_TILE), width, at=lambda e, j: (e // ROW_TILE, j))
        whole = array.shape[1:-1]
        return spec(None, *whole, width, at=lambda e, j: (e, *[0] * len(whole), j))

    def rows_of_down(array: Array) -> pl.BlockSpec:
        """Of an array [E,M or groups of it,...,D] of down: the part for `width` columns; at least a tile."""
        if array.ndim == 2:
            return spec(min(E, ROW_TILE), D, at=lambda e, j: (e // ROW_TILE, 0))
        n, *rest = array.shape[1:]
        part = width * n // M
        if len(rest) == 1 and part < ROW_TILE:
            return spec(None, n, D, at=lambda e, j: (e, 0, 0))
        return spec(None, part, *rest, at=lambda e, j: (e, j, *[0] * len(rest)))

    def specs(arrays: tuple) -> tuple:
        return *jax.tree.map(columns, arrays[:2]), jax.tree.map(rows_of_down, arrays[2])

    out_shape = result((len(factors), *x.shape), jnp.float32, x, factor, weights[0])
    in_specs = tuple(map(whole, rows)), specs(weights), specs(units), jax.tree.map(columns, hidden_biases)
    y = pl.pallas_call(
        partial(kernel, scheme=scheme, activation=activation, scales=scales),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps, M // width),
            in_specs=in_specs,
            out_specs=whole(out_shape),
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        name="active_experts",
        interpret=interpret,
    )(*scalars, rows, weights, units, hidden_biases)
    if down_bias is not None:
        y += jnp.dot(factors, down_bias.astype(jnp.float32), precision="highest")
    return y[0, :R] if summed else y[:, :R]


def _all_rows(
    active, n_active, rows, weights, units, biases, y, *, scheme, activation: Callable, scales: str
):
    """The kernel of few rows, at expert i of the active ones and block j of M.

    Each expert multiplies all rows, with factor 0 for rows that did not choose it. y: [1,R,D] of the sums, or
    [A,R,D] of their addends. All refs but the first two are in VMEM.
    """
    *rows, factors = rows
    i = clear_first(y)

    @pl.when(i < n_active[0])
    def _():
        here = lax.broadcasted_iota(jnp.int32, factors.shape, 2) == active[i]
        factor = jnp.sum(jnp.where(here, factors[...], 0), 2, keepdims=True)  # 1R1, or AR1
        given = [x[...] for x in rows]
        before, after = (factor[0], 1) if scales == "input" else (1, factor)
        y[...] += scheme.mlp(given, before, active[i], weights, units, biases, activation) * after


def _own_rows(
    active, n_active, end, order, factor, rows, weights, units, biases, y, mine, down, *,
    scheme, dtype, activation: Callable, scales: str,
):  # fmt: skip
    """The kernel of many rows: each expert multiplies its own ones, a tile at a time.

    end: [E], of each expert's pairs in `order`, which has each pair's row. factor: [N], of each pair. mine: a
    tile of rows, in VMEM, and down: what their expert makes of it. Rows are gathered and added one by one,
    so that neither sorted rows nor their results are ever written to HBM.
    """
    i, (x,) = clear_first(y), rows
    expert = active[i]
    begin = jnp.where(expert > 0, end[jnp.maximum(expert - 1, 0)], 0)
    most = max(TILES)

    def tile(number, _):
        start = begin + number * most
        count = jnp.minimum(end[expert] - start, most)

        def gather(n, _):
            row = x[pl.ds(order[start + n], 1), :]
            mine[pl.ds(n, 1), :] = row * factor[start + n] if scales == "input" else row

        def add(n, _):
            row = down[pl.ds(n, 1), :]
            y[0, pl.ds(order[start + n], 1), :] += row if scales == "input" else row * factor[start + n]

        def multiply(size: int) -> None:
            given = scheme.inputs(mine[:size].astype(dtype))
            down[:size] = scheme.mlp(given, 1, expert, weights, units, biases, activation)

        lax.fori_loop(0, count, gather, None)
        for fewer, size in pairwise((0, *TILES)):
            pl.when((fewer < count) & (count <= size))(partial(multiply, size))
        lax.fori_loop(0, count, add, None)

    @pl.when(i < n_active[0])
    def _():
        lax.fori_loop(0, pl.cdiv(end[expert] - begin, most), tile, None)


def clear_first(y):
    """Make y zeros at the first point of the grid: -> the point's first index."""
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when((i == 0) & (j == 0))
    def _():
        y[...] = jnp.zeros_like(y)

    return i


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How `active_experts` multiplies weights of a scheme.

    mlp: what one expert makes of rows, see `float_mlp`. inputs: the form in which mlp takes rows. row_tile:
    rows are padded to a multiple of it. unit_size: how many rows of a down matrix belong together.
    many_columns: sizes of a block of M that are tried first if there are many rows.
    """

    mlp: Callable
    inputs: Callable[[Array], tuple[Array, ...]] = lambda x: (x,)
    row_tile: int = ROW_TILE
    unit_size: Callable[[QuantizedArray], int] = lambda down: 1
    many_columns: tuple[int, ...] = ()


def float_mlp(rows, factor, expert, weights, units, biases, activation: Callable) -> Array:
    """What one expert, or a block of its M, makes of rows times a factor: -> [n,D] float32.

    rows: as the scheme's inputs. factor: [n,1] or 1. weights, units, biases: refs in VMEM.
    """

    def dot(x: Array, which: int) -> Array:
        w = weights[which][...].astype(x.dtype)
        y = jnp.dot(x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32)
        return y if units[which] is None else y * of_expert(units[which], expert)

    return mlp_of_floats(dot, *rows, factor, biases, expert, activation)


def mlp_of_floats(dot: Callable, x: Array, factor, biases, expert, activation: Callable) -> Array:
    """The MLP of floats x. dot: multiplies by gate, up or down: 0, 1 or 2."""
    hidden = (dot(x, which) * factor for which in (0, 1))
    gate, up = (add_bias(y, bias, expert) for y, bias in zip(hidden, biases, strict=True))
    return dot(activation(gate, up).astype(x.dtype), 2)


def row_at(rows: Array, place) -> Array:
    """The row at a place known only at run time: [n,N] -> [1,N] float32.

    By a mask: only a row of float32 can be taken at such a place.
    """
    here = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == place
    return jnp.sum(jnp.where(here, rows.astype(jnp.float32), 0), 0, keepdims=True)


def of_expert(rows, expert) -> Array:
    """The row of an expert, in a block of it and its neighbors: [1,N] float32."""
    return row_at(rows[...], lax.rem(expert, ROW_TILE))


def add_bias(y: Array, bias, expert) -> Array:
    return y if bias is None else y + of_expert(bias, expert)


def int4_mlp(rows, factor, expert, weights, units, biases, activation: Callable) -> Array:
    """`float_mlp` of int4 weights: a product of integers for each group, see `int8_parts`."""
    j, (parts, unit) = pl.program_id(1), rows

    def dot(parts: Array, unit: Array, which: int, scale_of) -> Array:
        groups, size, _ = weights[which].shape
        total = 0.0
        for group in range(groups):
            w = weights[which][group].astype(jnp.int8)
            part = jnp.dot(parts[:, group * size : (group + 1) * size], w, preferred_element_type=jnp.int32)
            total += part.astype(jnp.float32) * scale_of(group)
        return join_parts(total) * unit

    def column_scale(which: int):
        return lambda group: units[which][group : group + 1].astype(jnp.float32)

    def down_scale(group: int) -> Array:
        return row_at(units[2][...], j * weights[2].shape[0] + group)

    gate, up = (dot(parts, unit * factor, which, column_scale(which)) for which in (0, 1))
    gate, up = (add_bias(y, bias, expert) for y, bias in zip((gate, up), biases, strict=True))
    return dot(*int8_parts(activation(gate, up)), 2, down_scale)


def mxfp4_mlp(rows, factor, expert, weights, units, biases, activation: Callable) -> Array:
    """`float_mlp` of MXFP4 weights, which become bfloat16 in VMEM, see `mxfp4_matrix`."""

    def dot(x: Array, which: int) -> Array:
        w, largest = mxfp4_matrix(weights[which], units[which])
        w = w.astype(x.dtype)
        y = jnp.dot(x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32)
        return y * 2.0 ** -(RANGE + 2) * power_of_two(largest)

    return mlp_of_floats(dot, *rows, factor, biases, expert, activation)


RANGE = 80  # exponents below the largest of a column that the kernel tells apart


def mxfp4_matrix(packed, exponents) -> tuple[Array, Array]:
    """Bytes [n/64,32,N] and exponents [n/128,8,N] -> (matrix [n,N] bfloat16, largest exponents [1,N]).

    Exactly the weights times 2**(RANGE + 2 + 127 - largest exponent of the column), see `e2m1_words`; a 0 is
    2**-128 as large as it would be if its code stood for 0.75. An exponent more than RANGE below the largest
    is taken for one that is RANGE below.
    """
    exponents = exponents[...].astype(jnp.int32)
    largest = jnp.max(jnp.max(exponents, 0), 0, keepdims=True)
    relative = jnp.maximum(exponents - largest + RANGE, 0)
    relative = (relative << 7) | (relative << 23)
    blocks = []
    for pair in range(packed.shape[0]):
        codes = pltpu.bitcast(packed[pair], jnp.int32)  # [8,N], of bytes 4i to 4i + 3
        for block, words in enumerate(e2m1_words(codes)):
            row = 2 * (pair % 2) + block
            exponent = relative[pair // 2, row : row + 1]
            blocks += [pltpu.bitcast(word + exponent, jnp.bfloat16) for word in words]  # [16,N] each
    return jnp.concatenate(blocks), largest


FLOATS = Scheme(float_mlp, many_columns=(512, 384))
INT4 = Scheme(int4_mlp, int8_parts, 2 * ROW_TILE, unit_size=lambda down: down.values.shape[2])
MXFP4 = Scheme(mxfp4_mlp, unit_size=lambda down: CHUNK)
SCHEMES = {"float": FLOATS, "int8": FLOATS, "int4": INT4, "mxfp4": MXFP4}  # all others use `sorted_rows`


def active_first(active: Array, n: int) -> tuple[Array, Array]:
    """The first n true entries, the last one repeated, and their number: [E] bool -> [n] int32, [1] int32."""
    rank = jnp.cumsum(active) - 1
    place = jnp.minimum(jnp.arange(n), rank[-1])
    here = active & (rank == place[:, None])
    return jnp.sum(jnp.where(here, jnp.arange(active.size), 0), 1), rank[-1:] + 1


def block_width(gate, down, x: Array) -> int | None:
    """Columns of M that the kernel takes per step for rows x.

    None if two blocks of each matrix do not fit, with many rows beside these and their results, or if gate
    and down have different kernels or none. Many rows are gathered anew for each block, so a larger one is
    better; but for int4 and MXFP4 its code takes minutes to compile.
    """
    scheme, other = (SCHEMES.get(scheme_of(w)) for w in (gate, down))
    if scheme is None or scheme != other:
        return None
    values, _ = values_and_scale(gate)
    (R, D), M, unit_size = x.shape, values.shape[-1], scheme.unit_size(down)
    column = values.size // values.shape[0] // M * itemsize_bits(values.dtype) // 8
    sizes, room = (256, 128, M), VMEM_BYTES // 2
    if R > FEW_ROWS:
        room = VMEM_BYTES - 2 * 4 * D * (R + 2 * max(TILES))
        sizes = scheme.many_columns + sizes
    return next((n for n in sizes if M % n == 0 and n % unit_size == 0 and 6 * n * column <= room), None)
