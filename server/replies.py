"""What the API replies: OpenAI's objects, whole and in parts."""

import dataclasses
import math
import secrets
import time
from collections.abc import Iterator

from llguidance import LLTokenizer

from server.loop import Job, News
from server.questions import Question


@dataclasses.dataclass
class Choice:
    """One of the answers. prompt: what is echoed. text, used: what has been told, and in how many tokens."""

    index: int
    job: Job
    prompt: str
    text: str = ""
    used: int = 0
    offset: int = 0  # of the next token in the text, in characters
    finish_reason: str | None = None


class Reply:
    """All that is told in answer to a question."""

    def __init__(self, question: Question, jobs: list[Job]):
        self.question, self.tokens = question, question.served.tokens
        self.choices = {job: Choice(i, job, self._echo(i // question.n)) for i, job in enumerate(jobs)}
        of_chat = "chatcmpl", "chat.completion", "chat.completion.chunk"
        of_text = "cmpl", "text_completion", "text_completion"
        kind, self.whole_kind, self.part_kind = of_chat if question.chat else of_text
        self.head = dict(id=f"{kind}-{secrets.token_hex(12)}", object="", created=int(time.time()),
                         model=question.served.names[0])  # fmt: skip

    def _echo(self, prompt: int) -> str:
        """What comes before the answers to this prompt."""
        question, text = self.question, self.question.texts[prompt]
        if not question.echo:
            return ""
        if text is not None:
            return text
        return self.tokens.decode_str(question.requests[prompt * question.n].prompt.tolist())

    def whole(self) -> dict:
        """After the end of all choices."""
        choices = []
        for choice in self.choices.values():
            found = dict(index=choice.index, finish_reason=choice.finish_reason, logprobs=None)
            logprobs = self._logprobs(choice, 0, choice.used, whole=True)
            if self.question.chat:
                found |= dict(message=dict(role="assistant", content=choice.text), logprobs=logprobs)
            else:
                found |= dict(text=choice.prompt + choice.text, logprobs=logprobs)
            choices.append(found)
        return self.head | dict(object=self.whole_kind, choices=choices, usage=self.usage())

    def beginnings(self) -> Iterator[dict]:
        """What is streamed before there is anything to tell: whose turn it is."""
        if self.question.chat:
            for choice in self.choices.values():
                yield self._part(choice, delta=dict(role="assistant", content=""), finish_reason=None)

    def note(self, job: Job, news: News) -> None:
        choice = self.choices[job]
        choice.text += news.text
        choice.used, choice.finish_reason = news.used, news.finish_reason

    def part(self, job: Job, news: News) -> dict:
        """What is streamed of the news."""
        choice = self.choices[job]
        first, before = not choice.text and not choice.used, choice.used
        self.note(job, news)
        logprobs = self._logprobs(choice, before, choice.used, whole=first)
        if self.question.chat:
            delta = dict(content=news.text) if news.text else {}
            return self._part(choice, delta=delta, logprobs=logprobs, finish_reason=choice.finish_reason)
        text = (choice.prompt if first else "") + news.text
        return self._part(choice, text=text, logprobs=logprobs, finish_reason=choice.finish_reason)

    def _part(self, choice: Choice, **what) -> dict:
        wanted = self.question.usage
        now = self.usage() if "continuous_usage_stats" in wanted else None
        usage = dict(usage=now) if "include_usage" in wanted else {}
        return self.head | dict(object=self.part_kind, choices=[dict(index=choice.index) | what]) | usage

    def last_part(self) -> dict | None:
        """The usage, if it is asked for."""
        if "include_usage" not in self.question.usage:
            return None
        return self.head | dict(object=self.part_kind, choices=[], usage=self.usage())

    def usage(self) -> dict:
        prompts = sum(len(request.prompt) for request in self.question.requests[:: self.question.n])
        answers = sum(choice.used for choice in self.choices.values())
        return dict(prompt_tokens=prompts, completion_tokens=answers, total_tokens=prompts + answers)

    def _logprobs(self, choice: Choice, low: int, high: int, whole: bool) -> dict | None:
        """Of the answer's tokens low to high; whole: and of the prompt's, if it is echoed."""
        if self.question.logprobs is None:
            return None
        answer = choice.job.answer
        tokens, logprobs = answer.tokens[low:high], answer.logprobs[low:high]
        likeliest = answer.top_logprobs[low:high] or [{}] * len(tokens)
        if self.question.chat:
            entries = zip(tokens, logprobs, likeliest, strict=True)
            return dict(content=[
                self._entry(token, logprob)
                | dict(top_logprobs=[self._entry(*x) for x in sorted(top.items(), key=lambda x: -x[1])])
                for token, logprob, top in entries
            ])  # fmt: skip
        if self.question.echo and whole:
            prompt = choice.job.request.prompt.tolist()
            tokens, logprobs = prompt + tokens, [None, *answer.prompt_logprobs, *logprobs]
            likeliest = [None, *(answer.prompt_top_logprobs or [{}] * (len(prompt) - 1)), *likeliest]
        texts = [text_of(token, self.tokens) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(choice.offset)
            choice.offset += len(text)
        tops = None
        if self.question.logprobs:
            tops = [
                top and self._top(top, token, own)
                for top, token, own in zip(likeliest, tokens, logprobs, strict=True)
            ]
        return dict(tokens=texts, token_logprobs=[x if x is None else finite(x) for x in logprobs],
                    top_logprobs=tops, text_offset=offsets)  # fmt: skip

    def _top(self, top: dict[int, float], token: int, logprob: float) -> dict[str, float]:
        """By text, the likeliest first, of alike ones the likelier; the token itself is among them."""
        found = {}
        for x, value in sorted((top | {token: logprob}).items(), key=lambda x: -x[1]):
            found.setdefault(text_of(x, self.tokens), finite(value))
        return found

    def _entry(self, token: int, logprob: float) -> dict:
        own = self.tokens.decode_bytes([token])
        return dict(token=text_of(token, self.tokens), logprob=finite(logprob), bytes=list(own))


def text_of(token: int, tokens: LLTokenizer) -> str:
    """A token alone: its text, or its bytes if they are a part of a character."""
    own = tokens.decode_bytes([token])
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{x:02x}" for x in own)


def finite(logprob: float) -> float:
    """As JSON can hold it."""
    return logprob if math.isfinite(logprob) else -9999.0
