"""`prefill`, `decode_step` and `forward` on 8 devices against `forward` on one."""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config, mesh_of, random_weights

import model

ROWS, T = 4, 30
# Of logits around 1: sums in another order, in float32.
TOLERANCE = 1e-4
deep = partial(pytest.param, marks=pytest.mark.deep)

# A vocabulary of 101 tokens, which no number of devices divides. llama4: shared heads, padded queries, and
# layers of all masks, whose rings the 30 tokens go around several times.
CONFIGS = {
    "llama3": llama3_config(depth=1, tied_embeddings=True),
    "llama4": llama4_config((Kind(chunk=8, moe=True), Kind(window=5), Kind(rope=False))),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [deep("llama3", "tp8"), deep("llama4", "tp8"), ("llama4", "dp2-ep2-tp2")],
)
def test_unlike_prompts_in_several_calls(name, mesh):
    """A forward of the whole texts; and each row reads a number of tokens of its own in each call.

    The rest of a call's tokens is padding.
    """
    cfg, rng = CONFIGS[name], np.random.default_rng(1)
    texts, one, devices = rng.integers(0, cfg.V, (ROWS, T), np.int32), mesh_of(cfg), mesh_of(cfg, mesh)
    expected = np.asarray(model.forward(texts, random_weights(cfg, one), cfg=cfg, mesh=one))
    weights, static = random_weights(cfg, devices), dict(cfg=cfg, mesh=devices)
    logits = model.forward(texts, weights, **static)
    assert logits.shape == (ROWS, T, cfg.V)  # without the padding of the vocabulary
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    cache, read = model.init_cache(cfg, devices, ROWS, T, "float32"), np.zeros(ROWS, np.int32)

    def check(logits: jax.Array) -> None:
        assert logits.shape == (ROWS, cfg.V) and cache.length.tolist() == read.tolist()
        np.testing.assert_allclose(logits, expected[np.arange(ROWS), read - 1], atol=TOLERANCE)

    for count in [11, 1, 4, 8], [1, 9, 5, 3], [6, 11, 11, 11]:
        tokens = rng.integers(0, cfg.V, (ROWS, 11), np.int32)  # padding must not matter
        for row, n in enumerate(count):
            tokens[row, :n] = texts[row, read[row] :][:n]
        old = cache
        logits, cache = model.prefill(tokens, weights, cache, np.int32(count), **static)
        read += count
        check(logits)
        assert old.length.is_deleted()
    for _ in range(5):
        logits, cache = model.decode_step(texts[np.arange(ROWS), read], weights, cache, **static)
        read += 1
        check(logits)
    # After decode steps as many more tokens as all rows have left, without `count`.
    left = T - read.max()
    tokens = np.stack([text[n : n + left] for text, n in zip(texts, read, strict=True)])
    logits, cache = model.prefill(tokens, weights, cache, **static)
    read += left
    check(logits)
    assert read.max() == T
