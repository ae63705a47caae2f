"""Ministral 3: Mistral with YaRN, and queries that grow with their position.

Source: transformers, models/ministral3.
"""

import dataclasses

from families import read
from families.fields import NUMBER, ConfigFields
from families.llama4 import QueryScale
from families.mistral import MISTRAL
from families.tool_formats import MISTRAL_ARGS
from feedback.errors import UserError
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    heads, mlp, norm = read.attention(fields), read.mlp(fields), read.norm(fields)
    theta, positions = fields.take("rope_theta", NUMBER, 1e4), fields.take("max_position_embeddings", int)
    parameters = dict(read.rope_parameters(fields, theta) or YARN)
    own = "llama_4_scaling_beta", "max_position_embeddings"
    more = ConfigFields({name: parameters.pop(name, None) for name in own})
    beta = more.take("llama_4_scaling_beta", NUMBER, 0, zero=True)
    # transformers writes a copy of this field here, which it does not read.
    if more.take("max_position_embeddings", int, positions) != positions:
        raise UserError(f"config.json: max_position_embeddings of rope_parameters is not {positions}")
    if beta:
        original = ConfigFields(parameters).take("original_max_position_embeddings", NUMBER)
        heads = dataclasses.replace(heads, query_scale=QueryScale(beta, original, offset=0))
    rope = read.rope_of(parameters, heads.H, positions, theta)
    layer = LayerKind(heads, mlp, norm, read.window(fields), rope)
    return read.config(fields, (layer,) * read.depth(fields), norm)


# The rope_parameters of files that have none.
YARN = dict(
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
MINISTRAL3 = dataclasses.replace(
    MISTRAL, model_type="ministral3", config=config, defaults=dict(head_dim=128, num_key_value_heads=8),
    tools=MISTRAL_ARGS,
)  # fmt: skip
