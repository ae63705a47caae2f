"""Replies to the prompts: each is an answer, a score or an error."""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from checkpoints.threads import no_garbage_collection
from feedback.errors import UserError
from feedback.progress import progress
from generation.replies import Replies, Reply, Score
from generation.request_builder import samples
from serving.engine import Engine
from terminal.launch import log
from terminal.loaded_models import Session
from terminal.prompts import Prompt

MAX_REPLIES = 2**24  # each takes a kilobyte before its row is assigned


@dataclasses.dataclass(eq=False, kw_only=True)
class PromptReply(Reply):
    """The reply to a prompt, or one of its samples: an answer, a score, or an error.

    index: number of the prompt, from 0. sample: number of the sample, from 0. args: the command's options.
    error: why there is no request, or why the answer ended early.
    """

    prompt: Prompt
    index: int
    sample: int
    args: argparse.Namespace

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.sample

    @property
    def sample_label(self) -> str:
        """Which sample this is, if there are several, to follow the prompt in messages."""
        return f" ({self.sample + 1} of {self.args.n})" if self.args.n > 1 else ""

    def refuse(self, why: UserError) -> None:
        self.finish_reason, self.error = "error", f"{self.prompt.where}: {why}"

    def as_json(self) -> dict:
        """The object that docs/usage.md describes."""
        args, text = self.args, self.prompt.text
        found = dict(index=self.index) | (dict(sample=self.sample) if args.n > 1 else {})
        found |= {"prompt" if isinstance(text, str) else "messages": text}
        if self.error is not None:
            return found | dict(error=self.error)
        found |= dict(prompt_tokens=self.request.prompt.tolist())
        if args.logprobs or args.score:
            found |= dict(prompt_logprobs=[None, *self.answer.prompt_logprobs])
        if args.score:
            score = self.score
            return found | dict(log_likelihood=score.log_likelihood, perplexity=score.perplexity)
        stream = self.stream
        if args.logprobs:
            found |= dict(logprobs=self.answer.logprobs[: stream.used])
        found |= dict(reasoning=stream.reasoning) if stream.reasoning else {}
        found |= dict(tokens=self.answer.tokens[: stream.used], text=stream.text)
        return found | dict(finish_reason=self.finish_reason)


def score_line(score: Score) -> str:
    line = f"log-likelihood {score.log_likelihood:,.4f} of {len(score.logprobs)} tokens"
    return line + (f", perplexity {score.perplexity:,.4f}" if score.perplexity else "")


def make_replies(session: Session, prompts: list[Prompt]) -> list[PromptReply]:
    """A reply for each sample of each prompt, with a request or an error."""
    n, builder = session.args.n, session.builder
    if (total := n * len(prompts)) > MAX_REPLIES:
        what = f"--n {n} of {len(prompts)} prompts: {total} answers"
        raise UserError(f"{what}; ask for at most {MAX_REPLIES}")
    replies, show = [], jax.process_index() == 0
    made = progress("requests", total, show=show, unit="request", delay=1)
    with made as bar, no_garbage_collection():  # it would double the time, and all objects stay
        for index, prompt in enumerate(prompts):
            place = dict(prompt=prompt, index=index, args=session.args, new_stream=builder.new_stream)
            try:
                tokens = builder.encode(prompt.text, tools=prompt.tools)
                requests = samples(builder.request_for(tokens, **own_options(session.args, prompt)), n)
                own = [PromptReply(request, sample=i, **place) for i, request in enumerate(requests)]
            except UserError as e:
                own = [PromptReply(None, sample=i, **place) for i in range(n)]
                for reply in own:
                    reply.refuse(e)
            replies += own
            bar.update(n)
    return replies


def own_options(args: argparse.Namespace, prompt: Prompt) -> dict[str, Any]:
    """The options of a prompt alone. Where --temperature is given, no other option implies a temperature."""
    options = dict(temperature=args.temperature) | prompt.options
    return options | (dict(max_new_tokens=None) if args.score else {})


def refuse_too_long(replies: list[PromptReply], max_len: int) -> None:
    """Refuse requests that need more than max_len positions."""
    for reply in replies:
        if not reply.done:
            try:
                reply.request.check_length(max_len, "the memory for a row")
            except UserError as e:
                reply.refuse(e)


def report_refused(replies: list[PromptReply], answered: int) -> None:
    """Log which prompts are refused. Raises UserError if all are and an earlier run answered none."""
    refused = [reply.error for reply in replies if reply.done and reply.sample == 0]
    if not answered and all(reply.done for reply in replies):
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise UserError(refused[0] + more)
    for error in refused:
        log("error:", error)


def answer(engine: Engine, replies: list[PromptReply]) -> Iterator[list[PromptReply]]:
    """Answer all requests: yields the replies that are done after each step, first those with an error."""
    working = Replies(engine)
    with no_garbage_collection():
        for reply in replies:
            if not reply.done:
                working.add(reply)
    yield [reply for reply in replies if reply.done]
    while engine.busy:
        done = [reply for reply in working.advance() if reply.done]
        for reply in done:
            if reply.error is not None:
                reply.error = f"{reply.prompt.where}{reply.sample_label}: {reply.error}"
                log("error:", reply.error)
        yield done
