"""The product of activations and weights, float, int8 or int4, in the form that this platform is fast at."""

import math

import jax.numpy as jnp
from jax import Array, lax

from ops.cpu import contract
from ops.gpu import grouped_dot, takes
from ops.platform import on_cpu, on_gpu, on_tpu
from quantize import PART, GroupedArray, QuantizedArray, dequantize_groups, int8_parts, values_and_scale

FEW_ROWS = 256  # up to which int4 is multiplied as it is, no slower than after bfloat16 was made of it once


def einsum(spec: str, x: Array, w: Array | QuantizedArray | GroupedArray, out_dtype=None) -> Array:
    """`jnp.einsum(spec, x, w)` summed in float32, where w may be int8 or int4.

    Both end in the letters that are contracted; what is left of x, then of w, is the output, where a letter
    of both stands once: of a matrix per head, "bTgN,gLN->bTgL". Of int4 they are the letters of what it
    stands for, see GroupedArray. The int8 scale has w's letters in the output and
    multiplies that: where XLA fuses the cast, an int8 weight costs one byte of traffic. Returns `out_dtype`
    or x's dtype.
    """
    inputs, output = spec.split("->")
    ours, theirs = inputs.split(",")
    n = (len(ours) + len(theirs) - len(output)) // 2  # contracted, if no letter is in all three
    if isinstance(w, GroupedArray):
        return grouped(x, w, n).astype(out_dtype or x.dtype)
    values, scale = values_and_scale(w)
    if not on_cpu():
        y = jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    elif set(ours) & set(theirs) & set(output):
        y = jnp.einsum(spec, x.astype(jnp.float32), values.astype(jnp.float32))
    else:
        assert ours[-n:] == theirs[-n:] and output == ours[:-n] + theirs[:-n], spec
        y = contract(x, values, n)
    y = y if scale is None else y * scale
    return y.astype(out_dtype or x.dtype)


def grouped(x: Array, w: GroupedArray, n: int) -> Array:
    """The sum of products over the last n axes of x: [b,T,...] and an int4 array -> [b,T,...] float32.

    Each group has a scale of its own, so there is a sum for each group, and then one over the scaled sums. On
    TPUs few rows are multiplied as integers, in two int8 parts: XLA fuses all of it, and reads four bits. On
    GPUs a kernel does, the experts' with one of them.
    """
    group, outputs = w.values.shape[n], w.scale.shape[n:]
    lead, kept = x.shape[:-n], tuple(range(n))
    x = x.reshape(-1, *x.shape[-n:-1], x.shape[-1] // group, group)  # rows, sums, place in a group
    places, rows = n + 1, x.shape[0]
    if on_tpu() and rows <= FEW_ROWS:
        parts, unit = int8_parts(x)
        sums = lax.dot_general(
            parts, w.values.astype(jnp.int8), (((places,), (n,)), (tuple(range(1, places)), kept)),
            preferred_element_type=jnp.int32,
        )  # fmt: skip
        y = jnp.sum(sums.astype(jnp.float32) * jnp.expand_dims(w.scale, n), kept)
        high, low = jnp.split(y, 2)
        y = (high + low / PART) * unit.reshape(rows, *(1,) * len(outputs))
    elif on_gpu() and rows <= FEW_ROWS and takes(w.values):
        M = math.prod(outputs)
        expert = GroupedArray(w.values.reshape(1, -1, group, M), w.scale.reshape(1, -1, M))
        y = grouped_dot(x.reshape(rows, -1), expert, jnp.array([rows]))
    else:
        dtype = jnp.float32 if on_cpu() else x.dtype
        # Behind a barrier, for else XLA would make it anew for each block of rows.
        whole = lax.optimization_barrier(dequantize_groups(w, n, dtype))
        axes = (tuple(range(1, places + 1)), tuple(range(places)))
        y = lax.dot_general(x.astype(dtype), whole, (axes, ((), ())), preferred_element_type=jnp.float32)
    return y.reshape(*lead, *outputs)
