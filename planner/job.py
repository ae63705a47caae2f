"""The program that is to be compiled: a decode step or a prefill chunk, its arguments, and their parts."""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from model import Config
from quantize import INT8, Format
from serving import programs
from sharding.arrays import abstract
from sharding.mesh import ROWS, STAGE, mesh_size
from sharding.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Job:
    """A step of `batch` rows whose caches have `context` slots, all of them filled, those of rings too.

    tokens: new tokens of each row. One is a decode step; more are a prefill chunk, which chooses no token.
    With several stages of layers it is one turn: each stage computes for another part of the rows.
    """

    cfg: Config
    batch: int
    context: int
    format: Format | None = INT8
    kv_dtype: str = "int8"
    tokens: int = 1

    @property
    def decodes(self) -> bool:
        return self.tokens == 1

    def arguments(self, mesh: Mesh) -> dict:
        """The arguments of the program: shapes and shardings, without data."""
        stages, cfg = mesh.shape[STAGE], self.cfg
        count = jax.ShapeDtypeStruct((self.batch,), jnp.int32, sharding=NamedSharding(mesh, P(ROWS)))
        weights = abstract(model.weight_infos(cfg, stages, self.format), mesh, jnp.bfloat16)
        infos = model.cache_infos(cfg, self.batch, self.context, jnp.dtype(self.kv_dtype), stages)
        cache = abstract(infos, mesh)
        if stages > 1:
            passed = model.passed_infos(cfg, {1: self.batch, self.tokens: self.batch})
            cache = dataclasses.replace(cache, passed=abstract(passed, mesh, jnp.bfloat16))
        return dict(count=count, weights=weights, cache=cache)

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The decode step, or the prefill chunk of all rows, lowered for the devices of the mesh."""
        arguments = self.arguments(mesh) | dict(cfg=self.cfg, mesh=mesh)
        if self.decodes:
            return model.decode_step.lower(drafts=None, sampling=Sampling(), **arguments)
        return model.prefill.lower(rows=None, width=self.tokens, **arguments)

    def waiting_bytes(self, mesh: Mesh) -> int:
        """Bytes of one device for the caches of the other turns, which wait while this turn runs."""
        caches = sum(n for name, _, n in self.shards(mesh) if re.match(r"cache\.(?!passed)", name))
        return caches * (mesh.shape[STAGE] - 1)

    def shards(self, mesh: Mesh) -> Iterator[tuple[str, int, float]]:
        """(name, elements, bytes) of one device's shard of each argument."""
        for name, x in named_leaves(**self.arguments(mesh)):
            size = math.prod(x.sharding.shard_shape(x.shape))
            yield name, size, size * jax.dtypes.itemsize_bits(x.dtype) / 8


def named_leaves(**trees) -> Iterator[tuple[str, object]]:
    """(name, leaf) of all leaves, in order: weights.layers[0].attention.q.values, for example."""
    for root, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            yield root + jax.tree_util.keystr(path), x


PARTS = ("attention", "mlp", "experts", "kv_cache", "embedding", "other")


def part_of(argument: str, cfg: Config) -> str:
    """Which of PARTS an argument of the compiled program belongs to, by its name."""
    if argument.startswith("cache.layers"):
        return "kv_cache"
    if re.match(r"weights\.(un)?embed\b", argument):
        return "embedding"
    found = re.match(r"weights\.layers\[(\d+)\]\.(attention|feed_forward)\.(\w+)", argument)
    if not found or found[2] == "attention":
        return found[2] if found else "other"
    routed = isinstance(cfg.layers[int(found[1])].feed_forward, model.Experts)
    return "experts" if routed and found[3] not in ("shared", "router") else "mlp"


def local_tokens(job: Job, mesh: Mesh) -> int:
    """New tokens on one device: those of the rows of its data shard."""
    return job.batch // mesh_size(mesh, ROWS) * job.tokens


def prefill_width(batch: int, length: int) -> int:
    """Tokens of each prompt in one prefill chunk of all `batch` rows: fewer for many rows, to save memory."""
    limit = 512
    while limit * batch > 8 * 512 and limit > 16:
        limit //= 2
    return min(limit, programs.prefill_width(length))
