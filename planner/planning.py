"""Which mesh a job should have on a topology, and what its steps do there."""

import dataclasses
from collections import Counter

from feedback.errors import UserError
from planner.compiled_step import Step, compile_step
from planner.estimates import expected_collectives, resource_seconds, step_seconds
from planner.floor import needed
from planner.job import Job
from planner.topologies import Topology
from serving.chunks import best_shape, chunk_shapes
from sharding.mesh import STAGE, make_mesh


@dataclasses.dataclass(frozen=True)
class Choice:
    """A mesh, and what is known of it before compiling."""

    dp: int
    ep: int
    tp: int
    fits: bool
    estimated_step_seconds: float


def rank_meshes(job: Job, topology: Topology, given: tuple, stages: int = 1) -> list[Choice]:
    """The meshes that the model and the given degrees allow, the most promising first.

    given: (dp, ep, tp), None where any degree will do. Raises UserError if there is no such mesh.
    """
    (n, rest), choices, reasons = divmod(len(topology.devices), stages), [], []
    if rest:
        raise UserError(f"--pp {stages} does not divide the {len(topology.devices)} devices")
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for degrees in [(d, e, n // d // e) for d in divisors for e in divisors if n // d % e == 0]:
        if any(fixed not in (None, degree) for fixed, degree in zip(given, degrees, strict=True)):
            continue
        try:
            if job.batch % stages:
                raise UserError(f"{stages} stages do not divide the batch of {job.batch}")
            if job.batch // stages % degrees[0]:
                raise UserError(f"data parallelism {degrees[0]} does not divide the batch of {job.batch}")
            mesh = make_mesh(job.cfg, *degrees, devices=topology.devices, stage=stages)
        except ValueError as e:
            reasons.append(str(e))
            continue
        stored = sum(size_in_bytes for _, _, size_in_bytes in job.shards(mesh)) + job.waiting_bytes(mesh)
        seconds = step_seconds(
            resource_seconds(*needed(job, mesh), expected_collectives(job, mesh, topology), topology.chip)
        )
        choices.append(Choice(*degrees, stored < topology.chip.hbm, seconds))
    if not choices:
        reasons.append("--dp x --ep x --tp must be the number of devices")
        raise UserError(f"no mesh of {n} devices: {reasons[0]}")
    return sorted(choices, key=lambda c: (not c.fits, c.estimated_step_seconds, -c.tp))


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
    degrees: tuple[int | None, int | None, int | None] = (None, None, None),
    dump: str | None = None,
    stages: int = 1,
) -> Plan:
    """Compile the decode step, and a chunk of prompts of `prefill` tokens, for the best mesh.

    The best mesh is the first of the three most promising ones for which the compiler makes the decode step
    fit. degrees: (dp, ep, tp), None where the plan may choose. dump: a file for the decode step's HLO text.
    Raises UserError if no mesh has these degrees.
    """
    ranking, tried = rank_meshes(job, topology, degrees, stages), []
    for choice in ranking[:3]:
        shape = {"data": choice.dp, "expert": choice.ep, "tensor": choice.tp}
        shape |= {STAGE: stages} if stages > 1 else {}
        mesh = make_mesh(job.cfg, **shape, devices=topology.devices)
        tried.append((compile_step(job, mesh, topology, dump), shape, mesh))
        if tried[-1][0].fits or not choice.fits:
            break
    decode, shape, mesh = next((x for x in tried if x[0].fits), tried[0])
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
        mesh=shape, batch=job.batch, context=job.context, layers=len(job.cfg.layers),
        weights_bytes=stored["weights"], cache_bytes=stored["batch"],
        decode=decode, prefill=chunk, prefill_piece=width if prefill else None, ranking=ranking,
    )  # fmt: skip
