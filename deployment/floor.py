"""The least that a step must read from HBM and compute, from the declared shapes."""

import collections
import dataclasses

from jax.sharding import Mesh

from deployment.chips import Topology
from deployment.job import Job, local_tokens
from deployment.step_bytes import active_experts, layer_of, part_of, share_read, transfers
from model import LayerKind
from ops.grouped_matmul import FEW_ROWS
from ops.kv_cache import cached_depth, kv_owners
from sharding.mesh import COPIES, EXPERT, make_mesh, mesh_size


def share_needed(argument: str, job: Job, mesh: Mesh) -> float:
    """The share of an argument that a step must read.

    Of the rows' text nothing counts, since a few tokens are looked up, nor of states that are kept. Prefill
    reads the caches of some rows, and needs no logits.
    """
    if argument.startswith("weights."):
        experts = active_experts(job.cfg, local_tokens(job, mesh), mesh_size(mesh, EXPERT))
        return share_read(argument, job.cfg, experts, job.decodes)
    if part_of(argument, job.cfg) == "kv_cache":
        return job.rows / job.batch
    return 0 if argument.startswith(("batch.tokens", "batch.kept")) else 1


def needed(job: Job, mesh: Mesh) -> tuple[float, float]:
    """(HBM bytes, floating-point operations) of one device that reads what it needs of its shard.

    It reads all once, but a cache once for each layer that attends to it. A state it writes, too.
    A few tokens go through every active expert, whether they chose it or not: so the experts' kernel works.
    """
    cfg, bytes_read, flops = job.cfg, 0, 0
    depth = len(cfg.layers) if job.decodes else cached_depth(cfg.layers)
    tokens, readers = local_tokens(job, mesh), layers_per_cache(cfg.layers[:depth])
    for name, size, size_in_bytes in job.shards(mesh):
        share, part = share_needed(name, job, mesh), part_of(name, cfg)
        if part == "kv_cache":
            kind = cfg.layers[layer_of(name)]
            share *= readers[kind]
            operations = kind.attention.operations.get(name.rpartition(".")[2], 0)
            # `size` counts all rows. Each copy of a cache is read by a part of the queries.
            flops += operations * size * share * job.tokens / mesh_size(mesh, COPIES)
            share *= transfers(kind)
        elif share:
            chosen = share if tokens <= FEW_ROWS else cfg.moe.A / cfg.moe.E if cfg.moe else 1
            flops += 2 * size * tokens * (chosen if part == "experts" else 1)
        bytes_read += size_in_bytes * share
    return bytes_read, flops


def layers_per_cache(layers: tuple[LayerKind, ...]) -> dict[LayerKind, float]:
    """How many layers read the cache of a layer of each kind, on average: one, unless others share it."""
    reading = collections.Counter(layers[i] for i in kv_owners(layers))
    return {kind: n / layers.count(kind) for kind, n in reading.items()}


def floor_bytes(job: Job, topology: Topology, stages: int = 1) -> float:
    """HBM bytes per device if all arrays were divided evenly, and nothing stored twice or padded.

    With stages, a turn reads all layers, but of each row's cache only the layers of one stage.
    """
    one = make_mesh(job.cfg, devices=topology.devices[:1])
    turn = dataclasses.replace(job, batch=job.batch // stages, reading=job.reading // stages)
    return needed(turn, one)[0] / len(topology.devices)
