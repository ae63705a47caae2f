"""What is answered: as text or JSON, in the order of the prompts; a file that a later run goes on with."""

import dataclasses
import fcntl
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable

from generation import Answer, Batch, Request, Stats
from launch import LAPS, lap, log
from prompts import Asker, Prompt
from text import TextStream


@dataclasses.dataclass(eq=False)
class Reply:
    """What becomes of a prompt, or of one of several samples for it: an answer, a score, or a refusal.

    index: the prompt's number, from 0. error: why there is no request.
    """

    index: int
    sample: int
    prompt: Prompt
    request: Request | None = None
    error: str | None = None
    answer: Answer | None = None
    stream: TextStream | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.sample

    @property
    def done(self) -> bool:
        return self.error is not None or (self.answer is not None and self.answer.finish_reason is not None)

    def update(self) -> str:
        """-> the text that has become certain since the last call."""
        new = self.stream.add(self.answer.tokens[self.stream.used :])
        return new + self.stream.finish() if self.done else new

    def log_likelihood(self) -> float:
        return math.fsum(self.answer.prompt_logprobs)

    def perplexity(self) -> float | None:
        n = len(self.answer.prompt_logprobs)
        return math.exp(-self.log_likelihood() / n) if n else None

    def as_json(self, samples: int, logprobs: bool, score: bool) -> dict:
        """What the README says of it. samples, logprobs, score: what was asked for."""
        text = self.prompt.text
        found = dict(index=self.index) | (dict(sample=self.sample) if samples > 1 else {})
        found |= {"prompt" if isinstance(text, str) else "messages": text}
        if self.error is not None:
            return found | dict(error=self.error)
        found |= dict(prompt_tokens=self.request.prompt)
        if logprobs or score:
            found |= dict(prompt_logprobs=[None, *self.answer.prompt_logprobs])
        if score:
            return found | dict(log_likelihood=self.log_likelihood(), perplexity=self.perplexity())
        used = self.stream.used
        if logprobs:
            found |= dict(logprobs=self.answer.logprobs[:used])
        stopped = self.stream.stopped or self.answer.finish_reason == "stop"
        reason = "stop" if stopped else "length"
        return found | dict(tokens=self.answer.tokens[:used], text=self.stream.text, finish_reason=reason)

    def as_score(self) -> str | None:
        """What to print of it; of a refusal, nothing."""
        if self.error is not None:
            return None
        n = len(self.answer.prompt_logprobs)
        return f"> {self.prompt.title}\n{score_line(self.log_likelihood(), n)}\n"


def score_line(log_likelihood: float, n: int) -> str:
    perplexity = f", perplexity {math.exp(-log_likelihood / n):,.4f}" if n else ""
    return f"log-likelihood {log_likelihood:,.4f} of {n} tokens{perplexity}"


class TextPrinter:
    """Prints replies in order: what is new of the first that is not done; the others in their turn."""

    def __init__(self, replies: list[Reply], samples: int):
        self.waiting, self.samples = replies[::-1], samples
        self.printed = -1  # how much of the text of the first that waits; -1: not even its prompt

    def show(self, _: list[Reply]) -> None:
        while self.waiting:
            reply = self.waiting[-1]
            if reply.error is None:
                self._print(reply)
            if not reply.done:
                break
            self.waiting.pop()
            self.printed = -1
        sys.stdout.flush()

    def _print(self, reply: Reply) -> None:
        if self.printed < 0 and (reply.stream.text or reply.done):
            which = f" ({reply.sample + 1} of {self.samples})" if self.samples > 1 else ""
            print(f"> {reply.prompt.title}{which}")
            self.printed = 0
        if self.printed >= 0:
            print(reply.stream.text[self.printed :], end="\n\n" if reply.done else "")
            self.printed = len(reply.stream.text)


class LinePrinter:
    """Prints the line of each reply, in order, as soon as it and those before it are done."""

    def __init__(self, replies: list[Reply], line: Callable[[Reply], str | None]):
        self.waiting, self.line = replies[::-1], line

    def show(self, _: list[Reply]) -> None:
        while self.waiting and self.waiting[-1].done:
            if (line := self.line(self.waiting.pop())) is not None:
                print(line)
        sys.stdout.flush()


class OutputFile:
    """A file of JSON lines that is whole after every line, and that a later run goes on with.

    The line of a reply is written when it is done; `finish` puts all in order. Each has `settings`, a digest
    of what its answer depends on.

    held: the keys of replies that are there already. Raises ValueError if the file is of something else.
    """

    def __init__(self, name: str, replies: list[Reply], settings: str, content: Callable[[Reply], dict]):
        self.path, self.settings = pathlib.Path(os.path.realpath(os.path.expanduser(name))), settings
        self.name, self.content = f"--output {name}", content
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self.name}: not a regular file")
        self.file = open(self.path, "a+b", buffering=0)
        try:
            self.held = self._read({reply.key: reply for reply in replies})
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def _read(self, expected: dict[tuple[int, int], Reply]) -> set[tuple[int, int]]:
        """The keys of the lines that are there; what is cut short, and refusals, are dropped."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.name}: another process is writing to it") from None
        self.file.seek(0)
        *lines, torn = self.file.read().split(b"\n")
        parsed = [self._parse(line, i, expected) for i, line in enumerate(lines, 1)]
        kept = {key: line for key, line in zip(parsed, lines, strict=True) if key}
        if torn or len(kept) < len(lines):
            self._rewrite(list(kept.values()))
        return set(kept)

    def _parse(self, line: bytes, number: int, expected: dict) -> tuple[int, int] | None:
        """The key of a line; None if it is a refusal."""
        where = f"{self.name}, line {number}"
        try:
            found = json.loads(line)
            key, settings = (found["index"], found.get("sample", 0)), found["settings"]
            reply = expected.get(key)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{where}: not of an earlier run; give another file") from None
        if reply is None or reply.prompt.text != found.get("prompt", found.get("messages")):
            raise ValueError(f"{where}: an answer to another prompt; give another file")
        if "error" in found:
            return None
        if settings != self.settings:
            raise ValueError(f"{where}: made with another model or other options; give another file")
        return key

    def show(self, done: list[Reply]) -> None:
        for reply in done:
            line = json.dumps(self.content(reply) | dict(settings=self.settings), ensure_ascii=False)
            self.file.write(line.encode() + b"\n")

    def finish(self) -> None:
        self.file.seek(0)
        lines = self.file.read().splitlines()
        ordered = sorted(lines, key=self._place)
        if ordered != lines:
            self._rewrite(ordered)

    def _place(self, line: bytes) -> tuple[int, int]:
        found = json.loads(line)
        return found["index"], found.get("sample", 0)

    def _rewrite(self, lines: list[bytes]) -> None:
        """Replace the file as a whole."""
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_bytes(b"".join(line + b"\n" for line in lines))
        os.replace(beside, self.path)
        self.file.close()
        self.file = open(self.path, "a+b", buffering=0)
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def ask_all(asker: Asker, prompts: list[Prompt], samples: int) -> list[Reply]:
    """A reply for each sample of each prompt; a refusal, if it cannot be asked."""

    def ask(index: int, prompt: Prompt, sample: int) -> Reply:
        reply = Reply(index, sample, prompt)
        try:
            reply.request = asker.request(asker.encode(prompt.text), prompt.options, sample)
            reply.stream = asker.stream()
        except ValueError as e:
            reply.error = f"{prompt.where}: {e}"
        return reply

    return [ask(i, prompt, sample) for i, prompt in enumerate(prompts) for sample in range(samples)]


def refuse_longer(replies: list[Reply], max_len: int) -> None:
    """Refuse what is longer than the rows that were planned."""
    for reply in replies:
        if reply.error is None and reply.request.positions > max_len:
            what = f"it takes {reply.request.positions} positions, and memory holds rows of {max_len}"
            reply.error = f"{reply.prompt.where}: {what}"


def say_refused(replies: list[Reply]) -> None:
    """Say which prompts are refused; ValueError if all are."""
    refused = [reply.error for reply in replies if reply.error is not None and reply.sample == 0]
    if all(reply.error is not None for reply in replies):
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ValueError(refused[0] + more)
    for error in refused:
        log("error:", error)


def answer(batch: Batch, replies: list[Reply], show: Callable[[list[Reply]], None]) -> None:
    """Answer all that is not refused. show: called after news, with the replies that are done since."""
    asked = {batch.add(reply.request): reply for reply in replies if reply.error is None}
    for given, reply in asked.items():
        reply.answer = given
    show([reply for reply in replies if reply.error is not None])
    while batch.busy:
        done = []
        for given in batch.advance():
            if (reply := asked.get(given)) is not None:
                reply.update()
                if reply.stream.stopped:
                    batch.cancel(given)
                if reply.done:
                    done.append(asked.pop(given))
        if batch.stats.filled and "prefill" not in LAPS:
            lap("prefill")
        show(done)


def show_progress(bar, stats: Stats, show: Callable[[list[Reply]], None], done: list[Reply]) -> None:
    """Show the replies that are done, and how far all is."""
    bar.set_postfix_str(f"{stats.tokens / max(stats.seconds, 1e-9):,.0f} tokens/s", refresh=False)
    bar.update(len(done))
    with bar.external_write_mode(sys.stdout):
        show(done)
