"""What the programs of an engine need of a TPU's memory: the compiler's figures beside the engine's estimate.

`python3 -m planner.engine_memory llama3.1-8b v5e:1x1 8 4096 2` compiles what a server of 8 rows of 4096
positions would, for the first 2 layers, and prints one JSON object. The estimate is that of
deployment/program_memory.py.
"""

import copy
import dataclasses
import json
import sys

import jax
from jax.sharding import Mesh

from deployment.ahead import ProgramsOnShapes
from deployment.job import Job
from deployment.program_memory import program_bytes
from planner.compiler import CompiledProgram, Compiler
from planner.published_models import read_model
from planner.topologies import find_topology
from serving.needed import demand_of, needed_programs, run_on_no_row
from serving.requests import OPTION_SETS, Request
from sharding.mesh import make_mesh
from sharding.sampling import MAX_TOP_LOGPROBS, Sampling


class EnginePrograms(ProgramsOnShapes):
    """The programs of an engine, which `compiler` compiles one after another and keeps."""

    def __init__(self, job: Job, mesh: Mesh):
        weights = job.arguments(mesh)["weights"]
        self.compiler = Compiler(weights=weights)
        super().__init__(weights, job.cfg, mesh, job.batch, job.context, job.kv_dtype)

    def call(self, function, *arguments, **static):
        return self.compiler(function, *arguments, **static)

    def load_prefixes(self, rows, prefixes) -> None:
        """Compile what writes saved rows, whose arrays come from the host: no program computes them."""
        self.write_rows(rows, jax.tree.map(copy.copy, self.read_rows(rows)))


def compile_all(job: Job, mesh: Mesh) -> list[CompiledProgram]:
    """All programs of an engine of one stage: decode steps, chunks with scores and without, and copies."""
    programs = EnginePrograms(job, mesh)
    scored = [Request([0], 1, Sampling(top_logprobs=n), score=True) for n in (0, MAX_TOP_LOGPROBS)]
    demand = demand_of([Request([0], 1), *scored], job.context, OPTION_SETS)
    for program in needed_programs(programs, demand, prefix_cache=True):
        run_on_no_row(copy.copy(programs), program)  # which replaces `batch`
    return list(programs.compiler.programs.values())


def compare(job: Job, mesh: Mesh) -> dict:
    """Bytes of a device: what all programs need, as the compiler says, and as the engine estimates.

    code and temporaries: of each program that has as much as 1 MB, by its name; equal names are numbered.
    """
    code, temporaries = {}, {}
    for x in compile_all(job, mesh):
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
