"""How replies are printed while they are computed: as streamed text or as lines, beside a progress bar."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable

import jax

from serving.engine import Stats
from terminal.answers import PromptReply, score_line
from terminal.output_file import OutputFile

Show = Callable[[list[PromptReply]], None]  # its argument: the replies that are done since the last call


def choose_printer(args: argparse.Namespace, replies: list[PromptReply], file: OutputFile | None) -> Show:
    """The function that prints or writes replies while they are computed; it does nothing with --json."""
    if file is not None:
        return file.show
    if args.json or jax.process_index() != 0:
        return lambda done: None
    if args.prompt_file:
        return OrderedPrinter(replies, print_json).show
    return OrderedPrinter(replies, print_score if args.score else print_text).show


class OrderedPrinter:
    """Prints replies in order, the first one that is not done, too, as far as it has come.

    print_reply: called with a reply once it has come to its turn, until it is done.
    """

    def __init__(self, replies: list[PromptReply], print_reply: Callable[[PromptReply], None]):
        self.waiting, self.print_reply = replies[::-1], print_reply

    def show(self, _: list[PromptReply]) -> None:
        while self.waiting:
            self.print_reply(self.waiting[-1])
            if not self.waiting[-1].done:
                break
            self.waiting.pop()
        sys.stdout.flush()


def print_text(reply: PromptReply) -> None:
    """Print what is new in the text, after the prompt. Nothing for a prompt that is refused."""
    if reply.answer is None:
        return
    begun, text = reply.taken[0] > 0, reply.take().text
    if not begun and (text or reply.done and reply.error is None):
        print(f"> {reply.prompt.title}{reply.sample_label}")
        begun = True
    if begun:
        print(text, end="\n\n" if reply.done else "")


def print_json(reply: PromptReply) -> None:
    if reply.done:
        print(json.dumps(reply.as_json(), ensure_ascii=sys.stdout.encoding.lower() != "utf-8"))


def print_score(reply: PromptReply) -> None:
    if reply.done and reply.error is None:
        print(f"> {reply.prompt.title}\n{score_line(reply.score)}\n")


def show_progress(bar, stats: Stats, show: Show, done: list[PromptReply]) -> None:
    """Print the replies that are done, and advance the progress bar."""
    bar.set_postfix_str(f"{stats.tokens / max(stats.seconds, 1e-9):,.0f} tokens/s", refresh=False)
    bar.update(len(done))
    with bar.external_write_mode(sys.stdout) if sys.stderr.isatty() else contextlib.nullcontext():
        show(done)
