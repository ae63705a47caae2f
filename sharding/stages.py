"""Pipeline stages: each stage holds an equal part of the layers and passes its activations to the next.

The rows are divided into as many microbatches as there are stages, and the microbatches take turns. With
three stages, this is the microbatch whose tokens go through each stage's layers:

    turn       0    1    2    3    4    5
    stage 0    a    b    c    a    b    c
    stage 1         a    b    c    a    b
    stage 2              a    b    c    a

In a turn all stages run the same program, each on its own microbatch. The program treats stages as data
shards whose layers' weights differ. At the end of a turn each stage sends its activations to the next stage,
and the last stage sends the tokens that it chose to the first, which is about to read them. So a microbatch
gets a token every three turns, and a turn takes as long as a third of the layers.

Each stage keeps one Cache per microbatch. In turn t every stage uses its Cache number t % 3, which in stage s
is that of microbatch (t - s) % 3. What the host says about a microbatch (rows, counts) reaches the first
stage in turn t and stage s in turn t + s.

The functions below take and return global arrays.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharding.arrays import ArrayInfo, pytree
from sharding.collective_matmul import BY_COLUMNS, own_columns
from sharding.mesh import MODEL, ROWS, STAGE


def first_stage(cfg, stages: int):
    """The Config of one stage's layers. All stages are alike: see mesh.mesh_shape."""
    return dataclasses.replace(cfg, layers=cfg.layers[: len(cfg.layers) // stages])


def in_stages(infos, stages: int):
    """Declared weights of all layers -> those of several stages.

    The arrays of layer i get a leading axis p, with the i-th layer of each stage, one slice per stage.
    """
    if stages == 1:
        return infos
    layers = infos.layers[: len(infos.layers) // stages]
    return dataclasses.replace(infos, layers=jax.tree.map(lambda info: info.in_stages(stages), layers))


@pytree
class StageInputs:
    """What each stage received at the end of the last turn.

    hidden: {(B,T): [b,T,d]}, activations from the previous stage, of which each device sends its columns: for
    1 token of each row (decode steps) and for each shape of prefill chunks.
    tokens: [b,1] int32, in the first stage what the last one chose.
    """

    hidden: dict[tuple[int, int], Array]
    tokens: Array


def stage_input_infos(D: int, rows: int, read: Iterable[tuple[int, int]]) -> StageInputs:
    """The declared inputs of stages. rows: of decode steps. read: (B, T) of each shape of prefill chunks."""
    hidden: Any = {(B, T): ArrayInfo("bTd", shape=(B, T, D)) for B, T in [(rows, 1), *read]}
    tokens: Any = ArrayInfo("bT", shape=(rows, 1), dtype=jnp.int32)
    return StageInputs(hidden=hidden, tokens=tokens)


def is_last() -> Array:
    """Whether this device is in the last stage. Inside shard_map."""
    return lax.axis_index(STAGE) == lax.axis_size(STAGE) - 1


def enter(x: Array, received: Array, mesh: Mesh) -> Array:
    """The input of each stage's layers: x [B,T,D] in the first, in the others what was received."""

    # shard_map does not know that an all-gather gives all devices the same result, so it cannot check this.
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(ROWS), BY_COLUMNS), out_specs=P(ROWS), check_vma=False)
    def on_device(x: Array, received: Array) -> Array:
        received = lax.all_gather(received, MODEL, axis=2, tiled=True)
        return jnp.where(lax.axis_index(STAGE) == 0, x, received)

    return on_device(x, received)


def pass_on(x: Array, mesh: Mesh) -> Array:
    """Send activations [B,T,D] to the next stage: -> what each stage received; zeros in the first."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P(ROWS), out_specs=BY_COLUMNS)
    def on_device(x: Array) -> Array:
        return lax.ppermute(own_columns(x), STAGE, [(i, i + 1) for i in range(lax.axis_size(STAGE) - 1)])

    return on_device(x)


def from_last_stage(tree, mesh: Mesh):
    """Broadcast the last stage's rows to all stages: global arrays [B,...] -> [B/stages,...]."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P(ROWS), out_specs=P("data"))
    def on_device(tree):
        return jax.tree.map(lambda x: lax.psum(jnp.where(is_last(), x, 0), STAGE), tree)

    return on_device(tree)


def to_all_stages(x: Array, mesh: Mesh) -> Array:
    """The reverse of `from_last_stage`: every stage gets the same rows as its own."""
    return jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P(ROWS))(x)
