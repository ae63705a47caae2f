"""Mistral: Llama with a sliding window, in version 0.1. Source: transformers, models/mistral."""

from families.config import (
    ConfigFields,
    read_depth,
    read_gated,
    read_heads,
    read_model,
    read_norm,
    read_rope,
    read_window,
)
from families.family import Family
from model import Config, LayerKind


def read(fields: ConfigFields) -> Config:
    heads = read_heads(fields)
    layer = LayerKind(heads, read_gated(fields), read_window(fields), read_rope(fields, heads.H))
    return read_model(fields, (layer,) * read_depth(fields), read_norm(fields))


MISTRAL = Family("mistral", read)
