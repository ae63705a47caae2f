"""Qwen 3, dense and with experts: a norm of each query and key before RoPE.

Sources: transformers, models/qwen3 and models/qwen3_moe.
"""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.qwen2 import masks_of
from families.stored_layouts import ROUTER_NAME, SINGLE_OR_JOINED_EXPERTS
from families.tool_formats import TAGS
from model import MLP, Config, FeedForward, LayerKind, MoE, Router


def dense_config(fields: ConfigFields) -> Config:
    norm, mlp = read.norm(fields), read.mlp(fields)
    heads = read.attention(fields, qk_norm=norm)
    rope = read.rope(fields, heads.H)
    layers = tuple(LayerKind(heads, mlp, norm, mask, rope) for mask in masks_of(fields))
    return read.config(fields, layers, norm)


def sparse_config(fields: ConfigFields) -> Config:
    norm, mlp = read.norm(fields), read.mlp(fields)
    heads = read.attention(fields, qk_norm=norm)
    rope = read.rope(fields, heads.H)
    router = Router("softmax", normalized=fields.take("norm_topk_prob", bool, False), scales="output")
    experts = read.moe(fields, router, "moe_intermediate_size")
    networks = sparse_networks(fields, mlp, experts)
    pairs = zip(networks, masks_of(fields), strict=True)
    layers = tuple(LayerKind(heads, network, norm, mask, rope) for network, mask in pairs)
    return read.config(fields, layers, norm)


def sparse_networks(fields: ConfigFields, mlp: MLP, experts: MoE) -> list[FeedForward]:
    """The feed-forward network of each layer, of models in which some layers may have no experts."""
    every, dense = fields.take("decoder_sparse_step", int, 1), fields.take("mlp_only_layers", list, [])
    sparse = (i not in dense and (i + 1) % every == 0 for i in range(read.depth(fields)))
    return [experts if x else mlp for x in sparse]


QWEN3 = Family("qwen3", dense_config, tools=TAGS)
QWEN3_MOE = Family(
    "qwen3_moe",
    sparse_config,
    field_names={"num_experts": "num_local_experts"},
    tensor_names=(ROUTER_NAME,),
    layouts=SINGLE_OR_JOINED_EXPERTS,
    tools=TAGS,
)
