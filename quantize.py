"""Number formats for weights: how each one is declared, encoded, decoded, multiplied and stored.

`Format` lists what a format has to define. `PerChannel` (int8, fp8), `PerGroup` (int4) and `ExpertsInMXFP4`
do, `Requantized` combines two formats, and FORMATS names the formats that a user can ask for. A new format is
one more entry of FORMATS, and a subclass of `Format` if none of these fits. ops/matmul.py and
ops/grouped_matmul.py list the platforms that have a kernel for a format; without one, the format's own
product is used.
"""

import dataclasses
import math
from functools import partial, reduce
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

INT8_MAX = 127
INT4_MIN, INT4_MAX = -8, 7
PART = 2 * INT8_MAX  # units of an activation's part in one unit of the part before
MIN_GROUP_SIZE = 32  # smaller groups would have too many scales
# Of MXFP4: the values of a block, which share a scale; of a pair of blocks, which share bytes; and of a chunk
# of four blocks, whose exponents are stored in TILE bytes.
BLOCK, PAIR, CHUNK, TILE = 32, 64, 128, 8


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["format"])
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A weight in a number format: `values * scale`, where each scale is shared by many values.

    A tree of declarations or specs holds those of the components in their places.
    """

    values: Array
    scale: Array
    format: "Format"


class Format(Protocol):
    """What a number format defines. `info` is always a weight's declaration (sharding.arrays.ArrayInfo)."""

    scheme: str  # under which platforms list kernels for the format
    bits: int  # of a value

    def __str__(self) -> str:
        """The name on the command line."""
        return self.scheme

    @property
    def stored_as(self) -> "Format":
        """The format in which a checkpoint stores these weights."""
        return self

    def on(self, platform: str) -> "Format | Requantized":
        """The format in which a platform ("cpu", "gpu" or "tpu") holds weights of this format."""
        return self

    def for_array(self, info) -> "Format | Requantized | None":
        """The format that one weight of the model uses: int8, for example, if 4 bits are too few for it.

        None: it stays float.
        """
        return self

    def pad_multiple(self, size: int) -> int:
        """Each device's share of a contracted dimension of this size is padded to a multiple of this."""
        return 1

    def components(self, info) -> QuantizedArray:
        """The declarations of the components, values and scale."""

    def encode(self, x: Array, info, large: bool = True) -> QuantizedArray:
        """Round a float weight. large: x is an array in memory that exceeds a processor's caches."""

    def decode(self, q: QuantizedArray, info) -> Array:
        """The weight that q stands for, float32."""

    def einsum(self, spec: str, x: Array, q: QuantizedArray, dtype, out_dtype=jnp.float32) -> Array:
        """`jnp.einsum(spec, x, weight)`, multiplied in dtype and summed in float32.

        out_dtype: to which sums are rounded, before a format multiplies them by its scales.
        """

    def expert_matrices(self, q: QuantizedArray, dtype) -> tuple[Array, Array | None]:
        """For `lax.ragged_dot`: matrices [E,D,M] in dtype, and a scale [E,M] of its result or None."""

    def stored_components(self, info) -> QuantizedArray:
        """The declarations of the components as files store them."""
        return self.components(info)

    def pack(self, q: QuantizedArray, info) -> tuple[Array, Array]:
        """The components as files store them."""
        return q.values, q.scale

    def unpack(self, values: Array, scale: Array, info) -> QuantizedArray:
        """The reverse of `pack`."""
        return QuantizedArray(values, scale, self)

    def error(self, x: np.ndarray, values: np.ndarray, scale: np.ndarray, info) -> float | Array:
        """The largest error of stored components of x, in half steps: at most 1 if they are right."""


# ---------------------------------------------------------------------------------------- a scale per channel


@dataclasses.dataclass(frozen=True)
class PerChannel(Format):
    """Symmetric values with one float32 scale per channel, that is per output of the matmul.

    values: in the weight's shape, of type dtype, a byte each. scale: has the letters that are not contracted:
    it factors out of the sum. largest: the value that a channel's largest magnitude becomes.
    """

    scheme: str
    dtype: np.dtype
    largest: int
    bits = 8

    def on(self, platform: str) -> "Format | Requantized":
        """A CPU would convert fp8 in each step, which takes much longer than a product of int8."""
        return Requantized(self, INT8) if platform == "cpu" and self != INT8 else self

    def components(self, info) -> QuantizedArray:
        kept = "".join(letter for letter in info.letters if letter not in info.contracted)
        values, scale = info.component(info.letters, self.dtype), info.component(kept, jnp.float32)
        return QuantizedArray(values, scale, self)

    def encode(self, x: Array, info, large: bool = True) -> QuantizedArray:
        return quantize(x, info.contracted_axes, format=self, large=large)

    def decode(self, q: QuantizedArray, info) -> Array:
        return q.values.astype(jnp.float32) * jnp.expand_dims(q.scale, info.contracted_axes)

    def einsum(self, spec: str, x: Array, q: QuantizedArray, dtype, out_dtype=jnp.float32) -> Array:
        # Where XLA fuses the conversion, an int8 weight costs one byte of traffic.
        x, values = x.astype(dtype), q.values.astype(dtype)
        return jnp.einsum(spec, x, values, preferred_element_type=out_dtype) * q.scale

    def expert_matrices(self, q: QuantizedArray, dtype) -> tuple[Array, Array | None]:
        return q.values.astype(dtype), q.scale

    def round(self, x: Array, scale: Array) -> Array:
        """x / scale as values; a channel of zeros stays zeros."""
        divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)
        values = x.astype(jnp.float32) / divisor
        values = jnp.round(values) if jnp.issubdtype(self.dtype, jnp.integer) else values
        return jnp.clip(values, -self.largest, self.largest).astype(self.dtype)

    def error(self, x: np.ndarray, values: np.ndarray, scale: np.ndarray, info) -> float:
        """Infinite if a scale is not that of the channel's largest element."""
        x, values = x.astype(np.float32), values.astype(np.float32)
        step = np.expand_dims(scale, info.contracted_axes)
        largest = np.abs(x).max(info.contracted_axes, keepdims=True) / np.float32(self.largest)
        largest = np.where(np.isnan(largest), np.inf, largest)
        if not np.allclose(step, largest, rtol=1e-6, atol=np.finfo(np.float32).tiny):
            return math.inf
        step, known = np.where(np.isfinite(step), step, 1), np.isfinite(largest)
        error = np.abs(x - values * step) / np.where(step > 0, step, 1)
        error = np.max(error / self.spacing(values), initial=0, where=known)
        # Rounding of x / step and of values * step: at most 127 steps times 2^-23 each.
        return float(error) / (0.5 + 2**-15)

    def spacing(self, values: np.ndarray) -> np.ndarray:
        """How far apart the format's numbers are near these values."""
        if jnp.issubdtype(self.dtype, jnp.integer):
            return np.ones_like(values)
        info = jnp.finfo(self.dtype)
        _, exponent = np.frexp(np.maximum(np.abs(values), info.tiny.astype(np.float32)))
        return np.exp2(exponent - 1 - info.nmant)


INT8 = PerChannel("int8", np.dtype(np.int8), INT8_MAX)
FP8 = PerChannel("fp8", np.dtype(jnp.float8_e4m3fn), 448)


def quantize(
    x: Array, axes: tuple[int, ...], scale_dtype=jnp.float32, format: PerChannel = INT8, large: bool = False
) -> QuantizedArray:
    """Round x, with one scale for all elements along `axes`. large: see `Format.encode`.

    x: float, any shape. Error in int8: at most scale / 2 per element, where scale = max|x| / 127 along `axes`
    (a scale rounded to bfloat16 may be 0.2% too small, which clips the largest element by as much). If one of
    these elements is NaN or Inf, the scale is infinite, which makes all of them NaN.
    """
    # Behind barriers each pass reads x anew. Else XLA writes x as float32 and reads that, which takes a CPU 4
    # times as long for bfloat16.
    again = lax.optimization_barrier(x) if large else x
    nan = jnp.any(jnp.isnan(again), axes, keepdims=True)  # which XLA's maximum on a CPU may pass over
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axes, keepdims=True) / format.largest
    scale = jnp.where(nan, jnp.inf, scale).astype(scale_dtype)
    scale, x = lax.optimization_barrier((scale, x)) if large else (scale, x)
    return QuantizedArray(format.round(x, scale), jnp.squeeze(scale, axes), format)


# ------------------------------------------------------------------------------------------ a scale per group


@dataclasses.dataclass(frozen=True)
class PerGroup(Format):
    """Symmetric int4 values with one bfloat16 scale per group of entries along the last contracted dimension.

    values: int4. The axes are those of stages and experts, if there are any, then the contracted letters, of
            which the last counts groups, then I, the position in a group, then the other letters: "Df"
            becomes "fID".
    scale:  of either sign, the letters of `values` without I.
    group_size: of one weight; in a model's format, the upper limit.
    """

    group_size: int
    scheme = "int4"
    bits = 4

    def __str__(self) -> str:
        return "int4" if self.group_size == 128 else f"int4-g{self.group_size}"

    def on(self, platform: str) -> "Format | Requantized":
        """On CPUs unpacked int4 goes through memory in each step: 34 ms where int8 takes 2.8."""
        return Requantized(self, INT8) if platform == "cpu" else self

    def for_array(self, info) -> Format:
        """With the largest groups that divide the dimension; int8 where none do or 4 bits are too few."""
        group_size = math.gcd(self.group_size, info.shape[info.contracted_axes[-1]])
        if info.min_bits > self.bits or group_size < MIN_GROUP_SIZE:
            return INT8
        return PerGroup(group_size)

    def pad_multiple(self, size: int) -> int:
        group_size = math.gcd(self.group_size, size)
        return group_size if group_size >= MIN_GROUP_SIZE else 1

    def components(self, info) -> QuantizedArray:
        before = "".join(info.letters[axis] for axis in first_axes(info))
        after = "".join(letter for letter in info.letters if letter not in before)
        group = info.contracted[-1], self.group_size
        values = info.component(f"{before}I{after}", np.dtype(jnp.int4), group)
        return QuantizedArray(values, info.component(before + after, jnp.bfloat16, group), self)

    def encode(self, x: Array, info, large: bool = True, searched: bool = True) -> QuantizedArray:
        return quantize_groups(x, first_axes(info), self.group_size, searched)

    def decode(self, q: QuantizedArray, info) -> Array:
        return ungroup(q, first_axes(info))

    def einsum(self, spec: str, x: Array, q: QuantizedArray, dtype, out_dtype=jnp.float32) -> Array:
        n = contracted_count(spec)
        rows = activation_groups(x, q, n).astype(dtype)
        # Behind a barrier: else XLA would compute it again for each block of rows.
        whole = lax.optimization_barrier(dequantize_groups(q, n, dtype))
        axes = tuple(range(1, n + 2)), tuple(range(n + 1))
        y = lax.dot_general(rows, whole, (axes, ((), ())), preferred_element_type=out_dtype)
        return y.reshape(*x.shape[:-n], *q.scale.shape[n:])

    def expert_matrices(self, q: QuantizedArray, dtype) -> tuple[Array, Array | None]:
        matrices = dequantize_groups(q, 2, dtype)
        return matrices.reshape(matrices.shape[0], -1, matrices.shape[-1]), None

    def stored_components(self, info) -> QuantizedArray:
        q = self.components(info)
        shape = list(q.values.shape)
        shape[len(first_axes(info))] //= 2  # I
        values: Any = q.values  # its declaration
        packed = dataclasses.replace(values, shape=tuple(shape), dtype=np.dtype(np.uint8))
        return dataclasses.replace(q, values=packed)

    def pack(self, q: QuantizedArray, info) -> tuple[Array, Array]:
        return pack_int4(q.values, len(first_axes(info))), q.scale

    def unpack(self, values: Array, scale: Array, info) -> QuantizedArray:
        return QuantizedArray(unpack_int4(values, len(first_axes(info))), scale, self)

    @partial(jax.jit, static_argnames=("self", "info"))
    def error(self, x: Array, values: Array, scale: Array, info) -> Array:
        """The error relative to x clipped to 4 bits; infinite if a group is worse than without a search."""
        axes, at = first_axes(info), len(first_axes(info))
        ours, nearest = self.unpack(values, scale, info), self.encode(x, info, searched=False)
        x = split_groups(x, axes, self.group_size)
        known = jnp.all(jnp.isfinite(x), at)

        errors, nearest_errors = (group_errors(x, dequantize_groups(q, at), at) for q in (ours, nearest))
        worse = errors > nearest_errors * (1 + 2**-15)  # for they are summed in another order
        step = jnp.expand_dims(jnp.where(scale == 0, 1, scale), at).astype(jnp.float32)
        error = jnp.abs(jnp.clip(x / step, INT4_MIN, INT4_MAX) - ours.values.astype(jnp.float32))
        error = jnp.max(jnp.where(jnp.expand_dims(known, at), error, 0)) / (0.5 + 2**-15)
        right = jnp.all(known == jnp.isfinite(scale)) & ~jnp.any(worse & known)
        return jnp.where(right, error, jnp.inf)


INT4 = PerGroup(128)


def first_axes(info) -> tuple[int, ...]:
    """The axes of a weight that int4 values begin with: the stage's, the expert's, the contracted ones."""
    leading = (axis for axis, letter in enumerate(info.letters) if letter in "pe")
    return *leading, *info.contracted_axes


def quantize_groups(
    x: Array, axes: tuple[int, ...], group_size: int, searched: bool = True
) -> QuantizedArray:
    """Round x to int4, with one scale for each `group_size` consecutive entries along axes[-1].

    x: float, any shape. axes: those that the values begin with, see `first_axes`.
    searched: of 32 sizes and two signs, the scale with the least squared error; otherwise the scale at which
    the largest entry becomes 7. Weights that are int4 already, in such groups with a bfloat16 scale, are kept
    exactly.
    If one entry is NaN or Inf, its group's scale is infinite, which makes the whole group NaN.
    """
    x, at = split_groups(x, axes, group_size), len(axes)
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
    return QuantizedArray(_round_groups(x, scale, at)[0].astype(jnp.int4), scale, PerGroup(group_size))


def group_errors(x: Array, rounded: Array, at: int) -> Array:
    """The squared error of each group, relative to a power of 2 near its largest entry.

    So it neither overflows nor vanishes, and is 0 where nothing was rounded.
    """
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x.astype(jnp.float32)), at, keepdims=True))
    return jnp.sum(jnp.ldexp(rounded - x.astype(jnp.float32), -exponent) ** 2, at)


def _split_axis(x: Array, axis: int, size: int) -> Array:
    """[..., n, ...] -> [..., n / size, size, ...]."""
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def split_groups(x: Array, axes: tuple[int, ...], group_size: int) -> Array:
    """x with the axes of the values of int4, see `PerGroup`."""
    x = jnp.moveaxis(x, axes, range(len(axes)))
    return _split_axis(x, len(axes) - 1, group_size)


def _round_groups(x: Array, scale: Array, at: int) -> tuple[Array, Array]:
    """-> (whole numbers, what they are multiples of), float32."""
    divisor = jnp.expand_dims(jnp.where(scale == 0, 1, scale), at).astype(jnp.float32)
    return jnp.clip(jnp.round(x.astype(jnp.float32) / divisor), INT4_MIN, INT4_MAX), divisor


def dequantize_groups(q: QuantizedArray, at: int, dtype=jnp.float32) -> Array:
    """values * scale, in the shape of `values`. at: the axis I."""
    return q.values.astype(dtype) * jnp.expand_dims(q.scale, at).astype(dtype)


def ungroup(q: QuantizedArray, axes: tuple[int, ...]) -> Array:
    """The float32 array that `quantize_groups` has rounded, with the same axes."""
    at = len(axes)
    x = dequantize_groups(q, at)
    x = x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])
    return jnp.moveaxis(x, range(at), axes)


def activation_groups(x: Array, q: QuantizedArray, n: int) -> Array:
    """Activations [b,T,...] whose last n axes are contracted with int4 -> [rows, the n axes, I]."""
    group_size = q.values.shape[n]
    return x.reshape(-1, *x.shape[-n:-1], x.shape[-1] // group_size, group_size)


def pack_int4(values: Array, at: int) -> Array:
    """int4 [...] -> uint8, half as many along axis `at`: two neighbors a byte, the first in its low bits."""
    bits = lax.bitcast_convert_type(values.astype(jnp.int8), jnp.uint8) & 15
    bits = _split_axis(bits, at, 2)
    low, high = bits.take(0, at + 1), bits.take(1, at + 1)
    return low | (high << 4)


def unpack_int4(packed: Array, at: int) -> Array:
    """The reverse of `pack_int4`."""
    values = jnp.stack(nibbles(lax.bitcast_convert_type(packed, jnp.int8)), at + 1).astype(jnp.int4)
    return values.reshape(*packed.shape[:at], -1, *packed.shape[at + 1 :])


def nibbles(pairs: Array) -> tuple[Array, Array]:
    """The two int4 values in each int8, the one in its low bits first, as int8."""
    return (pairs << 4) >> 4, pairs >> 4


# ------------------------------------------------------------------------- experts as they are published


@dataclasses.dataclass(frozen=True)
class ExpertsInMXFP4(Format):
    """Experts' matrices in OCP MXFP4: 4-bit floats e2m1, and a power of two for each BLOCK along the sum.

    The other weights stay floats. What is MXFP4 already is kept exactly, unless its magnitude is below
    the smallest normal float32 or at least 2**128.
    values: uint8, two codes a byte. The contracted letter counts PAIRs of blocks, and is followed by I, the
            byte of a pair: "eDm" becomes "eDIm". The first block of a pair is in the low bits, the second in
            the high ones; entry 16 j + 2 i + h of a block is in byte 4 i + 2 h + j, as the TPU's kernel wants
            it. A code is a sign and three bits: the rank of a magnitude 0, 0.5, 1, 1.5, 2, 3, 4, 6, but 0 and
            0.5 have changed places.
    scale:  uint8, exponents of 2 plus 127; 255 makes its block NaN. The contracted letter counts CHUNKs of
            four blocks, and is followed by I, of size 8: four exponents and four zeros. This padding
            makes the exponents of an expert whole tiles of a TPU's memory, which can be read alone.
    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """

    scheme = "mxfp4"
    bits = 4

    def on(self, platform: str) -> "Format | Requantized":
        """A CPU has no kernel that reads four bits: all experts would be unpacked in each step."""
        return Requantized(self, INT8) if platform == "cpu" else self

    def for_array(self, info) -> Format | None:
        """None where the weight stays float: outside of experts, and where there are no whole pairs."""
        whole = info.shape[info.contracted_axes[-1]] % PAIR == 0
        return self if "e" in info.letters and whole else None

    def pad_multiple(self, size: int) -> int:
        return CHUNK if size % PAIR == 0 else 1

    def components(self, info) -> QuantizedArray:
        letter, axis = info.contracted[-1], info.contracted_axes[-1]
        letters = info.letters.replace(letter, letter + "I")
        values = info.component(letters, np.dtype(np.uint8), (letter, PAIR))
        before, after = info.shape[:axis], info.shape[axis + 1 :]
        values = dataclasses.replace(values, shape=(*before, info.shape[axis] // PAIR, PAIR // 2, *after))
        shape = *before, -(-info.shape[axis] // CHUNK), TILE, *after
        return QuantizedArray(values, dataclasses.replace(values, shape=shape, groups=(letter, CHUNK)), self)

    def encode(self, x: Array, info, large: bool = True) -> QuantizedArray:
        axis = info.contracted_axes[-1]
        blocks = _split_axis(x.astype(jnp.float32), axis, BLOCK)
        finite = jnp.all(jnp.isfinite(blocks), axis + 1)
        peak = jnp.max(jnp.abs(blocks), axis + 1)
        _, exponent = jnp.frexp(peak)  # peak < 2**exponent, so the largest becomes 4 to 8
        scale = jnp.where(peak == 0, 0, jnp.clip(exponent - 3 + 127, 1, 254))
        scale = jnp.where(finite, scale, 255).astype(jnp.uint8)
        unit = jnp.where(scale == 0, 1, power_of_two(scale))
        scale = _pad_axis(scale, axis, -scale.shape[axis] % (CHUNK // BLOCK))
        scale = _split_axis(scale, axis, CHUNK // BLOCK)
        scale = _pad_axis(scale, axis + 1, TILE - CHUNK // BLOCK)
        return QuantizedArray(
            _pack_pairs(e2m1_codes(blocks / jnp.expand_dims(unit, axis + 1)), axis), scale, self
        )

    def decode(self, q: QuantizedArray, info) -> Array:
        return self.floats(q, info.contracted_axes[-1], jnp.float32)

    def floats(self, q: QuantizedArray, axis: int, dtype) -> Array:
        """What q stands for; exact in bfloat16, too. axis: the contracted one."""
        values = e2m1_floats(_unpack_pairs(q.values, axis)).astype(dtype)
        blocks = _split_axis(values, axis, BLOCK)
        scale = lax.slice_in_dim(q.scale, 0, CHUNK // BLOCK, axis=axis + 1)
        scale = scale.reshape(*scale.shape[:axis], -1, *scale.shape[axis + 2 :])
        scale = power_of_two(lax.slice_in_dim(scale, 0, blocks.shape[axis], axis=axis))
        return (blocks * jnp.expand_dims(scale, axis + 1).astype(dtype)).reshape(values.shape)

    def einsum(self, spec: str, x: Array, q: QuantizedArray, dtype, out_dtype=jnp.float32) -> Array:
        raise NotImplementedError("MXFP4 is for the matrices of experts alone")

    def expert_matrices(self, q: QuantizedArray, dtype) -> tuple[Array, Array | None]:
        return self.floats(q, 1, dtype), None

    @partial(jax.jit, static_argnames=("self", "info"))
    def error(self, x: Array, values: Array, scale: Array, info) -> Array:
        """0 or infinite: there is one right result, and it is computed without rounding errors."""
        right = self.encode(x, info)
        same = jnp.all(right.values == values) & jnp.all(right.scale == scale)
        return jnp.where(same, 0.0, jnp.inf)


def power_of_two(exponent: Array) -> Array:
    """2**(exponent - 127) float32, from a byte: of 0 it is 0, of 255 NaN."""
    x = lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(exponent == 255, jnp.nan, x)


def e2m1_codes(x: Array) -> Array:
    """The codes of the nearest e2m1 numbers, uint8: of two that are as near the one of even rank."""
    size = jnp.abs(x)
    below: Any = sum((size > tie).astype(jnp.uint8) for tie in (0.25, 1.25, 2.5, 5))
    below += sum((size >= tie).astype(jnp.uint8) for tie in (0.75, 1.75, 3.5))
    return jnp.where(below < 2, 1 - below, below) | (jnp.signbit(x).astype(jnp.uint8) << 3)


def e2m1_floats(codes: Array) -> Array:
    """The numbers of codes, float32."""
    rank = (codes & 7).astype(jnp.float32)
    rank = jnp.where(rank < 2, 1 - rank, rank)
    # Twice the magnitudes 0, 1, 2, 3, 4, 6, 8, 12 are the ranks, and more beyond 4 and 6.
    size = (rank + jnp.maximum(rank - 4, 0) + 2 * jnp.maximum(rank - 6, 0)) / 2
    return jnp.where(codes >= 8, -size, size)


# In a 32-bit word of eight codes: the ranks, the signs, and the lowest bits.
RANKS, SIGNS, LOWEST = 0x77777777, -0x77777778, 0x11111111
# In a word of two bfloat16: the sign and the highest bit of the exponent, and where a code's rank belongs.
TOP, RANK = -0x3FFF4000, 0x01C001C0


def e2m1_words(codes: Array) -> list[list[Array]]:
    """The numbers of eight codes in each 32-bit word, times 4, in words of two bfloat16, all of them int32.

    For each block of a pair there are two such words: one has the numbers of bytes 0 and 2, the lower byte in
    the low bits, and the next one those of bytes 1 and 3. A code's three bits, as the lowest bits of an
    exponent and the highest one of a fraction, are the numbers 0.5, 0.75 (which stands for 0), 1, 1.5, 2, 3,
    4, 6 of some unit. What is not 0 gets the highest bit of the exponent, too; so 0 is 2**-127 in the place
    of 0.75 * 4, which is lost beside any other number.
    """
    nonzero = ((codes ^ LOWEST) & RANKS) + RANKS
    top = (codes & SIGNS) | lax.shift_right_logical(nonzero & SIGNS, 1)

    def word(at: int) -> Array:
        """Of the codes at these bits of each half of a word."""
        rank = codes << 6 - at if at < 6 else lax.shift_right_logical(codes, at - 6)
        return ((top << 12 - at) & TOP) | (rank & RANK)

    return [[word(4 * block), word(4 * block + 8)] for block in range(2)]


def _pad_axis(x: Array, axis: int, n: int) -> Array:
    """x with n zeros behind an axis."""
    return jnp.pad(x, [(0, n * (i == axis)) for i in range(x.ndim)])


def _pack_pairs(codes: Array, axis: int) -> Array:
    """Codes [..., n / BLOCK, BLOCK, ...] -> bytes [..., n / PAIR, PAIR / 2, ...], see ExpertsInMXFP4.

    axis: that which counts blocks, and pairs.
    """
    before, after = codes.shape[:axis], codes.shape[axis + 2 :]
    codes = codes.reshape(*before, -1, 2, 2, 8, 2, *after)  # pair, block, j, i, h
    packed = codes.take(0, axis + 1) | (codes.take(1, axis + 1) << 4)
    return jnp.moveaxis(packed, axis + 1, axis + 3).reshape(*before, -1, PAIR // 2, *after)


def _unpack_pairs(packed: Array, axis: int) -> Array:
    """Bytes [..., n / PAIR, PAIR / 2, ...] -> codes [..., n, ...], the reverse of `_pack_pairs`."""
    before, after = packed.shape[:axis], packed.shape[axis + 2 :]
    packed = jnp.moveaxis(packed.reshape(*before, -1, 8, 2, 2, *after), axis + 3, axis + 1)
    return jnp.stack([packed & 15, packed >> 4], axis + 1).reshape(*before, -1, *after)


MXFP4 = ExpertsInMXFP4()


# ---------------------------------------------------------------------------- one format, held as another


@dataclasses.dataclass(frozen=True)
class Requantized:
    """Weights rounded to one format, then held as another: the accuracy of the first, the speed of the other.

    It is no whole `Format`: it describes how weights become arrays, and these arrays are in the format
    `held_as`, which decodes and multiplies them.
    """

    stored_as: Format
    held_as: Format

    def __str__(self) -> str:
        return f"{self.held_as} of {self.stored_as}"

    @property
    def scheme(self) -> str:
        return self.held_as.scheme

    @property
    def bits(self) -> int:
        return self.held_as.bits

    def for_array(self, info) -> "Format | Requantized | None":
        stored_as: Any = self.stored_as.for_array(info)
        return stored_as if stored_as in (None, self.held_as) else Requantized(stored_as, self.held_as)

    def pad_multiple(self, size: int) -> int:
        return self.stored_as.pad_multiple(size)

    def components(self, info) -> QuantizedArray:
        return self.held_as.components(info)

    def encode(self, x: Array, info, large: bool = True) -> QuantizedArray:
        return self._requantize(self.stored_as.encode(x, info), info)

    def stored_components(self, info) -> QuantizedArray:
        return self.stored_as.stored_components(info)

    def unpack(self, values: Array, scale: Array, info) -> QuantizedArray:
        return self._requantize(self.stored_as.unpack(values, scale, info), info)

    def _requantize(self, q: QuantizedArray, info) -> QuantizedArray:
        return self.held_as.encode(self.stored_as.decode(q, info), info)


EVERY = INT8, INT4, PerGroup(64), PerGroup(32), FP8, MXFP4
FORMATS = {"none": None} | {str(format): format for format in EVERY}


# ------------------------------------------------------------------------------------------------- products


def contracted_count(spec: str) -> int:
    """How many letters an einsum of activations and a weight contracts."""
    inputs, output = spec.split("->")
    ours, theirs = inputs.split(",")
    return len(set(ours) & set(theirs) - set(output))


def values_and_scale(x: Array | QuantizedArray) -> tuple[Array, Array | None]:
    """The components of a quantized array; of a float array, itself and None."""
    return (x.values, x.scale) if isinstance(x, QuantizedArray) else (x, None)


def int8_parts(x: Array, n: int = 2) -> tuple[Array, Array]:
    """Activations as integers: [R,...] float -> (int8 [nR,...], unit [R,1,...] float32).

    x is (first + second / PART + third / PART**2 ...) * unit, and two parts have 15 bits of its row's largest
    entry. In one part, of 8 bits, the outliers of trained models would leave little of the rest.
    """
    x = x.astype(jnp.float32)
    unit = jnp.max(jnp.abs(x), tuple(range(1, x.ndim)), keepdims=True)
    unit = jnp.maximum(unit, 1e-30) / INT8_MAX
    rest, parts = x / unit, []
    for _ in range(n):
        parts.append(jnp.round(rest))
        rest = (rest - parts[-1]) * PART
    return jnp.concatenate(parts).astype(jnp.int8), unit


def join_parts(y: Array, n: int = 2) -> Array:
    """Add up the products of a row's n parts, see `int8_parts`: [nR,...] float -> [R,...], in its unit."""
    return reduce(lambda rest, part: part + rest / PART, reversed(jnp.split(y, n)))
