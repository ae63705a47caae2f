"""Progress of long work, on stderr."""

import sys


def progress(what: str, total: int, done: int = 0, show: bool = True, unit: str = "B", delay: float = 0):
    """A tqdm: a line on stderr with the part of the total that is done, the speed, and the time left.

    On a terminal the line is rewritten in place, and lines of work that goes on at the same time stand below
    one another; elsewhere a line is printed every half minute.
    delay: seconds without a line; shorter work prints none.
    """
    from tqdm import tqdm  # the import takes long, and signals must be handled before

    class Line(tqdm):
        """tqdm draws a line before its delay is over when another one ends, and then does not end it."""

        def is_due(self) -> bool:
            return delay <= 0 or self._time() - self.start_t >= delay

        def display(self, *arguments, **options) -> None:
            if self.is_due():
                super().display(*arguments, **options)

        def close(self) -> None:
            if not self.disable and self.is_due():
                self.last_print_t = self._time()  # it has been drawn
            super().close()

    show = show and sys.stderr is not None
    terminal = show and sys.stderr.isatty()
    seconds = 0.1 if terminal else 30
    return Line(
        desc=what, total=total, initial=done, disable=not show, mininterval=seconds, maxinterval=seconds,
        unit=unit, unit_scale=unit == "B", dynamic_ncols=True, delay=delay,
        position=None if terminal else 0,  # 0: without the control codes that move to another line
        leave=None,  # at its end the first line stays, and one below it is cleared
    )  # fmt: skip


def print_line(text: str) -> None:
    """Print a line to stderr, above the progress that is shown there."""
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)
    sys.stderr.flush()
