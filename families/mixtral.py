"""Mixtral: Mistral with experts. Source: transformers, models/mixtral."""

from families import read
from families.family import EXPERT_NAMES, Family
from families.fields import ConfigFields
from model import Config, LayerKind, Router


def config(fields: ConfigFields) -> Config:
    heads = read.heads(fields)
    experts = read.experts(fields, Router("softmax", normalized=True, scales="output"))
    layer = LayerKind(heads, experts, read.window(fields), read.rope(fields, heads.H, theta=1e6))
    return read.config(fields, (layer,) * read.depth(fields), read.norm(fields))


MIXTRAL = Family(
    "mixtral",
    config,
    tensor_names=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.weight$", ".gate_proj.weight"),
        (r"\.w2\.weight$", ".down_proj.weight"),
        (r"\.w3\.weight$", ".up_proj.weight"),
        *EXPERT_NAMES,
    ),
)
