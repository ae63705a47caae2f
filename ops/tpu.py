"""TPUs: what a Pallas call declares, copies to and from places known only at run time, long attention.

Few queries attend by the kernel in ../ragged_attention.py; the experts' kernel is in grouped_matmul.py.
Letters, and what attention returns, as in attention.py.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import ManualAxisType, Mesh

from ops import attention
from ops.kv_cache import KV, LANES, map_slots
from ops.platform import on_tpu, varying

TILE = 32  # rows of an int8 tile; a tile of a wider type has fewer rows
MOVED_BYTES = 100 << 20  # XLA may move a smaller array into VMEM, which has 128 MiB


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


# ------------------------------------------------------------------------------------------------- attention


def attend_cached(q: Array, kv: KV, length: Array, gap=None, row: Array | None = None):
    """`attention.attend_cached` block by block, by `splash` if the mask allows it."""
    (B, T), S = q.shape[:2], kv.values.shape[2]
    block = min(attention.BLOCK if T > 1 else attention.DECODE_BLOCK, S)
    read = partial(read_block, kv, B, row, block)

    def attend(part: KV, _, filled: Array):
        k, v = (jnp.where(filled[:, None, :, None], x, 0).astype(q.dtype) for x in dequantized(part))
        segments = jnp.where(length > 0, 1, 2), filled.astype(jnp.int32)
        return splash(q, k, v, kv.layout.scale, masks.FullMask((T, block)), *segments)

    by_segments = gap is None and by_splash(T)
    return attention.attend_blocks(q, kv, length, gap, block, read, attend if by_segments else None)


def read_block(kv: KV, rows: int, row: Array | None, block: int, i: Array) -> tuple[KV, Array]:
    """Block i of a cache's rows, and the slots that it holds. row: [rows] int32; None: all, in order."""
    if row is None and block == kv.values.shape[2]:
        return kv, jnp.arange(block)
    row = jnp.arange(rows) if row is None else row
    at = jnp.full(row.shape, i)
    part = map_slots(lambda axis, x: take_slots(x, row, at, block, 1, axis), kv)
    return part, i * block + jnp.arange(block)


def attend_causal(q: Array, kv: KV, segment: Array, window: int | None = None):
    """`attention.attend_causal`, by `splash` if the chunk's width allows it."""
    T = q.shape[1]
    if not by_splash(T):
        return attention.attend_causal(q, kv, segment, window)
    k, v = (x.astype(q.dtype) for x in dequantized(kv))
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    return splash(q, k, v, kv.layout.scale, mask, segment, segment)


def by_splash(T: int) -> bool:
    return T % LANES == 0


def declares_vma(mesh: Mesh, T: int) -> bool:
    """Whether shard_map can check that every psum is there, for a program that attends with T queries.

    It cannot on TPUs if LANES divides T: jax's splash attention kernel, which attends then, does not declare
    over which mesh axes its result varies.
    """
    return not (by_splash(T) and on_tpu(mesh))


def dequantized(kv: KV) -> tuple[Array, Array]:
    """Keys and values in float32."""
    k, v, *scales = attention.keys_and_values(kv)
    factors = (1 if s is None else s[..., None].astype(jnp.float32) for s in scales)
    return tuple(x.astype(jnp.float32) * factor for x, factor in zip((k, v), factors, strict=True))


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
    lse = jnp.where(lse < attention.MASKED / 2, -jnp.inf, lse).transpose(0, 3, 1, 2)
    return jnp.where(lse[..., None] == -jnp.inf, 0, o.astype(jnp.float32).transpose(0, 3, 1, 2, 4)), lse


def write(kv: KV, new: KV, place: Array, row: Array | None = None, window: int = 1, ring: bool = False) -> KV:
    """`attention.write`: slots before the end of a ring, then those after its start."""
    row = jnp.arange(place.shape[0]) if row is None else row
    if not ring:
        return write_window(kv, new, place, row, window)
    first = jnp.take_along_axis(place, jnp.argmax(place < kv.values.shape[2], 1, keepdims=True), 1)
    before_end = jnp.where(place >= first, place, kv.values.shape[2])
    after_end = jnp.where(place < first, place, kv.values.shape[2])
    kv = write_window(kv, new, before_end, row, window)
    return write_window(kv, new, after_end, row, window)


def write_window(kv: KV, new: KV, place: Array, row: Array, window: int) -> KV:
    """`write` in place: read the slots around each row's places, put the tokens in, and write them back.

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
