"""Does a Llama fit on these TPUs, and how fast would it be? Compiled for them here, on a CPU.

    python3 benchmarks/plan.py --model llama3.1-70b --topology v5e:4x4 --batch 8 --context 8192

The compiler is `pip install -e '.[tpu]'`, for Linux on x86. Memory and collectives are what it says, HBM
traffic is counted from what it compiled (hlo.py), and times are estimates: `collective_seconds` and `Step`
say from what.
"""
# ruff: noqa: E402  the environment must be set before jax is imported

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import sys
import time
from collections import Counter

if __name__ == "__main__":  # at once: during a compilation Python does not listen
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
if "jax" not in sys.modules:  # a program that has imported jax has chosen its platform
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud host's metadata server
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two compilations cannot run at once
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import hlo
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MODELS, read_model
from speed import prefill_width

import model
from checkpoints.errors import UserError
from model import Config
from ops.attention import BLOCK
from ops.grouped_matmul import FEW_ROWS
from ops.tpu import TILE
from quantize import FORMATS, INT8, Format
from serving import executors, steps
from serving.memory import BANDWIDTH, active_experts
from sharding.arrays import abstract
from sharding.mesh import EXPERT, MODEL, ROWS, SLOTS, STAGE, make_mesh, mesh_size
from sharding.stages import first_stage, in_stages, stage_input_infos
from terminal.command_line import OneLineParser, run


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one jax device has; there are `cores` of them on a chip.

    hbm: bytes that the compiler lets a program have. bandwidth: of HBM, bytes/s. flops: bfloat16, per second.
    link: bytes/s of one interconnect link, one way. An axis of the torus wraps around if its length is a
    multiple of `ring`. network: bytes/s per chip of the network that joins slices. Source: libtpu 0.0.42 for
    hbm; docs.cloud.google.com/tpu/docs/{v5e,v6e,v5p,tpu7x}, where link is the bidirectional bandwidth per
    chip / ports / 2, and network that per pod / chips; jax-ml/scaling-book tpus.md for ring.
    """

    hbm: float
    bandwidth: float
    flops: float
    link: float
    ring: int
    network: float
    cores: int = 1


CHIPS = {
    "v5e": Chip(15.75 * 2**30, BANDWIDTH["TPU v5 lite"], flops=197e12, link=50e9, ring=16, network=3.125e9),
    "v6e": Chip(31.25 * 2**30, BANDWIDTH["TPU v6 lite"], flops=918e12, link=100e9, ring=16, network=12.5e9),
    "v5p": Chip(95.74 * 2**30, BANDWIDTH["TPU v5p"], flops=459e12, link=100e9, ring=4, network=6.25e9),
    "tpu7x": Chip(
        94.75 * 2**30, BANDWIDTH["TPU7x"], flops=1153.5e12, link=100e9, ring=4, network=12.5e9, cores=2
    ),
}
HOP_SECONDS = 0.5e-6  # from one chip to the next. Source: jax-ml/scaling-book tpus.md, question 5


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of TPUs that the compiler knows. sizes: chips along each axis of the torus of one."""

    name: str
    chip: Chip
    sizes: tuple[int, ...]
    devices: tuple
    slices: int = 1


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology named like v5e:4x4. Raises UserError if there is none such, or no TPU compiler."""
    kind, _, shape = name.partition(":")
    dimensions = 2 if kind in ("v5e", "v6e") else 3
    if kind not in CHIPS or not re.fullmatch("x".join([r"[1-9]\d{0,2}"] * dimensions), shape):
        raise UserError(f"--topology {name}: not of the form v5e:4x4, v6e:4x4, v5p:2x2x1 or tpu7x:2x2x1")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed: pip install -e '.[tpu]' (Linux on x86)")
    sizes = tuple(int(n) for n in shape.split("x"))
    if dimensions == 2 and max(sizes) > 16:
        raise UserError(f"--topology {name}: a {kind} slice has at most 16 chips along an axis")
    host = [2 if n % 2 == 0 else 1 for n in sizes[:2]] + [1]  # chips on each host: as many as there may be
    try:
        options = dict(chips_per_host_bounds=host) | (dict(num_slices=slices) if slices > 1 else {})
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"--topology {name}: the TPU compiler refuses it ({e})") from None
    title = f"{slices} slices of {name}" if slices > 1 else name
    return Topology(title, CHIPS[kind], sizes, tuple(found.devices), slices)


@dataclasses.dataclass(frozen=True)
class Job:
    """A decode step of `batch` rows, whose caches have `context` slots and are full, rings too.

    tokens: to read in each row. More than one are a piece of a prompt: no token is chosen. In several stages
    of layers it is a turn: each stage reads another group of the rows.
    """

    cfg: Config
    batch: int
    context: int
    format: Format | None = INT8
    kv_dtype: str = "int8"
    tokens: int = 1

    @property
    def chooses(self) -> bool:
        return self.tokens == 1

    def arguments(self, mesh: Mesh) -> dict:
        """step, weights and batch for the program: shapes and shardings, without data."""
        stages, cfg = mesh.shape[STAGE], self.cfg
        count = jax.ShapeDtypeStruct((self.batch,), jnp.int32, sharding=NamedSharding(mesh, P(ROWS)))
        weights = abstract(in_stages(model.weight_infos(cfg, self.format), stages), mesh, jnp.bfloat16)
        infos = steps.batch_infos(cfg, self.batch, self.context, jnp.dtype(self.kv_dtype), stages)
        batch = abstract(infos, mesh)
        if stages > 1:
            inputs = stage_input_infos(cfg.D, {1: self.batch, self.tokens: self.batch})
            batch = batch.replace(stage_inputs=abstract(inputs, mesh, jnp.bfloat16))
        chunk = steps.PrefillChunk(rows=None, count=count, width=self.tokens)
        step = steps.DecodeStep(count=count) if self.chooses else chunk
        return dict(step=step, weights=weights, batch=batch)

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """A decode step, or a chunk of all rows, for the mesh."""
        execute = executors.staged if mesh.shape[STAGE] > 1 else executors.one_program
        return execute.lower(**self.arguments(mesh), cfg=self.cfg, mesh=mesh)

    def waiting_bytes(self, mesh: Mesh) -> int:
        """Of the caches of other turns, which one device holds besides."""
        caches = sum(n for name, _, n in self.shards(mesh) if re.match(r"cache|tokens", name))
        return caches * (mesh.shape[STAGE] - 1)

    def shards(self, mesh: Mesh):
        """(name, elements, bytes) of what one device holds of each argument."""
        for name, x in named(**self.arguments(mesh)):
            size = math.prod(x.sharding.shard_shape(x.shape))
            yield name, size, size * jax.dtypes.itemsize_bits(x.dtype) / 8


def named(**trees):
    """(name, leaf) of all leaves, in order: weights.layers[0].attention.q.values, for example."""
    for root, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            yield (root + jax.tree_util.keystr(path)).removeprefix("batch."), x


PARTS = ("attention", "mlp", "experts", "kv_cache", "embedding", "other")


def part_of(argument: str, cfg: Config) -> str:
    """Which part of the model an argument is, by its name in the compiled program."""
    if argument.startswith("cache.layers"):
        return "kv_cache"
    if re.match(r"weights\.(un)?embed\b", argument):
        return "embedding"
    found = re.match(r"weights\.layers\[(\d+)\]\.(attention|feed_forward)\.(\w+)", argument)
    if not found or found[2] == "attention":
        return found[2] if found else "other"
    routed = isinstance(cfg.layers[int(found[1])].feed_forward, model.Experts)
    return "experts" if routed and found[3] not in ("shared", "router") else "mlp"


def local_tokens(job: Job, mesh: Mesh) -> int:
    """Tokens of a step on one device: those of its data shard."""
    return job.batch // mesh_size(mesh, ROWS) * job.tokens


def share_needed(argument: str, job: Job, mesh: Mesh) -> float:
    """How much of an argument must be read: of experts the active, of tables, text or embedding, nothing.

    Reading a prompt ends with the keys and values of the last layer, but in a stage.
    """
    last = rf"layers\[{len(job.cfg.layers) - 1}\]"  # which is not the last of any of several stages
    no_use = rf"cache\.{last}|weights\.(norm|unembed|{last}\.(attention\.([qo]|[kv]_b\b)|feed_forward))"
    tables = "tokens", "weights.positions"
    if argument in tables or (not job.chooses and re.match(no_use, argument)):
        return 0
    if part_of(argument, job.cfg) == "experts":
        return active_experts(job.cfg, local_tokens(job, mesh), mesh_size(mesh, EXPERT))
    return 0 if argument.startswith("weights.embed") and not (job.cfg.tied_embeddings and job.chooses) else 1


def needed(job: Job, mesh: Mesh) -> tuple[float, float]:
    """(HBM bytes, floating-point operations) of one device that reads its shard of what is needed once.

    Few tokens all go through each active expert: that is how its kernel works.
    """
    cfg, bytes_read, flops = job.cfg, 0, 0
    rows, few = job.batch / mesh_size(mesh, ROWS), local_tokens(job, mesh) <= FEW_ROWS
    for name, size, size_in_bytes in job.shards(mesh):
        share, part = share_needed(name, job, mesh), part_of(name, cfg)
        bytes_read += size_in_bytes * share
        if part == "kv_cache":
            columns = cfg.heads.columns  # a latent is read once, as a key and as a value
            twice = (columns.key + columns.value_width) / columns.width
            flops += 2 * size * share * job.tokens * cfg.heads.G * twice  # its rows are in its size
        elif share:
            through = (share if few else cfg.experts.A / cfg.experts.E) if part == "experts" else 1
            flops += 2 * size * rows * job.tokens * through
    return bytes_read, flops


def floor_bytes(job: Job, topology: Topology, stages: int = 1) -> float:
    """HBM bytes per device if all were split evenly over the devices, nothing stored twice or padded.

    stages: in a turn all layers are read, but of each row's cache a stage's only.
    """
    one = make_mesh(job.cfg, devices=topology.devices[:1])
    return needed(dataclasses.replace(job, batch=job.batch // stages), one)[0] / len(topology.devices)


def collective_seconds(kind: str, size: float, group: int, topology: Topology) -> float:
    """Estimate for `size` bytes among `group` devices: half a microsecond per hop, and the links' bandwidth.

    The group spans the longest axes of the torus, as few as hold it. Its bytes are divided among these axes,
    and go one way along each, or both ways where the axis wraps around; an all-reduce sends them twice. The
    hops are those across the group, once. Nothing else is on the links. Source: scaling-book, sharding.md.
    """
    chips, links, hops = -(-group // topology.chip.cores), 0, 0
    for axis in sorted(topology.sizes, reverse=True):
        n = min(axis, chips)
        chips = -(-chips // n)
        if n > 1:
            wraps = n == axis and n % topology.chip.ring == 0
            links, hops = links + (2 if wraps else 1), hops + (n // 2 if wraps else n - 1)
    sent = size * (group - 1) / group * (2 if kind == "all-reduce" else 1)
    return hops * HOP_SECONDS + sent / (topology.chip.link * max(links, 1))


def network_seconds(size: float, topology: Topology) -> float:
    """Estimate for `size` bytes that each device sends to another slice, over its share of the network.

    The network's own delay is left out: nothing published says it.
    """
    return size / (topology.chip.network / topology.chip.cores)


def expected_collectives(job: Job, mesh: Mesh, topology: Topology) -> float:
    """Seconds of a layer's two all-reduces, and the two small collectives where devices share a head."""
    cfg, rows = job.cfg, local_tokens(job, mesh)
    devices, slots = mesh_size(mesh, MODEL), mesh_size(mesh, SLOTS)
    K, G, columns = cfg.heads.K * slots // devices, cfg.heads.G, cfg.heads.columns
    sent = [("all-reduce", 2 * rows * cfg.D, devices)] * 2
    sent += [("all-gather", 2 * rows * K * (G * columns.key + columns.width), slots)]
    sent += [("all-to-all", 4 * rows * K * G * (columns.value_width + 1), slots)]
    depth = len(first_stage(cfg, mesh.shape[STAGE]).layers)
    return depth * sum(collective_seconds(*x, topology) for x in sent if x[2] > 1)


def resource_seconds(bytes_read: float, flops: float, collectives: float, chip: Chip) -> dict[str, float]:
    """How long each resource alone takes, at the data sheet's speed."""
    return {"memory": bytes_read / chip.bandwidth, "compute": flops / chip.flops, "interconnect": collectives}


def step_seconds(seconds: dict[str, float]) -> float:
    """HBM and matrix units work at the same time; collectives are taken to hide behind neither."""
    return max(seconds["memory"], seconds["compute"]) + seconds["interconnect"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A mesh as it looks before compiling."""

    dp: int
    ep: int
    tp: int
    fits: bool
    estimated_step_seconds: float


def rank_meshes(job: Job, topology: Topology, given: tuple, stages: int = 1) -> list[Choice]:
    """The meshes that the model and the given degrees allow, the most promising first.

    given: (dp, ep, tp), None where any will do. Raises UserError if there is none.
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
class Step:
    """One program on one device. What is None is not known: the compiler found that it does not fit.

    From the compiler. peak_bytes: of HBM, the sum of arguments (weights and cache), temporaries, code, what
    is returned but not updated in place, and the caches that wait for other turns, if there are several
    stages. collectives_per_layer: how many of each kind; the compiler does not tell it of several slices.
    between_stages: how many of each kind. collectives, copies: all, equal ones as one with its count; copies
    without prefetches.
    Counted in its program. hbm_bytes_per_step: moved; hbm_bytes_by_part: of what. A Pallas kernel is taken to
    read each operand once, of experts the active ones. assumed_loops: the trips of loops whose bound is
    computed.
    Estimated. seconds: of each resource alone. bound_by: the longest of these.
    """

    fits: bool
    peak_bytes: float
    compile_seconds: float
    floor_bytes_per_step: float
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    code_bytes: int | None = None
    hbm_bytes_per_step: float | None = None
    hbm_bytes_by_part: dict[str, float] | None = None
    collectives_per_layer: dict[str, float] | None = None
    between_stages: dict[str, int] | None = None
    collectives: list[dict] | None = None
    copies: list[dict] | None = None
    assumed_loops: dict[str, int] | None = None
    seconds: dict[str, float] | None = None
    bound_by: str | None = None
    estimated_step_seconds: float | None = None
    tokens_per_second_per_sequence: float | None = None
    tokens_per_second: float | None = None


def compile_step(job: Job, mesh: Mesh, topology: Topology, dump: str | None = None) -> Step:
    """Compile the job for the mesh and read what it does. dump: a file for its HLO text."""
    what = f"{len(job.cfg.layers)} layers for {topology.name}, {job.tokens} new token(s) per row"
    print(f"compiling {what}", file=sys.stderr, flush=True)
    stages, waiting = mesh.shape[STAGE], job.waiting_bytes(mesh)
    floor, began = floor_bytes(job, topology, stages), time.perf_counter()
    try:
        compiled = job.lower(mesh).compile()
    except jax.errors.JaxRuntimeError as e:
        found = re.search(
            r"RESOURCE_EXHAUSTED.*?hbm.*?(?:Used |required for [^(]*\()([\d.]+)([KMGT])",
            str(e),
            re.I | re.S,
        )
        if not found:
            raise UserError(f"the TPU compiler fails: {str(e)[:400]}") from e
        peak = float(found[1]) * 2 ** (10 + 10 * "KMGT".index(found[2].upper()))
        return Step(False, peak + waiting, time.perf_counter() - began, floor)
    seconds, memory, text = time.perf_counter() - began, compiled.memory_analysis(), compiled.as_text()
    text = text.replace('op_name="batch.', 'op_name="')
    if dump:
        pathlib.Path(dump).write_text(text)
    depth, slots = len(first_stage(job.cfg, stages).layers), -(-job.context // mesh_size(mesh, SLOTS))

    def kernel_share(kernel: str, argument: str) -> float:
        if kernel in ("take_slots", "put_slots"):  # a block of the cache
            return min(1, BLOCK / slots)
        if kernel == "take_rows":  # a tile for each token, of its shard of the embedding
            vocabulary = job.cfg.V / mesh_size(mesh, MODEL)
            rows = TILE if argument.endswith("values") else TILE // 2  # int8, bfloat16
            return min(1, local_tokens(job, mesh) * rows / vocabulary)
        return share_needed(argument, job, mesh)

    names = tuple(name for name, _ in named(**compiled.input_shardings[1]))  # of those that it uses
    trips = -(-slots // BLOCK)
    in_slice = stages // math.gcd(stages, topology.slices)
    program = hlo.read_program(text, kernel_share, computed_trips=trips, arguments=names, stages=in_slice)
    by_part, per_layer, between, sending = dict.fromkeys(PARTS, 0.0), Counter(), Counter(), 0.0
    for x in program.traffic:
        by_part[part_of(x.argument, job.cfg)] += x.bytes * x.count
    for x in program.collectives:
        if x.between_stages and topology.slices > 1:
            sending += network_seconds(x.bytes, topology) * x.count
        else:
            sending += collective_seconds(x.kind, x.bytes, x.group, topology) * x.count
        between[x.kind] += x.count * x.between_stages
        per_layer[x.kind] += x.count * bool(re.search(r"\b(attention|feed_forward)/", x.scope))
    resources = resource_seconds(program.hbm_bytes, needed(job, mesh)[1], sending, topology.chip)
    rate = job.tokens / step_seconds(resources) / stages
    per_layer = {kind: n // depth if n % depth == 0 else n / depth for kind, n in per_layer.items() if n}
    returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments, temp = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    peak = arguments + returned + temp + memory.generated_code_size_in_bytes + waiting
    return Step(
        fits=peak <= topology.chip.hbm, peak_bytes=peak, compile_seconds=seconds, floor_bytes_per_step=floor,
        argument_bytes=arguments, temp_bytes=temp, code_bytes=memory.generated_code_size_in_bytes,
        hbm_bytes_per_step=program.hbm_bytes, hbm_bytes_by_part=by_part,
        collectives_per_layer=per_layer if topology.slices == 1 else None, between_stages=dict(+between),
        collectives=_alike(program.collectives),
        copies=_alike([x for x in program.copies if not x.prefetch]),
        assumed_loops={x.instruction: x.trips for x in program.loops if not x.known},
        seconds=resources, bound_by=max(resources, key=resources.get),
        estimated_step_seconds=step_seconds(resources),
        tokens_per_second_per_sequence=rate, tokens_per_second=rate * job.batch,
    )  # fmt: skip


def _alike(events: list) -> list[dict]:
    """Those that differ in nothing but the layer as one, with their count; the largest first."""
    groups = Counter()
    for x in events:
        fields = dataclasses.asdict(x) | {"count": 1}
        groups[re.sub(r"layers\[\d+\]", "layers[*]", json.dumps(fields))] += x.count
    entries = [json.loads(alike) | {"count": n} for alike, n in groups.items()]
    return sorted(entries, key=lambda x: -x["bytes"] * x["count"])


@dataclasses.dataclass
class Plan:
    """A job on a topology. mesh: its degrees. ranking: the meshes it might have, by their estimates."""

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


def plan(
    job: Job,
    topology: Topology,
    prefill: int | None = None,
    degrees: tuple[int | None, int | None, int | None] = (None, None, None),
    dump: str | None = None,
    stages: int = 1,
) -> Plan:
    """Compile the decode step, and the first piece of prompts of `prefill` tokens, for the best mesh.

    The best is the first in order of their estimates whose decode step the compiler makes fit, of three.
    degrees: (dp, ep, tp), those that are to be kept. dump: a file for the decode step's HLO text.
    Raises UserError if no mesh has such degrees.
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
    piece, stored = None, Counter()
    for name, _, size_in_bytes in job.shards(mesh):
        stored[name.split(".")[0]] += size_in_bytes
    stored["cache"] += job.waiting_bytes(mesh)
    if prefill:
        width = prefill_width(job.batch, prefill)
        piece = compile_step(dataclasses.replace(job, tokens=width), mesh, topology)
    return Plan(
        topology=topology.name, devices=len(topology.devices), hbm_capacity_bytes=topology.chip.hbm,
        mesh=shape, batch=job.batch, context=job.context, layers=len(job.cfg.layers),
        weights_bytes=stored["weights"], cache_bytes=stored["cache"],
        decode=decode, prefill=piece, prefill_piece=width if prefill else None, ranking=ranking,
    )  # fmt: skip


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    names = ", ".join(MODELS)
    add("--model", required=True, metavar="NAME_OR_CONFIG", help=f"{names}, a config.json or its folder")
    add("--topology", required=True, metavar="KIND:AxB", help="v5e:4x4, v6e:8x8, v5p:2x2x2, tpu7x:2x2x1, ...")
    add("--batch", type=int, default=1, metavar="B", help="rows that decode together; default: 1")
    add("--context", type=int, default=8192, metavar="S", help="filled cache slots per row; default: 8192")
    add("--prefill", type=int, metavar="T", help="compile also the first piece of prompts of T tokens")
    for name in ("data", "expert", "tensor"):
        add(f"--{name[0]}p", type=int, metavar="N", help=f"{name} parallelism; default: the best by estimate")
    add("--pp", type=int, default=1, metavar="N", help="stages of layers; default: 1")
    add("--slices", type=int, default=1, metavar="N", help="so many such slices; default: 1")
    add("--quantize", choices=FORMATS, default="int8", help="weights; default: int8; none: bfloat16")
    add("--kv-cache-dtype", choices=("int8", "bfloat16"), default="int8", help="default: int8")
    add("--layers", type=int, metavar="L", help="only the first L layers")
    add("--json", action="store_true", help="print one JSON object")
    add("--dump-hlo", metavar="FILE", help="write the optimised HLO text of the decode step")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "batch", "context", "prefill", "dp", "ep", "tp", "pp", "slices", "layers")
    if args.batch > 2**20:
        parser.error(f"--batch {args.batch} is more than {2**20}")
    if args.prefill and args.prefill > args.context:
        parser.error(f"--prefill {args.prefill} is more than --context {args.context}")
    return args


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def counted(kinds: dict[str, float]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"


def report(title: str, step: Step, plan: Plan) -> None:
    """Print a compiled step: what is fact, then what is estimated."""
    verdict = "fits" if step.fits else "DOES NOT FIT"
    print(f"\n{title}: {verdict}, {gib(step.peak_bytes)} of {gib(plan.hbm_capacity_bytes)}")
    print(f"  Needed per device: weights {gib(plan.weights_bytes)}, cache {gib(plan.cache_bytes)}")
    if step.seconds is None:
        return
    print(f"  As compiled, per device (in {step.compile_seconds:.0f} s)")
    print(f"    arguments {gib(step.argument_bytes)}, temporaries {gib(step.temp_bytes)}", end="")
    print(f", code {gib(step.code_bytes)}")
    moved, floor = step.hbm_bytes_per_step, step.floor_bytes_per_step
    print(f"    HBM traffic {moved / 1e6:,.1f} MB: {moved / floor:.3f} x the floor of {floor / 1e6:,.1f} MB")
    for part, size in step.hbm_bytes_by_part.items():
        print(f"      {part.replace('_', ' '):10}{size / 1e6:11,.1f} MB")
    for x in step.copies[:5]:
        if x["bytes"] * x["count"] > moved / 100:
            print(f"    copied: {x['count']} x {x['shape']}, {x['argument'] or 'temporary'}")
    if step.collectives_per_layer is not None:
        print(f"    collectives per layer: {counted(step.collectives_per_layer)}")
    if STAGE in plan.mesh:
        print(f"    between stages: {counted(step.between_stages)}; all collectives:")
    for x in step.collectives:
        scope = x["scope"].split("shard_map/")[-1].split("/")[0]
        where = "between stages" if x.get("between_stages") else f"among {x['group']}"
        where += f", in {scope}" if scope else ""
        print(f"      {x['count']} x {x['kind']} of {x['shape']} {where}")
    print("  Estimate (data sheet speeds, no collective hidden)")
    print("   ", ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in step.seconds.items()))
    print(f"    {step.estimated_step_seconds * 1e3:.2f} ms, bound by {step.bound_by}: ", end="")
    print(
        f"{step.tokens_per_second_per_sequence:,.1f} tokens/s per row, {step.tokens_per_second:,.1f} in all"
    )


def show(plan: Plan, name: str, quantize: str, kv_cache_dtype: str) -> None:
    """Print a plan for the model of that name."""
    print(f"{name}, {plan.layers} layers, on {plan.topology}: {plan.devices} device(s)")
    print(f"batch {plan.batch}, context {plan.context}, weights {quantize}, cache {kv_cache_dtype}")
    for x in plan.ranking[:4]:
        note = "" if x.fits else ", does not fit"
        ms = f"{x.estimated_step_seconds * 1e3:.2f} ms before compiling"
        taken = (x.dp, x.ep, x.tp) == tuple(plan.mesh.values())[:3]
        stages = f"pp {plan.mesh[STAGE]} x " if STAGE in plan.mesh else ""
        print(f"{'mesh' if taken else 'or'} {stages}dp {x.dp} x ep {x.ep} x tp {x.tp}: {ms}{note}")
    report("A turn of the decode step" if STAGE in plan.mesh else "Decode step", plan.decode, plan)
    if plan.prefill:
        report(f"Prefill, a piece of {plan.prefill_piece} tokens per row", plan.prefill, plan)


def main() -> None:
    args = parse_arguments()
    cfg = read_model(args.model)
    if args.context > cfg.max_positions:
        raise UserError(f"--context {args.context}: the model's limit is {cfg.max_positions} positions")
    if args.layers and args.layers > len(cfg.layers):
        raise UserError(f"--layers {args.layers}: the model has {len(cfg.layers)}")
    cfg = dataclasses.replace(cfg, layers=cfg.layers[: args.layers])
    job = Job(cfg, args.batch, args.context, FORMATS[args.quantize], args.kv_cache_dtype)
    topology = find_topology(args.topology, args.slices)
    if args.dump_hlo is not None and not os.access(pathlib.Path(args.dump_hlo).parent, os.W_OK):
        raise UserError(
            f"--dump-hlo {args.dump_hlo}: its folder cannot be written to"
        )  # now, not after minutes
    result = plan(job, topology, args.prefill, (args.dp, args.ep, args.tp), args.dump_hlo, args.pp)
    if args.json:
        fields = dataclasses.asdict(result)
        asked = dict(model=args.model, quantize=args.quantize, kv_cache_dtype=args.kv_cache_dtype)
        print(json.dumps(asked | fields.pop("decode") | fields))
        return
    show(result, args.model, args.quantize, args.kv_cache_dtype)


if __name__ == "__main__":
    run(main)
