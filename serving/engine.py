"""Continuous batching: when an answer ends, its row of the batch goes on with the next request.

    programs = Programs(weights, cfg, mesh, rows=8, max_len=1024, kv_dtype="bfloat16")
    engine = Engine(programs, requests)
    answers = [engine.add(request) for request in requests]
    while engine.busy:
        for answer in engine.advance():
            ...  # it has new tokens, or has ended

This is the loop between the rows (scheduler.py) and the compiled programs (programs.py).

Prefill alternates with decoding: a chunk of one prompt per data shard, then a step of all rows whose prompts
are read, so that a long prompt does not hold up what is being answered, nor shorter prompts. All but a
prompt's last token is prefilled; the decode step that chooses the first token of the answer reads the last.

Prefix caching: what a row has read stays in its cache until it is overwritten. A request whose prompt begins
like some row of its data shard (a system prompt, earlier turns of a chat, another sample of the prompt) goes
on from there.

The device does not wait for the host: a step is sent off before the tokens of the last one are looked at.

Where the layers are in stages (sharding/stages.py), each has another group of rows in a turn. What is decided
here for a group goes to the first stage, and one turn later to the next; its results come out of the last.

A request that goes wrong ends with an error of its own, and the others go on.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import model
from checkpoints.errors import UserError
from serving.programs import Begin, Chunk, Programs, Turn, prefill_width
from serving.requests import Answer, Request, options_in_use
from serving.scheduler import MicroBatch, Row, Scheduler

NAN = "the model computes NaN: its weights are damaged, or overflow this --dtype"


@dataclasses.dataclass
class Stats:
    """Counts since the first request. seconds, tokens and steps are also known at `prefilled`, the time at
    which each of the first rows had its first token, or had ended.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts', not read again
    tokens: int = 0
    steps: int = 0  # decode steps whose tokens are known
    failed: int = 0  # requests that ended with an error
    drafted: int = 0  # draft tokens that were checked
    accepted: int = 0
    row_steps: int = 0  # steps times the rows that took part
    seconds: float = 0.0
    prefilled: "Stats | None" = None

    @property
    def tokens_per_step(self) -> float | None:
        """Of a row."""
        return self.tokens / self.row_steps if self.row_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclasses.dataclass
class Sent:
    """A turn of a group, on its way through the stages, and for whom its results are.

    scored, stepped: (index, row, number of its answer). ended: answers with nothing to follow the prompt.
    """

    turn: Turn | None = None
    scored: list[tuple[int, Row, int]] = dataclasses.field(default_factory=list)
    stepped: list[tuple[int, Row, int]] = dataclasses.field(default_factory=list)
    ended: list[Answer] = dataclasses.field(default_factory=list)


class Engine:
    """See above. Several processes must each add the same requests in the same order.

    requests: whatever is to come, or the like of it: for what they ask, and prompts of up to `longest` tokens
    if that is more, all programs are compiled here, and none later. option_sets: of sampling, each for a
    program of its own, of which a step takes the first that has all that its rows ask for; by default one.
    """

    def __init__(
        self,
        programs: Programs,
        requests: list[Request],
        longest: int = 0,
        option_sets: Sequence[frozenset[str]] = (),
    ):
        self.programs = programs
        sizes = programs.rows, programs.max_len, programs.stages, programs.shards
        self.scheduler = Scheduler(*sizes, programs.width, programs.masks, programs.cfg.V)
        self.stats, self.start_time, self.turns = Stats(), 0.0, 0
        self.option_sets = list(option_sets or [options_in_use(requests)])
        if programs.stages > 1:  # which are in one program
            self.option_sets = self.option_sets[-1:]
        first = self.scheduler.micro_batches[0]
        neutral = [first.sampling(options) for options in self.option_sets]
        self.sampling = [neutral[0]] * programs.stages
        nothing = Turn([], None, np.zeros(len(first.rows), np.int32), self.sampling[0])
        # What each stage is about, but the first one; then that of which the results are to be fetched.
        self.stages: deque[Sent] = deque([Sent(nothing)] * (programs.stages - 1))
        self.in_flight: deque[tuple[Sent, Any]] = deque()
        self.longest = max([longest, *(len(request.prompt) for request in requests)])
        self.scores = {request.scoring for request in requests} or {None}
        programs.warm_up(self.longest, self.scores, neutral)

    def _score(self, request: Request) -> int | None:
        """How its prompt is read, see model.prefill: of what was compiled, the least that it asks for."""
        if request.scoring is None:
            return None
        return min((n for n in self.scores if n is not None and n >= request.scoring), default=-1)

    def add(self, request: Request) -> Answer:
        """Put a request at the end of the queue. UserError if it does not suit the rows or the programs."""
        prompt, max_len = request.validated(self.programs.cfg.V), self.programs.max_len
        if request.positions > max_len:
            what = f"{len(prompt)} tokens and {request.max_new_tokens} new ones"
            raise UserError(f"{what} do not fit into a row of {max_len}")
        known = len(prompt) <= self.longest and self._score(request) in self.scores
        if not known or not any(options_in_use([request]) <= options for options in self.option_sets):
            raise UserError("nothing was compiled for a request of this kind; see `requests` and `longest`")
        answer = Answer(request, prompt, constraint=request.grammar and request.grammar.start())
        self.scheduler.queue.append(answer)
        return answer

    @property
    def busy(self) -> bool:
        return bool(self.in_flight) or self.scheduler.busy

    def cancel(self, answer: Answer) -> None:
        """End an answer; it gets no more tokens."""
        if answer.finish_reason is None:
            answer.finish_reason = "cancelled"
            if all(row.answer is not answer for row in self.scheduler.rows):
                self.scheduler.queue.remove(answer)

    def advance(self) -> list[Answer]:
        """Send off the next chunk and the next step, and return the answers with news from those before."""
        self.start_time = self.start_time or time.perf_counter()
        expected, changed = len(self.in_flight), []
        self.stages.appendleft(self._next_turn())
        results = self.programs.run([sent.turn for sent in self.stages])
        sent = self.stages.pop()
        if sent.scored or sent.stepped or sent.ended:
            self.in_flight.append((sent, results))
        for _ in range(expected):
            sent, results = self.in_flight.popleft()
            changed += self._receive(sent, *jax.tree.map(np.asarray, results))
        self._count()
        return changed

    def _next_turn(self) -> Sent:
        """What the next group is to do."""
        number, sent = self.turns % len(self.scheduler.micro_batches), Sent()
        micro_batch = self.scheduler.micro_batches[number]
        begins = self._admit(micro_batch, sent)
        if begins:
            asked = options_in_use([row.answer.request for row in micro_batch.rows if not row.free])
            options = next(options for options in self.option_sets if asked <= options)
            self.sampling[number] = micro_batch.sampling(options)
        elif self.sampling[number].allowed is not None:  # it changes with each step
            self.sampling[number] = dataclasses.replace(self.sampling[number], allowed=micro_batch.allowed())
        chunk = self._prefill(micro_batch, sent)
        sent.turn = Turn(begins, chunk, self._decode(micro_batch, sent), self.sampling[number])
        self.turns += 1
        return sent

    def _admit(self, micro_batch: MicroBatch, sent: Sent) -> list[Begin]:
        """Give requests of the queue to free rows, one per data shard at a time."""
        shards, begins = micro_batch.shards, []
        while any(admissions := self.scheduler.admit(micro_batch)):
            text = np.full((len(shards), self.programs.max_len), -1, np.int32)
            rows, read, sources = np.full((3, len(shards)), -1, np.int32)
            for i, (shard, admission) in enumerate(zip(shards, admissions, strict=True)):
                if admission:
                    row, _ = admission
                    prompt = row.answer.prompt
                    text[i, : len(prompt)] = prompt
                    rows[i], sources[i] = (shard.rows.index(row) for row in admission)
                    read[i] = row.computed
                    self.stats.prompt_tokens += len(prompt)
                    self.stats.reused_tokens += row.reused
                    self._end_if_read(row, sent)
            begins.append(Begin(rows, text, read, sources))
        return begins

    def _end_if_read(self, row: Row, sent: Sent) -> None:
        """If no new tokens are to follow a prompt, its answer ends when what is in flight is there."""
        if not row.prefill_left and not row.answer.request.max_new_tokens:
            sent.ended.append(row.answer)

    def _prefill(self, micro_batch: MicroBatch, sent: Sent) -> Chunk | None:
        """Read a chunk of the prompt of one row per data shard."""
        shards, reading = micro_batch.shards, micro_batch.next_to_prefill()
        if not any(reading):
            return None
        width = prefill_width(max(row.prefill_left for row in reading if row))
        count = np.array([min(row.prefill_left, width) if row else 0 for row in reading], np.int32)
        rows = [shard.rows.index(row) if row else 0 for shard, row in zip(shards, reading, strict=True)]
        sent.scored = [(i, x, x.number) for i, x in enumerate(reading) if x and x.answer.request.score]
        for row, n in zip(reading, count.tolist(), strict=True):
            if row:
                row.computed += n
                self._end_if_read(row, sent)
        score = max((self._score(row.answer.request) for _, row, _ in sent.scored), default=None)
        return Chunk(np.array(rows, np.int32), count, width, score)

    def _decode(self, micro_batch: MicroBatch, sent: Sent) -> np.ndarray:
        """How many tokens each row chooses in a step: all that have read their prompts."""
        count = micro_batch.tokens_to_choose()
        sent.stepped = [(i, row, row.number) for i, row in enumerate(micro_batch.rows) if count[i]]
        for _, row, _ in sent.stepped:
            row.steps_in_flight += 1
        return count

    def _receive(self, sent: Sent, scores: model.Scores | None, output: model.Output | None) -> list[Answer]:
        changed = self._receive_scores(sent.scored, sent.turn.chunk.count, scores) if sent.scored else []
        for answer in sent.ended:
            answer.finish_reason = answer.finish_reason or "length"
        changed += sent.ended
        return changed + (self._receive_tokens(sent.stepped, output) if sent.stepped else [])

    def _receive_scores(
        self, of: list[tuple[int, Row, int]], count: np.ndarray, scores: model.Scores
    ) -> list[Answer]:
        changed = []
        for i, row, number in of:
            answer, n = row.answer, count[i]
            if row.number != number or answer.finish_reason is not None:
                continue
            changed.append(answer)
            if np.isnan(scores.logprobs[i, :n]).any():
                self._fail(row)
            else:
                answer.prompt_logprobs += scores.logprobs[i, :n].tolist()
                if top := answer.request.sampling.top_logprobs:
                    answer.prompt_top_logprobs += by_token(scores.likeliest, i, n, top)
        return changed

    def _receive_tokens(self, of: list[tuple[int, Row, int]], output: model.Output) -> list[Answer]:
        changed = []
        for i, row, number in of:
            if row.number != number:  # the row has another answer by now
                continue
            answer, n = row.answer, output.count[i]
            tokens = output.tokens[i, :n]
            row.append(tokens)
            if answer.finish_reason is not None:
                continue
            changed.append(answer)
            before = len(answer.tokens)
            if top := answer.request.sampling.top_logprobs:
                answer.top_logprobs += by_token(output.likeliest, i, n, top)
            for token, logprob in zip(tokens.tolist(), output.logprobs[i, :n].tolist(), strict=True):
                if math.isnan(logprob) or token >= self.programs.cfg.V:  # no token is the likeliest
                    self._fail(row)
                    break
                answer.tokens.append(token)
                answer.logprobs.append(logprob)
                if self._completes(answer, token) or token in answer.request.stop:
                    answer.finish_reason = answer.finish_reason or "stop"
                elif len(answer.tokens) == answer.request.max_new_tokens:
                    answer.finish_reason = "length"
                if answer.finish_reason:
                    break
            self.stats.tokens += len(answer.tokens) - before
            self.stats.row_steps += 1
            self.stats.drafted += int(output.drafted[i])
            self.stats.accepted += len(tokens) - 1
        self.stats.steps += 1
        return changed

    def _completes(self, answer: Answer, token: int) -> bool:
        """Whether its grammar lets nothing follow this token; then also if there is an error in it."""
        try:
            return answer.constraint is not None and answer.constraint.accept_token(token)
        except UserError as e:
            answer.finish_reason, answer.error = "error", str(e)
            self.stats.failed += 1
            return True

    def _fail(self, row: Row) -> None:
        """The model computes NaN in this row, which ends its answer.

        The NaN may be another's: tokens of a prompt that come before the one which makes it may become NaN as
        well, and they may be in the cached prefix. Then its answer is admitted once more, without one.
        """
        answer, reused = row.answer, row.reused
        row.clear()
        if reused and not answer.tokens:
            answer.prefix_caching = False
            self.scheduler.queue.appendleft(answer)
            self.stats.prompt_tokens -= len(answer.prompt)
            self.stats.reused_tokens -= reused
        else:
            answer.finish_reason, answer.error = "error", NAN
            self.stats.failed += 1

    def _count(self) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.seconds = time.perf_counter() - self.start_time
        started = all(row.free or row.answer.tokens for row in scheduler.rows)
        if stats.prefilled is None and started and not scheduler.starved:
            stats.prefilled = dataclasses.replace(stats)


def by_token(likeliest: model.TopLogprobs, row: int, count: int, n: int) -> list[dict[int, float]]:
    """At each of the first `count` places of a row the n likeliest tokens, with their log-probabilities."""
    parts = (x[row, :count, :n].tolist() for x in (likeliest.tokens, likeliest.logprobs))
    return [dict(zip(*place, strict=True)) for place in zip(*parts, strict=True)]
