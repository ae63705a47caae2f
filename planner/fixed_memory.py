"""What the programs of an engine need of a TPU's memory: the compiler's figures beside the engine's estimate.

`python3 -m planner.fixed_memory llama3.1-8b v5e:1x1 8 4096 2` compiles what a server of 8 rows of 4096
positions would, for the first 2 layers, and prints one JSON object. The estimate is that of
deployment/program_memory.py.
"""

import dataclasses
import itertools
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deployment.program_memory import program_bytes
from planner.job import Job
from planner.planned_programs import Compiler
from planner.published_models import read_model
from planner.topologies import find_topology
from serving import steps
from serving.chunks import chunk_shapes
from serving.executors import executor_for
from serving.programs import no_chunk
from serving.requests import OPTION_SETS
from serving.steps import DecodeStep
from sharding.collective_matmul import prefill_ring
from sharding.mesh import ROWS, make_mesh, mesh_size
from sharding.sampling import MAX_TOP_LOGPROBS, NEUTRAL, Sampling


def compile_all(job: Job, mesh: Mesh) -> Compiler:
    """All programs of an engine of one stage: decode steps, chunks with scores and without, and copies."""
    given, static, placed = job.arguments(mesh), dict(cfg=job.cfg, mesh=mesh), NamedSharding(mesh, P(ROWS))
    weights, batch, shards = given["weights"], given["batch"], mesh_size(mesh, ROWS)

    def array(*shape: int, dtype=np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    def column(name: str):
        if name == "allowed":
            return array(job.batch, -(-job.cfg.V // 32), dtype=np.uint32)
        neutral = jax.tree.map(np.asarray, getattr(NEUTRAL, name))
        return jax.tree.map(lambda x: array(job.batch, *x.shape, dtype=x.dtype), neutral)

    each, row, text = array(job.batch), array(shards), array(shards, job.context)
    samplings = [Sampling(**{name: column(name) for name in options}) for options in OPTION_SETS]
    todo = [DecodeStep(count=each, sampling=sampling) for sampling in samplings]
    scores = (None, 0, MAX_TOP_LOGPROBS)
    for shape, score in itertools.product(chunk_shapes(job.cfg, mesh, job.batch // shards), scores):
        rows, device_ring = array(shards * shape.rows), prefill_ring(job.cfg, shape.tokens, mesh)
        chunk = no_chunk(shape, shards, score)
        todo.append(dataclasses.replace(chunk, rows=rows, count=rows, device_ring=device_ring))
    copied = dataclasses.replace(job, batch=shards).arguments(mesh)["batch"].cache.layers
    # No program computes the steps' own arrays, or what is copied from the host.
    compiler = Compiler(weights=weights, batch=batch, todo=todo, copied=copied)
    for step in todo:
        executor_for(mesh)(step, weights, batch, **static, call=compiler)
    for source in (None, row):
        compiler(steps.assign_rows, row, text, row, source, batch, **static)
    compiler(steps.read_rows, row, batch, **static)
    compiler(steps.write_rows, row, copied, batch, **static)
    return compiler


def compare(job: Job, mesh: Mesh) -> dict:
    """Bytes of a device: what all programs need, as the compiler says, and as the engine estimates.

    code and temporaries: of each program that has as much as 1 MB, by its name; equal names are numbered.
    """
    code, temporaries, programs = {}, {}, list(compile_all(job, mesh).programs.values())
    for x in programs:
        found = x.compiled.memory_analysis()
        name = f"{x.name} {sum(name.split()[0] == x.name for name in code) + 1}"
        code[name] = found.generated_code_size_in_bytes
        temporaries[name] = found.temp_size_in_bytes + x.received_bytes
    estimate = program_bytes(job.cfg, mesh, job.batch)
    return dict(
        code_bytes=sum(code.values()),
        estimated_code_bytes=estimate.code,
        temp_bytes=max(temporaries.values()),
        estimated_temp_bytes=estimate.temporaries,
        code={name: size for name, size in code.items() if size >= 1e6},
        temporaries={name: size for name, size in temporaries.items() if size >= 1e6},
    )


if __name__ == "__main__":
    name, topology, rows, length, layers = sys.argv[1:]
    cfg, devices = read_model(name), find_topology(topology).devices
    cfg = dataclasses.replace(cfg, layers=cfg.layers[: int(layers)])
    mesh = make_mesh(cfg, tensor=len(devices), devices=devices)
    print(json.dumps(compare(Job(cfg, int(rows), int(length)), mesh)))
