"""What a user can mend."""

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
    """A UserError says where, if it does not yet."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(str(path)) else f"{path}: {e}") from None
