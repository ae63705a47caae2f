"""What a program is compiled for: a platform, by which it chooses its kernels, and the axes of a mesh."""

import glob
import importlib.util
import os
from collections.abc import Callable

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from feedback.errors import UserError

ACCELERATORS = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/dxg", "/dev/kfd")  # of TPUs and GPUs
KINDS = ("attention", "matmul", "experts")  # of kernels


def skip_absent_tpu() -> None:
    """Keep jax from looking for TPUs if libtpu is installed on a machine without an accelerator.

    libtpu, which compiles for TPUs on any machine, prints several lines of errors when it finds none.
    """
    none_there = not any(glob.glob(pattern) for pattern in ACCELERATORS)
    if none_there and jax.config.jax_platforms is None and importlib.util.find_spec("libtpu"):
        jax.config.update("jax_platforms", "cpu")


def overlap_in_full_memory() -> None:
    """Let the TPU compiler put collectives beside products in programs that fill the memory, too.

    By default every collective of such a program is synchronous, though a transfer needs little memory. A
    decode step of 128 rows, of Llama 3.1 70B on v5e:4x4 in 14.5 of 15.75 GiB, then takes 36.3 ms by the
    schedule in place of 24.4.
    """
    flag, given = "--xla_tpu_scheduler_percent_shared_memory_limit", os.environ.get("LIBTPU_INIT_ARGS", "")
    if flag not in given:
        os.environ["LIBTPU_INIT_ARGS"] = f"{flag}=100 {given}".rstrip()


# At once, for all programs: this file is imported before any asks for devices.
skip_absent_tpu()
overlap_in_full_memory()


def platform(mesh: Mesh | AbstractMesh | None = None) -> str | None:
    """ "cpu", "gpu" or "tpu": the platform of a mesh, whose devices need not be on this machine.

    By default of the mesh that is being compiled for; None without one.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    return mesh.abstract_device and mesh.abstract_device.platform


def on_cpu() -> bool:
    return platform() == "cpu"


def on_tpu(mesh: Mesh | AbstractMesh | None = None) -> bool:
    return platform(mesh) == "tpu"


def plain_kinds() -> set[str]:
    """The kinds of kernels that the environment variable LLAMA_JAX_PLAIN forbids, "all" of them or some."""
    setting = os.environ.get("LLAMA_JAX_PLAIN", "")
    words = set(setting.split(",")) - {""}
    if words - {*KINDS, "all"}:
        raise UserError(f"LLAMA_JAX_PLAIN={setting}: say {', '.join(KINDS)}, several with commas, or all")
    return set(KINDS) if "all" in words else words


def choose(kind: str, kernels: dict, key: tuple, plain: Callable) -> Callable:
    """What a table of kernels has for a key; else, or if the kind is forbidden, the plain function."""
    return plain if kind in plain_kinds() else kernels.get(key, plain)


def varying(*inputs: Array) -> frozenset[str]:
    """The mesh axes over which any of these varies."""
    return frozenset.union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
