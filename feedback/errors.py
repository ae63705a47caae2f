"""Errors that a user can correct."""

import contextlib
import pathlib
from collections.abc import Iterator


class UserError(ValueError):
    """Bad input, or a machine that is too small: the message says what, where and what to do.

    Commands print it as one line (command_line.run). Any other exception is a fault of this program, and
    keeps its traceback.
    """


@contextlib.contextmanager
def located(path: pathlib.Path) -> Iterator[None]:
    """Put a path in front of a UserError that does not begin with it."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(str(path)) else f"{path}: {e}") from None
