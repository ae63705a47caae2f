"""Replies: requests on their way through the engine, and the texts of their answers while they grow."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from conversation.streams import TextStream
from conversation.tool_calls import CallPiece
from serving.engine import Engine
from serving.requests import Answer, Request


@dataclasses.dataclass(frozen=True)
class Event:
    """Progress of a reply. text, reasoning: what was added to it. used: how many tokens it took so far.

    reasoning: of models that reason before they answer, see conversation/streams.py.
    reasoning_tokens: how many of the tokens `used` are of the reasoning. calls: what was added to calls of
    tools. finish_reason, error: see Reply.
    """

    text: str
    used: int
    finish_reason: str | None = None
    error: str | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: tuple[CallPiece, ...] = ()


@dataclasses.dataclass(frozen=True)
class Score:
    """How probable a text is.

    tokens: its token ids. logprobs: natural logs of the probabilities of all tokens but the first.
    """

    tokens: list[int]
    logprobs: list[float]

    @property
    def log_likelihood(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float | None:
        """None for a text of one token, or if a float cannot hold it."""
        n, likelihood = len(self.logprobs), self.log_likelihood
        return math.exp(-likelihood / n) if n and -likelihood / n < 700 else None


@dataclasses.dataclass(eq=False)
class Reply:
    """A request, and what has come of it.

    new_stream: makes `stream` when it is first used, because of a million samples few are in flight at a
    time. answer: None until the engine has the request. finish_reason: None, then that of the answer, or
    "stop" after a stop text. error: why it ended with finish_reason "error". taken: how many
    characters of text and of reasoning `take` has returned.
    """

    request: Request | None
    new_stream: Callable[[Request], TextStream] | None = None
    answer: Answer | None = None
    finish_reason: str | None = None
    error: str | None = None
    taken: tuple[int, int] = (0, 0)

    @functools.cached_property
    def stream(self) -> TextStream:
        """The text of the answer, while it grows."""
        return self.new_stream(self.request)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def score(self) -> Score:
        """Of the prompt, if the request has `score`."""
        return Score(self.request.prompt.tolist(), self.answer.prompt_logprobs)

    def update(self) -> None:
        """Add the answer's new tokens to the text."""
        answer, stream = self.answer, self.stream
        stream.add(answer.tokens[stream.used :])
        self.error, self.finish_reason = answer.error, answer.finish_reason
        if stream.stopped and self.error is None:
            self.finish_reason = "stop"
        if self.done:
            stream.finish()

    def take(self) -> Event:
        """What has come since this method was last called."""
        stream, (text, reasoning) = self.stream, self.taken
        self.taken = len(stream.text), len(stream.reasoning)
        return Event(
            stream.text[text:],
            stream.used,
            self.finish_reason,
            self.error,
            stream.reasoning[reasoning:],
            stream.reasoning_tokens,
            stream.take_calls(),
        )


class Replies:
    """The replies that an engine works on.

    open: those that have not ended, by their answers, in the order in which they were added. on_stop: called
    with a reply that a stop text has ended, while the engine would go on; by default `cancel`.
    """

    def __init__(self, engine: Engine | None, on_stop: Callable[[Any], None] | None = None):
        self.engine, self.on_stop = engine, on_stop or self.cancel
        self.open: dict[Answer, Any] = {}

    def add(self, reply: Reply) -> None:
        """Put the reply's request at the end of the engine's queue. Raises UserError, see Engine.add."""
        reply.answer = self.engine.add(reply.request)
        self.open[reply.answer] = reply

    def advance(self) -> list[Any]:
        """The engine's next turn: -> the replies that it has changed."""
        changed = []
        for answer in self.engine.advance():  # perhaps twice: for its prompt's scores and its end
            if (reply := self.open.get(answer)) is not None:
                reply.update()
                changed.append(reply)
                if reply.done:
                    del self.open[answer]
                if reply.stream.stopped:
                    self.on_stop(reply)
        return changed

    def cancel(self, reply: Reply, reason: str = "cancelled") -> bool:
        """Let the engine compute no more tokens of a reply: -> whether this has ended it, for this reason."""
        self.engine.cancel(reply.answer)
        ended = self.open.pop(reply.answer, None) is not None
        reply.finish_reason = reason if ended else reply.finish_reason
        return ended
