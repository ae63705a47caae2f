"""Which mesh a job should have on a topology, and what its steps do there."""

import dataclasses
from collections import Counter

from deployment.chips import Topology
from deployment.job import Job
from deployment.placement import Choice, Given, rank_meshes
from feedback.errors import UserError
from planner.compiled_step import Step, compile_step
from serving.chunks import best_shape, chunk_shapes
from sharding.mesh import degrees


@dataclasses.dataclass
class Plan:
    """A job on a topology.

    mesh: its degrees. prefill_piece: tokens of the chunk. ranking: all possible meshes, the most promising
    first.
    """

    topology: str
    devices: int
    hbm_capacity_bytes: float
    mesh: dict[str, int]
    batch: int
    context: int
    layers: int
    weights_bytes: int
    cache_bytes: int
    decode: Step
    prefill: Step | None
    prefill_piece: int | None
    ranking: list[Choice]


def make_plan(
    job: Job,
    topology: Topology,
    prefill: int | None = None,
    given: Given = (None, None, None),
    dump: str | None = None,
    stages: int = 1,
) -> Plan:
    """Compile the decode step, and a chunk of prompts of `prefill` tokens, for the best mesh.

    The best mesh is the first of the three most promising ones for which the compiler makes the decode step
    fit. given: (dp, ep, tp), None where the plan may choose. dump: a file for the decode step's HLO text.
    Raises UserError if no mesh has these degrees.
    """
    possible, tried = rank_meshes(job, topology, given, (stages,)), []
    ranking = [x for x in possible if job.batch % (x.dp * x.pp) == 0]
    if not ranking:
        parts = f"{possible[0].dp} data shards" + f" of {stages} stages" * (stages > 1)
        raise UserError(f"--batch {job.batch}: {parts} do not divide it")
    for choice in ranking[:3]:
        mesh = choice.make(job.cfg, topology)
        tried.append((compile_step(job, mesh, topology, dump), mesh))
        if tried[-1][0].fits or not choice.fits:
            break
    decode, mesh = next((x for x in tried if x[0].fits), tried[0])
    chunk, stored = None, Counter()
    for name, _, size_in_bytes in job.shards(mesh):
        stored[name.split(".")[0]] += size_in_bytes
    stored["batch"] += job.waiting_bytes(mesh)
    if prefill:
        unread = [[prefill - 1]]  # a decode step reads the last token
        width = best_shape(chunk_shapes(job.cfg, mesh, 1), unread).width
        chunk = compile_step(job.prefill(width, mesh), mesh, topology)
    return Plan(
        topology=topology.name, devices=len(topology.devices), hbm_capacity_bytes=topology.chip.hbm,
        mesh=degrees(mesh), batch=job.batch, context=job.context, layers=len(job.cfg.layers),
        weights_bytes=stored["weights"], cache_bytes=stored["batch"],
        decode=decode, prefill=chunk, prefill_piece=width if prefill else None, ranking=ranking,
    )  # fmt: skip
