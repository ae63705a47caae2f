"""SmolLM3: Llama without RoPE in every fourth layer. Source: transformers, models/smollm3."""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.tool_formats import TAGS
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads, mlp, norm = read.attention(fields), read.mlp(fields), read.norm(fields)
    rope, rotary = read.rope(fields, heads.H, theta=2e6), read.rotary_layers(fields)
    masks = read.optional_windows(fields, [not has_rope for has_rope in rotary])
    layers = tuple(
        LayerKind(heads, mlp, norm, mask, rope if has_rope else None)
        for has_rope, mask in zip(rotary, masks, strict=True)
    )
    return read.config(fields, layers, norm, tied=True)


SMOLLM3 = Family("smollm3", config, no_effect="max_window_layers", tools=TAGS)
