"""gpt-oss: attention with sinks, every second layer in a sliding window, and experts with a clamped SwiGLU.

Source: transformers, models/gpt_oss.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from families import read
from families.family import Channels, Family
from families.fields import NUMBER, ConfigFields
from families.stored_layouts import GATE_AND_UP, SINGLE_EXPERTS, either, joined
from families.tool_formats import HARMONY_TOOLS
from model import Attention, AttentionWeights, Config, LayerKind, Router
from sharding.arrays import Stored, declared_bias, pytree


@pytree
class SinkAttentionWeights(AttentionWeights):
    sinks: Array = declared_bias("kg", "sinks", "(KG)")


@dataclasses.dataclass(frozen=True)
class SinkAttention(Attention):
    """Attention with a sink: one more score in the softmax of each query head, which has no value.

    So each sum of values is of weights that sum to less than 1. Source: arXiv 2309.17453.
    """

    def declare(self, prefix: str, D: int, weights: type | None = SinkAttentionWeights) -> Any:
        return super().declare(prefix, D, weights)

    def head_outputs(self, o: Array, lse: Array, x: Array, w: AttentionWeights) -> Array:
        """o, lse, x, and the result: see `Attention.head_outputs`.

        Attention to the sink alone is the part (o=0, lse=sink): its value is 0. Merged with it, see
        ops.attention.merge, o has the weight exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
        """
        assert isinstance(w, SinkAttentionWeights)
        weight = jax.nn.sigmoid(lse - w.sinks.astype(lse.dtype))
        return (o * weight[..., None]).astype(o.dtype)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within -limit and limit."""

    limit: float
    alpha: float

    def __call__(self, gate: Array, up: Array) -> Array:
        """gate, up: [...,F] -> [...,F]."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


def config(fields: ConfigFields) -> Config:
    depth, norm = read.depth(fields), read.norm(fields, offset=0.0)
    bias = fields.take("attention_bias", bool, True)
    heads = read.attention(fields, SinkAttention, bias=bias, output_bias=bias)
    rope = read.rope(fields, heads.H, 150000.0, default=YARN)
    # The softmax over the chosen logits is the softmax over all of them, normalized.
    router = Router("softmax", normalized=True, scales="output", logit_bias=True)
    limit, alpha = fields.take("swiglu_limit", NUMBER, 7.0), fields.take("swiglu_alpha", NUMBER, 1.702)
    activation = ClampedSwiGLU(float(limit), float(alpha))
    experts = read.moe(fields, router, bias=True, activation=activation)
    masks = read.masks(fields, 128)
    types = (["sliding_attention", "full_attention"] * depth)[:depth]
    types = read.layer_types(fields, "layer_types", types, *masks)
    layers = tuple(LayerKind(heads, experts, norm, masks[x], rope) for x in types)
    return read.config(fields, layers, norm)


YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip
HARMONY = Channels("<|start|>", "<|channel|>", "<|message|>", ("<|end|>", "<|return|>", "<|call|>"), "final")
GPT_OSS = Family(
    "gpt_oss",
    config,
    field_names={"experts_per_token": "num_experts_per_tok"},
    no_effect="initial_context_length",
    layouts=either(
        # checkpoints/dequantized.py reads published MXFP4 blocks as tensors named ..._mxfp4, whose last
        # dimension is the contracted one. In these and in float tensors gate and up alternate.
        joined("mlp.experts.gate_up_proj_mxfp4", "E(M[1+1])D", *GATE_AND_UP),
        joined("mlp.experts.gate_up_proj", "ED(M[1+1])", *GATE_AND_UP),
        joined("mlp.experts.gate_up_proj_bias", "E(M[1+1])", *(x + "_bias" for x in GATE_AND_UP)),
        {
            "feed_forward.down": (Stored("mlp.experts.down_proj_mxfp4", "EDM"),),
            "feed_forward.down_bias": (Stored("mlp.experts.down_proj_bias", "ED"),),
        },
        # From a GGUF file, each expert has tensors of its own.
        SINGLE_EXPERTS,
        {
            "feed_forward.gate_bias": (Stored("mlp.experts.{e}.gate_proj.bias", "M"),),
            "feed_forward.up_bias": (Stored("mlp.experts.{e}.up_proj.bias", "M"),),
            "feed_forward.down_bias": (Stored("mlp.experts.{e}.down_proj.bias", "D"),),
        },
    ),
    channels=HARMONY,
    tools=HARMONY_TOOLS,
)
