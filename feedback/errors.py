"""Errors that a user can correct."""

import contextlib
import difflib
import pathlib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Bad input, or a machine that is too small: the message says what, where and what to do.

    Commands print it as one line (command_line.run). Any other exception is a fault of this program, and
    keeps its traceback.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?', where X is a known name that begins with a mistyped one or resembles it, or ''."""
    by_lowercase = {other.lower(): other for other in known}
    longer = [other for other in by_lowercase if other.startswith(name.lower())]
    similar = longer or difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=0.8)
    return f"; did you mean {by_lowercase[similar[0]]}?" if similar else ""


@contextlib.contextmanager
def located(path: pathlib.Path | str) -> Iterator[None]:
    """Put a path in front of a UserError that does not begin with it."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(str(path)) else f"{path}: {e}") from None
