"""Answer requests in the rows of one batch: when an answer ends, its row goes on with the next request.

    batch = Engine(weights, cfg, mesh, rows=8, max_len=1024, kv_dtype="bfloat16", requests=requests)
    answers = [batch.add(request) for request in requests]
    while batch.busy:
        for answer in batch.advance():
            ...  # it has new tokens, or has ended

Reading prompts alternates with decoding: a piece of one prompt per data shard, then a step of all rows that
are ready, so that a long prompt does not hold up what is being answered, nor (scheduler.py) shorter prompts.
All but a prompt's last token is read in pieces; the decode step that chooses the first token of the answer
reads the last one.

What a row has read stays in its cache until it is overwritten. A request whose prompt begins like some row of
its data shard (a system prompt, earlier turns of a chat, another sample of the prompt) goes on from there.

The device does not wait for the host: a step is sent off before the tokens of the last one are looked at.

A request that goes wrong ends with an error of its own, and the others go on.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import model
from checkpoints.errors import UserError
from model import NEUTRAL, Config, Sampling
from serving.hosts import start_fetching
from serving.scheduler import Answer, Request, Row, Shard
from serving.speculation import Draft, Lookup

WIDTHS = (32, 128, 512)  # of a piece of a prompt: few, for each is compiled
NAN = "the model computes NaN: its weights are damaged, or overflow this --dtype"


@dataclasses.dataclass
class Stats:
    """Counts since the first request. seconds, tokens and steps are also known at `filled`, the time at which
    each of the first rows had its first token, or had ended.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts', not read again
    tokens: int = 0
    steps: int = 0  # decode steps whose tokens are known
    failed: int = 0  # requests that ended with an error
    guessed: int = 0
    guessed_right: int = 0
    row_steps: int = 0  # steps times the rows that took part
    seconds: float = 0.0
    filled: "Stats | None" = None

    @property
    def tokens_per_step(self) -> float | None:
        """Of a row."""
        return self.tokens / self.row_steps if self.row_steps else None

    @property
    def share_guessed_right(self) -> float | None:
        return self.guessed_right / self.guessed if self.guessed else None


class Engine:
    """See above. Several processes must each add the same requests in the same order.

    requests: whatever is to come, or the like of it: for what they ask, and prompts of up to `longest` tokens
    if that is more, all programs are compiled here, and none later.
    """

    def __init__(
        self,
        weights: model.Weights,
        cfg: Config,
        mesh: Mesh,
        rows: int,
        max_len: int,
        kv_dtype: str,
        requests: list[Request],
        longest: int = 0,
        speculate: Lookup | Draft | None = None,
    ):
        shards = mesh.shape["data"]
        rows += -rows % shards
        self.weights, self.static, self.max_len = weights, dict(cfg=cfg, mesh=mesh), max_len
        self.cache = model.init_cache(cfg, mesh, rows, max_len, kv_dtype)
        self.speculate = speculate
        self.width, self.masks = 1, cfg.masks
        if speculate:
            speculate.start(cfg, mesh, rows, max_len)
            self.width, self.masks = 1 + speculate.guesses, self.masks | speculate.masks
        self.rows = [Row(text) for text in np.zeros((rows, max_len), np.int32)]
        each = rows // shards
        self.shards = [Shard(self.rows[i : i + each], self.width, self.masks) for i in range(0, rows, each)]
        self.queue: deque[Answer] = deque()
        self.under_way: deque[tuple[Any, Callable]] = deque()
        self.begun, self.pieces, self.began, self.stats = 0, 0, 0.0, Stats()
        self.asked = self._asked([request.sampling for request in requests])
        self.sampling = self._sampling()
        self.longest = max([longest, *(len(request.prompt) for request in requests)])
        self.scores = {request.score for request in requests} or {False}
        self._warm_up()

    def _asked(self, samplings: list[Sampling]) -> set[str]:
        """The fields of Sampling that are not always neutral: the others are left out of the program."""
        asked = {
            name
            for name, neutral in vars(NEUTRAL).items()
            for x in samplings
            if getattr(x, name) not in (None, neutral)
        }
        return asked | {"seed"} if "temperature" in asked else asked & {"repetition_penalty"}

    def _sampling(self) -> Sampling:
        """What the rows' requests ask, as arrays."""

        def column(name: str) -> np.ndarray:
            neutral = getattr(NEUTRAL, name)
            asked = [getattr(row.answer.request.sampling, name) if row.answer else None for row in self.rows]
            return np.array([neutral if x is None else x for x in asked], neutral.dtype)

        return Sampling(**{name: column(name) for name in self.asked})

    def _warm_up(self) -> None:
        """Compile what will be run, by running it on no row."""
        nothing = np.zeros(len(self.shards), np.int32)
        for source in (None, nothing):
            self._call_begin(
                nothing - 1, np.zeros((len(self.shards), self.max_len), np.int32), nothing, source
            )
        for width in WIDTHS:
            for score in self.scores:
                if self.longest > 1 and piece_width(self.longest - 1) >= width:
                    self._call_prefill(nothing, nothing, width, score)
        jax.block_until_ready(self._call_decode(np.zeros(len(self.rows), np.int32)))

    def _call_begin(self, *arguments) -> None:
        self.cache = model.begin(*arguments, self.cache, **self.static)
        if self.speculate:
            self.speculate.begin(*arguments)

    def _call_prefill(self, rows: np.ndarray, count: np.ndarray, width: int, score: bool):
        scores, self.cache = model.prefill(
            rows, count, self.weights, self.cache, width=width, score=score, **self.static
        )
        if self.speculate:
            self.speculate.prefill(rows, count, width)
        return start_fetching(scores, self.static["mesh"])

    def _call_decode(self, count: np.ndarray) -> model.Output:
        guesses = None
        if self.speculate:
            guesses, count = self.speculate.guess(count, self.sampling, self.cache)
        output, self.cache = model.decode_step(
            count, guesses, self.sampling, self.weights, self.cache, **self.static
        )
        if self.speculate:
            self.speculate.follow(output)
        return start_fetching(output, self.static["mesh"])

    def add(self, request: Request) -> Answer:
        """Put a request at the end of the queue. UserError if it does not suit the rows or the programs."""
        prompt = request.checked(self.static["cfg"].V)
        if request.positions > self.max_len:
            what = f"{len(prompt)} tokens and {request.max_new_tokens} new ones"
            raise UserError(f"{what} do not fit into a row of {self.max_len}")
        known = len(prompt) <= self.longest and request.score in self.scores
        if not known or self._asked([request.sampling]) - self.asked:
            raise UserError("nothing was compiled for a request of this kind; see `requests` and `longest`")
        answer = Answer(request, prompt)
        self.queue.append(answer)
        return answer

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.under_way) or not all(row.free for row in self.rows)

    def cancel(self, answer: Answer) -> None:
        """End an answer; it gets no more tokens."""
        if answer.finish_reason is None:
            answer.finish_reason = "cancelled"
            if all(row.answer is not answer for row in self.rows):
                self.queue.remove(answer)

    def advance(self) -> list[Answer]:
        """Send off the next piece and the next step, and return the answers with news from those before."""
        self.began = self.began or time.perf_counter()
        expected = len(self.under_way)
        self._begin()
        self._read_piece()
        self._decode()
        changed = []
        for _ in range(expected):
            arrays, receive = self.under_way.popleft()
            changed += receive(jax.tree.map(np.asarray, arrays))
        self._count()
        return changed

    def _begin(self) -> None:
        """Give requests of the queue to free rows."""
        while any(starts := [self._next_start(shard) for shard in self.shards]):
            text = np.zeros((len(self.shards), self.max_len), np.int32)
            rows, read, source = np.full((3, len(self.shards)), -1, np.int32)
            for i, (shard, start) in enumerate(zip(self.shards, starts, strict=True)):
                if start:
                    prompt = start[0].answer.prompt
                    text[i, : len(prompt)] = prompt
                    rows[i], source[i] = (shard.rows.index(row) for row in start)
                    read[i] = start[0].read
            copied = any(start and start[0] is not start[1] for start in starts)
            self._call_begin(rows, text, read, source if copied else None)
            self.sampling = self._sampling()

    def _next_start(self, shard: Shard) -> tuple[Row, Row] | None:
        """Begin the next answer, if this shard can: -> (its row, the row of which it takes what is read)."""
        if start := shard.begin(self.queue, self.begun):
            row = start[0]
            self.begun += 1
            self.stats.prompt_tokens += len(row.answer.prompt)
            self.stats.reused_tokens += row.read
            if not row.unread:
                self._has_read(row)
        return start

    def _has_read(self, row: Row) -> None:
        """All pieces of the row's prompt are on their way; if nothing is to follow, that is its end."""
        answer = row.answer

        def receive(_) -> list[Answer]:
            answer.finish_reason = answer.finish_reason or "length"
            return [answer]

        if not answer.request.max_new_tokens:
            self.under_way.append(((), receive))

    def _read_piece(self) -> None:
        """Read more of the prompt of one row per data shard."""
        reading = [shard.next_to_read(oldest=self.pieces % 2 == 1) for shard in self.shards]
        if not any(reading):
            return
        self.pieces += 1
        width = piece_width(max(row.unread for row in reading if row))
        count = np.array([min(row.unread, width) if row else 0 for row in reading], np.int32)
        rows = [shard.rows.index(row) if row else 0 for shard, row in zip(self.shards, reading, strict=True)]
        score = any(row.answer.request.score for row in reading if row)
        scores = self._call_prefill(np.array(rows, np.int32), count, width, score)
        of = [(i, row, row.number) for i, row in enumerate(reading) if row and row.answer.request.score]
        if of:
            self.under_way.append((scores, partial(self._scored, of, count)))
        for row, n in zip(reading, count.tolist(), strict=True):
            if row:
                row.read += n
                if not row.unread:
                    self._has_read(row)

    def _scored(self, of: list[tuple[int, Row, int]], count: np.ndarray, scores: np.ndarray) -> list[Answer]:
        changed = []
        for i, row, number in of:
            if row.number != number or row.answer.finish_reason is not None:
                continue
            changed.append(row.answer)
            if np.isnan(scores[i, : count[i]]).any():
                self._fail(row)
            else:
                row.answer.prompt_logprobs += scores[i, : count[i]].tolist()
        return changed

    def _fail(self, row: Row) -> None:
        """The model computes NaN in this row, which ends its answer.

        The NaN may be another's: tokens of a prompt that come before the one which makes it may become NaN as
        well, and the row may have taken those. Then its answer begins once more, and takes nothing.
        """
        answer, taken = row.answer, row.taken
        row.forget()
        if taken and not answer.tokens:
            answer.takes = False
            self.queue.appendleft(answer)
            self.stats.prompt_tokens -= len(answer.prompt)
            self.stats.reused_tokens -= taken
        else:
            answer.finish_reason, answer.error = "error", NAN
            self.stats.failed += 1

    def _decode(self) -> None:
        """One step of all rows that have read their prompts."""
        count = np.array([min(max(row.wanted, 0), self.width) for row in self.rows], np.int32)
        if not count.any():
            return
        of = [(i, row, row.number) for i, row in enumerate(self.rows) if count[i]]
        for _, row, _ in of:
            row.steps += 1
        self.under_way.append((self._call_decode(count), partial(self._chosen, of)))

    def _chosen(self, of: list[tuple[int, Row, int]], output: model.Output) -> list[Answer]:
        changed = []
        for i, row, number in of:
            if row.number != number:  # the row has begun another answer
                continue
            answer, n = row.answer, output.count[i]
            tokens = output.tokens[i, :n]
            row.chose(tokens)
            if answer.finish_reason is not None:
                continue
            changed.append(answer)
            before = len(answer.tokens)
            for token, logprob in zip(tokens.tolist(), output.logprobs[i, :n].tolist(), strict=True):
                if math.isnan(logprob) or token >= self.static["cfg"].V:  # no token is the likeliest
                    self._fail(row)
                    break
                answer.tokens.append(token)
                answer.logprobs.append(logprob)
                if token in answer.request.stop:
                    answer.finish_reason = "stop"
                elif len(answer.tokens) == answer.request.max_new_tokens:
                    answer.finish_reason = "length"
                if answer.finish_reason:
                    break
            self.stats.tokens += len(answer.tokens) - before
            self.stats.row_steps += 1
            self.stats.guessed += int(output.guessed[i])
            self.stats.guessed_right += len(tokens) - 1
        self.stats.steps += 1
        return changed

    def _count(self) -> None:
        stats = self.stats
        stats.seconds = time.perf_counter() - self.began
        waits = self.queue and any(row.free for row in self.rows)
        if stats.filled is None and not waits and all(row.free or row.answer.tokens for row in self.rows):
            stats.filled = dataclasses.replace(stats)


def piece_width(unread: int) -> int:
    """The width of the next piece of a prompt with so many tokens to read: at least half of it is used."""
    return next((width for width in reversed(WIDTHS) if unread > width // 2), WIDTHS[0])
