"""Every family against transformers: on every mesh, in stages, in int8, and layer by layer."""

import copy
import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import engine_of, generate, mesh_of, with_short_rings
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from test_generation import finish
from test_transformers import CONFIGS, LENGTHS, NEW, check, reference_logprobs, reference_model
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from families.gemma import GeGLU
from families.gpt_oss import ClampedSwiGLU
from families.latent_attention import LatentAttention
from families.registry import read_config
from families.rope_scaling import LinearScaling
from ops.attention import merge
from planner.published_models import MODELS, read_model
from quantize import INT8
from serving import chunks
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Request
from serving.speculation import PromptLookup
from sharding.arrays import ArrayInfo, abstract
from sharding.mesh import make_mesh, mesh_shape

FAMILIES = [name for name in CONFIGS if name != "llama3"]  # whose other form has more
deep = partial(pytest.param, marks=pytest.mark.deep)


def mesh_for(name: str) -> str:
    """One that divides experts and all else, or every head."""
    experts = "local_experts" in str(CONFIGS[name]) or "n_routed" in str(CONFIGS[name])
    return "dp2-ep2-tp2" if experts else "tp8"


SHORT = {("mistral", "tp8"), ("glm4-moe-lite", "tp8"), ("mixtral", "ep4-tp2")}
PAIRS = [(name, mesh_for(name)) for name in FAMILIES]
# Sinks, latents and windows divided otherwise; more experts' shards than in any family above; one device.
PAIRS += [("gpt-oss", "tp8"), ("glm4-moe-lite", "tp8"), ("gemma3", "dp2-tp4")]
PAIRS += [("mixtral", "ep4-tp2"), ("deepseek-v3", "ep4-tp2"), ("gemma3", "1")]


@pytest.mark.parametrize(("name", "mesh"), [x if x in SHORT else deep(*x) for x in PAIRS])
def test_on_a_mesh(name, mesh, saved, monkeypatch):
    """Unlike prompts, past windows and at their edges, more of them than rows, with drafts from the text."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 4), (1, 12)))
    engine = answer_prompts(saved(name), lambda cfg: mesh_of(cfg, mesh), LENGTHS, PromptLookup(3))
    assert engine.stats.reused_tokens == 0


@pytest.mark.parametrize("name", ["gemma3", *map(deep, ("gpt2", "gpt-oss", "scout", "deepseek-v3"))])
def test_reused_prefixes(name, saved, monkeypatch):
    """Prompts that begin alike, past the windows: a row goes on from what an earlier prompt left in it."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 4), (1, 12)))
    engine = answer_prompts(saved(name), mesh_of, (3, 11, 20, 2, 30), head=21)
    assert engine.stats.reused_tokens > 0


@pytest.mark.parametrize("name", [*map(deep, ("gpt2", "gemma", "mixtral", "gpt-oss"))])
def test_in_two_stages(name, saved, monkeypatch):
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 4), (1, 12)))
    answer_prompts(saved(name), lambda cfg: make_mesh(cfg, 1, 1, 2, jax.devices()[:4], 2), LENGTHS)


def answer_prompts(saved, make_mesh, lengths, draft=None, head: int = 0) -> Engine:
    """Answer prompts in 4 rows, and compare with transformers. head: tokens with which all of them begin."""
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
    engine = engine_of(Programs(weights, cfg, mesh, 4, 96, "float32", draft), requests)
    answers = [engine.add(request) for request in requests]
    finish(engine)
    for answer in answers:
        prompt = answer.request.prompt
        assert len(answer.tokens) == NEW
        scores = answer.prompt_logprobs or reference_scores(reference, prompt)
        check(reference, prompt, answer.tokens, scores, answer.logprobs)
    return engine


def reference_scores(reference, prompt: list[int]) -> np.ndarray:
    """The log-probability of each token of a prompt but the first."""
    return reference_logprobs(reference, prompt)[np.arange(len(prompt) - 1), prompt[1:]]


def test_meshes_of_all_sizes():
    """Latent attention of 20 heads on 4, 8 and 16 devices: the latent's columns and slots are divided."""
    latent, norm = LatentAttention(20, 768, 512, 192, 64, 256, model.Norm(1e-6)), model.Norm(1e-5)
    layers = (model.LayerKind(latent, model.MLP(8), norm, rope=model.Rope(1e4, 64)),)
    cfg = model.Config(D=8, V=8, layers=layers, norm=norm, max_positions=8)
    for n in (4, 8, 16):
        assert mesh_shape(cfg, tensor=n)["tensor_slots"] == n


@pytest.mark.parametrize(("name", "G", "E"), [("deepseek-v3", 128, 256), ("kimi-k2", 64, 384)])
@pytest.mark.parametrize("n", [8, 16, 32, 64])
def test_meshes_of_many_experts(name, G, E, n):
    """What one of n devices holds, however they divide experts: an equal share, without padding."""
    cfg = read_config(MODELS[name])
    layer = model.layer_infos(cfg.layers[-1], cfg.D)
    for expert in (2**i for i in range(n.bit_length())):
        sizes = mesh_shape(cfg, expert=expert, tensor=n // expert)
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))

        def held(info: ArrayInfo, mesh=mesh) -> tuple[int, ...]:
            return jax.sharding.NamedSharding(mesh, info.spec).shard_shape(info.shape)

        assert held(layer.feed_forward.gate) == (E // expert, 7168, 2048 * expert // n)
        assert held(layer.feed_forward.shared.gate) == (2048 // n, 7168)
        assert held(layer.attention.q_b) == (1, G // n, 128, 1536)
        assert held(layer.attention.kv_a) == (512 // n, 7168)
        assert held(layer.attention.k_rope) == (64 // n, 7168)


def test_more_devices_than_a_latent_divides():
    with pytest.raises(ValueError, match="128 devices would share a key/value head, .* its width 64"):
        mesh_shape(read_config(MODELS["kimi-k2"]), expert=128)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "scout", "gpt-oss", "muse-glimmer", "deepseek-v3"])
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


@pytest.mark.parametrize("name, mesh_name", [("qwen3-moe", "1"), ("scout", "dp2-ep2-tp2"), ("gemma3", "tp8")])
def test_inside_a_layer(name, mesh_name, saved):
    """The attention of transformers, and the experts that its router chooses, in every layer."""
    folder, reference = saved(name)
    checkpoint = open_checkpoint(folder)
    cfg = checkpoint.config
    mesh = mesh_of(cfg, mesh_name)
    weights = load(checkpoint, mesh, "float32", format=None)
    tokens = np.random.default_rng(2).integers(0, cfg.V, (2, 37))
    chunk = model.chunk_at(jnp.zeros(2, int), jnp.full(2, 37), 37)
    routed = []
    for module in reference.modules():
        if type(module).__name__.endswith(("Router", "TopKRouter")):
            module.register_forward_hook(lambda module, inputs, found: routed.append(found))
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), use_cache=False, output_attentions=True).attentions
    x = model.embed(tokens, chunk.positions, weights, cfg=cfg, mesh=mesh)
    for i, (w, kind) in enumerate(zip(weights.layers, cfg.layers, strict=True)):
        found = model.inside_layer(x, w, chunk, kind=kind, mesh=mesh)
        probabilities = jax.nn.softmax(found["scores"], -1).reshape(expected[i].shape)
        np.testing.assert_allclose(probabilities, expected[i], atol=1e-4)
        assert found["k"].shape == found["v"].shape == (2, 37, kind.attention.K, kind.attention.H)
        if kind.feed_forward == cfg.moe:  # of those not chosen, transformers has lower scores, or none
            best = torch.topk(routed.pop(0)[0], cfg.moe.A).indices.reshape(2, 37, -1)
            np.testing.assert_array_equal(np.sort(found["experts"]), np.sort(best))
            assert found["expert_scores"].shape == best.shape
        x, _ = model.layers(x, [w], None, chunk, kinds=(kind,), mesh=mesh)
    assert not routed


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
    rope = dataclasses.replace(second.rope, theta=1e4, scaling=LinearScaling(4.0))
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
    return with_layers(cfg, attention=dataclasses.replace(cfg.attention, scale=0.2)), weights


def gelu(reference, cfg, weights):
    for layer in reference.model.layers:
        layer.mlp.act_fn = torch.nn.GELU("tanh")
    feed_forward = dataclasses.replace(cfg.layers[0].feed_forward, activation=GeGLU())
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


@pytest.mark.parametrize("n", [8, 16])
def test_two_heads_on_more_devices(n):
    """Muse Glimmer: all matrices are stored once, and so is the cache. Only the weights of norms are not."""
    cfg = read_model("muse-glimmer-30b")
    shape = mesh_shape(cfg, tensor=n)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    weights, cache = model.weight_infos(cfg), model.cache_infos(cfg, 4, 8192, "bfloat16").layers
    arrays = [x for x in jax.tree.leaves(abstract((weights, cache), mesh, "bfloat16")) if x.ndim > 1]
    assert len(arrays) == 2 + 52 * (8 + 1)
    held = [n * np.prod(x.sharding.shard_shape(x.shape)) for x in arrays]
    assert held == [np.prod(x.shape) for x in arrays]
    with pytest.raises(ValueError, match="52 layers do not make 2 stages that are alike; possible: 1, 13$"):
        mesh_shape(cfg, tensor=n, stage=2)  # every fourth layer is of another kind


def test_a_sink_is_a_part_without_value(saved):
    """The output is that of attention merged with the part (o=0, lse=sink), not that of attention alone."""
    checkpoint = open_checkpoint(saved("gpt-oss")[0])
    cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
    w = load(checkpoint, mesh, "float32", format=None).layers[0].attention
    o, lse = (jax.random.normal(jax.random.key(i), (2, 5, *n)) for i, n in enumerate([(2, 3, 8), (2, 3)]))
    lse = 3 * lse.at[0, 0].set(-jnp.inf)  # a query that sees nothing

    def output(heads: model.Attention, o, lse):
        layouts = jax.tree.map(lambda x: P(), (o, lse, w))

        @partial(jax.shard_map, mesh=mesh, in_specs=layouts, out_specs=P())
        def run(o, lse, w):
            return heads.head_outputs(o, lse, None, w)

        return run(o, lse, w)

    sinks = jnp.broadcast_to(w.sinks, lse.shape)
    merged, _ = merge((o, lse), (jnp.zeros_like(o), sinks))
    plain = model.Attention(2, 3, 8, bias=True, output_bias=True)
    with_sinks = output(cfg.attention, o, lse)
    np.testing.assert_allclose(with_sinks, output(plain, merged, lse), atol=1e-5)
    assert np.abs(with_sinks - output(plain, o, lse)).max() > 0.1


def test_the_clamp_acts(saved):
    """The small model of gpt-oss reaches its limit: without it the logits are others."""
    checkpoint = open_checkpoint(saved("gpt-oss")[0])
    cfg = checkpoint.config
    weights = load(checkpoint, mesh_of(cfg), "float32", format=None)
    tokens = np.random.default_rng(7).integers(0, cfg.V, (1, 20))
    assert cfg.moe.activation.limit == 1
    unlimited = dataclasses.replace(cfg.moe, activation=ClampedSwiGLU(100.0, 1.702))
    found = [logprobs(weights, x, tokens) for x in (cfg, with_layers(cfg, feed_forward=unlimited))]
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_sinks_beside_an_int8_cache(saved):
    """A chunk at once and token by token, through the rings, give the same logits."""
    checkpoint = open_checkpoint(saved("gpt-oss")[0])
    cfg = with_short_rings(checkpoint.config)
    mesh = mesh_of(cfg)
    weights = load(checkpoint, mesh, "float32", format=None)
    tokens = np.random.default_rng(8).integers(0, cfg.V, (2, 30))
    found = []
    for kv_dtype in ("int8", "float32"):
        cache = model.init_cache(cfg, mesh, 2, 64, kv_dtype)
        at_once, _ = model.prefill(tokens, weights, cache, cfg=cfg, mesh=mesh)
        cache = model.init_cache(cfg, mesh, 2, 64, kv_dtype)
        for column in tokens.T:
            step, cache = model.decode_step(column, weights, cache, cfg=cfg, mesh=mesh)
        np.testing.assert_allclose(step, at_once, atol=1e-3)  # logits up to 20; float32, in other orders
        found.append(jax.nn.log_softmax(step))
    int8, exact = found
    assert 0 < np.sum(np.exp(exact) * (exact - int8), -1).mean() < 0.02


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
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "muse-glimmer", "gpt-oss", "glm4-moe-lite", "mixtral"])
def test_int8_is_as_good_as_llamas(name, int8_errors):
    """Random weights have tokens that are nearly as likely as the best: of the Llamas the worst counts."""
    llamas = [int8_errors(llama) for llama in ("llama3-scaled-tied", "scout")]
    assert np.all(int8_errors(name) <= 2 * np.max(llamas, 0))


@pytest.fixture(scope="module")
def int8_cache_errors(saved):
    """name -> by how much an int8 cache changes the log-probabilities of texts that are read in chunks."""

    @cache
    def error(name: str) -> float:
        checkpoint = open_checkpoint(saved(name)[0])
        cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
        weights = load(checkpoint, mesh, "float32", format=None)
        prompts = np.random.default_rng(3).integers(0, cfg.V, (8, 40)).tolist()

        def scores(kv_dtype: str) -> np.ndarray:
            answers = generate(weights, prompts, cfg, mesh, 1, 64, kv_dtype, score=True)
            return np.array([answer.prompt_logprobs for answer in answers])

        return np.mean(np.abs(scores("float32") - scores("int8")))

    return error


@pytest.mark.deep
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "deepseek-v3"])
def test_an_int8_cache_is_as_good_as_llamas(name, int8_cache_errors):
    """Of windows with other norms, of sinks, and of latents."""
    llamas = [int8_cache_errors(llama) for llama in ("llama3-scaled-tied", "scout")]
    assert int8_cache_errors(name) <= 2 * max(llamas)


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
