"""Answers that must match something, beside others in a batch: masks on the device, with drafts or none."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import test_stages
from conftest import CHECKPOINTS, engine_of, random_weights
from test_generation import alone, ask, batch_of, deep, sampled, subject

import model
from conversation import grammar as grammars
from conversation.grammar import grammar_tokenizer, make_grammar
from conversation.text import load_tokenizer
from feedback.errors import UserError
from serving import scheduler
from serving.programs import Programs
from serving.requests import OPTION_SETS, Request
from serving.reuse import with_room
from serving.speculation import DraftModel, PromptLookup
from sharding.sampling import Sampling

NEW, V = 12, 101


@dataclasses.dataclass
class Classes:
    """Each token is in the class after the last one's, of `n` classes; after `length` of them it ends."""

    n: int
    length: int
    last: int = 0
    accepted: int = 0

    def start(self) -> "Classes":
        return dataclasses.replace(self)

    def next(self) -> np.ndarray:
        return np.arange(V) % self.n == (self.last + 1) % self.n

    def fill_bitmask(self, bits: np.ndarray) -> None:
        bits[:] = np.packbits(np.pad(self.next(), (0, -V % 32)), bitorder="little").view(np.uint32)

    def accept_token(self, token: int) -> bool:
        assert self.next()[token]
        self.last, self.accepted = token, self.accepted + 1
        return self.accepted == self.length

    def forced_tokens(self) -> list[int]:
        return []


@dataclasses.dataclass
class Runs(Classes):
    """One token again and again, then another: drafts of it are right until the grammar says otherwise."""

    def next(self) -> np.ndarray:
        return np.arange(V) == (7 if self.accepted < 5 else 8)


@dataclasses.dataclass
class Texts(Classes):
    """All tokens but one in ten, until one of the class 0: then `FRAME` tokens as in Classes."""

    FRAME = 4
    left: int = 0

    def next(self) -> np.ndarray:
        return super().next() if self.left else np.arange(V) % 10 != 9

    def accept_token(self, token: int) -> bool:
        begins = not self.left and token % self.n == 0
        done = super().accept_token(token)
        self.left = self.FRAME if begins else max(self.left - 1, 0)
        return done


def answer_by_forward(request: Request, name: str) -> list[int]:
    """The greedy tokens by a forward of the text so far, with all that the grammar forbids left out."""
    weights, cfg, mesh = subject(name, "1")
    tokens, state = [], request.grammar.start()
    while len(tokens) < request.max_new_tokens:
        own = [*request.prompt, *tokens]
        text = np.zeros((1, 96), np.int32)
        text[0, : len(own)] = own
        logits = model.forward(text, weights, cfg=cfg, mesh=mesh)[0, len(own) - 1]
        tokens.append(int(np.argmax(np.where(state.next(), logits, -np.inf))))
        if state.accept_token(tokens[-1]):
            break
    return tokens


@functools.cache
def requests_and_answers() -> list[tuple[Request, list[int]]]:
    """Greedy ones with a grammar, and their tokens."""
    rng, requests = np.random.default_rng(0), []
    for i in range(6):
        prompt = rng.integers(0, V, 3 + 7 * i).tolist()
        grammar = (Runs if i == 2 else Classes)(2 + i, 4 + 2 * i)
        requests.append(Request(prompt, NEW, grammar=grammar))
    return [(request, answer_by_forward(request, "ring")) for request in requests]


@pytest.mark.parametrize("mesh", ["1", pytest.param("dp2-ep2-tp2", marks=pytest.mark.deep)])
@pytest.mark.parametrize("lookup", [False, True])
def test_beside_others(mesh, lookup, compiled):
    """Each is what its grammar allows, each other one what it is alone; nothing is compiled for it later."""
    constrained, others = requests_and_answers(), sampled(subject("ring", "1")[1])
    requests = [x for pair in zip((x for x, _ in constrained), others, strict=False) for x in pair]
    speculation = PromptLookup(3) if lookup else None
    programs = Programs(*subject("ring", mesh), 8, 160, "float32", speculation)
    engine = engine_of(programs, requests)
    compiled.clear()
    answers = ask(engine, requests)
    assert not compiled
    for answer, (_, tokens) in zip(answers[::2], constrained, strict=True):
        assert answer.tokens == tokens
        assert answer.finish_reason == ("stop" if len(tokens) == answer.request.grammar.length else "length")
    for answer in answers[1::2]:
        assert answer.tokens == alone(answer.request, "ring")[0]
    assert not lookup or engine.stats.drafted


def test_rows_of_grammars_step_together():
    """As many steps as an answer has tokens, and one for each that begins later; others go on beside them."""
    same = [Request([5, 6, 7], 10, grammar=Classes(3, 99)) for _ in range(6)]
    engine = batch_of(same, "ring")
    ask(engine, same)
    assert engine.stats.tokens == 60 and engine.stats.steps <= 10 + 6
    before, other = engine.stats.steps, Request([5, 6, 7], 40)
    ask(engine, [other, *same])
    assert engine.stats.steps - before <= 40 + 2


@functools.cache
def texts(name: str) -> list[tuple[Request, list[int]]]:
    """Texts with frames in them, of which some end before their limit, and their tokens."""
    rng, requests = np.random.default_rng(1), []
    for i in range(6):
        grammar = Texts(3 + i, 40 if i % 2 else 99)
        requests.append(Request(rng.integers(0, V, 3 + 5 * i).tolist(), 45 + i, grammar=grammar))
    return [(request, answer_by_forward(request, name)) for request in requests]


RUNNING = [(x, how) for x in ("ring", "states") for how in ("steps", "lookup")]
RUNNING += [deep(x, "draft") for x in ("ring", "window", "states")]
RUNNING += [deep("window", how) for how in ("steps", "lookup")]
RUNNING += [deep("ring", "dp2-ep2-tp2"), deep("window", "dp2-ep2-tp2"), deep("states", "dp2-tp4")]


@pytest.mark.parametrize(("name", "how"), RUNNING)
def test_rows_that_run_ahead(name, how, compiled):
    """A text is free until a token that the host sees one step late: what that step chose is not used. Rows
    without a grammar are beside them, and in the next round all prompts have a prefix in common with a row.
    """
    sizes = *subject(name, how if "dp" in how else "1"), 8, 160, "float32"
    speculation = dict(lookup=PromptLookup, draft=lambda n: DraftModel(Programs(*sizes), n)).get(how)
    rounds = texts(name), [(dataclasses.replace(x, max_new_tokens=30), y[:30]) for x, y in texts(name)]
    others = [Request([9, 8, 7 + i], 30) for i in range(3)]
    tokens_of_others = [alone(x, name)[0] for x in others]
    programs = Programs(*sizes, speculation and speculation(3))
    engine = engine_of(programs, [x for x, _ in rounds[0]] + others)
    compiled.clear()
    for expected in rounds:
        answers = ask(engine, [x for x, _ in expected] + others)
        assert [x.tokens for x in answers] == [tokens for _, tokens in expected] + tokens_of_others
    assert not compiled
    assert engine.stats.dropped > 5 and (engine.stats.reused_tokens or name != "ring")


def test_states_that_cannot_go_back():
    """Without a spare token no step is sent that may have to be dropped."""
    weights, cfg, mesh = subject("states", "1")
    requests, expected = zip(*texts("states"), strict=True)
    engine = engine_of(Programs(weights, with_room(cfg, 0, 0), mesh, 4, 160, "float32"), requests)
    assert [x.tokens for x in ask(engine, requests)] == list(expected)
    assert engine.stats.dropped == 0


@pytest.mark.deep
@pytest.mark.parametrize(("family", "mesh"), [("short", "pp2-ep2-tp2"), ("llama3", "pp2-dp2-tp2")])
def test_rows_that_run_ahead_in_stages(family, mesh):
    cfg, found = test_stages.config(family, 2), []
    for devices in (test_stages.mesh_of(cfg, "1"), test_stages.mesh_of(cfg, mesh)):
        made = Programs(random_weights(cfg, devices), cfg, devices, 4, 160, "float32")
        engine = engine_of(made, [x for x, _ in texts("ring")])
        found.append([x.tokens for x in ask(engine, [x for x, _ in texts("ring")])])
        assert engine.stats.dropped > 2
    assert found[0] == found[1]


def test_steps_of_a_free_text():
    """A row whose grammar leaves its text free takes as many steps as one without, in as many turns but for
    the first few tokens; also beside a row whose grammar has it wait, which has a step in every second turn.
    """
    new = 60

    def turns_of(*grammars) -> list[int]:
        """In which turn each answer ended. Each took a step per token."""
        requests = [Request([5, 6, 7 + i], new, grammar=grammar) for i, grammar in enumerate(grammars)]
        engine, ended = batch_of(requests, "ring"), {}
        answers = [engine.add(request) for request in requests]
        while engine.busy:
            engine.advance()
            ended |= {i: engine.turns for i, x in enumerate(answers) if x.finish_reason and i not in ended}
        assert engine.stats.row_steps == engine.stats.tokens == new * len(requests)
        return [ended[i] for i in range(len(requests))]

    free, frames = Texts(10_000, 99), Classes(3, 99)
    (turns,) = turns_of(None)
    assert turns_of(free) == [turns + scheduler.STEADY_TOKENS]
    assert turns_of(frames) == [turns + new - 1]
    text, other = turns_of(free, frames)
    assert text == turns + scheduler.STEADY_TOKENS
    assert other <= turns + new + 1  # its prompt is read after the other one


@pytest.mark.parametrize("wait", [0, 1, 2])
def test_cancelled_when_a_step_is_dropped(wait):
    """What the row has read serves others: its ring has held a token more than the answer has."""
    for name in ("ring", "window"):
        request, tokens = texts(name)[3]
        engine = batch_of([request], name)
        answer = engine.add(request)
        while not any(row.dropped for row in engine.scheduler.rows):
            engine.advance()
        row = next(row for row in engine.scheduler.rows if row.dropped)
        assert row.most_computed(1) == row.computed + 1
        for _ in range(wait):
            engine.advance()
        engine.cancel(answer)
        known = [*request.prompt, *answer.tokens]
        longer = [Request(known[:n], 5) for n in (len(known), len(known) - 1, len(known) - 3)]
        again, *others = ask(engine, [request, *longer])
        assert again.tokens == tokens and engine.stats.reused_tokens
        assert [x.tokens for x in others] == [alone(x, name)[0] for x in longer]


def test_a_grammar_that_fails():
    """Its answer is an error, and the others go on."""

    class Failing(Classes):
        def accept_token(self, token: int) -> bool:
            if self.accepted == 2:
                raise UserError("too complex")
            return super().accept_token(token)

    requests = [Request([5, 6], 6, grammar=Failing(3, 99)), Request([5, 6], 6)]
    failed, other = ask(batch_of(requests, "ring"), requests)
    assert (failed.finish_reason, failed.error, len(failed.tokens)) == ("error", "too complex", 3)
    assert other.tokens == alone(other.request, "ring")[0]


def test_programs_for_what_rows_ask(compiled):
    """The smallest of several programs, whichever rows come together; the tokens are those of each alone."""
    greedy = [Request(list(range(5, 5 + n)), 6) for n in (1, 9, 30)]
    drawn = sampled(subject("ring", "1")[1])[1::3]
    greedy.append(Request([9, 8, 7], 8, grammar=Classes(3, 99)))
    special = [
        Request([9, 8, 7], 6, Sampling(top_logprobs=3), score=True),
        Request([9, 8, 7], 8, Sampling(temperature=1.0, seed=4, frequency_penalty=0.5)),
    ]
    like = [greedy[0], special[0]]
    engine = batch_of(like, "ring", longest=60, option_sets=OPTION_SETS)
    compiled.clear()
    used, decode = [], engine.programs.decode

    def spied(count, sampling, rows):
        used.append(frozenset(name for name, x in vars(sampling).items() if x is not None))
        return decode(count, sampling, rows)

    engine.programs.decode = spied
    for requests, expected in ((greedy, 0), (drawn + greedy, 1), (special + greedy, 2), (greedy, 0)):
        used.clear()
        for answer in ask(engine, requests):
            if answer.request not in special and not answer.request.grammar:
                assert answer.tokens == alone(answer.request, "ring")[0]
        assert used[0] == OPTION_SETS[expected]
    assert not compiled
    with pytest.raises(UserError, match="no program is there for"):
        batch_of(greedy, "ring").add(special[1])


def test_likeliest_of_prompts_and_answers():
    """By a forward of the whole text; prompts in chunks of unlike widths."""
    weights, cfg, mesh = subject("ring", "1")
    rng, how = np.random.default_rng(3), Sampling(temperature=1.0, seed=1, top_logprobs=5)
    requests = [Request(rng.integers(0, cfg.V, n).tolist(), 7, how, score=True) for n in (1, 2, 40, 50)]
    for answer in ask(batch_of(requests, "ring"), requests):
        text = answer.request.prompt + answer.tokens
        padded = np.array([text + [0] * (64 - len(text))], np.int32)
        expected = np.asarray(jax.nn.log_softmax(model.forward(padded, weights, cfg=cfg, mesh=mesh)[0]))
        found = answer.prompt_top_logprobs + answer.top_logprobs
        assert len(found) == len(text) - 1
        for place, row in zip(found, expected, strict=False):
            order = np.argsort(-row)[:5]
            assert list(place) == order.tolist()
            np.testing.assert_allclose(list(place.values()), row[order], atol=1e-4)


def test_kept_grammars(monkeypatch):
    """A grammar is compiled once while it is among those used last; each answer has a state of its own."""
    compiled, compile = [], grammars.compiled_matcher
    monkeypatch.setattr(grammars, "compiled_matcher", lambda *key: compiled.append(key[2]) or compile(*key))
    monkeypatch.setattr(grammars, "KEPT", grammars.KeptGrammars(limit=8))
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    tokens = grammar_tokenizer(tokenizer, 512, frozenset([6]))

    def first_tokens(text: str) -> np.ndarray:
        """The mask of an answer's first token. The answer then goes on."""
        state, bits = make_grammar(tokens, "regex", text).start(), np.zeros(16, np.uint32)
        state.fill_bitmask(bits)
        state.accept_token(tokenizer(text[0], add_special_tokens=False).input_ids[0])
        return bits

    masks = [first_tokens(text).tobytes() for text in ("a+", "b+", "c+", "d+")]
    assert compiled == ["a+", "b+", "c+", "d+"] and len(set(masks)) == 4
    assert first_tokens("a+").tobytes() == masks[0]
    first_tokens("e+")  # in the place of b, which is compiled again
    assert [first_tokens(text).tobytes() for text in ("a+", "b+")] == masks[:2]
    assert compiled[4:] == ["e+", "b+"]
    with pytest.raises(UserError):
        make_grammar(tokens, "regex", "(")
    make_grammar(
        grammar_tokenizer(tokenizer, 512, frozenset([7])), "regex", "b+"
    )  # whose texts end otherwise
    assert compiled[6:] == ["(", "b+"]
    assert len(grammars.KEPT.kept) == 4


def test_a_real_grammar():
    """llguidance's masks: each text of a schema is allowed token by token, and what is not one is not."""
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    tokens = grammar_tokenizer(tokenizer, 512, frozenset([6]))
    schema = dict(
        type="object", properties=dict(a=dict(type="integer")), required=["a"], additionalProperties=False
    )
    grammar = make_grammar(tokens, "json_schema", schema)
    for text, fits in (('{"a": 12}', True), ('{"a": -3}', True), ('{"a": 1.5}', False), ('{"b": 1}', False)):
        state, bits, done = grammar.start(), np.zeros(16, np.uint32), False
        for token in tokenizer(text, add_special_tokens=False).input_ids:
            state.fill_bitmask(bits)
            if not bits[token // 32] >> (token % 32) & 1:
                break
            done = state.accept_token(token)
        assert done == fits, text
        assert not fits or json.loads(text)
    for kind, what, message in (
        ("regex", "(a", "unclosed group"),
        ("lark", "start: x", "unknown name"),
        ("json_schema", {"type": "no"}, "Invalid type"),
    ):
        with pytest.raises(UserError, match=message):
            make_grammar(tokens, kind, what)
