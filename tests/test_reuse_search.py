"""A search for answers that depend on their batch: on its other rows, on guesses, or on what is reused.

Each request is answered as it is alone, up to rounding. But where two tokens are nearly as likely, or two
experts nearly as good, rounding chooses between them, and another expert may change much. So where the two
answers part, both must be what a model in float64 says: as it is, or with one near tie decided otherwise.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import Kind, dequantize, engine_of, llama4_config, mesh_of, with_chunks
from test_generation import finish

import model
from quantize import QuantizedArray
from serving import scheduler
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.speculation import DraftModel, PromptLookup
from sharding.arrays import ArrayInfo

MAX_LEN, REQUESTS = 96, 30
# Of log-probabilities. In float32 1e-5 was seen; in int8 7e-3, where a key or value rounds to another step.
SAME = {"float32": 1e-4, "int8": 2e-2}
# Of a router's logits, that rounding may turn: they come from the same hidden states.
TIE = SAME


def in_float64(weights: model.Weights, cfg: model.Config) -> model.Weights:
    def convert(info: ArrayInfo, x) -> np.ndarray:
        x = dequantize(x, info.contracted_axes) if isinstance(x, QuantizedArray) else x
        return np.asarray(x, np.float64)

    return jax.tree.map(convert, model.weight_infos(cfg), weights)


def norm(x: np.ndarray, eps: float, weight=1.0) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """gate, up: [F,D], down: [D,F]."""
    h = x @ gate.T
    return (h / (1 + np.exp(-h)) * (x @ up.T)) @ down.T


def rounded(x: np.ndarray) -> np.ndarray:
    """As an int8 cache holds it: a bfloat16 scale for each [...,H]."""
    scale = np.abs(x).max(-1, keepdims=True) / 127
    scale = scale.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    return np.clip(np.round(x / scale), -127, 127) * scale


def by_hand(text: list[int], w: model.Weights, cfg: model.Config, kv: str, other=None):
    """Log-probabilities [T,V] after each token, and the router's margins, of best over second [T,layers].

    One position at a time, with lists of keys and values. other: the (position, layer) that takes the second.
    """
    logprobs, margins = [], np.full((len(text), len(cfg.layers)), np.inf)
    keys, values = ([[] for _ in cfg.layers] for _ in range(2))
    H, eps = cfg.layers[0].attention.H, cfg.norm.eps

    def rotate(x: np.ndarray, t: int, rope: model.Rope) -> np.ndarray:
        turn = rope.theta ** (-np.arange(0, H, 2) / H)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * t * turn)
        return norm(np.stack([pairs.real, pairs.imag], -1).reshape(x.shape), eps)

    for t, token in enumerate(text):
        x = w.embed[token]
        for i, (layer, kind) in enumerate(zip(w.layers, cfg.layers, strict=True)):
            a, f = layer.attention, layer.feed_forward
            h = norm(x, eps, layer.attention_norm)
            q, k, v = a.q @ h, a.k @ h, a.v @ h
            if kind.rope:
                q, k = rotate(q, t, kind.rope), rotate(k, t, kind.rope)
            else:
                scale, floor, _ = dataclasses.astuple(kind.attention.query_scale)
                q = q * (1 + scale * np.log1p((t + 1) // floor))
            keys[i].append(rounded(k) if kv == "int8" else k)
            values[i].append(rounded(v) if kv == "int8" else v)
            first = t - t % kind.mask.ring if kind.mask.ring else 0
            first = max(0, t + 1 - kind.mask.window) if kind.mask.window else first
            scores = np.einsum("kgH,SkH->kgS", q, keys[i][first:]) * H**-0.5
            p = np.exp(scores - scores.max(-1, keepdims=True))
            o = np.einsum("kgS,SkH->kgH", p / p.sum(-1, keepdims=True), values[i][first:])
            x = x + np.einsum("kgH,DkgH->D", o, a.o)
            h = norm(x, eps, layer.feed_forward_norm)
            if isinstance(f, model.MoEWeights):
                logits = h @ f.router
                second, best = np.argsort(logits)[-2:]
                margins[t, i] = logits[best] - logits[second]
                e = second if (t, i) == other else best
                y = swiglu(h / (1 + np.exp(-logits[e])), f.gate[e].T, f.up[e].T, f.down[e].T)
                f, x = f.shared, x + y
            x = x + swiglu(h, f.gate, f.up, f.down)
        logits = norm(x, eps, w.norm) @ w.unembed.T
        logits = logits - logits.max()
        logprobs.append(logits - np.log(np.exp(logits).sum()))
    return np.array(logprobs), margins


def explained(answer: Answer, n: int, w: model.Weights, cfg: model.Config, kv: str) -> bool:
    """Whether its first n tokens are the likeliest, with these log-probabilities: to the model as it is, or
    to one that takes the second expert in one place where the first is hardly better.
    """
    prompt, tokens = answer.request.prompt, answer.tokens[:n]
    text = prompt + tokens[:-1]

    def right(logprobs: np.ndarray) -> bool:
        logprobs = logprobs[len(prompt) - 1 :]
        chosen = logprobs[np.arange(n), tokens]
        close = np.abs(chosen - answer.logprobs[:n]) < SAME[kv]
        return bool(np.all(close & (logprobs.max(-1) - chosen < SAME[kv])))

    logprobs, margins = by_hand(text, w, cfg, kv)
    places = map(tuple, np.argwhere(margins < TIE[kv]))
    return right(logprobs) or any(right(by_hand(text, w, cfg, kv, place)[0]) for place in places)


def parting(one: Answer, other: Answer, kv: str) -> int | None:
    """The first place in which two answers to a request differ by more than rounding does at once."""
    pairs = zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=False)
    for place, (a, b, p, q) in enumerate(pairs):
        if a != b or abs(p - q) > SAME[kv]:
            return place
    assert one.finish_reason == other.finish_reason and len(one.tokens) == len(other.tokens)
    return None


def near_copy(weights: model.Weights, seed: int) -> model.Weights:
    """Weights of which each is 5% or so more or less: a draft that is often, not always, right."""
    leaves, treedef = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return treedef.unflatten(
        [x * (1 + jax.random.normal(key, x.shape) / 20).astype(x.dtype) for key, x in pairs]
    )


def search(
    monkeypatch, seeds, chunks, rows: int, guesses: str, kv: str, moe: bool, prefix_cache_bytes: int = 0
) -> None:
    """Requests that begin like one another, or go on from one another's answers, and end at any time.

    chunks: of each layer but the last, which sees all; a negative one is a window.
    """
    monkeypatch.setattr("serving.chunks.CPU_SHAPES", ((1, 8),))
    monkeypatch.setattr(scheduler, "MIN_COPIED", 1)
    monkeypatch.setattr(scheduler, "MIN_SAVED", 1)
    kinds = [Kind(chunk=n, moe=moe) if n > 0 else Kind(window=-n, moe=moe) for n in chunks]
    cfg = llama4_config(G=2, layers=(*kinds, Kind(rope=False, moe=moe)))
    mesh, reused, forgiven = mesh_of(cfg), 0, 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        weights = model.init_weights(jax.random.key(seed), cfg, mesh)
        kept = Request(list(range(MAX_LEN - 24)), 1, stop=frozenset())  # the longest

        def batch_of(speculation=None, saved: int = 0, weights=weights, kept=kept) -> Engine:
            programs = Programs(weights, cfg, mesh, rows, MAX_LEN, kv, speculation)
            return engine_of(programs, [kept], prefix_cache_bytes=saved)

        texts, alone = rng.integers(0, cfg.V, (2, 60)).tolist(), []
        single = batch_of()
        for _ in range(REQUESTS):
            text = texts[rng.integers(len(texts))]
            own = rng.integers(0, cfg.V, rng.integers(1, 8)).tolist()
            prompt = text[: rng.integers(len(text) + 1, size=2).max()][: len(kept.prompt) - len(own)] + own
            stop = frozenset(rng.choice(cfg.V, 8, replace=False).tolist())
            for row in single.scheduler.rows:
                row.clear()  # so that nothing is reused
            alone.append(single.add(Request(prompt, int(rng.integers(1, 25)), stop=stop)))
            finish(single)
            texts.append(prompt + alone[-1].tokens)
        assert single.stats.reused_tokens == 0
        speculation = None
        if guesses == "lookup":
            speculation = PromptLookup(4)
        if guesses.startswith("draft"):
            other = cfg
            if guesses == "draft with other chunks":
                other = with_chunks(cfg, 6)
            draft = Programs(near_copy(weights, seed), other, mesh, rows, MAX_LEN, kv)
            speculation = DraftModel(draft, 4)
        batch = batch_of(speculation, prefix_cache_bytes)
        together = [batch.add(answer.request) for answer in alone]
        finish(batch)
        reused += batch.stats.reused_tokens / batch.stats.prompt_tokens
        exact = in_float64(weights, cfg)
        for i, pair in enumerate(zip(together, alone, strict=True)):
            place = parting(*pair, kv)
            if place is not None:
                assert all(explained(answer, place + 1, exact, cfg, kv) for answer in pair), (seed, i, place)
                forgiven += 1
    assert reused > len(seeds) / 10
    assert forgiven <= len(seeds) * REQUESTS / 50  # near ties are rare


def test_the_model_by_hand():
    """The truth of this file against model.forward."""
    cfg = llama4_config(G=2, layers=(Kind(chunk=8, moe=True), Kind(window=8), Kind(rope=False)))
    weights = model.init_weights(jax.random.key(0), cfg, mesh_of(cfg))
    text = np.random.default_rng(0).integers(0, cfg.V, 40)
    logits = model.forward(jnp.asarray(text[None], jnp.int32), weights, cfg=cfg, mesh=mesh_of(cfg))
    ours = by_hand(text.tolist(), in_float64(weights, cfg), cfg, "float32")[0]
    np.testing.assert_allclose(ours, jax.nn.log_softmax(logits)[0], atol=SAME["float32"])


@pytest.mark.parametrize("chunks", [(-8, -16), pytest.param((8,), marks=pytest.mark.deep)])
def test_guesses_rings_and_prefixes_in_host_memory(chunks, monkeypatch):
    """With few rows, drafts and an int8 cache: what a ring held when it was saved must suffice."""
    loads, load = [], Programs.load_prefixes

    def counted(self, rows, prefixes):
        loads.append(rows)
        load(self, rows, prefixes)

    monkeypatch.setattr(Programs, "load_prefixes", counted)
    search(monkeypatch, range(1), chunks, 2, "draft", "int8", True, prefix_cache_bytes=1 << 30)
    assert len(loads) > 3


def test_a_row_that_goes_back_again_and_again(monkeypatch):
    """A window's ring holds what its row read before it went back, too, in the place of older tokens."""
    monkeypatch.setattr(scheduler, "MIN_COPIED", 1)
    cfg = llama4_config(G=2, layers=(Kind(window=8), Kind(rope=False)))
    mesh = mesh_of(cfg)
    weights = model.init_weights(jax.random.key(0), cfg, mesh)
    text = np.random.default_rng(0).integers(0, cfg.V, 60).tolist()
    requests = [Request(text[:n] + [7], 1, stop=frozenset()) for n in range(60, 20, -2)]
    together, alone = (
        engine_of(Programs(weights, cfg, mesh, 1, MAX_LEN, "float32"), requests) for _ in range(2)
    )
    for request in requests:
        alone.scheduler.rows[0].clear()
        pair = [batch.add(request) for batch in (together, alone)]
        finish(together)
        finish(alone)
        np.testing.assert_allclose(pair[0].logprobs, pair[1].logprobs, atol=SAME["float32"])
        assert pair[0].tokens == pair[1].tokens
    assert together.stats.reused_tokens > 0


SETTINGS = [
    # chunks, rows, guesses, cache, experts
    ((16, 16), 4, "draft", "int8", True),
    ((16, 16), 2, "lookup", "int8", False),
    ((8,), 4, "draft with other chunks", "int8", True),
    ((6,), 1, "lookup", "float32", True),
    ((-8, -16), 4, "draft", "float32", True),
    ((-8, 8), 3, "lookup", "int8", False),
]


@pytest.mark.deep
@pytest.mark.parametrize(("chunks", "rows", "guesses", "kv", "moe"), SETTINGS)
def test_many(chunks, rows, guesses, kv, moe, monkeypatch):
    search(monkeypatch, range(100, 102), chunks, rows, guesses, kv, moe)
