"""Layers in stages, inside shard_map: a stage is a data shard that keeps other layers.

The rows are in as many groups as there are stages, and the groups take turns. With three stages, whose tokens
go through which stage's layers:

    turn       0    1    2    3    4    5
    stage 0    a    b    c    a    b    c
    stage 1         a    b    c    a    b
    stage 2              a    b    c    a

All stages run the same program in a turn, each on its own group: to the program they are data shards. At the
end of it each passes on its hidden states, and the last one the tokens that it chose, just when the first one
is to read them. So a group has a token every three turns, of a third of the layers each.

A stage's cache holds its layers' keys and values of all groups, in one Cache for each: in turn t all stages
use Cache t % 3, in which stage s keeps the group (t - s) % 3. What the first stage was told of a group, the
stage s must be told s turns later.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sharding.mesh import MODEL, ROWS, STAGE


def is_last_stage() -> Array:
    return lax.axis_index(STAGE) == lax.axis_size(STAGE) - 1


def enter(x: Array, passed: Array) -> Array:
    """What a stage's layers begin with: x [b,T,D] in the first, in the others what was passed on, [b,T,d]."""
    passed = lax.all_gather(passed, MODEL, axis=2, tiled=True)
    return jnp.where(lax.axis_index(STAGE) == 0, x, passed)


def pass_on(x: Array) -> Array:
    """Send hidden states [b,T,D] to the next stage, each device its share of D: -> what comes, [b,T,d].

    The first stage gets zeros.
    """
    d = x.shape[2] // lax.axis_size(MODEL)
    share = lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * d, d, 2)
    return lax.ppermute(share, STAGE, [(i, i + 1) for i in range(lax.axis_size(STAGE) - 1)])


def result_spec(mesh: Mesh) -> P:
    """How what comes out of the last stage, of its rows, is sharded."""
    return P("data") if mesh.shape[STAGE] > 1 else P(ROWS)


def from_last_stage(tree):
    """The last stage's arrays, in all stages."""
    return jax.tree.map(lambda x: lax.psum(jnp.where(is_last_stage(), x, 0), STAGE), tree)
