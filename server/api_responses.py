"""Responses of the API: OpenAI's objects, whole or as the chunks of a stream."""

import bisect
import codecs
import dataclasses
import math
import secrets
import time
from collections.abc import Iterator
from typing import NamedTuple

from conversation.tool_calls import CallPiece, ToolCall
from server.api_requests import ApiRequest
from server.loop import Event, Job


class Usage(NamedTuple):
    """Tokens of a response.

    cached: of those of the prompts, how many were in the cache. reasoning: of those of the answers, how many
    are of the reasoning.
    """

    prompt: int
    cached: int
    answer: int
    reasoning: int


@dataclasses.dataclass
class Choice:
    """One answer of a response.

    echo: the prompt's text, if it is to precede the answer. text: of the answer, so far. used: tokens that it
    took. reasoning_tokens: those of the reasoning. scored: tokens of which a stream has reported the
    log-probabilities. called: whether the answer has calls of tools.
    """

    index: int
    job: Job
    echo: str = ""
    text: str = ""
    used: int = 0
    reasoning_tokens: int = 0
    scored: int = 0
    finish_reason: str | None = None
    called: bool = False


class ApiResponse:
    """The response to a request, built from the events of its jobs. Each API has a subclass that writes it.

    It is one object, `whole`, or a stream: `first_chunks`, `chunks` for each event, and `last_chunks`, or
    `failed_chunks` in place of them.
    """

    end_of_stream = "data: [DONE]\n\n"

    def __init__(self, request: ApiRequest, jobs: list[Job]):
        self.request, self.served = request, request.served
        self.choices = {job: Choice(i, job) for i, job in enumerate(jobs)}

    def add(self, job: Job, event: Event) -> Choice:
        choice = self.choices[job]
        choice.text += event.text
        choice.used, choice.finish_reason = event.used, event.finish_reason
        choice.reasoning_tokens, choice.called = event.reasoning_tokens, choice.called or bool(event.calls)
        if choice.called and event.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        return choice

    def usage(self) -> Usage:
        """The tokens so far.

        A prompt counts once, however many samples it has. So a token of the prompt counts as cached only if
        it was cached for every sample: the first sample computes what the others reuse.
        """
        cached: dict[int, int] = {}
        for choice in self.choices.values():
            prompt, answer = choice.index // self.request.n, choice.job.answer
            reused = answer.reused if answer else 0  # without an answer, the job waits in the loop's inbox
            cached[prompt] = min(reused, cached.get(prompt, reused))
        prompts = sum(len(request.prompt) for request in self.request.requests[:: self.request.n])
        answers = sum(choice.used for choice in self.choices.values())
        reasoning = sum(choice.reasoning_tokens for choice in self.choices.values())
        return Usage(prompts, sum(cached.values()), answers, reasoning)

    def token_entries(self, choice: Choice, low: int, high: int) -> list[dict] | None:
        """Of the answer's tokens low to high, the log-probabilities and the likeliest tokens in their places.

        None if the request does not ask for them.
        """
        if self.request.logprobs is None:
            return None
        answer, entries = choice.job.answer, []
        for i in range(low, min(high, len(answer.tokens))):
            top = answer.top_logprobs[i] if answer.top_logprobs else {}
            likeliest = [self._entry(*x) for x in sorted(top.items(), key=lambda x: -x[1])]
            entry = self._entry(answer.tokens[i], answer.logprobs[i])
            entries.append(entry | dict(top_logprobs=likeliest))
        return entries

    def _entry(self, token: int, logprob: float) -> dict:
        own = self.bytes_of(token)
        return dict(token=text_of(own), logprob=finite(logprob), bytes=list(own))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none if the tokenizer, unlike the model, has no token of this id."""
        # Clients join the bytes of tokens to the text: null breaks them, and such an id adds no text.
        known = self.served.tokenizer.backend_tokenizer.id_to_token(token) is not None
        return self.served.grammar_tokenizer.decode_bytes([token]) if known else b""


class CompletionResponse(ApiResponse):
    """The response of /v1/chat/completions, or of /v1/completions."""

    def __init__(self, request: ApiRequest, jobs: list[Job]):
        super().__init__(request, jobs)
        if request.echo:
            for choice in self.choices.values():
                choice.echo = self._prompt_text(choice.index // request.n)
        of_chat = "chatcmpl", "chat.completion", "chat.completion.chunk"
        of_text = "cmpl", "text_completion", "text_completion"
        prefix, self.whole_kind, self.chunk_kind = of_chat if request.chat else of_text
        self.head = dict(id=f"{prefix}-{secrets.token_hex(12)}", object="", created=int(time.time()),
                         model=request.served.names[0])  # fmt: skip

    def _prompt_text(self, prompt: int) -> str:
        request, text = self.request, self.request.texts[prompt]
        if text is not None:
            return text
        tokens = request.requests[prompt * request.n].prompt.tolist()
        return b"".join(map(self.bytes_of, tokens)).decode(errors="replace")

    def whole(self) -> dict:
        """The whole response, when all choices have ended."""
        choices = []
        for choice in self.choices.values():
            found = dict(index=choice.index, finish_reason=choice.finish_reason)
            found |= dict(logprobs=self._logprobs(choice, 0, choice.used, echo=True))
            if self.request.chat:
                stream = choice.job.stream
                calls = [call_as_json(x) for x in stream.tool_calls if x.complete]
                message = dict(role="assistant", content=choice.text or (None if choice.called else ""))
                message |= dict(tool_calls=calls) if calls else {}
                message |= dict(reasoning_content=stream.reasoning) if stream.reasoning else {}
                found |= dict(message=message)
            else:
                found |= dict(text=choice.echo + choice.text)
            choices.append(found)
        return self.head | dict(object=self.whole_kind, choices=choices, usage=usage_as_json(self.usage()))

    def first_chunks(self) -> Iterator[dict]:
        """The chunks before any event: of a chat, one with the role for each choice."""
        if self.request.chat:
            for choice in self.choices.values():
                yield self._chunk(choice, delta=dict(role="assistant", content=""), finish_reason=None)

    def chunks(self, job: Job, event: Event) -> list[dict]:
        """Add an event: -> the chunks of the stream that report it."""
        choice = self.choices[job]
        first, before = not choice.text and not choice.used, choice.scored
        self.add(job, event)
        choice.scored = self._settled(choice)
        found = dict(logprobs=self._logprobs(choice, before, choice.scored, echo=first))
        if self.request.chat:
            new = dict(reasoning_content=event.reasoning, content=event.text)
            new |= dict(tool_calls=[dict(index=x.index) | call_as_json(x) for x in event.calls])
            found |= dict(delta={name: x for name, x in new.items() if x})
        else:
            found |= dict(text=(choice.echo if first else "") + event.text)
        return [self._chunk(choice, **found, finish_reason=choice.finish_reason)]

    def failed_chunks(self, message: str, status: int) -> Iterator[dict]:
        """The chunk after an error. status: HTTP's, had the stream not begun."""
        yield dict(error=dict(message=message, type="server_error", code=status))

    def _chunk(self, choice: Choice, **fields) -> dict:
        wanted = self.request.usage
        now = usage_as_json(self.usage()) if "continuous_usage_stats" in wanted else None
        usage = dict(usage=now) if "include_usage" in wanted else {}
        return self.head | dict(object=self.chunk_kind, choices=[dict(index=choice.index) | fields]) | usage

    def last_chunks(self) -> Iterator[dict]:
        """The chunk after all events: the usage, if the request asks for it."""
        if "include_usage" in self.request.usage:
            yield self.head | dict(object=self.chunk_kind, choices=[], usage=usage_as_json(self.usage()))

    def _settled(self, choice: Choice) -> int:
        """How many tokens of the answer have a final offset. A stop string may yet cut off the others."""
        if self.request.chat or choice.finish_reason:
            return choice.used
        return bisect.bisect(choice.job.stream.offsets, len(choice.text), hi=choice.used)

    def _logprobs(self, choice: Choice, low: int, high: int, echo: bool) -> dict | None:
        """Log-probabilities of the answer's tokens low to high; None if the request does not ask for them.

        echo: if the request echoes the prompt, precede them by those of the prompt's tokens.
        """
        if self.request.logprobs is None:
            return None
        if self.request.chat:
            return dict(content=self.token_entries(choice, low, high))
        answer = choice.job.answer
        tokens, logprobs = answer.tokens[low:high], answer.logprobs[low:high]
        tops = answer.top_logprobs[low:high] or [{}] * len(tokens)
        start, end = len(choice.echo), len(choice.echo) + len(choice.text)
        offsets = [min(start + offset, end) for offset in choice.job.stream.offsets[low:high]]
        if self.request.echo and echo:
            prompt = choice.job.request.prompt.tolist()
            tokens, logprobs = prompt + tokens, [None, *answer.prompt_logprobs, *logprobs]
            tops = [None, *(answer.prompt_top_logprobs or [{}] * (len(prompt) - 1)), *tops]
            offsets = prompt_offsets([self.bytes_of(token) for token in prompt], choice.echo) + offsets
        texts = [text_of(self.bytes_of(token)) for token in tokens]
        by_text = None
        if self.request.logprobs:
            rows = zip(tops, tokens, logprobs, strict=True)
            by_text = [top and self._by_text(top | {token: logprob}) for top, token, logprob in rows]
        return dict(tokens=texts, token_logprobs=[x if x is None else finite(x) for x in logprobs],
                    top_logprobs=by_text, text_offset=offsets)  # fmt: skip

    def _by_text(self, top: dict[int, float]) -> dict[str, float]:
        """Log-probabilities by the token's text, highest first; of tokens with one text the first counts."""
        found = {}
        for token, logprob in sorted(top.items(), key=lambda x: -x[1]):
            found.setdefault(text_of(self.bytes_of(token)), finite(logprob))
        return found


def usage_as_json(usage: Usage) -> dict:
    return dict(
        prompt_tokens=usage.prompt, completion_tokens=usage.answer, total_tokens=usage.prompt + usage.answer,
        prompt_tokens_details=dict(cached_tokens=usage.cached),
        completion_tokens_details=dict(reasoning_tokens=usage.reasoning),
    )  # fmt: skip


def call_as_json(call: ToolCall | CallPiece) -> dict:
    """A call; of a stream its first piece, or a later one, which adds to its arguments."""
    if call.id is None:
        return dict(function=dict(arguments=call.arguments))
    return dict(id=call.id, type="function", function=dict(name=call.name, arguments=call.arguments))


def text_of(token: bytes) -> str:
    """The text of one token, or its bytes if they are only part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{x:02x}" for x in token)


def prompt_offsets(tokens: list[bytes], text: str) -> list[int]:
    """Where each token of a prompt begins in its text: the offset of the character that has its first byte.

    tokens: their bytes. What the tokenizer adds before the text has offset 0. Offsets are approximate if the
    tokenizer normalizes the text.
    """
    whole = b"".join(tokens).decode(errors="replace")
    added = whole.rfind(text) if text in whole else max(len(whole) - len(text), 0)
    decoder, count, offsets = codecs.getincrementaldecoder("utf-8")("replace"), -added, []
    for token in tokens:
        incomplete, _ = decoder.getstate()
        begun = (incomplete + token[:1]).decode(errors="replace")  # ends with the character of the first byte
        offsets.append(min(max(count + len(begun[:-1]), 0), len(text)))
        count += len(decoder.decode(token))
    return offsets


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI's API writes -9999."""
    return logprob if math.isfinite(logprob) else -9999.0
