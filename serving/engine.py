"""Continuous batching: when an answer ends, its row of the batch goes on with the next request.

    programs = Programs(weights, cfg, mesh, rows=8, max_len=1024, kv_dtype="bfloat16")
    engine = Engine(programs, needed_programs(programs, demand_of(requests)))
    answers = [engine.add(request) for request in requests]
    while engine.busy:
        for answer in engine.advance():
            ...  # it has new tokens, or has ended

This is the loop between the rows (scheduler.py) and the compiled programs (programs.py).

Prefill alternates with decoding: a turn reads a chunk of one or several prompts per data shard, and then
decodes one step of all rows whose prompts have been read. So a long prompt holds up neither the answers in
progress nor shorter prompts. `PrefillLimits` say how large a chunk may be, and in how many turns none is read
so that decoding keeps its pace. Prefill reads all tokens of a prompt except the last; the decode step that
chooses the first token of the answer reads the last.

Prefix caching: the keys and values of a row stay in its cache until they are overwritten. A request whose
prompt has a prefix in common with some row of its data shard (a system prompt, earlier turns of a chat,
another sample of the same prompt) starts from that prefix.

The device does not wait for the host: the host starts a step before it looks at the tokens of the last one.
Rows with grammars do, because the host must see a token to tell which ones may come next. But while tokens
leave the grammar's mask as it is, as in a free text before a call of a tool, the next step is sent with that
mask. If the token in flight turns out to change it, the answer does not use what that next step chooses, and
another step chooses with the right mask. So each token is chosen with the mask of the text before it.

Where a grammar forces several tokens, as in the frame of a JSON object, no steps choose them: they become
part of the answer at once, and a chunk reads them like those of a prompt.

With pipeline stages (sharding/stages.py) each stage works on another microbatch in a turn. The engine plans
one microbatch at a time; the plan goes to the first stage and one turn later to the next, and the last stage
returns the results.

A request that goes wrong ends with an error of its own, and the others go on.
"""

import dataclasses
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from feedback.errors import UserError
from serving.chunks import at_most
from serving.needed import ChooseTokens, Program, ReadChunk
from serving.prefix_cache import SavedPrefix
from serving.programs import Assignment, Programs, StepPlan
from serving.requests import Answer, Request, options_in_use
from serving.scheduler import (
    Admission,
    MicroBatch,
    PrefillLimits,
    Row,
    Scheduler,
    Shard,
    allowed_tokens,
    neutral_sampling,
    sampling_of,
)
from serving.steps import Output, PrefillChunk, Scores
from sharding.sampling import Sampling, TopLogprobs

logger = logging.getLogger(__name__)
NAN = "the model computes NaN: its weights are damaged, or overflow this --dtype"


@dataclasses.dataclass
class Stats:
    """Counts since the first request.

    prefilled: the same counts at the time when every row's first answer had a token, or had ended.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # tokens of prompts that came from cached prefixes
    tokens: int = 0
    steps: int = 0  # decode steps whose tokens are known
    failed: int = 0  # requests that ended with an error
    drafted: int = 0  # draft tokens that were checked
    accepted: int = 0
    forced: int = 0  # tokens that grammars have forced and that no step has chosen
    row_steps: int = 0  # steps times the rows that took part
    dropped: int = 0  # of rows with grammars: tokens that were chosen with the mask of an earlier token
    seconds: float = 0.0
    prefilled: "Stats | None" = None

    @property
    def tokens_per_step(self) -> float | None:
        """How many tokens a row got per step that it took part in."""
        return self.tokens / self.row_steps if self.row_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclasses.dataclass
class InFlight:
    """A step plan on its way through the stages, and the rows that its results are for.

    scored, stepped: rows whose prompts are scored, and rows that choose tokens: (index in the results, row,
    number of its answer). ended: answers that end with this step because they ask for no new tokens.
    """

    plan: StepPlan | None = None
    scored: list[tuple[int, Row, int]] = dataclasses.field(default_factory=list)
    stepped: list[tuple[int, Row, int]] = dataclasses.field(default_factory=list)
    ended: list[Answer] = dataclasses.field(default_factory=list)


class Engine:
    """The loop of continuous batching, see above.

    Where there are several processes, each must add the same requests in the same order.

    usable: the programs that turns may use, see needed.py; `use` adds others. jax compiles a program in the
    first turn that needs it, if neither needed.warm_up nor ahead.compile_programs has compiled it before.
    prefix_cache_bytes: host memory for the prefixes of rows that other requests have taken, see
    prefix_cache.py; unused if there are several stages. limits: by default prompts are read as fast as
    possible.

    chunk_shapes, scores: of the prefill chunks in `usable`, each shape with each score.
    """

    def __init__(
        self,
        programs: Programs,
        usable: Iterable[Program],
        limits: PrefillLimits = PrefillLimits(),  # noqa: B008  immutable
        prefix_cache_bytes: int = 0,
    ):
        self.programs, self.usable = programs, set()
        self.scheduler = Scheduler(
            rows=programs.rows,
            max_len=programs.max_len,
            stages=programs.stages,
            shards=programs.shards,
            width=programs.width,
            masks=programs.masks,
            prefix_cache_bytes=0 if programs.stages > 1 else prefix_cache_bytes,
            row_bytes=programs.row_bytes,
            limits=limits,
        )
        self.use(usable)
        self.saving: list[SavedPrefix] = []  # what the last turn has started to copy to the host
        self.stats, self.start_time, self.turns = Stats(), 0.0, 0
        # Of each microbatch: the options of sampling that its rows ask for, and the arrays of its last step.
        rows, options = len(self.scheduler.micro_batches[0].rows), self.decode_programs[-1].options
        neutral = neutral_sampling(options, rows, programs.cfg.V)
        self.asked, self.sampling = [options] * programs.stages, [neutral] * programs.stages
        nothing = StepPlan([], None, np.zeros(rows, np.int32), neutral)
        # The plans of the later stages' microbatches; then the plans whose results are still to be fetched.
        self.stages: deque[InFlight] = deque([InFlight(nothing)] * (programs.stages - 1))
        self.in_flight: deque[tuple[InFlight, Any]] = deque()

    def use(self, programs: Iterable[Program]) -> None:
        """Let turns use these programs, too."""
        self.usable |= set(programs)
        chunks = [x for x in self.usable if isinstance(x, ReadChunk)]
        self.scores = {x.score for x in chunks}
        self.chunk_shapes = sorted(
            shape
            for shape in {x.shape for x in chunks}
            if all(ReadChunk(shape, score) in self.usable for score in self.scores)
        )
        steps = [x for x in self.usable if isinstance(x, ChooseTokens)]
        self.decode_programs = sorted(steps, key=lambda x: (x.rows, len(x.options)))

    def _score(self, request: Request) -> int | None:
        """The `score` of the request's prefill chunks: the least usable one that is enough for it."""
        if request.scoring is None:
            return None
        return min((n for n in self.scores if n is not None and n >= request.scoring), default=-1)

    def add(self, request: Request) -> Answer:
        """Put a request at the end of the queue: -> its Answer, which `advance` fills.

        Raises UserError if it does not fit into a row, or needs a program that is not usable.
        """
        prompt = request.validated(self.programs.cfg.V)
        request.check_length(self.programs.max_len, "a row")
        readable = len(prompt) == 1 or self._score(request) in self.scores
        options = options_in_use([request])
        if not readable or not any(options <= program.options for program in self.decode_programs):
            raise UserError("no program is there for a request of this kind; see serving.needed.Demand")
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
        """Start the next turn and fetch the results of the last: -> the answers that have changed."""
        began = time.perf_counter()
        self.start_time = self.start_time or began
        expected, changed = len(self.in_flight), []
        self.stages.appendleft(planned := self._plan_turn())
        saving = [x for each in self.stages[0].plan.assignments for x in each.save if x]
        results = self.programs.run([step.plan for step in self.stages])
        step = self.stages.pop()
        if step.scored or step.stepped or step.ended:
            self.in_flight.append((step, results))
        for _ in range(expected):
            step, results = self.in_flight.popleft()
            changed += self._receive(step, *jax.tree.map(np.asarray, results))
        for prefix in self.saving:
            prefix.finish_copying()
        self.saving = saving
        self._count()
        if logger.isEnabledFor(logging.DEBUG):
            self._log_turn(planned, changed, time.perf_counter() - began)
        return changed

    def _log_turn(self, planned: InFlight, changed: list[Answer], seconds: float) -> None:
        """Log what a turn has started, and the answers that have ended with the results of the last one."""
        plan, parts = planned.plan, []
        if assigned := sum(int((x.rows >= 0).sum()) for x in plan.assignments):
            parts.append(f"{assigned} rows assigned")
        if chunk := plan.chunk:
            parts.append(f"{chunk.count.sum()} prompt tokens in a chunk of {len(chunk.rows)} x {chunk.width}")
        if planned.stepped:
            parts.append(f"{len(planned.stepped)} of {len(plan.count)} rows decoded")
        parts += [f"{len(self.scheduler.queue)} in the queue", f"{1000 * seconds:.1f} ms"]
        logger.debug("turn %d: %s", self.turns, ", ".join(parts))
        for answer in dict.fromkeys(changed):
            if (reason := answer.error or answer.finish_reason) is not None:
                tokens = len(answer.prompt), answer.reused, len(answer.tokens)
                logger.debug("%s: %d prompt tokens, %d of them cached, and %d new ones", reason, *tokens)

    def _plan_turn(self) -> InFlight:
        """Plan what the next microbatch does in its turn."""
        number, step = self.turns % len(self.scheduler.micro_batches), InFlight()
        micro_batch = self.scheduler.micro_batches[number]
        assignments = self._admit(micro_batch, step)
        if assignments:
            requests = [row.answer.request for row in micro_batch.rows if not row.free]
            self.asked[number] = options_in_use(requests)
        new_rows = bool(assignments)
        assignments += self._send_known(micro_batch)
        decoding = self.scheduler.decoding
        chunk, keep, cost = self._prefill(micro_batch, step, micro_batch.largest_chunk(decoding))
        count, rows = micro_batch.tokens_to_choose(), micro_batch.rows
        micro_batch.count_prefill(cost, decoding, count.any())
        program = self._decode_program(micro_batch.busy_rows(count), self.asked[number])
        sampling = self._sampling(number, program.options, new_rows)
        within_shard = None
        if (chosen := micro_batch.rows_to_decode(count, program.rows)) is not None:
            count, sampling = jax.tree.map(lambda x: x[chosen], (count, sampling))
            within_shard = (chosen % len(micro_batch.shards[0].rows)).astype(np.int32)
            rows = [rows[i] for i in chosen]
        step.stepped = [(i, row, row.number) for i, row in enumerate(rows) if count[i]]
        for _, row, _ in step.stepped:
            row.steps_in_flight += 1
        step.plan = StepPlan(assignments, chunk, count, sampling, within_shard, keep)
        self.turns += 1
        return step

    def _decode_program(self, rows: int, options: frozenset[str]) -> ChooseTokens:
        """The program of the fewest rows, and then of the fewest options, that has at least these."""
        return next(x for x in self.decode_programs if rows <= x.rows and options <= x.options)

    def _sampling(self, number: int, options: frozenset[str], new_rows: bool) -> Sampling:
        """These options of sampling for the rows of a microbatch. new_rows: whether it has other answers."""
        old, rows = self.sampling[number], self.scheduler.micro_batches[number].rows
        if new_rows or options != {name for name, value in vars(old).items() if value is not None}:
            self.sampling[number] = sampling_of(rows, options, self.programs.cfg.V)
        elif any(row.constrained for row in rows):  # a grammar's mask changes with each step
            allowed = allowed_tokens(rows, self.programs.cfg.V)
            self.sampling[number] = dataclasses.replace(old, allowed=allowed)
        return self.sampling[number]

    def _admit(self, micro_batch: MicroBatch, step: InFlight) -> list[Assignment]:
        """Assign queued requests to free rows, one row per data shard at a time."""
        shards, assignments = micro_batch.shards, []
        while any(admissions := [shard.admit(self.scheduler.queue) for shard in shards]):
            for admission in filter(None, admissions):
                row = admission.row
                self.stats.prompt_tokens += len(row.answer.prompt)
                self.stats.reused_tokens += row.reused
                row.answer.reused = row.reused
                if row.constrained:
                    row.update_allowed(self.programs.cfg.V)
                self._end_if_read(row, step)
            assignments.append(self._assignment(shards, admissions))
        return assignments

    def _send_known(self, micro_batch: MicroBatch) -> list[Assignment]:
        """Assign rows their own texts anew: with forced tokens, or without what a dropped step has chosen."""
        shards, assignments = micro_batch.shards, []
        unsent = [[row for row in shard.rows if row.unsent and not row.free] for shard in shards]
        for rows in itertools.zip_longest(*unsent):
            assignments.append(self._assignment(shards, [row and Admission(row, row) for row in rows]))
            for row in filter(None, rows):
                row.unsent = False
        return assignments

    def _assignment(self, shards: list[Shard], admissions: Sequence[Admission | None]) -> Assignment:
        """The assignment of the known tokens of at most one row per data shard."""
        tokens = np.full((len(shards), self.programs.max_len), -1, np.int32)
        rows, read, sources, place = np.full((4, len(shards)), -1, np.int32)
        for i, (shard, admission) in enumerate(zip(shards, admissions, strict=True)):
            if admission:
                row = admission.row
                known = max(row.given, row.computed + 1)
                tokens[i, :known] = row.text[:known]
                rows[i], sources[i] = map(shard.rows.index, (row, admission.source))
                read[i], place[i] = row.computed, admission.place
        save = [admission and admission.save for admission in admissions]
        load = [admission and admission.load for admission in admissions]
        return Assignment(rows, tokens, read, sources, place, save, load)

    def _end_if_read(self, row: Row, step: InFlight) -> None:
        """An answer of no new tokens ends when the results of its last prefill chunk arrive."""
        if not row.prefill_left and not row.answer.request.max_new_tokens:
            step.ended.append(row.answer)

    def _prefill(
        self, micro_batch: MicroBatch, step: InFlight, largest: float
    ) -> tuple[PrefillChunk | None, np.ndarray | None, float]:
        """Plan a prefill chunk: -> (the chunk, where states are kept after it, see StepPlan, its cost).

        (None, None, 0) if no prompt is left to read. largest: see MicroBatch.largest_chunk. cost: see
        PrefillLimits.
        """
        found = micro_batch.next_to_prefill(at_most(largest, self.chunk_shapes)) if largest else None
        if not found:
            return None, None, 0
        shape, reading = found
        start = max(row.computed for row in itertools.chain(*reading))
        cost = self.scheduler.limits.cost(shape.tokens, start)
        rows, count, keep = np.zeros((3, len(reading), shape.rows), np.int32)
        keep -= 1
        for i, (shard, own) in enumerate(zip(micro_batch.shards, reading, strict=True)):
            idle = [row for row in shard.rows if row not in own]  # a chunk has no row twice
            rows[i] = [shard.rows.index(row) for row in (*own, *idle)][: shape.rows]
            count[i, : len(own)] = [min(row.next_chunk, shape.width) for row in own]
            first = i * shape.rows
            step.scored += [(first + j, x, x.number) for j, x in enumerate(own) if x.answer.request.score]
            for j, row in enumerate(own):
                row.computed += int(count[i, j])
                keep[i, j] = row.keep()
                self._end_if_read(row, step)
        score = max((self._score(row.answer.request) for _, row, _ in step.scored), default=None)
        chunk = PrefillChunk(rows=rows.ravel(), count=count.ravel(), width=shape.width, score=score)
        return chunk, keep.ravel() if (keep >= 0).any() else None, cost

    def _receive(self, step: InFlight, scores: Scores | None, output: Output | None) -> list[Answer]:
        changed = self._receive_scores(step, scores)
        for answer in step.ended:
            answer.finish_reason = answer.finish_reason or "length"
        changed += step.ended
        return changed + (self._receive_tokens(step, output) if step.stepped else [])

    def _receive_scores(self, step: InFlight, scores: Scores | None) -> list[Answer]:
        changed = []
        for i, row, number in step.scored:
            answer, n = row.answer, step.plan.chunk.count[i]
            if row.number != number or answer.finish_reason is not None:
                continue
            changed.append(answer)
            if np.isnan(scores.logprobs[i, :n]).any():
                self._fail(row)
            else:
                answer.prompt_logprobs += scores.logprobs[i, :n].tolist()
                if top := answer.request.sampling.top_logprobs:
                    answer.prompt_top_logprobs += by_token(scores.top_logprobs, i, n, top)
        return changed

    def _receive_tokens(self, step: InFlight, output: Output) -> list[Answer]:
        changed = []
        for i, row, number in step.stepped:
            if row.number != number:  # the row has another answer by now
                continue
            if row.dropped:
                row.dropped -= 1
                self.stats.dropped += 1
                continue
            answer, n = row.answer, output.count[i]
            tokens = output.tokens[i, :n]
            row.append(tokens)
            if answer.finish_reason is not None:
                continue
            changed.append(answer)
            before = len(answer.tokens)
            if top := answer.request.sampling.top_logprobs:
                answer.top_logprobs += by_token(output.top_logprobs, i, n, top)
            for token, logprob in zip(tokens.tolist(), output.logprobs[i, :n].tolist(), strict=True):
                if math.isnan(logprob) or token >= self.programs.cfg.V:  # NaN has no likeliest token
                    self._fail(row)
                    break
                self._add_token(answer, token, logprob)
                if answer.finish_reason:
                    break
            if row.constrained and row.update_allowed(self.programs.cfg.V) and row.steps_in_flight:
                row.drop_steps()
            if row.constrained and not row.steps_in_flight:
                # A stage knows the token that the last one has chosen only if the next turn decodes.
                row.unsent = self.programs.stages > 1 or row.unsent
                self._force(row)
            self.stats.tokens += len(answer.tokens) - before
            self.stats.row_steps += 1
            self.stats.drafted += int(output.drafted[i])
            self.stats.accepted += len(tokens) - 1
        self.stats.steps += 1
        return changed

    def _add_token(self, answer: Answer, token: int, logprob: float) -> None:
        """Add a token to an answer, which may end with it."""
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        if self._completes(answer, token) or token in answer.request.stop:
            answer.finish_reason = answer.finish_reason or "stop"
        elif len(answer.tokens) == answer.request.max_new_tokens:
            answer.finish_reason = "length"

    def _force(self, row: Row) -> None:
        """Add the tokens that the answer's grammar forces, if a chunk costs less than steps that choose them.

        A request that asks for log-probabilities needs a decode step for each token.
        """
        answer, request = row.answer, row.answer.request
        if request.score or request.sampling.top_logprobs is not None:
            return
        tokens = answer.constraint.forced_tokens() if self.chunk_shapes else []
        if len(tokens) <= self.scheduler.cost_of_chunk(row):
            return
        for token in tokens:
            self._add_token(answer, token, math.nan)
            self.stats.forced += 1
            if row.free:  # the answer has ended
                return
        row.force(tokens)
        row.update_allowed(self.programs.cfg.V)

    def _completes(self, answer: Answer, token: int) -> bool:
        """Whether the answer's grammar ends with this token, be it because the grammar fails."""
        try:
            return answer.constraint is not None and answer.constraint.accept_token(token)
        except UserError as e:
            answer.finish_reason, answer.error = "error", str(e)
            self.stats.failed += 1
            return True

    def _fail(self, row: Row) -> None:
        """End the answer of a row in which the model computes NaN.

        The NaN may come from a cached prefix that another request has read: then the answer goes back to the
        queue once, and reads its whole prompt itself.
        """
        answer, reused = row.answer, row.reused
        row.clear()
        if reused and not answer.tokens:
            for shard in self.scheduler.shards:
                shard.prefix_cache.forget(answer.prompt[:reused])
            answer.prefix_caching = False
            self.scheduler.queue.appendleft(answer)
            self.stats.prompt_tokens -= len(answer.prompt)
            self.stats.reused_tokens -= reused
        else:
            answer.finish_reason, answer.error = "error", NAN
            self.stats.failed += 1

    def _count(self) -> None:
        stats, rows = self.stats, self.scheduler.rows
        stats.seconds = time.perf_counter() - self.start_time
        if stats.prefilled is None and all(row.free or row.answer.tokens for row in rows):
            if not (self.scheduler.queue and any(row.free for row in rows)):  # else an answer takes that row
                stats.prefilled = dataclasses.replace(stats)


def by_token(best: TopLogprobs, row: int, count: int, n: int) -> list[dict[int, float]]:
    """The n likeliest tokens and their log-probabilities at each of a row's first `count` positions."""
    parts = (x[row, :count, :n].tolist() for x in (best.tokens, best.logprobs))
    return [dict(zip(*position, strict=True)) for position in zip(*parts, strict=True)]
