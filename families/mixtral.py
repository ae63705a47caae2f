"""Mixtral: Mistral with experts. Source: transformers, models/mixtral."""

from families.config import (
    ConfigFields,
    read_depth,
    read_experts,
    read_heads,
    read_model,
    read_norm,
    read_rope,
    read_window,
)
from families.family import EXPERT_NAMES, Family
from model import Config, LayerKind, Router


def read(fields: ConfigFields) -> Config:
    heads = read_heads(fields)
    experts = read_experts(fields, Router("softmax", normalized=True, scales="output"))
    layer = LayerKind(heads, experts, read_window(fields), read_rope(fields, heads.H, theta=1e6))
    return read_model(fields, (layer,) * read_depth(fields), read_norm(fields))


MIXTRAL = Family(
    "mixtral",
    read,
    tensor_names=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.weight$", ".gate_proj.weight"),
        (r"\.w2\.weight$", ".down_proj.weight"),
        (r"\.w3\.weight$", ".up_proj.weight"),
        *EXPERT_NAMES,
    ),
)
