"""Which kind of devices a program is compiled for: the one question by which it takes another form."""

import jax
from jax.sharding import Mesh


def platform(mesh: Mesh | None = None) -> str | None:
    """ "cpu", "gpu" or "tpu": of a mesh, whose devices need not be here; by default the one that is being
    compiled for, None if there is none.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
    return mesh.abstract_device and mesh.abstract_device.platform


def on_cpu() -> bool:
    return platform() == "cpu"


def on_gpu() -> bool:
    return platform() == "gpu"


def on_tpu(mesh: Mesh | None = None) -> bool:
    return platform(mesh) == "tpu"
