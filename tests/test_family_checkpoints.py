"""What each family's checkpoints say and hold: published config.json files, wrong fields, tensors."""

import copy
import json
import re
import shutil
from functools import partial

import jax
import numpy as np
import pytest
import torch
import transformers
from conftest import mesh_of
from ml_dtypes import bfloat16
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from test_dequantized import FORMATS as QUANTIZED
from test_dequantized import w4a16
from test_families import FAMILIES
from test_transformers import CONFIGS, SIZES, YARN, check_forward, random_reference, with_random_weights

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from convert_checkpoint import convert, verify
from families.llama4 import QueryScale
from families.registry import read_config
from feedback.errors import UserError
from planner.published_models import MODELS
from quantize import FP8, INT8, Format, PerGroup

deep = partial(pytest.param, marks=pytest.mark.deep)


SMALL = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2,
    vocab_size=320,
)  # fmt: skip
LATENT = SMALL | dict(
    num_key_value_heads=4, kv_lora_rank=48, moe_intermediate_size=24, q_lora_rank=40, qk_nope_head_dim=24,
    qk_rope_head_dim=16, v_head_dim=32,
)  # fmt: skip
DEEPSEEK_V3 = LATENT | dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], attention_bias=False,
    attention_dropout=0.0, auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    aux_loss_alpha=0.001, bos_token_id=0, eos_token_id=1, ep_size=1, first_k_dense_replace=3,
    hidden_act="silu", initializer_range=0.02, max_position_embeddings=163840, moe_layer_freq=1, n_group=8,
    n_routed_experts=32, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_hidden_layers=4,
    num_nextn_predict_layers=1, pretraining_tp=1, rms_norm_eps=1e-6,
    quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    ),
    rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
        mscale_all_dim=1.0,
    ),
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True,
    tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", torch_dtype="bfloat16",
    transformers_version="4.46.3", use_cache=True,
)  # fmt: skip
MINISTRAL_ROPE = dict(
    beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=16384, rope_theta=1000000.0, rope_type="yarn", type="yarn",
)  # fmt: skip
LINEAR_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
STATES = SMALL | dict(
    attention_bias=False, attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645,
    full_attention_interval=4, head_dim=32, hidden_act="silu", initializer_range=0.02,
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_value_head_dim=24, max_position_embeddings=262144, num_hidden_layers=8,
    partial_rotary_factor=0.25, rms_norm_eps=1e-6, tie_word_embeddings=False, use_cache=True,
)  # fmt: skip
ROUTED = dict(
    moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, output_router_logits=False,
    router_aux_loss_coef=0.001, shared_expert_intermediate_size=40,
)  # fmt: skip
QWEN3_5 = dict(
    attn_output_gate=True, dtype="bfloat16", layer_types=LINEAR_LAYERS * 2, mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
    rope_parameters={
        "mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
)  # fmt: skip
QWEN_FP8 = dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128],
    modules_to_not_convert=[
        "lm_head", "model.layers.0.input_layernorm", "model.layers.0.linear_attn.conv1d",
        "model.layers.0.linear_attn.in_proj_ba", "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
    ],
)  # fmt: skip
# As they were published, but for sizes; what has no effect on inference is left out of some.
PUBLISHED = {
    "mistral": SMALL | dict(
        model_type="mistral", hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-5,
        rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16",
        use_cache=True,
    ),
    "ministral3": SMALL | dict(
        model_type="ministral3", attention_dropout=0.0, head_dim=128, hidden_act="silu",
        initializer_range=0.02, max_position_embeddings=262144, rms_norm_eps=1e-5,
        rope_parameters=MINISTRAL_ROPE, sliding_window=None, tie_word_embeddings=True, use_cache=True,
    ),
    "qwen2": SMALL | dict(
        model_type="qwen2", hidden_act="silu", max_position_embeddings=32768, max_window_layers=28,
        rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=True,
        use_sliding_window=False, use_mrope=False,
    ),
    "smollm3": SMALL | dict(
        model_type="smollm3", architectures=["SmolLM3ForCausalLM"], attention_bias=False,
        attention_dropout=0.0, bos_token_id=None, eos_token_id=128012, hidden_act="silu",
        initializer_range=0.02, layer_types=["full_attention"] * 8, max_position_embeddings=65536,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 2,
        num_hidden_layers=8, pad_token_id=128004, pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=5000000.0, sliding_window=None, torch_dtype="bfloat16", use_cache=False,
        use_sliding_window=False,
    ),
    "seed_oss": SMALL | dict(
        model_type="seed_oss", architectures=["SeedOssForCausalLM"], attention_bias=True,
        attention_dropout=0.1, attention_out_bias=False, bos_token_id=0, eos_token_id=2, head_dim=128,
        hidden_act="silu", initializer_range=0.02, max_position_embeddings=524288, mlp_bias=False,
        pad_token_id=1, residual_dropout=0.1, rms_norm_eps=1e-6, rope_scaling={"rope_type": "default"},
        rope_theta=10000000.0, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True,
    ),
    "qwen3_moe": SMALL | dict(
        model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=32, hidden_act="silu",
        max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=24,
        norm_topk_prob=True, num_experts=8, num_experts_per_tok=2, output_router_logits=False,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001,
        sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
    ),
    "gemma": SMALL | dict(
        model_type="gemma", attention_bias=False, head_dim=32, hidden_act="gelu", hidden_activation=None,
        max_position_embeddings=8192, num_key_value_heads=1, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=10000.0,
    ),
    # The text_config of gemma-3-4b-it says no more.
    "gemma3_text": dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024,
    ),
    "gemma4_text": SMALL | dict(
        model_type="gemma4_text", attention_bias=False, attention_k_eq_v=True, enable_moe_block=False,
        final_logit_softcapping=30.0, global_head_dim=32, head_dim=16, hidden_activation="gelu_pytorch_tanh",
        hidden_size_per_layer_input=0, max_position_embeddings=131072, num_global_key_value_heads=1,
        num_hidden_layers=12, num_kv_shared_layers=0, rms_norm_eps=1e-6, sliding_window=1024,
        rope_parameters={
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        tie_word_embeddings=True, use_bidirectional_attention="vision", use_double_wide_mlp=False,
    ),
    # Sizes but for those of full layers; everything else has a default.
    "gemma4_unified_text": dict(
        model_type="gemma4_unified_text", attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    # Everything else has a default.
    "muse_glimmer_text": dict(
        model_type="muse_glimmer_text", hidden_activation="silu", pad_token_id=None,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    ),
    "muse_spark_text": dict(
        model_type="muse_spark_text", hidden_act="silu", pad_token_id=None,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    ),
    "gpt2": dict(
        model_type="gpt2", activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
        embd_pdrop=0.1, layer_norm_epsilon=1e-5, n_ctx=1024, n_embd=64, n_head=4, n_layer=2, n_positions=1024,
        resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
        summary_type="cls_index", summary_use_proj=True, vocab_size=320,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    ),
    "gpt_oss": SMALL | dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=2, head_dim=16, hidden_act="silu", initial_context_length=4096,
        initializer_range=0.02, intermediate_size=64, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=131072, num_attention_heads=8, num_experts_per_tok=2, num_local_experts=4,
        output_router_logits=False, pad_token_id=199999,
        quantization_config={
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        rms_norm_eps=1e-5, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        swiglu_limit=7.0, tie_word_embeddings=False, transformers_version="4.55.0.dev0", use_cache=True,
    ),
    "glm": SMALL | dict(
        model_type="glm", attention_bias=True, head_dim=32, hidden_act="silu", max_position_embeddings=131072,
        partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "glm4_moe": SMALL | dict(
        model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], attention_bias=True,
        attention_dropout=0.0, eos_token_id=[151329, 151336, 151338], first_k_dense_replace=1, head_dim=32,
        hidden_act="silu", initializer_range=0.02, max_position_embeddings=131072, moe_intermediate_size=24,
        n_group=1, n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=2,
        num_nextn_predict_layers=1, pad_token_id=151329, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=1000000, routed_scaling_factor=2.5, tie_word_embeddings=False,
        topk_group=1, torch_dtype="bfloat16", use_cache=True, use_qk_norm=True,
    ),
    "glm4_moe_lite": LATENT | dict(
        model_type="glm4_moe_lite", attention_bias=False, first_k_dense_replace=1, hidden_act="silu",
        max_position_embeddings=202752, n_group=1, n_routed_experts=8, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=2, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8,
        tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
    ),
    "olmo3": SMALL | dict(
        model_type="olmo3", architectures=["Olmo3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
        eos_token_id=100257, hidden_act="silu", initializer_range=0.02, intermediate_size=96,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=65536,
        num_key_value_heads=4, pad_token_id=100277, rms_norm_eps=1e-6,
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, use_cache=True,
    ),
    "minimax_m2": SMALL | dict(
        model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], attn_type_list=[1, 1],
        auto_map={"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, head_dim=32, hidden_act="silu",
        intermediate_size=24, max_position_embeddings=196608, mtp_transformer_layers=1,
        num_experts_per_tok=2, num_local_experts=8, num_mtp_modules=3, qk_norm_type="per_layer",
        quantization_config=dict(
            activation_scheme="dynamic", fmt="float8_e4m3fn", quant_method="fp8",
            modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
            weight_block_size=[128, 128],
        ),
        rms_norm_eps=1e-6, rope_theta=5000000, rotary_dim=16, scoring_func="sigmoid",
        shared_intermediate_size=0, tie_word_embeddings=False, transformers_version="4.46.1", use_cache=True,
        use_mtp=True, use_qk_norm=True, use_routing_bias=True,
    ),
    "qwen3_next": STATES | dict(
        model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], decoder_sparse_step=1,
        intermediate_size=96, max_window_layers=28, mlp_only_layers=[], norm_topk_prob=True,
        rope_scaling=None, rope_theta=10000000, use_sliding_window=False, **ROUTED,
    ),
    "qwen3_5_text": STATES | QWEN3_5 | dict(
        model_type="qwen3_5_text", intermediate_size=96, mlp_only_layers=[], output_gate_type="swish"
    ),
    "qwen3_5_moe_text": STATES | QWEN3_5 | ROUTED | dict(model_type="qwen3_5_moe_text", vocab_size=640),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3 | dict(
        model_type="kimi_k2", first_k_dense_replace=1, max_position_embeddings=131072, n_group=1,
        n_routed_experts=12, num_attention_heads=2, num_key_value_heads=2, num_nextn_predict_layers=0,
        rope_scaling=DEEPSEEK_V3["rope_scaling"] | dict(factor=32.0, beta_fast=1.0), rope_theta=50000.0,
        routed_scaling_factor=2.827, topk_group=1,
    ),
}  # fmt: skip


TIED = "ministral3", "qwen2", "gemma", "gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt2", "smollm3"


def their_config(name: str) -> transformers.PreTrainedConfig:
    """What transformers reads. It knows Kimi K2 by the name of its architecture."""
    known = dict(kimi_k2="deepseek_v3").get(name, name)
    return transformers.AutoConfig.for_model(**PUBLISHED[name] | dict(model_type=known))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(name):
    """Read as transformers reads it, and as the file that transformers saves, which has all defaults."""
    cfg, theirs = read_config(PUBLISHED[name]), their_config(name)
    assert cfg == read_config(json.loads(theirs.to_json_string()))
    found = cfg.D, cfg.V, len(cfg.layers), cfg.max_positions, cfg.tied_embeddings
    sizes = theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers, theirs.max_position_embeddings
    assert found == (*sizes, name in TIED)
    windows = dict(mistral=4096, olmo3=4096, gemma3_text=1024, gpt_oss=128)
    windows |= dict(muse_glimmer_text=2048, muse_spark_text=2048, gemma4_text=1024, gemma4_unified_text=1024)
    other = model.Recurrent() if "linear_num_key_heads" in PUBLISHED[name] else model.Full()
    assert cfg.layers[0].mask == (model.Window(windows[name]) if name in windows else other)


PARTIAL_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.25}
WRONG_FIELDS = {
    "muse_glimmer_text": [
        (dict(layer_rope_theta=[5e5, 1e4, 0]), "= [500000.0, 10000.0, 0] must give each of 3"),
        (dict(layer_rope_theta=[1e4, 1e4, 0]), "each of 3 layers 0 (no RoPE) or rope_theta = 500000"),
        (dict(layer_rope_theta=[5e5, 0]), "each of 3 layers"),
        (dict(layer_rope_theta=[5e5, None, 0]), "layer_rope_theta"),
        (dict(layer_rope_theta=[True, False, True]), "layer_rope_theta"),
        (dict(layer_types=["full_attention"] * 2), "layer_types do not describe 3 layers"),
        (dict(layer_types=["chunked_attention"] * 3), "each sliding_attention or full_attention"),
        (dict(sliding_window=None), "'sliding_window' is missing"),
        (dict(final_logit_softcapping=0), "final_logit_softcapping = 0 makes no sense"),
        (dict(hidden_activation="gelu"), "hidden_activation = 'gelu' is not supported"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0 is not supported"),
    ],
    "muse_spark_text": [
        (dict(layer_rope_theta=[5e5, 1e4, 0]), "each of 3 layers 0 (no RoPE) or rope_theta = 500000"),
        (
            dict(mlp_layer_types=["sparse"] * 2),
            "mlp_layer_types do not describe 3 layers, each dense or sparse",
        ),
        (dict(mlp_layer_types=["moe"] * 3), "mlp_layer_types do not describe 3 layers, each dense or"),
        (dict(moe_hidden_size=0), "moe_hidden_size = 0 makes no sense"),
        (dict(num_experts_per_tok=257), "num_experts_per_tok = 257 of 256 experts"),
        (dict(residual_gate_temperature=0), "residual_gate_temperature = 0 makes no sense"),
        (dict(post_norm_eps="1e-8"), "post_norm_eps = '1e-8' makes no sense"),
        (dict(n_shared_experts=1), "n_shared_experts = 1 is not supported"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
    ],
    "deepseek_v3": [
        (dict(n_group=5), "n_group = 5 does not divide 32 experts into groups of 2 or more"),
        (dict(n_group=32), "n_group = 32 does not divide 32 experts into groups of 2 or more"),
        (dict(topk_group=9), "topk_group = 9 of 8 groups"),
        (dict(topk_group=1), "num_experts_per_tok = 8 of 1 groups of 4 experts"),
        (dict(num_experts_per_tok=33, topk_group=8), "num_experts_per_tok = 33 of"),
        (dict(scoring_func="softmax"), "scoring_func = 'softmax' is not supported"),
        (dict(topk_method="greedy"), "topk_method = 'greedy' is not supported"),
        (dict(moe_layer_freq=2), "moe_layer_freq = 2 is not supported"),
        (dict(q_lora_rank=None), "q_lora_rank = null is not supported"),
        (dict(attention_bias=True), "attention_bias = True is not supported"),
        (dict(rope_scaling=dict(type="dynamic", factor=4.0)), "rope_type 'dynamic' is not supported"),
        (dict(index_topk=2048), "index_topk = 2048 is not supported"),
    ],
    "gpt_oss": [
        (dict(swiglu_limit=0), "swiglu_limit = 0 makes no sense"),
        (dict(swiglu_limit="7"), "swiglu_limit = '7' makes no sense"),
        (dict(swiglu_alpha=-1), "swiglu_alpha = -1 makes no sense"),
        (dict(sliding_window=-9), "sliding_window = -9 makes no sense"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
    ],
    "gemma3_text": [
        (dict(rope_parameters=dict(chunked_attention={"rope_theta": 1e5})), "chunked_attention = {'rope_"),
        (dict(rope_parameters=dict(sliding_attention=1e4)), "sliding_attention = 10000.0 makes no sense"),
        (dict(rope_parameters={"rope_theta": 1e5}), "rope_theta = 100000.0 is not supported"),
        (dict(rope_scaling={"rope_type": "longrope"}), "rope_type 'longrope' is not supported"),
        (dict(rope_local_base_freq="low"), "rope_local_base_freq = 'low' makes no sense"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention = True is not supported"),
    ],
    "smollm3": [
        (dict(no_rope_layers=[1, 1, 1, 0]), "no_rope_layers do not describe 8 layers, each 0 or 1"),
        (dict(no_rope_layers=[5e5, 5e5, 5e5, 0] * 2), "no_rope_layers do not describe 8 layers, each 0 or 1"),
        (dict(no_rope_layers=None, no_rope_layer_interval=0), "no_rope_layer_interval = 0 makes no sense"),
        (dict(layer_types=["sliding_attention"] * 8), "do not describe 8 layers, each full_attention"),
        (dict(use_sliding_window=True), "'sliding_window' is missing"),
        (dict(attention_bias=True), "attention_bias = True is not supported"),
        (dict(mlp_bias=True), "mlp_bias = True is not supported"),
    ],
    "seed_oss": [
        (dict(mlp_bias=True), "mlp_bias = True is not supported"),
        (dict(attention_out_bias="no"), "attention_out_bias = 'no' makes no sense"),
        (dict(num_key_value_heads=3), "4 attention heads are no multiple of 3 key/value heads"),
    ],
    "ministral3": [
        (
            dict(rope_parameters=dict(MINISTRAL_ROPE, llama_4_scaling_beta="no")),
            "llama_4_scaling_beta = 'no'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "'original_max_position_embeddings' is missing",
        ),
        (
            dict(rope_parameters=dict(MINISTRAL_ROPE, max_position_embeddings=4096)),
            "max_position_embeddings of rope_parameters is not 262144",
        ),
        (dict(rope_parameters=dict(MINISTRAL_ROPE, rope_type="longrope")), "rope_type 'longrope' is not"),
        (dict(rope_parameters=dict(MINISTRAL_ROPE, mscales=1.0)), "mscales = 1.0 is not supported"),
        (dict(attention_bias=True), "attention_bias = True is not supported"),
    ],
    "olmo3": [
        (dict(layer_types=["sliding_attention"]), "layer_types do not describe 2 layers"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rope_type = 'yarn' is not supported"),
        (dict(rope_scaling={"rope_type": "longrope"}), "rope_type 'longrope' is not supported"),
        (dict(clip_qkv=8.0), "clip_qkv = 8.0 is not supported"),
    ],
    "minimax_m2": [
        (dict(attn_type_list=[1, 0]), "attn_type_list must give each of 2 layers a 1"),
        (dict(attn_type_list=[1]), "attn_type_list must give each of 2 layers a 1"),
        (dict(partial_rotary_factor=0.25), "rotary_dim = 16, but RoPE's other fields rotate 8"),
        (dict(rotary_dim=64), "even head_dim, or part of it, not 64"),
        (dict(qk_norm_type="per_head"), "qk_norm_type = 'per_head' is not supported"),
        (dict(scoring_func="softmax"), "scoring_func = 'softmax' is not supported"),
        (dict(shared_intermediate_size=24), "shared_intermediate_size = 24 is not supported"),
    ],
    "glm4_moe": [
        (dict(use_qk_norm=1), "use_qk_norm = 1 makes no sense"),
        (dict(partial_rotary_factor=0.1), "even head_dim, or part of it, not 3"),
        (dict(partial_rotary_factor=2), "even head_dim, or part of it, not 64"),
        (dict(n_group=3), "n_group = 3 does not divide 8 experts into groups of 2 or more"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok = 9 of 8 experts"),
        (dict(hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
    ],
    "gemma4_text": [
        (dict(num_kv_shared_layers=7), "num_kv_shared_layers = 7 leaves a type of layers without keys"),
        (dict(num_kv_shared_layers=99), "num_kv_shared_layers = 99 leaves a type of layers without keys"),
        (dict(num_kv_shared_layers=-1), "num_kv_shared_layers = -1 makes no sense"),
        (
            dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=262144),
            "vocab_size_per_layer_input = 262144 is not vocab_size = ",
        ),
        (dict(use_double_wide_mlp=1), "use_double_wide_mlp = 1 makes no sense"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention = 'all' is not supported"),
        (dict(attention_bias=True), "attention_bias = True is not supported"),
        (dict(num_global_key_value_heads=3), "4 attention heads are no multiple of 3 key/value heads"),
        (dict(global_head_dim=33), "RoPE needs an even head_dim, or part of it, not 33"),
        (dict(layer_types=["full_attention"] * 2), "layer_types do not describe 12 layers"),
        (dict(per_layer_config={"5": {"head_dim": 32}}), "must say the same of all layers of a type"),
        (dict(per_layer_config={"5": 32, "11": 32}), "must say the same of all layers of a type"),
        (dict(per_layer_config={str(i): {"rms_norm_eps": 1e-5} for i in (5, 11)}), "rms_norm_eps = 1e-05"),
        (dict(rope_parameters=dict(full_attention={"rope_theta": 1e6})), "'sliding_attention' is missing"),
        (
            dict(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), PARTIAL_ROPE)),
            "partial_rotary_factor = 0.25 needs rope_type 'proportional'",
        ),
    ],
    "qwen3_next": [
        (dict(linear_num_value_heads=5), "linear_num_value_heads = 5 is no multiple of linear_num_key_heads"),
        (dict(linear_conv_kernel_dim=None), "'linear_conv_kernel_dim' is missing"),
        (dict(layer_types=["sliding_attention"] * 8), "each linear_attention or full_attention"),
        (dict(attn_output_gate=False), "attn_output_gate = False is not supported"),
        (dict(full_attention_interval=0), "full_attention_interval = 0 makes no sense"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok = 9 of 8 experts"),
        (dict(partial_rotary_factor=0.1), "even head_dim, or part of it, not 3"),
        (dict(use_sliding_window=True), "use_sliding_window = True is not supported"),
        (dict(mtp_num_hidden_layers=1), "mtp_num_hidden_layers = 1 is not supported"),
    ],
    "qwen3_5_text": [
        (dict(output_gate_type="sigmoid"), "output_gate_type = 'sigmoid' is not supported"),
        (dict(rope_parameters={"type": "mrope"}), "rope_type 'mrope' is not supported"),
    ],
    "glm4_moe_lite": [(dict(qk_rope_head_dim=15), "even head_dim, or part of it, not 15")],
}


@pytest.mark.parametrize(
    ("name", "fields", "message"), [(name, *wrong) for name, x in WRONG_FIELDS.items() for wrong in x]
)
def test_wrong_fields(name, fields, message):
    sizes = dict(num_hidden_layers=3) if name in ("muse_glimmer_text", "muse_spark_text") else {}
    with pytest.raises(UserError) as error:
        read_config(PUBLISHED[name] | sizes | fields)
    assert message in str(error.value) and "\n" not in str(error.value)


SPARK = "model.language_model.layers."
WRONG_TENSORS = [  # a model, a tensor that is taken away or put there, and what is said
    ("muse-glimmer", "model.language_model.layers.1.self_attn.gate_proj.weight", None, "is missing"),
    ("muse-glimmer", "model.vision_memory.weight", torch.zeros(3), "has no place"),
    ("muse-spark", SPARK + "0.post_feedforward_residual_gate.gate", None, "is missing"),
    ("muse-spark", SPARK + "1.mlp.experts.post_expert_norm.weight", None, "is missing"),
    ("muse-spark", SPARK + "1.mlp.pre_expert_proj.weight", torch.zeros(23, 48), "has shape (23, 48), but"),
    ("muse-spark", SPARK + "0.mlp.experts.gate_up_proj_weight_scale", torch.zeros(3), "has no place"),
    ("gpt-oss", "model.layers.1.self_attn.sinks", None, "is missing"),
    ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj_bias", None, "is missing"),
    ("gpt-oss", "model.layers.0.mlp.router.weight", torch.zeros(8, 48), "has shape (8, 48), but config.json"),
    ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias", None, "is missing"),
    ("glm4-moe", "model.layers.1.self_attn.q_norm.weight", None, "is missing"),
    ("glm4-moe", "model.layers.1.self_attn.k_proj.bias", None, "is missing"),
    ("mistral", "model.layers.2.eh_proj.weight", torch.zeros(3), "has no place"),
    ("minimax-m2", "model.layers.1.block_sparse_moe.e_score_correction_bias", None, "is missing"),
    ("olmo3", "model.layers.1.self_attn.k_norm.weight", torch.ones(8), "has shape (8,), but config.json"),
    # It is called as the checkpoint calls it, though Llama has another norm of that name.
    ("gemma3", "model.layers.1.input_layernorm.weight", None, "is missing"),
    ("gemma3", "model.layers.1.post_feedforward_layernorm.weight", None, "is missing"),
    ("gemma4", "model.layers.1.layer_scalar", None, "is missing"),
    ("gemma4-e", "model.per_layer_projection_norm.weight", None, "is missing"),
    ("gemma4-e", "model.layers.1.per_layer_input_gate.weight", None, "is missing"),
    ("gemma4-e", "model.embed_tokens_per_layer.weight", torch.zeros(512, 63), "has shape (512, 63), but"),
    ("gemma4-e", "model.layers.4.self_attn.o_proj.bias", torch.zeros(48), "has no place"),
    ("gemma4-moe", "model.layers.1.router.per_expert_scale", None, "is missing"),
    ("gemma4-moe", "model.layers.1.pre_feedforward_layernorm_2.weight", None, "is missing"),
    ("gemma4", "model.layers.1.self_attn.v_proj.weight", torch.zeros(16, 48), "has no place"),
    ("qwen3-next", "model.layers.0.linear_attn.A_log", None, "is missing"),
    ("qwen3-next", "model.layers.2.linear_attn.in_proj_ba.weight", torch.zeros(9, 48), "has shape (9, 48)"),
    ("qwen3-next", "model.layers.3.mlp.shared_expert_gate.weight", None, "is missing"),
    ("qwen3-next", "model.visual.weight", torch.zeros(3), "has no place"),
    ("qwen3.5", "model.layers.0.linear_attn.conv1d.weight", torch.zeros(208, 4), "has shape (208, 4), but"),
    ("qwen3.5", "model.layers.1.self_attn.q_proj.weight", torch.zeros(96, 48), "has shape (96, 48), but"),
]


@pytest.mark.parametrize(("model_name", "name", "other", "message"), WRONG_TENSORS)
def test_wrong_tensors(model_name, name, other, message, saved, tmp_path):
    refused(saved(model_name)[0], tmp_path / "copy", name, other, message)


def test_keys_that_a_layer_does_not_use(saved, tmp_path):
    """Published files may have such matrices for layers that read the keys of an earlier layer, too."""
    shutil.copytree(saved("gemma4-e")[0], tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    shapes = dict(k_proj=(16, 48), v_proj=(16, 48), k_norm=(8,))
    unused = {f"model.layers.6.self_attn.{name}.weight": torch.zeros(x) for name, x in shapes.items()}
    save_file(tensors | unused, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    same_weights(tmp_path / "copy", saved("gemma4-e")[0])


def refused(folder, copy, name: str, other: torch.Tensor | None, message: str) -> None:
    """A copy of the checkpoint with another tensor of this name, or with none, cannot be opened."""
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if other is None else {name: other}), copy / "model.safetensors")
    with pytest.raises(UserError) as error:
        open_checkpoint(str(copy))
    assert f"tensor {name} {message}" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(str(copy))


def test_rope_of_ministral3():
    """Without rope_parameters transformers takes those of the published models, and a copy of a field."""
    content = {k: v for k, v in PUBLISHED["ministral3"].items() if k not in ("rope_parameters", "head_dim")}
    theirs = json.loads(transformers.Ministral3Config(**content).to_json_string())
    assert theirs["rope_parameters"]["max_position_embeddings"] == 262144
    assert read_config(content) == read_config(theirs) == read_config(PUBLISHED["ministral3"])
    heads = read_config(content).layers[0].attention
    assert (heads.query_scale, heads.scale) == (QueryScale(0.1, 16384, offset=0), None)
    assert read_config(content).layers[0].rope.magnitude == 1


@pytest.mark.parametrize("name", ["ministral3", "mistral"])
def test_text_of_mistral3(name):
    """Ministral 3 and Mistral Small 3.1 are within the same multimodal model, whose fields change nothing."""
    text = {k: v for k, v in PUBLISHED[name].items() if k != "tie_word_embeddings"}
    outer = dict(
        architectures=["Mistral3ForConditionalGeneration"], dtype="bfloat16", image_token_index=10,
        model_type="mistral3", multimodal_projector_bias=False, projector_hidden_act="gelu",
        spatial_merge_size=2, text_config=text, transformers_version="5.0.0.dev0",
        vision_config={"model_type": "pixtral"}, vision_feature_layer=-1,
    )  # fmt: skip
    assert read_config(outer) == read_config(text)
    # transformers ties the embeddings then, unless the checkpoint has both of them, as the published ones do.
    assert not read_config(outer).tied_embeddings
    assert read_config(outer | dict(tie_word_embeddings=True)).tied_embeddings
    with pytest.raises(UserError, match="model_type 'pixtral' is not supported"):
        read_config(outer | dict(text_config={"model_type": "pixtral"}))


KIMI_INT4 = dict(
    config_groups={
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
                "type": "int",
            },
        },
    },
    format="pack-quantized",
    ignore=[
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    kv_cache_scheme=None, quant_method="compressed-tensors", quantization_status="compressed",
)  # fmt: skip


def kimi_k25(text: dict) -> dict:
    """A config.json as Kimi K2.5's is, around this language model."""
    return dict(
        architectures=["KimiK25ForConditionalGeneration"], dtype="bfloat16", bos_token_id=163584,
        auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, eos_token_id=163585,
        ignore_index=-100, media_placeholder_token_id=163605, model_type="kimi_k25", pad_token_id=163839,
        text_config=text, use_unified_vision_chunk=True, vision_config={"patch_size": 14},
        video_placeholder="<|kimi_k25_video_placeholder|>",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3"])
def test_text_of_kimi_k25(name):
    """Its text_config is what transformers 4 knew of it, defaults of `generate` included."""
    text = {k: v for k, v in PUBLISHED[name].items() if k != "tie_word_embeddings"}
    text |= dict(
        add_cross_attention=False, chunk_size_feed_forward=0, decoder_start_token_id=None, is_decoder=False,
        length_penalty=1.0, max_length=20, num_beam_groups=1, num_beams=1, num_return_sequences=1,
        pruned_heads={}, repetition_penalty=1.0, return_dict=True, temperature=1.0, top_k=50, top_p=1.0,
        typical_p=1.0,
    )  # fmt: skip
    outer = kimi_k25(text)
    assert read_config(outer) == read_config(PUBLISHED[name])
    # transformers ties the embeddings then, unless the checkpoint has both, as the published one does.
    assert not read_config(outer).tied_embeddings
    assert read_config(outer | dict(tie_word_embeddings=False)) == read_config(outer)
    theirs = transformers.Kimi_K25Config(text_config=their_config(name).to_dict(), tie_word_embeddings=False)
    assert read_config(json.loads(theirs.to_json_string())) == read_config(outer)
    with pytest.raises(UserError, match="top_k = 40 is not supported"):
        read_config(kimi_k25(text | dict(top_k=40)))


def test_int4_experts_of_kimi_k25(tmp_path):
    """Under the names and in the form in which they were published, and as transformers saves the floats."""
    text = transformers.DeepseekV3Config(
        **CONFIGS["deepseek-v3"].to_dict() | dict(hidden_size=64, moe_intermediate_size=32)
    )
    reference = random_reference(multimodal("deepseek-v3", text.to_dict()))
    for folder in ("floats", "int4"):
        reference.save_pretrained(tmp_path / folder)
    floats, theirs = load_file(tmp_path / "floats" / "model.safetensors"), {}
    (_, make), rng = w4a16(dtype=bfloat16), np.random.default_rng(7)
    for name, x in floats.items():
        published = re.sub(r"^(language_model\.model\.)blocks\.", r"\1layers.", name)
        assert not name.startswith("language_model.model.layers.")
        if ".experts." in name:
            parts, meant = make(x.numpy(), rng)
            floats[name] = torch.from_numpy(meant)
            theirs |= {published.removesuffix("weight") + end: part for end, part in parts.items()}
        else:
            theirs[published] = x.numpy()
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    save_arrays(theirs, tmp_path / "int4" / "model.safetensors")
    config = kimi_k25(json.loads(text.to_json_string()) | dict(quantization_config=KIMI_INT4))
    (tmp_path / "int4" / "config.json").write_text(json.dumps(config))
    same_weights(tmp_path / "floats", tmp_path / "int4")


def test_biases_of_seed_oss():
    """What the file leaves out has the values of transformers; each of two fields has its own biases."""
    names = "attention_bias", "attention_out_bias", "head_dim"
    content = {k: v for k, v in PUBLISHED["seed_oss"].items() if k not in names}
    assert read_config(content) == read_config(PUBLISHED["seed_oss"])
    found = read_config(content | dict(attention_bias=False, attention_out_bias=True)).layers[0].attention
    assert (found.bias, found.output_bias, found.H) == (False, True, 128)


def test_layers_without_rope():
    """Every fourth layer of SmolLM3 has none; only these have a window, where the file asks for one."""
    layers = dict.fromkeys(("layer_types", "no_rope_layers", "no_rope_layer_interval"))
    content = {name: value for name, value in PUBLISHED["smollm3"].items() if name not in layers}
    assert read_config(content) == read_config(PUBLISHED["smollm3"])
    assert [bool(x.rope) for x in read_config(content).layers] == [True, True, True, False] * 2
    kinds = read_config(content | dict(use_sliding_window=True, sliding_window=9)).layers
    theirs = transformers.SmolLM3Config(**content | dict(use_sliding_window=True, sliding_window=9))
    assert [bool(x.mask.window) for x in kinds] == [x == "sliding_attention" for x in theirs.layer_types]
    assert read_config({k: v for k, v in content.items() if k != "rope_theta"}).layers[0].rope.theta == 2e6


def test_last_layer_of_gemma4():
    """It is full, whatever the file says."""
    types = ["full_attention"] + ["sliding_attention"] * 11
    theirs = transformers.Gemma4TextConfig(**PUBLISHED["gemma4_text"] | dict(layer_types=[*types]))
    kinds = read_config(PUBLISHED["gemma4_text"] | dict(layer_types=[*types])).layers
    assert [kind.mask == model.Full() for kind in kinds] == [
        x == "full_attention" for x in theirs.layer_types
    ]
    assert theirs.layer_types[-1] == "full_attention"


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_layers_with_a_state(name):
    """By default all but each fourth or, where the file says so, each third layer."""
    for fields in ({}, dict(full_attention_interval=3), dict(layer_types=LINEAR_LAYERS[::-1] * 2)):
        content = PUBLISHED[name] | dict(layer_types=None) | fields
        kinds = read_config(content).layers
        assert read_config({k: v for k, v in content.items() if v is not None}).layers == kinds
        types = ["linear_attention" if x.mask == model.Recurrent() else "full_attention" for x in kinds]
        assert types == transformers.AutoConfig.for_model(**content).layer_types


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_text_of_qwen3_5(name):
    """The published files are those of a model that reads images, too."""
    text = {k: v for k, v in PUBLISHED[name].items() if k != "tie_word_embeddings"}
    outer = dict(
        architectures=["Qwen3_5ForConditionalGeneration"], image_token_id=248056, language_model_only=False,
        model_type=name.removesuffix("_text"), mtp_num_hidden_layers=1, text_config=text,
        transformers_version="4.57.0.dev0", video_token_id=248057, vision_config={"depth": 27},
        vision_end_token_id=248054, vision_start_token_id=248053,
    )  # fmt: skip
    assert read_config(outer) == read_config(text) and not read_config(text).tied_embeddings
    both = outer | dict(text_config=text | dict(tie_word_embeddings=True), tie_word_embeddings=True)
    assert read_config(both).tied_embeddings
    assert read_config(outer | dict(tie_word_embeddings=True)) == read_config(both)
    with pytest.raises(UserError, match="tie_word_embeddings = False is outside of text_config"):
        read_config(both | dict(tie_word_embeddings=False))


@pytest.mark.parametrize("hidden_size", [60, 2])
def test_no_head_of_the_hidden_size(hidden_size):
    """A latent's heads have widths of their own: hidden_size / num_attention_heads may be odd, or 0."""
    cfg = read_config(PUBLISHED["glm4_moe_lite"] | dict(hidden_size=hidden_size))
    assert cfg.D == hidden_size and cfg.layers[0].attention.R == 16


def test_published_sizes():
    """Parameters of the models that the planner knows, as their publishers count them, in 1e9."""
    published = {
        "openllama-3b": 3.43, "openllama-7b": 6.74, "openllama-13b": 13.02, "mistral-7b": 7.24,
        "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "gemma-2b": 2.51, "gemma-7b": 8.54, "gemma3-1b": 1.0,
        "gemma3-4b": 3.884, "gemma3-12b": 11.771, "gemma3-27b": 27.016, "gemma4-31b": 30.7,
        "gemma4-26b-a4b": 25.2, "gemma4-12b": 11.9, "gpt2": 0.124,
        "gpt2-medium": 0.355, "gpt2-large": 0.774, "gpt2-xl": 1.558, "glm-4-9b": 9.4, "glm-4.5-air": 106,
        "glm-4.7": 355, "qwen2.5-0.5b": 0.49,
        "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.7,
        "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0,
        "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235, "smollm3-3b": 3.08, "seed-oss-36b": 36,
        "ministral3-3b": 3.4, "ministral3-8b": 8.4, "ministral3-14b": 13.5, "mistral-small-3.1-24b": 24,
        "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "olmo3-7b": 7.3, "olmo3-32b": 32.2, "minimax-m2": 228.7,
        "deepseek-v3": 671, "deepseek-r1": 671, "kimi-k2": 1030, "kimi-k2.5": 1030,
        "muse-glimmer-30b": 29.78 - 1.92,  # without the vision encoder
        "gemma4-e2b": 5.1 - 0.45, "gemma4-e4b": 8.0 - 0.45,  # without those of images and sounds
        "muse-spark-816b": 816,
    }  # fmt: skip
    for name, billions in published.items():
        infos = jax.tree.leaves(model.weight_infos(read_config(MODELS[name])))
        assert sum(np.prod(info.shape) for info in infos) / 1e9 == pytest.approx(billions, rel=0.02), name


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen3-moe", "glm4-moe", "glm4-moe-lite", "minimax-m2", "qwen3-next", "qwen3.5-moe"],
)
def test_joined_experts(name, saved, tmp_path):
    """The matrices of all experts as transformers 5 has them in memory, and some tools save them."""
    folder, reference = saved(name)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    tensors = {key: x.contiguous() for key, x in reference.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    same_weights(folder, tmp_path)


def test_defaults_of_gpt_oss():
    """What config.json leaves out is what transformers adds: its defaults are those of the 120b model."""
    theirs = json.loads(transformers.GptOssConfig().to_json_string())
    assert {"layer_types", "rope_parameters", "swiglu_alpha"} <= theirs.keys() - MODELS["gpt-oss-120b"].keys()
    assert read_config(theirs) == read_config(MODELS["gpt-oss-120b"])


def test_defaults_of_glm4_moe():
    """They are those of GLM-4.5-Air, but for what its file says."""
    theirs = transformers.Glm4MoeConfig(head_dim=128, attention_bias=True, rope_theta=1e6)
    air = MODELS["glm-4.5-air"]
    assert read_config(json.loads(theirs.to_json_string())) == read_config(air)
    assert not {"partial_rotary_factor", "n_group", "first_k_dense_replace"} & air.keys()


def test_defaults_of_minimax_m2():
    """They are those of M2, but RoPE rotates whole heads if the file does not say."""
    theirs = transformers.MiniMaxM2Config()
    m2 = {k: v for k, v in MODELS["minimax-m2"].items() if k not in ("rotary_dim", "rope_theta")}
    assert read_config(json.loads(theirs.to_json_string())) == read_config(m2)


def test_expert_tensors_of_dequantized_blocks(saved, tmp_path):
    """Rows of gate and up alternate, and the contracted dimension is the last one: the same weights.

    The widths D and M are equal here, as in the published models, so that no shape tells the layouts apart.
    """
    config = copy.deepcopy(CONFIGS["gpt-oss"])
    config.intermediate_size = config.hidden_size
    reference = with_random_weights(transformers.GptOssForCausalLM(config))
    for name in ("joined", "blocks"):
        reference.save_pretrained(tmp_path / name)
    tensors = load_file(tmp_path / "blocks" / "model.safetensors")
    for name in [x for x in tensors if x.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[name + "_mxfp4"] = tensors.pop(name).transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "blocks" / "model.safetensors")
    same_weights(tmp_path / "joined", tmp_path / "blocks")


@pytest.mark.parametrize("exact", [True, False])
def test_types_of_a_state(exact, saved, tmp_path):
    """Two vectors are float32, as Qwen 3.5 has them, or bfloat16, as 3.6; the other weights are bfloat16."""
    shutil.copytree(saved("qwen3.5")[0], tmp_path / "published")
    tensors = load_file(tmp_path / "published" / "model.safetensors")
    vectors = {x: tensors[f"model.layers.0.linear_attn.{x}"] for x in ("A_log", "norm.weight")}
    rounded = {name: x.bfloat16() for name, x in tensors.items()}
    kept = {name: x for name, x in tensors.items() if exact and name.endswith(("A_log", "attn.norm.weight"))}
    save_file(rounded | kept, tmp_path / "published" / "model.safetensors")
    convert(str(tmp_path / "published"), str(tmp_path / "converted"))
    for name in ("published", "converted"):
        checkpoint = open_checkpoint(str(tmp_path / name))
        assert checkpoint.dtype == "bfloat16"
        found = load(checkpoint, mesh_of(checkpoint.config), checkpoint.dtype).layers[0].attention
        assert {x.dtype.name for x in (found.q, found.k_taps, found.step_bias)} == {"bfloat16"}
        for ours, theirs in zip((found.log_rate, found.norm), vectors.values(), strict=True):
            theirs = theirs if exact else theirs.bfloat16().float()
            assert ours.dtype == "float32"
            np.testing.assert_array_equal(ours, theirs)


def same_weights(*folders, format: Format | None = None, mesh: str = "1") -> None:
    checkpoints = [open_checkpoint(str(folder)) for folder in folders]
    weights = [load(x, mesh_of(x.config, mesh), "float32", format) for x in checkpoints]
    for ours, theirs in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)


BLOCK = 128  # rows and columns that share a scale
WIDE = SIZES | dict(hidden_size=160, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
# A block of 128 rows has rows of several heads, and of their queries, keys and values.
WIDE_STATES = WIDE | dict(
    head_dim=72, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=24,
    linear_value_head_dim=40, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
WIDE_ROUTED = dict(
    moe_intermediate_size=136, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=264
)
# Each has the name of an expert's tensor as it is published.
BLOCKS = {
    "deepseek_v3": (
        transformers.DeepseekV3Config(
            **WIDE, intermediate_size=264, moe_intermediate_size=136, n_routed_experts=4,
            num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=144,
            kv_lora_rank=136, qk_rope_head_dim=8, qk_nope_head_dim=72, v_head_dim=80, rope_parameters=YARN,
        ),
        "model.layers.1.mlp.experts.3.down_proj.weight",
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config(
            **WIDE | dict(head_dim=72), intermediate_size=136, num_local_experts=4, num_experts_per_tok=2,
        ),
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig(
            **WIDE_STATES, **WIDE_ROUTED, intermediate_size=264, mlp_only_layers=[0]
        ),
        "model.layers.1.mlp.experts.3.down_proj.weight",
    ),
    "qwen3_5_moe_text": (
        transformers.Qwen3_5MoeTextConfig(**WIDE_STATES, **WIDE_ROUTED),
        "model.layers.1.mlp.experts.3.down_proj.weight",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=BLOCKS)
def blocks(request, tmp_path_factory):
    """A folder as the models were published, in FP8, and one with the floats that it stands for.

    Few sizes are multiples of a block's. Both have as many layers more, which predict further tokens, as the
    family may have: DeepSeek V3 one, MiniMax M2 three; Qwen's have names of their own.
    """
    folder = tmp_path_factory.mktemp("blocks")
    theirs_config, expert = BLOCKS[request.param]
    reference = random_reference(theirs_config)
    reference.save_pretrained(folder / "floats")
    shutil.copytree(folder / "floats", folder / "fp8")
    floats, theirs = load_file(folder / "floats" / "model.safetensors"), {}
    assert expert in floats
    last = {name: x for name, x in floats.items() if name.startswith("model.layers.1.")}
    layers = [f"model.layers.{i}." for i in range(2, 5 if request.param == "minimax_m2" else 3)]
    for extra in ["mtp.layers.0."] if "qwen" in request.param else layers:
        floats |= {name.replace("model.layers.1.", extra): x.clone() for name, x in last.items()}
        floats[f"{extra}eh_proj.weight"] = torch.zeros(160, 320)
    for name, x in floats.items():
        theirs[name] = x
        if re.search(r"(_proj|_with_mqa|\.w[123]|_proj_(qkvz?|z))\.weight$", name):
            rows, columns = (torch.arange(n) // BLOCK for n in x.shape)
            scale = 0.001 + 0.01 * torch.rand(rows[-1] + 1, columns[-1] + 1)
            if "qwen" in request.param:
                scale = scale.bfloat16()
            step = scale[rows][:, columns]
            theirs[name] = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn)
            theirs[name + "_scale_inv"] = scale
            floats[name] = theirs[name].float() * step
    save_file(floats, folder / "floats" / "model.safetensors")
    save_file(theirs, folder / "fp8" / "model.safetensors")
    config = json.loads((folder / "fp8" / "config.json").read_text())
    published = PUBLISHED[request.param].get("quantization_config", QWEN_FP8)
    config["quantization_config"] = published
    if request.param == "deepseek_v3":
        config["quantization_config"] = config["quantization_config"] | dict(scale_fmt="ue8m0")  # of V3.1
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    return folder / "fp8", folder / "floats"


@pytest.mark.parametrize("format", [None, INT8, deep(PerGroup(128)), deep(FP8)])
def test_fp8_blocks_of_single_experts(format, blocks, tmp_path):
    """Loaded and converted to each format as the floats are that they stand for."""
    theirs, floats = blocks
    same_weights(theirs, floats, format=format)
    convert(str(theirs), str(tmp_path / "converted"), format=format, dtype="float32")
    same_weights(tmp_path / "converted", floats, format=format)


ROUTED_EXPERTS = r"\.experts\.\d+\."
PROJECTIONS = r"_(attn|expert)\.\w+_proj(_qkv|_z)?\.|" + ROUTED_EXPERTS


@pytest.mark.parametrize(
    ("form", "matrices"),
    [("gptq, some weights", ROUTED_EXPERTS), ("awq", PROJECTIONS), deep("w4a16, bfloat16", PROJECTIONS)],
)
def test_int4_of_qwen3_5(form, matrices, tmp_path):
    """With the names of a model that reads images: the experts alone, as the publisher has it, and more."""
    text = CONFIGS["qwen3.5-moe"].to_dict() | dict(hidden_size=64, linear_value_head_dim=16)
    text |= dict(moe_intermediate_size=32, shared_expert_intermediate_size=64)
    reference = random_reference(multimodal("qwen3.5-moe", text))
    for folder in ("floats", "int4"):
        reference.save_pretrained(tmp_path / folder)
    floats, theirs = load_file(tmp_path / "floats" / "model.safetensors"), {}
    (config, make), rng = QUANTIZED[form], np.random.default_rng(7)
    for name, x in floats.items():
        if re.search(matrices, name):
            parts, meant = make(x.numpy(), rng)
            floats[name] = torch.from_numpy(np.ascontiguousarray(meant))
            theirs |= {name.removesuffix("weight") + end: np.ascontiguousarray(y) for end, y in parts.items()}
        else:
            theirs[name] = x.numpy()
    found = {name.split(".")[-2] for name in theirs.keys() - floats.keys()}
    projections = {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    experts = {"gate_proj", "up_proj", "down_proj"}
    assert found == experts | (projections if matrices == PROJECTIONS else set())
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    save_arrays(theirs, tmp_path / "int4" / "model.safetensors")
    content = json.loads((tmp_path / "int4" / "config.json").read_text()) | dict(quantization_config=config)
    (tmp_path / "int4" / "config.json").write_text(json.dumps(content))
    same_weights(tmp_path / "floats", tmp_path / "int4")


NEW_ROPE = dict(full_attention={"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6})
NEW_ROPE |= dict(sliding_attention={"rope_type": "default", "rope_theta": 2e4})
OLD_ROPE = dict(rope_theta=1e6, rope_local_base_freq=2e4)


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_parameters=NEW_ROPE),
        dict(rope_parameters=dict(full_attention=NEW_ROPE["full_attention"])),
        dict(rope_parameters=dict(sliding_attention=NEW_ROPE["sliding_attention"])),
        OLD_ROPE | dict(rope_scaling={"rope_type": "linear", "factor": 8.0}),
        OLD_ROPE | dict(rope_scaling=None),
        dict(rope_scaling={"type": "linear", "factor": 4.0}),
        {},
    ],
)
def test_ropes_of_gemma3(rope):
    """In transformers 5's form and the one before, whole and in part. The 1B model has no rope_scaling."""
    same_ropes("gemma3_text", rope)


OLMO3_YARN = PUBLISHED["olmo3"]["rope_scaling"] | {"rope_theta": 1e6, "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_theta=1e6),
        dict(rope_theta=1e6, rope_scaling=PUBLISHED["olmo3"]["rope_scaling"]),
        dict(rope_parameters=dict(full_attention=OLMO3_YARN)),
        dict(rope_parameters=NEW_ROPE),
        dict(rope_parameters=dict(sliding_attention=NEW_ROPE["sliding_attention"]), rope_theta=1e6),
        {},
    ],
)
def test_ropes_of_olmo3(rope):
    """A rope_theta beside the objects of the two types is not of layers with a window, as in transformers."""
    same_ropes("olmo3", rope)


def same_ropes(name: str, rope: dict) -> None:
    """The published model with these fields has the two RoPEs that transformers gives it."""
    others = {k: v for k, v in PUBLISHED[name].items() if "rope" not in k and k != "layer_types"}
    fields = others | dict(num_hidden_layers=6) | copy.deepcopy(rope)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(fields))
    theirs, layers = config.rope_parameters, read_config(fields).layers
    types = ["full_attention" if x.mask == model.Full() else "sliding_attention" for x in layers]
    assert types == config.layer_types
    full = next(layer for layer in layers if layer.mask == model.Full())
    for kind, name in ((layers[0], "sliding_attention"), (full, "full_attention")):
        expected = theirs[name]
        assert kind.rope.theta == expected["rope_theta"]
        assert getattr(kind.rope.scaling, "factor", 1.0) == expected.get("factor", 1.0)
        assert kind.rope.magnitude == expected.get("attention_factor", 1.0)


def multimodal(name: str, text: dict | None = None) -> transformers.PreTrainedConfig:
    """A multimodal model around a language model. text: its fields, if they are not those in CONFIGS."""
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=16, patch_size=8)
    text = text or CONFIGS[name].to_dict()
    if name == "gemma3":
        text |= dict(final_logit_softcapping=None)  # transformers ignores it here
        return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    if name in ("qwen3.5", "qwen3.5-moe"):
        vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=48)
        kind = transformers.Qwen3_5Config if name == "qwen3.5" else transformers.Qwen3_5MoeConfig
        return kind(text_config=text, vision_config=vision)
    if name == "deepseek-v3":
        vision |= dict(pos_emb_height=2, pos_emb_width=2)
        return transformers.Kimi_K25Config(
            text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False
        )
    vision |= dict(model_type="pixtral", head_dim=8)
    return transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "ministral3", "deepseek-v3", "qwen3.5", "qwen3.5-moe"])
def test_language_model_of_multimodal_models(name, tmp_path):
    """Its text part alone, as transformers computes it where there is no image.

    The tensors have the names with which transformers saves them, and those that it has in memory.
    """
    reference = random_reference(multimodal(name))
    reference.save_pretrained(tmp_path / "saved")
    checkpoint = open_checkpoint(tmp_path / "saved")
    weights = load(checkpoint, mesh_of(checkpoint.config), "float32", format=None)
    tokens = np.random.default_rng(6).integers(0, 500, 20)
    check_forward(reference, weights, checkpoint.config, tokens.tolist())
    shutil.copytree(tmp_path / "saved", tmp_path / "memory")
    tensors = {key: x.clone() for key, x in reference.state_dict().items()}
    assert any(key.startswith("model.language_model.layers.") for key in tensors)
    if name.startswith("qwen3.5"):  # published files have layers that predict further tokens, too
        unused = "mtp.layers.0.mlp.gate_proj", "model.mtp.fc"
        tensors |= {f"{x}.weight": torch.zeros(64, 48) for x in unused}
    save_file(tensors, tmp_path / "memory" / "model.safetensors")
    same_weights(tmp_path / "saved", tmp_path / "memory")


@pytest.mark.parametrize("name", [x if x in ("gpt2", "glm4-moe-lite") else deep(x) for x in FAMILIES])
def test_converted_int8(name, saved, tmp_path):
    """What a converted int8 folder holds is what int8 made in memory is."""
    folder, _ = saved(name)
    convert(str(folder), str(tmp_path / "int8"), format=INT8)
    same_weights(folder, tmp_path / "int8", format=INT8)


@pytest.mark.parametrize(
    ("name", "format", "mesh"),
    [
        ("qwen3.5", None, "tp8"),
        ("qwen3-next", INT8, "dp2-ep2-tp2"),
        deep("qwen3.5", INT8, "tp8"),
        deep("qwen3.5", PerGroup(128), "tp8"),
        deep("qwen3-next", PerGroup(128), "dp2-ep2-tp2"),
        deep("qwen3.5-moe", FP8, "tp8"),
    ],
)
def test_converted_states(name, format, mesh, saved, tmp_path, monkeypatch):
    """In slices. Loaded by devices that divide key heads, or their columns; some have no value head."""
    folder, _ = saved(name)
    monkeypatch.setattr("checkpoints.layouts.SLICE_BYTES", 1000)
    convert(str(folder), str(tmp_path / "converted"), format=format)
    verify(str(tmp_path / "converted"), str(folder))
    same_weights(folder, tmp_path / "converted", format=format, mesh=mesh)
