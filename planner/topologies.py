"""Chips, TPUs and GPUs, as their data sheets describe them, and topologies, as their compilers know them."""

import dataclasses
import importlib.util
import re

from jax.experimental import topologies

from deployment.memory import BANDWIDTH
from feedback.errors import UserError
from planner.gpus import GPUS, target_config

MEMORY_SHARE = 0.75  # of a GPU's memory, which jax lets programs use unless it is told another share


@dataclasses.dataclass(frozen=True)
class Chip:
    """The resources of one jax device; a chip has `cores` jax devices.

    hbm: bytes that a program may use. bandwidth: of HBM, bytes/s. flops: bfloat16, per second. vector: other
    operations per second.
    Of TPUs. vector: that of the vector units, which do 4 x 1024 per cycle and core. link: bytes/s of one
    interconnect link, one way. An axis of the torus wraps around if its length is a multiple of `ring`.
    network: bytes/s per chip of the network that joins slices. Source: libtpu 0.0.42 for hbm;
    docs.cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}, where link is the bidirectional bandwidth per chip /
    ports / 2, and network that per pod / chips; jax-ml/scaling-book tpus.md for ring and vector (that of
    tpu7x is not published: it is v6e's).
    Of GPUs. vector: one per float32 unit and cycle. link: bytes/s of all NVLinks of a GPU, one way. Source:
    NVIDIA's data sheets of A100, H100, H200 and DGX B200, flops without sparsity; planner/gpus.py for hbm and
    vector.
    """

    hbm: float
    bandwidth: float
    flops: float
    vector: float
    link: float
    ring: int | None = None
    network: float | None = None
    cores: int = 1


def gpu_chip(kind: str, flops: float, link: float) -> Chip:
    gpu = GPUS[kind]
    vector = gpu.processors * gpu.lanes * gpu.clock * 1e9
    return Chip(MEMORY_SHARE * gpu.memory, BANDWIDTH[gpu.name], flops, vector, link)


CHIPS = {
    "v5e": Chip(
        15.75 * 2**30, BANDWIDTH["TPU v5 lite"], 197e12, vector=6.1e12, link=50e9, ring=16, network=3.125e9
    ),
    "v6e": Chip(
        31.25 * 2**30, BANDWIDTH["TPU v6 lite"], 918e12, vector=7.2e12, link=100e9, ring=16, network=12.5e9
    ),
    "v5p": Chip(
        95.74 * 2**30, BANDWIDTH["TPU v5p"], 459e12, vector=14.3e12, link=100e9, ring=4, network=6.25e9
    ),
    "tpu7x": Chip(
        94.75 * 2**30,
        BANDWIDTH["TPU7x"],
        1153.5e12,
        vector=7.2e12,
        link=100e9,
        ring=4,
        network=12.5e9,
        cores=2,
    ),
    "a100": gpu_chip("a100", flops=312e12, link=300e9),
    "h100": gpu_chip("h100", flops=989e12, link=450e9),
    "h200": gpu_chip("h200", flops=989e12, link=450e9),
    "b200": gpu_chip("b200", flops=2250e12, link=900e9),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or several equal slices of TPUs, or the GPUs of one node, which a switch joins.

    sizes: chips along each axis of the torus of one slice; none of GPUs.
    """

    name: str
    chip: Chip
    sizes: tuple[int, ...]
    devices: tuple
    slices: int = 1


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology with a name like v5e:4x4 or h100:8. Raises UserError if there is none, or no compiler."""
    kind, _, shape = name.partition(":")
    return find_gpus(name, kind, shape, slices) if kind in GPUS else find_tpus(name, kind, shape, slices)


def find_tpus(name: str, kind: str, shape: str, slices: int) -> Topology:
    dimensions = 2 if kind in ("v5e", "v6e") else 3
    if kind not in CHIPS or not re.fullmatch("x".join([r"[1-9]\d{0,2}"] * dimensions), shape):
        forms = "v5e:4x4, v6e:4x4, v5p:2x2x1, tpu7x:2x2x1 or h100:8"
        raise UserError(f"--topology {name}: not of the form {forms}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed: pip install -e '.[tpu]' (Linux on x86)")
    sizes = tuple(int(n) for n in shape.split("x"))
    if dimensions == 2 and max(sizes) > 16:
        raise UserError(f"--topology {name}: a {kind} slice has at most 16 chips along an axis")
    host = [2 if n % 2 == 0 else 1 for n in sizes[:2]] + [1]  # the most chips that a host may have
    try:
        options = dict(chips_per_host_bounds=host) | (dict(num_slices=slices) if slices > 1 else {})
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"--topology {name}: the TPU compiler refuses it ({e})") from None
    title = f"{slices} slices of {name}" if slices > 1 else name
    return Topology(title, CHIPS[kind], sizes, tuple(found.devices), slices)


def find_gpus(name: str, kind: str, count: str, slices: int) -> Topology:
    """The GPUs of one node, described to the compiler, since none of them need be here."""
    if not re.fullmatch("[1-8]", count) or slices > 1:
        raise UserError(f"--topology {name}: only one node of 1 to 8 GPUs can be planned, {kind}:8")
    try:
        shape = f"1x1x{count}"  # nodes that NVLink joins, hosts, GPUs
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(GPUS[kind]), topology=shape
        )
    except NotImplementedError:
        plugin = "jax's CUDA plugin, the GPU compiler, is not installed"
        raise UserError(f"{plugin}: pip install -e '.[cuda-compiler]' (Linux)") from None
    except (RuntimeError, ValueError) as e:
        raise UserError(f"--topology {name}: the GPU compiler refuses it ({e})") from None
    return Topology(name, CHIPS[kind], (), tuple(found.devices))
