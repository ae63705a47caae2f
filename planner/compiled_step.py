"""A compiled step: what the compiler says of it, what its program moves, how long it would take."""

import dataclasses
import json
import math
import pathlib
import re
import sys
import time
from collections import Counter
from functools import partial

import jax
from jax.sharding import Mesh

from deployment.chips import Topology
from deployment.estimates import collective_seconds, network_seconds, resource_seconds, step_seconds
from deployment.floor import floor_bytes, needed, share_needed
from deployment.job import Job, local_tokens
from deployment.step_bytes import PARTS, is_state, named_leaves, part_of
from feedback.errors import UserError
from ops.attention import BLOCK
from ops.tpu import TILE
from planner.compiler import CompiledProgram, compile_programs, memory_of
from planner.gpus import with_losses
from planner.schedule import Schedule, expert_rows, read_schedule
from planner.traffic import Collective, Program, Reader
from sharding.collective_matmul import column_ring
from sharding.mesh import EXPERT, MODEL, SLOTS, STAGE, mesh_size


@dataclasses.dataclass
class Step:
    """A step's programs on one device. A field is None if one does not fit: the compiler then says no more.

    programs: how often each program runs in a step, by its name.
    From the compiler. peak_bytes: of HBM, the sum of arguments (weights and cache), temporaries, code,
    results that are not updated in place, and with several stages the caches that wait for other turns.
    temp_bytes: the most of any program, with what one program passes to another. code_bytes: of all programs;
    None for GPUs, whose compiler does not tell. kernels: how many a GPU launches in a step; None for TPUs.
    collectives_per_layer: how many of each kind; None for several slices, where the compiler does not tell.
    between_stages: how many of each kind. collectives, copies: all of them, equal ones as one entry with its
    count; copies without prefetches.
    Counted in all runs. hbm_bytes_per_step: bytes moved; hbm_bytes_by_part: the same by part of the model. A
    Pallas kernel is assumed to read each operand once, of experts the active ones. assumed_loops: the trips
    of loops whose number of trips is computed.
    by_columns: see sharding/collective_matmul.py.
    Estimated from the compiler's schedule, see planner/schedule.py. schedule: seconds by what passes them.
    scheduled_seconds: their sum. cautious_seconds: the same with the cautious times of collectives, see
    deployment/estimates.py, and of GPUs with what their kernels lose, see planner/gpus.py. exposed_seconds:
    by how much collectives make the step longer.
    Estimated without it. seconds: what each resource alone takes. bound_by: the resource that takes longest.
    """

    fits: bool
    peak_bytes: float
    compile_seconds: float
    floor_bytes_per_step: float
    by_columns: bool | None = None
    programs: dict[str, int] | None = None
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    code_bytes: int | None = None
    kernels: int | None = None
    hbm_bytes_per_step: float | None = None
    hbm_bytes_by_part: dict[str, float] | None = None
    collectives_per_layer: dict[str, float] | None = None
    between_stages: dict[str, int] | None = None
    collectives: list[dict] | None = None
    copies: list[dict] | None = None
    assumed_loops: dict[str, int] | None = None
    schedule: dict[str, float] | None = None
    scheduled_seconds: float | None = None
    cautious_seconds: float | None = None
    exposed_seconds: float | None = None
    seconds: dict[str, float] | None = None
    bound_by: str | None = None
    estimated_step_seconds: float | None = None
    tokens_per_second_per_sequence: float | None = None
    tokens_per_second: float | None = None


def compile_step(job: Job, mesh: Mesh, topology: Topology, dump: str | None = None) -> Step:
    """Compile the job for the mesh and count what it does. dump: a file for the HLO text of all programs."""
    what = f"{len(job.cfg.layers)} layers for {topology.name}, {job.tokens} new token(s) per row"
    print(f"compiling {what}", file=sys.stderr, flush=True)
    stages, waiting = mesh.shape[STAGE], job.waiting_bytes(mesh)
    floor, began = floor_bytes(job, topology, stages), time.perf_counter()
    try:
        programs = compile_programs(job, mesh)
    except jax.errors.JaxRuntimeError as e:
        return Step(False, _bytes_required(e) + waiting, time.perf_counter() - began, floor)
    seconds = time.perf_counter() - began
    if dump:
        pathlib.Path(dump).write_text("\n".join(x.compiled.as_text() for x in programs))
    runs, found, kernels = Counter(), [], 0
    schedule, cautious, alone = Schedule(), Schedule(), Schedule()
    rows = expert_rows(job.cfg, local_tokens(job, mesh), mesh_size(mesh, EXPERT))
    for x in programs:
        runs[x.name] += x.count
        reader = reader_of(x, job, mesh, topology)
        found.append(reader.program().in_step(x.names, x.count))
        kernels += sum({event.instruction: event.count for event in found[-1].traffic}.values())
        walk = partial(read_schedule, reader, topology.chip, expert_rows=rows)
        schedule += walk(partial(sending_seconds, topology)) * x.count
        alone += walk(lambda collective: 0) * x.count
        if not topology.sizes:
            chip, kernel_seconds = with_losses(topology.chip)
            walk = partial(read_schedule, reader, chip, expert_rows=rows, kernel_seconds=kernel_seconds)
        cautious += walk(partial(sending_seconds, topology, cautious=True)) * x.count
    program = Program.of_all(found)
    by_part, per_layer, between, sending = dict.fromkeys(PARTS, 0.0), Counter(), Counter(), 0.0
    for x in program.traffic:
        by_part[part_of(x.argument, job.cfg)] += x.bytes * x.count
    for x in program.collectives:
        sending += sending_seconds(topology, x) * x.count
        between[x.kind] += x.count * x.between_stages
        per_layer[x.kind] += x.count * bool(re.search(r"\b(attention|feed_forward)/", x.scope))
    depth = len(job.cfg.layers) // stages
    per_layer = {kind: n // depth if n % depth == 0 else n / depth for kind, n in per_layer.items() if n}
    resources = resource_seconds(program.hbm_bytes, needed(job, mesh)[1], sending, topology.chip)
    rate = job.tokens / step_seconds(resources) / stages
    arguments, temp, code, peak = memory_of(programs)
    peak += waiting
    return Step(
        fits=peak <= topology.chip.hbm, peak_bytes=peak, compile_seconds=seconds, floor_bytes_per_step=floor,
        programs=dict(runs), argument_bytes=arguments, temp_bytes=temp,
        code_bytes=code if topology.sizes else None, kernels=None if topology.sizes else kernels,
        hbm_bytes_per_step=program.hbm_bytes, hbm_bytes_by_part=by_part,
        collectives_per_layer=per_layer if topology.slices == 1 else None, between_stages=dict(+between),
        collectives=_alike(program.collectives),
        copies=_alike([x for x in program.copies if not x.prefetch]),
        assumed_loops={x.instruction: x.trips for x in program.loops if not x.known},
        by_columns=column_ring(job.cfg, (job.rows, job.tokens), mesh) is not None,
        schedule=dataclasses.asdict(schedule), scheduled_seconds=schedule.seconds,
        cautious_seconds=cautious.seconds,
        exposed_seconds=schedule.seconds - alone.seconds,
        seconds=resources, bound_by=max(resources, key=resources.get),
        estimated_step_seconds=step_seconds(resources),
        tokens_per_second_per_sequence=rate, tokens_per_second=rate * job.rows,
    )  # fmt: skip


def _bytes_required(error: jax.errors.JaxRuntimeError) -> float:
    """The HBM that a program would need which does not fit. Raises UserError if the error is another one."""
    found = re.search(
        r"RESOURCE_EXHAUSTED.*?hbm.*?(?:Used |required for [^(]*\()([\d.]+)([KMGT])",
        str(error),
        re.I | re.S,
    )
    if not found:
        raise UserError(f"the compiler fails: {str(error)[:400]}") from error
    return float(found[1]) * 2 ** (10 + 10 * "KMGT".index(found[2].upper()))


def reader_of(program: CompiledProgram, job: Job, mesh: Mesh, topology: Topology) -> Reader:
    """A reader of a program, which knows what the project's Pallas kernels read of their operands."""
    slots = -(-job.context // mesh_size(mesh, SLOTS))
    cached = {  # the slots of each cache, of which rings have fewer: values [...,S,C], scales [...,2,S]
        name: x.sharding.shard_shape(x.shape)[-1 if name.endswith("scale") else -2]
        for name, x in named_leaves(**job.arguments(mesh))
        if part_of(name, job.cfg) == "kv_cache" and not is_state(name, job.cfg)
    }

    def kernel_share(kernel: str, argument: str) -> float:
        argument = program.names.get(argument, "")
        if kernel in ("take_slots", "put_slots"):  # a block of the rows that are read
            return min(1, BLOCK / cached.get(argument, slots)) * job.rows / job.batch
        if kernel == "take_rows":  # a tile for each token, of this device's shard of the embedding
            vocabulary = job.cfg.V / mesh_size(mesh, MODEL)
            rows = TILE if argument.endswith("values") else TILE // 2  # int8, bfloat16
            return min(1, local_tokens(job, mesh) * rows / vocabulary)
        if kernel.startswith("delta_") and is_state(argument, job.cfg):  # which it also writes
            return 2 * share_needed(argument, job, mesh)
        return share_needed(argument, job, mesh)

    stages = mesh.shape[STAGE]
    return Reader(
        program.compiled.as_text(),
        kernel_share,
        computed_trips=-(-slots // BLOCK),
        block_kernel="take_slots",
        arguments=program.used,
        stages=stages // math.gcd(stages, topology.slices),
    )


def sending_seconds(topology: Topology, x: Collective, cautious: bool = False) -> float:
    """Seconds of one run of a collective. cautious: see `collective_seconds`."""
    if x.between_stages and topology.slices > 1:
        return network_seconds(x.bytes, topology)
    return collective_seconds(x.kind, x.bytes, x.group, topology, cautious)


def _alike(events: list) -> list[dict]:
    """Events that differ in nothing but the layer as one entry, with their count; the most bytes first."""
    groups = Counter()
    for x in events:
        fields = dataclasses.asdict(x) | {"count": 1}
        groups[re.sub(r"layers\[\d+\]", "layers[*]", json.dumps(fields))] += x.count
    entries = [json.loads(alike) | {"count": n} for alike, n in groups.items()]
    return sorted(entries, key=lambda x: -x["bytes"] * x["count"])
