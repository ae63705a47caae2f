"""Routed experts: each row goes through the experts chosen for it; only experts that have rows are read.

Letters as in model.py, uppercase for this device's share: R rows (all tokens of all rows of the batch), A
choices per row, D model width, E experts, M width of an expert. Weights may be quantized. In int4 the
contracted D or M becomes D,I or M,I: the first counts groups, I is the place in a group.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.dtypes import itemsize_bits
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops import gpu
from ops.matmul import scheme_of
from ops.platform import platform
from ops.tpu import in_hbm, precision, result
from quantize import PART, QuantizedArray, int8_parts, values_and_scale

FEW_ROWS = 128  # up to which multiplying int8 weights takes about as long as reading them: 120 on v5e
VMEM_BYTES = 48 << 20  # of VMEM that the kernel may use; half of it for blocks of weights
ROW_TILE = 8  # rows of a float32 tile


def expert_mlp(x: Array, expert: Array, factor: Array, gate, up, down, scales: str = "input") -> Array:
    """The sum over a row's experts of SwiGLU(factor · x), or of factor · SwiGLU(x): [R,D] -> [R,D] float32.

    expert: [R,A] int32, E for an expert of another device. factor: [R,A]. scales: "input" or "output".
    gate, up: [E,D,M], down: [E,M,D], float or quantized. No row is dropped, however the rows are distributed.
    On TPUs few rows go through `active_experts`, if its blocks fit, see `block_width`.
    """
    if platform() == "tpu" and x.shape[0] <= FEW_ROWS and block_width(gate, down):
        return active_experts(x, expert, factor, gate, up, down, scales)
    return sorted_rows(x, expert, factor, gate, up, down, scales)


def sorted_rows(x: Array, expert: Array, factor: Array, gate, up, down, scales: str) -> Array:
    """`expert_mlp` by a ragged product over the pairs (row, choice), in the order of their expert."""
    A = expert.shape[1]
    E = jax.tree.leaves(gate)[0].shape[0]
    chosen = expert.reshape(-1)
    order = jnp.argsort(chosen)  # pairs with other devices' experts come last
    sizes = jnp.bincount(chosen, length=E + 1)[:E]
    rows, factor = x[order // A], factor.reshape(-1, 1)[order]
    if scales == "input":
        rows = (rows * factor).astype(x.dtype)

    def dot(x: Array, w: Array | QuantizedArray) -> Array:
        y, scale = RAGGED_DOTS.get((platform(), scheme_of(w)), plain_ragged_dot)(x, w, sizes)
        return y if scale is None else y * scale.at[chosen[order]].get(mode="clip")

    h = jax.nn.silu(dot(rows, gate)) * dot(rows, up)
    y = dot(h.astype(x.dtype), down)
    y = y * factor if scales == "output" else y
    y = jnp.where((chosen < E)[:, None], jnp.zeros_like(y).at[order].set(y), 0)
    return y.reshape(-1, A, y.shape[-1]).sum(1)


def plain_ragged_dot(x: Array, w: Array | QuantizedArray, sizes: Array) -> tuple[Array, Array | None]:
    """Sorted rows times their experts' matrices: -> ([N,M] float32, its scale [E,M] or None)."""
    quantized = isinstance(w, QuantizedArray)
    matrices, scale = w.format.expert_matrices(w, x.dtype) if quantized else (w.astype(x.dtype), None)
    return lax.ragged_dot(x, matrices, sizes, preferred_element_type=jnp.float32), scale


def ragged_dot_on_tpu(x: Array, w: Array | QuantizedArray, sizes: Array) -> tuple[Array, Array | None]:
    """Without converting int8, which would write all experts to memory again."""
    values, scale = values_and_scale(w)
    return lax.ragged_dot(x, values, sizes, preferred_element_type=jnp.float32), scale


def ragged_dot_on_gpu(x: Array, w: Array | QuantizedArray, sizes: Array) -> tuple[Array, Array | None]:
    """By a kernel: XLA's product multiplies each row by all experts."""
    values, scale = values_and_scale(w)
    if not gpu.supports(values):
        return plain_ragged_dot(x, w, sizes)
    return gpu.grouped_dot(x, values, sizes), scale


def int4_ragged_dot_on_gpu(x: Array, w: QuantizedArray, sizes: Array) -> tuple[Array, Array | None]:
    """By the same kernel, which also multiplies by the groups' scales."""
    if gpu.supports(w.values):
        return gpu.grouped_dot(x, w, sizes), None
    return ragged_dot_on_gpu(x, w.format.expert_matrices(w, x.dtype)[0], sizes)


# By platform and scheme; all others use `plain_ragged_dot`.
RAGGED_DOTS = {
    ("tpu", "float"): ragged_dot_on_tpu,
    ("tpu", "int8"): ragged_dot_on_tpu,
    ("gpu", "float"): ragged_dot_on_gpu,
    ("gpu", "int8"): ragged_dot_on_gpu,
    ("gpu", "int4"): int4_ragged_dot_on_gpu,
}


def active_experts(
    x: Array, expert: Array, factor: Array, gate, up, down, scales: str, interpret=False
) -> Array:
    """`expert_mlp` as one Pallas call for TPUs, for few rows.

    The grid goes over the experts that have rows and over blocks of M. Each of these experts multiplies all
    rows, with factor 0 for rows that did not choose it: that takes no longer than reading its weights. The
    rest of the grid asks for the last block again, and so fetches nothing.
    """
    int4 = scheme_of(gate) == "int4"
    weights, units = zip(*map(values_and_scale, (gate, up, down)), strict=True)
    E, M = weights[0].shape[0], weights[0].shape[-1]
    (R, D), width, steps = x.shape, block_width(gate, down), min(E, expert.size)
    if not interpret:
        weights, units = in_hbm((weights, units))
    chosen = expert[..., None] == jnp.arange(E)  # RAE
    factors = jnp.sum(jnp.where(chosen, factor[..., None].astype(jnp.float32), 0), 1)
    padding = ((0, -R % (2 * ROW_TILE if int4 else ROW_TILE)), (0, 0))
    x, factors = jnp.pad(x, padding), jnp.pad(factors, padding)
    rows = int8_parts(x) if int4 else (x,)

    def block(i, j, active, n_active):
        """(expert, block of M) at a point of the grid."""
        return active[i], jnp.where(i < n_active[0], j, M // width - 1)

    def spec(*shape: int | None, at) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *point: at(*block(*point)))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0, 0))

    if int4:
        (n, size), (M_groups, M_size) = weights[0].shape[1:3], weights[2].shape[1:3]
        columns = spec(None, n, size, width, at=lambda e, j: (e, 0, 0, j))
        rest = spec(None, width // M_size, M_size, D, at=lambda e, j: (e, j, 0, 0))
        weight_specs = columns, columns, rest
        columns = spec(None, n, width, at=lambda e, j: (e, 0, j))
        unit_specs = columns, columns, spec(None, M_groups, D, at=lambda e, j: (e, 0, 0))
    else:
        columns = spec(None, D, width, at=lambda e, j: (e, 0, j))
        weight_specs = columns, columns, spec(None, width, D, at=lambda e, j: (e, j, 0))
        unit_specs = None, None, None
        if units[0] is not None:  # of one expert they are no whole tile: take its neighbors' along
            columns = spec(min(E, ROW_TILE), width, at=lambda e, j: (e // ROW_TILE, j))
            rest = spec(min(E, ROW_TILE), D, at=lambda e, j: (e // ROW_TILE, 0))
            unit_specs = columns, columns, rest
    y = pl.pallas_call(
        partial(ACTIVE_EXPERTS[scheme_of(gate)], scales=scales),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps, M // width),
            in_specs=(tuple(map(whole, rows)), whole(factors), weight_specs, unit_specs),
            out_specs=whole(x),
        ),
        out_shape=result(x.shape, jnp.float32, x, factors, weights[0]),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        name="active_experts",
        interpret=interpret,
    )(*active_first(jnp.any(chosen, (0, 1)), steps), rows, factors, weights, units)
    return y[:R]


def _active_experts(active, n_active, rows, factors, weights, units, y, *, scales: str):
    """The kernel, at expert i of the active ones and block j of M. All refs but the first two are in VMEM."""
    i, (x,) = pl.program_id(0), rows

    def dot(x: Array, which: int) -> Array:
        w = weights[which][...].astype(x.dtype)
        y = jnp.dot(x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32)
        return y if units[which] is None else y * units[which][pl.ds(lax.rem(active[i], ROW_TILE), 1)]

    def gated(factor: Array) -> Array:
        gate, up = dot(x[...], 0), dot(x[...], 1)
        gate, up = (gate * factor, up * factor) if scales == "input" else (gate, up)
        return dot((jax.nn.silu(gate) * up).astype(x.dtype), 2)

    _add_expert(active, n_active, factors, y, gated, scales)


def _active_int4_experts(active, n_active, rows, factors, weights, units, y, *, scales: str):
    """`_active_experts` of int4 weights: a product of integers for each group, see `int8_parts`."""
    j, (parts, unit) = pl.program_id(1), rows

    def dot(parts: Array, unit: Array, which: int, scale_of) -> Array:
        groups, size, _ = weights[which].shape
        total = 0.0
        for group in range(groups):
            w = weights[which][group].astype(jnp.int8)
            part = jnp.dot(parts[:, group * size : (group + 1) * size], w, preferred_element_type=jnp.int32)
            total += part.astype(jnp.float32) * scale_of(group)
        high, low = jnp.split(total, 2)
        return (high + low / PART) * unit

    def column_scale(which: int):
        return lambda group: units[which][group : group + 1].astype(jnp.float32)

    down_units = units[2][...].astype(jnp.float32)
    number = lax.broadcasted_iota(jnp.int32, down_units.shape, 0)

    def down_scale(group: int) -> Array:
        """By a mask: a row of bfloat16 cannot be taken at a place known only at run time."""
        here = number == j * weights[2].shape[0] + group
        return jnp.sum(jnp.where(here, down_units, 0), 0, keepdims=True)

    def gated(factor: Array) -> Array:
        x_unit = unit[...] * factor if scales == "input" else unit[...]
        gate, up = (dot(parts[...], x_unit, which, column_scale(which)) for which in (0, 1))
        return dot(*int8_parts(jax.nn.silu(gate) * up), 2, down_scale)

    _add_expert(active, n_active, factors, y, gated, scales)


def _add_expert(active, n_active, factors, y, gated, scales: str) -> None:
    """Add what gated(factor) makes of all rows to y. factor: [R,1], of the rows' scores for this expert."""
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when((i == 0) & (j == 0))
    def _():
        y[...] = jnp.zeros_like(y)

    @pl.when(i < n_active[0])
    def _():
        here = lax.broadcasted_iota(jnp.int32, factors.shape, 1) == active[i]
        factor = jnp.sum(jnp.where(here, factors[...], 0), 1, keepdims=True)
        down = gated(factor)
        y[...] += down if scales == "input" else down * factor


# The TPU's kernels, by scheme; all others use `sorted_rows`.
ACTIVE_EXPERTS = {"float": _active_experts, "int8": _active_experts, "int4": _active_int4_experts}


def active_first(active: Array, n: int) -> tuple[Array, Array]:
    """The first n true entries, the last one repeated, and their number: [E] bool -> [n] int32, [1] int32."""
    rank = jnp.cumsum(active) - 1
    place = jnp.minimum(jnp.arange(n), rank[-1])
    here = active & (rank == place[:, None])
    return jnp.sum(jnp.where(here, jnp.arange(active.size), 0), 1), rank[-1:] + 1


def block_width(gate, down) -> int | None:
    """Columns of M that the kernel takes per step: 256, 128 or all.

    None if two blocks of each matrix do not fit, or if gate and down have different kernels or none.
    """
    kernels = {ACTIVE_EXPERTS.get(scheme_of(w)) for w in (gate, down)}
    if len(kernels) > 1 or None in kernels:
        return None
    values, M = values_and_scale(gate)[0], jax.tree.leaves(gate)[0].shape[-1]
    group_size = down.values.shape[2] if scheme_of(down) == "int4" else 1
    column = values.size // values.shape[0] // M * itemsize_bits(values.dtype) // 8
    largest = VMEM_BYTES // 12 // column
    return next((n for n in (256, 128, M) if M % n == 0 and n % group_size == 0 and n <= largest), None)
