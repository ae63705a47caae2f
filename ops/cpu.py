"""What a CPU must be told: in which form XLA multiplies by weights fast there.

Left to itself, XLA converts int8 and bfloat16 weights to float32 in memory, in every step, and packs weights
anew that are not the left operand. Letters: R rows, that is all tokens, D inputs, N outputs.
"""

import math

import jax.numpy as jnp
from jax import Array, lax

from quantize import PART, int8_parts

DECODE = 16  # tokens per row, guesses included, up to which it is decode
LANES = 32  # inputs that one_row multiplies side by side
LONGEST = 2048  # row that it takes; of 8192 it is five times slower than int8_product
PIECE = 1024  # inputs that it sums in one expression; measured, on AVX2


def contract(x: Array, w: Array, n: int) -> Array:
    """The sum of products over the last n axes of both: x [B,T,...] float, w [...] float or int8 -> float32.

    Decode waits for the weights. Then x is rounded where w is int8 and there are several rows, see
    `int8_parts`.
    """
    (B, T), outputs = x.shape[:2], w.shape[:-n]
    decode = T <= DECODE
    x, w = x.reshape(B * T, -1), w.reshape(math.prod(outputs), -1)
    if decode and w.dtype == jnp.int8:
        one = B * T == 1 and x.shape[1] <= LONGEST and x.shape[1] % LANES == 0
        y = one_row(x, w) if one else int8_product(x, w)
    elif decode == (x.dtype == jnp.float32):  # float32 gains by it in few rows, bfloat16 in many
        y = weights_first(x, w.astype(x.dtype), jnp.float32)
    else:
        two = jnp.pad(x, ((0, max(0, 2 - B * T)), (0, 0)))  # one row XLA would multiply in float32
        y = jnp.einsum("RD,ND->RN", two, w.astype(x.dtype), preferred_element_type=jnp.float32)[: B * T]
    return y.reshape(B, T, *outputs)


def int8_product(x: Array, w: Array) -> Array:
    """[R,D] float, [N,D] int8 -> [R,N] float32: only int8 by int8 is fast, and only of two rows or more."""
    parts, unit = int8_parts(x)
    high, low = jnp.split(weights_first(parts, w, jnp.int32).astype(jnp.float32), 2)
    return (high + low / PART) * unit


def one_row(x: Array, w: Array) -> Array:
    """[1,D] float, [N,D] int8 -> [1,N] float32: the product of int8 takes as long for one row as for 8."""
    x, sums = x[0].astype(jnp.float32), 0.0  # [N,LANES]
    for start in range(0, x.size, PIECE):
        for i in range(start, min(start + PIECE, x.size), LANES):
            sums += w[:, i : i + LANES].astype(jnp.float32) * x[i : i + LANES]
        sums = lax.optimization_barrier(sums)
    return weights_first(jnp.ones((1, LANES)), sums, jnp.float32)


def weights_first(x: Array, w: Array, dtype) -> Array:
    """[R,D], [N,D] -> [R,N] with w as the left operand."""
    y = jnp.einsum("ND,RD->NR", w, x, preferred_element_type=dtype)
    return lax.optimization_barrier(y).T  # else XLA would swap them
