"""Shared by all commands: argument errors, errors in one line, exit codes and signals."""

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable

from distributed import watch
from feedback.errors import UserError, did_you_mean

OUT_OF_MEMORY = "out of device memory: try fewer --rows, a smaller --max-len, --quantize int8 or more devices"
FILE_REFUSED = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError
INT32_MAX = 2**31 - 1  # the largest number that an option accepts
_on_first_signal: Callable[[], None] | None = None


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad argument in one line on stderr, with exit code 2."""

    def parse_args(self, args=None, namespace=None):
        """As argparse's, but an unknown option is reported with the option that is most similar."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            self.error(f"unknown argument {option}{did_you_mean(option, self._option_string_actions)}")
        return parsed

    def check_positive(self, args, *names: str) -> None:
        """Refuse values of these options that are below 1 or above INT32_MAX."""
        for name in names:
            if (value := getattr(args, name)) is not None and not 1 <= value <= INT32_MAX:
                what = "not at least 1" if value < 1 else f"more than {INT32_MAX}"
                self.error(f"--{name.replace('_', '-')} {str(value)[:40]} is {what}")

    def error(self, message: str):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


class Stderr:
    """stderr that ignores failed writes: a full disk is no reason to end."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def run(main: Callable[[], None]) -> None:
    """Call main. A UserError is one line on stderr and exit code 1, without a traceback.

    Of several processes none ends without telling the others why; distributed/watch.py also sees to it that
    none ends before all are done, or by an exception that is not handled here.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, mode))
    if not isinstance(sys.stderr, Stderr):
        sys.stderr = Stderr(sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show is replaced
    try:
        try:
            main()
        finally:
            _flush_stdout()
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        watch.leave(1, "", "has nobody who reads its output")
    except (UserError, OSError) as e:
        message = in_one_line(e)
        watch.leave(1, f"error: {message}", f"has failed: {message}")
    except KeyboardInterrupt:
        watch.leave(130, "interrupted", "was interrupted")


def in_one_line(error: Exception) -> str:
    """What is wrong, in one line. If the system refused a file: which file, and what to do."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror.lower()}"
        text += "; check the path, and who may read and write there" * isinstance(error, FILE_REFUSED)
    return " ".join(text.split())


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        raise UserError(f"stdout: {e.strerror}; what was to be printed is lost, try --output FILE") from None


def exit_on_signals() -> None:
    """Let SIGINT (Ctrl-C) and SIGTERM (of a host that is preempted) end this process at once.

    A thread waits for them: Python runs signal handlers in the main thread, which cannot while it compiles,
    and an exception raised there may be lost in a callback of XLA's.
    """
    endings = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # later threads inherit it

    def wait() -> None:
        code, what = endings[signal.sigwait(endings)]
        if _on_first_signal:
            _on_first_signal()
            code, what = endings[signal.sigwait(endings)]
        watch.leave(code, what, f"was {what}", at_once=True)

    threading.Thread(target=wait, daemon=True).start()


def on_first_signal(prepare: Callable[[], None]) -> None:
    """Call `prepare` at the first signal of `exit_on_signals`; only a second one ends the process."""
    global _on_first_signal
    _on_first_signal = prepare
