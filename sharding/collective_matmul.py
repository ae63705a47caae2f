"""Layers by columns: those of model.py, with their all-reduces hidden behind the products beside them.

In model.py every device of MODEL has all D columns of the residual stream, and attention and feed-forward end
with one all-reduce each, `psum(einsum(...), MODEL)`. While it goes on nothing is computed. For the few tokens
of most decode steps this is the fastest way. For the many tokens of a prefill chunk, or of a decode step with
many rows, links are slower than products. There each device has its d = D / n columns of the stream, and the
two halves of each all-reduce, a gathering and a scattering of columns, are taken apart. Each half goes on
beside a product, around a ring of the devices and in both directions:

- The columns travel to the weights that multiply them. Each device multiplies the d columns that it has just
  received with the weights for these columns, while it receives the next ones: `Gathering`.
- The sums travel to the devices that keep them. Each device computes its product for d columns while it
  receives the sum of other devices' products for them, and passes on the new sum: `Scattering`.

A device normalizes, and adds to the residual stream, its own columns alone. Source: "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023, doi
10.1145/3567955.3567959.

The layers are the same functions in both cases, and nothing in them chooses. `column_ring` chooses, and
`by_columns` wraps the weights of a layer; which of them multiply the stream, and whose products are added to
it, is in their letters. `einsum` and `psum` of this file treat wrapped weights as described above, and all
others as ops.matmul.einsum and jax.lax.psum do. x is [b,T,D], or by columns [b,T,d].
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ops import matmul
from quantize import INT8, PerChannel, QuantizedArray, quantize, values_and_scale
from sharding.arrays import ArrayInfo
from sharding.interconnect import ring as interconnect_ring
from sharding.mesh import MODEL, ROWS, STAGE, mesh_size

Weight = Array | QuantizedArray
Ring = tuple[int, ...]  # the devices along MODEL, in an order in which neighbors have a link
BY_COLUMNS = P(ROWS, None, MODEL)  # of [B,T,D]: device i along MODEL has the columns from i * d on
LEAST_TOKENS = 64  # of a step, below which the latency of the rings' many steps would exceed what they save
LEAST_CHUNK = 32  # tokens of a row in a chunk of a prompt; a decode step has fewer, also with drafts
# Where decode runs by columns: among fewer devices its sums hide as well behind the reading of the weights.
DECODE_DEVICES = 16
DECODE_TOKENS = 256  # of a step, at least; on v5e, whose links are slower, LEAST_TOKENS


def column_ring(cfg, tokens: tuple[int, ...], mesh: Mesh) -> Ring | None:
    """The ring for a step that reads tokens [B,T] of this shape; None: the step does not run by columns.

    By columns run steps on TPUs whose chips form a ring. Not by columns run steps of few tokens, see above,
    models in several stages, and models whose columns the devices do not divide. A model with experts gains
    nothing, because every device needs whole tokens to route them. Nor do layers with inputs, which every
    device adds to whole tokens.
    """
    n, count = mesh_size(mesh, MODEL), math.prod(tokens) // mesh_size(mesh, ROWS)
    if n == 1 or cfg.D % n or mesh.shape[STAGE] > 1 or cfg.moe or cfg.layer_inputs or count < LEAST_TOKENS:
        return None
    device_ring, decodes = interconnect_ring(mesh), tokens[1] < LEAST_CHUNK
    if device_ring and decodes and (n < DECODE_DEVICES or (count < DECODE_TOKENS and not is_v5e(mesh))):
        return None
    return device_ring


def is_v5e(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].device_kind == "TPU v5 lite"


def einsum(spec: str, x: Array, w: "Weight | Gathering | Scattering", out_dtype=None) -> Array:
    """`ops.matmul.einsum`, of one device's arrays. A product of a `Scattering` weight is for `psum` alone."""
    if isinstance(w, Gathering):
        return products(x, (spec, w))[0]
    if isinstance(w, Scattering):
        return w.einsum(spec, x)  # type: ignore[return-value]  # nothing but `psum` gets it
    return matmul.einsum(spec, x, w, out_dtype)


def products(x: Array, *pairs: "tuple[str, Weight | Gathering]", then: Callable | None = None) -> list[Array]:
    """`einsum(spec, x, w)` of each pair (spec, w). By columns, x travels around the ring once for all.

    then: see `ops.matmul.products`.
    """
    gathering = [w for _, w in pairs if isinstance(w, Gathering)]
    if not gathering:
        return matmul.products(x, *pairs, then=then)  # type: ignore[arg-type]
    specs, weights, ring = [spec for spec, _ in pairs], [w.weight for w in gathering], gathering[0].ring
    if not all(map(has_columns, weights)):
        x = lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)
        return matmul.products(x, *zip(specs, weights, strict=True), then=then)
    return matmul.value_of(multiply_around(ring, x, specs, weights), then)


def psum(x: "Array | Scattered", axes: tuple[str, ...]) -> Array:
    """`lax.psum`; of a product that a ring has already summed, this device's columns."""
    return x.columns if isinstance(x, Scattered) else lax.psum(x, axes)


def column_mean(x: Array) -> Array:
    """The mean of the last axis: [...,D] -> [...,1]."""
    return jnp.mean(x, -1, keepdims=True)


def by_columns(infos, weights, kinds: tuple, ring: Ring) -> tuple[Any, tuple]:
    """The weights and the kinds of layers as they must be for a residual stream of columns.

    infos: the declarations of the weights. Raises ValueError for a weight whose letters have a D, but are
    neither those of a matrix that multiplies the stream, nor of one whose product is added to it, nor of a
    vector.
    """
    return jax.tree.map(partial(_wrapped, ring), infos, weights), tuple(map(_with_norms_by_columns, kinds))


def _with_norms_by_columns(record):
    """A layer's kind, or one of its residuals, with norms of a stream of which each device has columns."""
    changed: dict[str, Any] = {}
    for name, x in vars(record).items():
        if x and name.endswith("norm"):
            changed[name] = NormByColumns(x)
        elif x and name.endswith("residual"):
            changed[name] = _with_norms_by_columns(x)
    return dataclasses.replace(record, **changed)


def _wrapped(ring: Ring, info: ArrayInfo, w: Weight) -> "Weight | Gathering | Scattering":
    inputs, outputs = set(info.contracted), set(info.letters) - set(info.contracted)
    if "D" not in info.letters:
        return w
    if info.letters == "D":
        return jax.tree.map(own_columns, w)
    if inputs == {"D"} and info.letters.endswith("D"):
        return Gathering(w, ring)
    if inputs and "D" in outputs and info.letters.startswith("D"):
        return Scattering(w, ring)
    raise ValueError(f"{info.stored and info.stored.name}: a weight {info.letters} has no form by columns")


@dataclasses.dataclass(frozen=True)
class NormByColumns:
    """A norm of a residual stream of which each device has its columns, and their weights."""

    norm: Any

    def __call__(self, x: Array, w) -> Array:
        """x: [b,T,d] -> [b,T,d]."""
        return self.norm(x, w, lambda x: lax.pmean(column_mean(x), MODEL))


@partial(jax.tree_util.register_dataclass, data_fields=["columns"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Scattered:
    """A product that is summed over the devices, of which each has its columns, [b,T,d]."""

    columns: Array


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["ring"])
@dataclasses.dataclass(frozen=True)
class Gathering:
    """A weight [...,D] that multiplies a residual stream of columns, which travel around the ring.

    In a chunk of a prompt, columns that int8 weights multiply travel as int8, with a scale for each token and
    device, and are multiplied as integers: half the bytes, and half the time of the products. Others are not
    rounded, nor is anything in a decode step. Weights in int4 have scales for groups of columns, and take the
    columns of all devices at once.
    """

    weight: Weight
    ring: Ring


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["ring"])
@dataclasses.dataclass(frozen=True)
class Scattering:
    """A weight [D,...] whose product is summed around the ring: each device gets its columns of the sum."""

    weight: Weight
    ring: Ring

    def einsum(self, spec: str, x: Array) -> Scattered:
        """The sum over devices of `einsum(spec, x, w)`, as of "bTf,Df->bTD"."""
        n, w = len(self.ring), self.weight
        if not has_columns(w):
            y = matmul.einsum(spec, x, w)
            d = y.shape[-1] // n
            return scatter(self.ring, lambda i: lax.dynamic_slice_in_dim(y, i * d, d, y.ndim - 1))

        def part(i: Array) -> Array:
            block = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), blocks)
            return matmul.einsum(spec, x, block)

        # An axis for the blocks: to slice along D, at an offset known only at run time, XLA copies a weight.
        blocks = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), w)
        return scatter(self.ring, part)


def multiply_around(ring: Ring, x: Array, specs: list[str], weights: list[Weight]) -> list[Array]:
    """`einsum(spec, x, w)` of each pair, where x [b,T,d] travels around the ring."""
    n, d, dtype = len(ring), x.shape[-1], x.dtype
    rounded = x.shape[1] >= LEAST_CHUNK and all(
        isinstance(w, QuantizedArray) and w.format == INT8 for w in weights
    )
    columns = quantize(x, (x.ndim - 1,)) if rounded else x
    values, scales = zip(*map(values_and_scale, weights), strict=True)

    def add_products(sums: list, columns: Weight, steps: int | Array) -> list:
        """The sums with the products of the columns of the device that is so many steps behind."""
        start = device_ahead(ring, -steps) * d
        return [
            y + product(spec, columns, lax.dynamic_slice_in_dim(w, start, d, w.ndim - 1))
            for y, spec, w in zip(sums, specs, values, strict=True)
        ]

    def step(i: Array, carry: tuple) -> tuple:
        behind, ahead, sums = carry
        sent = send(ring, behind, 1), send(ring, ahead, -1)
        return *sent, add_products(add_products(sums, behind, i), ahead, -i)

    behind, ahead = send(ring, columns, 1), send(ring, columns, -1)
    sums = add_products([0.0] * len(specs), columns, 0)
    behind, ahead, sums = lax.fori_loop(1, (n + 1) // 2, step, (behind, ahead, sums))
    if n % 2 == 0:  # the device on the other side of the ring
        sums = add_products(sums, behind, n // 2)
    return [(y if scale is None else y * scale).astype(dtype) for y, scale in zip(sums, scales, strict=True)]


def scatter(ring: Ring, part: Callable[[Array], Array]) -> Scattered:
    """The sum over devices of their parts, of which each device gets its own columns.

    part: this device's addend of block i, the d columns of device i. The addends of one half of the devices
    come from behind, added up on their way around the ring, those of the other half from ahead.
    """
    most, least = len(ring) // 2, (len(ring) - 1) // 2  # devices behind, and ahead

    def ours(steps: int | Array) -> Array:
        """This device's addend for the device that is so many steps ahead."""
        return part(device_ahead(ring, steps))

    def add(ours, *received):
        # Behind the barrier XLA cannot fuse product and sum, for which it would have to receive first.
        return jax.tree.map(lambda *addends: sum(addends), lax.optimization_barrier(ours), *received)

    def step(i: Array, sums: tuple) -> tuple:
        received = send(ring, sums[0], 1), send(ring, sums[1], -1)
        return add((ours(least - i), ours(i - least)), received)

    behind = ours(most)
    if least == 0:
        return Scattered(add(ours(0), send(ring, behind, 1)))
    if most > least:
        behind = add(ours(least), send(ring, behind, 1))
    behind, ahead = lax.fori_loop(1, least, step, (behind, ours(-least)))
    return Scattered(add(ours(0), send(ring, behind, 1), send(ring, ahead, -1)))


def device_ahead(ring: Ring, steps: int | Array) -> Array:
    """The index along MODEL of the device that is so many steps ahead of this one in the ring."""
    order, places = jnp.asarray(ring), jnp.asarray(np.argsort(ring))
    return order[(places[lax.axis_index(MODEL)] + steps) % len(ring)]


def send(ring: Ring, tree, steps: int):
    """The tree of the device that is so many steps behind this one in the ring."""
    pairs = [(device, ring[(i + steps) % len(ring)]) for i, device in enumerate(ring)]
    return jax.tree.map(lambda x: lax.ppermute(x, MODEL, pairs), tree)


def own_columns(x: Array, axes: tuple[str, ...] = MODEL) -> Array:
    """This device's share of the columns, which zeros fill up to equal shares: [...,D] -> [...,d]."""
    n, D = lax.axis_size(axes), x.shape[-1]
    d = -(-D // n)
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n * d - D)])
    return lax.dynamic_slice_in_dim(filled, lax.axis_index(axes) * d, d, x.ndim - 1)


def has_columns(w: Weight) -> bool:
    """Whether the values of some columns, or rows, of a weight can be multiplied without the others."""
    return not isinstance(w, QuantizedArray) or isinstance(w.format, PerChannel)


def product(spec: str, x: Weight, values: Array) -> Array:
    """An einsum, float32; of int8 activations, which have a scale for each [b,T], a product of integers."""
    if not isinstance(x, QuantizedArray):
        return jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    y = jnp.einsum(spec, x.values, values, preferred_element_type=jnp.int32).astype(jnp.float32)
    return y * jnp.expand_dims(x.scale, tuple(range(2, y.ndim)))
