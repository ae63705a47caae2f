"""How the layers of a step run: in one program, a few layers at a time, or in pipeline stages.

An executor is a function (step, weights, batch) -> (the step's result, Batch). All of them embed the tokens
that the step reads, run the layers and finish the step; `steps.py` says what a step is. They call each jitted
function through `call`, so that the same executor can also compile its programs on shapes, see
deployment/ahead.py.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from model import Chunk, Config, LayerKind, Weights, without_layers
from ops.kv_cache import cached_depth, kv_owners
from ops.platform import platform
from ops.tpu import declares_vma
from serving.steps import Batch, DecodeStep, PrefillChunk, Step, by_rows
from sharding import stages
from sharding.arrays import specs
from sharding.collective_matmul import BY_COLUMNS, column_ring
from sharding.mesh import ROWS, STAGE

# The most layers in a program of `several_programs`, but for layers that share keys and values. By the TPU
# compiler, a layer of Llama 3.1 70B (v5e:4x4, int8, a chunk of 512 tokens) moves 59.1 MB of HBM in a program
# of all layers, 60.7 in programs of 16 layers, 62.3 of 8, and 65.4 of 4. A program of 8 layers has 47 MiB of
# code, and one of all 80 layers has 478.
MOST_LAYERS = 8
# The same on one CPU device. 30 layers take 18.6 s of CPU time to compile as one program, 3.6 s as programs
# of 6, and 3.1 s one by one.
MOST_ON_CPU = 6


def start(step: Step, w: Weights, batch: Batch, *, cfg: Config, mesh: Mesh) -> tuple[Array, Array, Chunk]:
    """-> (the embedded tokens [B,T,D], the tokens [B,T], their Chunk)."""
    tokens, chunk = step.read_inputs(batch, cfg, mesh)
    x, chunk = model.embed(tokens, chunk, w, cfg=cfg, mesh=mesh)
    if column_ring(cfg, tokens.shape, mesh):  # so that the first group of layers gets it as all others do
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, BY_COLUMNS))
    return x, tokens, chunk


Call = Callable[..., Any]  # (jitted function, arguments) -> its result


def run(function, *arguments, **static):
    """The `Call` that runs the function."""
    return function(*arguments, **static)


jit = partial(jax.jit, static_argnames=("cfg", "mesh"))


class StepProgram:
    """An executor that is jitted once for each class of steps; in a profile the program has the class's name.

    The batch is donated.
    """

    def __init__(self, execute):
        self.execute, self.program = execute, functools.cache(self.program)

    def program(self, kind: type):
        def execute(step: Step, weights: Weights, batch: Batch, *, cfg: Config, mesh: Mesh):
            return self.execute(step, weights, batch, cfg=cfg, mesh=mesh)

        execute.__name__ = kind.__name__
        return jit(execute, donate_argnames="batch")

    def __call__(self, step: Step, weights: Weights, batch: Batch, *, call: Call = run, **static):
        return call(self.program(type(step)), step, weights, batch, **static)

    def lower(self, step: Step, weights: Weights, batch: Batch, **static) -> jax.stages.Lowered:
        return self.program(type(step)).lower(step, weights, batch, **static)


@StepProgram
def one_program(step: Step, weights: Weights, batch: Batch, *, cfg: Config, mesh: Mesh):
    """The whole step as one program."""
    x, tokens, chunk = start(step, weights, batch, cfg=cfg, mesh=mesh)
    static = dict(kinds=cfg.layers, mesh=mesh, device_ring=column_ring(cfg, tokens.shape, mesh))
    x, memories = model.layers(x, weights.layers, batch.cache.layers, chunk, **static)
    return step.finish(x, tokens, chunk, weights, batch.replace(layers=memories), cfg, mesh)


# ------------------------------------------------------------------------------------ a few layers at a time

start_program = jit(start)
few_layers = jax.jit(
    model.layers, static_argnames=("kinds", "mesh", "device_ring"), donate_argnames=("x", "memories")
)


@partial(jit, donate_argnames="batch")
def finish(step: Step, x: Array, tokens: Array, chunk: Chunk, w: Weights, batch: Batch, *, cfg, mesh: Mesh):
    """-> (the step's result, the Batch), when the layers have run, even if the step does not use x."""
    x, batch = lax.optimization_barrier((x, batch))
    return step.finish(x, tokens, chunk, w, batch, cfg, mesh)


def several_programs(
    step: Step, weights: Weights, batch: Batch, *, cfg: Config, mesh: Mesh, call: Call = run
):
    """The layers run in groups. Groups of equal layers share a program, which is called once for each group.

    So the step compiles in a fraction of the time. Each call costs the host some 100 us: too much for the
    decode step of an accelerator, and little for a CPU, which gains nothing from seeing all layers at once.
    A chunk without scores needs only caches: it ends with the last layer that has one. Unlike one program,
    these compute all of that layer, not only its keys and values.
    """
    n = len(cfg.layers) if step.reads_output else cached_depth(cfg.layers)
    w, rows = without_layers(weights), batch.replace(layers=[])
    x, tokens, chunk = call(start_program, step, w, rows, cfg=cfg, mesh=mesh)
    memories, device_ring = [], column_ring(cfg, tokens.shape, mesh)
    for i, end in layer_groups(cfg.layers[:n], MOST_ON_CPU if on_one_cpu(mesh) else MOST_LAYERS):
        own, before, kinds = (each[i:end] for each in (weights.layers, batch.cache.layers, cfg.layers))
        group = dataclasses.replace(chunk, inputs=chunk.inputs and chunk.inputs[i:end])
        static = dict(kinds=kinds, mesh=mesh, device_ring=device_ring)
        x, after = call(few_layers, x, own, before, group, **static)
        memories += after
    result, rows = call(finish, step, x, tokens, chunk, w, rows, cfg=cfg, mesh=mesh)
    return result, rows.replace(layers=memories + [None] * (len(cfg.layers) - n))


@functools.cache
def layer_groups(kinds: tuple[LayerKind, ...], most: int) -> list[tuple[int, int]]:
    """(first, last + 1) of each group: the remainder, if there is one, and then equal groups of layers.

    A size is possible if all groups of so many layers have the same kinds of layers. Of the possible sizes
    above `most` / 2 the one with the smallest remainder is taken; if there is none, the largest possible
    size; if no size is possible, 1. The remainder comes first because the first layers of some models differ
    from all others. If layers share keys and values, the last group is as large as it must be: it begins
    with the first layer that has shared ones, since what a layer has attended to stays within a program.
    """
    shared = (owner for i, owner in enumerate(kv_owners(kinds)) if owner != i)
    depth = min(shared, default=len(kinds))

    def all_equal(n: int) -> bool:
        return len({kinds[i : i + n] for i in range(depth % n, depth, n)}) == 1

    sizes = [n for n in range(min(most, depth), 0, -1) if all_equal(n)] or [1]
    size = min([n for n in sizes if 2 * n > most] or sizes[:1], key=lambda n: depth % n)
    edges = sorted({0, *range(depth % size, depth + 1, size), len(kinds)})
    return list(itertools.pairwise(edges))


def prefill_in_groups(
    step: Step, weights: Weights, batch: Batch, *, cfg: Config, mesh: Mesh, call: Call = run
):
    """A prefill chunk in several programs, any other step as one: for accelerators, and for several devices.

    A chunk takes long beside the launch of its programs, and is compiled in several widths.
    """
    execute = several_programs if isinstance(step, PrefillChunk) else one_program
    return execute(step, weights, batch, cfg=cfg, mesh=mesh, call=call)


# ------------------------------------------------------------------------------------------ pipeline stages


@StepProgram
def staged(step: Step, weights: Weights, batch: Batch, *, cfg: Config, mesh: Mesh):
    """One program in which each stage runs its own layers: see sharding/stages.py.

    Only the last stage's result counts: the others' logits have no meaning.
    """
    if isinstance(step, DecodeStep):
        if step.drafts is not None:
            raise ValueError("pipeline stages cannot check draft tokens: run on a mesh of one stage")
        batch = with_chosen_tokens(batch, mesh)
    x, tokens, chunk = start(step, weights, batch, cfg=cfg, mesh=mesh)
    x, batch = stage_layers(x, chunk, weights, batch, cfg, mesh)
    own, batch = step.finish(x, tokens, chunk, weights, batch, cfg, mesh)
    result = stages.from_last_stage(own, mesh)
    if isinstance(step, DecodeStep):
        batch = without_chosen_tokens(batch, own.count, result.tokens, mesh)
    return result, batch


def with_chosen_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """The batch with the tokens that the last stage chose, which the first does not know but has received."""

    @by_rows(mesh)
    def known(tokens: Array, length: Array, chosen: Array) -> Array:
        rows, position = jnp.arange(length.size), jnp.minimum(length, tokens.shape[1] - 1)
        own = tokens[rows, position]
        return tokens.at[rows, position].set(jnp.where(own < 0, chosen[:, 0], own))

    return batch.replace(tokens=known(batch.tokens, batch.cache.length, batch.stage_inputs.tokens))


def without_chosen_tokens(batch: Batch, count: Array, chosen: Array, mesh: Mesh) -> Batch:
    """The batch after a decode step: all stages but the last have -1 in place of the chosen token.

    count: [B], what each stage takes for the number of tokens. chosen: [B/stages,1], by the last stage, which
    sends them to all.
    """

    @by_rows(mesh)
    def known(tokens: Array, length: Array, count: Array) -> Array:
        position = jnp.where(count > 0, length, tokens.shape[1])
        unknown = tokens.at[jnp.arange(length.size), position].set(-1, mode="drop")
        return jnp.where(stages.is_last(), tokens, unknown)

    inputs = dataclasses.replace(batch.stage_inputs, tokens=stages.to_all_stages(chosen, mesh))
    return batch.replace(tokens=known(batch.tokens, batch.cache.length, count), stage_inputs=inputs)


def stage_layers(x: Array, chunk: Chunk, weights: Weights, batch: Batch, cfg: Config, mesh: Mesh):
    """The layers of each stage, on the activations that it received: -> ([B,T,D], Batch)."""
    n, shape, received = mesh.shape[STAGE], x.shape[:2], batch.stage_inputs
    infos, kinds = stages.in_stages(model.weight_infos(cfg), n), stages.first_stage(cfg, n).layers
    of_memories = model.memory_specs(kinds, batch.cache.layers)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(ROWS), specs(infos.layers, weights.layers), of_memories, P(ROWS)),
        out_specs=(P(ROWS), of_memories),
        check_vma=declares_vma(mesh, shape[1]),
    )
    def on_device(x: Array, w: list, memories: list, chunk: Chunk):
        w = jax.tree.map(lambda x: x[0], w)  # p: this device's stage
        return model.decoder_layers(x, w, memories, chunk, kinds)

    x = stages.enter(x, received.hidden[shape], mesh)
    x, memories = on_device(x, weights.layers, batch.cache.layers, chunk)
    hidden = received.hidden | {shape: stages.pass_on(x, mesh)}
    return x, batch.replace(layers=memories, stage_inputs=dataclasses.replace(received, hidden=hidden))


def on_one_cpu(mesh: Mesh) -> bool:
    return mesh.size == 1 and platform(mesh) == "cpu"


def executor_for(mesh: Mesh):
    """The executor that suits a mesh."""
    if mesh.shape[STAGE] > 1:
        return staged
    return several_programs if on_one_cpu(mesh) else prefill_in_groups
