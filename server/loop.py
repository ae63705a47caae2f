"""The one thread that owns the engine. Others submit jobs and cancel them; news of the answers go back.

On several processes the first one decides: before each step it tells the others what it adds and cancels, and
they do the same. Without anything to do all of them sleep.
"""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from checkpoints.errors import UserError
from distributed.exchange import Broadcast, process_count
from server.metrics import Metrics
from serving.engine import Engine
from serving.grammar import Grammar
from serving.requests import Answer, Request
from serving.text import TextStream
from sharding.sampling import Bias, Sampling


class Refused(Exception):
    """No job can be taken now. retry_after: seconds until there may be room; None: never."""

    def __init__(self, message: str, retry_after: int | None):
        super().__init__(message)
        self.retry_after = retry_after


@dataclasses.dataclass(frozen=True)
class News:
    """What has become certain of an answer since the last news. used: how many of its tokens are in the text.

    finish_reason, error: as in Answer, at its end; or "timeout".
    """

    text: str
    used: int
    finish_reason: str | None = None
    error: str | None = None


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way. owner: what `deliver` finds whom to tell by. Times are of time.monotonic.

    done: whether its last news are made; there are no others.
    """

    request: Request
    stream: TextStream
    owner: Any = None
    number: int = -1
    answer: Answer | None = None
    submitted: float = 0.0
    first_token: float | None = None
    done: bool = False


class EngineLoop:
    """See above.

    deliver: what is done with news, a list of (job, News) for each step; it must not take long.
    """

    def __init__(self, rows: int, max_queue: int, seconds: float, metrics: Metrics):
        """rows: of the engine. max_queue: jobs that may wait. seconds: for a job, waiting included."""
        self.rows, self.max_queue, self.seconds, self.metrics = rows, max_queue, seconds, metrics
        self.deliver: Callable[[list[tuple[Job, News]]], None] = lambda news: None
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.open, self.numbers = threading.Lock(), 0, 0
        self.ready, self.draining, self.pace = False, False, 1.0  # seconds between two jobs that end
        self.jobs: dict[Answer, Job] = {}  # in the order in which they came
        self.last_end = time.monotonic()

    # What other threads call.

    @property
    def capacity(self) -> int:
        """How many jobs may be open."""
        return self.rows + self.max_queue

    def submit(self, jobs: list[Job]) -> None:
        """Take all of these jobs, or none: Refused if the queue is full, or the server about to end."""
        with self.lock:
            if self.draining:
                raise Refused("it is about to end", None)
            beyond = self.open + len(jobs) - self.capacity
            if beyond > 0:
                seconds = min(max(1, round(self.pace * beyond)), 600)
                raise Refused(f"{self.open} of {self.capacity} places for requests are taken", seconds)
            self.open += len(jobs)
            for job in jobs:
                job.number, job.submitted = self.numbers, time.monotonic()
                self.numbers += 1
                self.inbox.put(("add", job))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End those that have not ended."""
        for job in jobs:
            if not job.done:
                self.inbox.put(("cancelled", job))

    def drain(self) -> None:
        """Take no more jobs; when those that are there have ended, `run` returns."""
        with self.lock:
            self.draining = True
        self.inbox.put(("wake", None))

    # What the thread of the engine does.

    def run(self, engine: Engine) -> None:
        """Serve until `drain`."""
        self.engine, self.ready = engine, True
        others = Broadcast() if process_count() > 1 else None
        try:
            while not self.draining or self.open:
                commands = self._commands()
                if others:
                    others.say([describe(what, job) for what, job in commands if job])
                news = self._obey(commands)
                if engine.busy:
                    news += self._look(engine.advance())
                self._publish(news)
        except BaseException:
            lost = News("", 0, "error", "the server has failed")
            self.deliver([(job, lost) for job in self.jobs.values()])
            raise
        if others:
            others.say(None)

    def _commands(self) -> list[tuple[str, Job | None]]:
        """What has come since the last step; while there is nothing to do, wait."""
        commands = []
        if not self.engine.busy and not self.draining:
            commands.append(self.inbox.get())
            self.last_end = time.monotonic()
        while not self.inbox.empty():
            commands.append(self.inbox.get())
        late = time.monotonic() - self.seconds
        return commands + [
            ("timeout", job)
            for job in itertools.takewhile(lambda job: job.submitted < late, self.jobs.values())
        ]

    def _obey(self, commands: list[tuple[str, Job | None]]) -> list[tuple[Job, News]]:
        news = []
        for what, job in commands:
            if what == "add":
                try:
                    job.answer = self.engine.add(job.request)
                    self.jobs[job.answer] = job
                except UserError as e:
                    job.done = True
                    news.append((job, News("", 0, "error", str(e))))
            elif job and job.answer:
                self.engine.cancel(job.answer)
                if not job.done:
                    job.done = True
                    news.append((job, News("", job.stream.used, what)))
        return news

    def _look(self, changed: list[Answer]) -> list[tuple[Job, News]]:
        """What these answers have said."""
        news, now = [], time.monotonic()
        for answer in changed:
            job = self.jobs.get(answer)
            if job is None or job.done:  # one may be there twice: with scores, and with its end
                continue
            if answer.tokens and job.first_token is None:
                job.first_token = now
            tokens, reason = answer.tokens[job.stream.used :], answer.finish_reason
            text = job.stream.add(tokens)
            if job.stream.stopped and reason != "error":
                reason = "stop"
                self.inbox.put(("stop", job))  # for all processes, before the next step
            if reason:
                text, job.done = text + job.stream.finish(), True
            if text or reason or (tokens and job.request.sampling.top_logprobs is not None):
                news.append((job, News(text, job.stream.used, reason, answer.error)))
        return news

    def _publish(self, news: list[tuple[Job, News]]) -> None:
        """Let the others know, and count."""
        now, ended = time.monotonic(), [(job, said) for job, said in news if said.finish_reason]
        for job, said in ended:
            self.jobs.pop(job.answer, None)
            self.metrics.ended(job, said.finish_reason, now)
            self.pace += 0.1 * (now - self.last_end - self.pace)
            self.last_end = now
        with self.lock:
            self.open -= len(ended)
        self.metrics.look(self.engine, self.open)
        if news:
            self.deliver(news)


def follow(engine: Engine, grammar_of: Callable[..., Grammar]) -> None:
    """What all processes but the first do: the same as it, until it ends. grammar_of: as make_grammar."""
    first, answers = Broadcast(), {}
    while (commands := first.hear()) is not None:
        for what, number, *fields in commands:
            if what == "add":
                with contextlib.suppress(UserError):  # as it does there
                    answers[number] = engine.add(parse(*fields, grammar_of))
            elif number in answers:
                engine.cancel(answers[number])
        if engine.busy:
            engine.advance()
        answers = {number: x for number, x in answers.items() if x.finish_reason is None}


def describe(what: str, job: Job) -> list:
    """A command of the first process as JSON."""
    if what != "add":
        return [what, job.number]
    request, bias = job.request, job.request.sampling.bias
    numbers = {name: x for name, x in vars(request.sampling).items() if x is not None and x is not bias}
    fields = dict(
        prompt=request.prompt.tolist(), max_new_tokens=request.max_new_tokens, sampling=numbers,
        bias=bias and [bias.tokens.tolist(), bias.values.tolist()], stop=sorted(request.stop),
        score=request.score, grammar=request.grammar and [request.grammar.kind, request.grammar.what],
    )  # fmt: skip
    return [what, job.number, fields]


def parse(fields: dict, grammar_of: Callable[..., Grammar]) -> Request:
    """The reverse of `describe`, of a request."""
    bias = fields["bias"] and Bias(
        tokens=np.array(fields["bias"][0], np.int32), values=np.array(fields["bias"][1], np.float32)
    )
    return Request(
        np.array(fields["prompt"], np.int32), fields["max_new_tokens"],
        Sampling(**fields["sampling"], bias=bias), frozenset(fields["stop"]), fields["score"],
        fields["grammar"] and grammar_of(*fields["grammar"]),
    )  # fmt: skip
