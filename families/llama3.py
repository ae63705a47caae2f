"""Llama 1 to 3, and models with its layers: OpenLLaMA, SmolLM2, DeepSeek-R1-Distill-Llama.

Source: transformers, models/llama.
"""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.tool_formats import LLAMA_JSON
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads, mlp, norm = read.attention(fields), read.mlp(fields), read.norm(fields)
    layer = LayerKind(heads, mlp, norm, rope=read.rope(fields, heads.H))
    return read.config(fields, (layer,) * read.depth(fields), norm)


LLAMA3 = Family("llama", config, tools=LLAMA_JSON)
