"""What the memory of a device holds, and what a decode step reads of it."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import socket

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import Mesh
from numpy.polynomial.polynomial import polypow

import model
from checkpoints.checkpoint import Checkpoint
from checkpoints.errors import UserError
from distributed.exchange import gather
from model import Config, Experts
from ops.platform import platform
from quantize import FORMATS, Format
from sharding.arrays import abstract
from sharding.mesh import EXPERT, MODEL, STAGE, mesh_size

ROWS = 32  # of the batch, unless the user says otherwise
HEADROOM = 0.1  # of the memory, left to temporaries where the user does not say how many rows

# Memory bandwidth of one jax device (of a TPU7x chip there are two), bytes per second, by jax's device_kind,
# from the vendors' data sheets.
BANDWIDTH = {
    "TPU v4": 1.228e12, "TPU v5 lite": 0.819e12, "TPU v5": 2.765e12, "TPU v5p": 2.765e12,
    "TPU v6 lite": 1.638e12, "TPU7x": 3.69e12, "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12,
}  # fmt: skip


def shard_bytes(tree) -> int:
    """Bytes that each device holds of a tree of arrays, or of their abstract shapes."""
    shards = ((x.sharding.shard_shape(x.shape), itemsize_bits(x.dtype)) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * bits for shape, bits in shards) // 8


def host_memory(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or what a container's limits leave of it.

    root: of the file system. Linux keeps the limits in the process' control groups and those above them, of
    version 2 in one tree, of version 1 in a tree per resource.
    """
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, resources, group = line.split(":", 2)
        if resources and "memory" not in resources.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if resources else "sys/fs/cgroup")
        below = top / group.lstrip("/")  # in a container it may be missing: then its own group is the top
        for folder in (below, *below.parents):
            limit = folder / ("memory.limit_in_bytes" if resources else "memory.max")
            with contextlib.suppress(OSError, ValueError):  # no limit: not there, "max", or very large
                sizes.append(int(limit.read_text()))
    return min(sizes)


def device_memory() -> int:
    """Bytes of memory of the device that has the least, in any process. CPU devices share their host's."""
    own = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    every = gather(dict(host=socket.gethostname(), own=own, memory=host_memory()))
    sharing = collections.Counter()
    for process in every:
        sharing[process["host"]] += process["own"].count(None)
    shares = [
        process["memory"] // sharing[process["host"]] if own is None else own
        for process in every
        for own in process["own"]
    ]
    return min(shares)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model as it is to be loaded, and what its arrays will take. checkpoint: None for random weights."""

    cfg: Config
    mesh: Mesh
    dtype: str
    format: Format | None
    kv_dtype: str
    checkpoint: Checkpoint | None = None

    def weight_bytes(self) -> int:
        infos = model.weight_infos(self.cfg, self.mesh.shape[STAGE], self.format)
        return shard_bytes(abstract(infos, self.mesh, jnp.dtype(self.dtype)))

    def cache_bytes(self, rows: int, max_len: int) -> int:
        stages = self.mesh.shape[STAGE]
        infos = model.cache_infos(self.cfg, rows, max_len, jnp.dtype(self.kv_dtype), stages)
        return shard_bytes(abstract(infos, self.mesh)) * stages


def fit_cache(
    models: list[Deployment], lengths: list[int], rows: int | None, max_len: int | None
) -> tuple[int, int]:
    """How many rows of how many positions to allocate for requests of these lengths: -> (rows, max_len).

    models: one, and perhaps one that drafts for it. rows, max_len: what the user fixed. By default a row
    for each request, but at most ROWS, as long as the longest; fewer where the memory does not hold them, and
    then shorter ones, for which the longest requests are too long. Temporaries are not counted.

    Raises UserError if not even the shortest request fits.
    """
    shards, limit = mesh_size(models[0].mesh, (STAGE, "data")), min(x.cfg.max_positions for x in models)

    def rounded(length: int) -> int:
        return min(limit, -(-length // 128) * 128)  # few sizes to compile for

    counts = [rows or min(ROWS, len(lengths))]
    while not rows and counts[-1] > shards:
        counts.append(max(counts[-1] // 2, shards))
    counts = [-(-count // shards) * shards for count in counts]
    choices = [(count, max_len or rounded(max(lengths))) for count in counts]
    if not max_len:
        choices += [(counts[-1], length) for length in sorted({rounded(n) for n in lengths}, reverse=True)]
    weights, have = sum(x.weight_bytes() for x in models), device_memory()
    for choice in choices:
        if weights + sum(x.cache_bytes(*choice) for x in models) <= have * (1 if rows else 1 - HEADROOM):
            return choice

    count, length = choices[0] if rows else choices[len(counts) - 1]
    cache = sum(x.cache_bytes(count, length) for x in models)
    if weights > cache:  # remedies for the larger of the two
        bits, remedies = max(x.format.bits if x.format else 16 for x in models), []
        for name, format in FORMATS.items():
            if format and (fewer := format.on(platform(models[0].mesh)).bits) < bits:
                remedies, bits = [*remedies, f"--quantize {name}"], fewer
    else:
        remedies = ["--kv-cache-dtype int8"] * (models[0].kv_dtype != "int8")
        remedies += ["fewer rows"] * (count > shards) + ["shorter rows"]
    remedies += ["more devices"]
    weights, cache, have = (f"{size / 2**30:.2f} GiB" for size in (weights, cache, have))
    needs = (
        f"each device needs {weights} for weights and {cache} for its share of {count} x {length} positions"
    )
    raise UserError(f"does not fit: {needs}, and has {have}; try {', '.join(remedies)}")


@functools.cache
def active_experts(cfg: Config, tokens: float, groups: int) -> float:
    """The share of its experts that a group of devices reads: of `groups` that divide them, the busiest.

    For it the others wait. tokens: of a step on one data shard, or their mean over steps. Each goes to A of
    the E experts at random, which leaves E (1 - A/E)^tokens of them idle. By symmetry any n experts are
    equally likely to be those in use; in the coefficient of x^n in (sum_{k<=m} C(E/groups, k) x^k)^groups of
    their C(E, n) sets no group has more than m.
    """
    E, A, size = cfg.experts.E, cfg.experts.A, cfg.experts.E // groups
    if groups == 1:
        return 1 - (1 - A / E) ** tokens
    if part := tokens % 1:
        less, more = (active_experts(cfg, float(n), groups) for n in (tokens - part, tokens - part + 1))
        return (1 - part) * less + part * more

    def one_token(n: int, then: int) -> float:
        """The probability that one more token makes n experts in use `then` many."""
        new = then - n
        return math.comb(E - n, new) * math.comb(n, A - new) / math.comb(E, A) if 0 <= new <= A else 0

    counts = range(E + 1)
    step = np.array([[one_token(n, then) for n in counts] for then in counts])
    in_use = np.linalg.matrix_power(step, int(tokens))[:, 0]
    sets, mean = np.array([float(math.comb(E, n)) for n in counts]), 0.0
    for m in range(size):  # the mean of a count is the sum of its chances to exceed 0, 1, 2...
        within = polypow([float(math.comb(size, k)) for k in range(m + 1)], groups)
        mean += 1 - in_use[: within.size] @ (within / sets[: within.size])
    return float(mean) / size


def bytes_per_step(
    weights, cfg: Config, mesh: Mesh, batch: float, positions: np.ndarray, kv_dtype: str
) -> float:
    """Bytes that one device must read for a decode step: the weights in use and the filled cache slots.

    The device is one of those that read the most experts. batch: rows on one data shard. positions: of the
    tokens that steps read, of which the mean counts; none of them for no cache at all.
    """
    scale_bytes = 4 if kv_dtype == "int8" else 0  # a bfloat16 per key and per value
    slot_bytes = cfg.heads.K * (cfg.heads.columns.width * jnp.dtype(kv_dtype).itemsize + scale_bytes)
    total = shard_bytes((weights.norm, weights.embed if cfg.tied_embeddings else weights.unembed))
    for layer, kind in zip(weights.layers, cfg.stage(mesh.shape[STAGE]), strict=True):
        total += shard_bytes(layer)
        if isinstance(kind.feed_forward, Experts):
            routed = layer.feed_forward
            idle = 1 - active_experts(cfg, batch, mesh_size(mesh, EXPERT))
            total -= shard_bytes((routed.gate, routed.up, routed.down)) * idle
        if len(positions):
            slots = np.mean(positions - kind.mask.first(positions)) + 1
            total += batch * slots * slot_bytes / mesh_size(mesh, MODEL)
    return total
