"""Prefixes in host memory: answers are the same, and what was read once is not read again."""

from collections import deque

import numpy as np
import pytest
from test_generation import MAX_LEN, ask, assert_as_alone, batch_of, finish, mixed, subject
from test_generation import two_shapes as two_shapes  # a fixture

from serving import prefix_cache, scheduler
from serving.prefix_cache import PrefixCache
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.scheduler import Row, Shard

PLENTY = 1 << 30  # bytes


@pytest.fixture
def short_prefixes(monkeypatch):
    """Even the shortest prefixes are saved and reused: the tests' texts are short."""
    for module, name in (
        (scheduler, "MIN_COPIED"),
        (scheduler, "MIN_SAVED"),
        (prefix_cache, "MIN_SAVED"),
    ):
        monkeypatch.setattr(module, name, 1)


@pytest.fixture
def loads(monkeypatch) -> list[int]:
    """For each prefix that is put into a row, its tokens."""
    found, load = [], Programs.load_prefixes

    def recorded(self, rows, prefixes):
        found.extend(len(x.text) for x, row in zip(prefixes, rows, strict=True) if x and row >= 0)
        load(self, rows, prefixes)

    monkeypatch.setattr(Programs, "load_prefixes", recorded)
    return found


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("ring", "1"), ("ring", "dp2-ep2-tp2"), ("shared", "1"), ("states", "1"), ("states", "tp8")],
)
def test_many_requests_in_few_rows(name, mesh, short_prefixes, loads, compiled):
    """As alone, to the token; and nothing is compiled when a row is saved or loaded."""
    requests = mixed(subject(name, "1")[1], 40)
    batch = batch_of(requests, name, mesh, rows=2, prefix_cache_bytes=PLENTY)
    loads.clear()
    compiled.clear()
    answers = ask(batch, requests)
    assert not compiled
    assert_as_alone(answers, name)
    assert len(loads) >= 3


def session(batch, turns: int, others: int, vocabulary: int) -> list:
    """An agent's session: each prompt is the last text and new tokens. Others' requests come between."""
    rng, text, answers = np.random.default_rng(0), [], []
    for _ in range(turns):
        text = text + rng.integers(0, vocabulary, 4).tolist()
        answer = batch.add(Request(text, 3))
        strangers = [batch.add(Request(rng.integers(0, vocabulary, 20), 2)) for _ in range(others)]
        finish(batch)
        text, answers = text + answer.tokens, answers + [answer, *strangers]
    return answers


def test_a_session_reads_each_token_once(short_prefixes, loads):
    """Of each turn only the new tokens and the last chosen one are read, though others take the rows.

    By default nothing is saved.
    """
    vocabulary = subject("plain", "1")[1].V
    like, turns = [Request([0], 3)], 10

    def read_in_turns(**options) -> int:
        batch = batch_of(like, "plain", rows=2, longest=MAX_LEN, **options)
        answers = session(batch, turns, 3, vocabulary)
        assert_as_alone(answers, "plain")
        return batch.stats.prompt_tokens - batch.stats.reused_tokens

    least = turns * (4 + 3 * 20) + (turns - 1) * 1  # every token once, and the last token of each answer
    assert read_in_turns(prefix_cache_bytes=PLENTY) <= least + turns
    loads.clear()
    assert read_in_turns() > least + turns * 7  # without it, the session is read again and again
    assert not loads


@pytest.mark.parametrize("mesh", ["1", "dp2-ep2-tp2"])
def test_bytes_on_the_host(mesh, short_prefixes):
    """Empty slots are not kept, and what is counted is what is held, up to a slot per device."""
    batch = batch_of([Request([0], 1)], "ring", mesh, rows=2, longest=MAX_LEN, prefix_cache_bytes=PLENTY)
    for prompt in ([5] * 30, [6] * 60, [7] * 4, [8] * 4):
        ask(batch, [Request(prompt, 1)])
    saved = batch.scheduler.shards[0].prefix_cache.saved[:2]  # on the mesh, of a shard with one row
    assert [len(x.text) for x in saved] == [30, 60]
    for prefix in saved:
        prefix.finish_copying()
        held = sum(part.nbytes for copy in prefix.copies for part in copy.parts.values())
        slot = batch.programs.row_bytes(1)
        assert prefix.bytes <= held <= prefix.bytes + 8 * slot
    assert saved[0].bytes < saved[1].bytes < batch.programs.row_bytes(MAX_LEN)


def test_which_prefix_a_request_takes():
    """The saved one only if it is longer; and what its ring had held counts for the row that gets it."""

    def admitted(saved: int, cached: int):
        row = Row(np.arange(100), computed=cached)
        shard = Shard([row], 1, frozenset(), PrefixCache(PLENTY))
        shard.prefix_cache.add(np.arange(saved), saved + 20, 1)
        return shard.admit(deque([Answer(Request([0], 1), np.arange(60))])), row

    admission, row = admitted(saved=50, cached=30)
    assert admission.load is not None
    assert (row.computed, row.reused, row.source_computed) == (50, 50, 70)
    admission, row = admitted(saved=50, cached=40)
    assert admission.load is None and row.computed == 40


def test_which_texts_are_kept():
    cache = PrefixCache(100)

    def texts() -> list[str]:
        return ["".join(map(chr, x.text)) for x in cache.saved]

    def add(text: str, size: int = 40):
        return cache.add(np.array([ord(c) for c in text]), len(text), size)

    assert add("too large", 101) is None
    first = add("first")
    add("second")
    assert add("sec") is None  # a saved text begins with it
    cache.use(first)
    add("third")
    assert texts() == ["first", "third"]
    add("first and more")  # takes the place of its beginning
    assert texts() == ["third", "first and more"]
    cache.forget(np.array([ord("f")]))
    assert texts() == ["third"]
