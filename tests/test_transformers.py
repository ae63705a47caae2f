"""The whole program against transformers, on random weights in float32."""

import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import CHECKPOINTS, FAST, engine_of, mesh_of, with_short_rings

import main
import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from convert_checkpoint import convert
from families.registry import read_config
from serving import chunks
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Request

deep = partial(pytest.param, marks=pytest.mark.deep)
SIZES = dict(
    vocab_size=512, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
NO_SCALING = dict(rope_type="default", rope_theta=5e5)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
# Scout's RoPE has no band of frequencies to blend: computed carelessly, that is 0 / 0.
SCOUT_ROPE = LLAMA3_ROPE | dict(factor=16.0, high_freq_factor=1.0)
# Of gpt-oss and of DeepSeek. Prompts go beyond the original length.
YARN_ROPE = dict(
    rope_type="yarn", rope_theta=150.0, factor=8.0, beta_fast=4.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32, beta_fast=4.0,
    beta_slow=0.02, mscale=0.7, mscale_all_dim=1.3,
)  # fmt: skip
LLAMA4 = SIZES | dict(
    num_hidden_layers=2, no_rope_layers=[1, 0], intermediate_size=32, intermediate_size_mlp=64,
    num_local_experts=4, attention_chunk_size=8, floor_scale=4, attn_scale=0.1, attn_temperature_tuning=True,
)  # fmt: skip
GEMMA4 = SIZES | dict(
    num_hidden_layers=4, intermediate_size=64, sliding_window=9, global_head_dim=16,
    layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=30.0,
)  # fmt: skip
# Layers with a state, whose keys and values have unlike widths, and whose value heads share keys. The first
# outputs of a state may be small, and their norm enlarges rounding: with an eps of 1e-6 it was 1.3e-5 once.
QWEN3_NEXT = SIZES | dict(
    rms_norm_eps=1e-3,
    head_dim=16,
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
)
QWEN3_NEXT_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
)
QUARTER_ROPE = NO_SCALING | dict(partial_rotary_factor=0.25)
CONFIGS = {
    "llama3-scaled-tied": transformers.LlamaConfig(
        **SIZES, num_hidden_layers=2, intermediate_size=64, rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "scout": transformers.Llama4TextConfig(
        **LLAMA4, num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
        rope_parameters=SCOUT_ROPE,
    ),
    "maverick": transformers.Llama4TextConfig(
        **LLAMA4, num_experts_per_tok=2, interleave_moe_layer_step=2, use_qk_norm=False,
        rope_parameters=NO_SCALING,
    ),
    "muse-glimmer": transformers.MuseGlimmerConfig(
        text_config=SIZES | dict(
            num_attention_heads=8, num_hidden_layers=4, intermediate_size=64, sliding_window=9,
            layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters=NO_SCALING,
            layer_rope_theta=[5e5, 0, 0, 5e5], post_norm_eps=0.1, qk_scale_factor=2.0,
            output_multiplier=3.0, final_logit_softcapping=8.0,
        ),
        vision_config=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            pos_emb_height=2, pos_emb_width=2,
        ),
        out_hidden_size=64, projector_hidden_size=16,
    ),
    "muse-spark": transformers.MuseSparkConfig(
        text_config=SIZES | dict(
            num_attention_heads=8, num_hidden_layers=3, intermediate_size=64, sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "sparse", "dense"], rope_parameters=NO_SCALING,
            layer_rope_theta=[5e5, 0, 5e5], post_norm_eps=1.0, qk_scale_factor=1.5, output_multiplier=3.0,
            final_logit_softcapping=30.0, moe_hidden_size=24, moe_intermediate_size=16, num_local_experts=8,
            num_experts_per_tok=3, routed_scaling_factor=1.5, residual_gate_temperature=0.7,
        ),
        vision_config=dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        ),
        audio_config=dict(
            patch_sizes=(2, 2), hidden_sizes=(8, 8), depths=(1, 1), num_hidden_layers=2, out_hidden_size=48,
        ),
        out_hidden_size=128, projector_hidden_size=32,
    ),
    "qwen3": transformers.Qwen3Config(
        **SIZES, num_hidden_layers=2, intermediate_size=64, rope_parameters=NO_SCALING
    ),
    "qwen2": transformers.Qwen2Config(
        **SIZES, num_hidden_layers=2, intermediate_size=64, rope_parameters=NO_SCALING,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=NO_SCALING,
    ),
    "seed-oss": transformers.SeedOssConfig(
        **SIZES | dict(head_dim=16), num_hidden_layers=2, intermediate_size=64, rope_parameters=NO_SCALING
    ),
    "smollm3": transformers.SmolLM3Config(
        **SIZES, num_hidden_layers=3, intermediate_size=64, no_rope_layers=[0, 1, 0],
        use_sliding_window=True, sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "full_attention"], rope_parameters=NO_SCALING,
    ),
    "openllama": transformers.LlamaConfig(
        **SIZES | dict(num_key_value_heads=6), num_hidden_layers=2, intermediate_size=64, rms_norm_eps=1e-6,
        rope_parameters=NO_SCALING,
    ),
    "mistral": transformers.MistralConfig(
        **SIZES, num_hidden_layers=2, intermediate_size=64, sliding_window=9, rope_parameters=NO_SCALING
    ),
    "ministral3": transformers.Ministral3Config(
        **SIZES, num_hidden_layers=2, intermediate_size=64, sliding_window=29,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
        ),
    ),
    "mixtral": transformers.MixtralConfig(
        **SIZES, num_hidden_layers=2, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters=NO_SCALING,
    ),
    "gemma": transformers.GemmaConfig(
        **SIZES | dict(num_key_value_heads=1), num_hidden_layers=2, intermediate_size=64,
        rope_parameters=NO_SCALING,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=3, intermediate_size=64, sliding_window=9, query_pre_attn_scalar=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        ),
        final_logit_softcapping=30.0,
    ),
    "gemma4": transformers.Gemma4TextConfig(
        **GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    # Layers 4 to 7 attend to the keys and values of layers 2 and 3.
    "gemma4-e": transformers.Gemma4TextConfig(
        **GEMMA4 | dict(num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4),
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=512, num_kv_shared_layers=4,
        use_double_wide_mlp=True,
    ),
    "gemma4-unified": transformers.Gemma4UnifiedTextConfig(
        **GEMMA4 | dict(num_key_value_heads=6), num_global_key_value_heads=2
    ),
    "gemma4-moe": transformers.Gemma4TextConfig(
        **GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1,
        enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=16,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=512, n_embd=48, n_layer=2, n_head=6, n_positions=256, bos_token_id=0, eos_token_id=None,
    ),
    "gpt-oss": transformers.GptOssConfig(
        **SIZES, num_hidden_layers=4, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=9, swiglu_limit=1.0, rope_parameters=YARN_ROPE,
    ),
    "glm": transformers.GlmConfig(
        **SIZES, num_hidden_layers=2, intermediate_size=64,
        rope_parameters=NO_SCALING | dict(partial_rotary_factor=0.5),
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **SIZES, num_hidden_layers=3, intermediate_size=64, moe_intermediate_size=24, n_routed_experts=4,
        num_experts_per_tok=2, attention_bias=True, use_qk_norm=True, routed_scaling_factor=2.5,
        rope_parameters=NO_SCALING | dict(partial_rotary_factor=0.5),
    ),
    "glm4-moe-lite": transformers.Glm4MoeLiteConfig(
        **SIZES | dict(num_key_value_heads=6, head_dim=8), num_hidden_layers=3, intermediate_size=64,
        moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, q_lora_rank=20, kv_lora_rank=24,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=16, rope_parameters=NO_SCALING,
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **SIZES | dict(num_key_value_heads=6), num_hidden_layers=3, intermediate_size=64,
        moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        first_k_dense_replace=1, q_lora_rank=20, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12,
        v_head_dim=16, rope_parameters=YARN,
    ),
    "olmo3": transformers.Olmo3Config(
        **SIZES, num_hidden_layers=4, intermediate_size=64, sliding_window=9, rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=YARN | dict(attention_factor=1.3),
        ),
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **SIZES, num_hidden_layers=2, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        rotary_dim=4, rope_parameters=dict(NO_SCALING),  # it is changed
    ),
    "qwen3-next": transformers.Qwen3NextConfig(
        **QWEN3_NEXT, intermediate_size=64, mlp_only_layers=[0], norm_topk_prob=True, **QWEN3_NEXT_EXPERTS,
        rope_parameters=dict(QUARTER_ROPE),  # it is changed
    ),
    "qwen3.5": transformers.Qwen3_5TextConfig(
        **QWEN3_NEXT | dict(linear_num_value_heads=6), intermediate_size=64,
        rope_parameters=QUARTER_ROPE | dict(mrope_section=[1, 1, 0], mrope_interleaved=True),
    ),
    "qwen3.5-moe": transformers.Qwen3_5MoeTextConfig(
        **QWEN3_NEXT | dict(layer_types=["linear_attention", "full_attention"] * 2), **QWEN3_NEXT_EXPERTS,
        rope_parameters=dict(QUARTER_ROPE),
    ),
}  # fmt: skip
NEW = 20  # tokens, so that decoding crosses at least two edges of the chunks of 8
LENGTHS = (1, 7, 8, 9, 16, 23, 40)
# Two float32 implementations differ by rounding, which grows with the numbers that are added up. Differences
# are therefore measured in units of the largest log-probability at their position, 13 for Llama and 125 for
# Gemma: 2e-6 was seen (every family, jax 0.10.2 and 0.12.0), and wrong semantics give 1e-3 or more.
TOLERANCE = 1e-5


def reference_model(name: str):
    return random_reference(CONFIGS[name])


def random_reference(config: transformers.PreTrainedConfig):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    multimodal = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    return with_random_weights(auto.from_config(config, attn_implementation="eager").eval())


def with_random_weights(reference):
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            # Larger than the usual 0.02, so that attention and routing are far from uniform; norms around 1.
            is_norm = parameter.ndim == 1
            if parameter_name.endswith("A_log"):  # the default forgets in a token or two
                parameter.copy_(-3 + torch.randn_like(parameter))
                continue
            parameter.copy_(
                is_norm
                + (0.2 if is_norm or "embed" not in parameter_name else 1) * torch.randn_like(parameter)
            )
        for buffer_name, buffer in reference.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    return reference


def reference_logprobs(reference, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([tokens]), use_cache=False).logits[0], -1).numpy()


def assert_close(logprobs, expected: np.ndarray, sizes: np.ndarray) -> None:
    """sizes: the largest log-probability (absolute) of each position."""
    np.testing.assert_allclose(logprobs / sizes, expected / sizes, rtol=0, atol=TOLERANCE)


def check(reference, prompt, tokens, prompt_logprobs, logprobs):
    """Compare with transformers' forward of prompt and answer, without a cache.

    Each token of the answer must be the most probable one there: transformers would give the same answer.
    Of a prompt that was not scored only the answer is compared.
    """
    logp = reference_logprobs(reference, prompt + tokens)
    expected = logp[np.arange(len(prompt + tokens) - 1), (prompt + tokens)[1:]]
    ours = [*(prompt_logprobs or expected[: len(prompt) - 1]), *logprobs]
    assert_close(ours, expected, np.abs(logp[:-1]).max(-1))
    assert tokens == logp[len(prompt) - 1 : -1].argmax(-1).tolist()


def check_forward(reference, weights, cfg: model.Config, tokens: list[int]) -> None:
    """Compare all positions at once, without a cache."""
    (logits,) = model.forward(np.array([tokens]), weights, cfg=cfg, mesh=mesh_of(cfg))
    expected = reference_logprobs(reference, tokens)
    assert_close(jax.nn.log_softmax(logits), expected, np.abs(expected).max(-1, keepdims=True))


def answer_prompts(saved, make_mesh, lengths=LENGTHS, draft=None, head: int = 0) -> Engine:
    """Answer prompts in 4 rows, and compare with transformers. head: tokens with which all of them begin.

    A prompt is prefilled in several chunks, of 12 tokens, which end in the middle of Llama 4's.
    """
    folder, reference = saved
    checkpoint = open_checkpoint(folder)
    cfg = with_short_rings(checkpoint.config)
    mesh = make_mesh(cfg)
    weights = load(checkpoint, mesh, "float32", format=None)
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, cfg.V, head).tolist()
    prompts = [beginning + rng.integers(0, cfg.V, n).tolist() for n in lengths]
    # A prompt that is scored is read from its first token on.
    requests = [Request(prompt, NEW, stop=frozenset(), score=not head) for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CPU_SHAPES", ((1, 12),))
        engine = engine_of(Programs(weights, cfg, mesh, 4, 96, "float32", draft), requests)
    answers = [engine.add(request) for request in requests]
    while engine.busy:
        engine.advance()
    for answer in answers:
        prompt = answer.request.prompt
        assert len(answer.tokens) == NEW
        assert len(answer.prompt_logprobs) == (0 if head else len(prompt) - 1)
        check(reference, prompt, answer.tokens, answer.prompt_logprobs, answer.logprobs)
    return engine


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logprobs_in_python(name, saved):
    """Each of unlike prompts, more than there are rows, is answered as transformers answers it alone."""
    answer_prompts(saved(name), mesh_of)


@pytest.mark.parametrize("name", ["llama3-scaled-tied", *map(deep, ("gpt2", "gpt-oss"))])
def test_command_line(name, saved, tmp_path):
    """The same through the shell, from a converted folder."""
    folder, reference = saved(name)
    transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny-llama3").save_pretrained(folder)
    convert(str(folder), str(tmp_path / "converted"))
    prompts = ["T", "Tell me", "Tell me your name, and the weather. How much is 17 + 25?"]
    command = [sys.executable, main.__file__, "--checkpoint", tmp_path / "converted", "--json", "--logprobs"]
    command += ["--max-new-tokens", str(NEW), "--dtype", "float32", "--temperature", "0"]
    command += ["--ignore-eos"]  # the tokenizer has an end token, which random weights may choose
    command += ["--no-chat-template", *(x for prompt in prompts for x in ("--prompt", prompt))]
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    responses = json.loads(done.stdout)["responses"]
    assert [r["prompt"] for r in responses] == prompts
    for r in responses:
        assert r["finish_reason"] == "length" and len(r["tokens"]) == NEW and r["prompt_logprobs"][0] is None
        check(reference, r["prompt_tokens"], r["tokens"], r["prompt_logprobs"][1:], r["logprobs"])


@pytest.mark.parametrize("name", ["openllama", "gpt-oss", "gemma3", "muse-glimmer", "olmo3"])
def test_where_a_norm_rounds(name):
    """The last norm in bfloat16: its quotient is rounded before the product with the weight, or not."""
    theirs = reference_model(name).to(torch.bfloat16).get_decoder().norm
    ours = read_config(json.loads(CONFIGS[name].to_json_string())).norm
    x = torch.randn(100, theirs.weight.numel(), generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        expected = theirs(x).float().numpy()
    found = ours(*(jnp.asarray(array.detach().float(), jnp.bfloat16) for array in (x, theirs.weight)))
    # The last bit of a float32 may decide how one number in thousands is rounded; one rounding more or
    # less changes every fourth number.
    assert np.mean(np.float32(found) != expected) < 0.001
