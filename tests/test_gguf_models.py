"""GGUF files of this year's families: random models of transformers, written here as llama.cpp writes them.

The names of tensors and fields are those of the package gguf.
"""

import copy
import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import mesh_of
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from test_gguf import add_tokenizer, bytes_of_weights, everything, finish, refused, their_order
from test_transformers import CONFIGS as THEIR_CONFIGS
from test_transformers import NO_SCALING, SIZES, check_forward, random_reference

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.gguf.architectures import ARCHITECTURES
from checkpoints.gguf.container import GgufFile
from checkpoints.loading import load
from feedback.errors import UserError
from quantize import FORMATS

pytestmark = pytest.mark.usefixtures("own_cache")
LLM, Heads, Rope, SSM = gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
LOCAL = dict(rope_type="default", rope_theta=1e4)
LINEAR = dict(rope_type="linear", rope_theta=1e6, factor=8.0)
GEMMA3 = SIZES | dict(num_hidden_layers=7, intermediate_size=64, sliding_window=9, query_pre_attn_scalar=8)
GPT_OSS = SIZES | dict(
    num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=9, rope_parameters=YARN | dict(truncate=False, beta_fast=16.0),
)  # fmt: skip
DEEPSEEK = SIZES | dict(
    num_key_value_heads=6, num_hidden_layers=3, hidden_size=64, intermediate_size=64, first_k_dense_replace=1,
    moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, q_lora_rank=20, kv_lora_rank=24,
    qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=16, routed_scaling_factor=1.5,
)  # fmt: skip
# Three heads of values read with each key. The norm of their small outputs would enlarge rounding.
STATES = SIZES | dict(
    rms_norm_eps=1e-3, head_dim=16, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=16, linear_value_head_dim=32,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
)  # fmt: skip
STATES_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
)
CONFIGS = {
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA3, rope_parameters=dict(sliding_attention=LOCAL, full_attention=LINEAR)
    ),
    "gemma3-unscaled": transformers.Gemma3TextConfig(
        **GEMMA3, rope_parameters=dict(sliding_attention=LOCAL, full_attention=NO_SCALING),
        final_logit_softcapping=30.0,
    ),
    **{name: THEIR_CONFIGS[name] for name in ("gemma4", "gemma4-e", "gemma4-moe")},
    "gpt-oss": transformers.GptOssConfig(**GPT_OSS),
    "deepseek": transformers.DeepseekV3Config(
        **DEEPSEEK, n_group=4, topk_group=2, rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7)
    ),
    "kimi": transformers.DeepseekV3Config(
        **DEEPSEEK, n_group=1, topk_group=1, norm_topk_prob=False, rope_parameters=NO_SCALING
    ),
    "mixtral": THEIR_CONFIGS["mixtral"],
    "ministral3": transformers.Ministral3Config(
        **THEIR_CONFIGS["ministral3"].to_dict() | dict(sliding_window=None)
    ),
    "seed-oss": THEIR_CONFIGS["seed-oss"],
    "smollm3": transformers.SmolLM3Config(
        **SIZES, num_hidden_layers=4, intermediate_size=64, rope_parameters=NO_SCALING
    ),
    "olmo3": transformers.Olmo3Config(
        **SIZES, num_hidden_layers=4, intermediate_size=64, sliding_window=9, rope_theta=5e5,
        rope_scaling={k: v for k, v in YARN.items() if k != "rope_theta"} | dict(attention_factor=1.3),
    ),
    "minimax-m2": THEIR_CONFIGS["minimax-m2"],
    "glm4-moe": THEIR_CONFIGS["glm4-moe"],
    "qwen3-next": transformers.Qwen3NextConfig(
        **copy.deepcopy(STATES), **STATES_EXPERTS, intermediate_size=64, norm_topk_prob=True
    ),
    "qwen3.5": transformers.Qwen3_5TextConfig(**copy.deepcopy(STATES), intermediate_size=64),
    "qwen3.5-moe": transformers.Qwen3_5MoeTextConfig(**copy.deepcopy(STATES), **STATES_EXPERTS),
    "glm4-moe-air": transformers.Glm4MoeConfig(
        **{**THEIR_CONFIGS["glm4-moe"].to_dict(), "use_qk_norm": False, "norm_topk_prob": False}
    ),
}  # fmt: skip


def random_model(name: str):
    """Weights of norms have few digits, so that they survive an addition of 1. Logarithms of rates have few
    digits and are far from 0, so that they survive an exponential function.
    """
    reference = random_reference(CONFIGS[name])
    with torch.no_grad():
        for parameter_name, x in reference.named_parameters():
            if parameter_name.endswith("norm.weight"):
                x.copy_(torch.round(x * 1024) / 1024)
            if parameter_name.endswith("A_log"):
                x.copy_(torch.round(x * 1024).clamp(max=-2048) / 1024)
    return reference


def write(
    path,
    reference,
    kind=Kind.F32,
    change=lambda fields: None,
    tensors=None,
    fault=lambda writer: None,
    quantized=lambda name, x: ".experts." in name and x.ndim == 3,
) -> None:
    """Write a model. kind: of the `quantized` matrices, its experts', which become in the model what the file
    holds.

    change: of the fields, by their names in gguf.Keys. tensors: of the model's state, where they are others
    than usual. fault: of all that is to be written.
    """
    config = reference.config
    one_layer = getattr(config, "per_layer_config", [config])[0]
    architecture, family_fields, family_tensors = FAMILIES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers + 1)
    prefix = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, prefix)
    fields = {
        LLM.BLOCK_COUNT: config.num_hidden_layers,
        LLM.CONTEXT_LENGTH: config.max_position_embeddings,
        LLM.EMBEDDING_LENGTH: config.hidden_size,
        LLM.FEED_FORWARD_LENGTH: getattr(config, "intermediate_size", 0),
        Heads.HEAD_COUNT: config.num_attention_heads,
        Heads.HEAD_COUNT_KV: one_layer.num_key_value_heads,
        Heads.LAYERNORM_RMS_EPS: config.rms_norm_eps,
        Heads.KEY_LENGTH: one_layer.head_dim,
        Heads.VALUE_LENGTH: one_layer.head_dim,
        **family_fields(config),
    }
    change(fields)
    for name, value in fields.items():
        writer.add_key_value(name.format(arch=prefix), value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer)
    for name, x in (tensors or family_tensors)(reference.state_dict()):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        theirs = theirs or name if name.startswith(("blk.", "rope_freqs.")) else theirs
        assert theirs, name
        its_kind = kind if quantized(name, x) else Kind.F32
        data = quantize(x.numpy(), its_kind)
        if its_kind != Kind.F32:
            x.copy_(torch.from_numpy(dequantize(data, its_kind)))
        writer.add_tensor(theirs, data, raw_dtype=its_kind)
    fault(writer)
    finish(writer)


def rope_fields(rope: dict) -> dict:
    names = dict(
        rope_theta=Rope.FREQ_BASE, factor=Rope.SCALING_FACTOR, beta_fast=Rope.SCALING_YARN_BETA_FAST,
        original_max_position_embeddings=Rope.SCALING_ORIG_CTX_LEN,
    )  # fmt: skip
    names |= dict(beta_slow=Rope.SCALING_YARN_BETA_SLOW)
    kind = {} if rope["rope_type"] == "default" else {Rope.SCALING_TYPE: rope["rope_type"]}
    return kind | {theirs: rope[name] for name, theirs in names.items() if name in rope}


def gemma3_fields(config) -> dict:
    cap = config.final_logit_softcapping
    return {
        Heads.SLIDING_WINDOW: config.sliding_window,
        **rope_fields(config.rope_parameters["full_attention"]),
        **({LLM.FINAL_LOGIT_SOFTCAPPING: cap} if cap else {}),
    }


def gemma3_tensors(state):
    for name, x in state.items():
        if name != "lm_head.weight":
            yield name, x + 1 if name.endswith("norm.weight") else x


def gemma4_fields(config) -> dict:
    """Full layers have fields of their own; so have the MLPs and the heads of layers that differ."""
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    full, shared, ropes = sliding.index(False), config.num_kv_shared_layers, config.rope_parameters
    heads = [config.per_layer_config[i].num_key_value_heads for i in range(len(sliding))]
    own = [config.intermediate_size] * (len(sliding) - shared)
    of_full = Heads.KEY_LENGTH, Heads.VALUE_LENGTH, Rope.DIMENSION_COUNT
    windowed = Heads.KEY_LENGTH_SWA, Heads.VALUE_LENGTH_SWA, Rope.DIMENSION_COUNT_SWA
    experts = {
        LLM.EXPERT_COUNT: config.num_experts,
        LLM.EXPERT_USED_COUNT: config.top_k_experts,
        LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
    }
    return {
        Heads.SLIDING_WINDOW: config.sliding_window,
        Heads.SLIDING_WINDOW_PATTERN: sliding,
        Heads.SHARED_KV_LAYERS: shared,
        **dict.fromkeys(of_full, config.per_layer_config[full].head_dim),
        **dict.fromkeys(windowed, config.per_layer_config[sliding.index(True)].head_dim),
        Rope.FREQ_BASE: ropes["full_attention"]["rope_theta"],
        Rope.FREQ_BASE_SWA: ropes["sliding_attention"]["rope_theta"],
        LLM.EMBD_LENGTH_PER_LAYER_INP: config.hidden_size_per_layer_input,
        LLM.FINAL_LOGIT_SOFTCAPPING: config.final_logit_softcapping,
        **({Heads.HEAD_COUNT_KV: heads} if config.attention_k_eq_v else {}),
        **({LLM.FEED_FORWARD_LENGTH: own + [2 * own[0]] * shared} if config.use_double_wide_mlp else {}),
        **(experts if config.enable_moe_block else {}),
    }


def gemma4_tensors(state):
    """The factors of RoPE are those of full layers, of which a quarter of 8 frequencies is rotated."""
    for name, x in state.items():
        if name == "lm_head.weight":
            continue
        if name.endswith("router.scale"):
            yield f"blk.{name.split('.')[2]}.ffn_gate_inp.scale", x
        elif name.endswith("per_expert_scale"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.scale", x
        else:
            yield name + ".weight" * (not name.endswith(".weight")), x
    yield "rope_freqs.weight", torch.tensor([1.0] * 2 + [1e30] * 6)


def dense_fields(config) -> dict:
    return {Rope.DIMENSION_COUNT: config.head_dim, **rope_fields(config.rope_parameters)}


def ministral3_fields(config) -> dict:
    rope = config.rope_parameters
    temperature = {Heads.TEMPERATURE_SCALE: rope["llama_4_scaling_beta"]}
    return dense_fields(config) | temperature | {Rope.SCALING_YARN_LOG_MUL: rope["mscale_all_dim"]}


def mixtral_fields(config) -> dict:
    experts = {
        LLM.EXPERT_COUNT: config.num_local_experts,
        LLM.EXPERT_USED_COUNT: config.num_experts_per_tok,
    }
    return dense_fields(config) | experts


def interleaved_tensors(state):
    """With the rows of q and k in the order that llama.cpp wants in some architectures."""
    heads = dict(q_proj=SIZES["num_attention_heads"], k_proj=SIZES["num_key_value_heads"])
    for name, x in with_gate_and_up(state):
        theirs = name.split(".")[-2]
        yield name, their_order(x, heads[theirs]) if theirs in heads else x


def tied_tensors(state):
    return interleaved_tensors({name: x for name, x in state.items() if name != "lm_head.weight"})


def with_gate_and_up(state):
    """The joined matrices of experts in two."""
    for name, x in state.items():
        if name.endswith("gate_up_proj"):
            for part, its_part in zip(("gate_proj", "up_proj"), x.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", part + ".weight"), its_part
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), x


def gpt_oss_fields(config) -> dict:
    windows = {Heads.SLIDING_WINDOW: config.sliding_window}
    return mixtral_fields(config) | windows | {LLM.EXPERT_FEED_FORWARD_LENGTH: config.intermediate_size}


def gpt_oss_tensors(state):
    for name, x in state.items():
        if name.endswith("sinks"):
            yield name + ".weight", x
        elif name.endswith("gate_up_proj_bias"):
            yield name.replace("gate_up_proj_bias", "gate_proj.bias"), x[:, ::2]
            yield name.replace("gate_up_proj_bias", "up_proj.bias"), x[:, 1::2]
        elif name.endswith("gate_up_proj"):
            yield name.replace("gate_up_proj", "gate_proj.weight"), x[..., ::2].mT
            yield name.replace("gate_up_proj", "up_proj.weight"), x[..., 1::2].mT
        elif name.endswith("experts.down_proj"):
            yield name + ".weight", x.mT
        else:
            yield name.replace("down_proj_bias", "down_proj.bias"), x


def deepseek_fields(config) -> dict:
    rope = config.rope_parameters
    log = {Rope.SCALING_YARN_LOG_MUL: 0.1 * rope["mscale_all_dim"]} if "mscale_all_dim" in rope else {}
    return {
        Heads.HEAD_COUNT_KV: 1,
        Heads.Q_LORA_RANK: config.q_lora_rank,
        Heads.KV_LORA_RANK: config.kv_lora_rank,
        Heads.KEY_LENGTH: config.kv_lora_rank + config.qk_rope_head_dim,
        Heads.VALUE_LENGTH: config.kv_lora_rank,
        Heads.KEY_LENGTH_MLA: config.qk_nope_head_dim + config.qk_rope_head_dim,
        Heads.VALUE_LENGTH_MLA: config.v_head_dim,
        LLM.VOCAB_SIZE: config.vocab_size,
        **routed_expert_fields(config),
        Rope.DIMENSION_COUNT: config.qk_rope_head_dim,
        **rope_fields(rope),
        **log,
    }


def routed_expert_fields(config) -> dict:
    return {
        LLM.LEADING_DENSE_BLOCK_COUNT: config.first_k_dense_replace,
        LLM.EXPERT_COUNT: config.n_routed_experts,
        LLM.EXPERT_USED_COUNT: config.num_experts_per_tok,
        LLM.EXPERT_SHARED_COUNT: config.n_shared_experts,
        LLM.EXPERT_FEED_FORWARD_LENGTH: config.moe_intermediate_size,
        LLM.EXPERT_WEIGHTS_SCALE: config.routed_scaling_factor,
        **({LLM.EXPERT_WEIGHTS_NORM: True} if config.norm_topk_prob else {}),
        LLM.EXPERT_GATING_FUNC: int(gguf.ExpertGatingFuncType.SIGMOID),
        LLM.EXPERT_GROUP_COUNT: config.n_group,
        LLM.EXPERT_GROUP_USED_COUNT: config.topk_group,
    }


def deepseek_tensors(state, joined=False):
    """joined: keys and values in one matrix, as files from before April 2025 have them."""
    N, U = DEEPSEEK["qk_nope_head_dim"], DEEPSEEK["v_head_dim"]
    for name, x in with_gate_and_up(state):
        if name.endswith("kv_b_proj.weight") and not joined:
            heads = x.reshape(-1, N + U, x.shape[-1])
            yield name.replace("kv_b", "k_b"), heads[:, :N].mT
            yield name.replace("kv_b", "v_b"), heads[:, N:]
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), x


def glm4_moe_fields(config) -> dict:
    rope = config.rope_parameters
    rotated = {Rope.DIMENSION_COUNT: int(config.head_dim * rope["partial_rotary_factor"])}
    return routed_expert_fields(config) | rotated | rope_fields(rope)


def olmo3_fields(config) -> dict:
    rope = config.rope_parameters["full_attention"]
    return {
        Heads.SLIDING_WINDOW: config.sliding_window,
        Heads.SLIDING_WINDOW_PATTERN: [kind == "sliding_attention" for kind in config.layer_types],
        Rope.SCALING_ATTN_FACTOR: rope["attention_factor"],
        **rope_fields(rope),
    }


def minimax_m2_fields(config) -> dict:
    return mixtral_fields(config) | {
        LLM.EXPERT_FEED_FORWARD_LENGTH: config.intermediate_size,
        LLM.EXPERT_GATING_FUNC: int(gguf.ExpertGatingFuncType.SIGMOID),
        Rope.DIMENSION_COUNT: config.rotary_dim,
    }


def states_fields(config) -> dict:
    """Those of experts are 0 in a dense model, as if they were not there."""
    rope, experts = config.rope_parameters, getattr(config, "num_experts", 0)
    return {
        SSM.CONV_KERNEL: config.linear_conv_kernel_dim,
        SSM.STATE_SIZE: config.linear_key_head_dim,
        SSM.GROUP_COUNT: config.linear_num_key_heads,
        SSM.TIME_STEP_RANK: config.linear_num_value_heads,
        SSM.INNER_SIZE: config.linear_value_head_dim * config.linear_num_value_heads,
        LLM.FULL_ATTENTION_INTERVAL: 4,
        Rope.DIMENSION_COUNT: int(config.head_dim * rope["partial_rotary_factor"]),
        Rope.DIMENSION_SECTIONS: [1, 1, 0, 0],
        **rope_fields(rope),
        LLM.EXPERT_COUNT: experts,
        LLM.EXPERT_USED_COUNT: experts and config.num_experts_per_tok,
        LLM.EXPERT_FEED_FORWARD_LENGTH: experts and config.moe_intermediate_size,
        LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: experts and config.shared_expert_intermediate_size,
    }


def states_tensors(state):
    """Norms but for that of the delta net's output have 1 added, rates are not logarithms."""
    for name, x in with_gate_and_up(state):
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            x = x + 1
        if name.endswith("A_log"):
            x = -torch.exp(x)
        if "conv1d" in name:
            x = x.squeeze()
        yield name.replace("dt_bias", "dt_proj.bias"), x


def qwen3_next_tensors(state):
    """The rows of each key head are divided into the queries, keys and values of all heads, and the gates."""
    J, R, X, Y = 2, 3, STATES["linear_key_head_dim"], STATES["linear_value_head_dim"]
    for name, x in states_tensors(state):
        if "in_proj_qkvz" in name:
            *parts, gates = x.reshape(J, -1, x.shape[-1]).split([X, X, R * Y, R * Y], 1)
            layer = f"blk.{name.split('.')[2]}"
            yield f"{layer}.attn_qkv.weight", torch.cat([y.flatten(0, 1) for y in parts])
            yield f"{layer}.attn_gate.weight", gates.flatten(0, 1)
        else:
            yield name, x


def by_number(x, width: int, J: int = 2):
    """The first head of values of each key, then the second of each, and so on: heads of so many rows."""
    return x.reshape(J, -1, width, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def qwen3_5_tensors(state):
    X, Y = STATES["linear_key_head_dim"], STATES["linear_value_head_dim"]
    for name, x in states_tensors(state):
        if name.endswith(("A_log", "dt_proj.bias", "in_proj_a.weight", "in_proj_b.weight")):
            x = by_number(x, 1)
        elif "in_proj_z" in name:
            x = by_number(x, Y)
        elif "in_proj_qkv" in name or "conv1d" in name:
            x = torch.cat([x[: 4 * X], by_number(x[4 * X :], Y)])
        elif "linear_attn.out_proj" in name:
            x = by_number(x.T, Y).T.contiguous()
        yield name, x


FAMILIES = {  # GGUF's architecture, its fields and its tensors
    "gemma3_text": (gguf.MODEL_ARCH.GEMMA3, gemma3_fields, gemma3_tensors),
    "gemma4_text": (gguf.MODEL_ARCH.GEMMA4, gemma4_fields, gemma4_tensors),
    "gpt_oss": (gguf.MODEL_ARCH.GPT_OSS, gpt_oss_fields, gpt_oss_tensors),
    "deepseek_v3": (gguf.MODEL_ARCH.DEEPSEEK2, deepseek_fields, deepseek_tensors),
    "olmo3": (gguf.MODEL_ARCH.OLMO2, olmo3_fields, dict.items),
    "minimax_m2": (gguf.MODEL_ARCH.MINIMAXM2, minimax_m2_fields, deepseek_tensors),
    "glm4_moe": (gguf.MODEL_ARCH.GLM4_MOE, glm4_moe_fields, deepseek_tensors),
    "qwen3_next": (gguf.MODEL_ARCH.QWEN3NEXT, states_fields, qwen3_next_tensors),
    "qwen3_5_text": (gguf.MODEL_ARCH.QWEN35, states_fields, qwen3_5_tensors),
    "qwen3_5_moe_text": (gguf.MODEL_ARCH.QWEN35MOE, states_fields, qwen3_5_tensors),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, mixtral_fields, interleaved_tensors),
    "ministral3": (gguf.MODEL_ARCH.MISTRAL3, ministral3_fields, interleaved_tensors),
    "seed_oss": (gguf.MODEL_ARCH.SEED_OSS, dense_fields, dict.items),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, dense_fields, tied_tensors),
}


def check(path, reference, folder):
    """The file is the same model, weight by weight, as transformers' folder; and answers as transformers."""
    reference.save_pretrained(folder)
    opened, expected = open_checkpoint(str(path)), open_checkpoint(str(folder))
    assert opened.config == expected.config
    assert opened.sources.keys() == expected.sources.keys()
    for name, source in opened.sources.items():
        np.testing.assert_array_equal(everything(source), everything(expected.sources[name]), err_msg=name)
    weights = load(opened, mesh_of(opened.config), "float32", format=None)
    tokens = np.random.default_rng(2).integers(0, opened.config.V, 37)
    check_forward(reference, weights, opened.config, tokens.tolist())


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(name, Kind.F32, id=name) for name in CONFIGS]
    + [("gpt-oss", Kind.MXFP4), ("deepseek", Kind.Q8_0)],
)
def test_same_model(name, kind, tmp_path):
    """Also of experts that are quantized."""
    reference = random_model(name)
    write(tmp_path / "model.gguf", reference, kind)
    check(tmp_path / "model.gguf", reference, tmp_path / "folder")
    sources = open_checkpoint(str(tmp_path / "model.gguf")).sources.values()
    assert sum(source.stored_bytes for source in sources) == bytes_of_weights(tmp_path / "model.gguf")


def test_mxfp4_stays(tmp_path):
    """Experts that a file has in MXFP4 are the same ones in our MXFP4."""
    write(tmp_path / "model.gguf", random_model("gpt-oss"), Kind.MXFP4)
    sources, format = open_checkpoint(str(tmp_path / "model.gguf")).sources, FORMATS["mxfp4"]
    for name in ("gate", "up", "down"):
        source = sources[f"layers.0.feed_forward.{name}"]
        info, x = dataclasses.replace(source.info, format=format), everything(source)
        assert info.quantization == format and all(tensor.mxfp4 for tensor in source.tensors)
        np.testing.assert_array_equal(format.decode(format.encode(jnp.asarray(x), info), info), x)


def test_older_deepseek(tmp_path):
    """Keys and values in one matrix, widths of heads under other names; and a newer file's layer for MTP."""
    reference = random_model("kimi")
    config, rope_width = reference.config, DEEPSEEK["qk_rope_head_dim"]

    def older(fields):
        del fields[Heads.KEY_LENGTH_MLA], fields[Heads.VALUE_LENGTH_MLA]
        fields[Heads.KEY_LENGTH] = DEEPSEEK["qk_nope_head_dim"] + rope_width
        fields[Heads.VALUE_LENGTH] = DEEPSEEK["v_head_dim"]
        fields[Heads.HEAD_COUNT_KV] = config.num_attention_heads
        del fields[LLM.EXPERT_GROUP_COUNT], fields[LLM.EXPERT_GROUP_USED_COUNT]
        fields[LLM.BLOCK_COUNT] += 1
        fields[LLM.NEXTN_PREDICT_LAYERS] = 1

    def tensors(state):
        yield from deepseek_tensors(state, joined=True)
        for name, x in deepseek_tensors(state):
            if name.startswith("model.layers.2."):
                yield name.replace("layers.2.", "layers.3."), x

    def joins_two_tokens(writer):
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))

    write(tmp_path / "model.gguf", reference, change=older, tensors=tensors, fault=joins_two_tokens)
    check(tmp_path / "model.gguf", reference, tmp_path / "folder")


def test_older_qwen3_next(tmp_path):
    """Queries, keys, values and gates in one matrix; a vector in place of a matrix of one row."""
    reference = random_model("qwen3-next")

    def tensors(state):
        for name, x in states_tensors(state):
            yield name, x[0] if "shared_expert_gate" in name else x

    write(tmp_path / "model.gguf", reference, tensors=tensors)
    assert "blk.0.ssm_in.weight" in GgufFile(tmp_path / "model.gguf").tensors
    check(tmp_path / "model.gguf", reference, tmp_path / "folder")


def test_newer_qwen3_5(tmp_path):
    """Gate and up of all experts in one tensor, and a layer for MTP."""
    reference = random_model("qwen3.5-moe")

    def newer(fields):
        fields[LLM.BLOCK_COUNT] += 1
        fields[LLM.NEXTN_PREDICT_LAYERS] = 1

    def tensors(state):
        for name, x in qwen3_5_tensors(state):
            if "experts.gate_proj" not in name and "experts.up_proj" not in name:
                yield name, x
            if name.startswith("model.layers.3.self_attn"):
                yield name.replace("layers.3.", "layers.4."), x
        for name, x in state.items():
            if name.endswith("experts.gate_up_proj"):
                yield f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", x

    write(tmp_path / "model.gguf", reference, change=newer, tensors=tensors)
    check(tmp_path / "model.gguf", reference, tmp_path / "folder")


def test_layers_with_a_state(tmp_path):
    """A file may say of each layer whether it has one; layers for MTP are among them."""
    types = [True, False, False, True, False]

    def each(fields):
        fields[LLM.BLOCK_COUNT] = 5
        fields[LLM.NEXTN_PREDICT_LAYERS] = 1
        fields["{arch}.attention.recurrent_layers"] = types

    theirs = random_reference(
        transformers.Qwen3_5TextConfig(
            **CONFIGS["qwen3.5"].to_dict()
            | dict(layer_types=["linear_attention" if x else "full_attention" for x in types[:4]])
        )
    )
    write(tmp_path / "model.gguf", theirs, change=each)
    layers = open_checkpoint(str(tmp_path / "model.gguf")).config.layers
    assert [x.mask == model.Recurrent() for x in layers] == types[:4]


def test_quantized_heads_of_values(tmp_path):
    """The columns of a quantized matrix are in another order: here each head is one block of a row."""
    reference = random_model("qwen3.5")
    state = {name: x for name, x in reference.state_dict().items() if "linear_attn.out_proj" in name}
    for x in state.values():
        x.copy_(torch.from_numpy(dequantize(quantize(x.numpy(), Kind.Q8_0), Kind.Q8_0)))
    write(tmp_path / "model.gguf", reference, Kind.Q8_0, quantized=lambda name, x: name in state)
    assert {GgufFile(tmp_path / "model.gguf").tensors[f"blk.{i}.ssm_out.weight"].kind for i in range(3)} == {
        8
    }
    check(tmp_path / "model.gguf", reference, tmp_path / "folder")


def test_type_of_a_model(tmp_path):
    """That of its matrices. Norms, routers and convolutions are float32 in files of any type."""
    plain = "norm", "conv1d", "shared_expert_gate", "mlp.gate.weight"
    for kind, dtype in ((Kind.F32, "float32"), (Kind.BF16, "bfloat16"), (Kind.F16, "bfloat16")):
        write(
            tmp_path / "model.gguf",
            random_model("qwen3.5-moe"),
            kind,
            quantized=lambda name, x: x.ndim > 1 and not any(part in name for part in plain),
        )
        assert open_checkpoint(str(tmp_path / "model.gguf")).dtype == dtype


def test_groups_of_older_files():
    """DeepSeek V3's 256 experts are in 8 groups, of which a token keeps 4; Kimi K2's 384 are in none."""
    said = {"attention.key_length": 192, "attention.value_length": 128, "rope.dimension_count": 64}
    said |= {"block_count": 61, "expert_gating_func": 2}
    for experts, groups in ((256, (8, 4)), (384, (1, 1))):
        found = ARCHITECTURES["deepseek2", True].config(said | {"expert_count": experts})
        assert (found["n_group"], found["topk_group"]) == groups
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "expert_count": 384}
    with pytest.raises(UserError, match="yarn_beta_fast of the architecture is missing"):
        ARCHITECTURES["deepseek2", True].config(said | yarn)
    found = ARCHITECTURES["deepseek2", True].config(said | yarn | {"rope.scaling.yarn_beta_fast": 1.0})
    assert found["rope_scaling"] == {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0}


def test_gpt_oss_without_yarn(tmp_path):
    """YaRN's limits are only there with YaRN, which the family would take for granted."""

    def unscaled(fields):
        fields[Rope.SCALING_TYPE] = "none"

    write(tmp_path / "model.gguf", random_model("gpt-oss"), change=unscaled)
    assert open_checkpoint(str(tmp_path / "model.gguf")).config.layers[0].rope == model.Rope(1e4, 8)


def test_mistral_small(tmp_path):
    """Mistral 3.1 as newer programs write it: without YaRN, and queries that do not grow."""
    added = Heads.TEMPERATURE_SCALE, Rope.SCALING_TYPE, Rope.SCALING_FACTOR, Rope.SCALING_ORIG_CTX_LEN

    def mistral(fields):
        for name in (*added, *(x for x in fields if "yarn" in x)):
            del fields[name]

    write(tmp_path / "model.gguf", random_model("ministral3"), change=mistral)
    kind = open_checkpoint(str(tmp_path / "model.gguf")).config.layers[0]
    assert kind.rope == model.Rope(1e4, 8) and kind.attention.query_scale is None


def test_gemma3_without_windows(tmp_path):
    reference = random_model("gemma3")
    changed = transformers.Gemma3TextConfig(
        **reference.config.to_dict() | dict(layer_types=["full_attention"] * 7)
    )
    theirs = transformers.AutoModelForCausalLM.from_config(changed, attn_implementation="eager").eval()
    theirs.load_state_dict(reference.state_dict())
    write(tmp_path / "model.gguf", theirs, change=lambda fields: fields.pop(Heads.SLIDING_WINDOW))
    check(tmp_path / "model.gguf", theirs, tmp_path / "folder")


def test_gemma3_fields(tmp_path):
    """What newer files say themselves; and the 27B model's scale, of its 62 layers and 5376 / 32 columns."""

    def newer(fields):
        fields[Heads.SLIDING_WINDOW_PATTERN] = 3
        fields[Rope.FREQ_BASE_SWA] = 2e4

    write(tmp_path / "model.gguf", random_model("gemma3"), change=newer)
    layers = open_checkpoint(str(tmp_path / "model.gguf")).config.layers
    assert [x.mask.window for x in layers] == [9, 9, None, 9, 9, None, 9]
    assert (layers[0].rope.theta, layers[2].rope.theta) == (2e4, 1e6)
    said = {"embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128}
    for depth, scalar in ((62, 168), (48, 128)):
        found = ARCHITECTURES["gemma3", False].config(said | {"block_count": depth})
        assert found["query_pre_attn_scalar"] == scalar


def without(name):
    return lambda fields: fields.pop(name)


def with_(name, value):
    return lambda fields: fields.update({name: value})


WRONG = [
    ("gemma3", without(Heads.KEY_LENGTH), "attention.key_length of the architecture is missing"),
    ("gemma3", with_(Heads.SLIDING_WINDOW_PATTERN, "often"), "sliding_window_pattern = 'often' makes no"),
    ("gemma3", with_(Rope.SCALING_TYPE, "longrope"), "rope_type 'longrope' is not supported"),
    ("gemma3", with_(LLM.ATTN_LOGIT_SOFTCAPPING, 50.0), "gemma3.attn_logit_softcapping = 50.0 is not"),
    ("gemma4", without(Heads.SLIDING_WINDOW_PATTERN), "sliding_window_pattern does not describe 4 layers"),
    ("gemma4", with_(Heads.SLIDING_WINDOW_PATTERN, [True]), "sliding_window_pattern does not describe 4"),
    ("gemma4", with_(Heads.KEY_LENGTH_SWA, 12), "rope.dimension_count_swa must be the same number"),
    ("gemma4", with_(Heads.HEAD_COUNT_KV, [2, 1, 2, 2]), "head_count_kv differs between layers of a type"),
    ("gemma4-e", with_(LLM.FEED_FORWARD_LENGTH, [64, 128] * 4), "feed_forward_length may differ only where"),
    ("gemma4", with_(Heads.SHARED_KV_LAYERS, 3), "num_kv_shared_layers = 3 leaves a type of layers"),
    ("gpt-oss", without(LLM.EXPERT_COUNT), "general.architecture = 'gpt-oss' is not supported"),
    ("gpt-oss", with_(Rope.DIMENSION_COUNT, 4), "rope.dimension_count differ"),
    ("deepseek", with_(LLM.EXPERT_GATING_FUNC, 1), "expert_gating_func = 1 is not supported, only 2"),
    ("deepseek", without(Rope.DIMENSION_COUNT), "rope.dimension_count of the architecture is missing"),
    ("deepseek", without(Heads.Q_LORA_RANK), "q_lora_rank"),
    ("deepseek", with_(Heads.KEY_LENGTH_MLA, "wide"), "key_length_mla of the architecture = 'wide' makes no"),
    ("deepseek", with_(LLM.BLOCK_COUNT, 2), "tensor blk.2.attn_q_a.weight has no place"),
    ("deepseek", with_(LLM.BLOCK_COUNT, 4), "model.layers.3."),
    (
        "olmo3",
        without(Heads.SLIDING_WINDOW_PATTERN),
        "sliding_window_pattern of the architecture says nothing",
    ),
    ("olmo3", with_(Rope.SCALING_TYPE, "none"), "attention_factor = 1.3 is not supported"),
    ("minimax-m2", with_(LLM.EXPERT_GATING_FUNC, 1), "minimax-m2.expert_gating_func = 1 is not supported"),
    ("glm4-moe", with_(LLM.EXPERT_GATING_FUNC, 1), "expert_gating_func = 1 is not supported, only 2"),
    ("glm4-moe", without(Heads.KEY_LENGTH), "attention.key_length of the architecture is missing"),
    ("qwen3-next", without(SSM.TIME_STEP_RANK), "ssm.time_step_rank of the architecture is missing"),
    ("qwen3-next", without(SSM.CONV_KERNEL), "'linear_conv_kernel_dim' is missing"),
    ("qwen3.5", with_(SSM.TIME_STEP_RANK, 5), "linear_num_value_heads = 5 is no multiple of linear_num_key"),
    ("qwen3.5", with_(LLM.FULL_ATTENTION_INTERVAL, 2), "layers.1.self_attn.q_proj.weight is missing"),
    ("qwen3.5", with_(LLM.EXPERT_COUNT, 8), "'qwen35' with experts is not supported"),
    ("qwen3.5-moe", with_(LLM.EXPERT_WEIGHTS_NORM, False), "expert_weights_norm = False is not supported"),
    ("qwen3.5-moe", with_(SSM.INNER_SIZE, 96), "has shape (256, 48), but config.json asks for (160, 48)"),
    ("glm4-moe-air", with_(Rope.DIMENSION_COUNT, 3), "even head_dim, or part of it, not 3"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_refused(name, change, message, tmp_path):
    write(tmp_path / "model.gguf", random_model(name), change=change)
    refused(tmp_path / "model.gguf", message)
