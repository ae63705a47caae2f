"""Which row takes which request, what of its prompt is cached already, and which prompt is read next.

All this happens on the host. Nothing in it takes time that grows with what the rows hold, but for the
comparison of a new prompt with them.
"""

import dataclasses
import itertools
from collections import deque

import jax
import numpy as np

from model import Chunked, Full, Sampling, Window
from serving.requests import Answer
from sharding.sampling import NEUTRAL

BLOCK = 8192  # tokens to compare at a time: most texts differ soon
AHEAD = 100  # answers of the queue that are looked at: those that wait let others pass
WORTH_COPYING = 16  # tokens of a cached prefix; of fewer, reading them again costs less


@dataclasses.dataclass(eq=False)
class Row:
    """What is known of a row of the cache.

    text: [max_len] int32: its tokens, as far as they are known. read: how many of them have been read.
    reused: how many it had from a cached prefix, of a row that had read `past` tokens. steps: those in
    flight, whose tokens are not known yet. number: of its answer, in the order of admission.
    """

    text: np.ndarray
    read: int = 0
    reused: int = 0
    past: int = 0
    steps: int = 0
    answer: Answer | None = None
    number: int = -1

    @property
    def free(self) -> bool:
        return self.answer is None or self.answer.finish_reason is not None

    @property
    def constrained(self) -> bool:
        """Whether a grammar must know the last token before it says what may come next."""
        return not self.free and self.answer.constraint is not None

    @property
    def unread(self) -> int:
        """How many tokens of the prompt are still to be prefilled: all but the last."""
        return 0 if self.free else max(len(self.answer.prompt) - 1 - self.read, 0)

    @property
    def length(self) -> int:
        """How much of its text is known for certain: what has been read, and the prompt."""
        return max(self.read, len(self.answer.prompt) if self.answer else 0)

    @property
    def wanted(self) -> int:
        """How many tokens to choose beyond those that the steps in flight choose at least."""
        if self.free or self.unread or (self.constrained and self.steps):
            return 0
        return self.answer.request.max_new_tokens - len(self.answer.tokens) - self.steps

    def latest(self, width: int) -> int:
        """How many tokens its cache may have had, of which later ones are in the places of earlier ones.

        width: how many a step in flight may have read.
        """
        return max(self.past, self.read + self.steps * width)

    def assign(self, answer: Answer, cached: int, past: int, number: int) -> None:
        """Take an answer, of whose prompt `cached` tokens are in the cache, of `past` that it has had."""
        self.text[: len(answer.prompt)] = answer.prompt
        self.answer, self.number = answer, number
        self.read, self.reused, self.past, self.steps = cached, cached, past if cached else 0, 0

    def chose(self, tokens: np.ndarray) -> None:
        """Note what a step chose, one token after each that it read."""
        places = self.text[self.read + 1 :][: len(tokens)]  # what is beyond max_len is not kept
        places[:] = tokens[: len(places)]
        self.read, self.steps = self.read + len(tokens), self.steps - 1

    def forget(self) -> None:
        """Nobody is to reuse anything of what has been read."""
        self.answer, self.number = None, -1
        self.read, self.reused, self.past, self.steps = 0, 0, 0, 0


@dataclasses.dataclass(frozen=True)
class Wait:
    """For a row that is reading a prompt: until it has read as many tokens as another one shares with it."""

    row: Row
    answer: Answer  # the row's
    shared: int

    @property
    def left(self) -> int:
        """How many tokens of them are still to be read; 0 if the row has gone on to something else."""
        reads = self.row.answer is self.answer and self.row.unread
        return max(self.shared - self.row.read, 0) if reads else 0


@dataclasses.dataclass(eq=False)
class Shard:
    """The rows of one data shard.

    width: tokens that a step may read in a row. masks: of the model's layers.
    """

    rows: list[Row]
    width: int
    masks: frozenset[Full | Chunked | Window]
    waits: dict[Answer, Wait] = dataclasses.field(default_factory=dict)

    def admit(self, queue: deque[Answer], number: int) -> tuple[Row, Row] | None:
        """Give a free row the first answer of the queue that need not wait: -> (the row, the one whose cached
        prefix it goes on from), or None.

        Neither a prompt that is being read nor an answer that waits holds up those behind it.
        """
        waits = {}
        candidates = itertools.islice(queue, AHEAD) if any(row.free for row in self.rows) else ()
        for answer in candidates:
            wait = self.waits.get(answer)
            if wait is None or not wait.left:
                matches = self.match_prefixes(answer)
                cached = {row: self.cached_prefix(row, n) for row, n in matches.items()}
                if (wait := self.wait(matches, cached)) is None:
                    queue.remove(answer)
                    row, source = self.choose(cached)
                    row.assign(answer, cached[source], source.latest(self.width), number)
                    return row, source
            waits[answer] = self.waits[answer] = wait
        self.waits = waits
        return None

    def match_prefixes(self, answer: Answer) -> dict[Row, int]:
        """How many tokens of its prompt, but the last, each row begins with: read, or to be read.

        None without prefix caching, nor where its scores are wanted, for which all of it must be read.
        """
        reuses = answer.prefix_caching and not answer.request.score
        own = answer.prompt[: -1 if reuses else 0]
        return {row: shared(row.text[: row.length], own) for row in self.rows}

    def cached_prefix(self, row: Row, matching: int) -> int:
        """How many of the tokens that match the row has read, and its cache still holds."""
        n = min(matching, row.read)
        latest = row.latest(self.width)
        while (less := min((mask.reusable(n, latest) for mask in self.masks), default=n)) < n:
            n = less
        return n

    def wait(self, matches: dict[Row, int], cached: dict[Row, int]) -> Wait | None:
        """What to wait for, if anything: a row that is just now reading much of the same prompt."""
        waits = (Wait(row, row.answer, n) for row, n in matches.items() if row.unread)
        longest = max((wait for wait in waits if wait.left), key=lambda wait: wait.shared, default=None)
        worth = longest is not None and longest.shared - max(cached.values()) >= WORTH_COPYING
        return longest if worth else None

    def choose(self, cached: dict[Row, int]) -> tuple[Row, Row]:
        """A free row for an answer, and the row whose cached prefix it goes on from."""
        oldest = min((row for row in self.rows if row.free), key=lambda row: row.number)
        source = max(self.rows, key=lambda row: (cached[row], row.free))
        if source.free and source.read < 2 * cached[source]:  # what is overwritten is less than what is kept
            return source, source
        return oldest, source if cached[source] >= WORTH_COPYING else oldest

    def next_to_read(self, oldest: bool) -> Row | None:
        """A row whose prompt is still to be read: the one admitted first, or the one that is done soonest.

        By turns, a long prompt is never held up for good, nor a short one for long. Done is also a row that
        has read what an answer waits for.
        """
        reading = [row for row in self.rows if row.unread]
        if oldest:
            return min(reading, key=lambda row: row.number, default=None)
        left = {row: row.unread for row in reading}
        for wait in self.waits.values():
            if wait.left:
                left[wait.row] = min(left[wait.row], wait.left)
        return min(reading, key=lambda row: (left[row], row.number), default=None)


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    n = min(len(a), len(b))
    for start in range(0, n, BLOCK):
        differs = a[start : min(start + BLOCK, n)] != b[start : min(start + BLOCK, n)]
        if differs.any():
            return start + int(differs.argmax())
    return n


class Group:
    """Rows that have their turn together, by data shard. prefills: how often there was a prompt to read."""

    def __init__(self, shards: list[Shard], vocabulary: int):
        self.shards, self.vocabulary, self.prefills = shards, vocabulary, 0
        self.rows = [row for shard in shards for row in shard.rows]

    def next_to_read(self) -> list[Row | None]:
        """The row of each data shard that reads more of its prompt now."""
        reading = [shard.next_to_read(oldest=self.prefills % 2 == 1) for shard in self.shards]
        self.prefills += any(reading)
        return reading

    def to_choose(self) -> np.ndarray:
        """How many tokens a step is to choose in each row, at most: [b] int32."""
        width = self.shards[0].width
        widths = (min(max(row.wanted, 0), 1 if row.constrained else width) for row in self.rows)
        count = np.fromiter(widths, np.int32)
        chosen = [row.constrained for row, n in zip(self.rows, count, strict=True) if n]
        if all(chosen) and any(row.constrained and row.steps for row in self.rows):
            count[:] = 0  # they wait for one another, rather than take turns in steps that cost as much
        return count

    def sampling(self, options: frozenset[str]) -> Sampling:
        """What the rows' requests ask for these options of sampling, as arrays [b]."""

        def column(name: str):
            if name == "allowed":
                return self.allowed()
            neutral = getattr(NEUTRAL, name)
            if name == "answer_start":
                return np.array([len(row.answer.prompt) if row.answer else 0 for row in self.rows], np.int32)
            asked = (getattr(row.answer.request.sampling, name) if row.answer else None for row in self.rows)
            each = [neutral if x is None else x for x in asked]
            return jax.tree.map(lambda like, *x: np.stack(x).astype(like.dtype), neutral, *each)

        return Sampling(**{name: column(name) for name in options})

    def allowed(self) -> np.ndarray:
        """Which tokens each row's grammar allows next, all without one: see Sampling."""
        bits = np.full((len(self.rows), -(-self.vocabulary // 32)), 0xFFFFFFFF, np.uint32)
        for row, own in zip(self.rows, bits, strict=True):
            if row.constrained:
                row.answer.constraint.fill_bitmask(own)
        return bits


class Scheduler:
    """All rows, in groups that take turns, and the queue of answers that wait for one.

    There are as many groups as stages of layers. admitted: answers that were given to a row.
    """

    def __init__(
        self, rows: int, max_len: int, groups: int, shards: int, width: int, masks: frozenset, vocabulary: int
    ):
        """shards: in each group. width, masks: see Shard. vocabulary: how many tokens there are."""
        self.rows = [Row(text) for text in np.zeros((rows, max_len), np.int32)]
        each = rows // (groups * shards)
        self.shards = [Shard(self.rows[i : i + each], width, masks) for i in range(0, rows, each)]
        self.groups = [
            Group(self.shards[i : i + shards], vocabulary) for i in range(0, groups * shards, shards)
        ]
        self.queue: deque[Answer] = deque()
        self.admitted = 0

    @property
    def busy(self) -> bool:
        return bool(self.queue) or not all(row.free for row in self.rows)

    @property
    def starved(self) -> bool:
        """Whether a row is free though an answer waits."""
        return bool(self.queue) and any(row.free for row in self.rows)

    @property
    def prefills(self) -> int:
        return sum(group.prefills for group in self.groups)

    def admit(self, group: Group) -> list[tuple[Row, Row] | None]:
        """The next admission of each data shard, see Shard.admit."""
        admissions = []
        for shard in group.shards:
            admissions.append(shard.admit(self.queue, self.admitted))
            self.admitted += admissions[-1] is not None
        return admissions
