"""Matrix products on a CPU, written so that XLA reads each weight once and in its own type.

Written plainly, XLA converts int8 and bfloat16 weights to float32 in memory in every step, and packs weights
again in every step if they are not the left operand. Letters: R rows (all tokens), D inputs, N outputs.
"""

import math

import jax.numpy as jnp
from jax import Array, lax

from quantize import PART, int8_parts

DECODE = 16  # tokens per row, draft tokens included, up to which a step is decode
SIMD_WIDTH = 32  # inputs that one_row multiplies side by side
MAX_INPUTS = 2048  # of one_row: with 8192 inputs it is five times slower than int8_product
PIECE = 1024  # inputs that one_row sums in one expression; measured, on AVX2


def contract(x: Array, w: Array, n: int) -> Array:
    """The sum of products over the last n axes of both: x [B,T,...] float, w [...] float or int8 -> float32.

    Decode is bound by reading the weights. With int8 weights and several rows it rounds x, see `int8_parts`.
    """
    (B, T), outputs = x.shape[:2], w.shape[:-n]
    decode = T <= DECODE
    x, w = x.reshape(B * T, -1), w.reshape(math.prod(outputs), -1)
    if decode and w.dtype == jnp.int8:
        one = B * T == 1 and x.shape[1] <= MAX_INPUTS and x.shape[1] % SIMD_WIDTH == 0
        y = one_row(x, w) if one else int8_product(x, w)
    elif decode and x.dtype == jnp.bfloat16:  # of many tokens it is faster with the weights first
        two = jnp.pad(x, ((0, max(0, 2 - B * T)), (0, 0)))  # XLA would multiply one row in float32
        y = jnp.einsum("RD,ND->RN", two, w.astype(x.dtype), preferred_element_type=jnp.float32)[: B * T]
    else:
        y = weights_first(x, w.astype(x.dtype), jnp.float32)
    return y.reshape(B, T, *outputs)


def int8_product(x: Array, w: Array) -> Array:
    """[R,D] float, [N,D] int8 -> [R,N] float32. Only int8 by int8 is fast, and only with two rows or more."""
    parts, unit = int8_parts(x)
    high, low = jnp.split(weights_first(parts, w, jnp.int32).astype(jnp.float32), 2)
    return (high + low / PART) * unit


def one_row(x: Array, w: Array) -> Array:
    """[1,D] float, [N,D] int8 -> [1,N] float32. XLA's int8 product takes as long for one row as for eight."""
    x, sums = x[0].astype(jnp.float32), 0.0  # [N,SIMD_WIDTH]
    for start in range(0, x.size, PIECE):
        for i in range(start, min(start + PIECE, x.size), SIMD_WIDTH):
            part = slice(i, i + SIMD_WIDTH)
            sums += w[:, part].astype(jnp.float32) * x[part]
        sums = lax.optimization_barrier(sums)
    return weights_first(jnp.ones((1, SIMD_WIDTH)), sums, jnp.float32)


def weights_first(x: Array, w: Array, dtype) -> Array:
    """[R,D], [N,D] -> [R,N] with w as the left operand."""
    y = jnp.einsum("ND,RD->NR", w, x, preferred_element_type=dtype)
    return lax.optimization_barrier(y).T  # else XLA would swap them
