"""The gated delta rule by platform: ops/delta_rule.py, or on TPUs the Pallas kernels below.

families/gated_delta_net.py calls `delta_steps` and `delta_chunks`. Their arguments and letters are those of
the functions with the same names in ops/delta_rule.py.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops import delta_rule
from ops.delta_rule import CHUNK
from ops.kv_cache import LANES
from ops.platform import choose, platform
from ops.tpu import in_hbm, result


def by_platform(reference: Callable) -> Callable:
    """The function that KERNELS lists for the platform that is being compiled for, or else the reference."""

    @functools.wraps(reference)
    def chosen(*arguments):
        return choose("attention", KERNELS, (platform(), reference), reference)(*arguments)

    return chosen


delta_steps = by_platform(delta_rule.delta_steps)
delta_chunks = by_platform(delta_rule.delta_chunks)


# ------------------------------------------------------------------------ the kernel of steps, for TPUs

FEW = 16  # tokens of a row, up to which the kernel is used
BLOCK_BYTES = 1 << 20  # of S that are copied, computed on and written back at a time, at most
AHEAD_BYTES = 2 << 20  # of S that are being read while earlier ones are computed on: DMAs have a latency
GROUP_BYTES = 4 << 20  # of the tokens of a group of rows, which are in VMEM
UNROLL = 4  # heads that are computed at a time, at most: while one of them waits, another goes on


def delta_steps_tpu(q, k, v, g, beta, S, empty, keep, row=None, *, interpret=False) -> tuple[Array, Array]:
    """`delta_steps` as one Pallas call, which reads and writes the states of rows that keep tokens, once.

    Such rows come first in `order`, within each group of rows whose tokens are in VMEM at the same time. The
    tokens of a head are `lines`: of each token its query, key, value, decay and strength.
    """
    (B, T, N, Y), X = v.shape, q.shape[3]
    width = max(X, Y)
    if X % LANES or Y % LANES or T > FEW:
        return delta_rule.delta_steps(q, k, v, g, beta, S, empty, keep, row)
    q, k = (jnp.repeat(x, N // q.shape[2], 2) for x in (q, k))
    numbers = (jnp.broadcast_to(x[..., None], (B, T, N, width)) for x in (jnp.exp(g), beta))
    lines = [jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[3])]) for x in (q, k, v, *numbers)]
    lines = jnp.concatenate([x.swapaxes(1, 2) for x in lines], 2)  # BN(5T)W
    lines = jnp.pad(lines, [(0, 0), (0, 0), (0, -5 * T % 8), (0, 0)])

    group = max(1, min(B, GROUP_BYTES // (4 * N * width * lines.shape[2])))
    groups = -(-B // group)
    idle = jnp.pad(keep, (0, groups * group - B)).reshape(groups, group) == 0
    order = jnp.argsort(idle, axis=1, stable=True) + group * jnp.arange(groups)[:, None]
    home = jnp.arange(B) if row is None else row
    scalars = order.reshape(-1), jnp.sum(~idle, 1), home, empty, keep
    scalars = tuple(x.astype(jnp.int32) for x in scalars)

    heads = max(n for n in range(1, N + 1) if N % n == 0 and (n == 1 or 4 * n * X * Y <= BLOCK_BYTES))
    ahead = max(1, AHEAD_BYTES // (4 * heads * X * Y))
    shape, S = S.shape, S.reshape(-1, X, Y)
    if not interpret:
        S = in_hbm(S)
    in_smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    o, S = pl.pallas_call(
        partial(_delta_steps, T=T, ahead=ahead),
        grid=(groups,),
        in_specs=[[in_smem] * 5, pl.BlockSpec((group, *lines.shape[1:]), lambda i: (i, 0, 0, 0)), hbm],
        out_specs=[pl.BlockSpec((group, T, N, Y), lambda i: (i, 0, 0, 0)), hbm],
        out_shape=[result((B, T, N, Y), jnp.float32, lines, S), result(S.shape, jnp.float32, lines, S)],
        scratch_shapes=[
            pltpu.VMEM((2 * ahead, heads, X, Y), jnp.float32),
            pltpu.SemaphoreType.DMA((2 * ahead,)),
            pltpu.SemaphoreType.DMA((2 * ahead,)),
        ],
        input_output_aliases={6: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=32 << 20),
        name="delta_steps",
        interpret=interpret,
    )(list(scalars), lines, S)
    return o, S.reshape(shape)


def _delta_steps(
    scalars, lines: Any, _, o: Any, S: Any, buffer: Any, reading: Any, writing: Any, *, T: int, ahead: int
) -> None:
    """The kernel, for one group of rows. `S` is the states' memory; see `delta_steps_tpu` for the rest.

    Item i is a block of heads of a row. While the kernel computes on it, in half of the buffer's places the
    next ones arrive, and from the others the last ones are written back.
    """
    order, counts, home, empty, keep = scalars
    group, (places, heads) = lines.shape[0], buffer.shape[:2]
    begin, blocks = pl.program_id(0) * group, lines.shape[1] // heads
    n = counts[pl.program_id(0)] * blocks
    o[...] = jnp.zeros_like(o)

    def of_item(i) -> tuple[Array, Array]:
        """The row of an item, and its first head."""
        return order[begin + lax.div(i, blocks)], lax.rem(i, blocks) * heads

    def copy(i, back: bool):
        r, head = of_item(i)
        place = lax.rem(i, places)
        here, there = buffer.at[place], S.at[pl.ds(home[r] * lines.shape[1] + head, heads)]
        if back:
            return pltpu.make_async_copy(here, there, writing.at[place])
        return pltpu.make_async_copy(there, here, reading.at[place])

    def start(i, _) -> None:
        pl.when(i < n)(lambda: copy(i, back=False).start())

    def step(i, _) -> None:
        pl.when(i >= ahead)(lambda: copy(i - ahead, back=True).wait())
        start(i + ahead, None)
        copy(i, back=False).wait()
        r, first = of_item(i)

        def compute(h, _) -> None:
            before = jnp.where(empty[r] > 0, 0, buffer[lax.rem(i, places), h])
            outputs, after = _head(lines[r - begin, first + h], before, keep[r], T)
            buffer[lax.rem(i, places), h] = after
            for t, x in enumerate(outputs):
                o[r - begin, t, pl.ds(first + h, 1)] = x

        lax.fori_loop(0, heads, compute, None, unroll=math.gcd(heads, UNROLL))
        copy(i, back=True).start()

    lax.fori_loop(0, ahead, start, None)
    lax.fori_loop(0, n, step, None)
    lax.fori_loop(jnp.maximum(n - ahead, 0), n, lambda i, _: copy(i, back=True).wait(), None)


def _head(lines: Array, S: Array, keep, T: int) -> tuple[list[Array], Array]:
    """The tokens of one head: -> (o, [1,Y] each, the state after `keep` of them)."""
    X, Y = S.shape
    columns, outputs, kept = lines.T, [], S
    for t in range(T):
        q, k = (columns[:X, i : i + 1] for i in (t, T + t))
        v, decay, beta = (lines[i : i + 1, :Y] for i in (2 * T + t, 3 * T + t, 4 * T + t))
        S = decay * S
        S = S + k * (beta * (v - jnp.sum(k * S, 0, keepdims=True)))
        outputs.append(jnp.sum(q * S, 0, keepdims=True))
        kept = jnp.where(t < keep, S, kept) if t else S
    return outputs, kept


# ----------------------------------------------------------------------- the kernel of chunks, for TPUs


HEADS = 4  # of values that are computed at a time, if there are as many: while one waits, another goes on


def delta_chunks_tpu(q, k, v, g, beta, S, empty, row=None, *, interpret=False) -> tuple[Array, Array]:
    """`delta_chunks` as one Pallas call, in which a state stays in VMEM until all its tokens are read.

    It reads one or two chunks at a time: two triangles beside each other fill the matrix units. Products are
    exact if the activations are float32; else each factor is two bfloat16, 16 bits in all.
    """
    (B, T, N, Y), J, X = v.shape, *q.shape[2:]
    if X % LANES or Y % LANES:
        return delta_rule.delta_chunks(q, k, v, g, beta, S, empty, row)
    read = CHUNK * min(2, -(-T // CHUNK))
    of_keys = max(n for n in range(1, J + 1) if J % n == 0 and (n == 1 or n * N <= HEADS * J))
    of_values, steps = of_keys * N // J, J // of_keys
    gates = jnp.concatenate([x.reshape(B, T, steps, of_values) for x in (g, beta)], 3)
    gates = jnp.pad(gates, [(0, 0), (0, -T % read), (0, 0), (0, -2 * of_values % 8)])
    q, k, v = (jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, -T % read), (0, 0)]) for x in (q, k, v))
    home = (jnp.arange(B) if row is None else row).astype(jnp.int32)

    def heads(n: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, n, read, width), lambda b, j, c, *_: (b, j, c, 0))

    states = pl.BlockSpec((None, of_values, X, Y), lambda b, j, c, home, _: (home[b], j, 0, 0))
    of_gates = pl.BlockSpec((None, None, gates.shape[3], read), lambda b, j, c, *_: (b, j, 0, c))
    o, S = pl.pallas_call(
        partial(_delta_chunks, exact=v.dtype == jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, steps, q.shape[2] // read),
            in_specs=[heads(of_keys, X), heads(of_keys, X), heads(of_values, Y), of_gates, states],
            out_specs=[heads(of_values, Y), states],
        ),
        out_shape=[result(v.shape, jnp.float32, q, S), result(S.shape, jnp.float32, q, S)],
        input_output_aliases={6: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=32 << 20),
        name="delta_chunks",
        interpret=interpret,
    )(home, empty.astype(jnp.int32), q, k, v, jnp.moveaxis(gates, 1, 3), S if interpret else in_hbm(S))
    return o[:, :, :T].swapaxes(1, 2), S


def _delta_chunks(home, empty, q, k, v, gates, before, o, S, *, exact: bool) -> None:
    """The kernel, for n value heads of a row, and one or two chunks. S: their states.

    What a token has with the tokens before it in its chunk is [n,CHUNK,tokens]: of two chunks side by side.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        S[...] = jnp.where(empty[pl.program_id(0)] > 0, 0, before[...])

    n, tokens = v.shape[:2]
    i = lax.broadcasted_iota(jnp.int32, (CHUNK, tokens), 0)
    place = lax.broadcasted_iota(jnp.int32, (CHUNK, tokens), 1)
    j, chunks, dot = place % CHUNK, range(tokens // CHUNK), partial(_dot, exact=exact)

    def of_value_heads(x: Array) -> Array:
        return jnp.stack([x[h * len(x) // n] for h in range(n)])

    def beside(x: Array) -> Array:
        """What each token has with all tokens, or alone, [n,tokens,tokens or 1]: with its own chunk's."""
        parts = [x[:, c * CHUNK : (c + 1) * CHUNK] for c in chunks]
        return parts[0] if len(parts) == 1 else jnp.where(place < CHUNK, *parts)

    def product(a: Array, b: Array) -> Array:
        """Of matrices that are side by side."""
        shape = tokens, tokens
        own = (lax.broadcasted_iota(jnp.int32, shape, axis) // CHUNK for axis in (0, 1))
        return dot(a, jnp.where(jnp.equal(*own), jnp.concatenate([b] * len(chunks), 1), 0))

    def in_place(x: Array, c: int) -> Array:
        """[n,CHUNK,Y] of chunk c -> [n,tokens,Y] with zeros for the other one."""
        return jnp.concatenate([x if c == other else jnp.zeros_like(x) for other in chunks], 1)

    turned, columns = k[...].swapaxes(1, 2), gates[...].T
    similar, scores = (beside(of_value_heads(dot(x[...], turned))) for x in (k, q))
    g, beta = (jnp.stack([columns[:, m + h : m + h + 1] for h in range(n)]) for m in (0, n))
    keys, queries = of_value_heads(k[...]), of_value_heads(q[...])

    earlier = jnp.broadcast_to(jnp.where(j <= i, 1.0, 0.0)[:, :CHUNK], (n, CHUNK, CHUNK))
    between = _dot(earlier, jnp.where(j < i, beside(g), 0), exact=True)
    fading = jnp.where(j <= i, jnp.exp(between), 0)
    faded, fade_later = (jnp.exp(_dot(x, beside(g), exact=True)) for x in (earlier, 1 - earlier))
    L = jnp.where(j < i, beside(beta) * similar * fading, 0)
    inverse = jnp.where(i == j, 1.0, 0.0) - jnp.where(i // 2 == j // 2, L, 0)
    size = 2
    while size < CHUNK:  # see `inverse_of_unit_triangle`
        below = jnp.where((i // (2 * size) == j // (2 * size)) & (i // size != j // size), L, 0)
        inverse = inverse - product(product(inverse, below), inverse)
        size *= 2
    scores = scores * fading
    for c in chunks:
        own, one = slice(c * CHUNK, (c + 1) * CHUNK), slice(c * CHUNK, c * CHUNK + 1)
        fade = faded[:, :, one]
        reads = dot(jnp.concatenate([keys[:, own], queries[:, own]], 1), S[...])
        change = beta[:, own] * (v[:, own].astype(jnp.float32) - fade * reads[:, :CHUNK])
        change = dot(inverse, in_place(change, c))
        o[:, own] = fade * reads[:, CHUNK:] + dot(scores, in_place(change, c))
        S[...] = fade[:, -1:] * S[...] + dot((fade_later[:, :, one] * keys[:, own]).swapaxes(1, 2), change)


def _dot(a: Array, b: Array, exact: bool) -> Array:
    """Products of float32 matrices [n,...]; if not `exact`, with all factors rounded to 16 bits."""
    multiply = partial(jnp.dot, preferred_element_type=jnp.float32)
    if exact:
        return jnp.stack([multiply(x, y, precision="highest") for x, y in zip(a, b, strict=True)])
    (a, a_rest), (b, b_rest) = map(_in_two, (a, b))
    return jnp.stack(
        [
            multiply(a[h], b[h]) + (multiply(a[h], b_rest[h]) + multiply(a_rest[h], b[h]))
            for h in range(len(a))
        ]
    )


def _in_two(x: Array) -> tuple[Array, Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


# By platform and reference; all others use the reference.


# By platform and reference; all others use the reference.
KERNELS = {
    ("tpu", delta_rule.delta_steps): delta_steps_tpu,
    ("tpu", delta_rule.delta_chunks): delta_chunks_tpu,
}
