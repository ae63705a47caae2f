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
    depth, full = read.depth(fields), fields.take("max_window_layers", int, 28, zero=True)
    if fields.take("use_sliding_window", bool, False):
        masks = read.masks(fields)
        types = ["sliding_attention" if i >= full else "full_attention" for i in range(depth)]
    else:
        masks, types = dict(full_attention=Full()), ["full_attention"] * depth
        fields.get("sliding_window")  # has no effect
    return [masks[x] for x in read.layer_types(fields, "layer_types", types, *masks)]


QWEN2 = Family("qwen2", config, tools=TAGS)
