"""How the devices of MODEL, which compute the same tokens, hold the residual stream between parts of a layer.

`Replicated`: every device has all D columns. Each part of a layer ends with one all-reduce, and while it
goes on nothing is computed. A decode step has so few rows that this is the fastest way.

`ByColumns`: each device has its d = D / n columns. For the many rows of a prefill chunk, links are slower
than products. So the two halves of each all-reduce, a gathering and a scattering of columns, are taken
apart, and each goes on beside the products next to it. In both, data travels around a ring of the devices,
in both directions:

- `multiply`: the columns travel. Each device multiplies the d columns that it has just received with the
  weights for these columns, while it receives the next ones.
- `multiply_and_sum`: sums travel. Each device computes its product for d columns while it receives the sum
  of other devices' products for them, and passes on the new sum.

A device normalizes, and adds to the residual stream, its own columns alone. Source: "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023, doi
10.1145/3567955.3567959.

These methods run inside shard_map. x is [b,T,D] if it is replicated, and [b,T,d] otherwise.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ops.matmul import einsum
from quantize import INT8, PerChannel, QuantizedArray, quantize, values_and_scale
from sharding.interconnect import ring
from sharding.mesh import MODEL, ROWS, STAGE, mesh_size

Weight = Array | QuantizedArray
LEAST_TOKENS = 128  # of a chunk, below which the latency of the rings' many steps would exceed what they save


@dataclasses.dataclass(frozen=True)
class Replicated:
    """All D columns on every device."""

    spec = P(ROWS)

    def own(self, w):
        """This device's columns of each array [...,D] in a tree."""
        return w

    def whole(self, x: Array) -> Array:
        """All columns: -> [b,T,D]."""
        return x

    def mean(self, x: Array) -> Array:
        """The mean of all columns, whole on every device: -> [...,1]."""
        return jnp.mean(x, -1, keepdims=True)

    def sum(self, x: Array) -> Array:
        """The sum over devices of x [b,T,D], as the residual stream is held."""
        return lax.psum(x, MODEL)

    def multiply(self, x: Array, *products: tuple[str, Weight]) -> list[Array]:
        """`einsum(spec, x, w)` of each of the products (spec, w), as in "bTD,fD->bTf"."""
        return [einsum(spec, x, w) for spec, w in products]

    def multiply_and_sum(self, spec: str, x: Array, w: Weight) -> Array:
        """The sum over devices of `einsum(spec, x, w)`, as in "bTf,Df->bTD"."""
        return self.sum(einsum(spec, x, w))


@dataclasses.dataclass(frozen=True)
class ByColumns:
    """Device i along MODEL has the columns from i * d on. The methods are those of `Replicated`.

    ring: the devices along MODEL, in an order in which neighbors are neighbors on the interconnect.

    Columns that int8 weights multiply travel as int8, with a scale for each token and device, and are
    multiplied as integers: half the bytes, and half the time of the products. Others are not rounded.
    Weights in int4 have scales for groups of columns, and take the columns of all devices at once.
    """

    ring: tuple[int, ...]

    spec = P(ROWS, None, MODEL)

    def own(self, w):
        return jax.tree.map(own_columns, w)

    def whole(self, x: Array) -> Array:
        return lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)

    def mean(self, x: Array) -> Array:
        return lax.pmean(jnp.mean(x, -1, keepdims=True), MODEL)

    def sum(self, x: Array) -> Array:
        half = x.shape[-1] // (2 * len(self.ring))
        return self._scatter(lambda i: lax.dynamic_slice_in_dim(x, i * half, half, x.ndim - 1))

    def multiply(self, x: Array, *products: tuple[str, Weight]) -> list[Array]:
        if not all(has_columns(w) for _, w in products):
            return REPLICATED.multiply(self.whole(x), *products)
        n, d, dtype = len(self.ring), x.shape[-1], x.dtype
        rounded = all(isinstance(w, QuantizedArray) and w.format == INT8 for _, w in products)
        columns = quantize(x, (x.ndim - 1,)) if rounded else x
        specs, weights = zip(*products, strict=True)
        values, scales = zip(*map(values_and_scale, weights), strict=True)

        def add_products(sums: list[Array], columns: Weight, steps: int | Array) -> list[Array]:
            """The sums with the products of the columns of the device that is so many steps behind."""
            start = self._device(-steps) * d
            return [
                y + product(spec, columns, lax.dynamic_slice_in_dim(w, start, d, w.ndim - 1))
                for y, spec, w in zip(sums, specs, values, strict=True)
            ]

        def step(i: Array, carry: tuple) -> tuple:
            behind, ahead, sums = carry
            sent = self._send(behind, 1), self._send(ahead, -1)
            return *sent, add_products(add_products(sums, behind, i), ahead, -i)

        behind, ahead = self._send(columns, 1), self._send(columns, -1)
        sums = add_products([0.0] * len(products), columns, 0)
        behind, ahead, sums = lax.fori_loop(1, (n + 1) // 2, step, (behind, ahead, sums))
        if n % 2 == 0:  # the device on the other side of the ring
            sums = add_products(sums, behind, n // 2)
        return [
            (y if scale is None else y * scale).astype(dtype) for y, scale in zip(sums, scales, strict=True)
        ]

    def multiply_and_sum(self, spec: str, x: Array, w: Weight) -> Array:
        if not has_columns(w):
            return self.sum(einsum(spec, x, w))
        n, rows = 2 * len(self.ring), x.reshape(*x.shape[:2], -1)

        def in_blocks(x: Array) -> Array:
            """[D] -> [n,D/n], and [D,...] -> [n,D/n,f] with all other dimensions as one."""
            return x.reshape(n, -1, *[math.prod(x.shape[1:])] * (x.ndim > 1))

        def part(i: Array) -> Array:
            block = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), blocks)
            return einsum("bTf,Df->bTD", rows, block)

        # An axis for the blocks: to slice along D, at an offset known only at run time, XLA copies a weight.
        blocks = jax.tree.map(in_blocks, w)
        return self._scatter(part)

    def _scatter(self, part: Callable[[Array], Array]) -> Array:
        """The sum over devices of their parts, of which each device gets its own columns.

        part: this device's addend of block i, of d / 2 columns from i * d / 2 on. The first half of each
        device's columns travels forwards around the ring, the second half backwards.
        """
        n = len(self.ring)

        def parts(i: int | Array) -> tuple[Array, Array]:
            """This device's addends of the two sums that it passes on after step i."""
            return part(2 * self._device(-1 - i)), part(2 * self._device(1 + i) + 1)

        def step(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            received = self._send(sums[0], 1), self._send(sums[1], -1)
            # Behind the barrier XLA cannot fuse product and sum, for which it would have to receive first.
            ours = lax.optimization_barrier(parts(i))
            return tuple(map(jnp.add, ours, received))

        return jnp.concatenate(lax.fori_loop(1, n, step, parts(0)), -1)

    def _device(self, steps: int | Array) -> Array:
        """The index along MODEL of the device that is so many steps ahead of this one in the ring."""
        ring, places = jnp.asarray(self.ring), jnp.asarray(np.argsort(self.ring))
        return ring[(places[lax.axis_index(MODEL)] + steps) % len(self.ring)]

    def _send(self, tree, steps: int):
        """The tree of the device that is so many steps behind this one in the ring."""
        pairs = [(device, self.ring[(i + steps) % len(self.ring)]) for i, device in enumerate(self.ring)]
        return jax.tree.map(lambda x: lax.ppermute(x, MODEL, pairs), tree)


REPLICATED = Replicated()
Residual = Replicated | ByColumns


def own_columns(x: Array) -> Array:
    """This device's share of the columns: [...,D] -> [...,d]."""
    d = x.shape[-1] // lax.axis_size(MODEL)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * d, d, x.ndim - 1)


def has_columns(w: Weight) -> bool:
    """Whether the values of some columns, or rows, of a weight can be multiplied without the others."""
    return not isinstance(w, QuantizedArray) or isinstance(w.format, PerChannel)


def product(spec: str, x: Weight, values: Array) -> Array:
    """An einsum, float32; of int8 activations, which have a scale for each [b,T], a product of integers."""
    if not isinstance(x, QuantizedArray):
        return jnp.einsum(spec, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    y = jnp.einsum(spec, x.values, values, preferred_element_type=jnp.int32).astype(jnp.float32)
    return y * jnp.expand_dims(x.scale, tuple(range(2, y.ndim)))


NAMES = "replicated", "columns"


def prefill_residual(name: str | None, cfg, tokens: int, mesh: Mesh) -> Residual:
    """How a prefill chunk of so many tokens, in all rows of a data shard, holds the residual stream.

    name: one of NAMES; None for columns on TPUs whose chips form a ring, and replicated elsewhere. A model
    with experts gains nothing from columns, because every device needs whole tokens to route them: only by
    name. Chunks of less than LEAST_TOKENS tokens, columns that the devices do not divide in halves, and
    models in several stages stay replicated.
    """
    n = mesh_size(mesh, MODEL)
    if n == 1 or tokens < LEAST_TOKENS or cfg.D % (2 * n) or mesh.shape[STAGE] > 1:
        return REPLICATED
    order = ring(mesh)
    if (name or NAMES[order is not None and not cfg.experts]) == "replicated":
        return REPLICATED
    return ByColumns(order or tuple(range(n)))
