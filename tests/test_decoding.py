"""`prefill` and `decode_step` on 8 devices against `forward` on one, and `forward` against plain numpy."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from conftest import Kind, llama3_config, llama4_config, mesh_of, random_weights, weights_of_one_device

import model

ROWS, T = 4, 30
# Of logits around 1: sums in another order, in float32.
TOLERANCE = 1e-4
deep = partial(pytest.param, marks=pytest.mark.deep)

# A vocabulary of 101 tokens, which no number of devices divides. llama4: shared heads, padded queries, and
# layers of all masks, whose rings the 30 tokens go around several times.
CONFIGS = {
    "llama3": llama3_config(),
    "llama3-tied": llama3_config(tied_embeddings=True),
    "llama4": llama4_config((Kind(chunk=8, moe=True), Kind(window=5), Kind(rope=False))),
}


def texts_for(cfg: model.Config) -> np.ndarray:
    return np.random.default_rng(0).integers(0, cfg.V, (ROWS, T), np.int32)


def logits_of_one_device(texts: np.ndarray, cfg: model.Config) -> np.ndarray:
    """[B,T,V], by a forward of the whole texts."""
    mesh = mesh_of(cfg)
    return np.asarray(model.forward(texts, random_weights(cfg, mesh), cfg=cfg, mesh=mesh))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama3", "tp8"), deep("llama3-tied", "tp8"), deep("llama4", "tp8"), ("llama4", "dp2-ep2-tp2")],
)
def test_unlike_prompts_in_several_calls(name, mesh):
    """Each row reads a number of tokens of its own in each call; the rest of a call's tokens is padding."""
    cfg, rng = CONFIGS[name], np.random.default_rng(1)
    texts, devices = texts_for(cfg), mesh_of(cfg, mesh)
    expected = logits_of_one_device(texts, cfg)
    weights, static = random_weights(cfg, devices), dict(cfg=cfg, mesh=devices)
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


@pytest.mark.parametrize("mesh", ["tp8", deep("dp2-ep2-tp2")])
def test_forward_on_a_mesh(mesh):
    """All logits of all tokens, without the padding of the vocabulary."""
    cfg = CONFIGS["llama4"]
    texts, devices = texts_for(cfg), mesh_of(cfg, mesh)
    logits = model.forward(texts, random_weights(cfg, devices), cfg=cfg, mesh=devices)
    assert logits.shape == (ROWS, T, cfg.V)
    np.testing.assert_allclose(logits, logits_of_one_device(texts, cfg), atol=TOLERANCE)


# ------------------------------------------------------------------------------------ two ropes in one model

LOCAL, GLOBAL = model.Rope(1e2, 8), model.Rope(1e5, 4, interleaved=True)


def config_of_two_ropes() -> model.Config:
    """Layers of unlike ropes in turn, as Gemma 3 has them: of all columns by halves, of some by neighbors."""
    cfg = llama3_config(K=2, G=3, depth=4)
    kinds = [
        dataclasses.replace(kind, rope=rope)
        for kind, rope in zip(cfg.layers, (LOCAL, GLOBAL) * 2, strict=True)
    ]
    return dataclasses.replace(cfg, layers=tuple(kinds))


def by_hand(text: np.ndarray, w: model.Weights, cfg: model.Config) -> np.ndarray:
    """Logits [T,V] in float64, of text [T] and the weights of one device."""
    w = jax.tree.map(partial(np.asarray, dtype=np.float64), w)
    positions = np.arange(len(text))

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + cfg.norm.eps) * weight

    def rotate(x: np.ndarray, rope: model.Rope) -> np.ndarray:
        """x: [T,...,H]. A pair of columns is a complex number, which is multiplied by one of modulus 1."""
        width = rope.width
        first = np.arange(0, width, 2) if rope.interleaved else np.arange(width // 2)
        second = first + (1 if rope.interleaved else width // 2)
        turn = np.exp(1j * np.outer(positions, rope.theta ** (-np.arange(0, width, 2) / width)))
        pairs = (x[..., first] + 1j * x[..., second]) * turn.reshape(len(x), *(1,) * (x.ndim - 2), -1)
        result = x.copy()
        result[..., first], result[..., second] = pairs.real, pairs.imag
        return result

    x = w.embed[text]
    for layer, kind in zip(w.layers, cfg.layers, strict=True):
        a, f = layer.attention, layer.feed_forward
        h = norm(x, layer.attention_norm)
        q, k = (
            rotate(y, kind.rope)
            for y in (np.einsum("TD,kgHD->TkgH", h, a.q), np.einsum("TD,khD->Tkh", h, a.k))
        )
        scores = np.einsum("TkgH,SkH->kgTS", q, k) * cfg.attention.H**-0.5
        scores = np.where(positions[:, None] >= positions, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        v = np.einsum("SD,khD->Skh", h, a.v)
        o = np.einsum("kgTS,SkH->TkgH", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("TkgH,DkgH->TD", o, a.o)
        h = norm(x, layer.feed_forward_norm)
        gate = h @ f.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ f.up.T)) @ f.down.T
    return norm(x, w.norm) @ w.unembed.T


@pytest.mark.parametrize("mesh", ["1", "tp8"])
def test_two_ropes_in_one_model(mesh):
    """Each layer rotates by its own: at once, and a token after many from the cache."""
    cfg = config_of_two_ropes()
    devices, text = mesh_of(cfg, mesh), texts_for(cfg)[:1]
    expected = by_hand(text[0], weights_of_one_device(cfg, None), cfg)
    weights, static = random_weights(cfg, devices), dict(cfg=cfg, mesh=devices)
    logits = model.forward(text, weights, **static)
    np.testing.assert_allclose(logits[0], expected, atol=TOLERANCE)
    cache = model.init_cache(cfg, devices, 1, T, "float32")
    logits, cache = model.prefill(text[:, : T - 1], weights, cache, **static)
    np.testing.assert_allclose(logits[0], expected[T - 2], atol=TOLERANCE)
    logits, cache = model.decode_step(text[:, T - 1], weights, cache, **static)
    np.testing.assert_allclose(logits[0], expected[T - 1], atol=TOLERANCE)


def test_the_ropes_differ():
    """Or the test above would tell nothing: with one of them in all layers the logits are others."""
    cfg = config_of_two_ropes()
    weights, text = weights_of_one_device(cfg, None), texts_for(cfg)[0]
    expected = by_hand(text, weights, cfg)
    for rope in LOCAL, GLOBAL:
        kinds = tuple(dataclasses.replace(kind, rope=rope) for kind in cfg.layers)
        other = by_hand(text, weights, dataclasses.replace(cfg, layers=kinds))
        assert np.abs(other - expected).max() > 1000 * TOLERANCE
