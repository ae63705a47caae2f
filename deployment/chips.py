"""Chips, TPUs and GPUs, as their data sheets describe them, and how the devices of a job are joined."""

import dataclasses
from collections.abc import Sequence

import jax

# Memory bandwidth in bytes per second of one jax device, by its device_kind, from the vendors' data sheets. A
# TPU7x chip has two devices.
BANDWIDTH = {
    "TPU v4": 1.228e12, "TPU v5 lite": 0.819e12, "TPU v5": 2.765e12, "TPU v5p": 2.765e12,
    "TPU v6 lite": 1.638e12, "TPU7x": 3.69e12, "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8e12,
}  # fmt: skip
MEMORY_SHARE = 0.75  # of a GPU's memory, which jax lets programs use unless it is told another share


@dataclasses.dataclass(frozen=True)
class Gpu:
    """name: jax's device_kind. capability: CUDA's, (major, minor). memory, l2: bytes. links: of NVLink.

    processors: how many (SMs, streaming multiprocessors). Of one of them, lanes: its float32 units;
    clock: GHz; shared_memory: bytes of it; of these, a block of threads may use all but 1 KiB.
    Source: openxla/xla, xla/backends/gpu/target_config/specs, which are read from such GPUs.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    l2: int
    links: int
    processors: int
    lanes: int
    clock: float
    shared_memory: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85100068864, 41943040, 12, 108, 64, 1.41, 167936),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 84942979072, 52428800, 18, 132, 128, 1.98, 233472),
    "h200": Gpu("NVIDIA H200", (9, 0), 151397597184, 52428800, 18, 132, 128, 1.98, 233472),
    "b200": Gpu("NVIDIA B200", (10, 0), 191514411008, 132644864, 18, 148, 128, 1.965, 233472),
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """The resources of one jax device; a chip has `cores` jax devices.

    kind: jax's device_kind. hbm: bytes that a program may use. bandwidth: of HBM, bytes/s. flops: bfloat16,
    per second. vector: other operations per second.
    Of TPUs. vector: that of the vector units, which do 4 x 1024 per cycle and core. link: bytes/s of one
    interconnect link, one way. An axis of the torus wraps around if its length is a multiple of `ring`.
    network: bytes/s per chip of the network that joins slices. Source: libtpu 0.0.42 for hbm;
    docs.cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}, where link is the bidirectional bandwidth per chip /
    ports / 2, and network that per pod / chips; jax-ml/scaling-book tpus.md for ring and vector (that of
    tpu7x is not published: it is v6e's).
    Of GPUs. vector: one per float32 unit and cycle. link: bytes/s of all NVLinks of a GPU, one way. Source:
    NVIDIA's data sheets of A100, H100, H200 and DGX B200, flops without sparsity; GPUS for hbm and vector.
    """

    kind: str
    hbm: float
    bandwidth: float
    flops: float
    vector: float
    link: float
    ring: int | None = None
    network: float | None = None
    cores: int = 1


def tpu_chip(kind: str, hbm_gib: float, flops: float, vector: float, link: float, **other) -> Chip:
    return Chip(kind, hbm_gib * 2**30, BANDWIDTH[kind], flops, vector, link, **other)


def gpu_chip(name: str, flops: float, link: float) -> Chip:
    gpu = GPUS[name]
    vector = gpu.processors * gpu.lanes * gpu.clock * 1e9
    return Chip(gpu.name, MEMORY_SHARE * gpu.memory, BANDWIDTH[gpu.name], flops, vector, link)


CHIPS = {
    "v5e": tpu_chip("TPU v5 lite", 15.75, 197e12, vector=6.1e12, link=50e9, ring=16, network=3.125e9),
    "v6e": tpu_chip("TPU v6 lite", 31.25, 918e12, vector=7.2e12, link=100e9, ring=16, network=12.5e9),
    "v5p": tpu_chip("TPU v5p", 95.74, 459e12, vector=14.3e12, link=100e9, ring=4, network=6.25e9),
    "tpu7x": tpu_chip("TPU7x", 94.75, 1153.5e12, vector=7.2e12, link=100e9, ring=4, network=12.5e9, cores=2),
    "a100": gpu_chip("a100", flops=312e12, link=300e9),
    "h100": gpu_chip("h100", flops=989e12, link=450e9),
    "h200": gpu_chip("h200", flops=989e12, link=450e9),
    "b200": gpu_chip("b200", flops=2250e12, link=900e9),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or several equal slices of TPUs, or GPUs that a switch joins.

    chip: None of devices whose data sheet is not known, such as CPUs. sizes: chips along each axis of the
    torus of one slice; none of GPUs.
    """

    name: str
    chip: Chip | None
    sizes: tuple[int, ...]
    devices: tuple
    slices: int = 1


def topology_of(devices: Sequence[jax.Device], slices: int) -> Topology:
    """How these devices are joined, as far as they say. slices: see placement.slice_count."""
    kind = devices[0].device_kind
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    sizes = ()
    if chip and devices[0].platform == "tpu":
        first = [x.coords for x in devices if x.slice_index == devices[0].slice_index]
        sizes = tuple(max(axis) - min(axis) + 1 for axis in zip(*first, strict=True))
    return Topology(kind, chip, sizes, tuple(devices), slices)
