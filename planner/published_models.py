"""The published models by name: the sizes that their config.json files state."""

import os
import pathlib

from checkpoints.folders import read_json
from families.registry import read_config
from feedback.errors import UserError, did_you_mean
from model import Config

TIED = dict(tie_word_embeddings=True)
LLAMA4 = dict(
    model_type="llama4_text", vocab_size=202048, rms_norm_eps=1e-5, hidden_size=5120, num_attention_heads=40,
    num_key_value_heads=8, head_dim=128, num_hidden_layers=48, intermediate_size=8192,
    intermediate_size_mlp=16384, num_experts_per_tok=1, attention_chunk_size=8192, attn_temperature_tuning=4,
)  # fmt: skip


def _dense(kind: str, width: int, heads: tuple[int, int], depth: int, F: int, V: int, **other) -> dict:
    """heads: the number of query heads, and of key/value heads."""
    return dict(
        model_type=kind, hidden_size=width, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        num_hidden_layers=depth, intermediate_size=F, vocab_size=V, rms_norm_eps=1e-6,
        max_position_embeddings=32768,
    ) | other  # fmt: skip


def _llama3(width: int, heads: int, depth: int, F: int, **other) -> dict:
    longest = dict(rms_norm_eps=1e-5, max_position_embeddings=131072)
    return _dense("llama", width, (heads, 8), depth, F, 128256, **longest | other)


def _openllama(width: int, heads: int, depth: int, F: int) -> dict:
    return _dense("llama", width, (heads, heads), depth, F, 32000, max_position_embeddings=2048)


def _smollm2(width: int, heads: tuple[int, int], depth: int, F: int) -> dict:
    return _dense("llama", width, heads, depth, F, 49152, max_position_embeddings=8192, **TIED)


def _qwen2(width: int, heads: tuple[int, int], depth: int, F: int, V=152064, **other) -> dict:
    return _dense("qwen2", width, heads, depth, F, V, **other)


def _qwen3(width: int, heads: tuple[int, int], depth: int, F: int, **other) -> dict:
    return _dense("qwen3", width, heads, depth, F, 151936, head_dim=128, **other)


def _qwen3_5(width: int, heads: tuple[int, int], depth: int, states: int, **other) -> dict:
    """states: how many matrices are the state of a layer without attention."""
    return dict(
        model_type="qwen3_5_text", hidden_size=width, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=256, num_hidden_layers=depth, vocab_size=248320,
        rms_norm_eps=1e-6, rope_theta=1e7, max_position_embeddings=262144, linear_num_key_heads=16,
        linear_num_value_heads=states, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ) | other  # fmt: skip


def _qwen3_5_moe(width: int, heads: tuple[int, int], depth: int, states: int, M: int, **other) -> dict:
    experts = dict(model_type="qwen3_5_moe_text", moe_intermediate_size=M, shared_expert_intermediate_size=M)
    return _qwen3_5(width, heads, depth, states, **experts | other)


def _gemma3(width: int, heads: tuple[int, int], depth: int, F: int, **other) -> dict:
    scaling = dict(rope_type="linear", factor=8.0)
    longest = dict(max_position_embeddings=131072, sliding_window=1024, rope_scaling=scaling, head_dim=256)
    return _dense("gemma3_text", width, heads, depth, F, 262208, **longest | other)


def _ministral3(width: int, depth: int, F: int, **other) -> dict:
    sizes = dict(rms_norm_eps=1e-5, head_dim=128, max_position_embeddings=262144)
    return _dense("ministral3", width, (32, 8), depth, F, 131072, **sizes | other)


def _olmo3(width: int, heads: tuple[int, int], depth: int, F: int) -> dict:
    scaling = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192)
    longest = dict(max_position_embeddings=65536, sliding_window=4096, rope_scaling=scaling)
    return _dense("olmo3", width, heads, depth, F, 100278, **longest)


def _gemma4(width: int, heads: tuple[int, int], depth: int, F: int, **other) -> dict:
    longest = dict(max_position_embeddings=131072, sliding_window=1024, final_logit_softcapping=30.0)
    own = longest | dict(head_dim=256, global_head_dim=512, hidden_size_per_layer_input=0)
    return _dense("gemma4_text", width, heads, depth, F, 262144, **own | other)


def _gemma4_e(width: int, heads: tuple[int, int], depth: int, F: int, every: int, **other) -> dict:
    types = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(depth)]
    own = dict(layer_types=types, sliding_window=512, hidden_size_per_layer_input=256)
    return _gemma4(width, heads, depth, F, **own, **other)


def _gpt2(width: int, heads: int, depth: int) -> dict:
    sizes = dict(n_embd=width, n_head=heads, n_layer=depth, n_positions=1024, vocab_size=50257)
    return dict(model_type="gpt2", layer_norm_epsilon=1e-5, **sizes)


GEMMA = dict(head_dim=256, max_position_embeddings=8192)
QWEN3_MOE = dict(model_type="qwen3_moe", norm_topk_prob=True, num_experts=128, num_experts_per_tok=8)
EXPERTS_256 = dict(num_experts=256, num_experts_per_tok=8)
EXPERTS_512 = dict(num_experts=512, num_experts_per_tok=10)
GPT_OSS = dict(
    rms_norm_eps=1e-5, head_dim=64, num_experts_per_tok=4, max_position_embeddings=131072,
)  # fmt: skip
GLM4_MOE = dict(
    rms_norm_eps=1e-5, head_dim=128, attention_bias=True, num_experts_per_tok=8, rope_theta=1e6,
    max_position_embeddings=131072,
)  # fmt: skip
MIXTRAL = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
DEEPSEEK = dict(
    moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
    routed_scaling_factor=2.5, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840,
)  # fmt: skip
DEEPSEEK["rope_scaling"] = dict(
    type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
    mscale_all_dim=1.0,
)  # fmt: skip
KIMI_K2 = dict(
    n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827, first_k_dense_replace=1,
    rope_theta=50000.0, max_position_embeddings=131072,
    rope_scaling=DEEPSEEK["rope_scaling"] | dict(factor=32.0, beta_fast=1.0),
)  # fmt: skip
KIMI_K25 = dict(
    rms_norm_eps=1e-5, max_position_embeddings=262144,
    rope_scaling=DEEPSEEK["rope_scaling"] | dict(factor=64.0),
)  # fmt: skip
MODELS = {
    "llama3.1-8b": _llama3(4096, 32, 32, 14336),
    "llama3.1-70b": _llama3(8192, 64, 80, 28672),
    "llama3.1-405b": _llama3(16384, 128, 126, 53248),
    "llama3.2-1b": _llama3(2048, 32, 16, 8192, head_dim=64, **TIED),
    "llama3.2-3b": _llama3(3072, 24, 28, 8192, **TIED),
    "llama4-scout": LLAMA4 | dict(num_local_experts=16, max_position_embeddings=10485760),
    "llama4-maverick": LLAMA4 | dict(
        num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False, max_position_embeddings=1048576
    ),
    "muse-glimmer-30b": _dense(
        "muse_glimmer_text", 6656, (32, 2), 52, 19968, 202048, head_dim=128, rms_norm_eps=1e-5,
        sliding_window=2048, rope_theta=5e5, max_position_embeddings=131072,
    ),
    "muse-spark-816b": dict(model_type="muse_spark_text"),  # its file leaves all sizes out that it may
    "smollm2-135m": _smollm2(576, (9, 3), 30, 1536),
    "smollm2-360m": _smollm2(960, (15, 5), 32, 2560),
    "smollm2-1.7b": _smollm2(2048, (32, 32), 24, 8192),
    "smollm3-3b": _dense(
        "smollm3", 2048, (16, 4), 36, 11008, 128256, rope_theta=5e6, max_position_embeddings=65536, **TIED
    ),
    "openllama-3b": _openllama(3200, 32, 26, 8640),
    "openllama-7b": _openllama(4096, 32, 32, 11008),
    "openllama-13b": _openllama(5120, 40, 40, 13824),
    "mistral-7b": _dense("mistral", 4096, (32, 8), 32, 14336, 32000, sliding_window=4096),
    "mistral-small-3.1-24b": _dense(
        "mistral", 5120, (32, 8), 40, 32768, 131072, rms_norm_eps=1e-5, head_dim=128, rope_theta=1e9,
        max_position_embeddings=131072,
    ),
    "ministral3-3b": _ministral3(3072, 26, 9216, **TIED),
    "ministral3-8b": _ministral3(4096, 34, 14336),
    "ministral3-14b": _ministral3(5120, 40, 16384),
    "mixtral-8x7b": _dense("mixtral", 4096, (32, 8), 32, 14336, 32000) | MIXTRAL,
    "mixtral-8x22b": _dense("mixtral", 6144, (48, 8), 56, 16384, 32768) | MIXTRAL,
    "gemma-2b": _dense("gemma", 2048, (8, 1), 18, 16384, 256000, **GEMMA),
    "gemma-7b": _dense("gemma", 3072, (16, 16), 28, 24576, 256000, **GEMMA),
    "gemma3-1b": _gemma3(
        1152, (4, 1), 26, 6912, vocab_size=262144, max_position_embeddings=32768, sliding_window=512,
        rope_scaling=None,
    ),
    "gemma3-4b": _gemma3(2560, (8, 4), 34, 10240),
    "gemma3-12b": _gemma3(3840, (16, 8), 48, 15360),
    "gemma3-27b": _gemma3(5376, (32, 16), 62, 21504, head_dim=128, query_pre_attn_scalar=168),
    "gemma4-e2b": _gemma4_e(
        1536, (8, 1), 35, 6144, every=5, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "gemma4-e4b": _gemma4_e(2560, (8, 2), 42, 10240, every=6, num_kv_shared_layers=18),
    "gemma4-31b": _gemma4(
        5376, (32, 16), 60, 21504, attention_k_eq_v=True, num_global_key_value_heads=4
    ),
    "gemma4-12b": _gemma4(
        3840, (16, 8), 48, 15360, model_type="gemma4_unified_text", attention_k_eq_v=True,
        num_global_key_value_heads=1, max_position_embeddings=262144,
    ),
    "gemma4-26b-a4b": _gemma4(
        2816, (16, 8), 30, 2112, attention_k_eq_v=True, num_global_key_value_heads=2, enable_moe_block=True,
        num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 16, 24),
    "gpt2-large": _gpt2(1280, 20, 36),
    "gpt2-xl": _gpt2(1600, 25, 48),
    "gpt-oss-20b": _dense("gpt_oss", 2880, (64, 8), 24, 2880, 201088, num_local_experts=32, **GPT_OSS),
    "gpt-oss-120b": _dense("gpt_oss", 2880, (64, 8), 36, 2880, 201088, num_local_experts=128, **GPT_OSS),
    "glm-4-9b": _dense(
        "glm", 4096, (32, 2), 40, 13696, 151552, rms_norm_eps=1.5625e-7, head_dim=128, attention_bias=True,
        max_position_embeddings=131072,
    ),
    "glm-4.5-air": _dense(
        "glm4_moe", 4096, (96, 8), 46, 10944, 151552, moe_intermediate_size=1408, n_routed_experts=128,
        **GLM4_MOE,
    ),
    "glm-4.7": _dense(
        "glm4_moe", 5120, (96, 8), 92, 12288, 151552, moe_intermediate_size=1536, n_routed_experts=160,
        first_k_dense_replace=3, routed_scaling_factor=2.5, use_qk_norm=True,
        **GLM4_MOE | dict(max_position_embeddings=202752),
    ),
    "glm-4.7-flash": _dense(
        "glm4_moe_lite", 2048, (20, 20), 47, 10240, 154880, moe_intermediate_size=1536, n_routed_experts=64,
        num_experts_per_tok=4, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256, max_position_embeddings=202752,
    ),
    "deepseek-v3": _dense("deepseek_v3", 7168, (128, 128), 61, 18432, 129280, **DEEPSEEK),
    "deepseek-r1": _dense("deepseek_v3", 7168, (128, 128), 61, 18432, 129280, **DEEPSEEK),
    "kimi-k2": _dense("kimi_k2", 7168, (64, 64), 61, 18432, 163840, **DEEPSEEK | KIMI_K2),
    "kimi-k2.5": _dense("kimi_k2", 7168, (64, 64), 61, 18432, 163840, **DEEPSEEK | KIMI_K2 | KIMI_K25),
    "seed-oss-36b": _dense(
        "seed_oss", 5120, (80, 8), 64, 27648, 155136, rope_theta=1e7, max_position_embeddings=524288
    ),
    "minimax-m2": _dense(
        "minimax_m2", 3072, (48, 8), 62, 1536, 200064, head_dim=128, num_local_experts=256,
        num_experts_per_tok=8, rotary_dim=64, rope_theta=5e6, max_position_embeddings=196608,
    ),
    "olmo3-7b": _olmo3(4096, (32, 32), 32, 11008),
    "olmo3-32b": _olmo3(5120, (40, 8), 64, 27648),
    "qwen2.5-0.5b": _qwen2(896, (14, 2), 24, 4864, 151936, **TIED),
    "qwen2.5-1.5b": _qwen2(1536, (12, 2), 28, 8960, 151936, **TIED),
    "qwen2.5-3b": _qwen2(2048, (16, 2), 36, 11008, 151936, **TIED),
    "qwen2.5-7b": _qwen2(3584, (28, 4), 28, 18944),
    "qwen2.5-14b": _qwen2(5120, (40, 8), 48, 13824),
    "qwen2.5-32b": _qwen2(5120, (40, 8), 64, 27648),
    "qwen2.5-72b": _qwen2(8192, (64, 8), 80, 29568),
    "qwen3-0.6b": _qwen3(1024, (16, 8), 28, 3072, **TIED),
    "qwen3-1.7b": _qwen3(2048, (16, 8), 28, 6144, **TIED),
    "qwen3-4b": _qwen3(2560, (32, 8), 36, 9728, **TIED),
    "qwen3-8b": _qwen3(4096, (32, 8), 36, 12288),
    "qwen3-14b": _qwen3(5120, (40, 8), 40, 17408),
    "qwen3-32b": _qwen3(5120, (64, 8), 64, 25600),
    "qwen3-30b-a3b": _qwen3(2048, (32, 4), 48, 6144, moe_intermediate_size=768) | QWEN3_MOE,
    "qwen3-235b-a22b": _qwen3(4096, (64, 4), 94, 12288, moe_intermediate_size=1536) | QWEN3_MOE,
    "qwen3-next-80b-a3b": _qwen3_5_moe(
        2048, (16, 2), 48, 32, 512, model_type="qwen3_next", vocab_size=151936, norm_topk_prob=True,
        intermediate_size=5120, **EXPERTS_512,
    ),
    "qwen3.5-0.8b": _qwen3_5(1024, (8, 2), 24, 16, intermediate_size=3584, **TIED),
    "qwen3.5-9b": _qwen3_5(4096, (16, 4), 32, 32, intermediate_size=12288),
    "qwen3.5-27b": _qwen3_5(5120, (24, 4), 64, 48, intermediate_size=17408),
    "qwen3.5-35b-a3b": _qwen3_5_moe(2048, (16, 2), 40, 32, 512, **EXPERTS_256),
    "qwen3.5-397b-a17b": _qwen3_5_moe(4096, (32, 2), 60, 64, 1024, **EXPERTS_512),
}  # fmt: skip


def read_model(name: str) -> Config:
    """A model by its name in MODELS, or from a config.json file or the folder that holds one."""
    file = pathlib.Path(os.path.expanduser(name))
    file = file / "config.json" if file.is_dir() else file
    if name in MODELS:
        return read_config(MODELS[name])
    if not file.is_file():
        known = f"; known names: {', '.join(MODELS)}"
        raise UserError(f"--model {name}: no such model or config.json{did_you_mean(name, MODELS) or known}")
    try:
        return read_config(read_json(file))
    except UserError as e:
        raise UserError(f"--model {name}: {e}") from None
