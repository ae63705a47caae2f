"""The product of activations and weights, float or int8, in the form that this platform is fast at."""

import jax.numpy as jnp
from jax import Array

from ops.cpu import contract
from ops.platform import on_cpu
from quantize import QuantizedArray, values_and_scale


def einsum(spec: str, x: Array, w: Array | QuantizedArray, out_dtype=None) -> Array:
    """`jnp.einsum(spec, x, w)` summed in float32, where w may be int8.

    Both end in the letters that are contracted; what is left of x, then of w, is the output. The scale has
    w's letters in the output and multiplies that: where XLA fuses the cast, an int8 weight costs one byte of
    traffic. Returns `out_dtype` or x's dtype.
    """
    values, scale = values_and_scale(w)
    if on_cpu():
        inputs, output = spec.split("->")
        ours, theirs = inputs.split(",")
        n = (len(ours) + len(theirs) - len(output)) // 2
        assert ours[-n:] == theirs[-n:] and output == ours[:-n] + theirs[:-n], spec
        y = contract(x, values, n)
    else:
        y = jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    y = y if scale is None else y * scale
    return y.astype(out_dtype or x.dtype)
