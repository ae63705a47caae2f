"""What the commands share: arguments, errors in one line, interrupts."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable

from checkpoints.errors import UserError

INT32_MAX = 2**31 - 1  # the largest number that an option takes


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


def run(main: Callable[[], None]) -> None:
    """Call main; an error that a user can mend is one line on stderr and exit code 1, an interrupt 130."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sign gets another
    try:
        main()
    except BrokenPipeError:  # whoever read stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def hear_interrupts() -> None:
    """Leave at once on a Ctrl-C: an exception may be lost in one of XLA's callbacks, or wait for threads."""

    def leave(*_) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, leave)
