"""Ragged attention: each row of a batch attends to as many cached slots as it has filled.

model.py calls `ragged_decode`, `attend_cached`, `attend_causal` and `write`. Each is the reference in
ops/attention.py, or what KERNELS lists for the platform: functions of ops/cpu.py, ops/gpu_attention.py and
ops/tpu.py, and two that end in the Pallas kernel below, which on TPUs writes a token into the cache and
attends to it.

Letters as in model.py: B rows, T queries, S cached slots, K key/value heads, G queries per key/value head,
H width of keys, C columns of a slot; here, uppercase, each is what this device has. Attention returns the
pair (o, lse), see ops/attention.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops import attention, cpu, gpu_attention, tpu
from ops.attention import MASKED
from ops.kv_cache import KV, LANES
from ops.platform import choose, plain_kinds, platform
from ops.tpu import TILE, in_hbm, precision, result
from quantize import PART, int8_parts

SCORES = 1 << 18  # computed at once: several copies of them are in VMEM
GROUP = 128  # rows x heads x tokens in VMEM at once
VMEM_BYTES = 32 << 20  # of VMEM that the kernel may use
FEW_QUERIES = 128  # T·G, queries per key/value head, up to which the kernel is used

# Slots per block of the decode kernel, large and small, by (columns of a slot, bytes per element): for 128
# and 256 columns those with the fewest bundles (docs/development/log.md), for more columns what fits as well.
DECODE_BLOCKS = {
    (128, 1): (4096, 512),
    (128, 2): (8192, 512),
    (128, 4): (4096, 256),
    (256, 1): (8192, 512),
    (256, 2): (8192, 256),
    (256, 4): (4096, 256),
    (512, 1): (4096, 512),
    (512, 2): (4096, 256),
    (512, 4): (2048, 256),
    (640, 1): (4096, 512),
    (640, 2): (2048, 256),
    (640, 4): (1024, 256),
    (1024, 1): (2048, 512),
    (1024, 2): (1024, 256),
    (1024, 4): (1024, 256),
}


def by_platform(reference: Callable) -> Callable:
    """The function that KERNELS lists for the platform that is being compiled for, or else the reference."""

    @functools.wraps(reference)
    def chosen(*arguments, **options):
        function = choose("attention", KERNELS, (platform(), reference), reference)
        return function(*arguments, **options)

    return chosen


attend_cached = by_platform(attention.attend_cached)
attend_causal = by_platform(attention.attend_causal)
write = by_platform(attention.write)


def write_then_attend(q: Array, new: KV, kv: KV, length: Array, place: Array, gap=None, row=None):
    """Write one new token per row, then attend to the row's first `length` slots: -> (o, lse), KV.

    q: [B,1,K,G,H]. new: the token as the cache stores it, values [B,K,1,C]. place: [B,1] int32, its slot, or
    S if another device holds it. length, gap, row: see `attend_cached`; the new token is among the slots that
    are attended to. On TPUs slots in its tile of 32 that are not attended to may become zeros.
    """
    kv = write(kv, new, place, row)
    return attend_cached(q, kv, length, gap, row), kv


ragged_decode = by_platform(write_then_attend)


def sees_by_query(q: Array, kv: KV) -> bool:
    """Whether `attend_cached` lets the queries of one row see different slots.

    A chunk can then attend to a cache that has the chunk, at once. q: [B,T,K,G,H].
    """
    return platform() == "gpu" and "attention" not in plain_kinds() and gpu_attention.by_flash(q, kv)


# --------------------------------------------------------------------------------------------------- on GPUs


def decode_on_gpu(q: Array, new: KV, kv: KV, length: Array, place: Array, gap=None, row=None):
    """`ragged_decode` by `flash`, which also writes the token, where it supports the cache."""
    decode = gpu_attention.decode if gpu_attention.by_flash(q, kv) else write_then_attend
    return decode(q, new, kv, length, place, gap, row)


# --------------------------------------------------------------------------------------------------- on TPUs


def has_kernel(kv: KV) -> bool:
    return (kv.values.shape[3], kv.values.dtype.itemsize) in DECODE_BLOCKS


def decode_on_tpu(q: Array, new: KV, kv: KV, length: Array, place: Array, gap=None, row=None):
    """`ragged_decode` as one kernel, which reads each row as far as it is filled."""
    if not has_kernel(kv):
        return write_then_attend(q, new, kv, length, place, gap, row)
    length, place, gap = jax.tree.map(lambda x: x[:, 0], (length, place, gap))
    return ragged_attention_tpu(q, kv, length, gap, row, new=new, place=place)


def attend_cached_on_tpu(q: Array, kv: KV, length: Array, gap=None, row: Array | None = None):
    """`attend_cached`: few queries by the kernel, which reads each row as far as it is filled."""
    B, T, _, G, _ = q.shape
    if not has_kernel(kv) or T * G > FEW_QUERIES:
        return tpu.attend_cached(q, kv, length, gap, row)
    sees = length > 0
    if gap is None or T == 1:
        gap = jax.tree.map(lambda x: x[:, 0], gap)
        (o, lse), _ = ragged_attention_tpu(q, kv, jnp.max(length, 1), gap, row)
    else:  # each query as a row of its own, for each sees other slots
        row = jnp.repeat(jnp.arange(B) if row is None else row, T)
        one = jax.tree.map(lambda x: x.reshape(B * T, *x.shape[2:]), (length, gap))
        (o, lse), _ = ragged_attention_tpu(q.reshape(B * T, 1, *q.shape[2:]), kv, *one, row)
        o, lse = (x.reshape(B, T, *x.shape[2:]) for x in (o, lse))
    return jnp.where(sees[..., None, None, None], o, 0), jnp.where(sees[..., None, None], lse, -jnp.inf)


# By platform and reference; all others use the reference.
KERNELS = {
    ("cpu", attention.attend_cached): cpu.attend_cached,
    ("gpu", attention.attend_cached): gpu_attention.attend_cached,
    ("gpu", attention.attend_causal): gpu_attention.attend_causal,
    ("gpu", write_then_attend): decode_on_gpu,
    ("tpu", attention.attend_cached): attend_cached_on_tpu,
    ("tpu", attention.attend_causal): tpu.attend_causal,
    ("tpu", attention.write): tpu.write,
    ("tpu", write_then_attend): decode_on_tpu,
}


# -------------------------------------------------------------------------------- the Pallas kernel for TPUs


def ragged_attention_tpu(
    q: Array, kv: KV, length: Array, gap=None, row=None, *, new=None, place=None, blocks=None,
    interpret=False,
):  # fmt: skip
    """`ragged_decode` as one Pallas call, which reads the filled blocks and writes one tile per row.

    Without `new` nothing is written and the KV is None; there may be T queries, which see the same slots.
    The new token is put into its block in VMEM and its tile is written back, which is cheaper than a scatter.
    int8 keys enter the MXU unconverted, and each query as two `int8_parts`, 16 bits in all; int8 values are
    converted to bfloat16. With a float cache, queries are rounded to its type.

    blocks: slots of a large and a small one, powers of two from 128 on; by default DECODE_BLOCKS.
    """
    B, T, K, G, H = q.shape
    R = B * K  # rows x heads to compute; the cache may have more
    quantized = kv.scale is not None
    cache, new = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (kv, new))
    S, C, layout = *kv.values.shape[2:], kv.layout
    large, small = blocks or DECODE_BLOCKS[kv.values.shape[3], kv.values.dtype.itemsize]
    while large > small and T * G * large > SCORES:
        large //= 2
    large, small = min(large, S), min(small, S)
    # A key or value that does not fill registers shares them: all columns are multiplied, by zeros in q.
    keys = H if H % LANES == 0 else C
    value = layout.value if all(x % LANES == 0 for x in layout.value) else (0, C)
    q = q.swapaxes(1, 2).reshape(R, T * G, H).astype(jnp.float32)
    q = q * (layout.scale * math.log2(math.e))  # the kernel works with exp2
    q = jnp.pad(q, ((0, 0), (0, 0), (0, keys - H)))
    unit = None
    if quantized:
        q, unit = jax.vmap(int8_parts)(q)
        unit = unit / PART
        if new is not None:
            new = dataclasses.replace(new, scale=new.scale.astype(jnp.float32))
    vectors = q.astype(jnp.int8 if quantized else kv.values.dtype), unit, new
    length = jnp.minimum(length, S)  # a DMA from beyond the cache would stop the device
    rows = jax.tree.map(partial(jnp.repeat, repeats=K), (length, place, gap))
    rows += (None if row is None else (row[:, None] * K + jnp.arange(K)).reshape(R),)

    def in_memory(space, tree):
        return jax.tree.map(lambda _: pl.BlockSpec(memory_space=space), tree)

    def by_row(tree):
        def spec(x):
            return pl.BlockSpec((group, *x.shape[1:]), lambda i: (i, 0, 0))

        return jax.tree.map(spec, tree)

    group = min(R, max(GROUP // T, 1))
    results = tuple(result((R, T * G, n), jnp.float32, q, kv.values) for n in (value[1] - value[0], LANES))
    buffer = KV(
        pltpu.VMEM((2, large, C), cache.values.dtype),
        pltpu.VMEM((2, 2, large), cache.scale.dtype) if quantized else None,
        layout,
    )
    if not interpret:
        cache = in_hbm(cache)
    before_cache = len(jax.tree.leaves((rows, vectors)))
    written = None if new is None else jax.tree.map(lambda x: result(x.shape, x.dtype, q, x), cache)
    o, lse, written = pl.pallas_call(
        partial(_ragged_attention, large=large, small=small, value=value),
        grid=(pl.cdiv(R, group),),
        in_specs=(in_memory(pltpu.SMEM, rows), by_row(vectors), in_memory(pltpu.HBM, cache)),
        out_shape=(*results, written),
        out_specs=(*by_row(results), in_memory(pltpu.HBM, written)),
        scratch_shapes=[buffer, pltpu.SemaphoreType.DMA((2, 2)), pltpu.SemaphoreType.DMA((2,))],
        input_output_aliases={before_cache + i: 2 + i for i in range(len(jax.tree.leaves(written)))},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=not interpret,
            disable_semaphore_checks=not interpret,
        ),
        name="ragged_decode" if new is not None else "ragged_attention",
        interpret=interpret,
    )(rows, vectors, cache)
    o = o[..., layout.value[0] - value[0] : layout.value[1] - value[0]]
    o, lse = o.reshape(B, K, T, G, -1), lse[..., 0].reshape(B, K, T, G)
    parts = o.swapaxes(1, 2), lse.swapaxes(1, 2)
    return parts, None if new is None else jax.tree.map(lambda x, like: x.reshape(like.shape), written, kv)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The rows `begin` to `end` of one call of the kernel, which reads them block by block, as Pallas' refs.

    length, place, gap, home: of all rows, in SMEM; home: the row of the cache. q, unit, new, o, lse: of these
    rows, in VMEM. cache: in HBM. buffer: two blocks of the cache, in VMEM; reading, writing: semaphores.
    large, small: slots of a block. value: the columns that make o.
    """

    length: Any
    place: Any
    gap: Any
    home: Any
    q: Any
    unit: Any
    new: KV | None
    cache: KV
    o: Any
    lse: Any
    buffer: KV
    reading: Any
    writing: Any
    begin: Array
    end: Array
    large: int
    small: int
    value: tuple[int, int]

    @property
    def quantized(self) -> bool:
        return self.cache.scale is not None

    @property
    def overlaps(self) -> bool:
        """Whether the last small block of a row overlaps the one before."""
        return self.cache.values.shape[1] % self.small != 0


@dataclasses.dataclass(frozen=True)
class Block:
    """Number i of the blocks that the walk reads: `size` slots of row r, from slot `at` on."""

    i: Array | int
    r: Array
    at: Array
    size: int


def _ragged_attention(
    rows, vectors, cache: KV, o, lse, written, buffer: KV, reading, writing, *,
    large: int, small: int, value: tuple[int, int],
):  # fmt: skip
    """The kernel, for one group of rows. `written` is the cache's memory again, or None.

    A row is read in large blocks as far as its tokens fill them, then in small ones. While the kernel
    computes on one block, it copies the next, of this row or another, into the other half of the buffer:
    block i of the walk is in half i % 2.
    """
    n_rows, group = rows[0].shape[0], o.shape[0]
    begin = pl.program_id(0) * group
    end = jnp.minimum(begin + group, n_rows)
    cache = cache if written is None else written
    walk = Walk(
        *rows, *vectors, cache, o, lse, buffer, reading, writing, begin, end, large, small, value
    )  # fmt: skip
    start_reading(walk, 0, begin, first_slot(walk, begin))
    lax.fori_loop(begin, end, partial(attend_row, walk), 0)


def first_slot(walk: Walk, r):
    """Where row r is read first: its first small block, or that in which a gap from slot 0 ends."""
    if walk.gap is None:
        return 0
    begin = jnp.where(walk.gap[0][r] == 0, walk.gap[1][r], 0)
    last = jnp.maximum(walk.length[r] - 1, 0)
    return lax.div(jnp.minimum(begin, last), walk.small) * walk.small


def slot_after(walk: Walk, r, at):
    """Row and slot of the block after the one at slot `at` of row r."""
    at = at + jnp.where(walk.length[r] - at >= walk.large, walk.large, walk.small)
    done = at >= walk.length[r]
    r = jnp.where(done, r + 1, r)
    return r, jnp.where(done, first_slot(walk, jnp.minimum(r, walk.end - 1)), at)


def origin(walk: Walk, block: Block):
    """The block's first slot in memory."""
    S = walk.cache.values.shape[1]
    return pl.multiple_of(jnp.minimum(block.at, S - block.size) if walk.overlaps else block.at, LANES)


def copies_to_buffer(walk: Walk, block: Block) -> list:
    slots, half = pl.ds(origin(walk, block), block.size), lax.rem(block.i, 2)
    r = block.r if walk.home is None else walk.home[block.r]
    to = walk.buffer.values.at[half, pl.ds(0, block.size)]
    copies = [pltpu.make_async_copy(walk.cache.values.at[r, slots], to, walk.reading.at[0, half])]
    if walk.quantized:
        to = walk.buffer.scale.at[half, :, pl.ds(0, block.size)]
        copies.append(pltpu.make_async_copy(walk.cache.scale.at[r, :, slots], to, walk.reading.at[1, half]))
    return copies


def start_reading(walk: Walk, i, r, at) -> None:
    """Begin to copy block i of the walk, at slot `at` of row r, into the buffer."""
    is_large = walk.length[jnp.minimum(r, walk.end - 1)] - at >= walk.large
    for size, wanted in ((walk.large, is_large), (walk.small, ~is_large)):

        @pl.when((r < walk.end) & wanted)
        def _(size=size):
            for copy in copies_to_buffer(walk, Block(i, r, at, size)):
                copy.start()


def put_new(walk: Walk, block: Block, values, scale):
    """If the new token's slot is in this block: put it there, and begin to write its tile back.

    Returns the function that waits for the writing.
    """
    size, r, place = block.size, block.r, walk.place[block.r]
    base = origin(walk, block)
    slot = place - base
    inside = (place >= block.at) & (slot < size)
    tile = pl.multiple_of(lax.div(jnp.clip(slot, 0, size - 1), TILE) * TILE, TILE)
    lane = pl.multiple_of(lax.div(jnp.clip(slot, 0, size - 1), LANES) * LANES, LANES)
    new_tile = values.at[pl.ds(tile, TILE)]
    new_lanes = scale.at[:, pl.ds(lane, LANES)] if walk.quantized else None

    def copies_to_cache() -> list:
        to = walk.cache.values.at[r, pl.ds(pl.multiple_of(base + tile, TILE), TILE)]
        copies = [pltpu.make_async_copy(new_tile, to, walk.writing.at[0])]
        if walk.quantized:
            to = walk.cache.scale.at[r, :, pl.ds(pl.multiple_of(base + lane, LANES), LANES)]
            copies.append(pltpu.make_async_copy(new_lanes, to, walk.writing.at[1]))
        return copies

    @pl.when(inside)
    def _():
        replace_slice(new_tile, walk.new.values[r - walk.begin], slot - tile, axis=0)
        if walk.quantized:
            replace_slice(new_lanes, walk.new.scale[r - walk.begin], slot - lane, axis=1)
        for copy in copies_to_cache():
            copy.start()

    def wait() -> None:
        @pl.when(inside)
        def _():
            for copy in copies_to_cache():
                copy.wait()

    return wait


def visible(walk: Walk, block: Block, shape: tuple[int, int], axis: int) -> Array:
    """Which entries belong to slots that the row's queries see. axis: that of slots."""
    r, base = block.r, origin(walk, block)
    slots, high = lax.broadcasted_iota(jnp.int32, shape, axis), walk.length[r] - base
    inside = (slots >= block.at - base) & (slots < high) if walk.overlaps else slots < high
    if walk.gap is None:
        return inside
    return inside & ((slots < walk.gap[0][r] - base) | (slots >= walk.gap[1][r] - base))


def attend_block(walk: Walk, block: Block, state):
    """Continue the softmax of a row's queries over one block.

    state: the largest score and the sum of exponentials, [G,1] each, and the weighted sum of values.
    """
    start_reading(walk, block.i + 1, *slot_after(walk, block.r, block.at))
    for copy in copies_to_buffer(walk, block):
        copy.wait()
    here, half, G = block.r - walk.begin, lax.rem(block.i, 2), walk.o.shape[1]
    values = walk.buffer.values.at[half, pl.ds(0, block.size)]
    scale = walk.buffer.scale.at[half, :, pl.ds(0, block.size)] if walk.quantized else None
    masked = block.size == walk.small or walk.gap is not None  # a large block is full

    if masked and not walk.quantized:  # 0 * NaN is NaN: what was never written must not reach the products
        clean = jnp.where(visible(walk, block, values.shape, 0), values[...].astype(jnp.float32), 0)
        values[...] = clean.astype(values.dtype)
    wait = None if walk.new is None else put_new(walk, block, values, scale)

    q, k, v = walk.q[here], values[:, : walk.q.shape[-1]], values[:, slice(*walk.value)]
    if walk.quantized:
        parts = dot(q, k, ((1,), (1,)), jnp.int32)
        scores = (parts[:G] * PART + parts[G:]).astype(jnp.float32) * walk.unit[here]
        scores = scores * scale[0:1].astype(jnp.float32)
    else:
        scores = dot(q, k, ((1,), (1,)), jnp.float32)
    if masked:
        scores = jnp.where(visible(walk, block, scores.shape, 1), scores, MASKED)
    old_peak, total, acc = state
    peak = jnp.maximum(old_peak, jnp.max(scores, -1, keepdims=True))
    p, shrink = jnp.exp2(scores - peak), jnp.exp2(old_peak - peak)
    total = total * shrink + jnp.sum(p, -1, keepdims=True)
    if walk.quantized:
        p, v = p * scale[1:2].astype(jnp.float32), v.astype(jnp.bfloat16)  # exact
        if masked:  # the scale of a slot that was never written may be NaN
            p = jnp.where(visible(walk, block, p.shape, 1), p, 0)
    acc = acc * shrink + dot(p.astype(v.dtype), v, ((1,), (0,)), jnp.float32)
    if wait:  # before the buffer is filled again
        wait()
    return peak, total, acc


def attend_row(walk: Walk, r, i):
    """Attend to the blocks of row r. i: the number of its first block -> that of the first one after it."""
    length, at = walk.length[r], first_slot(walk, r)
    n_large = lax.div(length - at, walk.large)
    rest = at + n_large * walk.large
    n_small = lax.div(length - rest + walk.small - 1, walk.small)
    n_small = jnp.where(n_large + n_small == 0, 1, n_small)  # as `slot_after` has it for a row without slots
    G, width = walk.o.shape[1:]
    state = jnp.full((G, 1), MASKED), jnp.zeros((G, 1)), jnp.zeros((G, width))
    for n, start, size in ((n_large, at, walk.large), (n_small, rest, walk.small)):

        def step(j, state, i=i, start=start, size=size):
            return attend_block(walk, Block(i + j, r, start + j * size, size), state)

        state = lax.fori_loop(0, n, step, state)
        i = i + n
    peak, total, acc = state
    any_seen = length > 0
    if walk.gap is not None:
        any_seen &= (walk.gap[0][r] > 0) | (walk.gap[1][r] < length)
    walk.o[r - walk.begin] = jnp.where(any_seen, acc / total, 0)
    natural = (peak + jnp.log2(total)) * math.log(2)
    walk.lse[r - walk.begin] = jnp.broadcast_to(jnp.where(any_seen, natural, -jnp.inf), (G, LANES))
    return i


def replace_slice(ref, new: Array, at, axis: int) -> None:
    """Replace the slice at index `at` along `axis` of a 2-D ref."""
    old = ref[...]
    here = lax.broadcasted_iota(jnp.int32, old.shape, axis) == at
    ref[...] = jnp.where(here, new.astype(jnp.float32), old.astype(jnp.float32)).astype(old.dtype)


def dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]], dtype) -> Array:
    options = dict(precision=precision(a.dtype), preferred_element_type=dtype)
    return lax.dot_general(a, b, (contracted, ((), ())), **options)
