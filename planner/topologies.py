"""TPU chips, as their data sheets describe them, and slices of them, as the TPU compiler knows them."""

import dataclasses
import importlib.util
import re

from jax.experimental import topologies

from feedback.errors import UserError
from serving.memory import BANDWIDTH


@dataclasses.dataclass(frozen=True)
class Chip:
    """The resources of one jax device; a chip has `cores` jax devices.

    hbm: bytes that the compiler lets a program use. bandwidth: of HBM, bytes/s. flops: bfloat16, per second.
    vector: operations per second of the vector units, which do 4 x 1024 per cycle and core. link: bytes/s of
    one interconnect link, one way. An axis of the torus wraps around if its length is a multiple of `ring`.
    network: bytes/s per chip of the network that joins slices. Source: libtpu 0.0.42 for hbm;
    docs.cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}, where link is the bidirectional bandwidth per chip /
    ports / 2, and network that per pod / chips; jax-ml/scaling-book tpus.md for ring and vector (that of
    tpu7x is not published: it is v6e's).
    """

    hbm: float
    bandwidth: float
    flops: float
    vector: float
    link: float
    ring: int
    network: float
    cores: int = 1


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
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or several equal slices of TPUs. sizes: chips along each axis of the torus of one slice."""

    name: str
    chip: Chip
    sizes: tuple[int, ...]
    devices: tuple
    slices: int = 1


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology with a name like v5e:4x4. Raises UserError if there is none, or no TPU compiler."""
    kind, _, shape = name.partition(":")
    dimensions = 2 if kind in ("v5e", "v6e") else 3
    if kind not in CHIPS or not re.fullmatch("x".join([r"[1-9]\d{0,2}"] * dimensions), shape):
        raise UserError(f"--topology {name}: not of the form v5e:4x4, v6e:4x4, v5p:2x2x1 or tpu7x:2x2x1")
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
