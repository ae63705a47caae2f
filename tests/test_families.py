"""Every family against transformers: on every mesh, in int8, and layer by layer."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import mesh_of, with_short_rings
from test_generation import finish
from test_transformers import CONFIGS, LENGTHS, NEW, check, reference_model

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from convert_checkpoint import convert
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
    weights = load(checkpoint, mesh, "float32", quantized=False)
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
    cfg = model.Config(
        D=8, V=8, norm=model.Norm(1e-5), max_positions=8,
        layers=(model.LayerKind(model.Latent(20, 768, 512, 192, 64, 256, model.Norm(1e-6)), model.Gated(8)),),
    )  # fmt: skip
    for n in (4, 8, 16):
        assert mesh_shape(cfg, tensor=n)["tensor_slots"] == n


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states(name, saved):
    """After the embedding and after each layer, but the last, whose logits others compare."""
    folder, reference = saved(name)
    checkpoint = open_checkpoint(folder)
    cfg = checkpoint.config
    mesh = mesh_of(cfg)
    weights = load(checkpoint, mesh, "float32", quantized=False)
    tokens = np.random.default_rng(2).integers(0, cfg.V, (1, 37))
    specs = jax.sharding.PartitionSpec(), jax.tree.map(lambda _: jax.sharding.PartitionSpec(), weights)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    def states(tokens, w):
        span = model.span_at(jnp.zeros(1, int), jnp.full(1, 37), 37, cfg)
        x = [model.embed(tokens, w, span, cfg)]
        for layer, kind in zip(w.layers, cfg.layers, strict=True):
            x.append(model.decoder_layer(x[-1], layer, None, span, kind, cfg.norm)[0])
        return jnp.stack(x[:-1])

    with torch.no_grad():
        found = reference(torch.tensor(tokens), use_cache=False, output_hidden_states=True).hidden_states
    expected = np.stack([x.numpy() for x in found[:-1]])
    # Two float32 implementations of values around 1 to 30.
    np.testing.assert_allclose(states(tokens, weights), expected, atol=1e-3, rtol=1e-4)


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
        weights = (load(checkpoint, mesh_of(cfg), "float32", quantized) for quantized in (False, True))
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
    convert(str(folder), str(tmp_path / "int8"), quantized=True)
    made, read = open_checkpoint(str(folder)), open_checkpoint(str(tmp_path / "int8"))
    weights = [load(x, mesh_of(x.config), "float32", quantized=True) for x in (made, read)]
    for ours, theirs in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_recomputation(saved):
    """forward(remat=True): the same derivative, of which the layers keep less."""
    folder, _ = saved("mistral")
    checkpoint = open_checkpoint(folder)
    cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
    weights = load(checkpoint, mesh, "float32", quantized=False)
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
