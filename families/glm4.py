"""GLM-4: RoPE rotates neighbors in the first half of each head. Source: transformers, models/glm."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from model import Config, LayerKind
from sharding.arrays import Stored


def config(fields: ConfigFields) -> Config:
    heads = read.attention(fields, bias=fields.take("attention_bias", bool, False))
    rope = read.rope(fields, heads.H, interleaved=True, rotated=0.5)
    mlp, norm = read.mlp(fields), read.norm(fields)
    return read.config(fields, (LayerKind(heads, mlp, norm, rope=rope),) * read.depth(fields), norm)


GLM4 = Family(
    "glm",
    config,
    layouts={
        "feed_forward.gate": (Stored("mlp.gate_up_proj.weight", "[F+F]D", 0),),
        "feed_forward.up": (Stored("mlp.gate_up_proj.weight", "[F+F]D", 1),),
    },
)
