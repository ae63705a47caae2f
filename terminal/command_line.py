"""What the commands share: arguments, errors in one line, signals."""

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable

from checkpoints.errors import UserError
from distributed import watch

INT32_MAX = 2**31 - 1  # the largest number that an option takes
_before_leaving: Callable[[], None] | None = None


class OneLineParser(argparse.ArgumentParser):
    """A bad argument is one line on stderr and exit code 2."""

    def check_positive(self, args, *names: str) -> None:
        """Refuse what was given for these options and is less than 1, or no number of 32 bits."""
        for name in names:
            if (value := getattr(args, name)) is not None and not 1 <= value <= INT32_MAX:
                what = "not at least 1" if value < 1 else f"more than {INT32_MAX}"
                self.error(f"--{name.replace('_', '-')} {str(value)[:40]} is {what}")

    def error(self, message: str):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


class Stderr:
    """stderr, where what cannot be said is not said: a full disk is no reason to end."""

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
    """Call main; an error that a user can mend is one line on stderr and exit code 1.

    Of several processes none leaves before all are done, or without telling the others why.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, mode))
    if not isinstance(sys.stderr, Stderr):
        sys.stderr = Stderr(sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sign gets another
    try:
        try:
            main()
        finally:
            _flush_stdout()
    except BrokenPipeError:  # whoever read stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        watch.leave(1, "", "has nobody who reads its output")
    except (UserError, OSError) as e:
        message = " ".join(str(e).split())
        watch.leave(1, f"error: {message}", f"has failed: {message}")
    except KeyboardInterrupt:
        watch.leave(130, "interrupted", "was interrupted")
    except SystemExit:
        watch.finish()
        raise
    except Exception:
        watch.failed()
        raise
    watch.finish()


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        raise UserError(f"stdout: {e.strerror}; what was to be printed is lost, try --output FILE") from None


def hear_signals() -> None:
    """Leave at once on a Ctrl-C, or when told to end, as hosts are that are taken back.

    A thread waits for it: an exception may be lost in one of XLA's callbacks, and the main thread hears
    nothing while it compiles.
    """
    endings = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # in the threads to come, too

    def wait() -> None:
        code, what = endings[signal.sigwait(endings)]
        if _before_leaving:
            _before_leaving()
            code, what = endings[signal.sigwait(endings)]
        watch.leave(code, what, f"was {what}", at_once=True)

    threading.Thread(target=wait, daemon=True).start()


def before_leaving(prepare: Callable[[], None]) -> None:
    """Let the first signal to end call this, and only a second one end this process at once."""
    global _before_leaving
    _before_leaving = prepare
