"""OLMo 3: norms after each block and none before, two RoPEs, a full layer after every three with windows.

Source: transformers, models/olmo3.
"""

from families import read
from families.family import Family
from families.fields import NUMBER, ConfigFields
from families.gemma3 import NAMES as NORM_NAMES
from families.joint_norm import JointNormAttention
from model import Config, LayerKind, Residual


def config(fields: ConfigFields) -> Config:
    depth, mlp, norm = read.depth(fields), read.mlp(fields), read.norm(fields, offset=0.0)
    bias = fields.take("attention_bias", bool, False)
    heads = read.attention(fields, JointNormAttention, joint_norm=norm, bias=bias, output_bias=bias)
    masks = read.masks(fields, 4096)
    types = (["sliding_attention"] * 3 + ["full_attention"]) * depth
    types = read.layer_types(fields, "layer_types", types[:depth], *masks)
    thetas = dict.fromkeys(masks, 5e5)
    thetas["full_attention"] = fields.take("rope_theta", NUMBER, 5e5)  # not of the others, as in transformers
    ropes = read.ropes(fields, heads.H, thetas)
    kinds = {
        x: LayerKind(heads, mlp, None, mask, ropes[x], residual=Residual(norm)) for x, mask in masks.items()
    }
    return read.config(fields, tuple(kinds[x] for x in types), norm)


OLMO3 = Family("olmo3", config, tensor_names=NORM_NAMES)
