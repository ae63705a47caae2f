"""The step that is to be compiled: a decode step or a prefill chunk, its arguments, and their parts."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deployment.memory import Deployment
from deployment.step_bytes import layer_of, named_leaves
from model import Config
from quantize import INT8, Format
from serving.steps import DecodeStep, PrefillChunk
from sharding.arrays import abstract
from sharding.mesh import ROWS, STAGE, mesh_size
from sharding.stages import first_stage, stage_input_infos


@dataclasses.dataclass(frozen=True)
class Job:
    """A step of `batch` rows whose caches have `context` slots, all of them filled, those of rings too.

    tokens: new tokens of each row that the step reads. One is a decode step, which reads all rows; more are a
    prefill chunk, which chooses no token. reading: how many rows a prefill chunk reads; see `prefill`.
    With several stages of layers it is one turn: each stage computes for another part of the rows.
    """

    cfg: Config
    batch: int
    context: int
    format: Format | None = INT8
    kv_dtype: str = "int8"
    dtype: str = "bfloat16"
    tokens: int = 1
    reading: int = 0

    def prefill(self, tokens: int, mesh: Mesh, rows: int = 1) -> "Job":
        """A chunk of prompts as the engine reads it: up to `tokens` tokens of as many rows per data shard."""
        return dataclasses.replace(self, tokens=tokens, reading=rows * mesh_size(mesh, ROWS))

    @property
    def decodes(self) -> bool:
        return self.tokens == 1

    @property
    def rows(self) -> int:
        """How many rows the step reads."""
        return self.batch if self.decodes else self.reading

    def arguments(self, mesh: Mesh) -> dict:
        """step, weights and batch: shapes and shardings, without data."""
        each = jax.ShapeDtypeStruct((self.rows,), jnp.int32, sharding=NamedSharding(mesh, P(ROWS)))
        deployment = Deployment(self.cfg, mesh, self.dtype, self.format, self.kv_dtype)
        weights, batch = deployment.abstract_weights(), deployment.abstract_batch(self.batch, self.context)
        if mesh.shape[STAGE] > 1:
            inputs = stage_input_infos(self.cfg.D, self.batch, [(self.rows, self.tokens)])
            batch = batch.replace(stage_inputs=abstract(inputs, mesh, jnp.bfloat16))
        chunk = PrefillChunk(rows=each, count=each, width=self.tokens)
        return dict(step=DecodeStep(count=each) if self.decodes else chunk, weights=weights, batch=batch)

    def waiting_bytes(self, mesh: Mesh) -> int:
        """Bytes of one device for the caches of the other turns, which wait while this turn runs."""
        if mesh.shape[STAGE] == 1:
            return 0
        caches = sum(n for name, _, n in self.shards(mesh) if re.match(r"batch\.(?!stage_inputs)", name))
        return caches * (mesh.shape[STAGE] - 1)

    def shards(self, mesh: Mesh) -> Iterator[tuple[str, int, float]]:
        """(name, elements, bytes) of one device's shard of each argument.

        Of layers that are alike, which large models have dozens of, the first one stands for all.
        """
        stages, layers = mesh.shape[STAGE], self.cfg.layers
        counts = collections.Counter(first_stage(self.cfg, stages).layers)
        cfg = dataclasses.replace(self.cfg, layers=tuple(counts) * stages)
        for name, x in named_leaves(**dataclasses.replace(self, cfg=cfg).arguments(mesh)):
            size, layer = math.prod(x.sharding.shard_shape(x.shape)), layer_of(name)
            if layer is not None:
                kind = cfg.layers[layer]
                name = name.replace(f"[{layer}]", f"[{layers.index(kind)}]", 1)
                size *= counts[kind]
            yield name, size, size * jax.dtypes.itemsize_bits(x.dtype) / 8


def local_tokens(job: Job, mesh: Mesh) -> int:
    """New tokens on one device: those of the rows of its data shard."""
    return job.rows // mesh_size(mesh, ROWS) * job.tokens
