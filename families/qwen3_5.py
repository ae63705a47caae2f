"""Qwen 3.5 and 3.6, dense and with experts: Qwen 3 Next with the projections of its states as matrices apart.

Sources: transformers, models/qwen3_5 and models/qwen3_5_moe.
"""

import dataclasses

from families import read
from families.family import LANGUAGE_MODEL_NAMES, Family
from families.fields import ConfigFields
from families.qwen3_next import (
    GATED_ATTENTION,
    LINEAR_ATTENTION_NAME,
    QWEN3_NEXT,
    SHARED_GATE_NAME,
    config_of,
    experts_of,
)
from families.stored_layouts import ROUTER_NAME, SINGLE_OR_JOINED_EXPERTS, either
from families.tool_formats import FUNCTION_TAGS
from model import Config, Router


def dense_config(fields: ConfigFields) -> Config:
    return config_of(fields, [read.mlp(fields)] * read.depth(fields))


def sparse_config(fields: ConfigFields) -> Config:
    experts = experts_of(fields, Router("softmax", normalized=True, scales="output"))
    return config_of(fields, [experts] * read.depth(fields))


NAMES = (*LANGUAGE_MODEL_NAMES, LINEAR_ATTENTION_NAME)
# What the delta net's output is multiplied by, silu of z; experts' weights always sum to 1.
SUPPORTED = dict(hidden_act=("silu",), output_gate_type=("swish",), norm_topk_prob=(True,))
NO_EFFECT = """language_model_only mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings
    num_nextn_predict_layers video_token_id vision_end_token_id vision_start_token_id"""
QWEN3_5 = Family(
    "qwen3_5_text",
    dense_config,
    multimodal_types=("qwen3_5",),
    defaults=QWEN3_NEXT.defaults,
    supported=SUPPORTED,
    no_effect=NO_EFFECT,
    tensor_names=NAMES,
    layouts=GATED_ATTENTION,
    unused_tensors=r"^(model\.)?(mtp|visual)\.",
    tools=FUNCTION_TAGS,
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    config=sparse_config,
    multimodal_types=("qwen3_5_moe",),
    no_effect=NO_EFFECT + " intermediate_size",
    field_names={"num_experts": "num_local_experts"},
    tensor_names=(*NAMES, SHARED_GATE_NAME, ROUTER_NAME),
    layouts=either(GATED_ATTENTION, SINGLE_OR_JOINED_EXPERTS),
)
