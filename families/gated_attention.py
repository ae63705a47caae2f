"""Attention whose output is gated by the layer's input: Muse Glimmer and Spark, Qwen3-Next and Qwen 3.5."""

import dataclasses
from typing import Any

import jax
from jax import Array

from model import Attention, AttentionWeights
from sharding.arrays import declared, pytree
from sharding.collective_matmul import einsum


@pytree
class GatedAttentionWeights(AttentionWeights):
    gate: Array = declared("kgHD", "D", "gate_proj.weight", "(KGH)D")


@dataclasses.dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention with a gate for each head's output: the sigmoid of a projection of the layer's input.

    Source: arXiv 2505.06708.
    """

    def declare(self, prefix: str, D: int, weights: type | None = GatedAttentionWeights) -> Any:
        return super().declare(prefix, D, weights)

    def head_outputs(self, o: Array, lse: Array, x: Array, w: AttentionWeights) -> Array:
        """o, lse, x, and the result: see `Attention.head_outputs`."""
        assert isinstance(w, GatedAttentionWeights)
        return o * jax.nn.sigmoid(einsum("bTD,kgHD->bTkgH", x, w.gate))
