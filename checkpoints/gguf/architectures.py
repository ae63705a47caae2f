"""What the architectures of GGUF files are called in a config.json, with their fields and tensors.

Source: ggml-org/llama.cpp, convert_hf_to_gguf.py and gguf-py/gguf/tensor_mapping.py, which write these files.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from feedback.errors import UserError

FIELDS = {  # of config.json, by their names after "ARCHITECTURE."
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
NAMES = {  # of tensors, between "blk.N." and ".weight"
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}
# Fields after "ARCHITECTURE." with the values that ask for what is computed anyway. Other values are refused.
NEUTRAL = {
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}
# Fields after "ARCHITECTURE." that cannot change an answer.
NO_EFFECT = {
    "how the model was trained": "rope.scaling.finetuned",
    "sizes and orders that the tensors have": "tensor_data_layout vocab_size",
    "models that do not write texts": "pooling_type",
}
SOFTMAX, SIGMOID, SOFTMAX_WEIGHT = 1, 2, 3  # of expert_gating_func
Fields = dict[str, Any]


def rope_scaling(fields: Fields) -> Fields:
    """Take the fields of scaled RoPE -> rope_scaling of a config.json; {} if frequencies are not scaled.

    As in llama.cpp, a factor without a type is that of linear scaling.
    """
    kind = fields.pop("rope.scaling.type", "linear")
    names = dict(
        factor="factor", original_context_length="original_max_position_embeddings",
        yarn_beta_fast="beta_fast", yarn_beta_slow="beta_slow",
    )  # fmt: skip
    fields.setdefault("rope.scaling.factor", fields.pop("rope.scale_linear", None))  # its older name
    found = {theirs: fields.pop(f"rope.scaling.{name}", None) for name, theirs in names.items()}
    found = {name: value for name, value in found.items() if value}
    if kind == "linear":
        return {"rope_type": kind, "factor": found["factor"]} if found.get("factor", 1) != 1 else {}
    return {} if kind == "none" else {"rope_type": kind} | found


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One of GGUF's architectures.

    model_type:  in config.json. model_class: in its list of architectures.
    config:      takes fields of the file that need more than another name out of a dict, by their names
                 after "ARCHITECTURE."; returns fields of config.json. Raises UserError.
    fields:      fields with other names than in FIELDS.
    names:       tensors with other names than in NAMES; with ".weight" or ".bias" if that changes, too.
    interleaved: the rows of q and k are in the order of interleaved RoPE, which Hugging Face's are not.
    norm_offset: what the file adds to the weights of norms, but for those in layers with a state.
    grouped:     in layers with a state, heads of values that read with one key follow one another, as they do
                 in Hugging Face's; if not, the first such head of each key precedes the second of each.
    optional:    fields of config.json, each with the tensor that is in the file if the field is true.
    by_layer:    fields that may give each layer its own number, which `config` reads.
    proportional_rope: whether rope_freqs has the factors of proportional RoPE in full layers, not Llama 3's.
    neutral:     fields with the values that ask for what is computed anyway, besides those in NEUTRAL.
    """

    model_type: str
    model_class: str
    config: Callable[[Fields], Fields] = lambda fields: {"rope_scaling": rope_scaling(fields)}
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0
    grouped: bool = True
    optional: dict[str, str] = dataclasses.field(default_factory=dict)
    by_layer: tuple[str, ...] = ()
    proportional_rope: bool = False
    neutral: dict[str, tuple] = dataclasses.field(default_factory=dict)

    def config_fields(self, fields: Fields, prefix: str) -> Fields:
        """Fields by their names in config.json. Raises UserError for a field that is not supported."""
        names, neutral = FIELDS | self.fields, NEUTRAL | self.neutral
        no_effect, found = " ".join(NO_EFFECT.values()).split(), {}
        for field, value in fields.items():
            if field in names:
                found[names[field]] = value
                continue
            harmless = value in neutral[field] if field in neutral else not value or field in no_effect
            if not harmless:
                raise UserError(f"{prefix}{field} = {value!r} is not supported")
        return found


def _take_integer(fields: Fields, name: str, default: int | None = None) -> int:
    """Take a field out of the others. Raises UserError."""
    value = fields.pop(name, default)
    if value is None:
        raise UserError(f"field {name} of the architecture is missing")
    if not isinstance(value, int):
        raise UserError(f"field {name} of the architecture = {value!r} makes no sense")
    return value


def _mistral3(fields: Fields) -> Fields:
    """Without scaled RoPE it is one of the models before Ministral 3."""
    scaling = rope_scaling(fields) or {"rope_type": "default"}
    # mscale, which no file has, is the same in all published models.
    if log := fields.pop("rope.scaling.yarn_log_multiplier", None):
        scaling |= dict(mscale=log, mscale_all_dim=log)
    if beta := fields.pop("attention.temperature_scale", None):
        scaling |= dict(llama_4_scaling_beta=beta)
    return {"rope_scaling": scaling}


def _gpt_oss(fields: Fields) -> Fields:
    """YaRN's fields that no file states are those of the published models."""
    scaling, limits = rope_scaling(fields), {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    yarn = scaling.get("rope_type") == "yarn"
    return {"rope_scaling": limits | scaling if yarn else scaling or {"rope_type": "default"}}


def _deepseek2(fields: Fields) -> Fields:
    """config.json has the widths of heads before the key and value matrices are multiplied into queries and
    output. Files name these widths key_length_mla and value_length_mla; older files, key_length and
    value_length.
    """
    widths = {}
    for name in ("key", "value"):
        width = _take_integer(fields, f"attention.{name}_length")
        widths[name] = _take_integer(fields, f"attention.{name}_length_mla", width)
    rotated = _take_integer(fields, "rope.dimension_count")
    fields.pop("attention.head_count_kv", None)  # newer files count the latent as one head
    # Older files do not say that DeepSeek V3 and R1, with 256 experts, divide them into groups.
    groups = (8, 4) if fields.get("expert_count") == 256 else (1, 1)
    routed = _routed_experts(fields, groups, ": is it DeepSeek V2?")
    scaling, log = rope_scaling(fields), fields.pop("rope.scaling.yarn_log_multiplier", None)
    if scaling and "beta_fast" not in scaling and fields.get("expert_count") == 384:
        raise UserError(
            "field rope.scaling.yarn_beta_fast of the architecture is missing: this older file is one of "
            "Kimi K2, which does not have the usual value"
        )
    if scaling and log:
        # The file has 0.1 * mscale_all_dim. mscale, which no file has, is the same in all published models.
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * log, 6))
    return routed | {
        "qk_nope_head_dim": widths["key"] - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": widths["value"],
        "rope_scaling": scaling,
    }


def _routed_experts(fields: Fields, groups: tuple[int, int] = (1, 1), question: str = "") -> Fields:
    """Of families with DeepSeek V3's router: how it chooses experts, and the number of layers.

    groups: how many groups of experts there are, and how many a token keeps, where the file does not say.
    question: the end of the message about another router.
    """
    gating = fields.pop("expert_gating_func", None)
    if gating != SIGMOID:
        raise UserError(f"expert_gating_func = {gating} is not supported, only {SIGMOID}{question}")
    return _extra_layers(fields) | {
        "n_group": fields.pop("expert_group_count", groups[0]),
        "topk_group": fields.pop("expert_group_used_count", groups[1]),
        "norm_topk_prob": bool(fields.pop("expert_weights_norm", False)),
        "routed_scaling_factor": fields.pop("expert_weights_scale", 1.0),
    }


def _extra_layers(fields: Fields) -> Fields:
    """The number of layers that predict further tokens, which block_count counts, too."""
    extra = _take_integer(fields, "nextn_predict_layers", 0)
    fields["block_count"] = _take_integer(fields, "block_count") - extra
    return {"num_nextn_predict_layers": extra}


def _rotated_part(fields: Fields) -> Fields:
    """The part of each head that RoPE rotates, and how its frequencies are scaled."""
    width = _take_integer(dict(fields), "attention.key_length")  # FIELDS has another name for it
    rotated = _take_integer(fields, "rope.dimension_count", width)
    return {"partial_rotary_factor": rotated / max(width, 1), "rope_scaling": rope_scaling(fields)}


def _gemma3(fields: Fields) -> Fields:
    """llama.cpp's own constants where the file says nothing: every sixth layer sees all, theta is 1e4."""
    names = "block_count", "embedding_length", "attention.head_count", "attention.key_length"
    copy = dict(fields)  # FIELDS has other names for these, so they must not be taken out
    depth, width, heads, head_width = (_take_integer(copy, name) for name in names)
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_scaling": rope_scaling(fields),
        # No field says it; only the 27B model, which has 62 layers, does not take the width of a head.
        "query_pre_attn_scalar": width // max(heads, 1) if depth == 62 else head_width,
    }
    if not fields.get("attention.sliding_window"):
        config["layer_types"] = ["full_attention"] * depth
    return config


def _layer_types(windows: list) -> list[str]:
    """layer_types of a config.json. windows: whether each layer has one."""
    return ["sliding_attention" if x else "full_attention" for x in windows]


def _gemma4(fields: Fields) -> Fields:
    """Fields that are there twice are, with the suffix "_swa", those of layers with a window."""
    pattern, depth = fields.pop("attention.sliding_window_pattern", None), fields.get("block_count")
    if not isinstance(pattern, list) or len(pattern) != depth:
        raise UserError(f"attention.sliding_window_pattern does not describe {depth} layers")
    windowed = "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"
    widths = {fields.pop(name, None) for name in windowed} - {None}
    if len(widths) != 1:
        raise UserError(f"{', '.join(windowed)} must be the same number")
    shared = _take_integer(fields, "attention.shared_kv_layers", 0)
    config: Fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(pattern),
        "head_dim": widths.pop(),
        "num_kv_shared_layers": shared,
        "enable_moe_block": bool(fields.get("expert_count")),
        "hidden_size_per_layer_input": fields.pop("embedding_length_per_layer_input", 0),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": fields.pop("rope.freq_base_swa", 1e4)},
            "full_attention": {"rope_theta": fields.pop("rope.freq_base", 1e6)},
        },
    }
    if isinstance(own := fields.get("feed_forward_length"), list):
        if own != own[:1] * (depth - shared) + [2 * x for x in own[:1]] * shared:
            raise UserError("feed_forward_length may differ only where keys are shared, and be twice as much")
        fields["feed_forward_length"], config["use_double_wide_mlp"] = own[0], True
    if isinstance(heads := fields.get("attention.head_count_kv"), list):  # keys are values in full layers
        of_type = dict(zip(pattern, heads, strict=False))
        if heads != [of_type.get(x) for x in pattern]:
            raise UserError("attention.head_count_kv differs between layers of a type")
        fields["attention.head_count_kv"] = of_type.get(True, heads[0])
        config |= dict(attention_k_eq_v=True, num_global_key_value_heads=of_type.get(False))
    return config


def _delta_net(fields: Fields) -> Fields:
    """Of models in which most layers have a state. Their M-RoPE is RoPE, but for images."""
    fields.pop("rope.dimension_sections", None)
    heads, found = _take_integer(fields, "ssm.time_step_rank"), _extra_layers(fields)
    if states := fields.pop("attention.recurrent_layers", None):
        types = ["linear_attention" if x else "full_attention" for x in states]
        found["layer_types"] = types[: fields["block_count"]]
    return (
        found
        | _rotated_part(fields)
        | {
            "linear_num_value_heads": heads,
            "linear_value_head_dim": _take_integer(fields, "ssm.inner_size") // max(heads, 1),
        }
    )


def _olmo2(fields: Fields) -> Fields:
    """Files of OLMo 3 say which layers have a window, and YaRN's attention_factor under llama.cpp's name."""
    windows = fields.pop("attention.sliding_window_pattern", None)
    if not isinstance(windows, list):
        raise UserError(
            "field attention.sliding_window_pattern of the architecture says nothing: is it OLMo 2?"
        )
    scaling, magnitude = rope_scaling(fields), fields.pop("rope.scaling.attn_factor", None)
    if scaling or magnitude not in (None, 1.0):
        scaling["attention_factor"] = magnitude
    return {
        "layer_types": _layer_types(windows),
        "rope_scaling": scaling,
    }


SOFTMAX_OF_CHOSEN = {
    "expert_gating_func": (SOFTMAX,), "expert_weights_norm": (True,), "expert_weights_scale": (0.0, 1.0)
}  # fmt: skip
ROUTED_EXPERT_FIELDS = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
ROUTED_EXPERT_NAMES = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
QWEN3_NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    lambda fields: _delta_net(fields) | {"norm_topk_prob": True},
    fields={
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.state_size": "linear_key_head_dim",
    },
    names={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_in": "linear_attn.in_proj_qkvz",  # in older files
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    norm_offset=1,
    by_layer=("rope.dimension_sections",),
    neutral=SOFTMAX_OF_CHOSEN,
)
QWEN3_5 = dataclasses.replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    model_class="Qwen3_5ForCausalLM",
    config=_delta_net,
    grouped=False,
)
GEMMA4 = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    _gemma4,
    fields={
        "attention.key_length": "global_head_dim",
        "attention.sliding_window": "sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "layer_output_scale.weight": "layer_scalar",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    by_layer=("feed_forward_length", "attention.head_count_kv"),
    proportional_rope=True,
)
ARCHITECTURES = {  # by (general.architecture, whether there are experts)
    ("llama", False): Architecture("llama", "LlamaForCausalLM", interleaved=True),
    ("llama", True): Architecture(
        "mixtral", "MixtralForCausalLM", interleaved=True, neutral=SOFTMAX_OF_CHOSEN
    ),
    ("mistral3", False): Architecture("ministral3", "Ministral3ForCausalLM", _mistral3, interleaved=True),
    # No field says that every fourth layer has no RoPE.
    ("smollm3", False): Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    ("qwen2", False): Architecture("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", False): Architecture("qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", True): Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        lambda fields: {"rope_scaling": rope_scaling(fields), "norm_topk_prob": True},
        neutral=SOFTMAX_OF_CHOSEN,
    ),
    ("qwen3next", True): QWEN3_NEXT,
    ("qwen35", False): QWEN3_5,
    ("qwen35moe", True): dataclasses.replace(
        QWEN3_5, model_type="qwen3_5_moe_text", model_class="Qwen3_5MoeForCausalLM"
    ),
    ("seed_oss", False): Architecture(
        "seed_oss", "SeedOssForCausalLM", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    ("gemma3", False): Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _gemma3,
        fields={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1,
    ),
    ("gemma4", False): GEMMA4,
    ("gemma4", True): GEMMA4,
    ("gpt-oss", True): Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        fields={
            "attention.sliding_window": "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        neutral={"expert_gating_func": (SOFTMAX_WEIGHT,)},
    ),
    ("deepseek2", True): Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _deepseek2,
        fields={
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            **ROUTED_EXPERT_FIELDS,
        },
        names={
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            **ROUTED_EXPERT_NAMES,
        },
    ),
    ("olmo2", False): Architecture(
        "olmo3",
        "Olmo3ForCausalLM",
        _olmo2,
        fields={"attention.sliding_window": "sliding_window"},
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    ("minimax-m2", True): Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _rotated_part,
        fields={"expert_feed_forward_length": "intermediate_size"},
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        neutral={"expert_gating_func": (SIGMOID,)},
    ),
    ("glm4moe", True): Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        lambda fields: _routed_experts(fields) | _rotated_part(fields),
        fields=ROUTED_EXPERT_FIELDS,
        names={"post_attention_norm": "post_attention_layernorm", **ROUTED_EXPERT_NAMES},
        optional={"use_qk_norm": "blk.0.attn_q_norm.weight", "attention_bias": "blk.0.attn_q.bias"},
    ),
}
