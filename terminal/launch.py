"""What every command does first: join the other hosts, and set up messages."""

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import threading
import time
from collections.abc import Iterator

import jax

from distributed.exchange import agree, process_count
from distributed.join import TIMEOUT, join, watch_aborts
from feedback.errors import UserError
from feedback.progress import print_line
from ops.platform import plain_kinds
from terminal.command_line import OneLineParser

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLOW = 5  # seconds, after which a message says what takes so long
# Options and variables that may differ between processes. Only the first process reads prompts and has
# clients; checkpoints are compared by their contents, not their names.
MAY_DIFFER = {
    "coordinator", "process_id", "prompt", "prompt_file", "checkpoint", "draft",
    "host", "port", "api_key", "api_key_file", "cors", "served_model_name", "no_access_log",
    "strict_fields",
    "verbose", "profile",
    "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS",
    "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE", "JAX_PARTITION_INDEX", "JAX_SLICE_INDEX",
}  # fmt: skip


def log(*message) -> None:
    """Print a line to stderr, in the first process only."""
    if jax.process_index() == 0:
        print_line(" ".join(map(str, message)))


log_once = functools.cache(log)


@contextlib.contextmanager
def log_if_slow(message: str) -> Iterator[None]:
    """Log a message if the body takes more than SLOW seconds."""
    timer = threading.Timer(SLOW, log, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Startup:
    """The stages of a start, which may run side by side. seconds: of each stage, by its name.

    began: when the program began, by time.perf_counter; what it did since then is the stage "imports".
    shown: whether the seconds of a stage are logged when it ends. False until it is known that the program
    will start, so that an error is the only line; then `show` logs those of the stages that have ended.
    """

    def __init__(self, began: float | None = None):
        self.began, self.shown = began or time.perf_counter(), False
        self.seconds = {"imports": time.perf_counter() - self.began}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        if self.shown:
            self._log(name)

    def show(self) -> None:
        self.shown = True
        for name in list(self.seconds):
            self._log(name)

    def _log(self, name: str) -> None:
        if self.seconds[name] >= 0.05:  # else it would be 0.0
            log(f"start: {name} {self.seconds[name]:.1f} s")

    def first_tokens(self) -> None:
        """Note at the first call that there are tokens: "first tokens" counts from the program's begin."""
        self.seconds.setdefault("first tokens", time.perf_counter() - self.began)


def add_process_options(parser: OneLineParser) -> None:
    """Add the options by which the processes of several hosts find one another."""
    # fmt: off
    add = parser.add_argument_group("several hosts, where they do not find one another").add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 is to be reached")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")
    add("--process-id", type=int, metavar="I", help="which one this is, from 0")
    add("--timeout", type=int, default=TIMEOUT, metavar="SECONDS",
        help=f"to wait for a process that does not come, or answer, before all end; default: {TIMEOUT}")
    # fmt: on


def join_hosts(args: argparse.Namespace) -> None:
    """Join the processes of other hosts, if there are any. UserError unless they run the same command.

    args: the command's options, which may lack those of `add_process_options`.
    """
    options = vars(args)
    join(*map(options.get, ("coordinator", "num_processes", "process_id")), options.get("timeout", TIMEOUT))
    if process_count() > 1:
        asked = {f"--{name.replace('_', '-')}": x for name, x in options.items() if name not in MAY_DIFFER}
        agree(asked | versions(), "start the same command, of the same version, on every host")
    device_count()
    plain_kinds()  # or its setting is refused
    watch_aborts()


def versions() -> dict[str, str]:
    """Versions of all that decides what a process computes, besides its arguments and the model."""
    program = hashlib.sha256()
    for path in sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("*/*.py")):
        program.update(path.read_bytes())
    packages = {}
    for name in ("jax", "jaxlib", "libtpu", "numpy", "tokenizers", "gguf", "llguidance"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    prefixes = ("JAX_", "XLA_", "LIBTPU_", "LLAMA_JAX_")
    settings = {name: x for name, x in os.environ.items() if name.startswith(prefixes)}
    same = packages | {name: x for name, x in settings.items() if name not in MAY_DIFFER}
    return same | {"Python": platform.python_version(), "this program's checksum": program.hexdigest()[:12]}


def device_count() -> int:
    try:
        return jax.device_count()
    except Exception as e:  # RuntimeError and AssertionError, among others
        reason = str(e).strip().split("\n")[0] or f"JAX_PLATFORMS={jax.config.jax_platforms}: not installed"
        check = "check JAX_PLATFORMS, JAX_NUM_CPU_DEVICES and XLA_FLAGS"
        raise UserError(f"jax found no devices ({reason}); {check}") from None
