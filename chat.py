"""A conversation in the terminal, or over a pipe: each line a turn, each answer as it is made."""

import os
import signal
import sys

from generation import Batch, Request
from launch import log
from prompts import Asker, is_broken
from text import TextStream

HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


def read_turn(prompt: str) -> str | None:
    """The next line that says something; None at the end. An interrupt only begins the line anew."""
    while True:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except KeyboardInterrupt:
            log("\n" + HELP)
            continue
        except UnicodeDecodeError:
            log("not valid text in this terminal's encoding")
            continue
        if is_broken(line):
            log("not valid text in this terminal's encoding")
        elif line.strip():
            return line


def say(batch: Batch, request: Request, stream: TextStream) -> str:
    """Print the answer as it is made, and return it; an interrupt ends it."""
    interrupts = []

    def interrupt(*_) -> None:
        interrupts.append(1)
        if len(interrupts) > 1:  # the first has not been heard: a step hangs
            os.write(2, b"interrupted\n")
            os._exit(130)

    signal.signal(signal.SIGINT, interrupt)
    answer = batch.add(request)
    while batch.busy:
        batch.advance()
        print(stream.add(answer.tokens[stream.used :]), end="", flush=True)
        if stream.stopped or interrupts:
            batch.cancel(answer)
    print(stream.finish(), flush=True)
    return stream.text


def converse(batch: Batch, asker: Asker) -> None:
    """Talk until the end of the input."""
    turns, interactive = [], sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  lines can be edited, and earlier ones called back

        log(HELP)
    while (line := read_turn("> " if interactive else "")) is not None:
        command = line.strip()
        if command == "/exit":
            break
        if command == "/reset":
            turns = []
            log("a new conversation")
            continue
        if command.startswith("/") and command[1:].isalpha():
            log(f"no such command: {command}; {HELP}")
            continue
        asked = [*turns, {"role": "user", "content": line}]
        try:
            request = asker.request(asker.encode(asked), {})
        except ValueError as e:
            log(f"{e}; /reset begins anew")
            continue
        said = say(batch, request, asker.stream())
        if said.strip():
            turns = [*asked, {"role": "assistant", "content": said}]
