"""Which row takes which request, what it need not read again, and which prompt is read next.

All this happens on the host. Nothing in it takes time that grows with what the rows hold, but for the
comparison of a new prompt with them.
"""

import dataclasses
import itertools
import numbers
from collections import deque

import numpy as np

from checkpoints.errors import UserError
from model import Chunked, Full, Sampling

BLOCK = 8192  # tokens to compare at a time: most texts differ soon
AHEAD = 100  # answers of the queue that are looked at: those that wait let others pass
WORTH_COPYING = 16  # tokens that another row has read; of fewer, reading them again costs less
LARGEST = float(np.finfo(np.float32).max)
# The options of sampling: type, lowest, highest, and in words. model.sample says what they do.
SAMPLING = {
    "temperature": (numbers.Real, 0, LARGEST, "a number of at least 0, in float32"),
    "top_k": (numbers.Integral, 0, 2**31 - 1, f"between 0 (no restriction) and {2**31 - 1}"),
    "top_p": (numbers.Real, 0, 1, "above 0 and at most 1"),
    "min_p": (numbers.Real, 0, 1, "at least 0 and at most 1"),
    "repetition_penalty": (numbers.Real, 0, LARGEST, "a number above 0, in float32"),
    "seed": (numbers.Integral, 0, 2**32 - 1, f"between 0 and {2**32 - 1}"),
}
ABOVE_ZERO = ("top_p", "repetition_penalty")


def check_sampling(name: str, value, where: str = "") -> None:
    """Raise UserError if this is no value for an option of sampling. where: what its name follows."""
    kind, low, high, must = SAMPLING[name]
    fits = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
    if not fits or (name in ABOVE_ZERO and np.float32(value) == 0):
        raise UserError(f"{where}{name.replace('_', '-')} {str(value)[:40]} is not {must}")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue by up to max_new_tokens tokens, or to one of `stop`.

    prompt: token ids, a list or an array. sampling: of numbers. score: whether the log-probabilities of the
    prompt's own tokens are wanted.
    """

    prompt: list[int] | np.ndarray
    max_new_tokens: int
    sampling: Sampling = Sampling()  # noqa: B008  immutable
    stop: frozenset[int] = frozenset()
    score: bool = False

    @property
    def positions(self) -> int:
        """Of a row that it may take."""
        return len(self.prompt) + self.max_new_tokens

    def checked(self, vocabulary: int) -> np.ndarray:
        """The prompt, int32. Raises UserError for tokens that no model of this vocabulary has, and for
        numbers that make no sense.
        """
        prompt = np.asarray(self.prompt)
        if prompt.ndim != 1 or not prompt.size or prompt.dtype.kind not in "iu":
            raise UserError("a prompt is a list of one or more token ids")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            wrong = prompt[(prompt < 0) | (prompt >= vocabulary)][0]
            raise UserError(f"token {wrong}: the model has tokens 0 to {vocabulary - 1}")
        if not isinstance(self.max_new_tokens, numbers.Integral) or self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens {self.max_new_tokens} is not at least 0")
        for name, value in vars(self.sampling).items():
            if value is not None:
                check_sampling(name, value)
        return prompt.astype(np.int32, copy=False)


@dataclasses.dataclass(eq=False)
class Answer:
    """What there is of it so far.

    prompt: [n] int32, the request's. tokens: up to and including a stop token. logprobs: of each, by the
    model's own logits. prompt_logprobs: of each prompt token after the first, if asked for. finish_reason:
    None, then "stop", "length", "cancelled" or "error", of which `error` then says more.
    """

    request: Request
    prompt: np.ndarray
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    takes: bool = True  # from rows that have read the beginning of its prompt


@dataclasses.dataclass(eq=False)
class Row:
    """What is known of a row of the cache.

    text: [max_len] int32: its tokens, as far as they are known. read: how many of them have been read.
    taken: how many it took from another row, or from before. steps: those under way, whose tokens are not
    known yet. number: of its answer, in the order of beginning.
    """

    text: np.ndarray
    read: int = 0
    taken: int = 0
    steps: int = 0
    answer: Answer | None = None
    number: int = -1

    @property
    def free(self) -> bool:
        return self.answer is None or self.answer.finish_reason is not None

    @property
    def unread(self) -> int:
        """How many tokens of the prompt are still to be read in pieces: all but the last."""
        return 0 if self.free else max(len(self.answer.prompt) - 1 - self.read, 0)

    @property
    def length(self) -> int:
        """How much of its text is known for certain: what has been read, and the prompt."""
        return max(self.read, len(self.answer.prompt) if self.answer else 0)

    @property
    def wanted(self) -> int:
        """How many tokens to choose beyond those that the steps under way choose at least."""
        if self.free or self.unread:
            return 0
        return self.answer.request.max_new_tokens - len(self.answer.tokens) - self.steps

    def begin(self, answer: Answer, read: int, number: int) -> None:
        """Take an answer, of whose prompt `read` tokens are in the cache."""
        self.text[: len(answer.prompt)] = answer.prompt
        self.answer, self.number = answer, number
        self.read, self.taken, self.steps = read, read, 0

    def chose(self, tokens: np.ndarray) -> None:
        """Note what a step chose, one token after each that it read."""
        places = self.text[self.read + 1 :][: len(tokens)]  # what is beyond max_len is not kept
        places[:] = tokens[: len(places)]
        self.read, self.steps = self.read + len(tokens), self.steps - 1

    def forget(self) -> None:
        """Nobody is to take anything from what has been read."""
        self.answer, self.number = None, -1
        self.read, self.taken, self.steps = 0, 0, 0


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
    masks: frozenset[Full | Chunked]
    waits: dict[Answer, Wait] = dataclasses.field(default_factory=dict)

    def begin(self, queue: deque[Answer], number: int) -> tuple[Row, Row] | None:
        """Give a free row the first answer of the queue that need not wait: -> (the row, the one of which it
        takes what is read), or None.

        Neither a prompt that is being read nor an answer that waits holds up those behind it.
        """
        waits = {}
        candidates = itertools.islice(queue, AHEAD) if any(row.free for row in self.rows) else ()
        for answer in candidates:
            wait = self.waits.get(answer)
            if wait is None or not wait.left:
                alike = self.alike(answer)
                held = {row: self.held(row, n) for row, n in alike.items()}
                if (wait := self.wait(alike, held)) is None:
                    queue.remove(answer)
                    row, source = self.choose(held)
                    row.begin(answer, held[source], number)
                    return row, source
            waits[answer] = self.waits[answer] = wait
        self.waits = waits
        return None

    def alike(self, answer: Answer) -> dict[Row, int]:
        """How many tokens of its prompt, but the last, each row begins with: read, or to be read.

        None if it takes nothing, as where its scores are wanted, for which all of it must be read.
        """
        own = answer.prompt[: -1 if answer.takes and not answer.request.score else 0]
        return {row: shared(row.text[: row.length], own) for row in self.rows}

    def held(self, row: Row, alike: int) -> int:
        """How many of the first tokens that a row has alike it has read, and still holds."""
        n = min(alike, row.read)
        latest = row.read + row.steps * self.width
        while (less := min(mask.reusable(n, latest) for mask in self.masks)) < n:
            n = less
        return n

    def wait(self, alike: dict[Row, int], held: dict[Row, int]) -> Wait | None:
        """What to wait for, if anything: a row that is just now reading much of the same prompt."""
        waits = (Wait(row, row.answer, n) for row, n in alike.items() if row.unread)
        longest = max((wait for wait in waits if wait.left), key=lambda wait: wait.shared, default=None)
        worth = longest is not None and longest.shared - max(held.values()) >= WORTH_COPYING
        return longest if worth else None

    def choose(self, held: dict[Row, int]) -> tuple[Row, Row]:
        """A free row for an answer, and the row of which it takes what that holds of its prompt."""
        oldest = min((row for row in self.rows if row.free), key=lambda row: row.number)
        source = max(self.rows, key=lambda row: (held[row], row.free))
        if source.free and source.read < 2 * held[source]:  # what is overwritten is less than what is kept
            return source, source
        return oldest, source if held[source] >= WORTH_COPYING else oldest

    def next_to_read(self, oldest: bool) -> Row | None:
        """A row whose prompt is still to be read: the one that began first, or the one that is done soonest.

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
