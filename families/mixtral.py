"""Mixtral: Mistral with experts. Source: transformers, models/mixtral."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.stored_layouts import ROUTER_NAME, SINGLE_OR_JOINED_EXPERTS
from model import Config, LayerKind, Router


def config(fields: ConfigFields) -> Config:
    heads, norm = read.attention(fields), read.norm(fields)
    experts = read.moe(fields, Router("softmax", normalized=True, scales="output"))
    layer = LayerKind(heads, experts, norm, read.window(fields), read.rope(fields, heads.H, theta=1e6))
    return read.config(fields, (layer,) * read.depth(fields), norm)


MIXTRAL = Family(
    "mixtral",
    config,
    tensor_names=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.weight$", ".gate_proj.weight"),
        (r"\.w2\.weight$", ".down_proj.weight"),
        (r"\.w3\.weight$", ".up_proj.weight"),
        ROUTER_NAME,
    ),
    layouts=SINGLE_OR_JOINED_EXPERTS,
)
