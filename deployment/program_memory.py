"""How much memory a device needs for compiled programs, beside weights and cache: an estimate for TPUs.

Before anything is compiled, the memory of a device must be divided. A program takes memory for its code as
long as it is there, and for its temporaries while it runs. The constants are bounds on what the TPU compiler
says of the models and slices in the table of docs/tpu.md; the command there compares them with other models.
"""

import dataclasses
import math

import jax
from jax.sharding import Mesh

import model
from model import Config, MoE
from ops.grouped_matmul import FEW_ROWS
from ops.kv_cache import LANES
from ops.platform import on_tpu
from serving.chunks import chunk_shapes
from serving.executors import MOST_LAYERS, layer_groups
from serving.requests import OPTION_SETS
from serving.steps import MOST_SCORED
from sharding.arrays import abstract
from sharding.collective_matmul import column_ring
from sharding.mesh import MODEL, ROWS, STAGE, mesh_size
from sharding.stages import first_stage

MB = 10**6
# Code of a compiled layer in a decode step. Seen: 0.2 to 2 on v5e, 1.3 on v6e and 1.5 on v5p. It is 0.2 where
# the compiler shares code between layers; when it does so is not known.
DECODE_CODE = 2 * MB
# Code of a compiled layer in a prefill chunk, by its shape. Seen on v5e: up to 3.7, 8.1, 4.1, 7.4, 9.4 and
# 9.4. A decode step that verifies drafts is like the first one: 3.2 with 8 rows of 5 tokens.
PREFILL_CODE = {
    (1, 32): 4 * MB,
    (4, 32): 9 * MB,
    (1, 128): 4.5 * MB,
    (4, 128): 10 * MB,
    (1, 512): 10 * MB,
    (1, 2048): 10 * MB,
}
# The same where the residual stream is divided by columns. Seen: up to 9.4, 8.4, 14.7, 15.2 and 17.3, with 8
# chips of v5e.
COLUMNS_CODE = {(4, 32): 10 * MB, (1, 128): 9 * MB, (4, 128): 16 * MB, (1, 512): 16 * MB, (1, 2048): 18 * MB}
# Code of a compiled layer in a decode step by columns. Seen with 16 chips of v5e: of 80 layers 0.5, and of 8
# layers, between which the compiler shared no code, 3.7.
DECODE_COLUMNS_CODE = 4 * MB
# The same in a decode step that routes more than FEW_ROWS tokens to experts. Seen: from 2.0 to 3.3 with 128
# rows of int8 or MXFP4, and 5.1 with 176 rows of int4.
MANY_TOKENS_CODE = 6 * MB
# Code of the decode steps beside their layers, which choose greedily, at random, and with all options. Seen:
# 4, 11 and 24; with drafts the last one has 36.
SAMPLING_CODE = 45 * MB
# Code of all others: what comes before and after the layers of a chunk, and what assigns and copies rows.
OTHER_CODE = 20 * MB
# Temporaries of a program per layer, whatever the layer's size. Seen: up to 1.9.
LAYER_TEMPORARIES = 2 * MB
# Temporaries of a program beside its layers and the arrays that are counted below, whatever their sizes. Seen
# with jax 0.10.2 and 0.12.0, in models of 128 columns and a vocabulary of 512 tokens: 0.8 in the greedy
# decode step, 2.5 in the decode step with all options, and up to 2.5 in a prefill chunk.
OTHER_TEMPORARIES = 3 * MB
# Arrays [rows,T,V] of float32 that a decode step has at the same time when it chooses at random: so many with
# V as the last dimension, and so many more with the rows as the last one, padded to whole tiles. Each device
# draws for the whole vocabulary, so that the draw does not depend on the mesh. Seen: 2 and 2, of 160 rows on
# one chip.
SAMPLING_ARRAYS = 2.1


@dataclasses.dataclass(frozen=True)
class ProgramBytes:
    """Bytes of each device. code: of all programs. temporaries: the most that any program needs."""

    code: int = 0
    temporaries: int = 0


def program_bytes(cfg: Config, mesh: Mesh, rows: int, tokens: int = 1) -> ProgramBytes | None:
    """What the programs of a batch need; None where nothing was measured, which is on CPUs and on GPUs.

    rows: of the batch. tokens: the most that a decode step reads of a row, see Programs.width.
    """
    if not on_tpu(mesh):
        return None
    stages, kinds = mesh.shape[STAGE], first_stage(cfg, mesh.shape[STAGE]).layers
    depth, reading_rows = len(kinds), rows // mesh_size(mesh, ROWS)
    shapes = chunk_shapes(cfg, mesh, reading_rows)
    # Several stages have one program for a chunk, and one decode program.
    groups = {kinds[i:end] for i, end in layer_groups(kinds, MOST_LAYERS)} if stages == 1 else {kinds}
    prefill_layers, decode_programs = sum(map(len, groups)), len(OPTION_SETS) if stages == 1 else 1

    reading = reading_rows * tokens
    per_layer = DECODE_CODE if tokens == 1 else min(PREFILL_CODE.values())
    per_layer = DECODE_COLUMNS_CODE if column_ring(cfg, (rows, tokens), mesh) else per_layer
    per_layer = MANY_TOKENS_CODE if cfg.moe and reading > FEW_ROWS else per_layer
    code = decode_programs * depth * per_layer + SAMPLING_CODE * min(tokens, 2) + OTHER_CODE
    for shape in shapes:
        by_columns = column_ring(cfg, (shape.rows * mesh_size(mesh, ROWS), shape.width), mesh)
        code += prefill_layers * (COLUMNS_CODE if by_columns else PREFILL_CODE)[shape]

    activations, logits = activation_bytes(cfg, mesh), 4 * -(-cfg.V // mesh_size(mesh, MODEL))
    padded = -(-reading // LANES) * LANES
    sampling = SAMPLING_ARRAYS * (reading + padded) * 4 * cfg.V
    decode = depth * LAYER_TEMPORARIES + reading * activations + sampling
    largest = max(shape.tokens for shape in shapes)
    prefill = max(map(len, groups)) * LAYER_TEMPORARIES + largest * activations
    scores = min(largest, MOST_SCORED) * logits + largest * 4 * cfg.D  # beside the hidden states
    return ProgramBytes(round(code), round(max(decode, prefill, scores) + OTHER_TEMPORARIES))


def activation_bytes(cfg: Config, mesh: Mesh) -> int:
    """Bytes of what one layer computes for a token on each device, as if all of it existed at the same time.

    That is a bfloat16 for each row of the weights that the token goes through, and some of the model's width:
    two beside the layer, and two for each expert of the token.
    """
    widths = []
    for kind in set(cfg.layers):
        infos, experts = model.layer_infos(kind, cfg.D), 0
        if isinstance(kind.feed_forward, MoE):
            experts = kind.feed_forward.A
            routed = infos.feed_forward
            infos = dataclasses.replace(infos, feed_forward=routed.shared)
        shards = (x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(abstract(infos, mesh, "bfloat16")))
        widths.append(sum(map(math.prod, shards)) // cfg.D + 2 * cfg.D * (1 + experts))
    return 2 * max(widths)
