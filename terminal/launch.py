"""What programs that run a model do first: join other hosts, keep what is compiled, choose mesh and types."""

import argparse
import collections
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import UserError
from checkpoints.folders import cache_folder
from distributed.exchange import agree, gather, hostname, process_count
from distributed.join import TIMEOUT, join, watch_aborts
from model import Config
from quantize import FORMATS, Format
from sharding.mesh import make_mesh
from terminal.command_line import OneLineParser

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE = 5  # seconds
# What may be another in each process. Prompts and clients are the first one's; models are compared whole.
OWN = {
    "coordinator", "process_id", "prompt", "prompt_file", "checkpoint", "draft",
    "host", "port", "api_key", "api_key_file", "cors",
    "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS",
    "JAX_COMPILATION_CACHE_DIR", "JAX_PARTITION_INDEX", "JAX_SLICE_INDEX",
}  # fmt: skip


def log(*message) -> None:
    if jax.process_index() == 0:
        print(*message, file=sys.stderr, flush=True)


log_once = functools.cache(log)


@contextlib.contextmanager
def patience(message: str) -> Iterator[None]:
    """Say this if what is done takes long."""
    timer = threading.Timer(PATIENCE, log, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def keep_compiled() -> None:
    """Let jax keep what it compiles in a folder of the user's, unless JAX_COMPILATION_CACHE_DIR names one."""
    settings = {
        "jax_compilation_cache_dir": str(cache_folder()),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    warnings.filterwarnings("ignore", message=".*persistent compilation cache", category=UserWarning)


class Startup:
    """Seconds of CPU time from the start of this program to the first tokens, by what they went to."""

    def __init__(self):
        self.laps: dict[str, float] = {}

    def lap(self, what: str) -> None:
        """Charge the time since the last lap to `what`, unless it has had its lap."""
        self.laps.setdefault(what, time.process_time() - sum(self.laps.values()))


def add_processes(parser: OneLineParser) -> None:
    """How the processes of several hosts find one another: the same options in all, but for --process-id."""
    # fmt: off
    add = parser.add_argument_group("several hosts, where they do not find one another").add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 is to be reached")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")
    add("--process-id", type=int, metavar="I", help="which one this is, from 0")
    add("--timeout", type=int, default=TIMEOUT, metavar="SECONDS",
        help=f"to wait for a process that does not come, or answer, before all end; default: {TIMEOUT}")
    # fmt: on


def join_hosts(args: argparse.Namespace) -> None:
    """Join the processes of other hosts, if there are any. UserError unless they are to do the same.

    args: the command's; what of coordinator, num_processes, process_id and timeout is among them is `join`'s.
    """
    options = vars(args)
    join(*map(options.get, ("coordinator", "num_processes", "process_id")), options.get("timeout", TIMEOUT))
    if process_count() > 1:
        asked = {f"--{name.replace('_', '-')}": x for name, x in options.items() if name not in OWN}
        agree(asked | versions(), "start the same command, of the same version, on every host")
    device_count()
    watch_aborts()
    if process_count() > 1 and jax.default_backend() == "cpu":
        # Of CPU processes only the first would find what was compiled before, and wait for the others in a
        # collective, which Gloo gives up after 30 s.
        jax.config.update("jax_enable_compilation_cache", False)


def versions() -> dict[str, str]:
    """Of all that decides what a process computes, but for its arguments and the model."""
    program = hashlib.sha256()
    for path in sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("*/*.py")):
        program.update(path.read_bytes())
    packages = {}
    for name in ("jax", "jaxlib", "libtpu", "numpy", "tokenizers", "gguf", "llguidance"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    settings = {name: x for name, x in os.environ.items() if name.startswith(("JAX_", "XLA_", "LIBTPU_"))}
    same = packages | {name: x for name, x in settings.items() if name not in OWN}
    return same | {"Python": platform.python_version(), "this program's checksum": program.hexdigest()[:12]}


def device_count() -> int:
    try:
        return jax.device_count()
    except Exception as e:  # RuntimeError and AssertionError, among others
        reason = str(e).strip().split("\n")[0]
        raise UserError(f"jax found no devices ({reason}); check JAX_PLATFORMS and XLA_FLAGS") from None


def choose_mesh(
    cfg: Config,
    dp: int | None,
    ep: int | None,
    tp: int | None,
    n_devices: int,
    pp: int | None = None,
    slices: int = 1,
    fits: Callable[[Mesh], bool] = bool,
) -> Mesh:
    """The mesh of all devices: of the degrees that the user fixed, else as tensor parallel as possible.

    slices: groups of devices that a slow network joins, see `slice_count`. Then it is as tensor parallel as
    possible in each of them, with other rows in the others, or else other layers; a layer goes over the slow
    network only where the model does not fit otherwise. fits: whether it does. Raises UserError if no degrees
    suit the devices and the model.
    """
    given = [f"--{name} {n}" for name, n in (("dp", dp), ("ep", ep), ("tp", tp), ("pp", pp)) if n]
    asked, ep, stages = " ".join(given) or "the default mesh", ep or 1, [pp] if pp else sorted({1, slices})
    degrees = [
        (n_devices // (p * ep * t), ep, t, p)
        for p in stages
        for t in range(n_devices, 0, -1)
        if n_devices % (p * ep * t) == 0 and tp in (None, t) and dp in (None, n_devices // (p * ep * t))
    ]
    degrees.sort(key=lambda x: x[1] * x[2] > n_devices // slices)
    meshes, reasons = [], ["--dp x --ep x --tp x --pp must be the number of devices"]
    for data, expert, tensor, stage in degrees:
        try:
            meshes.append(make_mesh(cfg, data, expert, tensor, stage=stage))
        except ValueError as e:
            reasons.append(str(e))
            continue
        if slices == 1 or fits(meshes[-1]):
            return meshes[-1]
    if not meshes:
        raise UserError(f"{asked} on {n_devices} devices: {reasons[-1]}")
    return min(meshes, key=lambda mesh: mesh.shape["data"])  # what comes next says what does not fit


def slice_count() -> int:
    """How many groups of devices a slow network joins: slices of TPUs, hosts of others; 1 if they are unlike.

    All processes must call this.
    """
    hosts = gather(hostname())
    sizes = collections.Counter(
        x.slice_index if x.platform == "tpu" else hosts[x.process_index] for x in jax.devices()
    )
    return len(sizes) if len(set(sizes.values())) == 1 else 1


def choose_format(asked: str | None, checkpoint: Checkpoint | None) -> Format | None:
    """The weights' number format: as asked, else the checkpoint's. UserError if that cannot be.

    Where the platform has no fast product of a format, the weights are held in another one, see `Format.on`.
    """
    there = checkpoint and checkpoint.format
    wanted = FORMATS[asked] if asked else there
    if there and wanted != there:
        where = checkpoint.folder
        raise UserError(f"--quantize {asked}: the weights in {where} are {there}; use the original model")
    held = wanted and wanted.on(jax.default_backend())
    if held != wanted:
        log_once(f"{wanted} weights are held as {held.scheme}: on this platform {wanted} is slower")
    return held


def choose_dtypes(dtype: str | None, kv_dtype: str | None, format: Format | None) -> tuple[str, str]:
    """The types of activations and cache that the user asked for, or else those that are fast here."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = dtype or ("float32" if on_cpu and not format else "bfloat16")
    return dtype, kv_dtype or ("float32" if on_cpu else dtype)


def set_precision(dtype: str) -> None:
    """Let products of float32 activations be exact: TPUs and GPUs would round the factors."""
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
