"""How replies are printed while they are computed: as streamed text or as lines, beside a progress bar."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable

import jax

from serving.engine import Stats
from terminal.answers import Reply
from terminal.output_file import OutputFile

Show = Callable[[list[Reply]], None]  # its argument: the replies that are done since the last call


def choose_printer(
    args: argparse.Namespace, replies: list[Reply], file: OutputFile | None, content: Callable[[Reply], dict]
) -> Show:
    """The function that prints or writes replies while they are computed; it does nothing with --json."""
    if file is not None:
        return file.show
    if args.json or jax.process_index() != 0:
        return lambda done: None
    if args.prompt_file:
        ascii = sys.stdout.encoding.lower() != "utf-8"
        return LinePrinter(replies, lambda reply: json.dumps(content(reply), ensure_ascii=ascii)).show
    if args.score:
        return LinePrinter(replies, Reply.as_score).show
    return TextPrinter(replies).show


class TextPrinter:
    """Prints the texts of replies in order; the text of the first one that is not done is streamed."""

    def __init__(self, replies: list[Reply]):
        self.waiting = replies[::-1]
        self.printed = -1  # characters of the first waiting reply; -1: not even its prompt

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
            print(f"> {reply.prompt.title}{reply.sample_label}")
            self.printed = 0
        if self.printed >= 0:
            print(reply.stream.text[self.printed :], end="\n\n" if reply.done else "")
            self.printed = len(reply.stream.text)


class LinePrinter:
    """Prints a line for each reply, in order, as soon as it and those before it are done."""

    def __init__(self, replies: list[Reply], line: Callable[[Reply], str | None]):
        self.waiting, self.line = replies[::-1], line

    def show(self, _: list[Reply]) -> None:
        while self.waiting and self.waiting[-1].done:
            if (line := self.line(self.waiting.pop())) is not None:
                print(line)
        sys.stdout.flush()


def show_progress(bar, stats: Stats, show: Show, done: list[Reply]) -> None:
    """Print the replies that are done, and advance the progress bar."""
    bar.set_postfix_str(f"{stats.tokens / max(stats.seconds, 1e-9):,.0f} tokens/s", refresh=False)
    bar.update(len(done))
    with bar.external_write_mode(sys.stdout) if sys.stderr.isatty() else contextlib.nullcontext():
        show(done)
