"""Chat and streaming as a user has them: over a pipe, and in a terminal 40 columns wide."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from conftest import CHECKPOINTS, FAST, generate, mesh_of
from processes import shared_cache
from test_command_line import damaged

import main
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from conversation.text import encode, load_tokenizer, stop_tokens


@pytest.fixture(scope="module")
def environment():
    """Programs are compiled once for all the tests here."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": shared_cache(),
        "XLA_FLAGS": FAST,
        "TERM": "xterm",
        "PYTHONUTF8": "1",
    }


SMALL = "--max-len", "128", "--max-new-tokens", "20"


def over_a_pipe(environment, text: str, *arguments: str) -> tuple[str, str]:
    command = [sys.executable, main.__file__, "--chat", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_turn_that_computes_nan(environment, tmp_path):
    """It is an error, and as if it had not been said; at the end the exit code tells."""
    folder = damaged(tmp_path / "damaged", "tiny-llama4", "Z")
    command = [sys.executable, main.__file__, "--chat", "--checkpoint", folder, *SMALL]
    said = "Hello\nWho are you?\n/reset\nHello\nWhat is ZZ?\nWho are you?\n"
    done = subprocess.run(command, input=said, capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if line]
    assert len(found) == 4 and found[:2] == found[2:]
    assert done.returncode == 1 and "error: the model computes NaN" in done.stderr


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, environment, *arguments: str):
        self.fd, inner = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        # Its controlling terminal, so that Ctrl-C reaches it; not by fork, of which jax warns.
        take = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, main.__file__, *arguments],
            stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 120) -> str:
        """What is printed up to a match of the pattern."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.fd, 1 << 16).decode(errors="surrogateescape")
                except OSError:  # the program has ended
                    assert re.search(pattern, self.seen), self.seen
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def type_until(self, text: str, pattern: str) -> None:
        """Type again if nothing comes of it: what is typed while an interrupt is handled may be lost."""
        for _ in range(6):
            self.type(text)
            try:
                self.until(pattern, 20)
                return
            except AssertionError:
                assert self.process.poll() is None, self.seen
        raise AssertionError(self.seen)

    def end(self) -> int:
        """Wait for the end: -> the exit code."""
        code = self.process.wait()
        os.close(self.fd)
        return code


@pytest.mark.parametrize("tiny", ["tiny-llama4"], indirect=True)
def test_a_pipe(tiny, environment):
    """Each turn's answer is the model's to the whole conversation, by the checkpoint's own template."""
    checkpoint = open_checkpoint(tiny)
    cfg, mesh = checkpoint.config, mesh_of(checkpoint.config)
    weights, tokenizer = load(checkpoint, mesh, "float32", None), load_tokenizer(tiny)
    stop, turns, expected = stop_tokens(tiny, tokenizer), [{"role": "system", "content": "Be brief."}], []
    for question in ("Who are you?", "你好 🦙", "What is 20 + 22?"):
        turns.append({"role": "user", "content": question})
        prompt = encode(tokenizer, turns, cfg.V)
        (answer,) = generate(weights, [prompt], cfg, mesh, 40, 512, "float32", stop=stop)
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        turns.append({"role": "assistant", "content": text})
        expected.append(text)
    said = "Who are you?\n\n你好 🦙\nWhat is 20 + 22?\n/nonsense\n/reset now\n/reset\nWho are you?\n"
    said += "/exit\nnever read\n"
    out, err = over_a_pipe(
        environment, said, "--checkpoint", str(tiny), "--system", "Be brief.", "--max-new-tokens", "40"
    )
    # The last question is the first of a new conversation.
    assert out.splitlines() == [*expected, expected[0]]
    assert "no such command: /nonsense" in err and "no such command: /reset now" in err
    assert "a new conversation" in err and "Traceback" not in err


def test_a_full_conversation(environment, tmp_path):
    """What does not fit any more is refused in one line, and the conversation goes on from before it.

    A profile is written when it ends.
    """
    arguments = [*SMALL, "--profile", str(tmp_path)]
    said = "Hello\n" + "a b c " * 60 + "\nHello\n/reset\nHello\n"
    out, err = over_a_pipe(environment, said, *arguments)
    first, _, third = out.splitlines()
    assert first == third and err.count("exceed --max-len of 128; /reset begins anew") == 1
    assert f"profile: {tmp_path}\n" in err and list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_a_terminal(environment):
    """Answers stream; Ctrl-C ends an answer, or a line, but not the program; Ctrl-D does."""
    terminal = Terminal(environment, "--chat", "--ignore-eos", "--max-new-tokens", "400", "--max-len", "512")
    terminal.until(r"/reset begins anew")
    terminal.until(r"> ")
    terminal.type_until("Who are you?\n", r"My name is")
    terminal.type("\x03")  # the answer, of 400 tokens, is under way
    terminal.until(r"\n> ")
    terminal.type_until("half a li\x03", r"ends an answer")
    terminal.type_until("/reset\n", r"a new conversation")
    terminal.type_until("Tell me your name\n", r"My name is")
    terminal.type("\x03")
    terminal.until(r"\n> ")
    while terminal.process.poll() is None:
        terminal.type("\x04")
        time.sleep(0.5)
    assert terminal.end() == 0


def test_streaming(environment):
    """One prompt's answer is printed as it is made; an interrupt leaves at once, with its exit code."""
    terminal = Terminal(environment, "--prompt", "Tell me your name", "--ignore-eos", "--max-len", "512")
    shown = terminal.until(r"My name is Tiny")
    assert "> Tell me your name" in shown
    terminal.type("\x03")
    terminal.until("interrupted")
    assert terminal.end() == 130


def test_progress_fits_the_terminal(environment, tmp_path):
    (tmp_path / "p").write_text("Who are you?\n" * 12)
    arguments = ["--prompt-file", str(tmp_path / "p"), "--output", str(tmp_path / "o"), "--rows", "4", *SMALL]
    terminal = Terminal(environment, *arguments)
    shown = terminal.until("has all 12 lines")
    assert terminal.end() == 0
    bars = [line for line in re.split(r"[\r\n]", shown) if line.startswith("answers:")]
    assert bars and all(len(re.sub(r"\x1b\[[A-Z]", "", bar)) <= 40 for bar in bars)


def test_chat_needs_a_template(environment, tmp_path):
    for file in (CHECKPOINTS / "tiny-llama3").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    command = [sys.executable, main.__file__, "--chat", "--checkpoint", str(tmp_path)]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "has no chat template" in done.stderr
