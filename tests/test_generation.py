"""Requests that share the rows of one batch: each is answered as it is alone, and on the way nothing is
compiled, nothing is read twice, and nothing waits.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    Kind,
    engine_of,
    llama3_config,
    llama4_config,
    mesh_of,
    random_weights,
    rings,
    with_short_rings,
)

import model
from families.registry import read_config
from feedback.errors import UserError
from quantize import QuantizedArray
from serving import chunks, executors, programs, scheduler, steps
from serving.engine import Engine
from serving.executors import one_program
from serving.needed import demand_of, needed_programs
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.reuse import with_room
from serving.scheduler import Row, Shard
from serving.speculation import PromptLookup
from serving.steps import Batch, DecodeStep, PrefillChunk, assign_rows, batch_infos, init_batch
from sharding.arrays import abstract
from sharding.sampling import Sampling

ROWS, MAX_LEN = 8, 160
# Of log-probabilities: in float32, prefill chunks of other widths are summed in another order.
TOLERANCE = 1e-4


# Gemma 4 E: layers 2 and 3 read the caches of layers 0 and 1.
SHARED = dict(
    model_type="gemma4_text", vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, global_head_dim=16, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
    hidden_size_per_layer_input=8, max_position_embeddings=4096,
)  # fmt: skip
# Qwen 3.5: two layers with a state, and one with a cache.
STATES = dict(
    model_type="qwen3_5_text", vocab_size=101, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, rms_norm_eps=1e-3,
    layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
)  # fmt: skip
MODELS = {
    "ring": llama4_config(layers=(Kind(chunk=8, moe=True), Kind(rope=False))),
    "rings": llama4_config(layers=(Kind(chunk=6), Kind(chunk=8))),
    "window": llama4_config(layers=(Kind(window=8), Kind(rope=False, moe=True))),
    "words": llama4_config(layers=(Kind(chunk=8, moe=True), Kind(rope=False)), V=512),
    "plain": llama3_config(depth=1),  # whose cache holds every token
    "shared": with_short_rings(read_config(SHARED)),
    "states": with_room(read_config(STATES), drafts=4, kept=2),
}


@functools.cache
def subject(name: str, mesh: str):
    """(weights, cfg, mesh) of a small random model."""
    cfg, devices = MODELS[name], mesh_of(MODELS[name], mesh)
    return random_weights(cfg, devices), cfg, devices


deep = functools.partial(pytest.param, marks=pytest.mark.deep)
ALL_SHAPES = chunks.CPU_SHAPES


@pytest.fixture(autouse=True)
def two_shapes(monkeypatch):
    """Prefill chunks of one row and of several; each shape is compiled for itself."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32), (4, 32)))


@functools.cache
def empty_row(name: str) -> Batch:
    _, cfg, mesh = subject(name, "1")
    return init_batch(cfg, mesh, 1, MAX_LEN, "float32")


def alone(request: Request, name: str) -> tuple[list[int], list[float]]:
    """The answer's tokens and their log-probabilities: a plain loop over one row, which knows no stop."""
    return alone_once(tuple(request.prompt), request.max_new_tokens, request.sampling, name)


@functools.cache
def alone_once(prompt: tuple[int, ...], new: int, sampling: Sampling, name: str):
    weights, cfg, mesh = subject(name, "1")
    static, one = dict(cfg=cfg, mesh=mesh), np.ones(1, np.int32)
    text, length = np.zeros((1, MAX_LEN), np.int32), len(prompt)
    text[0, :length] = prompt
    kinds = dict(seed=np.uint32, top_k=np.int32)
    asked = {name: x for name, x in vars(sampling).items() if x is not None}
    asked = Sampling(**{name: np.array([x], kinds.get(name, np.float32)) for name, x in asked.items()})
    batch = jax.tree.map(jnp.copy, empty_row(name))  # for it is donated
    batch = assign_rows(0 * one, text, 0 * one, None, batch, **static)
    for start in range(0, length - 1, 40):
        chunk = PrefillChunk(rows=None, count=min(length - 1 - start, 40) * one, width=40)
        _, batch = one_program(chunk, weights, batch, **static)
    outputs = []
    for _ in range(new):
        output, batch = one_program(DecodeStep(count=one, sampling=asked), weights, batch, **static)
        outputs.append(output)
    return [int(x.tokens[0, 0]) for x in outputs], [float(x.logprobs[0, 0]) for x in outputs]


def batch_of(requests: list[Request], name: str, mesh: str = "1", rows: int = ROWS, **options) -> Engine:
    return engine_of(Programs(*subject(name, mesh), rows, MAX_LEN, "float32"), requests, **options)


def finish(batch: Engine) -> None:
    for _ in range(20_000):
        if not batch.busy:
            return
        batch.advance()
    raise AssertionError("it does not end")


def ask(batch: Engine, requests: list[Request]) -> list[Answer]:
    answers = [batch.add(request) for request in requests]
    finish(batch)
    return answers


def assert_as_alone(answers: list[Answer], name: str) -> None:
    for answer in answers:
        tokens, logprobs = alone(answer.request, name)
        assert (answer.tokens, answer.finish_reason) == (tokens, "length")
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=TOLERANCE)


def assert_same(found: list[Answer], expected: list[Answer], forced=False, atol=TOLERANCE) -> None:
    """The same tokens, with these log-probabilities. forced: some tokens were, and have none."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.finish_reason) == (theirs.tokens, theirs.finish_reason)
        known = ~np.isnan(ours.logprobs)
        assert (forced or known.all()) and not np.isnan(theirs.logprobs).any()
        np.testing.assert_allclose(
            np.array(ours.logprobs)[known], np.array(theirs.logprobs)[known], atol=atol
        )
        assert len(ours.prompt_logprobs) == (len(ours.request.prompt) - 1) * ours.request.score
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, atol=atol)


def mixed(cfg: model.Config, n: int) -> list[Request]:
    """Prompts of 1..90 tokens and answers of 1..40, more often short ones.

    Of four requests, one begins like others, up to some length, and one asks what was asked before.
    """
    rng = np.random.default_rng(n)

    def tokens(n: int) -> list[int]:
        return rng.integers(0, cfg.V, n).tolist()

    heads, requests = [tokens(80) for _ in range(3)], []
    for i in range(n):
        prompt = tokens(int(min(rng.exponential(25) + 1, 90)))
        if i % 4 == 1:
            prompt = heads[rng.integers(3)][: rng.integers(1, 81)] + prompt[:10]
        if i % 4 == 3:
            prompt = requests[rng.integers(i)].prompt
        requests.append(Request(prompt, int(min(rng.exponential(12) + 1, 40))))
    return requests


def spy_on_steps(monkeypatch, tell) -> None:
    """Call tell(step) after each step that an executor runs, in all Programs that are made from now on."""

    def spied(execute, step, *arguments, **options):
        result = execute(step, *arguments, **options)
        tell(step)
        return result

    def executor_for(mesh):
        return functools.partial(spied, executors.executor_for(mesh))

    monkeypatch.setattr(programs, "executor_for", executor_for)


def spy_on_chunks(monkeypatch) -> list[int]:
    """How many tokens each prefill chunk reads, as the chunks are sent to the device."""
    counts = []

    def tell(step) -> None:
        if isinstance(step, PrefillChunk):
            counts.append(step.count.sum())

    spy_on_steps(monkeypatch, tell)
    return counts


# ------------------------------------------------------------------------------------------ the same answers


@pytest.mark.parametrize("mesh", [*map(deep, ("1", "dp8", "tp8")), "dp2-ep2-tp2"])
def test_requests_in_8_rows(mesh, compiled):
    """Greedy and drawn, on any mesh: as alone, to the token. No neighbor, order or number of rows counts.

    Nothing is traced or compiled once the batch is there.
    """
    assert_answered_as_alone(mesh, 40, compiled)


@pytest.mark.deep
def test_200_requests_in_8_rows(compiled, monkeypatch):
    """The same, with prefill chunks of all shapes."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ALL_SHAPES)
    assert_answered_as_alone("1", 200, compiled)


def assert_answered_as_alone(mesh, n, compiled):
    cfg = subject("ring", "1")[1]
    drawn = sampled(cfg)
    requests = mixed(cfg, n)
    requests[0:18:2] = drawn
    batch = batch_of(requests, "ring", mesh)
    compiled.clear()
    answers = ask(batch, requests)
    stats = dataclasses.replace(batch.stats)
    again = ask(batch, drawn[::-1])
    seeded = [answer for answer in again if answer.request.sampling.seed is not None]
    sampling = [dataclasses.replace(x.request.sampling, seed=99) for x in seeded]
    others = [dataclasses.replace(x.request, sampling=y) for x, y in zip(seeded, sampling, strict=True)]
    for answer, other in zip(seeded, ask(batch, others), strict=True):
        assert answer.tokens != other.tokens
    assert not compiled
    assert_as_alone(answers + again, "ring")
    assert stats.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert stats.tokens == stats.row_steps == sum(request.max_new_tokens for request in requests)
    assert mesh != "1" or stats.reused_tokens > stats.prompt_tokens / 20


@pytest.mark.parametrize("name", ["ring", deep("window"), deep("plain"), deep("shared")])
def test_alone_is_what_the_model_says(name):
    """The truth of these tests against a forward of whole texts, which has no cache."""
    weights, cfg, mesh = subject(name, "1")
    requests = mixed(cfg, 24)
    tokens = [alone(request, name)[0] for request in requests]
    texts = np.zeros((len(requests), MAX_LEN), np.int32)
    for text, request, answer in zip(texts, requests, tokens, strict=True):
        text[: len(request.prompt) + len(answer)] = request.prompt + answer
    likeliest = np.asarray(jnp.argmax(model.forward(texts, weights, cfg=cfg, mesh=mesh), -1))
    for row, request, answer in zip(likeliest, requests, tokens, strict=True):
        assert answer == row[len(request.prompt) - 1 :][: len(answer)].tolist()


SETTINGS = (
    Sampling(),
    Sampling(seed=2, temperature=1.0),
    Sampling(seed=3, temperature=1.5, top_p=0.9, repetition_penalty=1.3),
)


def sampled(cfg: model.Config) -> list[Request]:
    """Three of each of SETTINGS, with seeds of their own, and prompts and answers of unlike lengths."""
    rng, requests = np.random.default_rng(0), []
    for i, sampling in enumerate(SETTINGS * 3):
        seed = None if sampling.seed is None else 10 * i + sampling.seed
        prompt = rng.integers(0, cfg.V, rng.integers(1, 60)).tolist()
        requests.append(Request(prompt, 5 + 2 * i, dataclasses.replace(sampling, seed=seed)))
    return requests


# --------------------------------------------------------------------------------------- what is read already


def test_each_prompt_token_is_read_once(monkeypatch):
    """A system prompt is read with the first question, a question again not at all, a second turn from there.

    The last token of each prompt counts as none here: the step that begins the answer reads it.
    """
    rng, counts = np.random.default_rng(0), spy_on_chunks(monkeypatch)
    system, *own = (rng.integers(0, 101, n).tolist() for n in (40, 3, 20, 9, 1, 16, 2, 12, 5))
    requests = [Request(system + question, 6) for question in own]
    batch = batch_of(requests, "plain", longest=MAX_LEN)
    counts.clear()
    answers = ask(batch, requests)
    assert sum(counts) == 40 + sum(len(question) - 1 for question in own)
    again = ask(batch, requests)
    assert sum(counts) == 40 + sum(len(question) - 1 for question in own)
    turns = [Request(x.request.prompt + x.tokens + [7, 8, 9], 6) for x in again]
    third = ask(batch, turns)
    # The last token of an answer is chosen, not read; then two more before the last.
    assert sum(counts) == 40 + sum(len(question) - 1 for question in own) + 8 * 3
    stats = batch.stats
    assert stats.reused_tokens == stats.prompt_tokens - 3 * 8 - sum(counts)
    assert_as_alone(answers + again + third, "plain")


def held(read: int, n: int, chunks: set[int]) -> bool:
    """Whether rings that took in `read` tokens one after the other still have what one at place n sees.

    A full one counts as empty, for the next token sees nothing in it.
    """
    for chunk in chunks:
        slots = {place % chunk: place for place in range(read)} if read % chunk else {}
        if any(slots.get(place % chunk) != place for place in range(n - n % chunk, n)):
            return False
    return True


@pytest.mark.parametrize("name", [deep("ring"), "rings"])
def test_reuse_at_the_edges_of_chunks(name, monkeypatch):
    """What begins like a row that has gone on by 0..2 chunks takes from it what its rings hold, no more."""
    monkeypatch.setattr(scheduler, "MIN_COPIED", 1)
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))
    cfg, rng = subject(name, "1")[1], np.random.default_rng(0)
    batch = batch_of([], name, longest=50)
    for n in (6, 7, 8, 9, 16, 17, 24):
        for further in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17):
            [first] = ask(batch, [Request(rng.integers(0, cfg.V, n + further - 2).tolist(), 3)])
            text = first.request.prompt + first.tokens  # of which the last has not been read
            reused = batch.stats.reused_tokens
            [second] = ask(batch, [Request(text[:n] + [(text[n] + 1) % cfg.V, 5], 3)])
            expected = max(place for place in range(n + 1) if held(n + further, place, rings(cfg.masks)))
            assert batch.stats.reused_tokens - reused == expected
            assert_as_alone([second], name)


@pytest.mark.parametrize(
    ("name", "n_requests"),
    [
        ("rings", 60),
        deep("ring", 200),
        deep("rings", 200),
        deep("shared", 200),
        ("states", 60),
        deep("states", 200),
    ],
)
def test_reuse_of_a_row_that_goes_on(name, n_requests, monkeypatch):
    """A row from which another begins may be anywhere: reading, answering, or itself begun from a third.

    A cache that starts full of NaN tells if a row sees what it has not read.
    """
    monkeypatch.setattr(scheduler, "MIN_COPIED", 1)
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))

    def poisoned(*arguments):
        batch = init_batch(*arguments)
        nan = jax.tree.map(
            lambda x: jax.device_put(jnp.full_like(x, jnp.nan), x.sharding), batch.cache.layers
        )
        return batch.replace(layers=nan)

    cfg, rng = subject(name, "1")[1], np.random.default_rng(0)
    family, requests = rng.integers(0, cfg.V, 60).tolist(), []
    for _ in range(n_requests):
        n, own = (
            int(rng.choice((1, 6, 7, 8, 9, 12, 13, 15, 16, 17, 18, 23, 24, 25, 30, 50))),
            rng.integers(1, 3),
        )
        requests.append(
            Request(family[:n] + rng.integers(0, cfg.V, own).tolist(), int(rng.choice((1, 2, 9, 20))))
        )
    monkeypatch.setattr(steps, "init_batch", poisoned)
    batch = batch_of(requests, name)
    monkeypatch.setattr(steps, "init_batch", init_batch)
    assert_as_alone(ask(batch, requests), name)
    assert batch.stats.reused_tokens > batch.stats.prompt_tokens / 2


def test_which_row_a_request_takes():
    """The one that has read the most of it, unless that is busy or holds much else; else the oldest."""
    head, other = list(range(40)), list(range(100, 140))

    def row(text: list[int], number: int, free: bool = True) -> Row:
        answer = Answer(Request([], 1), np.array(text), finish_reason="length" if free else None)
        return Row(np.array(text), computed=len(text), answer=answer, number=number)

    def choose(*rows: Row, score: bool = False) -> tuple[int, int, int]:
        answer = Answer(Request([], 1, score=score), np.array([*head[:30], 7, 7]))
        shard = Shard(rows, 1, frozenset())
        cached = {row: shard.cached_prefix(row, n) for row, n in shard.match_prefixes(answer).items()}
        row, source = shard.choose(cached)
        return rows.index(row), rows.index(source), cached[source]

    assert choose(row(other, 2), row(other, 0, free=False), row(other, 1)) == (2, 2, 0)
    assert choose(row(other, 0), row(head, 1)) == (1, 1, 30)
    assert choose(row(other, 0), row(head + other, 1)) == (0, 1, 30)
    assert choose(row(other, 0), row(head, 1, free=False)) == (0, 1, 30)
    assert choose(row(other, 0), row(head, 1, free=False), row(head, 2)) == (2, 2, 30)
    assert choose(row(head[:3] + other, 0), row(head[:15] + other, 1)) == (0, 0, 3)
    assert choose(row(head[:3] + other, 0), row(head[:16] + other, 1)) == (0, 1, 16)
    assert choose(row(other, 0), row(head, 1), score=True) == (0, 0, 0)


def test_width_of_a_prefill_chunk():
    """Of a single prompt: more than half of a chunk is used, or it is the narrowest."""
    widths = sorted({shape.width for shape in chunks.ACCELERATOR_SHAPES})
    for unread in range(1, 5000):
        rows, width = chunks.best_shape(chunks.ACCELERATOR_SHAPES, [[unread]])
        assert rows == 1 and width in widths
        assert unread > width / 2 or width == 32
        assert all(unread < 0.92 * wider for wider in widths if wider > width)


def test_shape_of_a_prefill_chunk():
    """Short prompts are read together, and at most a quarter is padding. Equal chunks go to one row."""
    shapes = chunks.ACCELERATOR_SHAPES

    def best(*unread: int, tokens: float = 1e9) -> tuple[int, int]:
        return chunks.best_shape(chunks.at_most(tokens, shapes), [unread])

    assert best(30, 25, 20, 28) == (4, 32) and best(120, 100, 128, 90) == (4, 128)
    assert best(500, 500, 500, 500) == (1, 512) and best(2000, 30, 30, 30) == (1, 2048)
    assert best(120, 100, 128, 90, tokens=128) == (1, 128) and best(30, 25, 20, 28, tokens=32) == (1, 32)
    assert chunks.best_shape(shapes, [[30], [25, 31, 32, 32]]) == (4, 32)  # the second shard's prompts
    # The first prompt is read in any case; of the others those that fill the chunk, shorter ones first.
    assert chunks.prompts_in_chunk(chunks.Shape(3, 32), [5, 8, 100, 40, 30]) == [0, 3, 2]
    rng = np.random.default_rng(0)
    for _ in range(200):
        waiting = rng.integers(1, 600, 16).tolist()
        shape = chunks.best_shape(shapes, [waiting])
        assert chunks.tokens_read(shape, waiting) >= 0.75 * shape.tokens


# -------------------------------------------------------------------------------------------- how answers end


def test_stop_tokens():
    """An answer ends with the first of them. Its row goes on, and knows what it has read."""
    requests = [dataclasses.replace(x, max_new_tokens=30) for x in mixed(subject("plain", "1")[1], 20)]
    expected = [alone(request, "plain")[0] for request in requests]
    stops = [frozenset(tokens[5::9]) for tokens in expected]
    stops[3] = frozenset([512])  # which never comes
    last = next(i for i, tokens in enumerate(expected) if i != 3 and tokens[29] not in tokens[:29])
    stops[last] = frozenset(expected[last][29:])
    requests = [dataclasses.replace(x, stop=stop) for x, stop in zip(requests, stops, strict=True)]
    batch = batch_of(requests, "plain", longest=MAX_LEN)
    answers = ask(batch, requests)
    for answer, tokens, stop in zip(answers, expected, stops, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), 30)
        assert answer.tokens == tokens[:end] and len(answer.logprobs) == end
        assert answer.finish_reason == ("length" if stop == stops[3] else "stop")
    texts = [row.answer.request.prompt + row.answer.tokens for row in batch.scheduler.rows]
    reused = batch.stats.reused_tokens
    turns = ask(batch, [Request([*text, 7, 8], 3) for text in texts])
    assert batch.stats.reused_tokens - reused >= sum(len(text) - 1 for text in texts)
    assert_as_alone(turns, "plain")


@pytest.mark.parametrize(("name", "mesh"), [("plain", "1"), ("ring", "dp2-ep2-tp2")])
def test_log_probabilities_of_prompts(name, mesh, monkeypatch):
    """Of those that ask and of no others, with and without an answer, against a forward of the prompts."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))  # twice the programs: with scores and without
    weights, cfg, one = subject(name, "1")
    rng = np.random.default_rng(0)
    head = rng.integers(0, cfg.V, 150).tolist()
    prompts = [head[:n] for n in (1, 2, 33, 34, 130, 150, 1, 2, 60)]
    requests = [
        Request(prompt, new, score=score)
        for prompt in prompts
        for new, score in ((0, True), (4, True), (3, False), (0, False))
    ]
    answers = ask(batch_of(requests, name, mesh), requests)
    texts = np.array([head + [0] * (MAX_LEN - len(head))], np.int32)
    logprobs = np.asarray(jax.nn.log_softmax(model.forward(texts, weights, cfg=cfg, mesh=one)))[0]
    for answer in answers:
        request = answer.request
        n = len(request.prompt) - 1 if request.score else 0
        expected = logprobs[np.arange(n), head[1 : n + 1]]
        assert len(answer.prompt_logprobs) == n
        np.testing.assert_allclose(answer.prompt_logprobs, expected, atol=TOLERANCE)
    assert_as_alone(answers, name)


def test_requests_that_do_not_fit():
    """They are refused with numbers, and the others do not notice; those that just fit are answered."""
    requests = mixed(subject("ring", "1")[1], 12)
    requests[3] = Request(requests[3].prompt, MAX_LEN - len(requests[3].prompt))
    batch, answers = batch_of(requests, "ring"), []
    for request in requests:
        n = len(request.prompt)
        with pytest.raises(
            ValueError, match=f"{n} tokens, which with {MAX_LEN + 1 - n} new ones .* {MAX_LEN}"
        ):
            batch.add(Request(request.prompt, MAX_LEN + 1 - n))
        with pytest.raises(ValueError):
            batch.add(Request([], 3))
        for other in (dict(score=True), dict(sampling=SETTINGS[1])):
            with pytest.raises(ValueError, match="no program is there for a request of this kind"):
                batch.add(dataclasses.replace(Request([1, 2], 3), **other))
        answers.append(batch.add(request))
    finish(batch)
    assert_as_alone(answers, "ring")


BAD = {
    "a negative token": (dict(prompt=[3, -1]), "token -1: the model has tokens 0 to 100"),
    "a token too many": (dict(prompt=[101, 3]), "token 101: the model has tokens 0 to 100"),
    "a token of 64 bits": (dict(prompt=[2**32 + 3]), f"token {2**32 + 3}: the model has tokens 0 to 100"),
    "no token": (dict(prompt=[]), "one or more token ids"),
    "text": (dict(prompt="Hello"), "one or more token ids"),
    "halves": (dict(prompt=[1.5]), "one or more token ids"),
    "half a token": (dict(max_new_tokens=2.5), "max_new_tokens 2.5 is not at least 0"),
    "fewer than no new ones": (dict(max_new_tokens=-1), "max_new_tokens -1 is not at least 0"),
    "a wrong top-p": (dict(sampling=Sampling(temperature=1.0, top_p=1.5)), "top-p 1.5 is not above 0"),
    "a wrong temperature": (dict(sampling=Sampling(temperature=math.nan)), "temperature nan is not a number"),
    "a wrong seed": (dict(sampling=Sampling(temperature=1.0, seed=2**32)), f"seed {2**32} is not between"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_no_model_could_answer(bad):
    """It is refused when it is added, by what is wrong with it."""
    programs = Programs(*subject("ring", "1"), ROWS, MAX_LEN, "float32")
    batch = Engine(programs, needed_programs(programs, demand_of([Request([1, 2], 2, SETTINGS[2])])))
    changes, message = BAD[bad]
    with pytest.raises(UserError, match=message):
        batch.add(dataclasses.replace(Request([1, 2], 2), **changes))
    assert not batch.busy


def nan_embedding(weights: model.Weights, token: int) -> model.Weights:
    def damaged(x):
        return jax.device_put(x.at[token].set(jnp.nan), x.sharding)

    embed = weights.embed
    if isinstance(embed, QuantizedArray):
        return dataclasses.replace(weights, embed=dataclasses.replace(embed, scale=damaged(embed.scale)))
    return dataclasses.replace(weights, embed=damaged(embed))


@pytest.mark.parametrize(("mesh", "n_draft"), [("1", 0), ("1", 3), deep("dp2-ep2-tp2", 0)])
def test_a_request_that_computes_nan(mesh, n_draft, monkeypatch):
    """It ends with an error of its own; those beside it, and those that its row takes next, do not notice."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))  # twice the programs: with scores and without
    weights, cfg, devices = subject("ring", mesh)
    bad, rng = 7, np.random.default_rng(0)
    good = [request for request in mixed(cfg, 40) if bad not in [*request.prompt, *alone(request, "ring")[0]]]
    requests = [dataclasses.replace(request, score=i % 3 == 0) for i, request in enumerate(good)]
    assert len(requests) > 20
    family = [token for token in rng.integers(0, cfg.V, 200).tolist() if token != bad][:60]
    for i, n in zip((2, 7, 8, 13, 20), (30, 0, 59, 24, 40), strict=True):
        prompt = [*family[:n], bad, *family[n:]]
        score = i % 2 == 0  # which alone tells, for there is no answer
        requests.insert(i, Request(prompt, 0 if score else 8, score=score))
        # Those that begin alike reuse what was read before the bad token, or after another's.
        requests[i + 1 : i + 1] = [Request([*family[: n + 3], 1, 2], 5), Request([*family[:n], 3], 5)]
    weights, speculation = nan_embedding(weights, bad), PromptLookup(n_draft) if n_draft else None
    batch = engine_of(Programs(weights, cfg, devices, ROWS, MAX_LEN, "float32", speculation), requests)
    answers = ask(batch, requests)
    failed = [answer for answer in answers if answer.finish_reason == "error"]
    assert [answer for answer in answers if bad in answer.request.prompt] == failed
    assert batch.stats.failed == len(failed) == 5 and all("NaN" in answer.error for answer in failed)
    assert not all(answer.prefix_caching for answer in answers)
    assert batch.stats.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert_as_alone([answer for answer in answers if answer not in failed], "ring")


def test_what_waits_for_a_prefix(monkeypatch):
    """What begins like a prompt that is being read waits for that part of it; nobody else does."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8),))
    counts = spy_on_chunks(monkeypatch)
    cfg, rng = subject("ring", "1")[1], np.random.default_rng(0)
    first, other = (rng.integers(0, cfg.V, n).tolist() for n in (121, 60))
    prompts = [first, first[:40] + [1, 2, 3], other, first[:40] + [4, 5], first[:15] + [1, 2, 3] * 20]
    requests = [Request(prompt, 2) for prompt in prompts]
    batch = batch_of(requests, "ring")
    counts.clear()
    answers = [batch.add(request) for request in requests]
    batch.advance()
    assert [row.answer for row in batch.scheduler.rows if row.answer] == [answers[0], answers[2], answers[4]]
    while not answers[1].tokens:
        batch.advance()
    # Five chunks of 8 tokens, for the others have more left; then every second one, and a call for the token.
    assert len(counts) == 5 + 2 * 2 + 1
    finish(batch)
    assert sum(counts) == 120 + 2 + 59 + 1 + 74
    assert_as_alone(answers, "ring")


def test_cancel():
    """In the queue, while it is read, while it is answered: no more tokens for it, and all for the others."""
    cfg, rng = subject("ring", "1")[1], np.random.default_rng(0)
    # Of 150 tokens a second chunk is left to read after the first call.
    lengths = (3, 150, 20, 33, 1, 40, 5, 60, 9, 2, 70, 11)
    requests = [Request(rng.integers(0, cfg.V, n).tolist(), 9) for n in lengths]
    batch = batch_of(requests, "ring")
    answered, read, third, *others, queued = [batch.add(request) for request in requests]
    batch.cancel(queued)
    while not any(row.answer is read and row.prefill_left for row in batch.scheduler.rows):
        batch.advance()
    batch.cancel(read)
    while len(answered.tokens) < 5:
        batch.advance()
    batch.cancel(answered)
    finish(batch)
    batch.cancel(third)  # too late
    assert [(x.finish_reason, len(x.tokens)) for x in (queued, read, answered)] == [
        ("cancelled", 0),
        ("cancelled", 0),
        ("cancelled", 5),
    ]
    assert answered.tokens == alone(answered.request, "ring")[0][:5]
    assert not {answered, read, queued} & {row.answer for row in batch.scheduler.rows}
    assert_as_alone([third, *others], "ring")
    silent = batch.add(Request([1, 2], 0))
    batch.advance()
    batch.cancel(silent)  # which has been read, and ends with that
    finish(batch)
    assert silent.finish_reason == "cancelled"


# ----------------------------------------------------------------------------------- on the way to the device


def held_bytes(arrays) -> int:
    """What all devices together hold of these arrays, or would of their abstract shapes."""
    shards = [(x.sharding, x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in arrays]
    return sum(len(where.device_set) * math.prod(shape) * itemsize for where, shape, itemsize in shards)


@pytest.mark.parametrize("mesh", ["1", deep("tp8")])
def test_memory(mesh, monkeypatch):
    """Beside the weights there are the cache that was planned, in one place, and outputs of a few bytes."""
    _, cfg, devices = subject("ring", mesh)
    requests, before, found = mixed(cfg, 30), jax.live_arrays(), []
    old = {id(x) for x in before}

    def measure() -> None:
        found.append(held_bytes(x for x in jax.live_arrays() if id(x) not in old))

    def assign_and_measure(*arguments, **options) -> Batch:
        result = assign_rows(*arguments, **options)
        measure()
        return result

    spy_on_steps(monkeypatch, lambda step: measure())
    monkeypatch.setattr(steps, "assign_rows", assign_and_measure)
    batch = batch_of(requests, "ring", mesh)

    def places() -> list[int]:
        layers = jax.tree.leaves(batch.programs.batch.cache.layers)
        return [shard.data.unsafe_buffer_pointer() for x in layers for shard in x.addressable_shards]

    answers = [batch.add(request) for request in requests]
    for _ in range(20):
        batch.advance()
    at, calls = places(), len(found)
    finish(batch)
    planned = held_bytes(jax.tree.leaves(abstract(batch_infos(cfg, ROWS, MAX_LEN, jnp.float32), devices)))
    assert len(found) > calls + 50 and all(answer.tokens for answer in answers)
    assert planned <= min(found) and max(found) <= planned + 5_000
    assert places() == at


def test_a_step_is_fetched_after_the_next_is_sent(monkeypatch):
    """The device is never without work: step 1 is looked at when step 2 has been sent off, and so on."""
    events = []

    class Spied:
        """An output of a step, which tells when its values are asked for."""

        def __init__(self, x, step: int):
            self.x, self.step = x, step

        def copy_to_host_async(self) -> None:
            self.x.copy_to_host_async()

        def __array__(self, *_, **__) -> np.ndarray:
            events.append(("fetch", self.step))
            return np.asarray(self.x)

    requests = [Request([1], 6), Request([2], 9)]
    batch = batch_of(requests, "ring")
    execute = batch.programs.execute

    def spied(step, *arguments, **options):
        output, rows = execute(step, *arguments, **options)
        if not isinstance(step, DecodeStep):
            return output, rows
        number = sum(kind == "send" for kind, _ in events)
        events.append(("send", number))
        return jax.tree.map(lambda x: Spied(x, number), output), rows

    monkeypatch.setattr(batch.programs, "execute", spied)
    answers = [batch.add(request) for request in requests]
    for call in range(9):
        events.append(("call", call))
        changed = batch.advance()
        assert [len(answer.tokens) for answer in answers] == [min(call, 6), min(call, 9)]
        assert changed == [answer for answer in answers if 0 < call <= answer.request.max_new_tokens]
    finish(batch)
    monkeypatch.undo()
    first = [event for i, event in enumerate(events) if event not in events[:i]]  # an output has four arrays
    expected = [("call", 0), ("send", 0)]
    for step in range(1, 9):
        expected += [("call", step), ("send", step), ("fetch", step - 1)]
    assert first == expected + [("fetch", 8)]
    assert_as_alone(answers, "ring")


def test_an_end_does_not_wait_for_another_prompt(monkeypatch):
    """The last token of an answer is there one call later, though nothing but a long prompt is to be read."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32),))
    cfg, rng = subject("ring", "1")[1], np.random.default_rng(0)
    requests = [Request([1], 1), Request(rng.integers(0, cfg.V, MAX_LEN - 5).tolist(), 5)]
    batch = batch_of(requests, "ring")
    answers = [batch.add(request) for request in requests]
    batch.advance()
    batch.advance()
    assert answers[0].finish_reason == "length" and batch.scheduler.rows[1].prefill_left
    while not answers[1].tokens:
        assert batch.stats.prefilled is None
        batch.advance()
    assert batch.stats.prefilled.tokens == 2
    finish(batch)
    assert_as_alone(answers, "ring")
