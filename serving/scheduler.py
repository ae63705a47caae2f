"""Which row takes which request, which prefix of its prompt is already cached, and which prompt is read next.

All of this runs on the host. Its work does not grow with the lengths of the rows, except that each new prompt
is compared with their texts.
"""

import dataclasses
import itertools
from collections import deque

import jax
import numpy as np

from model import Mask
from serving.requests import Answer
from serving.rings import reusable_prefix
from sharding.sampling import NEUTRAL, Sampling

COMPARED = 8192  # tokens that are compared at a time: most texts differ early
LOOKAHEAD = 100  # answers of the queue that are considered: one that waits for a prefix lets others pass
MIN_COPIED = 16  # tokens of a cached prefix; computing fewer again costs less than copying them


@dataclasses.dataclass(eq=False)
class Row:
    """What the host knows of a row of the cache.

    text: [max_len] int32, its tokens as far as they are known. computed: how many of them have their keys and
    values in the cache. reused: how many of these came from a cached prefix, and source_computed: how many
    tokens the row that had cached it had computed. steps_in_flight: decode steps whose tokens are not known
    yet. number: of its answer, in the order of admission to the shard.
    """

    text: np.ndarray
    computed: int = 0
    reused: int = 0
    source_computed: int = 0
    steps_in_flight: int = 0
    answer: Answer | None = None
    number: int = -1

    @property
    def free(self) -> bool:
        return self.answer is None or self.answer.finish_reason is not None

    @property
    def constrained(self) -> bool:
        """Whether a grammar must accept each token before the next one can be chosen."""
        return not self.free and self.answer.constraint is not None

    @property
    def prefill_left(self) -> int:
        """How many tokens of the prompt are still to be prefilled: its last one is left to a decode step."""
        return 0 if self.free else max(len(self.answer.prompt) - 1 - self.computed, 0)

    @property
    def known(self) -> int:
        """How many tokens of the text are known: the computed ones, and the prompt."""
        return max(self.computed, len(self.answer.prompt) if self.answer else 0)

    @property
    def tokens_left(self) -> int:
        """How many more tokens to choose if each step in flight chooses one; 0 if it cannot decode now."""
        if self.free or self.prefill_left or (self.constrained and self.steps_in_flight):
            return 0
        return self.answer.request.max_new_tokens - len(self.answer.tokens) - self.steps_in_flight

    def most_computed(self, width: int) -> int:
        """The most tokens that its cache may have held: in a ring, later tokens overwrite earlier ones.

        width: the most tokens that a step in flight may have computed.
        """
        return max(self.source_computed, self.computed + self.steps_in_flight * width)

    def assign(self, answer: Answer, cached: int, source_computed: int, number: int) -> None:
        """Take an answer whose first `cached` tokens come from a row that had computed `source_computed`."""
        self.text[: len(answer.prompt)] = answer.prompt
        self.answer, self.number = answer, number
        self.computed, self.reused, self.steps_in_flight = cached, cached, 0
        self.source_computed = source_computed if cached else 0

    def append(self, tokens: np.ndarray) -> None:
        """Add the tokens that a step has chosen, one after each token that it has computed."""
        following = self.text[self.computed + 1 :][: len(tokens)]  # none beyond max_len
        following[:] = tokens[: len(following)]
        self.computed, self.steps_in_flight = self.computed + len(tokens), self.steps_in_flight - 1

    def clear(self) -> None:
        """Give up the answer and all that is cached."""
        self.answer, self.number, self.computed = None, -1, 0


@dataclasses.dataclass(frozen=True)
class Wait:
    """An answer waits until this row, which prefills another one, has computed the prefix of both prompts."""

    row: Row
    answer: Answer  # the row's
    shared: int

    @property
    def left(self) -> int:
        """How many tokens of the prefix are still to be computed; 0 if the row has another answer by now."""
        prefills = self.row.answer is self.answer and self.row.prefill_left
        return max(self.shared - self.row.computed, 0) if prefills else 0


@dataclasses.dataclass(eq=False)
class Shard:
    """The rows of one data shard.

    width: the most tokens of a row that a decode step may compute. masks: of the model's layers. waits: of
    the answers in the queue that wait for a row of this shard. admitted: how many answers were given a row.
    """

    rows: list[Row]
    width: int
    masks: frozenset[Mask]
    waits: dict[Answer, Wait] = dataclasses.field(default_factory=dict)
    admitted: int = 0

    def admit(self, queue: deque[Answer]) -> tuple[Row, Row] | None:
        """Give a free row the first answer of the queue that need not wait for a prefix.

        -> (the row, the row whose cached prefix is copied, which may be the same), or None. Answers that wait
        do not hold up those behind them.
        """
        waits = {}
        candidates = itertools.islice(queue, LOOKAHEAD) if any(row.free for row in self.rows) else ()
        for answer in candidates:
            wait = self.waits.get(answer)
            if wait is None or not wait.left:
                matches = self.match_prefixes(answer)
                cached = {row: self.cached_prefix(row, n) for row, n in matches.items()}
                if (wait := self.wait(matches, cached)) is None:
                    queue.remove(answer)
                    row, source = self.choose(cached)
                    row.assign(answer, cached[source], source.most_computed(self.width), self.admitted)
                    self.admitted += 1
                    return row, source
            waits[answer] = self.waits[answer] = wait
        self.waits = waits
        return None

    def match_prefixes(self, answer: Answer) -> dict[Row, int]:
        """How many tokens of the prompt, without its last one, each row's text begins with.

        0 without prefix caching, and if the prompt is scored: then all of it must be computed.
        """
        reuses = answer.prefix_caching and not answer.request.score
        own = answer.prompt[: -1 if reuses else 0]
        return {row: common_prefix(row.text[: row.known], own) for row in self.rows}

    def cached_prefix(self, row: Row, matching: int) -> int:
        """How many of the matching tokens the row has computed and its cache still holds."""
        n = min(matching, row.computed)
        latest = row.most_computed(self.width)
        while (less := min((reusable_prefix(mask, n, latest) for mask in self.masks), default=n)) < n:
            n = less
        return n

    def wait(self, matches: dict[Row, int], cached: dict[Row, int]) -> Wait | None:
        """Whether it is worth waiting for a row that is prefilling a prompt with the same beginning."""
        waits = (Wait(row, row.answer, n) for row, n in matches.items() if row.prefill_left)
        longest = max((wait for wait in waits if wait.left), key=lambda wait: wait.shared, default=None)
        worth = longest is not None and longest.shared - max(cached.values()) >= MIN_COPIED
        return longest if worth else None

    def choose(self, cached: dict[Row, int]) -> tuple[Row, Row]:
        """-> (a free row for an answer, the row whose cached prefix it starts from)."""
        oldest = min((row for row in self.rows if row.free), key=lambda row: row.number)
        source = max(self.rows, key=lambda row: (cached[row], row.free))
        if source.free and source.computed < 2 * cached[source]:  # less is overwritten than is kept
            return source, source
        return oldest, source if cached[source] >= MIN_COPIED else oldest

    def next_to_prefill(self, oldest: bool) -> Row | None:
        """The row whose prompt is read next: the one admitted first, or the one with the fewest tokens left.

        Taking these by turns delays no short prompt for long and no long prompt for ever. If an answer waits
        for a prefix, only the tokens of that prefix count as left.
        """
        rows = [row for row in self.rows if row.prefill_left]
        if oldest:
            return min(rows, key=lambda row: row.number, default=None)
        left = {row: row.prefill_left for row in rows}
        for wait in self.waits.values():
            if wait.left:
                left[wait.row] = min(left[wait.row], wait.left)
        return min(rows, key=lambda row: (left[row], row.number), default=None)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the longest common prefix of two texts."""
    n = min(len(a), len(b))
    for start in range(0, n, COMPARED):
        differs = a[start : min(start + COMPARED, n)] != b[start : min(start + COMPARED, n)]
        if differs.any():
            return start + int(differs.argmax())
    return n


class MicroBatch:
    """The rows that a stage of a pipeline computes together, by data shard; without stages all rows.

    prefills: how many chunks of prompts were scheduled.
    """

    def __init__(self, shards: list[Shard], vocabulary: int):
        self.shards, self.vocabulary, self.prefills = shards, vocabulary, 0
        self.rows = [row for shard in shards for row in shard.rows]

    def next_to_prefill(self) -> list[Row | None]:
        """For each data shard, the row whose prompt is read next."""
        rows = [shard.next_to_prefill(oldest=self.prefills % 2 == 1) for shard in self.shards]
        self.prefills += any(rows)
        return rows

    def tokens_to_choose(self) -> np.ndarray:
        """The most tokens that the next decode step may choose in each row: [b] int32."""
        width = self.shards[0].width
        counts = (min(max(row.tokens_left, 0), 1 if row.constrained else width) for row in self.rows)
        count = np.fromiter(counts, np.int32)
        constrained = [row.constrained for row, n in zip(self.rows, count, strict=True) if n]
        if all(constrained) and any(row.constrained and row.steps_in_flight for row in self.rows):
            count[:] = 0  # rows with grammars step together: a step of some of them costs as much
        return count

    def sampling(self, options: frozenset[str]) -> Sampling:
        """These options of sampling, as arrays [b] of what the rows' requests ask for."""

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
        """The bitmasks of the tokens that each row's grammar allows, see Sampling; all without a grammar."""
        bits = np.full((len(self.rows), -(-self.vocabulary // 32)), 0xFFFFFFFF, np.uint32)
        for row, own in zip(self.rows, bits, strict=True):
            if row.constrained:
                row.answer.constraint.fill_bitmask(own)
        return bits


class Scheduler:
    """All rows, in a micro-batch for each stage of layers, and the queue of answers without a row."""

    def __init__(
        self, rows: int, max_len: int, stages: int, shards: int, width: int, masks: frozenset, vocabulary: int
    ):
        """shards: of each micro-batch. width, masks: see Shard. vocabulary: the number of tokens."""
        self.rows = [Row(text) for text in np.zeros((rows, max_len), np.int32)]
        each = rows // (stages * shards)
        every = [Shard(self.rows[i : i + each], width, masks) for i in range(0, rows, each)]
        self.micro_batches = [
            MicroBatch(every[i : i + shards], vocabulary) for i in range(0, stages * shards, shards)
        ]
        self.queue: deque[Answer] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.queue) or not all(row.free for row in self.rows)
