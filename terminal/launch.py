"""What programs that run a model do first: join other hosts, keep what is compiled, choose mesh and types."""

import os
import sys
import time
import warnings

import jax
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import UserError
from model import Config
from sharding.mesh import make_mesh


def log(*message) -> None:
    if jax.process_index() == 0:
        print(*message, file=sys.stderr, flush=True)


def keep_compiled() -> None:
    """Let jax keep what it compiles in a folder of the user's, unless JAX_COMPILATION_CACHE_DIR names one."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    settings = {
        "jax_compilation_cache_dir": os.path.join(caches, "llama-jax"),
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


def join_hosts() -> None:
    """Join the other hosts of a TPU pod, a cluster job, or the JAX_* variables below; alone, do nothing."""
    names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    given = {argument: os.environ[name] for argument, name in names.items() if name in os.environ}
    try:
        jax.distributed.initialize(**{argument: int(value) for argument, value in given.items()})
    except (ValueError, IndexError, RuntimeError) as e:
        if "coordinator_address" in str(e) and not given:  # jax's way to say that there are no others
            return
        variables = "JAX_COORDINATOR_ADDRESS (HOST:PORT), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        raise UserError(f"could not join other hosts ({e}); check {variables}") from None
    device_count()
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Of CPU processes only the first would find what was compiled before, and wait for the others in a
        # collective, which Gloo gives up after 30 s.
        jax.config.update("jax_enable_compilation_cache", False)
    # Gloo, which joins CPU processes, writes to file descriptor 1; keep the user's stdout for answers.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def device_count() -> int:
    try:
        return jax.device_count()
    except Exception as e:  # RuntimeError and AssertionError, among others
        reason = str(e).strip().split("\n")[0]
        raise UserError(f"jax found no devices ({reason}); check JAX_PLATFORMS and XLA_FLAGS") from None


def choose_mesh(cfg: Config, dp: int | None, ep: int | None, tp: int | None, n_devices: int) -> Mesh:
    """The mesh of all devices: of the degrees that the user fixed, else as tensor parallel as possible.

    Raises UserError if no degrees fit the devices and the model.
    """
    given = [f"--{name} {n}" for name, n in (("dp", dp), ("ep", ep), ("tp", tp)) if n]
    asked, ep = " ".join(given) or "the default mesh", ep or 1
    degrees = [(n_devices // (ep * t), ep, t) for t in range(n_devices, 0, -1) if n_devices % (ep * t) == 0]
    degrees = [(d, e, t) for d, e, t in degrees if dp in (None, d) and tp in (None, t)]
    reasons = ["--dp x --ep x --tp must be the number of devices"]
    for degree in degrees:
        try:
            return make_mesh(cfg, *degree)
        except ValueError as e:
            reasons.append(str(e))
    raise UserError(f"{asked} on {n_devices} devices: {reasons[-1]}")


def choose_quantized(asked: str | None, checkpoint: Checkpoint) -> bool:
    """Whether to hold int8 weights: as asked, else as the checkpoint does. UserError if that cannot be."""
    if asked == "none" and checkpoint.quantized:
        where = checkpoint.folder
        raise UserError(f"--quantize none: the weights in {where} are int8; use the original model")
    return checkpoint.quantized or asked == "int8"


def choose_dtypes(dtype: str | None, kv_dtype: str | None, quantized: bool) -> tuple[str, str]:
    """The types of activations and cache that the user asked for, or else those that are fast here."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = dtype or ("float32" if on_cpu and not quantized else "bfloat16")
    return dtype, kv_dtype or ("float32" if on_cpu else dtype)


def set_precision(dtype: str) -> None:
    """Let products of float32 activations be exact: TPUs and GPUs would round the factors."""
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
