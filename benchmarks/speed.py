"""How fast is a model here, and how fast could it be?

    python3 benchmarks/speed.py --model llama3.2-1b --quantize int8 --batch 1,8 --context 1024 --prompt 512

Decode is timed with caches that are filled to `--context` positions; prefill is timed on prompts of
`--prompt` tokens, up to their keys and values, without choosing a token. Both are warmed up first, and
compiling is timed apart. The tables have the median, the fastest and the slowest repetition. The roofline is
measured on this device in the same run: the bytes per second at which it reads a large array, and the
operations per second of a large matrix product in the type of the activations.
"""

import collections
import dataclasses
import gzip
import json
import math
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import results

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.names import FLOATS
from deployment import memory, placement
from deployment.deploy import ModelOptions, mesh_for
from deployment.job import Job
from deployment.step_bytes import bytes_per_step, read_at_a_time, times_read
from families.gated_delta_net import GatedDeltaNetWeights
from families.latent_attention import LatentAttentionWeights
from feedback.errors import UserError
from model import Config
from ops.kv_cache import cached_depth
from ops.platform import platform
from planner.published_models import MODELS, read_model
from quantize import FORMATS, QuantizedArray, values_and_scale
from serving.chunks import ACCELERATOR_SHAPES, EXPERTS_TOKENS, best_shape
from serving.executors import one_program
from serving.steps import Batch, DecodeStep, PrefillChunk, init_batch
from terminal import launch
from terminal.command_line import OneLineParser, run

WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}  # a compiler's option
COMPONENTS = ("attention", "mlp", "experts", "embed", "unembed", "sample")  # named scopes of model.py


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a repetition: the median, the least and the most of all repetitions."""

    median: float
    least: float
    most: float


def measure(function: Callable[[int], object], repeat: int, n: int = 1) -> Timing:
    """Time function(n), which does a piece of work n times and returns its arrays; seconds per piece."""
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(function(n))
        seconds.append((time.perf_counter() - began) / n)
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def measure_bandwidth() -> float:
    """Bytes per second that one device moves: in a sum, a product with a vector, or a copy, which is best.

    A copy moves each byte twice. A GPU copies faster than it sums.
    """
    on_cpu = jax.default_backend() == "cpu"
    x = jnp.ones((1 << 13, 1 << (13 if on_cpu else 16)), jnp.float32)  # 256 MiB, else 2 GiB
    ways = [(jnp.sum, 1), (lambda x: jnp.einsum("ij,j->i", x, x[0]), 1), (lambda x: -x, 2)]
    return max(times * x.nbytes / _best(jax.jit(way), x) for way, times in ways)


def measure_flops(dtype) -> float:
    """Operations per second of one device in matrix products of dtype: the faster of two layouts."""
    n = 2048 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((n, n), dtype)

    def product(spec: str):
        return jax.jit(lambda x: jnp.einsum(spec, x, x, preferred_element_type=jnp.float32))

    return max(2 * n**3 / _best(product(spec), x) for spec in ("ij,jk->ik", "ij,kj->ik"))


def _best(function, x: jax.Array) -> float:
    jax.block_until_ready(function(x))
    return measure(lambda _: function(x), 5).least


def chunk_width(batch: int, length: int, limit: int) -> int:
    """Tokens of each prompt in one prefill chunk of all `batch` rows: fewer for many rows, to save memory.

    limit: the most, for few rows.
    """
    while limit * batch > 8 * 512 and limit > 16:
        limit //= 2
    return min(limit, best_shape(ACCELERATOR_SHAPES, [[length]]).width)


def needed_flops(
    weights: model.Weights, cfg: Config, batch: int, tokens: int, context: int, chooses: bool
) -> float:
    """Multiplications and additions for `tokens` new tokens per row after `context` others.

    chooses: whether each row chooses its next token, by the logits of one position; otherwise the work ends
    with the keys and values of the last layer that has its own. Norms, RoPE and softmax are not counted;
    zeros that pad heads and widths are.
    """
    last = cached_depth(cfg.layers) - 1
    per_token, attention = 0 if chooses else _size(_cached(weights.layers[last].attention)), 0
    layers = list(zip(weights.layers, cfg.layers, strict=True))
    for layer, kind in layers if chooses else layers[:last]:
        per_token += _size(layer.attention)
        if isinstance(kind.feed_forward, model.MoE):
            routed = layer.feed_forward
            share = kind.feed_forward.A / kind.feed_forward.E
            per_token += _size(routed.shared) + _size(routed.router)
            per_token += share * _size((routed.gate, routed.up, routed.down))
        else:
            per_token += _size(layer.feed_forward)
        times = np.sum(times_read(kind, np.arange(context, context + tokens)))
        attention += times * read_at_a_time(kind, "bfloat16")[1]
    return batch * (2 * per_token * tokens + attention + 2 * cfg.V * cfg.D * chooses)


def _cached(w: model.AttentionWeights | LatentAttentionWeights | GatedDeltaNetWeights):
    """The matrices that compute what the cache or the state keeps."""
    if isinstance(w, GatedDeltaNetWeights):
        return w.q, w.k, w.v, w.a, w.b
    return (w.kv_a, w.k_rope) if isinstance(w, LatentAttentionWeights) else (w.k, w.v)


def _size(tree) -> int:
    """Elements of the matrices in a tree, without the scales of quantized ones."""
    arrays = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QuantizedArray))
    return sum(values_and_scale(x)[0].size for x in arrays)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function compiled for arrays of some shapes. seconds: what compiling took.

    profiled: the same for a profile; None if there will be none. On a GPU it starts its kernels one by one,
    where `compiled` starts many at a time (a CUDA graph), of which a profile does not say to which
    instructions they belong.
    """

    compiled: jax.stages.Compiled
    seconds: float
    profiled: jax.stages.Compiled | None


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model on a mesh, to be measured. bandwidth, flops: what one device reaches, per second.

    profiles: whether each row also has a profile, which says where the time goes.
    """

    cfg: Config
    mesh: jax.sharding.Mesh
    weights: model.Weights
    kv_dtype: str
    repeat: int
    bandwidth: float
    flops: float
    profiles: bool = True

    def compile(self, function, *arguments, **static) -> Program:
        began = time.perf_counter()
        lowered = function.lower(*arguments, **static, cfg=self.cfg, mesh=self.mesh)
        compiled = lowered.compile()
        seconds, on_gpu = time.perf_counter() - began, platform(self.mesh) == "gpu"
        if not self.profiles:
            return Program(compiled, seconds, None)
        return Program(compiled, seconds, lowered.compile(WITHOUT_GRAPHS) if on_gpu else compiled)

    def rows(self, n: int, filled: int, room: int) -> Batch:
        """A batch of n rows that have read `filled` tokens each, with room for more."""
        batch = init_batch(self.cfg, self.mesh, n, -(-(filled + room) // 128) * 128, self.kv_dtype)
        # The tokens are random: equal tokens would all go to the same experts.
        tokens = np.random.default_rng(0).integers(0, self.cfg.V, batch.tokens.shape, np.int32)
        return batch.replace(
            tokens=jax.device_put(tokens, batch.tokens.sharding),
            length=jax.device_put(np.full(n, filled, np.int32), batch.cache.length.sharding),
        )

    def decode(self, batch: int, context: int, trace: pathlib.Path | None = None) -> dict:
        """Steps of one token per row, around `context` filled positions."""
        steps = 4
        room = steps * (self.repeat + 2)
        state = [self.rows(batch, max(context - room // 2, 0), room)]
        step = DecodeStep(count=np.ones(batch, np.int32))
        program = self.compile(one_program, step, self.weights, *state)

        def go(n: int, compiled=program.compiled):
            for _ in range(n):
                state[0] = compiled(step, self.weights, state[0])[1]
            return state

        return self.time("decode", go, steps, batch, 1, context, program, trace)

    def prefill(self, batch: int, length: int, trace: pathlib.Path | None = None) -> dict:
        """Prompts of `length` tokens into empty caches."""
        widest = EXPERTS_TOKENS if self.cfg.moe or platform(self.mesh) == "cpu" else 2048
        state, width = [self.rows(batch, 0, length)], chunk_width(batch, length, widest)
        counts = [np.full(batch, min(width, length - i), np.int32) for i in range(0, length, width)]
        chunks = [PrefillChunk(rows=None, count=count, width=width) for count in counts]
        program = self.compile(one_program, chunks[0], self.weights, *state)

        def go(n: int, compiled=program.compiled):
            for _ in range(n):
                rows = state[0].replace(length=jnp.zeros_like(state[0].cache.length))
                for chunk in chunks:
                    rows = compiled(chunk, self.weights, rows)[1]
                state[0] = rows
            return state

        return self.time("prefill", go, 1, batch, length, 0, program, trace)

    def time(self, phase, go, n, batch, tokens, context, program: Program, trace) -> dict:
        """Time go(n), which processes `tokens` tokens of each row n times: the row of the report."""
        jax.block_until_ready(go(n))
        timing, parts = measure(go, self.repeat, n), {}
        if program.profiled:
            with tempfile.TemporaryDirectory() as temporary:
                folder = trace / f"{phase}-{batch}x{context or tokens}" if trace else pathlib.Path(temporary)
                with jax.profiler.trace(folder, create_perfetto_trace=trace is not None):
                    jax.block_until_ready(go(1, program.profiled))
                parts = components(folder, program.profiled.as_text())
        floors = self.floors(batch, tokens, context, phase == "decode")
        bound = max(floors, key=floors.get)
        return dict(
            phase=phase, batch=batch, tokens=tokens, context=context,
            seconds=timing.median, seconds_least=timing.least, seconds_most=timing.most,
            tokens_per_second=batch * tokens / timing.median, compile_seconds=program.seconds,
            mbu=floors["memory"] / timing.median, mfu=floors["arithmetic"] / timing.median,
            bound_by=bound, of_roofline=floors[bound] / timing.median, components=parts,
        )  # fmt: skip

    def floors(self, batch: int, tokens: int, context: int, chooses: bool) -> dict[str, float]:
        """The least seconds that reading all that is needed takes, and computing it."""
        weights, cfg, moved = self.weights, self.cfg, 0
        if not chooses:  # prefill needs only keys and values of the last layer that has its own
            last = cached_depth(cfg.layers) - 1
            moved = memory.shard_bytes(_cached(weights.layers[last].attention))
            weights = dataclasses.replace(weights, layers=weights.layers[:last])
            cfg = dataclasses.replace(cfg, layers=cfg.layers[:last])
        local = batch // self.mesh.shape["data"] * tokens
        positions = np.arange(context, context + 1) if chooses else np.arange(0)  # prefill: an empty cache
        moved += bytes_per_step(weights, cfg, self.mesh, local, positions, self.kv_dtype, chooses)
        flops = needed_flops(self.weights, self.cfg, batch, tokens, context, chooses) / self.mesh.size
        return dict(memory=moved / self.bandwidth, arithmetic=flops / self.flops)


def components(folder: pathlib.Path, text: str) -> dict[str, float]:
    """Shares of the devices' busy time by part of the model, from a profile; a fusion counts as its root.

    folder: where jax.profiler.trace wrote the profile. text: the HLO text of the program that ran.
    """
    part = {}
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\(", line)
        if found and found[2] not in ("while", "conditional", "call"):  # their instructions count themselves
            part[found[1]] = component(found[2], line)
    seconds = collections.Counter()
    for name, duration in operations(folder):
        if name in part:
            seconds[part[name]] += duration
    total = sum(seconds.values())
    return {name: duration / total for name, duration in seconds.most_common()}


def component(opcode: str, line: str) -> str:
    """The part of the model that an instruction of HLO text belongs to, by its innermost named scope."""
    if opcode.startswith(("all-", "collective-", "reduce-scatter")):
        return "collectives"
    scopes = re.search(r'op_name="([^"]*)"', line)
    found = [scope for scope in scopes[1].split("/") if scope in COMPONENTS] if scopes else []
    return found[-1] if found else "other"


def operations(folder: pathlib.Path) -> Iterator[tuple[str, float]]:
    """(name of an HLO instruction, microseconds) of each run of an instruction."""
    sessions = sorted(folder.glob("plugins/profile/*"), key=lambda session: session.stat().st_mtime)
    for file in (sessions[-1] if sessions else folder).glob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
            if event.get("ph") == "X":
                yield event.get("args", {}).get("hlo_op", event["name"]), event["dur"]


def table(result: dict, before: dict | None = None) -> str:
    """The rows in Markdown, beside those of an earlier result."""
    earlier = {_key(row): row["tokens_per_second"] for row in before["rows"]} if before else {}
    head = ["", "batch x context", "tokens/s", "ms (least..most)", "MBU", "MFU"]
    head += ["of the roofline", "compiled in"] + ["before"] * bool(before)
    lines = []
    for row in result["rows"]:
        ms = [f"{1e3 * row[name]:.1f}" for name in ("seconds", "seconds_least", "seconds_most")]
        cells = [
            row["phase"], size(row), f"{row['tokens_per_second']:,.1f}", f"{ms[0]} ({ms[1]}..{ms[2]})",
            f"{row['mbu']:.0%}", f"{row['mfu']:.0%}", f"{row['of_roofline']:.0%}, {row['bound_by']}",
            f"{row['compile_seconds']:.1f} s",
        ]  # fmt: skip
        if before:
            old = earlier.get(_key(row))
            cells.append(f"{old:,.1f}, {row['tokens_per_second'] / old - 1:+.1%}" if old else "not measured")
        lines.append(cells)
    return results.table(head, lines)


def size(row: dict) -> str:
    """The number of rows, and the positions of each that are filled or prefilled."""
    return f"{row['batch']} x {row['context'] or row['tokens']}"


def _key(row: dict) -> tuple:
    return row["phase"], row["batch"], row["tokens"], row["context"]


def facts(result: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['model']}, {result['weights']} weights, {result['dtype']} activations, "
        f"{result['kv_cache_dtype']} cache; {result['devices']} x {result['device']}, mesh {result['mesh']}; "
        f"{versions}; {result['date']}. Seen to move {result['bandwidth'] / 1e9:.1f} GB/s and to do "
        f"{result['flops'] / 1e12:.2f} TFLOP/s per device."
    )


def breakdown(result: dict) -> str:
    """Where the busy time of each row goes, in Markdown."""
    rows = [row for row in result["rows"] if row["components"]]
    if not rows:
        return ""
    names = [x for x in (*COMPONENTS, "collectives", "other") if any(x in row["components"] for row in rows)]
    lines = []
    for row in rows:
        shares = [f"{row['components'].get(name, 0):.0%}" for name in names]
        lines.append([f"{row['phase']} {size(row)}", *shares])
    return results.table(["share of busy time", *names], lines)


def report(result: dict, before: dict | None = None) -> str:
    return "\n\n".join([table(result, before), facts(result), breakdown(result)])


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    names = ", ".join(MODELS)
    source.add_argument("--model", metavar="NAME_OR_CONFIG", help=f"random weights: {names} or a config.json")
    source.add_argument("--checkpoint", metavar="DIR_OR_ID", help="as for main.py")
    numbers = results.positive_numbers(int)
    add("--batch", type=numbers, default=[1, 8], metavar="B,...", help="rows; default: 1,8")
    add("--context", type=numbers, default=[1024], metavar="S,...", help="of decode; default: 1024")
    add("--prompt", type=numbers, default=[512], metavar="T,...", help="lengths to prefill; default: 512")
    for name in ("dp", "ep", "tp"):
        add(f"--{name}", type=int, metavar="N", help="as for main.py")
    add("--dtype", choices=FLOATS, help="of activations; default: as for main.py")
    add("--quantize", choices=FORMATS, help="the weights; default: as in the checkpoint")
    add("--kv-cache-dtype", choices=("int8", "bfloat16", "float32"), help="default: as for main.py")
    add("--layers", type=int, metavar="L", help="only the first L layers")
    add("--repeat", type=int, default=5, metavar="N", help="measurements per row; default: 5")
    add("--json", metavar="FILE", help="write all measurements there")
    add("--compare", metavar="FILE", help="an earlier --json file to compare with")
    add("--profile", metavar="DIR", help="keep a trace of each row there, for ui.perfetto.dev")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "dp", "ep", "tp", "layers", "repeat")
    return args


def read_result(file: pathlib.Path) -> dict:
    """Read what --json wrote. Raises UserError if the file is something else."""
    try:
        result = json.loads(file.read_text())
        assert all(_key(row) and row["tokens_per_second"] > 0 for row in result["rows"])
        return result
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{file}: not what speed.py --json writes") from None


def main() -> None:
    args = parse_arguments()
    before = read_result(pathlib.Path(args.compare)) if args.compare else None
    results.check_writable(args.json)
    trace = pathlib.Path(args.profile) if args.profile else None
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", False)  # compiling is measured
    launch.join_hosts(args)
    checkpoint = open_checkpoint(args.checkpoint) if args.checkpoint else None
    cfg = checkpoint.config if checkpoint else read_model(args.model)
    if args.layers:
        if checkpoint:
            raise UserError("--layers is for --model: a checkpoint is loaded whole")
        cfg = dataclasses.replace(cfg, layers=cfg.layers[: args.layers])
    on_cpu = jax.default_backend() == "cpu"
    format = placement.choose_format(args.quantize, checkpoint, launch.log)
    dtype, kv_dtype = placement.choose_dtypes(args.dtype, args.kv_cache_dtype, format)
    placement.set_precision(dtype)
    for name, length in (("context", max(args.context)), ("prompt", max(args.prompt))):
        if length > cfg.max_positions:
            raise UserError(f"--{name} {length}: the model's limit is {cfg.max_positions} positions")
    longest = max(*args.context, *args.prompt)
    options = ModelOptions(args.checkpoint or args.model, dp=args.dp, ep=args.ep, tp=args.tp)
    job = Job(cfg, math.gcd(*args.batch), longest, format, kv_dtype, dtype)
    mesh = mesh_for(options, launch.device_count(), job, launch.log)
    for batch in args.batch:
        if batch % mesh.shape["data"]:
            raise UserError(f"--batch {batch} is no multiple of the data parallelism {mesh.shape['data']}")
    memory.fit_cache([memory.Deployment(cfg, mesh, dtype, format, kv_dtype)], [], max(args.batch), longest)
    rates = measure_bandwidth(), measure_flops(jnp.dtype(dtype))  # before the weights fill the memory
    if checkpoint:
        weights = load(checkpoint, mesh, dtype, format, show=jax.process_index() == 0)
    else:
        launch.log("making random weights")
        weights = model.init_weights(jax.random.key(0, impl="rbg"), cfg, mesh, jnp.dtype(dtype), format)
    bench = Bench(cfg, mesh, jax.block_until_ready(weights), kv_dtype, args.repeat, *rates)
    rows = []
    for batch in args.batch:
        jobs = [(bench.decode, n) for n in args.context] + [(bench.prefill, n) for n in args.prompt]
        for job, n in jobs:
            try:
                rows.append(job(batch, n, trace))
            except jax.errors.JaxRuntimeError as e:
                if "RESOURCE_EXHAUSTED" not in str(e):
                    raise
                raise UserError(f"{job.__name__} {batch} x {n}: out of device memory") from e
            launch.log("{phase} {batch}: {tokens_per_second:,.1f} tokens/s".format(**rows[-1]))
    result = dict(
        model=args.model or args.checkpoint, layers=len(cfg.layers), dtype=dtype, kv_cache_dtype=kv_dtype,
        weights=str(format or dtype), devices=mesh.size,
        device=results.cpu_name() if on_cpu else jax.devices()[0].device_kind,
        mesh="x".join(str(n) for n in mesh.shape.values() if n > 1) or "1",
        bandwidth=rates[0], flops=rates[1], rows=rows, **results.versions_and_date(),
    )  # fmt: skip
    if jax.process_index() == 0:
        print(report(result, before))
        results.write(result, args.json)


if __name__ == "__main__":
    run(main)
