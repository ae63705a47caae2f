"""GLM-4: RoPE rotates neighbors in the first half of each head. Source: transformers, models/glm."""

from families.config import ConfigFields, read_depth, read_gated, read_heads, read_model, read_norm, read_rope
from families.family import Family
from model import Config, LayerKind


def read(fields: ConfigFields) -> Config:
    heads = read_heads(fields, bias=fields.take("attention_bias", bool, False))
    rope = read_rope(fields, heads.H, interleaved=True, rotated=0.5)
    layer = LayerKind(heads, read_gated(fields), rope=rope)
    return read_model(fields, (layer,) * read_depth(fields), read_norm(fields))


GLM4 = Family("glm", read)
