"""Which row takes which request, which prefix of its prompt is already cached, and what is read next.

All of this runs on the host. Its work does not grow with the lengths of the rows, except that each new prompt
is compared with their texts.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from model import Mask, Recurrent
from serving.chunks import Shape, best_shape, prompts_in_chunk
from serving.prefix_cache import MIN_SAVED, PrefixCache, SavedPrefix
from serving.requests import Answer
from serving.reuse import goes_back, places, reusable_prefix
from sharding.sampling import NEUTRAL, Sampling

COMPARED = 8192  # tokens that are compared at a time: most texts differ early
LOOKAHEAD = 100  # answers of the queue that are considered: one that waits for a prefix lets others pass
MIN_COPIED = 16  # tokens of a cached prefix; computing fewer again costs less than copying them
# How many tokens before the end of a prompt its states are kept. Chat templates write the last few otherwise
# when the answer is a part of the next prompt: they leave out an empty thought, for example.
BEFORE_END = 16
# A row with a grammar runs ahead after so many tokens that have left the mask as it was, as all tokens of a
# free text do. More would delay texts, fewer would drop a step at the end of most strings of JSON.
STEADY_TOKENS = 3


@dataclasses.dataclass(frozen=True)
class PrefillLimits:
    """How many prompt tokens are read beside rows that decode, and how large a prefill chunk may be.

    budget: prompt tokens per decode step and decoding row, on average; 0: no limit, and then chunks are as
    large beside decoding rows as without them. It bounds how much prefill slows decoding down.
    beside_decoding: tokens of the largest chunk while any row decodes, the longest pause between two decode
    steps. alone: tokens of the largest chunk otherwise, which a new request may have to wait for.
    double_cost: the position at which reading a token takes twice as long as at the beginning of a prompt,
    because of the positions that it attends to. The budget counts such a token twice. chunk_steps: how many
    decode steps take as long as the smallest chunk. It decides whether tokens that a grammar
    forces are read in a chunk; with math.inf none are.
    """

    budget: int = 0
    beside_decoding: float = math.inf
    alone: float = math.inf
    double_cost: float = math.inf
    chunk_steps: float = 1

    def cost(self, tokens: int, start: int) -> float:
        """What a chunk of so many tokens takes of the budget, in tokens. start: the latest position at which
        one of its rows begins; attention goes through the cache of all its rows as far as that.
        """
        return tokens * (1 + start / self.double_cost)


# Limits of a server by platform. A CPU reads nearly as many tokens per second in chunks of 128 as of 512, but
# half as many in chunks of 32. Its budget is chosen so that the only answer beside long prompts keeps half of
# its pace: a chunk of 128 took 290 ms at the beginning of a prompt and 800 ms at position 1,450 (SmolLM2-135M
# in int8 on two cores). A chunk of 32 takes it 8 to 10 times as long as a step of one row; an accelerator
# reads the weights once for either.
CPU_LIMITS = PrefillLimits(budget=4, beside_decoding=128, alone=128, double_cost=800, chunk_steps=8)
ACCELERATOR_LIMITS = PrefillLimits(budget=16, beside_decoding=128)


def server_limits(platform: str, budget: int | None = None) -> PrefillLimits:
    """The limits of a server. platform: as jax names it. budget: the user's choice, None for the default."""
    limits = CPU_LIMITS if platform == "cpu" else ACCELERATOR_LIMITS
    return limits if budget is None else dataclasses.replace(limits, budget=budget)


@dataclasses.dataclass(eq=False)
class Row:
    """What the host knows of a row of the cache.

    text: [max_len] int32, its tokens as far as they are known. computed: how many of them have their keys and
    values in the cache. reused: how many of these came from a cached prefix, and source_computed: how many
    tokens the row that had cached it had computed, or a dropped step. steps_in_flight: decode steps whose
    tokens are not known yet. number: of its answer, in the order of admission to the shard. given: how many
    tokens of its text chunks read, but for the last of them: the prompt, and once a grammar has forced
    tokens, all up to the last of these. unsent: whether the device has another text, or has read more of it
    than `computed`.

    Of a row with a grammar, allowed: [W] uint32, the mask of its next token, see Sampling. steady: how many
    of its last tokens have left the mask as it was. dropped: steps in flight that do not count, see
    `drop_steps`. goes_back: whether the row can take back a token that a dropped step has read.

    If layers have states: kept: for each place in which states of the row are kept, after how many tokens
    they are those of the row; 0 if none are there. stops: {after how many tokens states are to be kept: in
    which place}; a chunk ends there.
    """

    text: np.ndarray
    computed: int = 0
    reused: int = 0
    source_computed: int = 0
    steps_in_flight: int = 0
    answer: Answer | None = None
    number: int = -1
    given: int = 0
    unsent: bool = False
    kept: list[int] = dataclasses.field(default_factory=list)
    stops: dict[int, int] = dataclasses.field(default_factory=dict)
    allowed: np.ndarray | None = None
    steady: int = 0
    dropped: int = 0
    goes_back: bool = True

    @property
    def free(self) -> bool:
        return self.answer is None or self.answer.finish_reason is not None

    @property
    def constrained(self) -> bool:
        """Whether a grammar must accept each token before the next one can be chosen."""
        return not self.free and self.answer.constraint is not None

    @property
    def waits(self) -> bool:
        """Whether its grammar must accept the token of the step in flight before the next one is sent."""
        return self.constrained and self.steps_in_flight > 0 and not self.runs_ahead

    @property
    def runs_ahead(self) -> bool:
        """Whether its next step is sent in the hope that the token in flight leaves the grammar's mask."""
        return self.constrained and self.goes_back and self.steady >= STEADY_TOKENS

    @property
    def prefill_left(self) -> int:
        """How many given tokens are still to be prefilled: the last one is left to a decode step."""
        return 0 if self.free else max(self.given - 1 - self.computed, 0)

    @property
    def next_chunk(self) -> int:
        """How many given tokens the next chunk may read: up to the next stop."""
        end = self.computed + self.prefill_left
        return min([stop for stop in self.stops if stop > self.computed] + [end]) - self.computed

    @property
    def states(self) -> tuple[int, ...]:
        """After how many tokens there are states of the row: those in its places, and its latest.

        While steps are in flight the latest ones change.
        """
        return (*self.kept, 0 if self.steps_in_flight else self.computed)

    @property
    def decoding(self) -> bool:
        """Whether the given tokens have been prefilled and its answer has not ended."""
        return not self.free and not self.prefill_left and self.answer.request.max_new_tokens > 0

    @property
    def known(self) -> int:
        """How many tokens of the text are known: the computed ones, and the given ones."""
        return max(self.computed, self.given)

    @property
    def tokens_left(self) -> int:
        """How many more tokens to choose if each step in flight chooses one; 0 if it cannot decode now."""
        if self.free or self.prefill_left or self.waits:
            return 0
        return self.answer.request.max_new_tokens - len(self.answer.tokens) - self.steps_in_flight

    def most_computed(self, width: int) -> int:
        """The most tokens that its cache may have held: in a ring, later tokens overwrite earlier ones.

        width: the most tokens that a step in flight may have computed.
        """
        return max(self.source_computed, self.computed + self.steps_in_flight * width)

    def assign(
        self, answer: Answer, cached: int, source_computed: int, number: int, kept: Iterable[int] = ()
    ) -> None:
        """Take an answer whose first `cached` tokens come from a row that had computed `source_computed`.

        kept: what is in this row's places; states of more than the cached tokens are no longer the row's.
        """
        self.text[: len(answer.prompt)] = answer.prompt
        self.answer, self.number = answer, number
        self.given, self.unsent = len(answer.prompt), False
        self.computed, self.reused, self.steps_in_flight = cached, cached, 0
        self.source_computed = source_computed if cached else 0
        self.kept, self.stops = [n if n <= cached else 0 for n in kept], {}
        self.allowed, self.steady, self.dropped = None, 0, 0

    def keep(self) -> int:
        """In which place the states are kept that the row has now; -1: in none."""
        place = self.stops.pop(self.computed, -1)
        if place >= 0:
            self.kept[place] = self.computed
        return place

    def append(self, tokens: np.ndarray) -> None:
        """Add the tokens that a step has chosen, one after each token that it has computed."""
        following = self.text[self.computed + 1 :][: len(tokens)]  # none beyond max_len
        following[:] = tokens[: len(following)]
        self.computed, self.steps_in_flight = self.computed + len(tokens), self.steps_in_flight - 1

    def update_allowed(self, vocabulary: int) -> bool:
        """Compute the mask of the next token: -> whether it is another one than before."""
        old, self.allowed = self.allowed, np.empty(-(-vocabulary // 32), np.uint32)
        self.answer.constraint.fill_bitmask(self.allowed)
        same = old is not None and np.array_equal(old, self.allowed)
        self.steady = self.steady + 1 if same else 0
        return not same

    def drop_steps(self) -> None:
        """Do not use the token of the step in flight, which was chosen with another mask.

        That step has read the last known token. The next one reads it again, into the same slot of the cache.
        """
        self.source_computed = self.most_computed(1)
        self.dropped, self.steps_in_flight, self.unsent = self.steps_in_flight, 0, True

    def force(self, tokens: list[int]) -> None:
        """Add tokens that follow the last chosen one. No step that counts may be in flight."""
        self.given, self.unsent = self.computed + 1 + len(tokens), True
        self.text[self.computed + 1 : self.given] = tokens

    def clear(self) -> None:
        """Give up the answer and all that is cached."""
        self.answer, self.number, self.computed, self.given = None, -1, 0, 0
        self.kept, self.stops = [0] * len(self.kept), {}


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


class Admission(NamedTuple):
    """A row for an answer, and where the cached prefix comes from.

    source: the row whose prefix is copied, which may be the same. place: of the source's states, see
    steps.assign_rows. save: what is to keep the memory of the row's old text. load: the saved prefix that
    replaces the row's memory.
    """

    row: Row
    source: Row
    place: int = -1
    save: SavedPrefix | None = None
    load: SavedPrefix | None = None


@dataclasses.dataclass(eq=False)
class Shard:
    """The rows of one data shard.

    width: the most tokens of a row that a decode step may compute. masks: of the model's layers.
    prefix_cache: in host memory. row_bytes: of the cache of a row with so many tokens. waits: of the answers
    in the queue that wait for a row of this shard. admitted: how many answers were given a row.
    """

    rows: list[Row]
    width: int
    masks: frozenset[Mask | Recurrent]
    prefix_cache: PrefixCache = dataclasses.field(default_factory=lambda: PrefixCache(0))
    row_bytes: Callable[[int], int] = int
    waits: dict[Answer, Wait] = dataclasses.field(default_factory=dict)
    admitted: int = 0

    def admit(self, queue: deque[Answer]) -> Admission | None:
        """Give a free row the first answer of the queue that need not wait for a prefix.

        Answers that wait do not hold up those behind them.
        """
        waits = {}
        candidates = itertools.islice(queue, LOOKAHEAD) if any(row.free for row in self.rows) else ()
        for answer in candidates:
            wait = self.waits.get(answer)
            if wait is None or not wait.left:
                matches = self.match_prefixes(answer)
                cached = {row: self.cached_prefix(row, n) for row, n in matches.items()}
                load, loaded = self.longest_saved(answer)
                if (wait := self.wait(matches, max(loaded, *cached.values()))) is None:
                    queue.remove(answer)
                    admission = self.assign(answer, cached, load, loaded)
                    self.plan_stops(admission.row, max(matches.values()))
                    return admission
            waits[answer] = self.waits[answer] = wait
        self.waits = waits
        return None

    def assign(
        self, answer: Answer, cached: dict[Row, int], load: SavedPrefix | None, loaded: int
    ) -> Admission:
        """Give the answer a free row. loaded: how many tokens of `load` can be reused."""
        row, source = self.choose(cached)
        if loaded - cached[source] >= MIN_COPIED:
            row = source = self.oldest_free()
            left, reused, latest, states = 0, loaded, load.latest, load.states
            self.prefix_cache.use(load)
        else:
            load, reused, latest = None, cached[source], source.most_computed(self.width)
            left, states = reused if row is source else 0, source.states
        save = None
        if row.computed - left >= MIN_SAVED:
            most = row.most_computed(self.width)
            save = self.prefix_cache.add(row.text[: row.computed], most, self.row_bytes(most), row.states)
        *kept, own = states
        place = kept.index(reused) if reused not in (0, own) and kept else -1
        row.assign(answer, reused, latest, self.admitted, kept if row is source else [0] * len(kept))
        self.admitted += 1
        return Admission(row, source, place, save, load)

    def plan_stops(self, row: Row, common: int) -> None:
        """Plan after how many tokens of its prompt the states of a row are kept, if layers have states.

        common: how many tokens another text has in common with the prompt. Where two texts part, a third one
        is likely to part from them; so the states there are kept, in all places but the first, by turns. In
        the first are those near the end of the prompt, where the next turn of a conversation goes on.
        """
        if not row.kept:
            return
        end = row.given - 1 - BEFORE_END
        if end - row.computed >= MIN_COPIED:
            row.stops[end] = 0
        if len(row.kept) > 1 and row.computed + MIN_COPIED <= common < end:
            row.stops[common] = 1 + row.number % (len(row.kept) - 1)

    def oldest_free(self) -> Row:
        """The free row that has not been given an answer for the longest time."""
        return min((row for row in self.rows if row.free), key=lambda row: row.number)

    def longest_saved(self, answer: Answer) -> tuple[SavedPrefix | None, int]:
        """-> (the saved prefix of which the most can be reused, how many of its tokens)."""
        own = reusable_tokens(answer)
        lengths = {
            saved: self.reusable(common_prefix(saved.text, own), saved.latest, saved.states)
            for saved in self.prefix_cache.saved
        }
        best = max(lengths, key=lengths.get, default=None)
        return best, lengths.get(best, 0)

    def match_prefixes(self, answer: Answer) -> dict[Row, int]:
        """How many of the prompt's reusable tokens each row's text begins with."""
        own = reusable_tokens(answer)
        return {row: common_prefix(row.text[: row.known], own) for row in self.rows}

    def cached_prefix(self, row: Row, matching: int) -> int:
        """How many of the matching tokens the row has computed and its cache still holds."""
        return self.reusable(min(matching, row.computed), row.most_computed(self.width), row.states)

    def reusable(self, n: int, latest: int, states: tuple[int, ...] = ()) -> int:
        """How many of n computed tokens a row's memory still holds that may have held `latest` tokens.

        states: see Row.
        """
        while (less := min((reusable_prefix(x, n, latest, states) for x in self.masks), default=n)) < n:
            n = less
        return n

    def wait(self, matches: dict[Row, int], cached: int) -> Wait | None:
        """Whether it is worth waiting for a row that is prefilling a prompt with the same beginning.

        cached: how many tokens could be reused without waiting.
        """
        waits = (Wait(row, row.answer, n) for row, n in matches.items() if row.prefill_left)
        longest = max((wait for wait in waits if wait.left), key=lambda wait: wait.shared, default=None)
        if longest is None or longest.shared - cached < MIN_COPIED:
            return None
        if kept := longest.row.kept:  # the row has to keep its states there, or in its only place
            longest.row.stops.setdefault(longest.shared, len(kept) - 1)
        return longest

    def choose(self, cached: dict[Row, int]) -> tuple[Row, Row]:
        """-> (a free row for an answer, the row whose cached prefix it starts from)."""
        oldest = self.oldest_free()
        source = max(self.rows, key=lambda row: (cached[row], row.free))
        if source.free and source.computed < 2 * cached[source]:  # less is overwritten than is kept
            return source, source
        return oldest, source if cached[source] >= MIN_COPIED else oldest

    def rows_to_prefill(self, oldest: bool) -> list[Row]:
        """The rows with prompts to read. The first is to be read next: the one admitted first, or the one
        with the fewest tokens left.

        Taking these by turns delays no short prompt for long and no long prompt for ever. If an answer waits
        for a prefix, only the tokens of that prefix count as left.
        """
        rows = [row for row in self.rows if row.prefill_left]
        if oldest:
            return sorted(rows, key=lambda row: row.number)
        left = {row: row.prefill_left for row in rows}
        for wait in self.waits.values():
            if wait.left:
                left[wait.row] = min(left[wait.row], wait.left)
        return sorted(rows, key=lambda row: (left[row], row.number))


def reusable_tokens(answer: Answer) -> np.ndarray:
    """The tokens of the prompt that need not be computed again if their keys and values are cached.

    That is all but the last one; none without prefix caching, nor if the prompt is scored.
    """
    reuses = answer.prefix_caching and not answer.request.score
    return answer.prompt[: -1 if reuses else 0]


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

    prefills: how many chunks of prompts were scheduled. debt: the cost of the chunks that were read beside
    decoding rows, see PrefillLimits.cost, as far as the budget of later decode steps has not paid for it.
    """

    def __init__(self, shards: list[Shard], limits: PrefillLimits):
        self.shards, self.limits = shards, limits
        self.prefills = self.debt = 0
        self.rows = [row for shard in shards for row in shard.rows]

    def largest_chunk(self, decoding: int) -> float:
        """How many tokens a prefill chunk may have in this turn; 0: none is read.

        decoding: see Scheduler.decoding.
        """
        if not decoding or not self.limits.budget:
            self.debt = self.limits.beside_decoding  # the first row that decodes begins with steps
            return self.limits.alone
        return 0 if self.debt else self.limits.beside_decoding

    def next_to_prefill(self, shapes: Sequence[Shape]) -> tuple[Shape, list[list[Row]]] | None:
        """Which prompts are read next, in a chunk of one of these shapes; None if no prompt is left to read.

        -> (the shape, for each data shard the rows with these prompts, as many as the shape has or fewer).
        """
        waiting = [shard.rows_to_prefill(oldest=self.prefills % 2 == 1) for shard in self.shards]
        if not any(waiting):
            return None
        self.prefills += 1
        unread = [[row.next_chunk for row in rows] for rows in waiting]
        shape = best_shape(shapes, unread)
        chosen = (prompts_in_chunk(shape, left) for left in unread)
        return shape, [[rows[i] for i in own] for rows, own in zip(waiting, chosen, strict=True)]

    def count_prefill(self, cost: float, decoding: int, decodes: bool) -> None:
        """Update `debt` after a turn of this microbatch.

        cost: of the turn's prefill chunk, 0 without one. decoding: see Scheduler.decoding. decodes: whether
        any row of this microbatch takes part in the turn's decode step.

        If all decoding rows of this microbatch wait for a grammar, the turn pays for nothing. If this
        microbatch has no decoding rows, those of other microbatches pay.
        """
        self.debt += cost if decoding else 0
        if decodes or not any(row.decoding for row in self.rows):
            self.debt = max(self.debt - self.limits.budget * decoding, 0)

    def tokens_to_choose(self) -> np.ndarray:
        """The most tokens that the next decode step may choose in each row: [b] int32."""
        width = self.shards[0].width
        counts = (min(max(row.tokens_left, 0), 1 if row.constrained else width) for row in self.rows)
        count = np.fromiter(counts, np.int32)
        stepping = [row for row, n in zip(self.rows, count, strict=True) if n]
        together = all(row.constrained and not row.runs_ahead for row in stepping)
        if together and any(row.waits for row in self.rows):
            count[:] = 0  # rows that wait for grammars step together: a step of some of them costs as much
        return count

    def busy_rows(self, count: np.ndarray) -> int:
        """How many rows choose tokens in the data shard that has the most of them.

        count: [b], see `tokens_to_choose`.
        """
        return int((count.reshape(len(self.shards), -1) > 0).sum(1).max())

    def rows_to_decode(self, count: np.ndarray, n: int) -> np.ndarray | None:
        """Which n rows of each data shard a decode step computes: all that choose tokens, and idle ones.

        count: [b], see `tokens_to_choose`.
        -> indices in `rows`, in the order of shards; None: all rows.
        """
        busy = count.reshape(len(self.shards), -1) > 0
        if n == busy.shape[1]:
            return None
        chosen = np.argsort(~busy, 1, kind="stable")[:, :n]
        return (chosen + busy.shape[1] * np.arange(len(busy))[:, None]).reshape(-1)


def sampling_of(rows: Sequence[Row], options: frozenset[str], vocabulary: int) -> Sampling:
    """These options of sampling, as arrays [b] of what the rows' requests ask for."""

    def column(name: str):
        if name == "allowed":
            return allowed_tokens(rows, vocabulary)
        neutral = getattr(NEUTRAL, name)
        if name == "answer_start":
            return np.array([len(row.answer.prompt) if row.answer else 0 for row in rows], np.int32)
        asked = (getattr(row.answer.request.sampling, name) if row.answer else None for row in rows)
        each = [neutral if x is None else x for x in asked]
        return jax.tree.map(lambda like, *x: np.stack(x).astype(like.dtype), neutral, *each)

    return Sampling(**{name: column(name) for name in options})


def neutral_sampling(options: frozenset[str], rows: int, vocabulary: int) -> Sampling:
    """These options of sampling, for so many rows without an answer."""
    return sampling_of([Row(np.zeros(0, np.int32))] * rows, options, vocabulary)


def allowed_tokens(rows: Sequence[Row], vocabulary: int) -> np.ndarray:
    """The bitmasks of the tokens that each row's grammar allows, see Sampling; all without a grammar."""
    bits = np.full((len(rows), -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32)
    for row, own in zip(rows, bits, strict=True):
        if row.constrained:
            own[:] = row.allowed
    return bits


class Scheduler:
    """All rows, in a micro-batch for each stage of layers, and the queue of answers without a row."""

    def __init__(
        self,
        rows: int,
        max_len: int,
        stages: int,
        shards: int,
        width: int,
        masks: frozenset[Mask | Recurrent],
        prefix_cache_bytes: int = 0,
        row_bytes: Callable[[int], int] = int,
        limits: PrefillLimits = PrefillLimits(),  # noqa: B008  immutable
    ):
        """shards: of each micro-batch. width, masks, row_bytes: see Shard. prefix_cache_bytes: of all shards
        together.
        """
        texts, n = np.zeros((rows, max_len), np.int32), places(masks)
        self.rows = [Row(text, kept=[0] * n, goes_back=goes_back(masks)) for text in texts]
        each = rows // (stages * shards)
        limit = prefix_cache_bytes // (stages * shards)
        self.shards = [
            Shard(self.rows[i : i + each], width, masks, PrefixCache(limit), row_bytes)
            for i in range(0, rows, each)
        ]
        self.micro_batches = [
            MicroBatch(self.shards[i : i + shards], limits) for i in range(0, stages * shards, shards)
        ]
        self.queue: deque[Answer] = deque()
        self.limits = limits

    @property
    def busy(self) -> bool:
        return bool(self.queue) or not all(row.free for row in self.rows)

    @property
    def decoding(self) -> int:
        """How many rows decode in the data shard that has the most of them."""
        return max(sum(row.decoding for row in shard.rows) for shard in self.shards)

    def cost_of_chunk(self, row: Row) -> float:
        """How many steps of single rows take as long as a chunk that reads forced tokens of this row.

        All rows in use of its data shard wait for the chunk, so it must save this row more steps.
        """
        shard = next(shard for shard in self.shards if row in shard.rows)
        return self.limits.chunk_steps * sum(not each.free for each in shard.rows)
