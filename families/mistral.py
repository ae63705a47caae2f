"""Mistral: Llama with a sliding window, in version 0.1. Small 3.1 is the text part of a multimodal model.

Sources: transformers, models/mistral and models/mistral3.
"""

from families import read
from families.family import LANGUAGE_MODEL_NAMES, VISION_TENSORS, Family
from families.fields import ConfigFields
from families.tool_formats import MISTRAL_LIST
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads, mlp, norm = read.attention(fields), read.mlp(fields), read.norm(fields)
    layer = LayerKind(heads, mlp, norm, read.window(fields), read.rope(fields, heads.H))
    return read.config(fields, (layer,) * read.depth(fields), norm)


MISTRAL = Family(
    "mistral",
    config,
    multimodal_types=("mistral3",),
    no_effect="multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer",
    tensor_names=LANGUAGE_MODEL_NAMES,
    unused_tensors=VISION_TENSORS,
    tools=MISTRAL_LIST,
)
