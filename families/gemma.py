"""Gemma 1: norms times 1 + weight, a scaled embedding, GELU. Source: transformers, models/gemma."""

from families.config import ConfigFields, read_depth, read_gated, read_heads, read_model, read_norm, read_rope
from families.family import Family
from model import Config, LayerKind


def read(fields: ConfigFields) -> Config:
    heads, mlp = read_heads(fields), read_gated(fields, activation="gelu_tanh")
    layer = LayerKind(heads, mlp, rope=read_rope(fields, heads.H))
    scale = fields.take("hidden_size", int) ** 0.5
    layers, norm = (layer,) * read_depth(fields), read_norm(fields, offset=1.0)
    return read_model(fields, layers, norm, tied=True, embedding_scale=scale)


GEMMA = Family(
    "gemma",
    read,
    # The first config.json files say "gelu" and mean its tanh form.
    supported={"hidden_act": ("gelu", "gelu_pytorch_tanh"), "hidden_activation": ("gelu_pytorch_tanh",)},
)
