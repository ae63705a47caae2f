"""A model in several programs of a few layers, on one device and on several, against one program."""

import jax
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config, mesh_of, random_weights, with_short_rings
from test_generation import SHARED, deep

from families.registry import read_config
from ops.kv_cache import kv_owners
from planner.published_models import read_model
from quantize import INT8
from serving import executors
from serving.executors import executor_for, layer_groups, one_program, several_programs
from serving.steps import DecodeStep, PrefillChunk, assign_rows, init_batch

PERIOD = Kind(chunk=8, moe=True), Kind(chunk=8), Kind(rope=False, moe=True)


def sizes(cfg, most: int) -> list[int]:
    return [end - first for first, end in layer_groups(cfg.layers, most)]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (llama3_config(depth=4), [4]),
        (llama3_config(depth=9), [1, 4, 4]),
        (llama3_config(depth=12), [6, 6]),
        (llama4_config(PERIOD), [3]),
        (llama4_config(PERIOD * 3), [3, 6]),
        (llama4_config((*PERIOD, Kind())), [4]),
        (llama4_config((*PERIOD * 4, Kind())), [1] * 13),  # the last layer differs
        (llama4_config((Kind(), *PERIOD * 4)), [1, 6, 6]),  # the first layer differs
    ],
)
def test_groups_of_layers(cfg, expected):
    assert sizes(cfg, 6) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3.1-70b", [8] * 10),
        ("qwen2.5-7b", [7] * 4),  # 28 layers: groups of 8 would have a remainder of 4
        ("llama4-scout", [8] * 6),  # every fourth layer is of another kind
        ("deepseek-r1", [5] + [8] * 7),  # the first three layers have no experts
        ("gemma4-e2b", [3, 5, 5, 22]),  # of 35 layers, the last 20 read the caches of layers 13 and 14
    ],
)
def test_groups_of_published_models(name, expected):
    assert sizes(read_model(name), 8) == expected


def test_whose_cache_a_layer_reads():
    """In Gemma 4 E4B, every sixth of the last 18 layers reads that of layer 23, the others that of 22."""
    owners = kv_owners(read_model("gemma4-e4b").layers)
    assert owners == [*range(24), *([22] * 5 + [23]) * 3]


def test_chunks_end_with_the_last_cache():
    """Without scores, a chunk runs the layers up to the last one that has keys and values of its own."""
    cfg = with_short_rings(read_config(SHARED))
    mesh, calls = mesh_of(cfg), []
    weights, batch = random_weights(cfg, mesh), init_batch(cfg, mesh, 1, 64, "float32")

    def call(function, *arguments, **static):
        calls.append(static.get("kinds", ()))
        return function(*arguments, **static)

    for score, layers in ((None, 2), (0, 4)):
        calls.clear()
        rows, count = np.zeros(1, np.int32), np.ones(1, np.int32)
        step = PrefillChunk(rows=rows, count=count, width=4, score=score)
        _, batch = several_programs(step, weights, batch, cfg=cfg, mesh=mesh, call=call)
        assert sum(map(len, calls)) == layers and len(batch.cache.layers) == 4


def test_groups_of_a_pattern_with_a_remainder():
    """Gemma 3: every sixth of 26 layers sees all tokens."""
    layers = [Kind() if i % 6 == 5 else Kind(window=8) for i in range(26)]
    assert sizes(llama4_config(tuple(layers)), 8) == [2, 6, 6, 6, 6]


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("1", "float32"), deep("1", "int8"), deep("dp2-ep2-tp2", "float32")]
)
def test_as_in_one_program(name, kv_dtype, compiled, monkeypatch):
    """Prompts with scores, and a step with draft tokens.

    The old caches are gone, and the weights are not. Equal layers are one program.
    """
    monkeypatch.setattr(executors, "MOST_LAYERS", 1)
    monkeypatch.setattr(executors, "MOST_ON_CPU", 1)
    cfg = llama4_config((Kind(chunk=8, moe=True), Kind(rope=False), Kind(rope=False)))
    assert sizes(cfg, 1) == [1, 1, 1]
    mesh, rng = mesh_of(cfg, name), np.random.default_rng(0)
    weights = random_weights(cfg, mesh, INT8 if kv_dtype == "int8" else None)
    static, shards = dict(cfg=cfg, mesh=mesh), mesh.shape["data"]
    text = rng.integers(0, cfg.V, (2, shards, 40), np.int32)
    drafts = rng.integers(0, cfg.V, (2 * shards, 3), np.int32)

    def each_shard(*numbers: int) -> np.ndarray:
        return np.int32([numbers] * shards).reshape(-1)

    found, programs = {}, []
    for execute in (one_program, executor_for(mesh)):
        batch = init_batch(cfg, mesh, 2 * shards, 40, kv_dtype)
        for row in range(2):
            batch = assign_rows(each_shard(row), text[row], each_shard(0), None, batch, **static)
        results = []
        for step in (
            PrefillChunk(rows=each_shard(1), count=each_shard(9), width=12, score=0),
            DecodeStep(count=each_shard(4, 2), drafts=drafts),
        ):
            old = batch
            compiled.clear()
            result, batch = execute(step, weights, batch, **static)
            programs.append(sum("backend_compile" in event for event in compiled))
            assert all(x.is_deleted() for x in jax.tree.leaves(old.cache.layers))
            results.append(result)
        scores, output = results
        found[execute] = jax.tree.map(np.asarray, (scores.logprobs[:, :9], output, batch.cache.length))
    # One before the layers, one after them, the first layer, and one that is called twice. Several devices
    # decode in one program, which is there already.
    assert programs == [1, 1] + ([4, 4] if mesh.size == 1 else [4, 0])
    # The same sums, but XLA may round what goes from program to program. A step of an int8 cache is 5e-3.
    close = dict(atol=1e-5 if kv_dtype == "float32" else 5e-3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **close), *found.values())
