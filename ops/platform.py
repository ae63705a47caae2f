"""The platform that a program is compiled for, by which it chooses its kernels."""

import jax
from jax.sharding import AbstractMesh, Mesh


def platform(mesh: Mesh | AbstractMesh | None = None) -> str | None:
    """ "cpu", "gpu" or "tpu": the platform of a mesh, whose devices need not be on this machine.

    By default of the mesh that is being compiled for; None without one.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    return mesh.abstract_device and mesh.abstract_device.platform


def on_cpu() -> bool:
    return platform() == "cpu"


def on_gpu() -> bool:
    return platform() == "gpu"


def on_tpu(mesh: Mesh | AbstractMesh | None = None) -> bool:
    return platform(mesh) == "tpu"
