"""Products of activations and weights, by the kernels that each platform has for the weights' format."""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from ops import gpu_products, tpu
from ops.cpu import contract
from ops.platform import choose, plain_kinds, platform
from quantize import (
    QuantizedArray,
    activation_groups,
    contracted_count,
    int8_parts,
    join_parts,
    values_and_scale,
)

Pairs = Sequence[tuple[str, QuantizedArray]]  # of products: how, and with which weight

# On GPUs XLA joins products of one x, by copies of their matrices, if x has more rows or a matrix fewer
# outputs.
DECODE_ROWS, NARROW = 16, 128
INTEGER_ROWS = 64  # up to which GPUs multiply int8 as integers
FEW_ROWS = 256  # up to which multiplying int4 is no slower than converting it to bfloat16 first


def scheme_of(w: Array | QuantizedArray) -> str:
    """A weight's key in the tables of kernels: the scheme of its format, or "float"."""
    return w.format.scheme if isinstance(w, QuantizedArray) else "float"


def einsum(spec: str, x: Array, w: Array | QuantizedArray, out_dtype=None) -> Array:
    """`jnp.einsum(spec, x, w)` summed in float32, where w may be quantized. Returns `out_dtype` or x's dtype.

    Both operands end in the contracted letters. The output has what is left of x's letters, then of w's; a
    letter that is in all three, as of one matrix per head in "bTgN,gLN->bTgL", stands once in the output.
    """
    kernel = choose("matmul", KERNELS, (platform(), scheme_of(w)), plain_einsum)
    out_dtype = out_dtype or x.dtype
    return kernel(spec, x, w, out_dtype).astype(out_dtype)


def products(
    x: Array, *pairs: tuple[str, Array | QuantizedArray], then: Callable | None = None
) -> list[Array]:
    """`einsum(spec, x, w)` of each pair (spec, w). On GPUs one kernel multiplies by several matrices.

    then: an elementwise function of these products, all of one shape. Its value is then the only result.
    """
    kernels = {choose("matmul", KERNELS, (platform(), scheme_of(w)), plain_einsum) for _, w in pairs}
    together = TOGETHER.get(kernels.pop()) if len(kernels) == 1 else None
    if together:
        return [y.astype(x.dtype) for y in together(x, pairs, x.dtype, then)]
    return value_of([einsum(spec, x, w) for spec, w in pairs], then)


def value_of(found: list[Array], then: Callable | None) -> list[Array]:
    """What `products` returns: the products, or the value of a function of them."""
    return [then(*found)] if then else found


# The functions below return out_dtype, or float32 where that is as fast.


def plain_einsum(spec: str, x: Array, w: Array | QuantizedArray, out_dtype) -> Array:
    """The product on any platform. A CPU multiplies in float32: XLA has no other batched product."""
    dtype = jnp.float32 if platform() == "cpu" else x.dtype
    if isinstance(w, QuantizedArray):
        return w.format.einsum(spec, x, w, dtype)
    return jnp.einsum(spec, x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32)


def einsum_on_gpu(spec: str, x: Array, w: Array | QuantizedArray, out_dtype) -> Array:
    """Products with floats or 8-bit weights, left to XLA, with barriers so that it does not copy the weights.

    XLA joins several products of one x, unless each has its own barrier, and gives a matrix the layout that
    suits what follows its product, unless a barrier precedes it: both copy matrices in every step. Products
    of the few rows of a decode step with wide matrices are not joined; there XLA may compute x inside of the
    product. Of many rows the product is rounded to out_dtype before anything else is done with it: float32
    would be written and read again.
    """
    if per_head(spec):
        return plain_einsum(spec, x, w, out_dtype)
    n = contracted_count(spec)
    values, scale = values_and_scale(w)
    left, right = x.reshape(-1, math.prod(x.shape[-n:])), values.reshape(-1, math.prod(values.shape[-n:]))
    if len(left) > DECODE_ROWS or len(right) < NARROW:
        left, right = lax.optimization_barrier((left, right))
    else:
        right = lax.optimization_barrier(right)
    dtype = out_dtype if len(left) > FEW_ROWS else jnp.float32
    y = jnp.einsum("nd,md->nm", left, right.astype(left.dtype), preferred_element_type=dtype)
    y = y if scale is None else y * scale.reshape(-1)
    return y.reshape(*x.shape[:-n], *values.shape[:-n])


def int8_on_gpu(spec: str, x: Array, w: QuantizedArray, out_dtype) -> Array:
    """`int8_products_on_gpu` of one matrix."""
    return int8_products_on_gpu(x, [(spec, w)], out_dtype)[0]


def int8_products_on_gpu(x: Array, pairs: Pairs, out_dtype, then: Callable | None = None) -> list[Array]:
    """Few rows in bfloat16 are multiplied as integers, by all matrices in one kernel; others by XLA."""
    n = contracted_count(pairs[0][0])
    rows = x.reshape(-1, math.prod(x.shape[-n:]))
    matrices = [w.values.reshape(-1, rows.shape[1]) for _, w in pairs]
    whole = not any(per_head(spec) for spec, _ in pairs)
    if (
        len(rows) > INTEGER_ROWS
        or x.dtype != jnp.bfloat16
        or not whole
        or not all(map(gpu_products.supports, matrices))
    ):
        return value_of([einsum_on_gpu(spec, x, w, out_dtype) for spec, w in pairs], then)
    scales = [w.scale.reshape(-1) for _, w in pairs]
    found = zip(gpu_products.integer_products(rows, matrices, scales, then), pairs, strict=not then)
    return [y.reshape(*x.shape[:-n], *w.scale.shape) for y, (_, w) in found]


def per_head(spec: str) -> bool:
    """Whether the weight has one matrix per head: a letter of it stands in x and in the output, too."""
    inputs, output = spec.split("->")
    ours, theirs = inputs.split(",")
    return bool(set(ours) & set(theirs) & set(output))


def einsum_on_cpu(spec: str, x: Array, w: Array | QuantizedArray, out_dtype) -> Array:
    """Floats or int8, by `cpu.contract`; products with one matrix per head by `plain_einsum`."""
    if per_head(spec):
        return plain_einsum(spec, x, w, out_dtype)
    inputs, output = spec.split("->")
    ours, theirs = inputs.split(",")
    n = contracted_count(spec)
    assert ours[-n:] == theirs[-n:] and output == ours[:-n] + theirs[:-n], spec
    values, scale = values_and_scale(w)
    y = contract(x, values, n)
    return y if scale is None else y * scale


def int4_on_tpu(spec: str, x: Array, w: QuantizedArray, out_dtype) -> Array:
    """Few rows are multiplied as integers, in two int8 parts: XLA fuses it all, and reads 4 bits per weight.

    Each group has a scale of its own: products are summed in each group, then the scaled sums of all groups.
    """
    n = contracted_count(spec)
    lead, outputs = x.shape[:-n], w.scale.shape[n:]
    if math.prod(lead) > FEW_ROWS:
        return plain_einsum(spec, x, w, out_dtype)
    groups, kept = tuple(range(1, n + 1)), tuple(range(n))
    parts, unit = int8_parts(activation_groups(x, w, n))
    sums = lax.dot_general(
        parts, w.values.astype(jnp.int8), (((n + 1,), (n,)), (groups, kept)),
        preferred_element_type=jnp.int32,
    )  # fmt: skip
    y = jnp.sum(sums.astype(jnp.float32) * jnp.expand_dims(w.scale, n), kept)
    y = join_parts(y) * unit.reshape(-1, *(1,) * len(outputs))
    return y.reshape(*lead, *outputs)


def int4_on_gpu(spec: str, x: Array, w: QuantizedArray, out_dtype) -> Array:
    """`int4_products_on_gpu` of one matrix."""
    return int4_products_on_gpu(x, [(spec, w)], out_dtype)[0]


def int4_products_on_gpu(x: Array, pairs: Pairs, out_dtype, then: Callable | None = None) -> list[Array]:
    """Few rows are multiplied by the experts' kernel, each matrix as a single expert; others by XLA."""
    n = contracted_count(pairs[0][0])
    rows, weights = x.reshape(math.prod(x.shape[:-n]), -1), [w for _, w in pairs]
    if len(rows) > FEW_ROWS or not all(gpu_products.supports(w.values) for w in weights):
        out_dtype = out_dtype if len(rows) > FEW_ROWS else jnp.float32
        return value_of([w.format.einsum(spec, x, w, x.dtype, out_dtype) for spec, w in pairs], then)

    def expert(w: QuantizedArray) -> QuantizedArray:
        groups, outputs = w.scale.shape[:n], math.prod(w.scale.shape[n:])
        values = w.values.reshape(1, math.prod(groups), w.values.shape[n], outputs)
        return QuantizedArray(values, w.scale.reshape(1, -1, outputs), w.format)

    found = gpu_products.ragged_dot(rows, [expert(w) for w in weights], jnp.array([len(rows)]))
    shapes = ((*x.shape[:-n], *w.scale.shape[n:]) for w in weights)
    return value_of([y.reshape(shape) for y, shape in zip(found, shapes, strict=True)], then)


# By platform and scheme; all others use `plain_einsum`.
KERNELS = {
    ("cpu", "float"): einsum_on_cpu,
    ("cpu", "int8"): einsum_on_cpu,
    ("tpu", "int4"): int4_on_tpu,
    ("gpu", "float"): einsum_on_gpu,
    ("gpu", "int8"): int8_on_gpu,
    ("gpu", "fp8"): einsum_on_gpu,
    ("gpu", "int4"): int4_on_gpu,
}
# The kernels that can multiply by several matrices at once.
TOGETHER = {int8_on_gpu: int8_products_on_gpu, int4_on_gpu: int4_products_on_gpu}


def take_rows(matrix: Array | QuantizedArray, rows: Array) -> Array:
    """`tpu.take_rows` of a matrix [V,D] that may be quantized with a scale per row."""
    values, scale = values_and_scale(matrix)
    x = values[rows] if "matmul" in plain_kinds() else tpu.take_rows(values, rows)
    return x if scale is None else x.astype(scale.dtype) * scale[rows][..., None]
