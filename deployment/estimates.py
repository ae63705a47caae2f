"""How long a step would take by the data sheets: its memory traffic, its arithmetic and its collectives."""

import collections

from jax.sharding import Mesh

from deployment.chips import Chip, Topology
from deployment.job import Job, local_tokens
from model import SoftmaxAttention
from sharding.mesh import COPIES, HEADS, MODEL, SLOTS, STAGE, mesh_size
from sharding.stages import first_stage

# The latency from one TPU to the next, at best and with caution. jax-ml/scaling-book, sharding.md, calls the
# second one typical. Steps of 8 rows were measured to take longer than their estimate with the first one, and
# not longer than the cautious estimate: docs/tpu.md, "Beside jax-llm-examples".
HOP_SECONDS, CAUTIOUS_HOP_SECONDS = 0.5e-6, 1e-6
# What NCCL reckons with for a collective to begin, and for a step of its ring on NVLink, by its protocol for
# small messages. Source: NVIDIA/nccl 2.30.7, src/graph/tuning.cc, baseLatencies and hwLatencies.
START_SECONDS, STEP_SECONDS = 6.6e-6, 0.6e-6


def collective_seconds(
    kind: str, size: float, group: int, topology: Topology, cautious: bool = False
) -> float:
    """Estimate for `size` bytes among `group` devices: half a microsecond per hop, and the links' bandwidth.

    The group spans the longest axes of the torus, as few axes as can hold it. Its bytes are divided among
    these axes, and go one way along each, or both ways where the axis wraps around; an all-reduce sends them
    twice. The hops are those across the group, once. In a permutation all bytes of a device go to a neighbor.
    The links are assumed to carry nothing else. Source: scaling-book, sharding.md. GPUs: see `ring_seconds`.

    cautious: a hop takes a microsecond, and an all-reduce crosses the group twice, to scatter sums and to
    gather them, as it does in libtpu's programs.
    """
    if not topology.sizes:
        return ring_seconds(kind, size, group, topology.chip)
    hop = CAUTIOUS_HOP_SECONDS if cautious else HOP_SECONDS
    if kind == "collective-permute":
        return hop + size / topology.chip.link
    chips, links, hops = -(-group // topology.chip.cores), 0, 0
    for axis in sorted(topology.sizes, reverse=True):
        n = min(axis, chips)
        chips = -(-chips // n)
        if n > 1:
            wraps = n == axis and n % topology.chip.ring == 0
            links, hops = links + (2 if wraps else 1), hops + (n // 2 if wraps else n - 1)
    both_ways = 2 if kind == "all-reduce" else 1
    sent = both_ways * size * (group - 1) / group
    hops *= both_ways if cautious else 1
    return hops * hop + sent / (topology.chip.link * max(links, 1))


def ring_seconds(kind: str, size: float, group: int, chip: Chip) -> float:
    """Estimate for `size` bytes among `group` GPUs that a switch joins, which pass them on in a ring.

    Each step takes a latency, and the bytes that a GPU sends in all steps go over all of its links.
    """
    if kind == "collective-permute":
        return START_SECONDS + STEP_SECONDS + size / chip.link
    steps = (group - 1) * (2 if kind == "all-reduce" else 1)
    return START_SECONDS + steps * STEP_SECONDS + size * steps / group / chip.link


def network_seconds(size: float, topology: Topology) -> float:
    """Estimate for `size` bytes that each device sends to another slice, over its share of the network.

    The latency of the network is left out, since no figure for it is published.
    """
    return size / (topology.chip.network / topology.chip.cores)


def expected_collectives(job: Job, mesh: Mesh, topology: Topology) -> float:
    """Seconds of all layers' collectives, before anything is compiled.

    A layer has two all-reduces, and two small collectives where devices share a key/value head.
    """
    cfg, rows, seconds = job.cfg, local_tokens(job, mesh), 0.0
    devices, heads, copies, slots = (mesh_size(mesh, axes) for axes in (MODEL, HEADS, COPIES, SLOTS))
    for kind, count in collections.Counter(first_stage(cfg, mesh.shape[STAGE]).layers).items():
        sent = [("all-reduce", 2 * rows * cfg.D, devices)] * 2
        if isinstance(kind.attention, SoftmaxAttention):
            K, G, layout = kind.attention.K // heads, kind.attention.G / copies, kind.attention.slot_layout
            new = 0 if kind.shares_kv else layout.width
            sent += [("all-gather", 2 * rows * K * (G * layout.key + new), slots)]
            sent += [("all-to-all", 4 * rows * K * G * (layout.value_width + 1), slots)]
        seconds += count * sum(collective_seconds(*x, topology) for x in sent if x[2] > 1)
    return seconds


def resource_seconds(bytes_read: float, flops: float, collectives: float, chip: Chip) -> dict[str, float]:
    """How long each resource alone takes, at the data sheet's speed."""
    return {"memory": bytes_read / chip.bandwidth, "compute": flops / chip.flops, "interconnect": collectives}


def step_seconds(seconds: dict[str, float]) -> float:
    """HBM and matrix units work at the same time; collectives are assumed to overlap with neither."""
    return max(seconds["memory"], seconds["compute"]) + seconds["interconnect"]
