"""Products and attention on a CPU: XLA reads each weight, key and value once and in its own type.

Written plainly, XLA converts int8 and bfloat16 weights to float32 in memory in every step, packs weights
again in every step if they are not the left operand, multiplies each row by all experts, and copies keys and
values before it multiplies them. Letters: R rows (all tokens), D inputs, N outputs; of attention as in
attention.py.
"""

import functools
import math
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ops import attention
from ops.kv_cache import KV
from ops.platform import varying
from ops.tiles import find_tile, tile_rows, tiles_per_group
from quantize import int8_parts, join_parts

INT8_WEIGHTS_FIRST = jax.__version_info__ < (0, 11)  # newer ones read them faster as the right operand
DECODE = 16  # tokens per row, draft tokens included, up to which a step is decode
SIMD_WIDTH = 32  # inputs that one_row multiplies side by side
MAX_INPUTS = 2048  # of one_row: with 8192 inputs it is five times slower than int8_product
PIECE = 1024  # inputs that one_row sums in one expression; measured, on AVX2
BLOCK = 96 * 1024  # numbers in a row's block of slots, which a core's cache should hold
PAIR = 2  # rows that decode attends to side by side: more would occupy more cores, and read more empty slots
SUM_WIDTH = 8  # products that `scores` sums side by side
TERMS = 16  # values that `weighted_sum` adds in one expression: with 32, LLVM no longer does it by vectors
MOST_QUERIES, MOST_COLUMNS = 16, 256  # up to which `scores` and `weighted_sum` are faster than XLA's products


def contract(x: Array, w: Array, n: int) -> Array:
    """The sum of products over the last n axes of both: x [B,T,...] float, w [...] float or int8 -> float32.

    Decode is bound by reading the weights. With int8 weights and several rows it rounds x to 15 bits.
    """
    (B, T), outputs = x.shape[:2], w.shape[:-n]
    decode = T <= DECODE
    x, w = x.reshape(B * T, -1), w.reshape(math.prod(outputs), -1)
    if decode and w.dtype == jnp.int8:
        if B * T > 1:
            y = int8_product(x, w, 2)
        elif x.shape[1] <= MAX_INPUTS and x.shape[1] % SIMD_WIDTH == 0 and not has_avx512():
            y = one_row(x, w)
        else:  # as exact as one_row, and no slower than with two parts
            y = int8_product(x, w, 3)
    elif decode and x.dtype == jnp.bfloat16:  # of many tokens it is faster with the weights first
        two = jnp.pad(x, ((0, max(0, 2 - B * T)), (0, 0)))  # XLA would multiply one row in float32
        y = jnp.einsum("RD,ND->RN", two, w.astype(x.dtype), preferred_element_type=jnp.float32)[: B * T]
    else:
        y = weights_first(x, w.astype(x.dtype), jnp.float32)
    return y.reshape(B, T, *outputs)


def int8_product(x: Array, w: Array, parts: int) -> Array:
    """[R,D] float, [N,D] int8 -> [R,N] float32. Only int8 by int8 is fast, and only with two rows or more.

    parts: of x, see `int8_parts`.
    """
    x, unit = int8_parts(x, parts)
    if INT8_WEIGHTS_FIRST:
        products = weights_first(x, w, jnp.int32)
    else:
        products = jnp.einsum("RD,ND->RN", x, w, preferred_element_type=jnp.int32)
    return join_parts(products.astype(jnp.float32), parts) * unit


def one_row(x: Array, w: Array) -> Array:
    """[1,D] float, [N,D] int8 -> [1,N] float32, for CPUs with AVX2.

    There XLA's int8 product takes as long for one row as for eight; with AVX-512 it is faster than this.
    """
    x, sums = x[0].astype(jnp.float32), 0.0  # [N,SIMD_WIDTH]
    for start in range(0, x.size, PIECE):
        for i in range(start, min(start + PIECE, x.size), SIMD_WIDTH):
            part = slice(i, i + SIMD_WIDTH)
            sums += w[:, part].astype(jnp.float32) * x[part]
        sums = lax.optimization_barrier(sums)
    return weights_first(jnp.ones((1, SIMD_WIDTH)), sums, jnp.float32)


@functools.cache
def has_avx512() -> bool:
    """Whether this machine has AVX-512 with instructions for bytes, as Linux says; elsewhere False."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512bw" in cpuinfo.read_text().split()


def weights_first(x: Array, w: Array, dtype) -> Array:
    """[R,D], [N,D] -> [R,N] with w as the left operand."""
    y = jnp.einsum("ND,RD->NR", w, x, preferred_element_type=dtype)
    return lax.optimization_barrier(y).T  # else XLA would swap them


def attend_cached(q: Array, kv: KV, length: Array, gap=None, row: Array | None = None):
    """`attention.attend_cached`, in decode for two rows at a time, as far as the longer one.

    Decode is by loops that copy no keys and values, if these suit the sizes; else each row is on its own.
    """
    (B, T, _, G, H), (_, K, S, C) = q.shape, kv.values.shape
    if T > 1:
        return attention.attend_cached(q, kv, length, gap, row)
    by_loops = reads_in_place(G, H)
    rows = math.gcd(B, PAIR) if by_loops else 1
    block = min(max(BLOCK // (K * C), TERMS), S)
    block = block - block % TERMS or S  # which `weighted_sum` divides into equal parts

    def attend_rows(q: Array, length: Array, gap, row: Array | None, first: Array | int):
        def attend(part: KV, mask: Array, filled: Array):
            return attention.attend(q, part, mask, scores, weighted_sum)

        runs = [(first, rows)] if row is None else [(r, 1) for r in row]
        read = partial(attention.read_block, kv, runs, block)
        return attention.attend_blocks(q, kv, length, gap, block, read, attend if by_loops else None)

    if B == rows:
        return attend_rows(q, length, gap, row, 0)
    groups = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), (q, length, gap, row))
    o, lse = lax.map(lambda group: attend_rows(*group), (*groups, jnp.arange(0, B, rows)))
    return o.reshape(B, *o.shape[2:]), lse.reshape(B, *lse.shape[2:])


def reads_in_place(queries: int, columns: int) -> bool:
    """Whether `scores` and `weighted_sum` suit so many queries per key/value head, and keys of this width."""
    return queries <= MOST_QUERIES and columns <= MOST_COLUMNS and columns % SUM_WIDTH == 0


def scores(q: Array, k: Array) -> Array:
    """`attention.scores` of one query per row: [B,1,K,G,H], [B,K,S,H] -> [B,K,G,1,S] float32."""
    (B, _, K, G, H), S = q.shape, k.shape[2]
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    parts = H // SUM_WIDTH, SUM_WIDTH
    products = q.reshape(B, K, 1, G, *parts) * k.reshape(B, K, S, 1, *parts)
    sums = jnp.einsum("BKSGl,l->BKSG", sum_in_loop(products, 4), jnp.ones(SUM_WIDTH))
    return sums.swapaxes(2, 3)[:, :, :, None]


def weighted_sum(p: Array, v: Array) -> Array:
    """`attention.weighted_sum` for one query per row: [B,K,G,1,S], [B,K,S,H] -> [B,1,K,G,H] float32."""
    (B, K, G, _, S), H = p.shape, v.shape[3]
    terms = math.gcd(S, TERMS)
    p, v = p.reshape(B, K, G, S // terms, terms, 1), v.reshape(B, K, 1, S // terms, terms, H)
    sums = sum_in_loop(p * v.astype(jnp.float32), 4)
    return sum(sums[:, :, :, i] for i in range(S // terms))[:, None]


def sum_in_loop(x: Array, axis: int) -> Array:
    """The sum of x over an axis that is not the last, in a loop that also computes x, by vectors.

    XLA hands an ordinary sum to its library YNNPACK, and writes x to memory for it, but does not recognize
    this sum. XLA would join a second such sum of the result with this one, in a loop without vectors.
    """
    return lax.reduce(x, jnp.zeros((), x.dtype), lambda a, b: a - (-b), (axis,))


@jax.custom_vjp
def grouped_dot(x: Array, w: Array, sizes: Array) -> Array:
    """`lax.ragged_dot` by a loop over tiles of rows of one expert, which reads no expert without rows.

    x: [R,D], the rows of expert 0, then those of expert 1... w: [E,D,N], float or int8 values; an expert is
    converted to x's type for each tile. sizes: [E] int32. -> [R,N] float32, undefined beyond their sum.
    Its derivative is that of `lax.ragged_dot`: a loop of so many trips has none.
    """
    (R, _), (E, _, N) = x.shape, w.shape
    rows = tile_rows(R, E, 2, 64)
    x = jnp.pad(x, ((0, rows), (0, 0)))

    def multiply(tile: Array, y: Array) -> Array:
        # What the tile has beyond its group's rows is overwritten by the next tile.
        expert, first, _ = find_tile(tile, sizes, rows)
        part = lax.dynamic_slice_in_dim(x, first, rows)
        one = lax.dynamic_index_in_dim(w, expert, keepdims=False).astype(x.dtype)
        part = jnp.dot(part, one, preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(y, part, first, 0)

    y = lax.pcast(jnp.zeros((R + rows, N)), tuple(varying(x, w, sizes)), to="varying")
    return lax.fori_loop(0, jnp.sum(tiles_per_group(sizes, rows)), multiply, y)[:R]


def _pull_back(arguments: tuple[Array, Array, Array], cotangent: Array) -> tuple:
    x, w, sizes = arguments

    def dot(x: Array, w: Array) -> Array:
        return lax.ragged_dot(x, w.astype(x.dtype), sizes, preferred_element_type=jnp.float32)

    return *jax.vjp(dot, x, w)[1](cotangent), None


grouped_dot.defvjp(lambda *arguments: (grouped_dot(*arguments), arguments), _pull_back)
