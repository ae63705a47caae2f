"""int8 arrays: the type, and how to make one. ops/matmul.py multiplies by them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """Symmetric int8 values with one scale per channel: the array is `values * scale`.

    values: int8, the array's own shape.
    scale: float, the shape of `values` without the axes that a matmul contracts: it factors out of the sum.
    """

    values: Array
    scale: Array


def quantize(x: Array, axes: tuple[int, ...], scale_dtype=jnp.float32) -> QuantizedArray:
    """Round x to int8, with one scale for all elements along `axes`.

    x: float, any shape. Error: at most scale / 2 per element, where scale = max|x| / 127 along `axes`
    (a scale rounded to bfloat16 may be 0.2% too small, which clips the largest element by as much). With a
    NaN or Inf among them the scale is infinite, which makes all of them NaN.
    """
    scale = _scale(x, x, axes).astype(scale_dtype)
    return QuantizedArray(_round(x, scale), jnp.squeeze(scale, axes))


def quantize_large(x: Array, axes: tuple[int, ...]) -> QuantizedArray:
    """`quantize` for what exceeds a processor's caches."""
    # Behind barriers each pass reads x anew. Else XLA writes x as float32 and reads that, which takes a CPU 4
    # times as long for bfloat16.
    scale, x = jax.lax.optimization_barrier((_scale(x, jax.lax.optimization_barrier(x), axes), x))
    return QuantizedArray(_round(x, scale), jnp.squeeze(scale, axes))


def _scale(x: Array, again: Array, axes: tuple[int, ...]) -> Array:
    """again: x, to look for NaN, which XLA's maximum on a CPU may pass over."""
    nan = jnp.any(jnp.isnan(again), axes, keepdims=True)
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axes, keepdims=True) / INT8_MAX
    return jnp.where(nan, jnp.inf, scale)


def _round(x: Array, scale: Array) -> Array:
    divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)  # a channel of zeros stays zeros
    return jnp.clip(jnp.round(x.astype(jnp.float32) / divisor), -INT8_MAX, INT8_MAX).astype(jnp.int8)


def values_and_scale(x: Array | QuantizedArray) -> tuple[Array, Array | None]:
    """The two parts of an int8 array; of a float one, itself and None."""
    return (x.values, x.scale) if isinstance(x, QuantizedArray) else (x, None)
