"""A conversation in the terminal, or over a pipe: each line a turn, each answer as it is made."""

import os
import re
import signal
import sys
import time

from checkpoints.errors import UserError
from serving.engine import Engine, Request
from serving.text import TextStream
from terminal.launch import log
from terminal.prompts import Asker, is_broken

PATIENCE = 2.0  # seconds after which a second Ctrl-C leaves at once
HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


class Interrupts:
    """Ctrl-C: while an answer is made, a note to end it; else KeyboardInterrupt."""

    def __init__(self):
        self.answering, self.since = False, None  # when the answer was to end
        self.before = signal.signal(signal.SIGINT, self._hear)

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _hear(self, *_) -> None:
        if not self.answering:
            raise KeyboardInterrupt
        if self.since is not None and time.monotonic() - self.since > PATIENCE:  # a step hangs
            os.write(2, b"interrupted\n")
            os._exit(130)
        self.since = self.since or time.monotonic()


def read_turn(prompt: str) -> str | None:
    """The next line that says something; None at the end."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except UnicodeDecodeError:
            line = "\udc80"
        if is_broken(line):
            log("not valid text in this terminal's encoding")
        elif line.strip():
            return line


def say(batch: Engine, request: Request, stream: TextStream, interrupts: Interrupts) -> str:
    """Print the answer as it is made, and return it; an interrupt ends it. "" if it breaks off."""
    interrupts.answering, interrupts.since = True, None
    answer = batch.add(request)
    while batch.busy:
        batch.advance()
        print(stream.add(answer.tokens[stream.used :]), end="", flush=True)
        if stream.stopped or interrupts.since is not None:
            batch.cancel(answer)
    print(stream.finish(), flush=True)
    interrupts.answering = False
    if answer.error is not None:
        log("error:", answer.error)
        return ""
    if answer.finish_reason == "length":
        log(f"(cut at {len(answer.tokens)} tokens)")
    return stream.text


def converse(batch: Engine, asker: Asker) -> None:
    """Talk until the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  lines can be edited, and earlier ones called back

        log(HELP)
    with Interrupts() as interrupts:
        talk(batch, asker, "> " if interactive else "", interrupts)


def talk(batch: Engine, asker: Asker, prompt: str, interrupts: Interrupts) -> None:
    turns = []
    while True:
        try:
            line = read_turn(prompt)
            command = (line or "/exit").strip()
            if command == "/exit":
                return
            if command == "/reset":
                turns = []
                log("a new conversation")
            elif re.fullmatch(r"/[a-z]+|/(reset|exit)\b.*", command, re.I):
                log(f"no such command: {command}; {HELP}")
            else:
                turns = take_turn(batch, asker, turns, line, interrupts)
        except KeyboardInterrupt:  # of a line that was being typed
            log("\n" + HELP)


def take_turn(
    batch: Engine, asker: Asker, turns: list[dict], line: str, interrupts: Interrupts
) -> list[dict]:
    """Answer a line: -> the turns so far, with it and the answer, if there is one."""
    asked = [*turns, {"role": "user", "content": line}]
    try:
        request = asker.request(asker.encode(asked), {})
    except UserError as e:
        log(f"{e}; /reset begins anew" if turns else e)
        return turns
    said = say(batch, request, asker.stream(), interrupts)
    return [*asked, {"role": "assistant", "content": said}] if said.strip() else turns
