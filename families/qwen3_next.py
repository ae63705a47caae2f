"""Qwen 3 Next: three layers with a state, a gated delta net, for each layer of gated attention; many experts.

Source: transformers, models/qwen3_next.
"""

import dataclasses
from functools import partial

import jax
from jax import Array

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.gated_attention import GatedAttention
from families.gated_delta_net import GatedDeltaNet
from families.qwen3 import sparse_networks
from families.stored_layouts import ROUTER_NAME, SINGLE_OR_JOINED_EXPERTS, either, joined
from families.tool_formats import TAGS
from feedback.errors import UserError
from model import MLP, Config, FeedForward, LayerKind, MLPWeights, MoE, Recurrent, Router
from sharding.arrays import declared, infos_of, pytree
from sharding.collective_matmul import einsum


@pytree
class GatedMLPWeights(MLPWeights):
    scale: Array = declared("ID", "", "gate.weight", "ID")  # I = 1


@dataclasses.dataclass(frozen=True)
class GatedMLP(MLP):
    """An MLP whose output is multiplied by a number of the token, the sigmoid of a product with its input."""

    def partial_sum(self, x: Array, w: MLPWeights) -> Array:
        """x: [b,T,D] -> [b,T,D], this device's part of the sum over f."""
        assert isinstance(w, GatedMLPWeights)
        return super().partial_sum(x, w) * jax.nn.sigmoid(einsum("bTD,ID->bTI", x, w.scale))

    def declare(self, prefix: str, D: int) -> GatedMLPWeights:
        return infos_of(GatedMLPWeights, prefix, dict(D=D, F=self.F, I=1))


def config(fields: ConfigFields) -> Config:
    router = Router("softmax", normalized=fields.take("norm_topk_prob", bool, True), scales="output")
    return config_of(fields, sparse_networks(fields, read.mlp(fields), experts_of(fields, router)))


def config_of(fields: ConfigFields, networks: list[FeedForward]) -> Config:
    """The Config of layers with these feed-forward networks. By default every fourth layer has attention."""
    norm, every = read.norm(fields, offset=1.0), fields.take("full_attention_interval", int, 4)
    if not fields.take("attn_output_gate", bool, True):
        raise UserError("config.json: attn_output_gate = False is not supported")
    bias = fields.take("attention_bias", bool, False)
    heads = read.attention(fields, GatedAttention, qk_norm=norm, bias=bias)
    rope = read.rope(fields, heads.H, rotated=0.25)
    kinds = dict(
        linear_attention=partial(LayerKind, delta_net(fields), mask=Recurrent()),
        full_attention=partial(LayerKind, heads, rope=rope),
    )
    types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(len(networks))]
    types = read.layer_types(fields, "layer_types", types, *kinds)
    layers = [kinds[x](feed_forward=network, norm=norm) for x, network in zip(types, networks, strict=True)]
    return read.config(fields, tuple(layers), norm)


def delta_net(fields: ConfigFields) -> GatedDeltaNet:
    """Raises UserError if the heads of values are no multiple of those of keys."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    J, N, X, Y, W = (fields.take(f"linear_{name}", int) for name in names)
    if N % J:
        raise UserError(
            f"config.json: linear_num_value_heads = {N} is no multiple of linear_num_key_heads = {J}"
        )
    return GatedDeltaNet(J, N, X, Y, W, read.norm(fields))


def experts_of(fields: ConfigFields, router: Router) -> MoE:
    experts = read.moe(fields, router, "moe_intermediate_size")
    return dataclasses.replace(experts, shared=GatedMLP(fields.take("shared_expert_intermediate_size", int)))


HEADS_OF_KEYS = ("QJX", "NJG")  # the rows of each key head, and of the G value heads that read with it
GATED_ATTENTION = joined("self_attn.q_proj.weight", "(KG[H+H])D", "attention.q", "attention.gate")
SHARED_GATE_NAME = (r"\.shared_expert_gate\.", ".shared_expert.gate.")
LINEAR_ATTENTION_NAME = (r"\.linear_attn\.", ".self_attn.")
QWEN3_NEXT = Family(
    "qwen3_next",
    config,
    defaults=dict(max_position_embeddings=32768),
    field_names={"num_experts": "num_local_experts"},
    no_effect="max_window_layers num_nextn_predict_layers",
    tensor_names=(LINEAR_ATTENTION_NAME, SHARED_GATE_NAME, ROUTER_NAME),
    layouts=either(
        GATED_ATTENTION,
        joined(
            "self_attn.in_proj_qkvz.weight", "(J[X+X+GY+GY])D",
            "attention.q", "attention.k", "attention.v", "attention.z", pairs=HEADS_OF_KEYS,
        ),
        joined("self_attn.in_proj_ba.weight", "(J[G+G])D", "attention.b", "attention.a", pairs=HEADS_OF_KEYS),
        SINGLE_OR_JOINED_EXPERTS,
    ),
    unused_tensors=r"^(model\.)?mtp\.",
    tools=TAGS,
)  # fmt: skip
