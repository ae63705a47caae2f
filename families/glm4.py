"""GLM-4: RoPE rotates neighbors in the first half of each head. Source: transformers, models/glm."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads = read.heads(fields, bias=fields.take("attention_bias", bool, False))
    rope = read.rope(fields, heads.H, interleaved=True, rotated=0.5)
    layer = LayerKind(heads, read.gated(fields), rope=rope)
    return read.config(fields, (layer,) * read.depth(fields), read.norm(fields))


GLM4 = Family("glm", config)
