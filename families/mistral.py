"""Mistral: Llama with a sliding window, in version 0.1. Source: transformers, models/mistral."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.tool_formats import MISTRAL_LIST
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads, mlp, norm = read.attention(fields), read.mlp(fields), read.norm(fields)
    layer = LayerKind(heads, mlp, norm, read.window(fields), read.rope(fields, heads.H))
    return read.config(fields, (layer,) * read.depth(fields), norm)


MISTRAL = Family("mistral", config, tools=MISTRAL_LIST)
