"""Arrays of few bits: the formats, the types, and how to make one. ops/matmul.py multiplies by them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

INT8_MAX = 127
INT4_MIN, INT4_MAX = -8, 7
PART = 2 * INT8_MAX  # so many of an activation's low parts are a high one
LEAST_GROUP = 32  # smaller ones have too many scales


@dataclasses.dataclass(frozen=True)
class Format:
    """How weights that a matmul contracts are held.

    bits:  8, with a scale per channel; or 4, with one per group.
    group: of 4 bits, how many entries along what is contracted share a scale, at most.
    of:    the format that the weights were rounded to before, if they were.
    """

    bits: int
    group: int | None = None
    of: "Format | None" = None

    def __str__(self) -> str:
        if self.of:
            return f"int8 of {self.of}"
        return next(name for name, known in FORMATS.items() if known == self)

    @property
    def grouping(self) -> int | None:
        """The group of the format, or of the one before."""
        return (self.of or self).group

    def along(self, size: int) -> "Format":
        """What of it suits arrays whose groups lie along a dimension of this size: whole groups, or int8."""
        if self.of:
            of = self.of.along(size)
            return dataclasses.replace(self, of=of) if of.group else of
        group = math.gcd(self.group or 0, size)
        return dataclasses.replace(self, group=group) if self.group and group >= LEAST_GROUP else INT8


INT8, INT4 = Format(8), Format(4, 128)
FORMATS = {"none": None, "int8": INT8, "int4": INT4, "int4-g64": Format(4, 64), "int4-g32": Format(4, 32)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """Symmetric int8 values with one scale per channel: the array is `values * scale`.

    values: int8, the array's own shape.
    scale: float, the shape of `values` without the axes that a matmul contracts: it factors out of the sum.
    """

    values: Array
    scale: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedArray:
    """Symmetric int4 values in groups along what a matmul contracts, with one scale each: `values * scale`.

    values: int4. First the axes that are contracted, of which the last counts groups, then the place in a
            group, then the others; before all of them that of experts, if there is one.
    scale:  bfloat16, of either sign, the shape of `values` without the place in a group.
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


def quantize_groups(
    x: Array, axes: tuple[int, ...], group: int, first: int = 0, searched: bool = True
) -> GroupedArray:
    """Round x to int4, with one scale for each `group` of entries that follow one another along axes[-1].

    x: float, any shape; axes: what is contracted. first: axes before those that stay first, as of experts.
    Of 32 sizes and two signs a scale has those of the least squared error; not searched, that which rounds
    to the nearest and clips nothing. What is 4 bits already, in such groups with a bfloat16 scale, stays what
    it is. With a NaN or Inf in its group a scale is infinite, which makes all of it NaN.
    """
    at = first + len(axes)
    x = in_groups(x, axes, group, first)
    peak = jnp.max(jnp.abs(x.astype(jnp.float32)), at)
    # The largest is 1 to 8 steps, or up to 13 of them, which clips it.
    divisors = jnp.concatenate([jnp.arange(1.0, 9.0), 8 / jnp.linspace(0.6, 8 / 7, 24)])
    divisors = jnp.concatenate([divisors, -divisors]) if searched else jnp.array([float(INT4_MAX)])

    def attempt(best: tuple[Array, Array], divisor: Array):
        scale = (peak / divisor).astype(jnp.bfloat16)
        values, divisor = _round_groups(x, scale, at)
        error = group_errors(x, values * divisor, at)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])), None

    worst = jnp.full_like(peak, jnp.inf), jnp.zeros_like(peak, jnp.bfloat16)
    scale = lax.scan(attempt, worst, divisors)[0][1]
    scale = jnp.where(jnp.all(jnp.isfinite(x), at), scale, jnp.inf)
    return GroupedArray(_round_groups(x, scale, at)[0].astype(jnp.int4), scale)


def group_errors(x: Array, rounded: Array, at: int) -> Array:
    """The squared error of each group, relative to a power of 2 near its largest entry.

    So it neither overflows nor vanishes, and is 0 where nothing was rounded.
    """
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x.astype(jnp.float32)), at, keepdims=True))
    return jnp.sum(jnp.ldexp(rounded - x.astype(jnp.float32), -exponent) ** 2, at)


def in_groups(x: Array, axes: tuple[int, ...], group: int, first: int = 0) -> Array:
    """x with its axes as those of the values of a GroupedArray."""
    others = [i for i in range(first, x.ndim) if i not in axes]
    x, at = x.transpose(*range(first), *axes, *others), first + len(axes)
    return x.reshape(*x.shape[: at - 1], -1, group, *x.shape[at:])


def from_groups(x: Array, axes: tuple[int, ...], first: int = 0) -> Array:
    """The reverse of `in_groups`."""
    at = first + len(axes)
    x = x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])
    order = [*range(first), *axes, *(i for i in range(first, x.ndim) if i not in axes)]
    return x.transpose([order.index(i) for i in range(x.ndim)])


def _round_groups(x: Array, scale: Array, at: int) -> tuple[Array, Array]:
    """-> (whole numbers, what they are multiples of), float32."""
    divisor = jnp.expand_dims(jnp.where(scale == 0, 1, scale), at).astype(jnp.float32)
    return jnp.clip(jnp.round(x.astype(jnp.float32) / divisor), INT4_MIN, INT4_MAX), divisor


def dequantize_groups(q: GroupedArray, at: int, dtype=jnp.float32) -> Array:
    """The array of values * scale, of the shape of `values`. at: the axis of the place in a group."""
    return q.values.astype(dtype) * jnp.expand_dims(q.scale, at).astype(dtype)


def ungroup(q: GroupedArray, axes: tuple[int, ...], first: int = 0) -> Array:
    """The float32 array that `quantize_groups` has rounded, with the same axes."""
    return from_groups(dequantize_groups(q, first + len(axes)), axes, first)


def pack(values: Array, at: int) -> Array:
    """int4 [...] -> uint8, half as many along axis `at`: two neighbours a byte, the first in its low bits."""
    bits = lax.bitcast_convert_type(values.astype(jnp.int8), jnp.uint8) & 15
    bits = bits.reshape(*bits.shape[:at], -1, 2, *bits.shape[at + 1 :])
    low, high = bits.take(0, at + 1), bits.take(1, at + 1)
    return low | (high << 4)


def unpack(packed: Array, at: int) -> Array:
    """The reverse of `pack`."""
    values = jnp.stack(nibbles(lax.bitcast_convert_type(packed, jnp.int8)), at + 1).astype(jnp.int4)
    return values.reshape(*packed.shape[:at], -1, *packed.shape[at + 1 :])


def nibbles(pairs: Array) -> tuple[Array, Array]:
    """The two int4 values in each int8, the one in its low bits first, as int8."""
    return (pairs << 4) >> 4, pairs >> 4


def int8_parts(x: Array) -> tuple[Array, Array]:
    """Activations as integers: [R,...] float -> (int8 [2R,...], unit [R,1,...] float32).

    x is (high + low / PART) * unit, to 15 bits of its row's largest entry: in one part, of 8 bits, the
    outliers of trained models would leave little of the rest.
    """
    x = x.astype(jnp.float32)
    unit = jnp.max(jnp.abs(x), tuple(range(1, x.ndim)), keepdims=True)
    unit = jnp.maximum(unit, 1e-30) / INT8_MAX
    high = jnp.round(x / unit)
    low = jnp.round((x / unit - high) * PART)
    return jnp.concatenate([high, low]).astype(jnp.int8), unit


def values_and_scale(x: Array | QuantizedArray) -> tuple[Array, Array | None]:
    """The two parts of an int8 array; of a float one, itself and None."""
    return (x.values, x.scale) if isinstance(x, QuantizedArray) else (x, None)
