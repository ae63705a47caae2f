"""--verbose and --profile: what helps to find out why an answer is slow or wrong."""

import contextlib
import logging
import pathlib
import tempfile
import time
from collections.abc import Iterator

import jax

from feedback.errors import UserError
from feedback.progress import print_line
from serving.engine import Engine
from terminal.launch import log

LOGGED = "deployment", "serving"  # folders whose modules have loggers of their names
PROFILED = 10  # seconds: a profile grows by 10 MB per second, and viewers hold a million events


class StderrHandler(logging.Handler):
    """Prints records to stderr, above the progress that is shown there."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(self.format(record))


def show_logs() -> None:
    """Print what the loggers of LOGGED say."""
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%H:%M:%S"))
    for logger in map(logging.getLogger, LOGGED):
        logger.handlers = [handler]
        logger.setLevel(logging.DEBUG)


def check_profile_folder(name: str) -> None:
    """Make the folder of --profile. Raises UserError if it cannot be written."""
    path = pathlib.Path(name).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        raise UserError(f"--profile {name}: {e.strerror}") from None


@contextlib.contextmanager
def profiled(engine: Engine, name: str | None) -> Iterator[None]:
    """Profile the engine, from its first turn to the end of the body, but at most for PROFILED seconds.

    name: of the folder for the profile, in the first process; None: there is none.
    """
    if name is None or jax.process_index() > 0:
        yield
        return
    folder, advance, ends = pathlib.Path(name).expanduser(), engine.advance, None
    with contextlib.ExitStack() as profile:

        def traced_turn():
            nonlocal ends
            if ends is None:
                profile.callback(log, f"profile: {name}")
                profile.enter_context(jax.profiler.trace(folder))
                ends = time.monotonic() + PROFILED
            elif time.monotonic() > ends:
                profile.close()
                engine.advance = advance
            with jax.profiler.StepTraceAnnotation("turn", step_num=engine.turns):
                return advance()

        engine.advance = traced_turn
        yield
    engine.advance = advance
