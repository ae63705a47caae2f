"""A model in groups of layers against the same in one program."""

import jax
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config, mesh_of, random_weights

import model
from quantize import INT8
from serving import layer_groups

PERIOD = Kind(chunk=8, moe=True), Kind(chunk=8), Kind(rope=False, moe=True)


@pytest.mark.parametrize(
    ("cfg", "size"),
    [
        (llama3_config(depth=4), 4),
        (llama3_config(depth=7), 1),
        (llama3_config(depth=9), 3),
        (llama4_config(PERIOD), 3),
        (llama4_config(PERIOD * 3), 3),
        (llama4_config((*PERIOD, Kind())), 4),
        (llama4_config((*PERIOD * 2, Kind())), 1),
    ],
)
def test_groups_are_alike(cfg, size):
    assert layer_groups.group_size(cfg.layers) == size


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.deep)])
def test_as_in_one_program(kv_dtype):
    """Two groups: prompts by rows and of all rows, with scores; steps with draft tokens and without."""
    cfg = llama4_config(PERIOD * 2)
    mesh, rng = mesh_of(cfg), np.random.default_rng(0)
    weights, static = (
        random_weights(cfg, mesh, INT8 if kv_dtype == "int8" else None),
        dict(cfg=cfg, mesh=mesh),
    )
    text = rng.integers(0, cfg.V, (2, 40), np.int32)
    drafts = rng.integers(0, cfg.V, (2, 3), np.int32)
    found = {}
    for run in (model, layer_groups):
        cache = model.init_cache(cfg, mesh, 2, 40, kv_dtype)
        for row in range(2):
            at = np.int32([row])
            cache = model.begin(at, text[row : row + 1], np.int32([0]), None, cache, **static)
        one, cache = run.prefill(np.int32([1]), np.int32([9]), weights, cache, width=12, score=0, **static)
        both, cache = run.prefill(None, np.int32([12, 3]), weights, cache, width=12, score=0, **static)
        first, cache = run.decode_step(np.int32([1, 1]), None, model.Sampling(), weights, cache, **static)
        then, cache = run.decode_step(np.int32([4, 2]), drafts, model.Sampling(), weights, cache, **static)
        one, both = one.logprobs[:, :9], (both.logprobs[0], both.logprobs[1, :3])
        found[run] = jax.tree.map(np.asarray, (one, both, first, then, cache.length))
    # The same sums, but XLA may round what goes from group to group. A step of an int8 cache is 5e-3.
    close = dict(atol=1e-5 if kv_dtype == "float32" else 5e-3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **close), *found.values())
