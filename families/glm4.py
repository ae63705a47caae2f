"""GLM-4: RoPE rotates neighbors in the first half of each head. Source: transformers, models/glm."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.stored_layouts import GATE_AND_UP, joined
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads = read.attention(fields, bias=fields.take("attention_bias", bool, False))
    rope = read.rope(fields, heads.H, interleaved=True, rotated=0.5)
    mlp, norm = read.mlp(fields), read.norm(fields)
    return read.config(fields, (LayerKind(heads, mlp, norm, rope=rope),) * read.depth(fields), norm)


GLM4 = Family(
    "glm",
    config,
    layouts=joined("mlp.gate_up_proj.weight", "[F+F]D", *GATE_AND_UP),
)
