"""Qwen 2 and 2.5: Llama with biases on queries, keys and values. Source: transformers, models/qwen2."""

from families.config import (
    ConfigFields,
    read_depth,
    read_gated,
    read_heads,
    read_layer_types,
    read_model,
    read_norm,
    read_rope,
)
from families.family import Family
from model import Config, Full, LayerKind, Window


def read(fields: ConfigFields) -> Config:
    heads, mlp = read_heads(fields, bias=True), read_gated(fields)
    rope = read_rope(fields, heads.H)
    layers = tuple(LayerKind(heads, mlp, mask, rope) for mask in read_masks(fields))
    return read_model(fields, layers, read_norm(fields))


def read_masks(fields: ConfigFields) -> list[Full | Window]:
    """The masks of Qwen's layers. They are all full, unless use_sliding_window is set."""
    depth = read_depth(fields)
    on, size = fields.take("use_sliding_window", bool, False), fields.take("sliding_window", int, None)
    full = fields.take("max_window_layers", int, depth)
    types = ["sliding_attention" if on and size and i >= full else "full_attention" for i in range(depth)]
    known = ("full_attention", "sliding_attention") if size else ("full_attention",)
    types = read_layer_types(fields, "layer_types", types, *known)
    return [Window(size) if kind == "sliding_attention" else Full() for kind in types]


QWEN2 = Family("qwen2", read)
