"""Steps by columns give the results of layers whose residual stream is whole, on 2 to 8 devices."""

import dataclasses
import itertools
import json
import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHECKPOINTS, Kind, generate, llama3_config, llama4_config, mesh_of, random_weights
from jax.sharding import Mesh
from test_meshes import assert_same, prompts_for
from test_transformers import CONFIGS

import model
from benchmarks.quality import divergence
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from families.registry import read_config
from quantize import INT4, INT8
from serving import chunks
from sharding import collective_matmul, interconnect
from sharding.collective_matmul import column_ring
from sharding.interconnect import cycle, ring
from sharding.mesh import MODEL, mesh_shape, mesh_size

deep = partial(pytest.param, marks=pytest.mark.deep)


def ring_of(mesh: Mesh) -> tuple[int, ...]:
    return tuple(range(mesh_size(mesh, MODEL)))


@partial(jax.jit, static_argnames=("cfg", "mesh", "ring"))
def logits(tokens, weights: model.Weights, *, cfg: model.Config, mesh: Mesh, ring=None) -> jax.Array:
    """`model.forward`, by columns if there is a ring."""
    start = jnp.zeros_like(tokens[:, 0])
    chunk = model.chunk_at(start, start + tokens.shape[1], tokens.shape[1])
    x, chunk = model.embed(tokens, chunk, weights, cfg=cfg, mesh=mesh)
    x, _ = model.layers(x, weights.layers, None, chunk, kinds=cfg.layers, mesh=mesh, device_ring=ring)
    return model.unembed(x, weights, cfg=cfg, mesh=mesh)[..., : cfg.V]


def logits_of_both(cfg: model.Config, mesh: Mesh, weights: model.Weights, T: int = 12) -> list[np.ndarray]:
    """The logits of random tokens with a whole residual stream, and with one that is divided."""
    tokens = np.random.default_rng(0).integers(0, cfg.V, (2 * mesh.shape["data"], T))
    return [np.asarray(logits(tokens, weights, cfg=cfg, mesh=mesh, ring=x)) for x in (None, ring_of(mesh))]


@pytest.mark.parametrize(
    "name", ["gpt2", *map(deep, ("muse-glimmer", "gemma3", "glm", "qwen2", "olmo3", "qwen3.5"))]
)
def test_every_family(name):
    cfg = read_config(json.loads(CONFIGS[name].to_json_string()))
    mesh = mesh_of(cfg, "dp2-tp4")
    replicated, divided = logits_of_both(cfg, mesh, random_weights(cfg, mesh))
    np.testing.assert_allclose(divided, replicated, atol=2e-5 * np.abs(replicated).max())  # 4e-6 was seen


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (2, dict(D=36, K=6, F=48)),  # no step in which both directions send
        (3, dict(D=36, K=6, F=48)),
        (8, dict(K=4, G=2, F=48)),  # heads that two devices share, and parts of four columns
    ],
)
def test_few_devices(n, sizes):
    cfg = llama3_config(**sizes, depth=1)
    mesh = model_mesh(cfg, n)
    replicated, divided = logits_of_both(cfg, mesh, random_weights(cfg, mesh))
    np.testing.assert_allclose(divided, replicated, atol=1e-4)


def model_mesh(cfg: model.Config, tensor: int) -> Mesh:
    shape = mesh_shape(cfg, tensor=tensor)
    return Mesh(np.array(jax.devices()[:tensor]).reshape(*shape.values()), tuple(shape))


@pytest.mark.parametrize("name", ["dp2-tp4", deep("tp8")])
def test_chunks(name, monkeypatch):
    """The engine's chunks by columns, past windows and with shared heads, and decode steps after them."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 4), (2, 12)))
    for limit in ("LEAST_TOKENS", "DECODE_TOKENS", "DECODE_DEVICES"):
        monkeypatch.setattr(collective_matmul, limit, 4)
    cfg = llama4_config(layers=(Kind(chunk=8), Kind(rope=False)))
    mesh, prompts = mesh_of(cfg, name), prompts_for(cfg, (1, 5, 20, 13, 33, 8, 9, 16))
    weights, used, answers = random_weights(cfg, mesh), [], []

    def found_ring(mesh: Mesh) -> tuple[int, ...] | None:
        used.append(ring_of(mesh) if answers else None)
        return used[-1]

    monkeypatch.setattr(collective_matmul, "interconnect_ring", found_ring)
    for _ in range(2):
        answers.append(generate(weights, prompts, cfg, mesh, 6, 48, "float32", score=True))
    assert set(used) == {None, ring_of(mesh)}
    assert_same(*answers, new=6)


def test_prefill(monkeypatch):
    """`model.prefill` chooses by itself, from the model, the number of tokens and the mesh."""
    monkeypatch.setattr(collective_matmul, "LEAST_TOKENS", 8)
    monkeypatch.setattr(collective_matmul, "LEAST_CHUNK", 4)
    cfg = llama3_config()
    mesh = mesh_of(cfg, "dp2-tp4")
    weights, tokens = random_weights(cfg, mesh), np.random.default_rng(0).integers(0, cfg.V, (4, 5))

    def lowered(T: int) -> str:
        cache = model.init_cache(cfg, mesh, 4, 16, "float32")
        lowered = model.prefill.lower(tokens[:, :T], weights, cache, cfg=cfg, mesh=mesh)
        return lowered.compile().as_text()

    monkeypatch.setattr(collective_matmul, "interconnect_ring", ring_of)
    assert "collective-permute" not in lowered(3) and "collective-permute" in lowered(5)
    cache = model.init_cache(cfg, mesh, 4, 16, "float32")
    found, _ = model.prefill(tokens, weights, cache, cfg=cfg, mesh=mesh)
    whole = model.forward(tokens, weights, cfg=cfg, mesh=mesh)
    np.testing.assert_allclose(found, whole[:, -1], atol=1e-4)


def test_nothing_is_gathered_whole():
    """All that the devices exchange with every device are the sums of squares, one per token."""
    cfg = llama3_config()
    mesh = mesh_of(cfg, "tp8")
    chunk = model.chunk_at(jnp.zeros(1, int), jnp.full(1, 16), 16)
    arguments = jnp.ones((1, 16, cfg.D)), random_weights(cfg, mesh).layers, None, chunk
    layers = jax.jit(partial(model.layers, kinds=cfg.layers, mesh=mesh, device_ring=ring_of(mesh)))
    text = layers.lower(*arguments).compile().as_text()
    found = re.findall(r"= \(?f32\[([\d,]+)\]\S* (all-reduce|all-gather|reduce-scatter|all-to-all)", text)
    assert {math.prod(map(int, shape.split(","))) for shape, _ in found} == {16}
    assert "collective-permute" in text


@pytest.mark.parametrize("format", [INT8, INT4])
def test_rounded_columns(format):
    """Of two layers of a trained model: rounding the columns that travel to int8 changes less than
    rounding the weights. Columns for int4 weights are not rounded.
    """
    checkpoint = open_checkpoint(CHECKPOINTS / "tiny-llama3")
    cfg = dataclasses.replace(checkpoint.config, layers=checkpoint.config.layers[:2])
    checkpoint = dataclasses.replace(checkpoint, config=cfg)
    mesh = mesh_of(cfg, "dp2-tp4")
    exact, rounded = (load(checkpoint, mesh, "float32", x, False) for x in (None, format))
    tokens = np.random.default_rng(0).integers(0, cfg.V, (2, 64))
    run = partial(logits, tokens, cfg=cfg, mesh=mesh)
    truth, ours, divided = run(exact), run(rounded), run(rounded, ring=ring_of(mesh))
    targets = np.zeros_like(tokens)
    of_weights, of_columns = (
        divergence(a, b, targets)[0].mean() for a, b in ((truth, ours), (ours, divided))
    )
    if format == INT8:
        assert 0 < of_columns < of_weights
    else:
        assert of_columns < 1e-3 * of_weights


@pytest.mark.parametrize(
    "sizes", [(4, 4), (2, 4), (4, 3), (3, 4, 1), (2, 2, 2), (3, 2, 5), (1, 2), (16, 16, 1)]
)
def test_rings(sizes):
    """Every point of a box once, each next to the one before, and the last next to the first."""
    points = cycle(list(sizes))
    assert sorted(points) == sorted(itertools.product(*map(range, sizes)))
    steps = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs_around(points)]
    assert set(steps) == {1}


def pairs_around(ring: list):
    return itertools.pairwise([*ring, ring[0]])


def test_the_ring_of_a_slice(monkeypatch):
    """Two data shards of 2x4 chips: the ring is that of the first. There is none in a line, nor where the
    chips do not form a box.
    """
    monkeypatch.setattr(interconnect, "on_tpu", lambda mesh: True)

    def found_ring(places: list) -> tuple[int, ...] | None:
        devices = np.array([SimpleNamespace(coords=place, core_on_chip=0) for place in places])
        shape = dict(zip(MODEL, (1, 1, 1, len(places) // 4, 1, 2), strict=True))
        mesh = SimpleNamespace(devices=devices.reshape(1, 2, *shape.values()), shape=shape)
        return ring.__wrapped__(mesh)

    places = [(x, y, 0) for x in range(4) for y in range(4)]
    found = found_ring(places)
    assert sorted(found) == list(range(8))
    around = pairs_around([places[i] for i in found])
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in around)
    assert found_ring(places[:8]) is None and found_ring(places[::-3] + places[1::3] + places[2::3]) is None


def test_which_steps_are_by_columns(monkeypatch):
    cfg, ring = llama3_config(), (0, 1, 3, 2)
    mesh = mesh_of(cfg, "dp2-tp4")
    assert column_ring(cfg, (2, 64), mesh) is None  # no TPU
    monkeypatch.setattr(collective_matmul, "interconnect_ring", lambda mesh: ring)
    assert column_ring(cfg, (2, 64), mesh) == ring
    undivided = llama3_config(D=34)
    none = (cfg, (2, 63)), (undivided, (2, 64)), (cfg, (1024, 1)), (cfg, (128, 8))
    assert [column_ring(of, tokens, mesh) for of, tokens in none] == 4 * [None]
    assert column_ring(cfg, (8, 64), mesh_of(cfg, "dp8")) is None
    monkeypatch.setattr(collective_matmul, "DECODE_DEVICES", 4)
    assert column_ring(cfg, (510, 1), mesh) is None and column_ring(cfg, (512, 1), mesh) == ring
    monkeypatch.setattr(collective_matmul, "is_v5e", lambda mesh: True)
    assert column_ring(cfg, (126, 1), mesh) is None and column_ring(cfg, (32, 4), mesh) == ring
    moe = llama4_config()
    assert column_ring(moe, (1, 128), mesh_of(moe, "ep2-tp4")) is None
    with pytest.raises(ValueError, match="router.weight: a weight DE has no form by columns"):
        logits(np.zeros((2, 8), int), random_weights(moe, mesh), cfg=moe, mesh=mesh, ring=ring)
