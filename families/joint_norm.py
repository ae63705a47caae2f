"""One norm of the queries of all heads together, and one of all keys, before RoPE: OLMo 3 and MiniMax M2."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from model import Attention, AttentionWeights, Norm
from sharding.arrays import declared, pytree
from sharding.mesh import HEADS, MODEL, SLOTS


@pytree
class JointNormWeights(AttentionWeights):
    joint_q_norm: Array = declared("kgH", "", "q_norm.weight", "(KGH)", initial=1.0)
    joint_k_norm: Array = declared("kh", "", "k_norm.weight", "(KH)", initial=1.0)


@dataclasses.dataclass(frozen=True)
class JointNormAttention(Attention):
    """Attention with a norm of the queries of all heads together, and one of the keys of all heads.

    Devices divide what these norms average, by heads and within a head, and add up their sums of squares.
    """

    joint_norm: Norm = Norm(1e-6)

    def declare(self, prefix: str, D: int, weights: type | None = JointNormWeights) -> Any:
        return super().declare(prefix, D, weights)

    def projections(self, x: Array, w: AttentionWeights) -> tuple[Array, Array, Array]:
        """x, and the result: see `Attention.projections`."""
        assert isinstance(w, JointNormWeights)
        q, k, v = super().projections(x, w)
        columns = self.K * self.H
        q = self.joint_norm(q, w.joint_q_norm, partial(mean_over, MODEL, self.G * columns))
        return q, self.joint_norm(k, w.joint_k_norm, partial(mean_over, HEADS + SLOTS, columns)), v


def mean_over(axes: tuple[str, ...], columns: int, x: Array) -> Array:
    """The mean of each token's `columns` numbers, which these axes divide, beside zeros as padding.

    x: [b,T,...] -> [b,T,1,...] with as many axes as x.
    """
    return lax.psum(jnp.sum(x, range(2, x.ndim), keepdims=True), axes) / columns
