"""Llama 1 to 3, and models with its layers: OpenLLaMA, SmolLM2, DeepSeek-R1-Distill-Llama.

Source: transformers, models/llama.
"""

from families.config import ConfigFields, read_depth, read_gated, read_heads, read_model, read_norm, read_rope
from families.family import Family
from model import Config, LayerKind


def read(fields: ConfigFields) -> Config:
    heads = read_heads(fields)
    layer = LayerKind(heads, read_gated(fields), rope=read_rope(fields, heads.H))
    return read_model(fields, (layer,) * read_depth(fields), read_norm(fields))


LLAMA3 = Family("llama", read)
