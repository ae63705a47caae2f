"""The product of activations and weights, float or int8, in the form that this platform is fast at."""

import jax.numpy as jnp
from jax import Array

from ops.cpu import contract
from ops.platform import on_cpu
from quantize import QuantizedArray, values_and_scale


def einsum(spec: str, x: Array, w: Array | QuantizedArray, out_dtype=None) -> Array:
    """`jnp.einsum(spec, x, w)` summed in float32, where w may be int8.

    Both end in the letters that are contracted; what is left of x, then of w, is the output, where a letter
    of both stands once: of a matrix per head, "bTgN,gLN->bTgL". The scale has w's letters in the output and
    multiplies that: where XLA fuses the cast, an int8 weight costs one byte of traffic. Returns `out_dtype`
    or x's dtype.
    """
    values, scale = values_and_scale(w)
    inputs, output = spec.split("->")
    ours, theirs = inputs.split(",")
    if not on_cpu():
        y = jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    elif set(ours) & set(theirs) & set(output):
        y = jnp.einsum(spec, x.astype(jnp.float32), values.astype(jnp.float32))
    else:
        n = (len(ours) + len(theirs) - len(output)) // 2
        assert ours[-n:] == theirs[-n:] and output == ours[:-n] + theirs[:-n], spec
        y = contract(x, values, n)
    y = y if scale is None else y * scale
    return y.astype(out_dtype or x.dtype)
