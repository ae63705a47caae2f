"""Qwen 3, dense and with experts: a norm of each query and key before RoPE.

Sources: transformers, models/qwen3 and models/qwen3_moe.
"""

from families.config import (
    ConfigFields,
    read_experts,
    read_gated,
    read_heads,
    read_model,
    read_norm,
    read_rope,
)
from families.family import EXPERT_NAMES, Family
from families.qwen2 import read_masks
from model import Config, LayerKind, Router


def read_dense(fields: ConfigFields) -> Config:
    norm, mlp = read_norm(fields), read_gated(fields)
    heads = read_heads(fields, qk_norm=norm)
    rope = read_rope(fields, heads.H)
    layers = tuple(LayerKind(heads, mlp, mask, rope) for mask in read_masks(fields))
    return read_model(fields, layers, norm)


def read_sparse(fields: ConfigFields) -> Config:
    norm, mlp = read_norm(fields), read_gated(fields)
    heads = read_heads(fields, qk_norm=norm)
    rope = read_rope(fields, heads.H)
    router = Router("softmax", normalized=fields.take("norm_topk_prob", bool, False), scales="output")
    experts = read_experts(fields, router, "moe_intermediate_size")
    every, dense = fields.take("decoder_sparse_step", int, 1), fields.take("mlp_only_layers", list, [])
    layers = tuple(
        LayerKind(heads, experts if i not in dense and (i + 1) % every == 0 else mlp, mask, rope)
        for i, mask in enumerate(read_masks(fields))
    )
    return read_model(fields, layers, norm)


QWEN3 = Family("qwen3", read_dense)
QWEN3_MOE = Family(
    "qwen3_moe",
    read_sparse,
    field_names={"num_experts": "num_local_experts"},
    tensor_names=EXPERT_NAMES,
)
