"""Ragged attention: the Pallas kernel for TPUs that writes a token into the cache and attends to the cache.

Letters as in model.py: B rows, T queries, S cached slots, K key/value heads, G queries per key/value head,
H width of keys, C columns of a slot; here, uppercase, each is what this device has. ops/attention.py has the
reference, and chooses. Attention returns the pair (o, lse), see there.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kv_cache import KV
from ops.tpu import LANES, TILE, in_hbm, precision, result

SCORES = 1 << 18  # computed at once: several copies of them are in VMEM
GROUP = 128  # rows x heads x tokens in VMEM at once
VMEM_BYTES = 32 << 20  # of VMEM that the kernel may use
MASKED = -1e30  # a score whose exponential is 0, without the NaN of inf - inf

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
}


def ragged_attention_tpu(
    q: Array, kv: KV, length: Array, gap=None, row=None, *, new=None, place=None, blocks=None,
    interpret=False,
):  # fmt: skip
    """`ragged_decode` as one Pallas call, which reads the filled blocks and writes one tile per row.

    Without `new` nothing is written and the KV is None; there may be T queries, which see the same slots.
    The new token is put into its block in VMEM and its tile is written back, which is cheaper than a scatter.
    int8 keys enter the MXU unconverted, and each query as two int8 parts, 16 bits in all; int8 values are
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
        unit = jnp.maximum(jnp.max(jnp.abs(q), -1, keepdims=True), 1e-30) / 127
        high = jnp.round(q / unit)
        low = jnp.clip(jnp.round((q / unit - high) * 256), -128, 127)
        q, unit = jnp.concatenate([high, low], 1), unit / 256
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


def _ragged_attention(
    rows, vectors, cache: KV, o, lse, written, buffer: KV, reading, writing, *,
    large: int, small: int, value: tuple[int, int],
):  # fmt: skip
    """The kernel, for one group of rows. Their vectors, o, lse and the buffer are in VMEM. Length, place, gap
    and the row of the cache are in SMEM, for all rows. The cache is in HBM; `written` is the same memory, or
    None. G: all queries of a row. value: the columns that make o.

    A row is read in large blocks as far as its tokens fill them, then in small ones. While the kernel
    computes on one block, it copies the next, of this row or another, into the other half of the buffer:
    block i of the group is in half i % 2.
    """
    length, place, gap, home = rows
    q, unit, new = vectors
    cache = cache if written is None else written
    R, (_, S, width) = length.shape[0], cache.values.shape
    group, G, _ = o.shape
    begin = pl.program_id(0) * group
    end = jnp.minimum(begin + group, R)
    quantized = cache.scale is not None

    def first(r):
        if gap is None:
            return 0
        begin = jnp.where(gap[0][r] == 0, gap[1][r], 0)
        return lax.div(jnp.minimum(begin, jnp.maximum(length[r] - 1, 0)), small) * small

    def after(r, at):
        """The block after the one at slot `at` of row r."""
        at = at + jnp.where(length[r] - at >= large, large, small)
        done = at >= length[r]
        r = jnp.where(done, r + 1, r)
        return r, jnp.where(done, first(jnp.minimum(r, end - 1)), at)

    def origin(at, size: int):
        """Its first slot in memory: the last small block may overlap the one before."""
        return pl.multiple_of(at if S % small == 0 else jnp.minimum(at, S - size), LANES)

    def reads(i, r, at, size: int):
        slots, half = pl.ds(origin(at, size), size), lax.rem(i, 2)
        r = r if home is None else home[r]
        to = buffer.values.at[half, pl.ds(0, size)]
        yield pltpu.make_async_copy(cache.values.at[r, slots], to, reading.at[0, half])
        if quantized:
            to = buffer.scale.at[half, :, pl.ds(0, size)]
            yield pltpu.make_async_copy(cache.scale.at[r, :, slots], to, reading.at[1, half])

    def fetch(i, r, at):
        is_large = length[jnp.minimum(r, end - 1)] - at >= large
        for size, wanted in ((large, is_large), (small, ~is_large)):

            @pl.when((r < end) & wanted)
            def _(size=size):
                for copy in reads(i, r, at, size):
                    copy.start()

    def put_new(r, at, size: int, values, scale):
        """If the new token's slot is in this block: put it there, and begin to write its tile back."""
        base = origin(at, size)
        slot = place[r] - base
        inside = (place[r] >= at) & (slot < size)
        tile = pl.multiple_of(lax.div(jnp.clip(slot, 0, size - 1), TILE) * TILE, TILE)
        lane = pl.multiple_of(lax.div(jnp.clip(slot, 0, size - 1), LANES) * LANES, LANES)

        def writes():
            to = pl.ds(pl.multiple_of(base + tile, TILE), TILE)
            yield pltpu.make_async_copy(values.at[pl.ds(tile, TILE)], cache.values.at[r, to], writing.at[0])
            if quantized:
                patch, to = scale.at[:, pl.ds(lane, LANES)], pl.ds(pl.multiple_of(base + lane, LANES), LANES)
                yield pltpu.make_async_copy(patch, cache.scale.at[r, :, to], writing.at[1])

        @pl.when(inside)
        def _():
            _put(values.at[pl.ds(tile, TILE)], new.values[r - begin], slot - tile, axis=0)
            if quantized:
                _put(scale.at[:, pl.ds(lane, LANES)], new.scale[r - begin], slot - lane, axis=1)
            for copy in writes():
                copy.start()

        return inside, writes

    def visit(i, r, at, size: int, state):
        fetch(i + 1, *after(r, at))
        for copy in reads(i, r, at, size):
            copy.wait()
        half, base = lax.rem(i, 2), origin(at, size)
        values = buffer.values.at[half, pl.ds(0, size)]
        scale = buffer.scale.at[half, :, pl.ds(0, size)] if quantized else None

        masked = size == small or gap is not None  # a large block is full
        low, high = at - base, length[r] - base

        def seen(shape: tuple[int, int], axis: int) -> Array:
            slots = lax.broadcasted_iota(jnp.int32, shape, axis)
            inside = slots < high if S % small == 0 else (slots >= low) & (slots < high)
            if gap is None:
                return inside
            return inside & ((slots < gap[0][r] - base) | (slots >= gap[1][r] - base))

        if masked and not quantized:  # 0 * NaN is NaN: what was never written must not reach the products
            clean = jnp.where(seen((size, width), 0), values[...].astype(jnp.float32), 0)
            values[...] = clean.astype(values.dtype)

        if new is not None:
            inside, writes = put_new(r, at, size, values, scale)
        k, v = values[:, : q.shape[-1]], values[:, slice(*value)]
        if quantized:
            scores = _dot(q[r - begin], k, ((1,), (1,)), jnp.int32)
            scores = ((scores[:G] << 8) + scores[G:]).astype(jnp.float32) * unit[r - begin]
            scores = scores * scale[0:1].astype(jnp.float32)
        else:
            scores = _dot(q[r - begin], k, ((1,), (1,)), jnp.float32)
        if masked:
            scores = jnp.where(seen(scores.shape, 1), scores, MASKED)
        old_peak, total, acc = state
        peak = jnp.maximum(old_peak, jnp.max(scores, -1, keepdims=True))
        p, shrink = jnp.exp2(scores - peak), jnp.exp2(old_peak - peak)
        total = total * shrink + jnp.sum(p, -1, keepdims=True)
        if quantized:
            p, v = p * scale[1:2].astype(jnp.float32), v.astype(jnp.bfloat16)  # exact
            if masked:  # the scale of a slot that was never written may be NaN
                p = jnp.where(seen(p.shape, 1), p, 0)
        acc = acc * shrink + _dot(p.astype(v.dtype), v, ((1,), (0,)), jnp.float32)

        if new is not None:

            @pl.when(inside)  # before the buffer is filled again
            def _():
                for copy in writes():
                    copy.wait()

        return peak, total, acc

    def row(r, i):
        at = first(r)
        n_large = lax.div(length[r] - at, large)
        rest = at + n_large * large
        n_small = lax.div(length[r] - rest + small - 1, small)
        n_small = jnp.where(n_large + n_small == 0, 1, n_small)  # as `after` has it for a row without slots
        state = jnp.full((G, 1), MASKED), jnp.zeros((G, 1)), jnp.zeros(o.shape[1:])
        state = lax.fori_loop(0, n_large, lambda j, s: visit(i + j, r, at + j * large, large, s), state)
        i = i + n_large
        state = lax.fori_loop(0, n_small, lambda j, s: visit(i + j, r, rest + j * small, small, s), state)
        peak, total, acc = state
        any_seen = length[r] > 0
        if gap is not None:
            any_seen &= (gap[0][r] > 0) | (gap[1][r] < length[r])
        o[r - begin] = jnp.where(any_seen, acc / total, 0)
        natural = (peak + jnp.log2(total)) * math.log(2)
        lse[r - begin] = jnp.broadcast_to(jnp.where(any_seen, natural, -jnp.inf), (G, LANES))
        return i + n_small

    fetch(0, begin, first(begin))
    lax.fori_loop(begin, end, row, 0)


def _put(ref, new: Array, at, axis: int) -> None:
    """Replace the slice at index `at` along `axis` of a 2-D ref."""
    old = ref[...]
    here = lax.broadcasted_iota(jnp.int32, old.shape, axis) == at
    ref[...] = jnp.where(here, new.astype(jnp.float32), old.astype(jnp.float32)).astype(old.dtype)


def _dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]], dtype) -> Array:
    options = dict(precision=precision(a.dtype), preferred_element_type=dtype)
    return lax.dot_general(a, b, (contracted, ((), ())), **options)
