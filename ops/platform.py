"""What a program is compiled for: a platform, by which it chooses its kernels, and the axes of a mesh."""

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh


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


def varying(*inputs: Array) -> frozenset[str]:
    """The mesh axes over which any of these varies."""
    return frozenset.union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
