"""How replies are printed while they are computed: as streamed text or as lines, beside a progress bar."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable

import jax

from serving.engine import Stats
from terminal.answers import PromptReply
from terminal.output_file import OutputFile

Show = Callable[[list[PromptReply]], None]  # its argument: the replies that are done since the last call


def choose_printer(args: argparse.Namespace, replies: list[PromptReply], file: OutputFile | None) -> Show:
    """The function that prints or writes replies while they are computed; it does nothing with --json."""
    if file is not None:
        return file.show
    if args.json or jax.process_index() != 0:
        return lambda done: None
    if args.prompt_file:
        ascii = sys.stdout.encoding.lower() != "utf-8"
        return LinePrinter(replies, lambda reply: json.dumps(reply.as_json(), ensure_ascii=ascii)).show
    if args.score:
        return LinePrinter(replies, PromptReply.as_score).show
    return TextPrinter(replies).show


class TextPrinter:
    """Prints the texts of replies in order; the text of the first one that is not done is streamed."""

    def __init__(self, replies: list[PromptReply]):
        self.waiting = replies[::-1]
        self.begun = False  # whether the prompt of the first waiting reply is printed

    def show(self, _: list[PromptReply]) -> None:
        while self.waiting:
            reply = self.waiting[-1]
            if reply.answer is not None:
                self._print(reply)
            if not reply.done:
                break
            self.waiting.pop()
            self.begun = False
        sys.stdout.flush()

    def _print(self, reply: PromptReply) -> None:
        new = reply.take().text
        if not self.begun and (new or reply.done and reply.error is None):
            print(f"> {reply.prompt.title}{reply.sample_label}")
            self.begun = True
        if self.begun:
            print(new, end="\n\n" if reply.done else "")


class LinePrinter:
    """Prints a line for each reply, in order, as soon as it and those before it are done."""

    def __init__(self, replies: list[PromptReply], line: Callable[[PromptReply], str | None]):
        self.waiting, self.line = replies[::-1], line

    def show(self, _: list[PromptReply]) -> None:
        while self.waiting and self.waiting[-1].done:
            if (line := self.line(self.waiting.pop())) is not None:
                print(line)
        sys.stdout.flush()


def show_progress(bar, stats: Stats, show: Show, done: list[PromptReply]) -> None:
    """Print the replies that are done, and advance the progress bar."""
    bar.set_postfix_str(f"{stats.tokens / max(stats.seconds, 1e-9):,.0f} tokens/s", refresh=False)
    bar.update(len(done))
    with bar.external_write_mode(sys.stdout) if sys.stderr.isatty() else contextlib.nullcontext():
        show(done)
