"""Every family against transformers: on every mesh, in int8, and layer by layer."""

import copy
import dataclasses
import shutil
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import generate, mesh_of, with_short_rings
from safetensors.torch import load_file, save_file
from test_generation import finish
from test_transformers import (
    CONFIGS,
    LENGTHS,
    NEW,
    assert_close,
    check,
    reference_model,
    with_random_weights,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from convert_checkpoint import convert
from families.gpt2 import LearnedPositions, Plain
from families.latent_attention import Latent
from families.registry import read_config
from feedback.errors import UserError
from planner.models import MODELS
from quantize import INT8, Format
from serving import programs
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Request
from serving.speculation import PromptLookup
from sharding.mesh import mesh_shape

FAMILIES = [name for name in CONFIGS if name != "llama3"]  # whose other form has more
deep = partial(pytest.param, marks=pytest.mark.deep)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (folder of a random model of this family, the model)."""

    @cache
    def make(name: str):
        folder, reference = tmp_path_factory.mktemp(name), reference_model(name)
        reference.save_pretrained(folder)
        return folder, reference

    return make


def meshes(name: str) -> list[str]:
    """Those that the family allows."""
    experts = "local_experts" in str(CONFIGS[name]) or "n_routed" in str(CONFIGS[name])
    return ["1", "tp8", *(("dp2-ep2-tp2", "ep4-tp2") if experts else ())]


SHORT = {("mistral", "tp8"), ("glm4-moe-lite", "tp8"), ("mixtral", "ep4-tp2")}
PAIRS = [(name, mesh) for name in FAMILIES for mesh in meshes(name)]


@pytest.mark.parametrize(("name", "mesh"), [x if x in SHORT else deep(*x) for x in PAIRS])
def test_on_a_mesh(name, mesh, saved, monkeypatch):
    """Unlike prompts, past windows and at their edges, more of them than rows, with drafts from the text."""
    monkeypatch.setattr(programs, "WIDTHS", (4, 12))
    folder, reference = saved(name)
    checkpoint = open_checkpoint(folder)
    cfg = with_short_rings(checkpoint.config)
    mesh = mesh_of(cfg, mesh)
    weights = load(checkpoint, mesh, "float32", format=None)
    rng = np.random.default_rng(1)
    requests = [
        Request(rng.integers(0, cfg.V, n).tolist(), NEW, stop=frozenset(), score=True) for n in LENGTHS
    ]
    batch = Engine(Programs(weights, cfg, mesh, 4, 64, "float32", PromptLookup(3)), requests)
    answers = [batch.add(request) for request in requests]
    finish(batch)
    for answer in answers:
        assert len(answer.tokens) == NEW
        check(reference, answer.request.prompt, answer.tokens, answer.prompt_logprobs, answer.logprobs)


def test_meshes_of_all_sizes():
    """Latent attention of 20 heads on 4, 8 and 16 devices: the latent's columns and slots are divided."""
    latent, norm = Latent(20, 768, 512, 192, 64, 256, model.Norm(1e-6)), model.Norm(1e-5)
    layers = (model.LayerKind(latent, model.Gated(8), norm, rope=model.Rope(1e4, 64)),)
    cfg = model.Config(D=8, V=8, layers=layers, norm=norm, max_positions=8)
    for n in (4, 8, 16):
        assert mesh_shape(cfg, tensor=n)["tensor_slots"] == n


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states(name, saved):
    """After the embedding and after each layer, but the last, whose logits others compare."""
    folder, reference = saved(name)
    checkpoint = open_checkpoint(folder)
    cfg = checkpoint.config
    mesh = mesh_of(cfg)
    weights = load(checkpoint, mesh, "float32", format=None)
    tokens = np.random.default_rng(2).integers(0, cfg.V, (1, 37))
    chunk = model.chunk_at(jnp.zeros(1, int), jnp.full(1, 37), 37)
    states = [model.embed(tokens, chunk.positions, weights, cfg=cfg, mesh=mesh)]
    for w, kind in zip(weights.layers[:-1], cfg.layers, strict=False):
        x, _ = model.layers(states[-1], [w], None, chunk, kinds=(kind,), mesh=mesh)
        states.append(x)
    with torch.no_grad():
        found = reference(torch.tensor(tokens), use_cache=False, output_hidden_states=True).hidden_states
    expected = np.stack([x.numpy() for x in found[:-1]])
    # Two float32 implementations of values around 1 to 30.
    np.testing.assert_allclose(np.stack(states), expected, atol=1e-3, rtol=1e-4)


def with_layers(cfg: model.Config, **changes) -> model.Config:
    """The same model with other fields of each LayerKind."""
    layers = tuple(dataclasses.replace(kind, **changes) for kind in cfg.layers)
    return dataclasses.replace(cfg, layers=layers)


def two_ropes(reference, cfg, weights):
    config = copy.deepcopy(reference.config)
    config.rope_parameters = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
    rotary = LlamaRotaryEmbedding(config)

    def rotate_otherwise(layer, arguments, named):
        return arguments, named | dict(position_embeddings=rotary(arguments[0], named["position_ids"]))

    reference.model.layers[1].register_forward_pre_hook(rotate_otherwise, with_kwargs=True)
    first, second = cfg.layers
    rope = dataclasses.replace(second.rope, theta=1e4, scaling=model.LinearScaling(4.0))
    return dataclasses.replace(cfg, layers=(first, dataclasses.replace(second, rope=rope))), weights


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6)


def norms_before_and_after(reference, cfg, weights):
    for layer in reference.model.layers:
        layer.self_attn.register_forward_hook(lambda module, x, y: (normalized(y[0]), *y[1:]))
        layer.mlp.register_forward_hook(lambda module, x, y: normalized(y))
    return with_layers(cfg, post_norm=model.Norm(1e-6, weight=False)), weights


def norms_after(reference, cfg, weights):
    cfg, weights = norms_before_and_after(reference, cfg, weights)
    for layer in reference.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = torch.nn.Identity()
    layers = [dataclasses.replace(w, attention_norm=None, feed_forward_norm=None) for w in weights.layers]
    return with_layers(cfg, norm=None), dataclasses.replace(weights, layers=layers)


def scores_times_a_fifth(reference, cfg, weights):
    for layer in reference.model.layers:
        layer.self_attn.scaling = 0.2
    return with_layers(cfg, attention=dataclasses.replace(cfg.heads, scale=0.2)), weights


def gelu(reference, cfg, weights):
    for layer in reference.model.layers:
        layer.mlp.act_fn = torch.nn.GELU("tanh")
    feed_forward = dataclasses.replace(cfg.layers[0].feed_forward, activation="gelu_tanh")
    return with_layers(cfg, feed_forward=feed_forward), weights


def capped_logits(reference, cfg, weights):
    reference.lm_head.register_forward_hook(lambda module, x, y: 3 * torch.tanh(2 * y / 3))
    return dataclasses.replace(cfg, logit_scale=2.0, logit_softcap=3.0), weights


VARIATIONS = (two_ropes, norms_before_and_after, norms_after, scores_times_a_fifth, gelu, capped_logits)


@pytest.mark.parametrize("vary", VARIATIONS)
def test_variations(vary, tmp_path):
    """What a family can ask for by data alone, each in Llama's layers and in those of transformers."""
    reference = reference_model("openllama")
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    mesh = mesh_of(checkpoint.config)
    weights = load(checkpoint, mesh, "float32", format=None)
    cfg, weights = vary(reference, checkpoint.config, weights)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, cfg.V, n).tolist() for n in (1, 23)]
    for answer in generate(weights, prompts, cfg, mesh, 6, 64, "float32", score=True):
        check(reference, answer.request.prompt, answer.tokens, answer.prompt_logprobs, answer.logprobs)


def test_what_no_kernel_computes():
    with pytest.raises(ValueError, match="experts with activation 'gelu_tanh' are not supported"):
        model.Experts(4, 2, 8, model.Router(), shared=None, activation="gelu_tanh")
    with pytest.raises(ValueError, match="activation 'relu' is not supported \\(silu, gelu_tanh\\)"):
        model.activation("relu")


# As they were published, but for sizes; what has no effect on inference is left out of some.
PUBLISHED = {
    "mistral": dict(
        model_type="mistral", hidden_act="silu", hidden_size=64, intermediate_size=96, num_attention_heads=4,
        max_position_embeddings=32768, num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-5,
        rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16",
        use_cache=True, vocab_size=320,
    ),
    "qwen2": dict(
        model_type="qwen2", hidden_act="silu", hidden_size=64, intermediate_size=96, num_attention_heads=4,
        max_position_embeddings=32768, max_window_layers=28, num_hidden_layers=2, num_key_value_heads=2,
        rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=True,
        use_sliding_window=False, use_mrope=False, vocab_size=320,
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=32, hidden_act="silu",
        hidden_size=64, intermediate_size=96, max_position_embeddings=40960, max_window_layers=48,
        mlp_only_layers=[], moe_intermediate_size=24, norm_topk_prob=True, num_attention_heads=4,
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=2, num_key_value_heads=2,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
        vocab_size=320,
    ),
    "gemma": dict(
        model_type="gemma", attention_bias=False, head_dim=32, hidden_act="gelu", hidden_activation=None,
        hidden_size=64, intermediate_size=96, max_position_embeddings=8192, num_attention_heads=4,
        num_hidden_layers=2, num_key_value_heads=1, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000.0,
        vocab_size=320,
    ),
    # The text_config of gemma-3-4b-it says no more.
    "gemma3_text": dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024,
    ),
    "gpt2": dict(
        model_type="gpt2", activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
        embd_pdrop=0.1, layer_norm_epsilon=1e-5, n_ctx=1024, n_embd=64, n_head=4, n_layer=2, n_positions=1024,
        resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
        summary_type="cls_index", summary_use_proj=True, vocab_size=320,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    ),
    "glm": dict(
        model_type="glm", attention_bias=True, head_dim=32, hidden_act="silu", hidden_size=64,
        intermediate_size=96, max_position_embeddings=131072, num_attention_heads=4, num_hidden_layers=2,
        num_key_value_heads=2, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, rope_theta=10000.0,
        tie_word_embeddings=False, vocab_size=320,
    ),
    "glm4_moe_lite": dict(
        model_type="glm4_moe_lite", attention_bias=False, first_k_dense_replace=1, hidden_act="silu",
        hidden_size=64, intermediate_size=96, kv_lora_rank=48, max_position_embeddings=202752,
        moe_intermediate_size=24, n_group=1, n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True,
        num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=2, num_key_value_heads=4,
        num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=40, qk_nope_head_dim=24,
        qk_rope_head_dim=16, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000,
        routed_scaling_factor=1.8, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
        v_head_dim=32, vocab_size=320,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(name):
    """The same as transformers reads from it, where the two name it alike; and what only we say."""
    fields = PUBLISHED[name]
    cfg = read_config(fields)
    theirs = transformers.AutoConfig.for_model(**fields)
    assert (cfg.D, cfg.V, len(cfg.layers)) == (
        theirs.hidden_size,
        theirs.vocab_size,
        theirs.num_hidden_layers,
    )
    assert cfg.max_positions == theirs.max_position_embeddings
    assert cfg.tied_embeddings == (name in ("qwen2", "gemma", "gemma3_text", "gpt2"))
    windows = dict(mistral=model.Window(4096), gemma3_text=model.Window(1024))
    assert cfg.layers[0].mask == windows.get(name, model.Full())
    kind = cfg.layers[-1]
    experts = isinstance(kind.feed_forward, model.Experts) and kind.feed_forward
    found, expected = {
        "mistral": (kind.attention, model.Heads(2, 2, 16)),
        "qwen2": (kind.attention, model.Heads(2, 2, 16, bias=True)),
        "qwen3_moe": (experts and experts.router, model.Router("softmax", True, "output")),
        "gemma": ((cfg.embedding_scale, cfg.norm), (8, model.Norm(1e-6, offset=1))),
        "gemma3_text": (
            [kind.rope for kind in cfg.layers[4:6]],
            [model.Rope(1e4, 256), model.Rope(1e6, 256, model.LinearScaling(8.0))],
        ),
        "gpt2": (
            (cfg.position_embedding, kind.feed_forward, kind.rope),
            (LearnedPositions(1024), Plain(256), None),
        ),
        "glm": (kind.rope, model.Rope(10000, 16, interleaved=True)),
        "glm4_moe_lite": (
            (kind.attention, experts and experts.shared, cfg.layers[0].feed_forward),
            (Latent(4, 40, 48, 24, 16, 32, model.Norm(1e-6)), model.Gated(24), model.Gated(96)),
        ),
    }[name]
    assert found == expected


@pytest.mark.parametrize("hidden_size", [60, 2])
def test_no_head_of_the_hidden_size(hidden_size):
    """A latent's heads have widths of their own: hidden_size / num_attention_heads may be odd, or 0."""
    cfg = read_config(PUBLISHED["glm4_moe_lite"] | dict(hidden_size=hidden_size))
    assert cfg.D == hidden_size and cfg.layers[0].attention.R == 16
    with pytest.raises(UserError, match="even head_dim, or part of it, not 15"):
        read_config(PUBLISHED["glm4_moe_lite"] | dict(qk_rope_head_dim=15))


def test_published_sizes():
    """Parameters of the models that the planner knows, as their publishers count them, in 1e9."""
    published = {
        "openllama-3b": 3.43, "openllama-7b": 6.74, "openllama-13b": 13.02, "mistral-7b": 7.24,
        "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "gemma-2b": 2.51, "gemma-7b": 8.54, "gpt2": 0.124,
        "gpt2-medium": 0.355, "gpt2-large": 0.774, "gpt2-xl": 1.558, "glm-4-9b": 9.4, "qwen2.5-0.5b": 0.49,
        "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.7,
        "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0,
        "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235,
    }  # fmt: skip
    for name, billions in published.items():
        infos = jax.tree.leaves(model.weight_infos(read_config(MODELS[name])))
        assert sum(np.prod(info.shape) for info in infos) / 1e9 == pytest.approx(billions, rel=0.02), name


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "glm4-moe-lite"])
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


def same_weights(*folders, format: Format | None = None) -> None:
    checkpoints = [open_checkpoint(str(folder)) for folder in folders]
    weights = [load(x, mesh_of(x.config), "float32", format) for x in checkpoints]
    for ours, theirs in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_layer_that_predicts_the_token_after_the_next(saved, tmp_path):
    """GLM-4.7-Flash's extra layer is not used, by its number; other families have no such layer."""
    for name in ("glm4-moe-lite", "mistral"):
        folder, _ = saved(name)
        other = tmp_path / name
        shutil.copytree(folder, other)
        tensors = load_file(other / "model.safetensors")
        tensors[f"model.layers.{CONFIGS[name].num_hidden_layers}.eh_proj.weight"] = torch.zeros(3)
        save_file(tensors, other / "model.safetensors")
    same_weights(saved("glm4-moe-lite")[0], tmp_path / "glm4-moe-lite")
    with pytest.raises(UserError, match="eh_proj.weight has no place"):
        open_checkpoint(str(tmp_path / "mistral"))


def test_language_model_of_gemma3(tmp_path):
    """A multimodal checkpoint: its text part alone, as transformers computes it where there is no image."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision = dict(**sizes, image_size=16, patch_size=8)
    text = CONFIGS["gemma3"].to_dict() | dict(final_logit_softcapping=None)  # transformers ignores it here
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    reference = with_random_weights(transformers.Gemma3ForConditionalGeneration(config).eval())
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    weights = load(checkpoint, mesh_of(checkpoint.config), "float32", format=None)
    tokens = np.random.default_rng(6).integers(0, 500, (1, 20))
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor(tokens)).logits, -1).numpy()
    found, largest = logprobs(weights, checkpoint.config, tokens), np.abs(expected).max(-1, keepdims=True)
    assert_close(found, expected, largest)


def logprobs(weights, cfg, tokens) -> np.ndarray:
    return jax.nn.log_softmax(model.forward(tokens, weights, cfg=cfg, mesh=mesh_of(cfg)))


@pytest.fixture(scope="module")
def int8_errors(saved):
    """name -> (KL divergence from the float model, share of positions with another best token)."""

    @cache
    def errors(name: str) -> np.ndarray:
        checkpoint = open_checkpoint(saved(name)[0])
        cfg = checkpoint.config
        tokens = np.random.default_rng(3).integers(0, cfg.V, (8, 40))
        weights = (load(checkpoint, mesh_of(cfg), "float32", format) for format in (None, INT8))
        exact, int8 = (logprobs(w, cfg, tokens) for w in weights)
        divergence = np.mean(np.sum(np.exp(exact) * (exact - int8), -1))
        return np.array([divergence, np.mean(np.argmax(exact, -1) != np.argmax(int8, -1))])

    return errors


@pytest.mark.deep
@pytest.mark.parametrize("name", FAMILIES)
def test_int8_is_as_good_as_llamas(name, int8_errors):
    """Random weights have tokens that are nearly as likely as the best: of the Llamas the worst counts."""
    llamas = [int8_errors(llama) for llama in ("llama3-scaled-tied", "scout", "maverick")]
    assert np.all(int8_errors(name) <= 2 * np.max(llamas, 0))


@pytest.mark.parametrize("name", [x if x in ("gpt2", "glm4-moe-lite") else deep(x) for x in FAMILIES])
def test_converted_int8(name, saved, tmp_path):
    """What a converted int8 folder holds is what int8 made in memory is."""
    folder, _ = saved(name)
    convert(str(folder), str(tmp_path / "int8"), format=INT8)
    same_weights(folder, tmp_path / "int8", format=INT8)


def test_recomputation(saved):
    """forward(remat=True): the same derivative, of which the layers keep less."""
    folder, _ = saved("mistral")
    checkpoint = open_checkpoint(folder)
    cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
    weights = load(checkpoint, mesh, "float32", format=None)
    tokens = np.random.default_rng(4).integers(0, cfg.V, (2, 64))

    def loss(weights, remat: bool):
        logits = model.forward(tokens, weights, cfg=cfg, mesh=mesh, remat=remat)
        return jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    programs = [
        jax.jit(jax.grad(partial(loss, remat=remat))).lower(weights).compile() for remat in (False, True)
    ]
    for ours, theirs in zip(*(jax.tree.leaves(run(weights)) for run in programs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    kept, less = (run.memory_analysis().temp_size_in_bytes for run in programs)
    assert less < kept
