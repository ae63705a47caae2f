"""--chat: a conversation in the terminal or over a pipe, one turn per line. Answers are streamed."""

import os
import re
import signal
import sys
import time

import jax

from conversation.messages import has_surrogate
from deployment.memory import fit_cache
from feedback.errors import UserError
from generation.replies import Replies, Reply
from generation.request_builder import NOT_TEXT, RequestBuilder
from serving.engine import Engine
from serving.needed import demand_of
from terminal.diagnostics import profiled
from terminal.launch import log
from terminal.loaded_models import Session

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


def print_new(reply: Reply) -> None:
    """Print what has come of an answer since the last time.

    Its reasoning is printed in faint letters and only in a terminal: elsewhere nothing would tell it from the
    answer.
    """
    event, terminal = reply.take(), sys.stdout.isatty()
    reasoning = event.reasoning if terminal else ""
    text_begins = event.text and event.text == reply.stream.text
    gap = "\n\n" if text_begins and terminal and reply.stream.reasoning else ""
    print((f"{FAINT}{reasoning}{PLAIN}" if reasoning else "") + gap + event.text, end="", flush=True)


def stream_answer(engine: Engine, reply: Reply, interrupts: Interrupts) -> str:
    """Print an answer while it grows, until an interrupt: -> its text, "" after an error."""
    interrupts.answering, interrupts.since = True, None
    replies = Replies(engine)
    replies.add(reply)
    while engine.busy:
        replies.advance()
        if interrupts.since is not None and replies.cancel(reply):
            reply.stream.finish()
        print_new(reply)
    print(flush=True)
    interrupts.answering = False
    if reply.error is not None:
        log("error:", reply.error)
        return ""
    if reply.finish_reason == "length":
        stream = reply.stream
        log(f"(cut at {stream.used} tokens{', within the reasoning' * stream.only_reasons})")
    return reply.stream.text


def chat(session: Session) -> None:
    """Chat in one row of the cache. Exit code 1 if an answer ended with an error."""
    builder = session.builder
    if not builder.templated:
        raise UserError(f"--chat: the tokenizer in {session.args.checkpoint} has no chat template")
    if jax.process_count() > 1:
        raise UserError("--chat works on one host; this is one of several")
    rows, max_len = fit_cache(session.models, [builder.max_len], None, builder.max_len)
    demand = demand_of([builder.request_for([0])], longest=max_len)
    engine, _ = session.start_engine(rows, max_len, demand)
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
        while True:
            try:
                line = read_turn("> " if interactive else "") or "/exit"
                command = line.strip()
                if command == "/exit":
                    return
                if command == "/reset":
                    turns = []
                    log("a new conversation")
                elif re.fullmatch(r"/[a-z]+|/(reset|exit)\b.*", command, re.I):
                    log(f"no such command: {command}; {HELP}")
                else:
                    turns = take_turn(engine, builder, turns, line, interrupts)
            except KeyboardInterrupt:  # while a line was being typed
                log("\n" + HELP)


def take_turn(
    engine: Engine, builder: RequestBuilder, turns: list[dict], line: str, interrupts: Interrupts
) -> list[dict]:
    """Answer a line: -> the messages, with the line and its answer appended if there is one."""
    asked = [*turns, {"role": "user", "content": line}]
    try:
        reply = Reply(builder.request_for(builder.encode(asked)), builder.new_stream)
    except UserError as e:
        log(f"{e}; /reset begins anew" if turns else e)
        return turns
    answer = stream_answer(engine, reply, interrupts)
    return [*asked, {"role": "assistant", "content": answer}] if answer.strip() else turns
