"""Sampling on a sharded vocabulary: exact sets, the right frequencies, and the same draws on every mesh."""

from functools import lru_cache, partial

import jax
import numpy as np
import pytest
import torch
from conftest import llama4_config, mesh_of
from jax.sharding import PartitionSpec as P
from test_generation import deep
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sharding import sampling
from sharding.mesh import MODEL, mesh_size
from sharding.sampling import Sampling

CFG = llama4_config()
NUMBERS = {name: x for name, x in vars(sampling.NEUTRAL).items() if isinstance(x, np.generic)}
NEUTRAL = {name: x.item() for name, x in NUMBERS.items()}
TYPES = {name: x.dtype for name, x in NUMBERS.items()}
OF_ANSWERS = dict(presence_penalty=0, frequency_penalty=0, answer_start=0)
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((8, CFG.V)).astype(np.float32) * 2
# Of each row a text, of which the first LENGTH tokens count: the likeliest one twice, and any.
TEXT = RNG.integers(0, CFG.V, (8, 12)).astype(np.int32)
TEXT[:, 1] = TEXT[:, 9] = LOGITS.argmax(-1)
LENGTH = np.array([0, 1, 2, 3, 5, 11, 12, 7], np.int32)


@lru_cache
def program(name, scores):
    """`sample` on a mesh; with `scores`, what it takes the largest of, [B,V], instead of the largest."""
    layouts = P("data", MODEL), P("data"), P("data"), P("data")
    out = P("data", MODEL) if scores else P("data")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh_of(CFG, name), in_specs=layouts, out_specs=out)
    def on_device(logits, how, text, length):
        with pytest.MonkeyPatch.context() as patch:
            if scores:
                patch.setattr(sampling, "argmax", lambda x: x)
            return sampling.sample(logits, how, text, length, CFG.V)

    return on_device


def draw(logits, how, name="1", text=TEXT, length=LENGTH, scores=False):
    """One token per row, the vocabulary padded and sharded as in the model. how: of numbers, or of [B]."""
    shards = mesh_size(mesh_of(CFG, name), MODEL)
    padded = np.pad(logits, ((0, 0), (0, -CFG.V % shards)), constant_values=-np.inf)
    asked = {
        x: np.broadcast_to(np.asarray(v, TYPES[x]), len(logits)) if x in TYPES else v for x, v in how.items()
    }
    found = program(name, scores)(padded, Sampling(**asked), text, length)
    return np.asarray(found)[:, : CFG.V] if scores else np.asarray(found)


def transformers_scores(logits, text, how) -> np.ndarray:
    """What transformers leaves of the logits of one row, [V], in float64 and in the order that it applies."""
    scores, how = torch.tensor(logits, dtype=torch.float64)[None], NEUTRAL | how
    processors = [RepetitionPenaltyLogitsProcessor(float(how["repetition_penalty"]))]
    processors += [TemperatureLogitsWarper(how["temperature"])] if how["temperature"] else []
    processors += [TopKLogitsWarper(how["top_k"])] if how["top_k"] else []
    processors += [TopPLogitsWarper(how["top_p"])] if how["top_p"] < 1 else []
    processors += [MinPLogitsWarper(how["min_p"])] if how["min_p"] else []
    for processor in processors:
        scores = processor(torch.tensor(text, dtype=torch.int64)[None], scores)
    return scores[0].numpy()


@pytest.mark.parametrize("name", ["1", "tp8"])
@pytest.mark.parametrize("how", [{}, dict(temperature=0)], ids=["greedy", "of rows that may be drawn"])
def test_greedy(name, how):
    """The first of equals, wherever the shards lie."""
    logits = LOGITS.copy()
    logits[0, [3, 70]] = 50
    logits[1, [50, 100]] = 50
    how = how and dict(how, seed=0)
    np.testing.assert_array_equal(draw(logits, how, name), logits.argmax(-1))


@pytest.mark.parametrize("name", ["dp2-ep2-tp2", deep("tp8")])
def test_penalty(name):
    """Every logit as transformers has it, for unlike penalties; tokens beyond the length do not count."""
    penalty = np.array([1.5, 3.0, 1.2, 1.0, 0.6, 2.0, 1.1, 1.3])
    expected = np.stack(
        [
            transformers_scores(x, text[:n], dict(repetition_penalty=p))
            for x, text, n, p in zip(LOGITS, TEXT, LENGTH, penalty, strict=True)
        ]
    )
    assert (expected.argmax(-1) != LOGITS.argmax(-1)).any()
    how = dict(repetition_penalty=penalty)
    result = draw(LOGITS, how, name, scores=True)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    beyond = np.where(np.arange(12) < LENGTH[:, None], TEXT, LOGITS.argsort(-1)[:, -12:])
    np.testing.assert_array_equal(draw(LOGITS, how, name, beyond, scores=True), result)
    np.testing.assert_array_equal(draw(LOGITS, how, name), expected.argmax(-1))


@pytest.mark.parametrize("name", ["1", "dp2-ep2-tp2", deep("tp8")])
def test_answer_penalties(name):
    """By the OpenAI API's definition, for unlike rows: of tokens of the answer only, each time or once."""
    start = np.minimum([0, 0, 1, 2, 9, 3, 0, 8], LENGTH)
    often, once = np.array([0.5, -2, 1, 0, 0.3, 2, 0.7, 1]), np.array([0, 1, -1.5, 2, 0.1, 0, 0.4, 2])
    counts = [np.bincount(t[a:b], minlength=CFG.V) for t, a, b in zip(TEXT, start, LENGTH, strict=True)]
    counts = np.stack(counts)
    expected = LOGITS - often[:, None] * counts - once[:, None] * (counts > 0)
    assert counts.max() == 2
    how = dict(frequency_penalty=often, presence_penalty=once, answer_start=start)
    np.testing.assert_allclose(draw(LOGITS, how, name, scores=True), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["1", "dp2-ep2-tp2", deep("tp8")])
def test_bias_and_allowed(name):
    """Biases of unlike rows, none of a row; then only what is allowed, in a vocabulary of no whole words."""
    rng, n = np.random.default_rng(2), 5
    tokens = np.stack([rng.permutation(CFG.V)[:n] for _ in LOGITS]).astype(np.int32)
    tokens[0], tokens[1, 3:] = -1, -1
    values = rng.uniform(-9, 9, tokens.shape).astype(np.float32)
    allowed = rng.random(LOGITS.shape) < 0.1
    allowed[:2], allowed[2] = True, np.arange(CFG.V) == CFG.V - 1
    expected = LOGITS.copy()
    for row, ids, bias in zip(expected, tokens, values, strict=True):
        row[ids[ids >= 0]] += bias[ids >= 0]
    assert CFG.V % 32
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -CFG.V % 32))), -1, bitorder="little").view(np.uint32)
    bias = sampling.Bias(tokens=tokens, values=values)
    np.testing.assert_allclose(draw(LOGITS, dict(bias=bias), name, scores=True), expected, rtol=1e-6)
    found = draw(LOGITS, dict(bias=bias, allowed=bits), name, scores=True)
    np.testing.assert_allclose(found, np.where(allowed, expected, -np.inf), rtol=1e-6)
    for temperature in (2.0, 3e38):
        drawn = draw(LOGITS, dict(bias=bias, allowed=bits, temperature=temperature, seed=np.arange(8)), name)
        assert allowed[np.arange(8), drawn].all() and drawn[2] == CFG.V - 1


@pytest.mark.parametrize("name", ["1", "dp2-ep2-tp2", deep("tp8")])
def test_top_logprobs(name):
    """As sorting all of the vocabulary finds them, also where a shard has fewer tokens than are asked for."""
    layouts, n = (P("data", MODEL),), 20
    mesh = mesh_of(CFG, name)
    padded = np.pad(LOGITS, ((0, 0), (0, -CFG.V % mesh_size(mesh, MODEL))), constant_values=-np.inf)
    run = jax.shard_map(
        lambda x: sampling.top_logprobs(x, n), mesh=mesh, in_specs=layouts, out_specs=P("data")
    )
    found, order = jax.jit(run)(padded), np.argsort(-LOGITS, -1)[:, :n]
    np.testing.assert_array_equal(found.tokens, order)
    expected = torch.log_softmax(torch.tensor(LOGITS, dtype=torch.float64), -1).numpy()
    np.testing.assert_allclose(found.logprobs, np.take_along_axis(expected, order, -1), atol=1e-5)


RESTRICTIONS = [
    {},
    dict(top_k=5),
    dict(top_p=0.6),
    dict(min_p=0.1),
    dict(top_k=20, top_p=0.8),
    dict(top_k=8, min_p=0.03),
    dict(top_p=0.9, min_p=0.08),
    dict(top_k=30, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("how", RESTRICTIONS, ids=str)
@pytest.mark.parametrize(("temperature", "penalty"), [(0.7, 1.3), deep(1.5, 1.0)])
def test_kept_set(how, temperature, penalty):
    """Of each of 200 rows the very tokens that transformers keeps."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((200, CFG.V)) * rng.uniform(0.5, 4, (200, 1))).astype(np.float32)
    text, length = rng.integers(0, CFG.V, (200, 12), np.int32), rng.integers(0, 13, 200, np.int32)
    how = NEUTRAL | how | dict(temperature=temperature, repetition_penalty=penalty)
    result = draw(logits, how, text=text, length=length, scores=True)
    expected = [transformers_scores(x, t[:n], how) for x, t, n in zip(logits, text, length, strict=True)]
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))


@pytest.mark.parametrize(
    ("how", "temperature", "penalty"),
    [
        pytest.param(how, *more, id=f"{how}-{more}", marks=[pytest.mark.deep] * (how != all_three))
        for all_three in RESTRICTIONS[-1:]
        for how in RESTRICTIONS
        for more in ((1.5, 1.0), (0.7, 1.5))
    ],
)
def test_frequencies(how, temperature, penalty):
    """20,000 draws of one row: nothing outside the kept set, and chi-square within what chance allows."""
    n, (logits, text) = 20_000, (LOGITS[5], TEXT[5])
    how = NEUTRAL | how | dict(temperature=temperature, repetition_penalty=penalty)
    scores = transformers_scores(logits, text, how)
    expected = np.exp(scores) / np.exp(scores).sum() * n
    # Half of the draws differ in their seeds, half in their lengths, which no text is longer than.
    i = np.arange(n)
    seed, length = np.where(i < n // 2, i, 7), np.int32(len(text) + np.where(i < n // 2, 3, i))
    tokens = draw(np.tile(logits, (n, 1)), how | dict(seed=seed), "dp8", np.tile(text, (n, 1)), length)
    observed = np.bincount(tokens, minlength=CFG.V)
    assert not observed[expected == 0].any()
    often = expected > 5
    chi_square = ((observed - expected)[often] ** 2 / expected[often]).sum()
    # Mean often - 1, standard deviation sqrt(2 (often - 1)): five of them is one chance in a million.
    freedom = max(often.sum() - 1, 0)
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9


# One for each row of a batch. Of the first and the last two, the likeliest is taken.
UNLIKE = [
    {},
    dict(temperature=0.9),
    dict(temperature=1.0, top_k=7),
    dict(temperature=1.5, top_p=0.9),
    dict(temperature=1.2, min_p=0.05),
    dict(temperature=1.3, top_k=30, top_p=0.95, min_p=0.02, repetition_penalty=1.4),
    dict(repetition_penalty=3.0),
    dict(temperature=0, top_k=20, top_p=0.5, min_p=0.1, repetition_penalty=0.8),
]


def columns(rows, seeds) -> dict:
    """What unlike rows ask, as arrays."""
    return {x: np.array([(NEUTRAL | row)[x] for row in rows]) for x in NEUTRAL} | dict(seed=seeds)


def test_unlike_rows_in_one_batch():
    """Each row's scores, noise included, are bit for bit as when it is alone; and so are its tokens."""
    drawn = []
    for seeds in np.arange(80).reshape(10, 8):
        together = draw(LOGITS, columns(UNLIKE, seeds), scores=True)
        drawn.append(draw(LOGITS, columns(UNLIKE, seeds), "tp8"))
        np.testing.assert_array_equal(drawn[-1], together.argmax(-1))
        for i, how in enumerate(UNLIKE):
            how, row = how | dict(seed=seeds[i]) if "temperature" in how else how, slice(i, i + 1)
            alone = draw(LOGITS[row], how, text=TEXT[row], length=LENGTH[row], scores=True)
            np.testing.assert_array_equal(together[row], alone)
    differ = [len(set(of_row)) > 1 for of_row in np.stack(drawn, 1)]
    assert differ == [how.get("temperature", 0) > 0 for how in UNLIKE]


@pytest.mark.parametrize("how", [{}, UNLIKE[5]], ids=str)
def test_neutral_values_change_nothing(how):
    """Bit for bit, each of them and all: they stand where some other row asks for more."""
    how = how | dict(seed=5) if "temperature" in how else how
    expected = draw(LOGITS, how, scores=True)
    drawn = dict(temperature=0.0, seed=3)
    alone = [OF_ANSWERS if x in OF_ANSWERS else {x: NEUTRAL[x]} for x in NEUTRAL]
    everything = dict(
        bias=jax.tree.map(lambda x: np.tile(x, (len(LOGITS), 1)), sampling.NEUTRAL.bias),
        allowed=np.full((len(LOGITS), -(-CFG.V // 32)), 0xFFFFFFFF, np.uint32),
    )
    for neutral in (drawn, *(drawn | x for x in alone), NEUTRAL, NEUTRAL | everything):
        np.testing.assert_array_equal(draw(LOGITS, neutral | how, scores=True), expected)


@pytest.mark.parametrize("name", ["dp2-ep2-tp2", deep("dp8"), deep("tp8")])
def test_same_draws_on_every_mesh(name):
    """Of unlike rows, bit for bit; other seeds and other lengths draw others."""
    how = columns(UNLIKE, np.arange(8))
    alone = draw(LOGITS, how, scores=True)
    np.testing.assert_array_equal(draw(LOGITS, how, name, scores=True), alone)
    others = dict(how=how | dict(seed=np.arange(8) + 9)), dict(how=how, length=LENGTH + 20)
    for other in others:
        differs = draw(LOGITS, name=name, scores=True, **other) != alone
        assert differs.any(1)[1:6].all() and not differs[0].any()


@lru_cache
def top_of_one_device(on_cpu: bool):
    layout = P("data", MODEL)
    layouts = layout, layout, P("data")
    run = jax.jit(jax.shard_map(sampling.select_top, mesh=mesh_of(CFG), in_specs=layouts, out_specs=layout))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "on_cpu", lambda: on_cpu)
        return run.lower(LOGITS, LOGITS, LOGITS[:, 0]).compile()


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("target", [1e-46, 0.001, 0.3, 0.95, 0.999999, 0.99999999])
def test_kept_set_is_exact(target, on_cpu):
    """Against sorting, in the rounds of a CPU and of others; from less than a token's mass to all."""
    mass = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    kept = top_of_one_device(on_cpu)(LOGITS, mass, np.full(len(LOGITS), target, np.float32))
    for row_mass, row_kept in zip(mass, np.asarray(kept), strict=True):
        falling = -np.sort(-row_mass)
        n = row_kept.sum()
        assert n >= 1
        np.testing.assert_array_equal(-np.sort(-row_mass[row_kept]), falling[:n])
        # Sums of float32 in two orders: they may disagree by rounding on which token reaches the target.
        assert n == CFG.V or falling[:n].sum() >= target - 1e-6
        assert falling[: n - 1].sum() < target + 1e-6


EXTREMES = [
    dict(temperature=1e-40),
    dict(temperature=1.2e-38),
    dict(temperature=1e-6),
    dict(temperature=1.0, top_p=1e-46),
    dict(temperature=2.0, top_k=1),
    dict(temperature=5.0, min_p=1.0),
    dict(temperature=1e-9, top_k=10**9, top_p=0.99999999, min_p=1e-46, repetition_penalty=1.0),
]


@pytest.mark.parametrize("how", EXTREMES, ids=str)
def test_extremes_are_greedy(how):
    np.testing.assert_array_equal(draw(LOGITS, NEUTRAL | how), LOGITS.argmax(-1))


@pytest.mark.parametrize("name", [deep("1"), "tp8"])
@pytest.mark.parametrize("how", [{}, dict(repetition_penalty=2.0), *UNLIKE[1:5], NEUTRAL], ids=str)
def test_nan_is_no_token(how, name):
    """Of a row of NaN no token is chosen, so that it is noticed; the others are as they were."""
    logits, how = LOGITS.copy(), how | dict(seed=0) if "temperature" in how else how
    logits[3] = np.nan
    tokens = draw(logits, how, name)
    assert tokens[3] >= CFG.V
    np.testing.assert_array_equal(np.delete(tokens, 3), np.delete(draw(LOGITS, how, name), 3))
