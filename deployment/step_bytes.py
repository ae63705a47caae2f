"""The bytes that a step must read from a device's memory: the weights in use, and the slots that are filled.

The planner adds up the same shares of the weights, see deployment/floor.py.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.polynomial.polynomial import polypow

from deployment.memory import shard_bytes
from model import Config, LayerKind, MoE, Recurrent, Weights
from ops.kv_cache import cached_depth
from sharding.mesh import EXPERT, MODEL, STAGE, mesh_size
from sharding.stages import first_stage


def named_leaves(**trees) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of all leaves, in order: weights.layers[0].attention.q.values, for example."""
    for root, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            yield root + jax.tree_util.keystr(path), x


def layer_of(argument: str) -> int | None:
    """The number of the layer that an argument of a step belongs to, by its name; None if to none."""
    found = re.search(r"\.(?:layers|kept)\[(\d+)\]", argument)
    return int(found[1]) if found else None


PARTS = ("attention", "mlp", "experts", "kv_cache", "embedding", "other")


def part_of(argument: str, cfg: Config) -> str:
    """Which of PARTS an argument of a step belongs to, by its name."""
    if argument.startswith("batch.cache.layers"):
        return "kv_cache"
    if re.match(r"weights\.((un)?embed|inputs\.table)\b", argument):
        return "embedding"
    found = re.match(r"weights\.layers\[(\d+)\]\.(attention|feed_forward)\.(\w+)", argument)
    if not found or found[2] == "attention":
        return found[2] if found else "other"
    routed = isinstance(cfg.layers[int(found[1])].feed_forward, MoE)
    return "experts" if routed and re.fullmatch("(gate|up|down)(_bias)?", found[3]) else "mlp"


def is_state(argument: str, cfg: Config) -> bool:
    """Whether an argument of a step is the memory of a layer that has a state in the place of a cache."""
    layer = layer_of(argument) if argument.startswith("batch.cache.layers") else None
    return layer is not None and isinstance(cfg.layers[layer].mask, Recurrent)


def active_experts(cfg: Config, tokens: float, shards: int) -> float:
    """The expected fraction of its experts that the busiest of `shards` expert shards reads in a step.

    The other shards wait for it. Of a dense model it is 1. tokens: of a step on one data shard, or their mean
    over steps. Each token goes to A of the E experts at random, which leaves E (1 - A/E)^tokens of them idle.
    """
    if not cfg.moe:
        return 1.0
    E, A = cfg.moe.E, cfg.moe.A
    if shards == 1:
        return 1 - (1 - A / E) ** tokens
    less, part = int(tokens), tokens % 1
    mean = (1 - part) * busiest_shard(E, A, less, shards)
    return mean + part * busiest_shard(E, A, less + 1, shards) if part else mean


@functools.cache
def busiest_shard(E: int, A: int, tokens: int, shards: int) -> float:
    """See `active_experts`.

    By symmetry all C(E, n) sets of n experts are equally likely to be in use. The coefficient of x^n in
    (sum_{k<=m} C(E/shards, k) x^k)^shards is the number of these sets with at most m experts in each shard.
    """
    size, mean, in_use = E // shards, 0.0, experts_in_use(E, A, tokens)
    sets = np.array([float(math.comb(E, n)) for n in range(E + 1)])
    for m in range(size):  # the mean of a count is the sum of its probabilities to exceed m
        within = polypow([float(math.comb(size, k)) for k in range(m + 1)], shards)
        mean += 1 - in_use[: within.size] @ (within / sets[: within.size])
    return float(mean) / size


@functools.cache
def experts_in_use(E: int, A: int, tokens: int) -> np.ndarray:
    """The probabilities that 0, 1, ... E experts are in use when each token goes to A of them at random."""
    step = np.zeros((E + 1, E + 1))  # step[n + new, n]: that one more token increases them from n by `new`
    for new in range(A + 1):
        n = np.arange(E + 1 - new)
        ways = [math.comb(E - k, new) * math.comb(k, A - new) for k in n.tolist()]
        step[n + new, n] = [x / math.comb(E, A) for x in ways]
    in_use, before = np.eye(E + 1)[0], None
    for _ in range(tokens):
        in_use, before = step @ in_use, in_use
        if (in_use == before).all():  # all of them
            break
    return in_use


def share_read(name: str, cfg: Config, experts: float, chooses: bool = True) -> float:
    """The share of a weight that a step must read.

    name: of the weight, see `named_leaves`. experts: the share of the experts that are active. chooses:
    whether the step computes logits. Of tables nothing counts, since a step looks up a few rows of them.
    """
    if re.match(r"weights\.(norm|unembed)\b", name):
        return 1 if chooses else 0
    if re.match(r"weights\.embed\b", name):
        return 1 if chooses and cfg.tied_embeddings else 0
    if re.match(r"weights\.(positions|inputs\.table)\b", name):
        return 0
    if not chooses and (layer_of(name) or 0) >= cached_depth(cfg.layers):
        return 0
    return experts if part_of(name, cfg) == "experts" else 1


def bytes_per_step(
    weights: Weights,
    cfg: Config,
    mesh: Mesh,
    batch: float,
    positions: np.ndarray,
    kv_dtype: str,
    chooses: bool = True,
) -> float:
    """Bytes that a device must read in a step, and write of states: the device that reads the most experts.

    batch: tokens of a data shard, in a decode step one for each row. positions: of the tokens of many steps,
    over which the filled slots of the cache are averaged; an empty array leaves the cache out. chooses: see
    `share_read`.
    """
    experts = active_experts(cfg, batch, mesh_size(mesh, EXPERT))
    weight_leaves = named_leaves(weights=weights)
    total = sum(shard_bytes(x) * share_read(name, cfg, experts, chooses) for name, x in weight_leaves)
    for kind in first_stage(cfg, mesh.shape[STAGE]).layers if len(positions) else ():
        each, times = read_at_a_time(kind, kv_dtype)[0], np.mean(times_read(kind, positions))
        total += batch * times * each * transfers(kind) / mesh_size(mesh, MODEL)
    return total


def read_at_a_time(kind: LayerKind, kv_dtype: str) -> tuple[float, float]:
    """Of a slot of a row's cache, or of a row's state: (bytes, operations of a token that reads it)."""
    size_in_bytes = operations = 0
    for name, x in named_leaves(memory=kind.attention.memory_info(kind.mask, 1, 1, jnp.dtype(kv_dtype))):
        size, array = math.prod(x.shape), name.rpartition(".")[2]
        size_in_bytes += size * jnp.dtype(x.dtype).itemsize
        operations += size * kind.attention.operations.get(array, 0)
    return size_in_bytes, operations


def transfers(kind: LayerKind) -> int:
    """How often a step moves what it reads of a layer's memory: a state it writes, too."""
    return 2 if isinstance(kind.mask, Recurrent) else 1


def times_read(kind: LayerKind, positions: np.ndarray) -> np.ndarray:
    """How many slots the tokens at these positions read; a state they read once."""
    if isinstance(kind.mask, Recurrent):
        return np.ones_like(positions)
    return positions - kind.mask.first_visible(positions) + 1
