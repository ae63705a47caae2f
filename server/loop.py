"""The thread that owns the engine: other threads submit and cancel jobs, and get events of their answers.

With several processes the first one decides: before each step it broadcasts which requests it adds and
cancels, and which programs it adds, and the others do the same. A process without requests sleeps.
"""

import contextlib
import dataclasses
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from conversation.grammar import Grammar
from deployment.ahead import ProgramsOnShapes, compile_programs
from distributed.exchange import Broadcast, process_count, reach, wait_for_all
from feedback.errors import UserError
from generation.replies import Event, Replies, Reply
from server.metrics import Metrics
from serving.engine import Engine
from serving.needed import ChooseTokens, warm_up
from serving.requests import Request
from sharding.sampling import Bias, Sampling

ENGINE_FAILED = "the engine has failed, and the server ends"
IDLE = 1.0  # seconds without a job after which a CPU compiles another program, which takes seconds


class Refused(Exception):
    """No job is accepted now. retry_after: seconds until the queue may have space; None if the server is not
    ready or is shutting down.
    """

    def __init__(self, message: str, retry_after: int | None):
        super().__init__(message)
        self.retry_after = retry_after


@dataclasses.dataclass(eq=False)
class Job(Reply):
    """A submitted request. listener: who gets its events, for `deliver`. Times are of time.monotonic.

    number: the same in all processes. reported: how many tokens the events so far have told of.
    """

    listener: Any = None
    number: int = -1
    submitted: float = 0.0
    first_token: float | None = None
    reported: int = 0


class EngineLoop:
    """The engine's loop. ready: whether jobs are accepted. draining: whether it accepts no more and ends.
    failed: whether an exception has ended the engine's thread.

    open_jobs: how many have not ended. undelivered: the jobs whose last event has not been delivered.
    deliver: called with the events of each step; it must not take long. pace: seconds between the ends of two
    jobs, a moving average. inbox: commands of other threads. active: when the engine last had work, by
    time.monotonic.
    """

    def __init__(self, rows: int, max_queue: int, seconds: float, metrics: Metrics):
        """rows: of the engine. max_queue: jobs that may wait for a row. seconds: time limit of a job, waiting
        included.
        """
        self.rows, self.max_queue, self.seconds, self.metrics = rows, max_queue, seconds, metrics
        self.deliver: Callable[[list[tuple[Job, Event]]], None] = lambda events: None
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.open_jobs, self.submitted = threading.Lock(), 0, 0
        self.ready, self.draining, self.failed, self.pace = False, False, False, 1.0
        self.undelivered: set[Job] = set()
        self.last_end = self.active = time.monotonic()

    # Called by other threads.

    @property
    def capacity(self) -> int:
        """How many jobs may be open at a time."""
        return self.rows + self.max_queue

    def submit(self, jobs: list[Job]) -> None:
        """Accept all of these jobs or none.

        Raises Refused if the queue is full, the server is draining or the engine's thread has failed.
        """
        with self.lock:
            if self.failed:
                raise Refused(ENGINE_FAILED, None)
            if self.draining:
                raise Refused("it is about to end", None)
            beyond = self.open_jobs + len(jobs) - self.capacity
            if beyond > 0:
                seconds = min(max(1, round(self.pace * beyond)), 600)
                raise Refused(f"{self.open_jobs} of {self.capacity} places for requests are taken", seconds)
            self.open_jobs += len(jobs)
            self.undelivered.update(jobs)
            for job in jobs:
                job.number, job.submitted = self.submitted, time.monotonic()
                self.submitted += 1
                self.inbox.put(("add", job))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel those of these jobs that have not ended."""
        for job in jobs:
            if not job.done:
                self.inbox.put(("cancelled", job))

    def add_program(self, program: ChooseTokens) -> None:
        """Let the engine use a program that every process has compiled."""
        self.inbox.put(("program", program))

    def wait_until_idle(self) -> None:
        """Wait until the engine has had no work for a while."""
        while self.open_jobs or (seconds := self.active + IDLE - time.monotonic()) > 0:
            time.sleep(IDLE if self.open_jobs else seconds)

    def drain(self) -> None:
        """Accept no more jobs; `run` returns when the open ones have ended."""
        with self.lock:
            self.draining = True
        self.inbox.put(("wake", None))

    # Called by the thread of the engine.

    def run(self, engine: Engine) -> None:
        """Serve until `drain` is called and the open jobs have ended.

        An exception ends the thread of the engine. Then every job that still waits for an event, in the inbox
        too, gets an error as its last one, and no more jobs are accepted.
        """
        # A stop text is a command, too, so that all processes cancel the answer before the same step.
        self.engine, self.replies = engine, Replies(engine, lambda job: self.inbox.put(("stop", job)))
        self.ready = True
        others = Broadcast() if process_count() > 1 else None
        try:
            while not self.draining or self.open_jobs:
                commands = self._next_commands()
                if others:
                    others.say([command_as_json(what, subject) for what, subject in commands if subject])
                events = self._execute(commands)
                if engine.busy:
                    events += self._advance()
                    self.active = time.monotonic()
                self._publish(events)
        except BaseException:
            with self.lock:
                self.failed = True
            lost = Event("", 0, "error", ENGINE_FAILED)
            self.deliver([(job, lost) for job in self.undelivered])
            raise
        if others:
            others.say(None)

    def _next_commands(self) -> list[tuple[str, Any]]:
        """The commands since the last step, and those to cancel jobs out of time. Waits while all is idle.

        A command is about a job, or about a program, see `add_program`; None: it only wakes this thread.
        """
        commands = []
        if not self.engine.busy and not self.draining:
            commands.append(self.inbox.get())
            self.last_end = time.monotonic()
        while not self.inbox.empty():
            commands.append(self.inbox.get())
        late = time.monotonic() - self.seconds
        return commands + [
            ("timeout", job)
            for job in itertools.takewhile(lambda job: job.submitted < late, self.replies.open.values())
        ]

    def _execute(self, commands: list[tuple[str, Any]]) -> list[tuple[Job, Event]]:
        """Add programs, and add and cancel requests: -> the events of jobs that end with it."""
        events = []
        for what, job in commands:
            if what == "program":
                use_program(self.engine, job)
            elif what == "add":
                try:
                    self.replies.add(job)
                except UserError as e:
                    job.finish_reason = "error"
                    events.append((job, Event("", 0, "error", str(e))))
            elif job and job.answer and self.replies.cancel(job, what):
                events.append((job, Event("", job.stream.used, what)))
        return events

    def _advance(self) -> list[tuple[Job, Event]]:
        """The engine's next turn: -> the events of jobs that it has changed."""
        events, jobs, now = [], self.replies.advance(), time.monotonic()
        for job in jobs:
            if job.answer.tokens and job.first_token is None:
                job.first_token = now
            event, scored = job.take(), job.request.sampling.top_logprobs is not None
            news = event.text or event.reasoning or event.calls or event.finish_reason
            if news or (scored and event.used > job.reported):
                job.reported = event.used
                events.append((job, event))
        return events

    def _publish(self, events: list[tuple[Job, Event]]) -> None:
        """Update counts and metrics, and deliver the events."""
        now, ended = time.monotonic(), [(job, event) for job, event in events if event.finish_reason]
        for job, event in ended:
            self.metrics.ended(job, event.finish_reason, now)
            self.pace += 0.1 * (now - self.last_end - self.pace)
            self.last_end = now
        with self.lock:
            self.open_jobs -= len(ended)
        self.metrics.update(self.engine, self.open_jobs)
        if events:
            self.deliver(events)
        with self.lock:
            self.undelivered.difference_update(job for job, _ in ended)


def compile_later(
    shapes: ProgramsOnShapes, programs: list[ChooseTokens], loop: EngineLoop | None, wait: Callable[[], None]
) -> None:
    """Compile decode programs that the engine can do without, in a thread of its own, while the engine works.

    All processes compile them in the same order. The first lets all engines use a program when every process
    has compiled it. loop: of the first process; None in the others. wait: before each program.
    """
    for program in programs:
        wait()
        try:
            compile_programs(shapes, [program])
        except Exception as e:
            if shapes.given_up:  # the server ends
                return
            if not isinstance(e, jax.errors.JaxRuntimeError):
                raise
            # Out of memory: the engine can do without this program.
            print(f"a decode program for {program.rows} rows was not compiled: {e}", file=sys.stderr)
            return
        what = f"program {programs.index(program)}"
        reach(what)
        if loop:
            wait_for_all(what)
            loop.add_program(program)


def use_program(engine: Engine, program: ChooseTokens) -> None:
    """Let the engine's steps use a program that was compiled on shapes. It runs here for the first time."""
    warm_up(engine.programs, [program])
    engine.use([program])


def follow(engine: Engine, make_grammar: Callable[..., Grammar]) -> None:
    """The loop of every process but the first: execute its commands and steps until it ends.

    make_grammar: conversation.grammar.make_grammar for the model's tokenizer.
    """
    first, answers = Broadcast(), {}
    while (commands := first.hear()) is not None:
        for what, number, *fields in commands:
            if what == "program":
                use_program(engine, ChooseTokens(number, frozenset(*fields)))
            elif what == "add":
                with contextlib.suppress(UserError):  # the first process reports it
                    answers[number] = engine.add(request_from_json(*fields, make_grammar))
            elif number in answers:
                engine.cancel(answers[number])
        if engine.busy:
            engine.advance()
        answers = {number: x for number, x in answers.items() if x.finish_reason is None}


def command_as_json(what: str, subject: Any) -> list:
    """A command of the first process, for the others. subject: a job or a program."""
    if what == "program":
        return [what, subject.rows, sorted(subject.options)]
    if what != "add":
        return [what, subject.number]
    request, bias = subject.request, subject.request.sampling.bias
    numbers = {name: x for name, x in vars(request.sampling).items() if x is not None and x is not bias}
    fields = dict(
        prompt=request.prompt.tolist(), max_new_tokens=request.max_new_tokens, sampling=numbers,
        bias=bias and [bias.tokens.tolist(), bias.values.tolist()], stop=sorted(request.stop),
        score=request.score, grammar=request.grammar and [request.grammar.kind, request.grammar.source],
    )  # fmt: skip
    return [what, subject.number, fields]


def request_from_json(fields: dict, make_grammar: Callable[..., Grammar]) -> Request:
    """The request whose fields `command_as_json` has written."""
    bias = fields["bias"] and Bias(
        tokens=np.array(fields["bias"][0], np.int32), values=np.array(fields["bias"][1], np.float32)
    )
    return Request(
        np.array(fields["prompt"], np.int32), fields["max_new_tokens"],
        Sampling(**fields["sampling"], bias=bias), frozenset(fields["stop"]), fields["score"],
        fields["grammar"] and make_grammar(*fields["grammar"]),
    )  # fmt: skip
