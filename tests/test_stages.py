"""Layers in stages: the tokens and log-probabilities of one device, with every weight stored once."""

import dataclasses
import json
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Kind, engine_of, invoke, llama3_config, llama4_config, random_weights, with_short_rings
from test_generation import assert_same, deep, finish

import main
import model
from deployment.memory import Deployment
from families.gated_attention import GatedAttention
from families.gpt2 import GeluMLP, LayerNorm, LearnedPositions
from families.latent_attention import LatentAttention
from families.registry import read_config
from feedback.errors import UserError
from planner.traffic import read_program
from quantize import INT8
from serving import chunks
from serving.engine import Engine
from serving.executors import one_program, staged
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.speculation import PromptLookup
from serving.steps import DecodeStep, PrefillChunk, batch_infos, init_batch
from sharding.arrays import abstract
from sharding.mesh import make_mesh, mesh_shape
from sharding.sampling import Sampling
from sharding.stages import first_stage, in_stages, stage_input_infos

ROWS, MAX_LEN = 8, 96
# Sums in another order, in float32: 1e-5 was seen.
TOLERANCE = 1e-4
PERIOD = Kind(chunk=8, moe=True), Kind(chunk=8), Kind(chunk=8, moe=True), Kind(rope=False)
# (data, expert, tensor, stage) degrees.
MESHES = {
    "1": (1, 1, 1, 1),
    "tp2": (1, 1, 2, 1),
    "ep2-tp2": (1, 2, 2, 1),
    "pp2": (1, 1, 1, 2),
    "pp4": (1, 1, 1, 4),
    "pp2-tp2": (1, 1, 2, 2),
    "pp2-tp4": (1, 1, 4, 2),
    "pp2-dp2-tp2": (2, 1, 2, 2),
    "pp2-ep2-tp2": (1, 2, 2, 2),
}
GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=512, hidden_size=48, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=9, rms_norm_eps=1e-5, max_position_embeddings=256,
)  # fmt: skip


NORM, LAYER_NORM = model.Norm(1e-5), LayerNorm(1e-5)
NORM_WITHOUT_WEIGHT = model.Norm(1e-5, weight=False)
LATENT = LatentAttention(G=4, Q=16, L=24, N=8, R=8, U=8, norm=NORM)
LATENT_LAYER = model.LayerKind(LATENT, model.MLP(44), NORM, rope=model.Rope(1e4, 8, interleaved=True))
GATED_LAYER = model.LayerKind(
    GatedAttention(2, 2, 8, qk_norm=NORM), model.MLP(44), NORM, residual=model.Residual(NORM)
)
PLAIN_LAYER = model.LayerKind(model.Attention(4, 1, 8, bias=True, output_bias=True), GeluMLP(64), LAYER_NORM)
OTHERS = {
    "latent": dict(layers=(LATENT_LAYER,) * 4, norm=NORM),
    "gated": dict(layers=(GATED_LAYER,) * 4, norm=NORM, embedding_norm=NORM_WITHOUT_WEIGHT),
    "gpt2": dict(
        layers=(PLAIN_LAYER,) * 4, norm=LAYER_NORM, position_embedding=LearnedPositions(128),
        tied_embeddings=True,
    ),
    "window": vars(llama4_config(layers=(Kind(window=8), Kind(window=8, moe=True)) * 2)),
}  # fmt: skip


def config(family: str, stages: int) -> model.Config:
    """A model that so many stages divide."""
    if family == "gpt-oss":  # pairs of layers are alike
        return with_short_rings(read_config(GPT_OSS))
    if family == "llama3":
        return llama3_config(K=2, G=3, depth=4)
    if family in OTHERS:
        return model.Config(**dict(D=32, V=101, max_positions=128) | OTHERS[family])
    return llama4_config(layers=(PERIOD if family == "llama4" else PERIOD[2:]) * stages)


def mesh_of(cfg: model.Config, name: str):
    *degrees, stage = MESHES[name]
    devices = jax.devices()[: math.prod(MESHES[name])]
    return make_mesh(cfg, *degrees, devices, stage)


def requests_for(cfg: model.Config, n: int, every: bool) -> list[Request]:
    """Prompts of unlike lengths, of which every third begins as others do; samples among them.

    every: with all options of sampling, and scores, which take long to compile.
    """
    rng = np.random.default_rng(0)
    head, made = rng.integers(0, cfg.V, 24).tolist(), []
    options = dict(top_k=50, top_p=0.9, min_p=0.01) if every else {}
    for i, length in enumerate(rng.integers(1, 40, n)):
        prompt = head * (i % 3 == 2) + rng.integers(0, cfg.V, length).tolist()
        drawn = Sampling(seed=i, temperature=0.9, repetition_penalty=1.5, **options)
        new = 0 if i % 16 == 4 else int(rng.integers(1, 14))
        how = dict(sampling=drawn if i % 2 else Sampling(), score=every and i % 4 == 0)
        made.append(Request(prompt, new, stop=frozenset(range(7)), **how))
    return made


def ask(
    cfg: model.Config, name: str, requests: list[Request], compiled=(), format=None, kv_dtype="float32"
) -> tuple[list[Answer], Engine]:
    """The answers, and what gave them. compiled: what must stay empty once that is there."""
    mesh = mesh_of(cfg, name)
    weights = random_weights(cfg, mesh, format)
    engine = engine_of(Programs(weights, cfg, mesh, ROWS, MAX_LEN, kv_dtype), requests)
    if compiled:
        compiled.clear()
    answers = [engine.add(request) for request in requests]
    finish(engine)
    assert not compiled
    return answers, engine


PLACES = [("llama3", "pp2-dp2-tp2"), ("llama4", "pp4"), ("gpt-oss", "pp2-ep2-tp2")]
PLACES += [(name, "pp2-tp2") for name in OTHERS]


@pytest.mark.parametrize(("family", "name"), [("short", "pp2-ep2-tp2"), *(deep(*x) for x in PLACES)])
def test_many_requests(family, name, compiled, monkeypatch):
    """Through 8 rows, with copied prefixes, scores and samples: each is answered as by one device.

    Chunks of unlike shapes are on their way at the same time, and nothing is compiled after the start.
    """
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8), (2, 8)))
    cfg = config(family, MESHES[name][3])
    requests = requests_for(cfg, 16 if family == "short" else 40, every=family == "llama4")
    found, engine = ask(cfg, name, requests, compiled)
    assert_same(found, ask(cfg, "1", requests)[0])
    assert engine.stats.reused_tokens > 0 and {x.finish_reason for x in found} == {"stop", "length"}


def arguments(cfg: model.Config, mesh, rows: int, width: int) -> dict:
    """Weights and a batch as shapes: what compiling takes."""
    stages = mesh.shape["stage"]
    weights = abstract(in_stages(model.weight_infos(cfg), stages), mesh, jnp.float32)
    batch = abstract(batch_infos(cfg, rows, MAX_LEN, jnp.float32, stages), mesh)
    if stages > 1:
        inputs = abstract(stage_input_infos(cfg.D, rows, [(rows, width)]), mesh, jnp.float32)
        batch = batch.replace(stage_inputs=inputs)
    return dict(weights=weights, batch=batch, cfg=cfg, mesh=mesh)


def collectives(cfg: model.Config, name: str, width: int) -> tuple[Counter, Counter]:
    """How often each kind stands in a compiled step, or in a chunk: within stages and between them."""
    mesh, rows = mesh_of(cfg, name), 8
    count = np.ones(rows, np.int32)
    chunk = PrefillChunk(rows=None, count=count, width=width, score=0)
    execute = staged if mesh.shape["stage"] > 1 else one_program
    step = DecodeStep(count=count) if width == 1 else chunk
    lowered = execute.lower(step, **arguments(cfg, mesh, rows, width))
    found = read_program(lowered.compile().as_text(), stages=MESHES[name][3]).collectives
    return tuple(Counter(x.kind for x in found if x.between_stages == between) for between in (False, True))


@pytest.mark.parametrize("width", [1, deep(16)])
def test_collectives(width):
    """Between stages one permutation of hidden states, of which each device sends its share, and the tokens.

    Within a stage what a model of its layers alone has, and one all-gather of these shares.
    """
    cfg = config("short", 2)
    within, between = collectives(cfg, "pp2-ep2-tp2", width)
    one, none = collectives(first_stage(cfg, 2), "ep2-tp2", width)
    assert within == one + Counter({"all-gather": 1}) and not none
    assert between.pop("collective-permute") == 1 and set(between) == {"all-reduce"}


def bytes_of(tree) -> list[int]:
    """Of each device."""
    held = Counter()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def test_nothing_is_stored_twice():
    """Devices hold what is planned: all layers and their cache once, as without stages."""
    cfg, total = config("llama3", 2), []
    for name in ("tp2", "pp2-tp2"):
        mesh = mesh_of(cfg, name)
        made = Programs(random_weights(cfg, mesh), cfg, mesh, ROWS, 256, "float32")
        batches, planned = [made.batch, *made.waiting], Deployment(cfg, mesh, "float32", None, "float32")
        assert bytes_of(made.weights) == [planned.weight_bytes()] * mesh.size
        stored = [(x.cache, x.tokens) for x in batches]
        assert bytes_of(stored) == [planned.cache_bytes(ROWS, 256)] * mesh.size
        total.append([sum(bytes_of(x)) for x in (made.weights.layers, [x.cache.layers for x in batches])])
    assert total[0] == total[1]


@pytest.mark.deep
def test_int8():
    cfg = config("llama4", 2)
    asked, options = requests_for(cfg, 20, False), dict(format=INT8, kv_dtype="int8")
    found, expected = (ask(cfg, name, asked, **options)[0] for name in ("pp2-tp2", "tp2"))
    # A difference in the last bit can round a cached value to the next of its 255 steps: 3.5e-3 was seen.
    assert_same(found, expected, atol=1e-2)


@pytest.mark.deep
@pytest.mark.parametrize("asked", ["--n 2 --temperature 1 --quantize int8", "--score"])
def test_command_line(asked, monkeypatch, capsys):
    """From a model on disk, of which each stage loads its own layers: what one device answers."""
    prompts = [x for prompt in ("Who are you?", "Add 20 and 22.", "Hello") for x in ("--prompt", prompt)]
    found = []
    for degrees in ("--pp 2 --dp 2 --tp 2", "--dp 8 --tp 1"):
        options = f"--json --logprobs --dtype float32 {asked} {degrees}".split()
        code, out, err = invoke(monkeypatch, capsys, main, *prompts, *options)
        assert code == 0, err
        found.append(json.loads(out))
    assert found[0]["mesh"] == dict(data=2, expert=1, tensor=2, stage=2)
    for ours, theirs in zip(*(x["responses"] for x in found), strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            for one, other in zip(*(x.pop(name, [])[1:] for x in (ours, theirs)), strict=True):
                assert one == pytest.approx(other, abs=TOLERANCE)
        for name in ("log_likelihood", "perplexity"):
            assert ours.pop(name, 0) == pytest.approx(theirs.pop(name, 0), rel=TOLERANCE)
        assert ours == theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pp 8", "the model's 4 layers do not make 8 stages that are alike; possible: 1, 2, 4"),
        ("--pp 3", "--dp x --ep x --tp x --pp must be the number of devices"),
        ("--pp 2 --lookup", "--pp excludes --draft and --lookup: stages do not pass on"),
        ("--pp 0", "--pp 0 is not at least 1"),
    ],
)
def test_refused(arguments, message, monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys, main, *arguments.split())
    assert code in (1, 2) and out == "" and err.startswith("error: ")
    assert err.count("\n") == 1 and message in err


def test_refused_in_python():
    cfg = config("llama3", 2)
    mesh = mesh_of(cfg, "pp2")
    static, weights = dict(cfg=cfg, mesh=mesh), random_weights(cfg, mesh)
    with pytest.raises(ValueError, match="weights of 2 layers do not fit a model of 4 layers"):
        model.forward(np.zeros((2, 4), np.int32), weights, **static)
    with pytest.raises(ValueError, match="pipeline stages cannot check draft tokens"):
        step = DecodeStep(count=np.ones(2, np.int32), drafts=np.zeros((2, 1), np.int32))
        staged(step, weights, init_batch(cfg, mesh, 2, 8, "float32"), **static)
    with pytest.raises(UserError, match="2 stages of layers do not pass on how many guesses were right"):
        Programs(weights, cfg, mesh, ROWS, MAX_LEN, "float32", PromptLookup(2))
    with pytest.raises(ValueError, match="the 2 devices of a stage do not divide the model's width 33"):
        mesh_shape(llama3_config(D=33), tensor=2, stage=2)
    unlike = dataclasses.replace(cfg, layers=(config("short", 1).layers[0], *cfg.layers))
    with pytest.raises(ValueError, match="5 layers do not make 5 stages that are alike; possible: 1"):
        mesh_shape(unlike, stage=5)
