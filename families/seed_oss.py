"""Seed-OSS: Llama with biases on queries, keys and values. Source: transformers, models/seed_oss."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    bias = fields.take("attention_bias", bool, True)
    heads = read.attention(fields, bias=bias, output_bias=fields.take("attention_out_bias", bool, False))
    layer = LayerKind(heads, read.mlp(fields), read.norm(fields), rope=read.rope(fields, heads.H))
    return read.config(fields, (layer,) * read.depth(fields), read.norm(fields))


SEED_OSS = Family("seed_oss", config, defaults=dict(head_dim=128), no_effect="residual_dropout")
