"""How far long work is, on stderr."""

import sys


def progress(what: str, total: int, done: int = 0, show: bool = True, unit: str = "B", delay: float = 0):
    """A tqdm: a line on stderr of how much of the total is done, how fast, and how long it will take.

    On a terminal it is rewritten in place; elsewhere there is a line every half minute. delay: seconds until
    the first; of what takes less there is none.
    """
    from tqdm import tqdm  # not before an interrupt is heard

    show = show and sys.stderr is not None
    seconds = 0.1 if show and sys.stderr.isatty() else 30
    return tqdm(
        desc=what, total=total, initial=done, disable=not show, mininterval=seconds, maxinterval=seconds,
        unit=unit, unit_scale=unit == "B", dynamic_ncols=True, delay=delay,
    )  # fmt: skip
