"""Mistral: Llama with a sliding window, in version 0.1. Source: transformers, models/mistral."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads = read.heads(fields)
    layer = LayerKind(heads, read.gated(fields), read.window(fields), read.rope(fields, heads.H))
    return read.config(fields, (layer,) * read.depth(fields), read.norm(fields))


MISTRAL = Family("mistral", config)
