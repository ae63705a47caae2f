"""All families, and the Config of a model of any of them."""

from typing import Any

from families.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2
from families.family import Family
from families.fields import ConfigFields
from families.gemma import GEMMA
from families.gemma3 import GEMMA3
from families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from families.glm4 import GLM4
from families.glm4_moe import GLM4_MOE
from families.gpt2 import GPT2
from families.gpt_oss import GPT_OSS
from families.llama3 import LLAMA3
from families.llama4 import LLAMA4
from families.minimax_m2 import MINIMAX_M2
from families.ministral3 import MINISTRAL3
from families.mistral import MISTRAL
from families.mixtral import MIXTRAL
from families.muse_glimmer import MUSE_GLIMMER
from families.muse_spark import MUSE_SPARK
from families.olmo3 import OLMO3
from families.qwen2 import QWEN2
from families.qwen3 import QWEN3, QWEN3_MOE
from families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from families.qwen3_next import QWEN3_NEXT
from families.seed_oss import SEED_OSS
from families.smollm3 import SMOLLM3
from feedback.errors import UserError
from model import Config

FAMILIES = (
    LLAMA3, LLAMA4, MUSE_GLIMMER, MUSE_SPARK, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA, GEMMA3,
    GPT2, GPT_OSS, GLM4, GLM4_MOE_LITE, DEEPSEEK_V3, KIMI_K2, SMOLLM3, SEED_OSS, MINISTRAL3, GLM4_MOE,
    OLMO3, MINIMAX_M2, GEMMA4, GEMMA4_UNIFIED, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE,
)  # fmt: skip


def find_family(config: dict) -> tuple[Family, dict]:
    """The family of a config.json, and the fields of its language model. Raises UserError."""
    multimodal, outer = {name for family in FAMILIES for name in family.multimodal_types}, {}
    if str(config.get("model_type")) in multimodal:
        if not isinstance(config.get("text_config"), dict):
            raise UserError("config.json: field 'text_config' is missing")
        outer, config = config, config["text_config"]
    name = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == name:
            return family, _with_outer(outer, config, family)
    known = ", ".join(sorted([*multimodal, *(family.model_type for family in FAMILIES)]))
    raise UserError(f"config.json: model_type {name!r} is not supported ({known})")


def _with_outer(outer: dict, config: dict, family: Family) -> dict:
    """The fields of a language model and those of the multimodal model around it.

    transformers reads nothing of the language model outside of text_config, but for tie_word_embeddings. So
    this raises UserError for any other field there that would have an effect in text_config and is not the
    same in it.
    """
    outer = {name: value for name, value in outer.items() if name != "text_config"}
    for name, value in ConfigFields(outer, family.no_effect).values.items():
        inside = config.get(name, value if name == "tie_word_embeddings" else None)
        if value != inside and (value or name in config):
            raise UserError(
                f"config.json: {name} = {value!r} is outside of text_config, where it is {inside!r}; "
                "give it in text_config alone"
            )
    return outer | config


def read_config(config: dict) -> Config:
    """Config from a Hugging Face config.json. Raises UserError naming the field that is wrong.

    The field quantization_config is for checkpoints/dequantized.py.
    """
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
            raise UserError(f"config.json: architecture {name!r} has no language model's head")
    family, config = find_family(config)
    named: dict[str, Any] = {}
    for name, value in config.items():
        usual = family.field_names[name] if name in family.field_names else name
        other = named.setdefault(usual, value)
        if None not in (value, other) and value != other:
            raise UserError(f"config.json: {name} = {value!r} is there under another name with another value")
        named[usual] = other if value is None else value
    fields = ConfigFields({**family.defaults, **named}, family.no_effect)
    cfg = family.config(fields)
    fields.finish(family.supported)
    return cfg
