"""--chat: a conversation in the terminal or over a pipe, one turn per line. Answers are streamed."""

import os
import re
import signal
import sys
import time

import jax

from conversation.messages import has_surrogate
from conversation.streams import TextStream
from deployment.memory import fit_cache
from feedback.errors import UserError
from serving.engine import Engine
from serving.requests import Request
from terminal.diagnostics import profiled
from terminal.launch import log
from terminal.loaded_models import Session
from terminal.prompts import NOT_TEXT, RequestBuilder

FAINT, PLAIN = "\x1b[2m", "\x1b[0m"  # of a terminal's letters
HANGING = 2.0  # seconds after a first Ctrl-C from which on a second one ends the process at once
HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


class Interrupts:
    """Handles Ctrl-C: during an answer it sets `since`, otherwise it raises KeyboardInterrupt.

    since: when the first Ctrl-C of this answer came, in time.monotonic.
    """

    def __init__(self):
        self.answering, self.since = False, None
        self.before = signal.signal(signal.SIGINT, self._handle)
        # `exit_on_signals` has blocked the signal: a thread of its own waits for it.
        self.blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(self, *_) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        signal.signal(signal.SIGINT, self.before)

    def _handle(self, *_) -> None:
        if not self.answering:
            raise KeyboardInterrupt
        if self.since is not None and time.monotonic() - self.since > HANGING:  # a step hangs
            os.write(2, b"interrupted\n")
            os._exit(130)
        self.since = self.since or time.monotonic()


def read_turn(prompt: str) -> str | None:
    """The next line that is not empty; None at the end of the input."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except UnicodeDecodeError:
            line = "\udc80"  # has_surrogate refuses it
        if has_surrogate(line):
            log(NOT_TEXT)
        elif line.strip():
            return line


class AnswerPrinter:
    """Prints an answer while it grows.

    Its reasoning is printed in faint letters and only in a terminal: elsewhere nothing would tell it from the
    answer.
    """

    def __init__(self, stream: TextStream):
        self.stream, self.with_reasoning = stream, sys.stdout.isatty()
        self.reasoning = self.text = 0  # how many characters of each are printed

    def print(self) -> None:
        """Print what is new in the stream."""
        new = self.stream.reasoning[self.reasoning :] if self.with_reasoning else ""
        text = self.stream.text[self.text :]
        gap = "\n\n" if text and not self.text and (new or self.reasoning) else ""
        print((f"{FAINT}{new}{PLAIN}" if new else "") + gap + text, end="", flush=True)
        self.reasoning, self.text = self.reasoning + len(new), self.text + len(text)


def stream_answer(engine: Engine, request: Request, stream: TextStream, interrupts: Interrupts) -> str:
    """Print an answer while it grows, until an interrupt: -> its text, "" after an error."""
    interrupts.answering, interrupts.since = True, None
    answer, printer = engine.add(request), AnswerPrinter(stream)
    while engine.busy:
        engine.advance()
        stream.add(answer.tokens[stream.used :])
        printer.print()
        if stream.stopped or interrupts.since is not None:
            engine.cancel(answer)
    stream.finish()
    printer.print()
    print(flush=True)
    interrupts.answering = False
    if answer.error is not None:
        log("error:", answer.error)
        return ""
    if answer.finish_reason == "length":
        log(f"(cut at {len(answer.tokens)} tokens{', within the reasoning' * stream.only_reasons})")
    return stream.text


def chat(session: Session) -> None:
    """Chat in one row of the cache. Exit code 1 if an answer ended with an error."""
    builder = session.builder
    if not builder.templated:
        raise UserError(f"--chat: the tokenizer in {session.args.checkpoint} has no chat template")
    if jax.process_count() > 1:
        raise UserError("--chat works on one host; this is one of several")
    rows, max_len = fit_cache(session.models, [builder.limit], None, builder.limit)
    engine = session.start_engine(rows, max_len, [builder.request([0], {})], longest=max_len)
    with profiled(engine, session.args.profile):
        converse(engine, builder)
    if engine.stats.failed:
        sys.exit(1)


def converse(engine: Engine, builder: RequestBuilder) -> None:
    """Answer each line until the end of the input."""
    interactive, turns = sys.stdin.isatty(), []
    if interactive:
        import readline  # noqa: F401  it gives input() line editing and a history

        log(HELP)
    with Interrupts() as interrupts:
        while turns is not None:
            try:
                line = read_turn("> " if interactive else "")
                turns = execute(engine, builder, turns, line or "/exit", interrupts)
            except KeyboardInterrupt:  # while a line was being typed
                log("\n" + HELP)


def execute(
    engine: Engine, builder: RequestBuilder, turns: list[dict], line: str, interrupts: Interrupts
) -> list[dict] | None:
    """Execute a line, a command or a turn: -> the messages of the conversation, or None to leave."""
    command = line.strip()
    if command == "/exit":
        return None
    if command == "/reset":
        log("a new conversation")
        return []
    if re.fullmatch(r"/[a-z]+|/(reset|exit)\b.*", command, re.I):
        log(f"no such command: {command}; {HELP}")
        return turns
    return take_turn(engine, builder, turns, line, interrupts)


def take_turn(
    engine: Engine, builder: RequestBuilder, turns: list[dict], line: str, interrupts: Interrupts
) -> list[dict]:
    """Answer a line: -> the messages, with the line and its answer appended if there is one."""
    asked = [*turns, {"role": "user", "content": line}]
    try:
        request = builder.request(builder.encode(asked), {})
    except UserError as e:
        log(f"{e}; /reset begins anew" if turns else e)
        return turns
    answer = stream_answer(engine, request, builder.new_stream(request), interrupts)
    return [*asked, {"role": "assistant", "content": answer}] if answer.strip() else turns
