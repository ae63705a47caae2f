"""What the memory of a device holds, and what a decode step reads of it."""

import contextlib
import dataclasses
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import model
from errors import UserError
from model import Config

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
    shards = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


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
    """Bytes of memory per device, on the host that has the least; those on a CPU share the host's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    host = host_memory() // jax.local_device_count()
    have = np.array(stats.get("bytes_limit", host))
    if jax.process_count() > 1:  # all must plan alike
        have = multihost_utils.process_allgather(have).min()
    return int(have)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model that is to be loaded, and what its arrays will take."""

    cfg: Config
    mesh: Mesh
    dtype: str
    quantized: bool
    kv_dtype: str

    def weight_bytes(self) -> int:
        infos = model.weight_infos(self.cfg)
        return shard_bytes(model.abstract(infos, self.mesh, jnp.dtype(self.dtype), self.quantized))

    def cache_bytes(self, rows: int, max_len: int) -> int:
        infos = model.cache_infos(self.cfg, rows, max_len, jnp.dtype(self.kv_dtype))
        return shard_bytes(model.abstract(infos, self.mesh))


def plan_cache(
    plans: list[Plan], lengths: list[int], rows: int | None, max_len: int | None
) -> tuple[int, int]:
    """How many rows of how many positions to allocate for requests of these lengths: -> (rows, max_len).

    plans: of the model, and of one that drafts for it. rows, max_len: what the user fixed. By default a row
    for each request, but at most ROWS, as long as the longest; fewer where the memory does not hold them, and
    then shorter ones, for which the longest requests are too long. Temporaries are not counted.

    Raises UserError if not even the shortest request fits.
    """
    shards, limit = plans[0].mesh.shape["data"], min(plan.cfg.max_positions for plan in plans)

    def rounded(length: int) -> int:
        return min(limit, -(-length // 128) * 128)  # few sizes to compile for

    counts = [rows or min(ROWS, len(lengths))]
    while not rows and counts[-1] > shards:
        counts.append(max(counts[-1] // 2, shards))
    counts = [-(-count // shards) * shards for count in counts]
    choices = [(count, max_len or rounded(max(lengths))) for count in counts]
    if not max_len:
        choices += [(counts[-1], length) for length in sorted({rounded(n) for n in lengths}, reverse=True)]
    weights, have = sum(plan.weight_bytes() for plan in plans), device_memory()
    for choice in choices:
        if weights + sum(plan.cache_bytes(*choice) for plan in plans) <= have * (1 if rows else 1 - HEADROOM):
            return choice

    count, length = choices[0] if rows else choices[len(counts) - 1]
    cache = sum(plan.cache_bytes(count, length) for plan in plans)
    if weights > cache:  # remedies for the larger of the two
        remedies = ["--quantize int8"] * (not all(plan.quantized for plan in plans))
    else:
        remedies = ["--kv-cache-dtype int8"] * (plans[0].kv_dtype != "int8")
        remedies += ["fewer rows"] * (count > shards) + ["shorter rows"]
    remedies += ["more devices"]
    weights, cache, have = (f"{size / 2**30:.2f} GiB" for size in (weights, cache, have))
    needs = (
        f"each device needs {weights} for weights and {cache} for its share of {count} x {length} positions"
    )
    raise UserError(f"does not fit: {needs}, and has {have}; try {', '.join(remedies)}")


def bytes_per_step(weights, cfg: Config, mesh: Mesh, batch: int, mean_length: float, kv_dtype: str) -> float:
    """Bytes that one device must read for a decode step: the weights in use and the filled cache slots.

    batch: rows on one data shard. mean_length: filled positions per row.
    """
    scale_bytes = 2 / cfg.H if kv_dtype == "int8" else 0  # one bfloat16 per key or value
    kv_bytes = jnp.dtype(kv_dtype).itemsize + scale_bytes
    total = shard_bytes((weights.norm, weights.embed if cfg.tied_embeddings else weights.unembed))
    for layer, kind in zip(weights.layers, cfg.layers, strict=True):
        total += shard_bytes(layer)
        if kind.moe:  # batch tokens leave E (1 - A/E)^batch experts alone, on average
            routed = layer.feed_forward
            total -= shard_bytes((routed.gate, routed.up, routed.down)) * (1 - cfg.A / cfg.E) ** batch
        slots = min(mean_length, kind.chunk or math.inf)
        total += batch * slots * 2 * cfg.K * cfg.H * kv_bytes / model.mesh_size(mesh, model.MODEL)
    return total
