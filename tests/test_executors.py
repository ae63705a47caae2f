"""A model in several programs of a few layers against the same model in one program."""

import jax
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config, mesh_of, random_weights

from quantize import INT8
from serving.executors import layers_per_program, one_program, several_programs
from serving.steps import DecodeStep, PrefillChunk, assign_rows, init_batch

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
def test_layers_per_program(cfg, size):
    assert layers_per_program(cfg.layers) == size


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.deep)])
def test_as_in_one_program(kv_dtype):
    """Prompts by rows and of all rows, with scores; steps with draft tokens and without."""
    cfg = llama4_config(PERIOD * 2)  # the program of three layers is called twice
    mesh, rng = mesh_of(cfg), np.random.default_rng(0)
    weights, static = (
        random_weights(cfg, mesh, INT8 if kv_dtype == "int8" else None),
        dict(cfg=cfg, mesh=mesh),
    )
    text = rng.integers(0, cfg.V, (2, 40), np.int32)
    drafts = rng.integers(0, cfg.V, (2, 3), np.int32)
    found = {}
    for execute in (one_program, several_programs):
        batch = init_batch(cfg, mesh, 2, 40, kv_dtype)
        for row in range(2):
            batch = assign_rows(np.int32([row]), text[row : row + 1], np.int32([0]), None, batch, **static)
        results = []
        for step in (
            PrefillChunk(rows=np.int32([1]), count=np.int32([9]), width=12, score=0),
            PrefillChunk(rows=None, count=np.int32([12, 3]), width=12, score=0),
            DecodeStep(count=np.int32([1, 1])),
            DecodeStep(count=np.int32([4, 2]), drafts=drafts),
        ):
            result, batch = execute(step, weights, batch, **static)
            results.append(result)
        one, both, first, then = results
        one, both = one.logprobs[:, :9], (both.logprobs[0], both.logprobs[1, :3])
        found[execute] = jax.tree.map(np.asarray, (one, both, first, then, batch.cache.length))
    # The same sums, but XLA may round what goes from program to program. A step of an int8 cache is 5e-3.
    close = dict(atol=1e-5 if kv_dtype == "float32" else 5e-3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **close), *found.values())
