"""Pallas on TPUs: what every call has to declare, and copies to and from positions known only at run time.

The TPU's attention kernel is in ../ragged_attention.py, its experts' kernel in grouped_matmul.py.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ops.platform import on_tpu

LANES = 128  # of a vector register: cache slots are allocated in multiples of it
TILE = 32  # rows of an int8 tile; a tile of a wider type has fewer rows
MOVED_BYTES = 100 << 20  # XLA may move a smaller array into VMEM, which has 128 MiB


def varying(*inputs: Array) -> frozenset[str]:
    """The mesh axes over which any of these varies."""
    return frozenset.union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))


def result(shape, dtype, *inputs: Array) -> jax.ShapeDtypeStruct:
    """The shape of a Pallas call's result, which must declare the mesh axes over which it varies."""
    manual = ManualAxisType(varying=varying(*inputs))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=manual)


def precision(dtype) -> str:
    """The precision of a kernel's products, whatever jax's default is: exact for float32."""
    return "highest" if dtype == jnp.float32 else "default"


def in_hbm(tree):
    """Arrays that a Pallas call reads from HBM: else XLA may move a whole array to VMEM first, if it fits."""
    return jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), tree)


def take_rows(matrix: Array, rows: Array) -> Array:
    """Rows of a matrix, exactly: [V,D], [...] int32 -> [...,D]. Rows outside of it are undefined.

    On TPUs by a Pallas call that reads the tiles of these rows, int8 as bfloat16: XLA would copy a whole int8
    matrix into another layout, and a whole float one into VMEM, if it fits. For other matrices, and for many
    rows of a float one, XLA's gather reads less.
    """
    V, D = matrix.shape
    int8, nbytes = matrix.dtype == jnp.int8, matrix.size * matrix.dtype.itemsize
    if not (on_tpu() and matrix.dtype in (jnp.int8, jnp.bfloat16, jnp.float32)):
        return matrix[rows]
    if not int8 and (rows.size > LANES or D % LANES or nbytes > MOVED_BYTES):
        return matrix[rows]
    dtype, tile_rows = jnp.bfloat16 if int8 else matrix.dtype, TILE // matrix.dtype.itemsize
    flat = jnp.clip(rows.reshape(-1), 0, V - 1)

    def pick(rows, tile, out):
        here = lax.broadcasted_iota(jnp.int32, tile.shape, 0) == lax.rem(rows[pl.program_id(0)], tile_rows)
        row = jnp.sum(jnp.where(here, tile[...].astype(jnp.float32), 0), 0, keepdims=True)
        out[...] = row.astype(out.dtype)

    picked = pl.pallas_call(
        pick,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=flat.shape,
            in_specs=[pl.BlockSpec((tile_rows, D), lambda i, rows: (lax.div(rows[i], tile_rows), 0))],
            out_specs=pl.BlockSpec((None, 1, D), lambda i, rows: (i, 0, 0)),
        ),
        out_shape=result((flat.size, 1, D), dtype, matrix, rows),
        name="take_rows",
    )(flat, in_hbm(matrix))
    return picked.reshape(*rows.shape, D)


def take_slots(cache: Array, row: Array, at: Array, unit: int, n: int, axis: int) -> Array:
    """For each b, copy n blocks of `unit` slots of row row[b], from block at[b] on, by a Pallas call.

    cache: [_,K,S,C], axis 2, or [_,K,2,S], axis 3. Slots beyond S are undefined.
    """
    shape = [row.size, *cache.shape[1:]]
    shape[axis] = n * unit
    return pl.pallas_call(
        _copy,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*shape[:2], n),
            in_specs=[_blocks(cache, unit, axis, moving=True)],
            out_specs=_blocks(cache, unit, axis, moving=False),
        ),
        out_shape=result(shape, cache.dtype, cache, at),
        name="take_slots",
    )(row, at, in_hbm(cache))


def put_slots(cache: Array, new: Array, row: Array, at: Array, unit: int, axis: int) -> Array:
    """The reverse of `take_slots`, in place."""
    return pl.pallas_call(
        lambda row, at, new, _, out: _copy(row, at, new, out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*new.shape[:2], new.shape[axis] // unit),
            in_specs=[_blocks(cache, unit, axis, moving=False), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=_blocks(cache, unit, axis, moving=True),
        ),
        out_shape=result(cache.shape, cache.dtype, cache, at),
        input_output_aliases={3: 0},
        name="put_slots",
    )(row, at, new, in_hbm(cache))


def _blocks(cache: Array, unit: int, axis: int, moving: bool) -> pl.BlockSpec:
    """Block j of row b and head k; if `moving`, of the cache: block at[b] + j of row row[b]."""

    def index(b, k, j, row, at):
        b, j = (row[b], at[b] + j) if moving else (b, j)
        return (b, k, j, 0) if axis == 2 else (b, k, 0, j)

    shape = [None, None, *cache.shape[2:]]
    shape[axis] = unit
    return pl.BlockSpec(tuple(shape), index)


def _copy(row, at, source, out):
    out[...] = source[...]
