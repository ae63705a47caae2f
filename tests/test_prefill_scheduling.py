"""Prefill beside decoding: how many prompt tokens are read while a short prompt waits, and per decode step.

All is counted in tokens and steps, of programs that compute nothing. `test_answers` compares answers.
"""

import dataclasses
import functools
import itertools
import types

import jax
import numpy as np
import pytest
from test_generation import MAX_LEN, assert_as_alone, deep, finish, mixed, subject

from serving import chunks, executors
from serving.engine import Engine
from serving.needed import ReadChunk, demand_of, needed_programs, warm_up
from serving.programs import Programs
from serving.requests import Request
from serving.scheduler import ACCELERATOR_LIMITS, CPU_LIMITS, PrefillLimits, server_limits
from serving.speculation import PromptLookup
from serving.steps import DecodeStep, Output, PrefillChunk, init_batch

LIMITS = PrefillLimits(budget=2, beside_decoding=8, alone=16)
LONG, SHORT = 150, 6  # tokens of a prompt


class Counted(Engine):
    """An engine that keeps the plans of its turns: (tokens of a shard's chunk, how many rows decode)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.planned = []

    def _plan_turn(self):
        step = super()._plan_turn()
        chunk = step.plan.chunk
        tokens = chunk.width * len(chunk.rows) // self.programs.shards if chunk else 0
        self.planned.append((tokens, int(step.plan.count.astype(bool).sum())))
        return step


@pytest.fixture(autouse=True)
def widths(monkeypatch):
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8), (1, 16)))


def engine_of(made: Programs, requests: list[Request], longest=0, limits=LIMITS) -> Counted:
    needed = needed_programs(made, demand_of(requests, longest), limits=limits)
    warm_up(made, needed)
    return Counted(made, needed, limits)


def programs_on(mesh: str, name: str = "ring", speculation=None) -> Programs:
    return Programs(*subject(name, mesh), 8, MAX_LEN, "float32", speculation)


def prompts(seed: int = 0):
    """A function that makes requests of n random tokens."""
    rng = np.random.default_rng(seed)
    return lambda n, new=3: Request(rng.integers(0, 101, n).tolist(), new)


class CountingPrograms:
    """Programs that compute nothing and choose token 1."""

    def __init__(self, rows: int, stages: int, shards: int):
        self.rows, self.stages, self.shards = rows, stages, shards
        self.max_len, self.width, self.masks, self.places = 4096, 1, frozenset(), 0
        self.decode_rows = (rows // (stages * shards),)
        self.chunk_shapes = [chunks.Shape(*shape) for shape in chunks.CPU_SHAPES]
        self.cfg, self.row_bytes = types.SimpleNamespace(V=101), int

    def run(self, plans):
        count = plans[-1].count
        zeros = np.zeros((len(count), 1), np.float32)
        return None, Output(tokens=1 + zeros.astype(int), logprobs=zeros, count=count, drafted=0 * count)


def counting_engine(
    stages: int = 1, shards: int = 1, rows: int = 16, examples=(), limits: PrefillLimits = LIMITS
) -> Counted:
    made = CountingPrograms(rows, stages, shards)
    demand = demand_of([*examples, Request([1], 1)], made.max_len)
    return Counted(made, needed_programs(made, demand, limits=limits), limits)


def advance_until(engine: Engine, done) -> None:
    for _ in range(2000):
        if done():
            return
        engine.advance()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("calls", [0, 1, 5])
@pytest.mark.parametrize("budget", [0, 2])
def test_a_short_prompt_beside_four_long_ones(budget, calls):
    """Nothing decodes: it waits for one chunk of another prompt, and no chunk is wider than the limit."""
    request, engine = prompts(), counting_engine(limits=PrefillLimits(budget, 8, 16))
    long = [engine.add(request(LONG)) for _ in range(4)]
    for _ in range(calls):
        engine.advance()
    short, before = engine.add(request(SHORT, 20)), len(engine.planned)
    advance_until(engine, lambda: short.tokens)
    read = [width for width, _ in engine.planned[before:]]
    # Its own chunk and at most one before it; then the call that fetches the token may start another.
    assert sum(read[:2]) <= 16 + 8 and len(read) <= 3 and not any(x.tokens for x in long)


def test_the_pace_beside_long_prompts():
    """Each decode step and row pays for the budget of prompt tokens: no more are read, and no fewer."""
    request, engine = prompts(), counting_engine()
    short = engine.add(request(SHORT, 60))
    advance_until(engine, lambda: short.tokens)
    long, start = [engine.add(request(LONG)) for _ in range(4)], len(engine.planned)
    advance_until(engine, lambda: len(short.tokens) > 40)
    turns = engine.planned[start:]
    assert {rows for _, rows in turns} == {1} and {width for width, _ in turns} == {0, 8}
    for first in range(len(turns)):
        read = sum(width for width, _ in turns[first:])
        steps = len(turns) - first
        assert read <= 2 * steps + 8
    assert sum(width for width, _ in turns) >= 2 * len(turns) - 8
    assert not any(x.tokens for x in long)


def test_tokens_late_in_a_prompt_cost_more():
    """With a budget of 2 a chunk of 8 pays for 4 turns, at position 16 for 8, and so on."""
    request, engine = prompts(), counting_engine(limits=dataclasses.replace(LIMITS, double_cost=16))
    short = engine.add(request(SHORT, 60))
    advance_until(engine, lambda: short.tokens)
    engine.add(request(LONG))
    start = len(engine.planned)
    advance_until(engine, lambda: len(short.tokens) > 40)
    turns = [i for i, (width, _) in enumerate(engine.planned[start:]) if width]
    assert np.diff(turns).tolist() == [4, 6, 8, 10]  # chunks at positions 0, 8, 16, 24 and 32


def test_the_budget_grows_with_the_rows_that_decode():
    request, engine = prompts(), counting_engine()
    short = [engine.add(request(1, 50)) for _ in range(4)]
    advance_until(engine, lambda: all(x.tokens for x in short))
    engine.add(request(LONG))
    start = len(engine.planned)
    for _ in range(16):
        engine.advance()
    assert engine.planned[start:] == [(8, 4)] * 16  # 2 for each of 4 rows pay for a chunk of 8 in each turn
    finish(engine)


def test_short_prompts_share_the_budget(monkeypatch):
    """Beside 8 decoding rows an accelerator reads 128 tokens in each turn: a piece of a long prompt, or four
    short prompts, each of which ends as it does alone. Padding counts like tokens.
    """
    monkeypatch.setattr(chunks, "CPU_SHAPES", chunks.ACCELERATOR_SHAPES)
    engine = counting_engine(limits=ACCELERATOR_LIMITS)
    decoding = [engine.add(Request([1], 60)) for _ in range(8)]
    advance_until(engine, lambda: all(x.tokens for x in decoding))
    start = len(engine.planned)
    for n in (31, 30, 29, 28):
        engine.add(Request([2 + n] * n, 50))
    engine.advance()
    engine.add(Request([2] * 300, 50))  # of which a decode step reads the last
    for _ in range(4):
        engine.advance()
    assert engine.planned[start:] == [(128, 12), (128, 12), (128, 12), (32, 12), (32, 13)]


def test_a_second_short_prompt_beside_all_that():
    """One answer is decoded and four long prompts are read: the next short one waits for a bounded time."""
    request, engine = prompts(), counting_engine()
    first = engine.add(request(SHORT, 90))
    advance_until(engine, lambda: first.tokens)
    for _ in range(4):
        engine.add(request(LONG))
    for _ in range(6):
        engine.advance()
    before, decoded = len(engine.planned), len(first.tokens)
    second = engine.add(request(SHORT, 5))
    advance_until(engine, lambda: second.tokens)
    read = [width for width, _ in engine.planned[before:] if width]
    # A chunk of 8 in every fourth turn, of which every second is the shortest prompt's.
    assert len(read) <= 2 and len(first.tokens) - decoded <= 2 * 4 + 2


def test_a_long_prompt_beside_a_stream_of_short_ones():
    """Every second chunk is the oldest prompt's, and chunks are read at the pace of the budget."""
    request, engine = prompts(), counting_engine()
    long, n = engine.add(request(81)), 0  # 80 tokens to prefill, 10 chunks of 8
    while not long.tokens:
        engine.add(request(9, 2))  # each has a chunk to read, and there is always another
        engine.advance()
        n += 1
        assert n <= 2 * 10 * 4 + 8


def test_all_is_read_at_once_without_decoding():
    """Chunks are as wide as the limits allow while no row decodes, and their cost is not held against rows
    that decode later.
    """
    request, engine = prompts(), counting_engine()
    answers = [engine.add(request(n, 0)) for n in (17, 33)]
    finish(engine)
    assert engine.planned[:3] == [(16, 0), (16, 0), (16, 0)]
    assert all(x.finish_reason == "length" for x in answers)
    engine.add(request(17, 9))
    engine.advance()
    assert engine.planned[-1] == (16, 1) and engine.scheduler.micro_batches[0].debt == 8  # and no more


@pytest.mark.parametrize(("stages", "shards"), [(1, 2), (2, 1), (3, 1), (2, 2)])
def test_stages_and_data_shards(stages, shards):
    """Each microbatch keeps the budget, also one in which no row decodes; all prompts are read in the end."""
    engine = counting_engine(stages, shards)
    short = engine.add(Request([1], 200))
    advance_until(engine, lambda: short.tokens)
    long = [engine.add(Request([2 + i] * 1000, 5)) for i in range(15)]
    start = len(engine.planned)
    advance_until(engine, lambda: len(short.tokens) > 150)
    for i in range(stages):
        turns = [width for width, _ in engine.planned[start + i :: stages]]
        assert 2 * len(turns) - 8 <= sum(turns) <= 2 * len(turns) + 8
    finish(engine)
    assert all(x.finish_reason == "length" for x in long)
    assert sum(width for width, _ in engine.planned) * shards >= 15 * 999


def test_a_grammar_does_not_pay_twice():
    """Its row decodes in every second turn, and only a turn in which it decodes pays for prompt tokens."""
    masks = itertools.count()  # another one for each token, so that the row does wait
    constraint = types.SimpleNamespace(
        fill_bitmask=lambda bits: bits.fill(next(masks)),
        accept_token=lambda token: False,
        forced_tokens=lambda: [],
    )
    constrained = Request([1], 60, grammar=types.SimpleNamespace(start=lambda: constraint))
    engine = counting_engine(examples=[constrained])
    answer = engine.add(constrained)
    advance_until(engine, lambda: answer.tokens)
    engine.add(Request([2] * 1000, 5))
    start = len(engine.planned)
    advance_until(engine, lambda: len(answer.tokens) > 40)
    turns = engine.planned[start:]
    steps = sum(rows for _, rows in turns)
    assert len(turns) > 1.9 * steps  # so it does wait in every second turn
    assert sum(width for width, _ in turns) <= 2 * steps + 8
    finish(engine)


@pytest.mark.parametrize("mesh", ["1", deep("dp2-tp4")])
def test_scores_of_several_prompts(mesh, monkeypatch, compiled):
    """Prompts of unlike lengths are read together, with scores and without: each result is as alone."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8), (4, 8)))
    request = prompts()
    lengths = (8, 5, 3, 9, 1, 6, 7, 21, 2, 12)
    asked = [dataclasses.replace(request(n, n % 3), score=n % 2 == 0) for n in lengths]
    together = engine_of(programs_on(mesh, "plain"), asked, limits=PrefillLimits())
    compiled.clear()
    answers = [together.add(x) for x in asked]
    finish(together)
    assert not compiled and 32 in {tokens for tokens, _ in together.planned}
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 8),))
    one = engine_of(programs_on("1", "plain"), asked, limits=PrefillLimits())
    for answer, x in zip(answers, asked, strict=True):
        alone = one.add(x)
        finish(one)
        assert answer.tokens == alone.tokens
        np.testing.assert_allclose(answer.prompt_logprobs, alone.prompt_logprobs, atol=2e-5)
        assert len(answer.prompt_logprobs) == (len(x.prompt) - 1 if x.score else 0)


@pytest.mark.parametrize(("mesh", "lookup"), [("1", False), deep("1", True), deep("dp2-ep2-tp2", False)])
def test_answers(mesh, lookup, compiled):
    """As alone, with copied prefixes and requests that come while others are read; nothing is compiled."""
    requests = mixed(subject("ring", "1")[1], 24)
    made = programs_on(mesh, speculation=PromptLookup(3) if lookup else None)
    engine = engine_of(made, requests)
    compiled.clear()
    answers = []
    for request in requests:
        answers.append(engine.add(request))
        engine.advance()
        engine.advance()
    finish(engine)
    assert not compiled
    assert engine.stats.reused_tokens > 0
    assert {width for width, _ in engine.planned} >= {0, 8}
    assert_as_alone(answers, "ring")


def test_only_shapes_within_the_limits_are_compiled(monkeypatch):
    """A server on a CPU has no program of 256 tokens; 128 are for prompts with more than 64 to be read."""
    monkeypatch.setattr(chunks, "CPU_SHAPES", ((1, 32), (4, 32), (1, 128), (2, 128)))
    made = Programs(*subject("ring", "1"), 2, MAX_LEN, "float32")  # which has no 4 rows

    def needed(longest: int, limits: PrefillLimits) -> list[tuple[int, int]]:
        found = needed_programs(made, demand_of([Request([1], 1)], longest), limits=limits)
        return [x.shape for x in found if isinstance(x, ReadChunk)]

    assert needed(1000, PrefillLimits()) == needed(66, PrefillLimits()) == [(1, 32), (1, 128), (2, 128)]
    assert needed(1000, CPU_LIMITS) == [(1, 32), (1, 128)] and needed(65, PrefillLimits()) == [(1, 32)]
    assert chunks.at_most(8, made.chunk_shapes) == [(1, 32)]  # for none is that small


def test_limits_of_a_server():
    assert server_limits("cpu") == CPU_LIMITS and server_limits("tpu") == ACCELERATOR_LIMITS
    unlimited = server_limits("cpu", 0)
    assert (unlimited.budget, unlimited.alone) == (0, CPU_LIMITS.alone)


def test_the_host_is_at_most_one_chunk_ahead(monkeypatch):
    """A new request waits for the chunk that is being read and for one more, not for a queue of chunks."""
    engine, events = engine_of(programs_on("1"), [Request([1], 1)], LONG), []
    execute = engine.programs.execute

    class Spied:
        def __init__(self, number: int):
            self.number = number

        def block_until_ready(self) -> None:
            events.append(("read", self.number))

    def spied(step, *arguments, **options):
        result, batch = execute(step, *arguments, **options)
        if not isinstance(step, PrefillChunk):
            return result, batch
        number = sum(kind == "send" for kind, _ in events)
        events.append(("send", number))
        return Spied(number), batch

    monkeypatch.setattr(engine.programs, "execute", spied)
    engine.add(prompts()(LONG, 1))
    for _ in range(4):
        engine.advance()
    assert events == [("send", 0)] + [x for i in (1, 2, 3) for x in (("send", i), ("read", i - 1))]


def test_a_chunk_is_read_when_its_layers_have_run():
    """The last of several programs takes what the layers return, though a chunk without scores does not use
    it: else its result would be there at once.
    """
    weights, cfg, mesh = subject("plain", "1")
    one, static = np.ones(1, np.int32), dict(cfg=cfg, mesh=mesh)
    batch = init_batch(cfg, mesh, 1, MAX_LEN, "float32")
    for step, T in ((step_of(1), 8), (DecodeStep(count=one), 1)):
        start = functools.partial(executors.start, **static)
        x, tokens, chunk = jax.eval_shape(start, step, weights, batch)
        rows = batch.replace(layers=[])
        lowered = executors.finish.lower(step, x, tokens, chunk, weights, rows, **static)
        assert f"tensor<1x{T}x{cfg.D}xf32>" in lowered.as_text().split("@main")[1].split("->")[0]
    result, _ = executors.several_programs(step_of(3), weights, batch, **static)
    np.testing.assert_array_equal(jax.device_get(result), [3])  # the length of the row


def step_of(n: int) -> PrefillChunk:
    return PrefillChunk(rows=np.zeros(1, np.int32), count=np.full(1, n, np.int32), width=8)
