"""Replies to the prompts: each is an answer, a score or an error."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax

from checkpoints.threads import no_garbage_collection
from conversation.streams import TextStream
from feedback.errors import UserError
from feedback.progress import progress
from serving.engine import Engine
from serving.requests import Answer, Request
from terminal.launch import log
from terminal.prompts import Prompt, RequestBuilder

MAX_REPLIES = 2**24  # each takes a kilobyte before its row is assigned


@dataclasses.dataclass(eq=False)
class Reply:
    """The reply to a prompt, or one of its samples: an answer, a score, or an error.

    index: number of the prompt, from 0. sample: number of the sample, from 0, of `samples`. error: why there
    is no request, or why the answer ended early. new_stream: makes `stream` when it is first used, because of
    a million samples few are in flight at a time.
    """

    index: int
    sample: int
    samples: int
    prompt: Prompt
    request: Request | None = None
    error: str | None = None
    answer: Answer | None = None
    new_stream: Callable[[Request], TextStream] | None = None

    @functools.cached_property
    def stream(self) -> TextStream:
        """The text of the answer, while it grows."""
        return self.new_stream(self.request)

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.sample

    @property
    def sample_label(self) -> str:
        """Which sample this is, if there are several, to follow the prompt in messages."""
        return f" ({self.sample + 1} of {self.samples})" if self.samples > 1 else ""

    @property
    def done(self) -> bool:
        return self.error is not None or (self.answer is not None and self.answer.finish_reason is not None)

    def update(self) -> None:
        """Add the answer's new tokens to the stream."""
        self.stream.add(self.answer.tokens[self.stream.used :])
        if self.done:
            self.stream.finish()

    def as_json(self, logprobs: bool, score: bool) -> dict:
        """The object that docs/usage.md describes. logprobs, score: the options of these names."""
        text = self.prompt.text
        found = dict(index=self.index) | (dict(sample=self.sample) if self.samples > 1 else {})
        found |= {"prompt" if isinstance(text, str) else "messages": text}
        if self.error is not None:
            return found | dict(error=self.error)
        found |= dict(prompt_tokens=self.request.prompt.tolist())
        if logprobs or score:
            found |= dict(prompt_logprobs=[None, *self.answer.prompt_logprobs])
        if score:
            likelihood, n = math.fsum(self.answer.prompt_logprobs), len(self.answer.prompt_logprobs)
            return found | dict(log_likelihood=likelihood, perplexity=perplexity(likelihood, n))
        used = self.stream.used
        if logprobs:
            found |= dict(logprobs=self.answer.logprobs[:used])
        stopped = self.stream.stopped or self.answer.finish_reason == "stop"
        reason = "stop" if stopped else "length"
        found |= dict(reasoning=self.stream.reasoning) if self.stream.reasoning else {}
        return found | dict(tokens=self.answer.tokens[:used], text=self.stream.text, finish_reason=reason)

    def as_score(self) -> str | None:
        """The lines to print for --score; None for an error."""
        if self.error is not None:
            return None
        logprobs = self.answer.prompt_logprobs
        return f"> {self.prompt.title}\n{score_line(math.fsum(logprobs), len(logprobs))}\n"


def perplexity(log_likelihood: float, n: int) -> float | None:
    """The perplexity of n tokens; None for n = 0, or if a float cannot hold it."""
    return math.exp(-log_likelihood / n) if n and -log_likelihood / n < 700 else None


def score_line(log_likelihood: float, n: int) -> str:
    value = perplexity(log_likelihood, n)
    return f"log-likelihood {log_likelihood:,.4f} of {n} tokens" + (
        f", perplexity {value:,.4f}" if value else ""
    )


def make_replies(builder: RequestBuilder, prompts: list[Prompt], samples: int) -> list[Reply]:
    """A reply for each sample of each prompt, with a request or an error."""
    if (total := samples * len(prompts)) > MAX_REPLIES:
        what = f"--n {samples} of {len(prompts)} prompts: {total} answers"
        raise UserError(f"{what}; ask for at most {MAX_REPLIES}")
    replies, show = [], jax.process_index() == 0
    made = progress("requests", total, show=show, unit="request", delay=1)
    with made as bar, no_garbage_collection():  # it would double the time, and all objects stay
        for index, prompt in enumerate(prompts):
            try:
                tokens = builder.encode(prompt.text, tools=prompt.tools)
                for sample, request in enumerate(builder.requests(tokens, prompt.options, samples)):
                    replies.append(
                        Reply(index, sample, samples, prompt, request, new_stream=builder.new_stream)
                    )
                    bar.update()
            except UserError as e:
                error = f"{prompt.where}: {e}"
                replies += [Reply(index, sample, samples, prompt, error=error) for sample in range(samples)]
                bar.update(samples)
    return replies


def refuse_too_long(replies: list[Reply], max_len: int) -> None:
    """Refuse requests that need more than max_len positions."""
    for reply in replies:
        if reply.error is None and reply.request.positions > max_len:
            what = f"it takes {reply.request.positions} positions, and memory holds rows of {max_len}"
            reply.error = f"{reply.prompt.where}: {what}"


def report_refused(replies: list[Reply], answered: int) -> None:
    """Log which prompts are refused. Raises UserError if all are and an earlier run answered none."""
    refused = [reply.error for reply in replies if reply.error is not None and reply.sample == 0]
    if not answered and all(reply.error is not None for reply in replies):
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise UserError(refused[0] + more)
    for error in refused:
        log("error:", error)


def answer(engine: Engine, replies: list[Reply]) -> Iterator[list[Reply]]:
    """Answer all requests: yields the replies that are done after each step, first those with an error."""
    with no_garbage_collection():
        open_replies = {engine.add(reply.request): reply for reply in replies if reply.error is None}
    for found, reply in open_replies.items():
        reply.answer = found
    yield [reply for reply in replies if reply.error is not None]
    while engine.busy:
        done = []
        for found in engine.advance():
            if (reply := open_replies.get(found)) is not None:
                reply.update()
                if found.error is not None:
                    reply.error = f"{reply.prompt.where}{reply.sample_label}: {found.error}"
                    log("error:", reply.error)
                if reply.stream.stopped:
                    engine.cancel(found)
                if reply.done:
                    done.append(open_replies.pop(found))
        yield done
