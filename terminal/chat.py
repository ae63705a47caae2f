"""A conversation in the terminal, or over a pipe: each line a turn, each answer as it is made."""

import argparse
import os
import re
import signal
import sys
import time

import jax

from checkpoints.errors import UserError
from serving.engine import Engine
from serving.memory import Deployment, fit_cache
from serving.requests import Request
from serving.text import TextStream, has_surrogate
from terminal.launch import Startup, log
from terminal.models import start_engine
from terminal.prompts import NOT_TEXT, Asker

POSITIONS = 4096  # of a conversation, unless --max-len or the model say otherwise
PATIENCE = 2.0  # seconds after which a second Ctrl-C leaves at once
HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


class Interrupts:
    """Ctrl-C: while an answer is made, a note to end it; else KeyboardInterrupt."""

    def __init__(self):
        self.answering, self.since = False, None  # when the answer was to end
        self.before = signal.signal(signal.SIGINT, self._hear)
        # From `hear_signals`, whose thread hears what the main thread does not.
        self.blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(self, *_) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
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
        if has_surrogate(line):
            log(NOT_TEXT)
        elif line.strip():
            return line


def say(engine: Engine, request: Request, stream: TextStream, interrupts: Interrupts) -> str:
    """Print the answer as it is made, and return it; an interrupt ends it. "" if it breaks off."""
    interrupts.answering, interrupts.since = True, None
    answer = engine.add(request)
    while engine.busy:
        engine.advance()
        print(stream.add(answer.tokens[stream.used :]), end="", flush=True)
        if stream.stopped or interrupts.since is not None:
            engine.cancel(answer)
    print(stream.finish(), flush=True)
    interrupts.answering = False
    if answer.error is not None:
        log("error:", answer.error)
        return ""
    if answer.finish_reason == "length":
        log(f"(cut at {len(answer.tokens)} tokens)")
    return stream.text


def chat(args: argparse.Namespace, models: list[Deployment], asker: Asker, startup: Startup) -> None:
    """--chat: one row, in which the conversation stays. Exit code 1 if an answer broke off."""
    if not asker.templated:
        raise UserError(f"--chat: the tokenizer in {args.checkpoint} has no chat template")
    if jax.process_count() > 1:
        raise UserError("--chat works on one host; this is one of several")
    if args.max_len is None:
        asker.limit, asker.why = min(asker.limit, POSITIONS), "the room for a conversation, --max-len,"
    asker.new_tokens = asker.limit
    rows, max_len = fit_cache(models, [asker.limit], None, asker.limit)
    like = asker.request([0], {})
    engine = start_engine(args, models, rows, max_len, [like], startup, longest=max_len)
    converse(engine, asker)
    if engine.stats.failed:
        sys.exit(1)


def converse(engine: Engine, asker: Asker) -> None:
    """Talk until the end of the input."""
    interactive, turns = sys.stdin.isatty(), []
    if interactive:
        import readline  # noqa: F401  lines can be edited, and earlier ones called back

        log(HELP)
    with Interrupts() as interrupts:
        while turns is not None:
            try:
                line = read_turn("> " if interactive else "")
                turns = obey(engine, asker, turns, line or "/exit", interrupts)
            except KeyboardInterrupt:  # of a line that was being typed
                log("\n" + HELP)


def obey(
    engine: Engine, asker: Asker, turns: list[dict], line: str, interrupts: Interrupts
) -> list[dict] | None:
    """Do what a line says: -> the turns so far, or None at the end."""
    command = line.strip()
    if command == "/exit":
        return None
    if command == "/reset":
        log("a new conversation")
        return []
    if re.fullmatch(r"/[a-z]+|/(reset|exit)\b.*", command, re.I):
        log(f"no such command: {command}; {HELP}")
        return turns
    return take_turn(engine, asker, turns, line, interrupts)


def take_turn(
    engine: Engine, asker: Asker, turns: list[dict], line: str, interrupts: Interrupts
) -> list[dict]:
    """Answer a line: -> the turns so far, with it and the answer, if there is one."""
    asked = [*turns, {"role": "user", "content": line}]
    try:
        request = asker.request(asker.encode(asked), {})
    except UserError as e:
        log(f"{e}; /reset begins anew" if turns else e)
        return turns
    said = say(engine, request, asker.stream(), interrupts)
    return [*asked, {"role": "assistant", "content": said}] if said.strip() else turns
