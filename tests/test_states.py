"""Layers with a state: the delta rule against numpy, and what of a state a later text can reuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import engine_of
from test_generation import ask, assert_as_alone, deep, finish, mixed, subject
from test_generation import two_shapes as two_shapes  # a fixture

import model
from ops.delta_rule import delta_chunks, delta_steps
from serving.programs import Programs
from serving.requests import Request
from serving.reuse import with_room
from serving.scheduler import BEFORE_END
from serving.speculation import DraftModel, PromptLookup

HEAD, NAN = 50, jnp.nan


def tokens_of(T: int, keys: str) -> list[np.ndarray]:
    """q, k, v, g, beta and S of 2 rows and 3 heads; keys: "random", or "alike": hardly different ones."""
    rng, sizes = np.random.default_rng(T), (2, T, 3)
    q, k = (rng.normal(size=(*sizes, 16)) for _ in range(2))
    k = k if keys == "random" else 1 + 0.01 * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, S = rng.normal(size=(*sizes, 24)), rng.normal(size=(2, 3, 16, 24))
    # Some tokens fade nearly all, others nearly nothing; some are written whole.
    return [q, k, v, -np.exp(rng.uniform(-8, 3, sizes)), 1 / (1 + np.exp(-4 * rng.normal(size=sizes))), S]


def by_hand(q, k, v, g, beta, S) -> tuple[np.ndarray, list[np.ndarray]]:
    """The rule in float64: -> (o, the state after 0, 1, ... tokens)."""
    o, states = np.zeros_like(v), [S]
    for t in range(q.shape[1]):
        S = np.exp(g[:, t])[..., None, None] * S
        read = np.einsum("bnx,bnxy->bny", k[:, t], S)
        S = S + np.einsum("bnx,bny->bnxy", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        o[:, t] = np.einsum("bnx,bnxy->bny", q[:, t], S)
        states.append(S)
    return o, states


# In float32, of values up to about 5; 1e-6 was seen.
close = dict(rtol=0, atol=1e-5)


@pytest.mark.parametrize("keys", ["random", "alike"])
@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 130])
def test_the_rule_twice(T, keys):
    """By chunks and token by token, as in float64, also where decays are strong and keys hardly differ."""
    tokens = tokens_of(T, keys)
    o, states = by_hand(*tokens)
    *arrays, S = (jnp.asarray(x, jnp.float32) for x in tokens)
    has_text = jnp.zeros(2, bool)
    for found in delta_chunks(*arrays, S, has_text), delta_steps(*arrays, S, has_text, jnp.full(2, T)):
        np.testing.assert_allclose(found[0], o, **close)
        np.testing.assert_allclose(found[1], states[-1], **close)


def test_the_state_after_some_tokens():
    """All tokens are read, but the state that is kept has the first ones of each row alone."""
    tokens = tokens_of(6, "random")
    o, states = by_hand(*tokens)
    *arrays, S = (jnp.asarray(x, jnp.float32) for x in tokens)
    found = delta_steps(*arrays, S, jnp.zeros(2, bool), jnp.array([0, 4]))
    np.testing.assert_allclose(found[0], o, **close)
    np.testing.assert_array_equal(found[1][0], S[0])
    np.testing.assert_allclose(found[1][1], states[4][1], **close)


@pytest.mark.parametrize("rule", [delta_chunks, delta_steps])
def test_an_empty_state_is_not_read(rule):
    tokens = tokens_of(5, "random")
    expected = by_hand(*tokens[:5], 0 * tokens[5])
    *arrays, S = (jnp.asarray(x, jnp.float32) for x in tokens)
    options = {} if rule is delta_chunks else dict(keep=jnp.full(2, 5))
    o, after = rule(*arrays, NAN * S, jnp.ones(2, bool), **options)
    np.testing.assert_allclose(o, expected[0], **close)
    np.testing.assert_allclose(after, expected[1][-1], **close)


def test_padding_changes_no_state():
    """Rows of unlike lengths in one chunk, whose padding is of any tokens: as each row alone."""
    weights, cfg, mesh = subject("states", "1")
    rng, static = np.random.default_rng(0), dict(cfg=cfg, mesh=mesh)
    texts, counts = rng.integers(0, cfg.V, (4, 40)), np.array([1, 2, 17, 40])
    cache = model.init_cache(cfg, mesh, 4, 64, "float32")
    together, cache = model.prefill(texts, weights, cache, counts, **static)
    after, _ = model.decode_step(texts[:, 0], weights, cache, **static)
    for i, n in enumerate(counts.tolist()):
        text = np.append(texts[i, :n], texts[i, 0])[None]
        alone = model.forward(text, weights, **static)[0]
        np.testing.assert_allclose(together[i], alone[-2], atol=1e-4)
        np.testing.assert_allclose(after[i], alone[-1], atol=1e-4)


# ----------------------------------------------------------------------------------- what a text can reuse


def engine(kept: int, rows: int = 3, drafts: int = 0, **options):
    weights, cfg, mesh = subject("states", "1")
    cfg = with_room(cfg, drafts, kept)
    return engine_of(Programs(weights, cfg, mesh, rows, 160, "float32"), [Request([0], 1)], 120, **options)


def reused(batch, prompt: list[int], new: int = 4):
    """-> (the answer, how many of its prompt's tokens were reused)."""
    before = batch.stats.reused_tokens
    [answer] = ask(batch, [Request(prompt, new)])
    assert_as_alone([answer], "states")
    return answer, batch.stats.reused_tokens - before


def text_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, subject("states", "1")[1].V, n).tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_next_turn_of_a_conversation(rows):
    """It goes on after the answer; or from near the prompt's end, if the template writes that otherwise."""
    batch, prompt = engine(kept=2, rows=rows), text_of(HEAD)
    answer, _ = reused(batch, prompt)
    text = prompt + answer.tokens
    prompt = text + text_of(40, 1)
    answer, n = reused(batch, prompt)
    assert n == len(text) - 1  # the last chosen token was not read
    _, n = reused(batch, prompt[:-3] + text_of(9, 2))
    assert n == len(prompt) - 1 - BEFORE_END


def test_where_two_texts_part():
    """A third one goes on from there. Without places for states it reads all."""
    head = text_of(HEAD)
    for kept, expected in (2, [0, 0, HEAD, HEAD]), (0, [0] * 4):
        batch = engine(kept)
        assert [reused(batch, head + text_of(40, i))[1] for i in range(1, 5)] == expected


def test_one_waits_for_the_states_of_another():
    """Prompts that begin alike, at the same time: the first one keeps its states where they part."""
    batch, head = engine(kept=1), text_of(HEAD)
    answers = [batch.add(Request(head + text_of(60, i), 4)) for i in (1, 2)]
    finish(batch)
    assert_as_alone(answers, "states")
    assert batch.stats.reused_tokens == HEAD


@pytest.mark.parametrize("drafts", [0, deep(3)])
def test_states_in_host_memory(drafts):
    """Other texts take all rows. What was kept comes back with them."""
    batch, prompt = engine(kept=2, drafts=drafts, rows=2, prefix_cache_bytes=1 << 28), text_of(80)
    reused(batch, prompt)
    for i in range(3):
        reused(batch, text_of(70, 10 + i))
    assert reused(batch, prompt[:-3] + text_of(9, 2))[1] == len(prompt) - 1 - BEFORE_END


def test_cancelled_while_it_is_read():
    batch, prompt = engine(kept=2), text_of(110)
    cancelled = batch.add(Request(prompt, 4))
    batch.advance()
    batch.cancel(cancelled)
    finish(batch)
    reused(batch, prompt[:100])


def test_a_text_that_goes_on_from_an_answer_in_progress():
    """The states of a row that decodes are never those of a known text: steps are in flight."""
    batch = engine(kept=0)
    first = batch.add(Request(text_of(HEAD), 30))
    while len(first.tokens) < 8:
        batch.advance()
    other = batch.add(Request(first.request.prompt + first.tokens + text_of(3, 1), 4))
    finish(batch)
    assert_as_alone([first, other], "states")
    assert batch.stats.reused_tokens == 0


def test_states_of_another_text():
    """A short prompt takes a row whose places have states of a longer one: they are not the new text's."""
    batch = engine(kept=2, rows=1)
    reused(batch, text_of(100))
    answer, _ = reused(batch, text_of(10, 1), 100)
    text = (answer.request.prompt + answer.tokens)[:95]
    assert reused(batch, [*text, (text[-1] + 1) % 101])[1] == 0


@pytest.mark.parametrize("drafted_by", ["lookup", "model"])
def test_drafts_and_spare_tokens(drafted_by):
    """The model's states get room for all drafts. Of a draft model that has less, a step takes no more."""
    weights, cfg, mesh = subject("states", "1")
    less, phrase = with_room(cfg, drafts=1, kept=0), text_of(3)
    other = model.init_weights(jax.random.key(1), cfg, mesh)
    nearly = jax.tree.map(lambda own, other: own + 0.03 * other, weights, other)
    speculation = PromptLookup(4)
    if drafted_by == "model":
        speculation = DraftModel(Programs(nearly, less, mesh, 2, 160, "float32"), 4)
    requests = [Request(phrase * 12 + text_of(2, i), 24) for i in range(4)]
    batch = engine_of(Programs(weights, less, mesh, 2, 160, "float32", speculation), requests)
    assert_as_alone(ask(batch, requests), "states")
    most = batch.stats.row_steps * (4 if drafted_by == "lookup" else 1)
    assert batch.stats.accepted < batch.stats.drafted <= most


@pytest.mark.deep
@pytest.mark.parametrize("drafts", [0, 4])
def test_200_requests(drafts):
    """They join and leave 8 rows, and some begin alike; every tenth is cancelled on its way."""
    weights, cfg, mesh = subject("states", "1")
    cfg, requests = with_room(cfg, drafts, kept=2), mixed(cfg, 200)
    speculation = PromptLookup(drafts) if drafts else None
    batch = engine_of(Programs(weights, cfg, mesh, 8, 160, "float32", speculation), requests)
    answers = [batch.add(request) for request in requests]
    cancelled = answers[::10]
    for answer in cancelled:
        for _ in range(3):
            batch.advance()
        batch.cancel(answer)
    finish(batch)
    assert_as_alone([x for x in answers if x.finish_reason != "cancelled"], "states")
    assert batch.stats.reused_tokens > 100 and (batch.stats.drafted > 100) == (drafts > 0)
