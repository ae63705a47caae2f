"""Qwen 2 and 2.5: Llama with biases on queries, keys and values. Source: transformers, models/qwen2."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.tool_formats import TAGS
from model import Config, Full, LayerKind, Window


def config(fields: ConfigFields) -> Config:
    heads, mlp, norm = read.attention(fields, bias=True), read.mlp(fields), read.norm(fields)
    rope = read.rope(fields, heads.H)
    layers = tuple(LayerKind(heads, mlp, norm, mask, rope) for mask in masks_of(fields))
    return read.config(fields, layers, norm)


def masks_of(fields: ConfigFields) -> list[Full | Window]:
    """The masks of Qwen's layers. They are all full, unless use_sliding_window is set."""
    full = fields.take("max_window_layers", int, 28, zero=True)
    return read.optional_windows(fields, [i >= full for i in range(read.depth(fields))])


QWEN2 = Family("qwen2", config, tools=TAGS)
