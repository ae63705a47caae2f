"""What is answered: as text or JSON, in the order of the prompts; a file that a later run goes on with."""

import codecs
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import BinaryIO

import jax

from checkpoints.errors import UserError
from checkpoints.progress import progress
from checkpoints.threads import no_garbage_collection
from serving.engine import Answer, Engine, Request, Stats
from serving.text import TextStream
from terminal.launch import LAPS, lap, log
from terminal.prompts import Asker, Prompt

MOST = 2**24  # answers at a time: there is a kilobyte of each before it is begun
LINE = b'{"index": '  # how a line of an output file begins


@dataclasses.dataclass(eq=False)
class Reply:
    """What becomes of a prompt, or of one of several samples for it: an answer, a score, or an error.

    index: the prompt's number, from 0. error: why there is no request, or why its answer broke off.
    new_stream: makes its stream, when it is wanted: of a million samples few are under way at a time.
    """

    index: int
    sample: int
    prompt: Prompt
    request: Request | None = None
    error: str | None = None
    answer: Answer | None = None
    new_stream: Callable[[], TextStream] | None = None

    @functools.cached_property
    def stream(self) -> TextStream:
        """The text of the answer."""
        return self.new_stream()

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

    def as_json(self, samples: int, logprobs: bool, score: bool) -> dict:
        """What the README says of it. samples, logprobs, score: what was asked for."""
        text = self.prompt.text
        found = dict(index=self.index) | (dict(sample=self.sample) if samples > 1 else {})
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
        return found | dict(tokens=self.answer.tokens[:used], text=self.stream.text, finish_reason=reason)

    def as_score(self) -> str | None:
        """What to print of it; of a refusal, nothing."""
        if self.error is not None:
            return None
        logprobs = self.answer.prompt_logprobs
        return f"> {self.prompt.title}\n{score_line(math.fsum(logprobs), len(logprobs))}\n"


def perplexity(log_likelihood: float, n: int) -> float | None:
    """Of n tokens; None of none, and beyond what a float holds."""
    return math.exp(-log_likelihood / n) if n and -log_likelihood / n < 700 else None


def score_line(log_likelihood: float, n: int) -> str:
    value = perplexity(log_likelihood, n)
    return f"log-likelihood {log_likelihood:,.4f} of {n} tokens" + (
        f", perplexity {value:,.4f}" if value else ""
    )


class TextPrinter:
    """Prints replies in order: what is new of the first that is not done; the others in their turn."""

    def __init__(self, replies: list[Reply], samples: int):
        self.waiting, self.samples = replies[::-1], samples
        self.printed = -1  # how much of the text of the first that waits; -1: not even its prompt

    def show(self, _: list[Reply]) -> None:
        while self.waiting:
            reply = self.waiting[-1]
            if reply.answer is not None:
                self._print(reply)
            if not reply.done:
                break
            self.waiting.pop()
            self.printed = -1
        sys.stdout.flush()

    def _print(self, reply: Reply) -> None:
        if self.printed < 0 and (reply.stream.text or reply.done and reply.error is None):
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
    of what the answer depends on.

    held: the keys of replies that are there already. Raises UserError if the file is of something else.
    """

    def __init__(
        self,
        name: str,
        replies: list[Reply],
        settings: Callable[[Reply], str],
        content: Callable[[Reply], dict],
    ):
        path = pathlib.Path(os.path.expanduser(name))
        self.name, self.settings, self.content = f"--output {name}", settings, content
        if path.exists() and not path.is_file():
            raise UserError(f"{self.name}: not a regular file")
        self.path = path.resolve()
        self.file = self._open()
        try:
            self.held = self._read({reply.key: reply for reply in replies})
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):  # of what could not be written, which `show` has said
            self.file.close()

    def _open(self) -> BinaryIO:
        """Open the file for this process alone."""
        file = open(self.path, "a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):  # replaced in between
                raise BlockingIOError
        except BlockingIOError:
            file.close()
            raise UserError(f"{self.name}: another process is writing to it") from None
        return file

    def _read(self, expected: dict[tuple[int, int], Reply]) -> set[tuple[int, int]]:
        """The keys of the lines that are there; empty ones, one cut short, and refusals are dropped, as is
        what an editor adds: a byte-order mark, other line ends.
        """
        self.file.seek(0)
        held = self.file.read()
        *lines, torn = (line.strip() for line in held.removeprefix(codecs.BOM_UTF8).split(b"\n"))
        parsed = [line and self._parse(line, i, expected) for i, line in enumerate(lines, 1)]
        kept = {key: line for key, line in zip(parsed, lines, strict=True) if key}
        if torn[: len(LINE)] != LINE[: len(torn)]:
            raise UserError(f"{self.name}, line {len(parsed) + 1}: not of an earlier run; give another file")
        if b"".join(line + b"\n" for line in kept.values()) != held:
            self._rewrite(list(kept.values()))
        return set(kept)

    def _parse(self, line: bytes, number: int, expected: dict) -> tuple[int, int] | None:
        """The key of a line; None if it is a refusal."""
        where = f"{self.name}, line {number}"
        try:
            found = json.loads(line)
            key = found["index"], found.get("sample", 0)
            reply = expected.get(key)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise UserError(f"{where}: not of an earlier run; give another file") from None
        if reply is None or reply.prompt.text != found.get("prompt", found.get("messages")):
            raise UserError(f"{where}: not an answer to these prompts; give another file")
        if "error" in found:
            return None
        if reply.error is None and found.get("settings") != self.settings(reply):
            raise UserError(f"{where}: made with another model or other options; give another file")
        return key

    def show(self, done: list[Reply]) -> None:
        for reply in done:
            settings = {} if reply.error is not None else dict(settings=self.settings(reply))
            self.file.write(json.dumps(self.content(reply) | settings, ensure_ascii=False).encode() + b"\n")
        try:
            self.file.flush()
        except OSError as e:
            raise OSError(f"{self.name}: {e.strerror}; run this again to go on from here") from None

    def finish(self) -> None:
        self.file.seek(0)
        lines = self.file.read().splitlines(keepends=True)
        ordered = sorted(lines, key=self._place)
        if ordered != lines:
            self._rewrite([line.removesuffix(b"\n") for line in ordered])

    def _place(self, line: bytes) -> tuple[int, int]:
        found = json.loads(line)
        return found["index"], found.get("sample", 0)

    def _rewrite(self, lines: list[bytes]) -> None:
        """Replace the file as a whole."""
        descriptor, beside = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name + ".")
        with open(descriptor, "wb") as file:
            file.write(b"".join(line + b"\n" for line in lines))
            os.fsync(file.fileno())
        shutil.copymode(self.path, beside)
        os.replace(beside, self.path)
        self.file.close()
        self.file = self._open()


def ask_all(asker: Asker, prompts: list[Prompt], samples: int) -> list[Reply]:
    """A reply for each sample of each prompt; a refusal, if it cannot be asked."""
    if (total := samples * len(prompts)) > MOST:
        raise UserError(f"--n {samples} of {len(prompts)} prompts: {total} answers; ask for at most {MOST}")
    replies, show = [], jax.process_index() == 0
    made = progress("requests", total, show=show, unit="request", delay=1)
    with made as bar, no_garbage_collection():  # all of it stays, and looking through it takes as long again
        for index, prompt in enumerate(prompts):
            try:
                tokens = asker.encode(prompt.text)
                for sample, request in enumerate(asker.requests(tokens, prompt.options, samples)):
                    replies.append(Reply(index, sample, prompt, request, new_stream=asker.stream))
                    bar.update()
            except UserError as e:
                error = f"{prompt.where}: {e}"
                replies += [Reply(index, sample, prompt, error=error) for sample in range(samples)]
                bar.update(samples)
    return replies


def refuse_longer(replies: list[Reply], max_len: int) -> None:
    """Refuse what is longer than the rows that were planned."""
    for reply in replies:
        if reply.error is None and reply.request.positions > max_len:
            what = f"it takes {reply.request.positions} positions, and memory holds rows of {max_len}"
            reply.error = f"{reply.prompt.where}: {what}"


def say_refused(replies: list[Reply], held: int) -> None:
    """Say which prompts are refused; UserError if all are and no answer is held."""
    refused = [reply.error for reply in replies if reply.error is not None and reply.sample == 0]
    if not held and all(reply.error is not None for reply in replies):
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise UserError(refused[0] + more)
    for error in refused:
        log("error:", error)


def answer(batch: Engine, replies: list[Reply], show: Callable[[list[Reply]], None]) -> None:
    """Answer all that is not refused. show: called after news, with the replies that are done since."""
    with no_garbage_collection():
        asked = {batch.add(reply.request): reply for reply in replies if reply.error is None}
    for given, reply in asked.items():
        reply.answer = given
    show([reply for reply in replies if reply.error is not None])
    while batch.busy:
        done = []
        for given in batch.advance():
            if (reply := asked.get(given)) is not None:
                reply.update()
                if given.error is not None:
                    reply.error = f"{reply.prompt.where}: {given.error}"
                    log("error:", reply.error)
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
    with bar.external_write_mode(sys.stdout) if sys.stderr.isatty() else contextlib.nullcontext():
        show(done)
