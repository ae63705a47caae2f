"""Tokens that a grammar forces: they are those that steps would choose, and take fewer steps."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import test_stages
from conftest import CHECKPOINTS, engine_of, random_weights
from test_generation import MAX_LEN, alone, ask, assert_same, deep, finish, subject
from test_grammar import Classes, V
from test_speculation import one_shape as one_shape  # a fixture
from test_tools import CASES, every_case

from conversation.grammar import grammar_tokenizer, make_grammar
from conversation.text import load_tokenizer
from conversation.tool_grammar import tool_grammar
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.scheduler import ACCELERATOR_LIMITS, CPU_LIMITS, PrefillLimits
from serving.speculation import DraftModel, PromptLookup
from sharding.sampling import Sampling

STOP = frozenset([6])
DRAWN = Sampling(temperature=1.0, seed=3, frequency_penalty=0.5)
PLACE = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["Celsius", "Fahrenheit"]},
    },
    "required": ["name", "city", "days", "units"],
    "additionalProperties": False,
}


@dataclasses.dataclass
class Frames(Classes):
    """Of every ten tokens a choice is left for the first two only."""

    def next(self) -> np.ndarray:
        place = self.accepted % 10
        return super().next() if place < 2 else np.arange(V) == 20 + place

    def forced_tokens(self) -> list[int]:
        state, tokens = self.start(), []
        while state.accepted < self.length and state.next().sum() == 1:
            tokens.append(int(state.next().argmax()))
            state.accept_token(tokens[-1])
        return tokens


def answers_by(made: Programs, requests: list[Request], chunk_steps=0) -> tuple[list[Answer], Engine]:
    engine = engine_of(made, requests, longest=40, limits=PrefillLimits(chunk_steps=chunk_steps))
    return ask(engine, requests), engine


def assert_forced(engine: Engine, by_steps: Engine, found: list[Answer]) -> None:
    stats, before = engine.stats, by_steps.stats
    assert stats.tokens == before.tokens and before.forced == 0
    assert stats.forced == sum(math.isnan(x) for answer in found for x in answer.logprobs)
    assert stats.row_steps == before.row_steps - stats.forced


# ---------------------------------------------------------------------------------------- real grammars


@functools.cache
def requests_of_grammars() -> list[Request]:
    """Greedy and drawn ones, of a schema and of calls of tools, each beside one without a grammar."""
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    tokens = grammar_tokenizer(tokenizer, subject("words", "1")[1].V, STOP)
    source = tool_grammar(CASES["llama"].use(forced=True, several=False), tokenizer, tokens, thinking=False)
    grammars = make_grammar(tokens, "json_schema", PLACE), make_grammar(tokens, "lark", source)
    requests = []
    for i, grammar in enumerate([*grammars, *grammars]):
        sampling = DRAWN if i > 1 else Sampling()
        prompt = tokenizer(f"What is {i} + 1? " * (1 + i), add_special_tokens=False).input_ids
        requests.append(Request(prompt, 90, sampling, STOP, grammar=grammar))
        requests.append(Request(prompt[: 3 + i], 40, sampling))
    return requests


@functools.cache
def chosen() -> tuple[list[Answer], Engine]:
    """The answers whose tokens are all chosen by steps."""
    made = Programs(*subject("words", "1"), 4, MAX_LEN, "float32")
    return answers_by(made, requests_of_grammars(), math.inf)


@pytest.mark.parametrize("mesh", ["1", "dp2-ep2-tp2"])
def test_the_same_answers_in_fewer_steps(mesh, compiled):
    """Of a schema and of tools, greedy and drawn, beside rows without a grammar; nothing is compiled."""
    requests, (expected, by_steps) = requests_of_grammars(), chosen()
    made = Programs(*subject("words", mesh), 4, MAX_LEN, "float32")
    engine = engine_of(made, requests, limits=PrefillLimits(chunk_steps=0))
    compiled.clear()
    found = ask(engine, requests)
    assert not compiled
    assert_same(found, expected, forced=True)
    assert_forced(engine, by_steps, found)
    assert engine.stats.forced > 100
    assert mesh != "1" or engine.stats.steps < by_steps.stats.steps


@every_case
def test_they_are_those_of_the_masks(case):
    """The tokens that a grammar forces are the only ones that its bitmasks allow, and where it forces none,
    there is a choice.
    """
    rng, grammar = np.random.default_rng(0), case.grammar(forced=True)
    bits, runs = np.zeros(-(-len(case.tokenizer) // 32), np.uint32), 0

    def allowed(state) -> list[int]:
        state.fill_bitmask(bits)
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()

    for _ in range(5):
        state, left, ended = grammar.start(), 150, False
        while left > 0 and not ended:
            forced = state.forced_tokens()
            runs += len(forced) > 3
            for token in forced:
                assert not ended and allowed(state) == [token]
                ended = state.accept_token(token)
            if not forced:
                some = allowed(state)
                assert len(some) > 1
                ended = state.accept_token(int(rng.choice(some)))
            left -= max(len(forced), 1)
    assert runs > 5


# ------------------------------------------------------------------------------------- any grammar


def framed(n: int) -> list[Request]:
    """Half of them have grammars; prompts are of unlike lengths, and some begin alike."""
    rng = np.random.default_rng(0)
    head, requests = rng.integers(0, V, 20).tolist(), []
    for i in range(n):
        prompt = head * (i % 3 == 2) + rng.integers(0, V, 1 + 3 * i).tolist()
        grammar = Frames(2 + i % 4, 25 + i) if i % 2 else None
        requests.append(Request(prompt, 24 + i, DRAWN if i % 4 > 1 else Sampling(), grammar=grammar))
    return requests


@functools.cache
def windowed() -> Programs:
    return Programs(*subject("window", "1"), 4, MAX_LEN, "float32")


@functools.cache
def framed_by_steps() -> tuple[list[Answer], Engine]:
    return answers_by(windowed(), framed(12), math.inf)


def test_windows():
    """Forced tokens that rings overwrite."""
    expected, by_steps = framed_by_steps()
    found, engine = answers_by(windowed(), framed(12))
    assert_same(found, expected, forced=True)
    assert_forced(engine, by_steps, found)
    assert engine.stats.forced > 50


@pytest.mark.parametrize(("family", "mesh"), [deep("short", "pp2-ep2-tp2"), deep("llama3", "pp2-dp2-tp2")])
def test_stages_of_layers(family, mesh):
    cfg = test_stages.config(family, 2)
    (expected, by_steps), (found, engine) = (
        answers_by(Programs(random_weights(cfg, devices), cfg, devices, 4, MAX_LEN, "float32"), framed(12), n)
        for devices, n in ((test_stages.mesh_of(cfg, "1"), math.inf), (test_stages.mesh_of(cfg, mesh), 0))
    )
    assert_same(found, expected, forced=True)
    assert_forced(engine, by_steps, found)


@pytest.mark.parametrize("how", ["lookup", deep("draft")])
def test_beside_drafts(how):
    """Rows without a grammar check drafts; a draft model reads forced tokens, too."""
    sizes = *subject("window", "1"), 4, MAX_LEN, "float32"
    speculation = DraftModel(Programs(*sizes), 3) if how == "draft" else PromptLookup(3)
    found, engine = answers_by(Programs(*sizes, speculation), framed(12))
    assert_same(found, framed_by_steps()[0], forced=True)
    assert engine.stats.forced > 50 and engine.stats.drafted
    if how == "draft":
        assert engine.stats.accepted == engine.stats.drafted


def test_where_an_answer_ends():
    """At any token: the limit, a stop token or the end of the grammar may be among the forced ones."""
    prompt, most = [9, 8, 7], 26
    (whole,), _ = answers_by(windowed(), [Request(prompt, most, grammar=Frames(3, 99))], math.inf)
    requests, expected = [], []
    for n in range(1, most):
        requests.append(Request(prompt, n, grammar=Frames(3, 99)))
        requests.append(Request(prompt, most, grammar=Frames(3, n)))
        expected += [(whole.tokens[:n], "length"), (whole.tokens[:n], "stop")]
    for place in range(2, 10):
        requests.append(Request(prompt, most, stop=frozenset([20 + place]), grammar=Frames(3, 99)))
        expected.append((whole.tokens[: whole.tokens.index(20 + place) + 1], "stop"))
    found, engine = answers_by(windowed(), requests)
    assert [(answer.tokens, answer.finish_reason) for answer in found] == expected
    assert engine.stats.forced > engine.stats.tokens / 3


def test_log_probabilities():
    """A request that asks for any has those of all its tokens."""
    requests = [
        Request([9, 8, 7], 26, Sampling(top_logprobs=0), grammar=Frames(3, 99)),
        Request([9, 8, 7], 26, Sampling(top_logprobs=3), grammar=Frames(3, 99)),
        Request([9, 8, 7], 26, score=True, grammar=Frames(3, 99)),
    ]
    found, engine = answers_by(windowed(), requests)
    assert engine.stats.forced == 0 and all(np.isfinite(x.logprobs).all() for x in found)
    assert len(found[1].top_logprobs) == 26


def test_a_cancelled_answer():
    """Its forced tokens are never read. What its row has read serves others, and nothing else does."""
    rng = np.random.default_rng(1)
    prompt, other = rng.integers(0, V, 40).tolist(), Request(rng.integers(0, V, 9).tolist(), 30)
    request = Request(prompt, 60, grammar=Frames(3, 99))
    (expected,), _ = answers_by(windowed(), [request], math.inf)
    for wait in (0, 1, 2):
        engine = engine_of(windowed(), [request, other], longest=80)
        answer, beside = engine.add(request), engine.add(other)
        row = None
        while row is None or not row.unsent:
            engine.advance()
            row = next((x for x in engine.scheduler.rows if x.answer is answer), None)
        for _ in range(wait):
            engine.advance()
        engine.cancel(answer)
        longer = [engine.add(Request([*prompt, *expected.tokens[:n]], 5)) for n in (1, 5, 9, 30)]
        again = engine.add(request)
        finish(engine)
        assert answer.finish_reason == "cancelled" and answer.tokens == expected.tokens[: len(answer.tokens)]
        assert again.tokens == expected.tokens and engine.stats.reused_tokens
        for each in (beside, *longer):
            assert each.tokens == alone(each.request, "window")[0]


def test_how_many_are_enough(compiled):
    """More than the steps that a chunk takes, for each row in use."""

    def forced(n: int, chunk_steps: float, longest: int = 40) -> int:
        requests = [Request([9, 8, 7 + i][:longest], 12, grammar=Frames(3, 99)) for i in range(n)]
        engine = engine_of(windowed(), requests, longest, limits=PrefillLimits(chunk_steps=chunk_steps))
        compiled.clear()
        ask(engine, requests)
        assert not compiled
        return engine.stats.forced

    assert forced(1, 7) == 8 and forced(1, 8) == 0
    assert forced(4, 1) == 4 * 8 and forced(4, 2) < 8
    assert forced(1, 0, longest=1) == 0  # which has no chunks
    assert CPU_LIMITS.chunk_steps > ACCELERATOR_LIMITS.chunk_steps
