"""Every family against transformers: on every mesh, in stages, in int8, and layer by layer."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import generate, mesh_of
from jax.sharding import AbstractMesh
from test_transformers import CONFIGS, answer_prompts, check, reference_model

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from families.gemma import GeGLU
from generation.inside_layer import inside_layer
from planner.published_models import read_model
from quantize import INT8, QuantizedArray
from serving import chunks
from serving.speculation import PromptLookup
from sharding.arrays import abstract
from sharding.mesh import make_mesh, mesh_shape

FAMILIES = list(CONFIGS)
deep = partial(pytest.param, marks=pytest.mark.deep)


def mesh_for(name: str) -> str:
    """One that divides experts and all else, or every head."""
    experts = "local_experts" in str(CONFIGS[name]) or "n_routed" in str(CONFIGS[name])
    return "dp2-ep2-tp2" if experts else "tp8"


SHORT = {("mistral", "tp8"), ("glm4-moe-lite", "tp8"), ("mixtral", "ep4-tp2")}
PAIRS = [(name, mesh_for(name)) for name in FAMILIES]
# Sinks, latents and windows divided otherwise; more experts' shards than in any family above.
PAIRS += [("gpt-oss", "tp8"), ("glm4-moe-lite", "tp8"), ("gemma3", "dp2-tp4"), ("mixtral", "ep4-tp2")]
PAIRS += [("muse-spark", "tp8"), ("muse-spark", "ep4-tp2")]
PAIRS += [("gemma4-moe", "dp2-ep2-tp2")]
PAIRS += [("minimax-m2", "tp8")]  # devices that share a head, whose norms sum over all of them


@pytest.mark.parametrize(("name", "mesh"), [x if x in SHORT else deep(*x) for x in PAIRS])
def test_on_a_mesh(name, mesh, saved):
    """Unlike prompts, past windows and at their edges, more of them than rows, with drafts from the text."""
    engine = answer_prompts(saved(name), lambda cfg: mesh_of(cfg, mesh), draft=PromptLookup(3))
    assert engine.stats.reused_tokens == 0


OTHERS = "gpt2", "gpt-oss", "scout", "deepseek-v3", "muse-spark", "gemma4-e", "glm4-moe", "olmo3", "qwen3.5"


@pytest.mark.parametrize("name", ["gemma3", *map(deep, OTHERS)])
def test_reused_prefixes(name, saved):
    """Prompts that begin alike, past the windows: a row goes on from what an earlier prompt left in it."""
    engine = answer_prompts(saved(name), mesh_of, (3, 11, 20, 2, 30), head=21)
    assert engine.stats.reused_tokens > 0


@pytest.mark.deep
@pytest.mark.parametrize(
    "name", ["gpt2", "gemma", "mixtral", "gpt-oss", "seed-oss", "minimax-m2", "qwen3.5-moe"]
)
def test_in_two_stages(name, saved):
    answer_prompts(saved(name), lambda cfg: make_mesh(cfg, 1, 1, 2, jax.devices()[:4], 2))


PUBLISHED = "glm-4.7-flash", "deepseek-v3", "kimi-k2", "muse-glimmer-30b", "muse-spark-816b", "seed-oss-36b"
PUBLISHED += "glm-4.5-air", "olmo3-32b", "minimax-m2"


@pytest.mark.parametrize("n", [8, 16, 32, 64])
@pytest.mark.parametrize("name", PUBLISHED)
def test_meshes_of_published_models(name, n):
    """However n devices divide experts: all matrices are stored once, in equal shares.

    So is the cache. But all devices hold the routers, and what projects to the queries' latent.
    """
    cfg = read_model(name)
    cfg = dataclasses.replace(cfg, layers=tuple(dict.fromkeys(cfg.layers)))

    infos = model.weight_infos(cfg), model.cache_infos(cfg, 4, 8192, "bfloat16").layers

    def arrays(expert: int, tensor: int) -> list[jax.ShapeDtypeStruct]:
        sizes = mesh_shape(cfg, expert=expert, tensor=tensor)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        found = jax.tree_util.tree_leaves_with_path(abstract(infos, mesh, "bfloat16"))
        return [x for path, x in found if x.ndim > 1 and path[-1].name not in ("router", "q_a")]

    shapes = [x.shape for x in arrays(1, 1)]
    for expert in (2**i for i in range(n.bit_length() if cfg.moe else 1)):
        for x, shape in zip(arrays(expert, n // expert), shapes, strict=True):
            assert n * math.prod(x.sharding.shard_shape(x.shape)) == math.prod(x.shape)
            # Padded are 20 heads, the queries of a head that more devices share than divide them, and the 17
            # tiles of a ring's slots.
            assert x.shape == shape or name not in ("deepseek-v3", "kimi-k2")


def test_meshes_of_unlike_layers():
    """Gemma 4 31B has 16 key/value heads in some layers, 4 in others: the axis of heads divides both."""
    sizes = mesh_shape(read_model("gemma4-31b"), tensor=8)
    assert (sizes["tensor_heads"], sizes["tensor_slots"]) == (4, 2)


def test_meshes_that_divide_too_far():
    with pytest.raises(ValueError, match="128 devices would share a key/value head, .* its width 64"):
        mesh_shape(read_model("kimi-k2"), expert=128)
    with pytest.raises(ValueError, match="52 layers do not make 2 stages that are alike; possible: 1, 13$"):
        mesh_shape(read_model("muse-glimmer-30b"), tensor=8, stage=2)  # every fourth layer is of another kind


def weights_of(saved, name: str, format=None, mesh_name="1"):
    """-> (the Config, the weights) of a random model."""
    checkpoint = open_checkpoint(saved(name)[0])
    return checkpoint.config, load(checkpoint, mesh_of(checkpoint.config, mesh_name), "float32", format)


# Of each kind of layer one family; heads and experts divided, which inside_layer gathers.
LAYERS = dict.fromkeys(("gpt2", "gpt-oss", "muse-glimmer", "deepseek-v3", "qwen3-moe"), "1")
LAYERS |= {"scout": "dp2-ep2-tp2", "gemma3": "tp8", "muse-spark": "ep2-tp4", "olmo3": "tp8", "gemma4": "tp8"}
LAYERS |= {"gemma4-moe": "ep2-tp4", "gemma4-e": "tp8", "qwen3-next": "dp2-ep2-tp2"}


MORE_LAYERS = ("glm4-moe", "dp2-ep2-tp2"), ("minimax-m2", "tp8"), ("smollm3", "1"), ("ministral3", "tp8")


@pytest.mark.parametrize(("name", "mesh_name"), [*LAYERS.items(), *(deep(*x) for x in MORE_LAYERS)])
def test_hidden_states(name, mesh_name, saved):
    """The hidden states after the embedding and after each layer, but the last, whose logits others compare.

    And inside of all layers: the attention of transformers, and the experts that its router chooses.
    """
    cfg, weights = weights_of(saved, name, mesh_name=mesh_name)
    reference, mesh = saved(name)[1], mesh_of(cfg, mesh_name)
    tokens = np.random.default_rng(2).integers(0, cfg.V, (2, 37))
    chunk = model.chunk_at(jnp.zeros(2, int), jnp.full(2, 37), 37)
    routed = []
    for module in reference.modules():
        if type(module).__name__.endswith(("Router", "TopKRouter")):
            module.register_forward_hook(lambda module, inputs, found: routed.append(found))
    reference.set_attn_implementation("eager")
    options = dict(use_cache=False, output_hidden_states=True, output_attentions=True)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), **options)

    @partial(jax.jit, static_argnames="kind")
    def layer(x, w, inputs, kind):
        own = dataclasses.replace(chunk, inputs=inputs)
        y, _ = model.layers(x, [w], None, own, kinds=(kind,), mesh=mesh)
        return y, inside_layer(x, w, chunk, kind=kind, mesh=mesh)

    attentions = [x for x in expected.attentions if x is not None]
    embedded, chunk = model.embed(tokens, chunk, weights, cfg=cfg, mesh=mesh)
    x = embedded
    for i, (w, kind) in enumerate(zip(weights.layers, cfg.layers, strict=True)):
        # Two float32 implementations of values around 1 to 30.
        np.testing.assert_allclose(x, expected.hidden_states[i], atol=1e-3, rtol=1e-4)
        if kind.shares_kv:  # it attends to what is within an earlier layer
            own = weights.layers[: i + 1], None, dataclasses.replace(chunk, inputs=chunk.inputs[: i + 1])
            x, _ = model.layers(embedded, *own, kinds=cfg.layers[: i + 1], mesh=mesh)
            continue
        x, found = layer(x, w, chunk.inputs and chunk.inputs[i : i + 1], kind)
        if isinstance(kind.attention, model.SoftmaxAttention):
            theirs, layout = attentions.pop(0), kind.attention.slot_layout
            probabilities = jax.nn.softmax(found["scores"], -1).reshape(theirs.shape)
            theirs = theirs / theirs.sum(-1, keepdim=True)  # without a sink
            np.testing.assert_allclose(probabilities, theirs, atol=1e-4)
            widths = layout.key, layout.value[1] - layout.value[0]
            shapes = [(2, 37, kind.attention.K, width) for width in widths]
            assert [found["k"].shape, found["v"].shape] == shapes
        else:
            assert not {"q", "k", "v", "scores"} & found.keys()
        if kind.feed_forward == cfg.moe:
            scores, *_, best = routed.pop(0)
            # Llama 4's says scores alone: transformers has lower ones of those not chosen, or none.
            best = best if best.shape[-1] == cfg.moe.A else torch.topk(scores, cfg.moe.A).indices
            np.testing.assert_array_equal(np.sort(found["experts"]), np.sort(best.reshape(2, 37, -1)))
            assert found["expert_scores"].shape == found["experts"].shape
    assert not routed


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-6)


def test_variations(saved):
    """What a family can ask for by data alone, in Llama's layers and in those of transformers.

    Norms after a sublayer and none before it, another scale of scores, another activation, and capped logits.
    """
    cfg, weights = weights_of(saved, "openllama")
    reference = reference_model("openllama")
    for layer in reference.model.layers:
        layer.self_attn.register_forward_hook(lambda module, x, y: (normalized(y[0]), *y[1:]))
        layer.mlp.register_forward_hook(lambda module, x, y: normalized(y))
        layer.input_layernorm = layer.post_attention_layernorm = torch.nn.Identity()
        layer.self_attn.scaling, layer.mlp.act_fn = 0.2, torch.nn.GELU("tanh")
    reference.lm_head.register_forward_hook(lambda module, x, y: 3 * torch.tanh(2 * y / 3))
    kind = dataclasses.replace(
        cfg.layers[0],
        attention=dataclasses.replace(cfg.layers[0].attention, scale=0.2),
        feed_forward=dataclasses.replace(cfg.layers[0].feed_forward, activation=GeGLU()),
        norm=None,
        residual=model.Residual(model.Norm(1e-6, weight=False)),
    )
    cfg = dataclasses.replace(cfg, layers=(kind,) * len(cfg.layers), logit_scale=2.0, logit_softcap=3.0)
    layers = [dataclasses.replace(w, attention_norm=None, feed_forward_norm=None) for w in weights.layers]
    weights = dataclasses.replace(weights, layers=layers)
    prompts = np.random.default_rng(5).integers(0, cfg.V, (2, 23)).tolist()
    for answer in generate(weights, prompts, cfg, mesh_of(cfg), 6, 64, "float32", score=True):
        check(reference, answer.request.prompt, answer.tokens, answer.prompt_logprobs, answer.logprobs)


def error(saved, name: str, format, kv_dtype: str) -> float:
    """By how much int8 changes the log-probabilities of random texts that are read in chunks, on average."""

    def scores(format, kv_dtype: str) -> np.ndarray:
        cfg, weights = weights_of(saved, name, format)
        prompts = np.random.default_rng(3).integers(0, cfg.V, (8, 40)).tolist()
        answers = generate(weights, prompts, cfg, mesh_of(cfg), 1, 64, kv_dtype, score=True)
        return np.array([answer.prompt_logprobs for answer in answers])

    return np.mean(np.abs(scores(None, "float32") - scores(format, kv_dtype)))


THIS_AUTUMNS = "gemma4", "gemma4-e", "gemma4-moe", "glm4-moe", "olmo3", "minimax-m2", "smollm3"
THIS_AUTUMNS += "qwen3-next", "qwen3.5"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("format", "kv_dtype", "names"),
    [
        (INT8, "float32", ("gpt2", "gemma3", "muse-glimmer", "gpt-oss", "glm4-moe-lite", "mixtral")),
        (INT8, "float32", THIS_AUTUMNS),
        # Windows with other norms, sinks, latents; keys and values that several layers read.
        (None, "int8", ("gemma3", "gpt-oss", "deepseek-v3", "gemma4-e", "qwen3-next")),
    ],
)
def test_int8_is_as_good_as_llamas(format, kv_dtype, names, saved, monkeypatch):
    """In the weights or in the cache: of the Llamas the worst counts."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((8, 20),))
    worst = max(error(saved, name, format, kv_dtype) for name in ("llama3-scaled-tied", "scout"))
    for name in names:
        assert error(saved, name, format, kv_dtype) <= 2 * worst, name


@pytest.mark.deep
@pytest.mark.parametrize("name", ["muse-spark", "gemma4-e"])
def test_int8_means_the_rounded_weights(name, saved):
    """The answers of int8 weights are those of the same numbers in float32.

    Muse Spark is not as good as Llama in int8 with random weights: each expert's output is normalized before
    it is weighted, so that a change of the chosen experts changes all. What int8 computes is right.
    """
    cfg, quantized = weights_of(saved, name, INT8)

    def rounded(info, w):
        if not isinstance(w, QuantizedArray):
            return w
        return w.values * jnp.expand_dims(w.scale, info.contracted_axes)

    weights = jax.tree.map(rounded, model.weight_infos(cfg), quantized)
    prompts = np.random.default_rng(3).integers(0, cfg.V, (4, 40)).tolist()
    ours, expected = (
        [x.prompt_logprobs for x in generate(w, prompts, cfg, mesh_of(cfg), 1, 64, "float32", score=True)]
        for w in (quantized, weights)
    )
    np.testing.assert_allclose(ours, expected, atol=1e-3)  # of values around 10, in another order of sums


def test_recomputation(saved):
    """forward(remat=True): the same derivative, of which the layers keep less."""
    cfg, weights = weights_of(saved, "mistral")
    tokens = np.random.default_rng(4).integers(0, cfg.V, (2, 64))

    def loss(weights, remat: bool):
        logits = model.forward(tokens, weights, cfg=cfg, mesh=mesh_of(cfg), remat=remat)
        return jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    programs = [
        jax.jit(jax.grad(partial(loss, remat=remat))).lower(weights).compile() for remat in (False, True)
    ]
    for ours, theirs in zip(*(jax.tree.leaves(run(weights)) for run in programs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    kept, less = (run.memory_analysis().temp_size_in_bytes for run in programs)
    assert less < kept
