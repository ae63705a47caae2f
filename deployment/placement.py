"""How a model is placed on devices: its mesh, and the number formats of weights, activations and cache."""

import collections
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint
from distributed.exchange import gather, hostname
from feedback.errors import UserError
from model import Config
from quantize import FORMATS, Format
from sharding.mesh import make_mesh


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
    """A mesh of all devices: of the degrees that the user fixes, and else as tensor parallel as possible.

    slices: see `slice_count`. With several slices, tensor parallelism stays within a slice, and the slices
    become data shards, or else stages. Only if the model does not fit so do its layers cross the slow network
    between slices. fits: whether the model fits on a mesh. Raises UserError if no degrees of parallelism suit
    the devices and the model.
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
    return min(meshes, key=lambda mesh: mesh.shape["data"])  # fit_cache will say how much memory is missing


def slice_count() -> int:
    """The number of slices: sets of devices with a fast network, between which the network is slow.

    A slice is a TPU slice or, of other devices, a host. 1 if the slices have unlike sizes. All processes must
    call this.
    """
    hosts = gather(hostname())
    sizes = collections.Counter(
        x.slice_index if x.platform == "tpu" else hosts[x.process_index] for x in jax.devices()
    )
    return len(sizes) if len(set(sizes.values())) == 1 else 1


def choose_format(
    asked: str | None, checkpoint: Checkpoint | None, log: Callable[[str], None]
) -> Format | None:
    """The format of the weights: the one asked for, else the checkpoint's. UserError if they conflict.

    Experts that were published in MXFP4 are held so unless another format, or none, is asked for.
    Where a platform has no fast product of a format, weights are held in another, and `log` is told.
    """
    there = checkpoint and checkpoint.format
    wanted = FORMATS[asked] if asked else checkpoint and checkpoint.natural_format
    if there and wanted != there:
        where = checkpoint.name
        raise UserError(f"--quantize {asked}: the weights in {where} are {there}; use the original model")
    held = wanted and wanted.on(jax.default_backend())
    if held != wanted:
        log(f"{wanted} weights are held as {held.scheme}: on this platform {wanted} is slower")
    return held


def choose_dtypes(dtype: str | None, kv_dtype: str | None, format: Format | None) -> tuple[str, str]:
    """The types of activations and cache: those that the user asks for, else those that are fast here."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = dtype or ("float32" if on_cpu and not format else "bfloat16")
    return dtype, kv_dtype or ("float32" if on_cpu else dtype)


def set_precision(dtype: str) -> None:
    """Let matmuls of float32 activations be exact: by default TPUs and GPUs round their inputs."""
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
