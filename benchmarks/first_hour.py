"""The first hour on a machine: does it do what the documents say?

    python3 benchmarks/first_hour.py

In this order: what the machine is; each kernel of its platform beside numpy; small models with random
weights, in several number formats, and greedy answers of the tiny models, both beside the forward pass of a
CPU; the bandwidth and the matrix products that one device reaches; decode and prefill of a model with random
weights, beside what the plan says. Each is a line, and all of it is in a JSON file, which is written anew
after each part. The exit code is 1 if a kernel, a model, an answer or a step is wrong.
"""

import dataclasses
import math
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import kernel_checks
import model_checks
import numpy as np
import results
import speed

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load as load_weights
from deployment import memory, placement
from deployment.chips import Chip, Topology, topology_of
from deployment.deploy import ModelOptions, mesh_for
from deployment.estimates import expected_collectives, resource_seconds, step_seconds
from deployment.floor import needed
from deployment.job import Job
from distributed.exchange import gather
from feedback.errors import UserError
from generation.llm import load
from model import Config
from planner.published_models import MODELS, read_model
from quantize import FORMATS, Format
from sharding.mesh import make_mesh
from terminal import launch
from terminal.command_line import OneLineParser, run
from terminal.prompts import DEFAULT_PROMPTS

TINY = [results.ROOT / "tests" / "checkpoints" / name for name in ("tiny-llama3", "tiny-llama4")]
PROMPTS = (*DEFAULT_PROMPTS, "What is 12 + 34?", "Count from 7 to 12.")
# The first that fits, in floats and with all rows, is measured; on a CPU, whose memory says little, the last.
MEASURED = ("llama3.1-8b", "llama3.2-3b", "llama3.2-1b", "smollm2-135m")
FORMAT_NAMES = ("none", "int8", "int4")
PARTS = ("kernels", "models", "answers", "steps")  # of the result: lists of what was found


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done. seeds: random inputs of each kernel. models: of `model_checks`, the last ones.

    rows: of the batches in decode. context: filled positions of each row. prompt: tokens of prefill. repeat:
    measurements of each.
    """

    seeds: int
    models: int
    rows: tuple[int, ...]
    context: int
    prompt: int
    repeat: int


QUICK = Sizes(1, 1, (1, 2), 64, 32, 2)
ON_CPU = Sizes(3, 3, (1, 8, 32), 128, 128, 3)
ON_ACCELERATOR = Sizes(3, 3, (1, 8, 32), 1024, 512, 5)


def say(text: str) -> None:
    """Print a line at once, in the first process only."""
    if jax.process_index() == 0:
        print(text, flush=True)


# ------------------------------------------------------------------------------------------------ the machine


def machine() -> dict:
    """What jax and the driver say about the machine. memory: bytes of one device."""
    device, platform = jax.local_devices()[0], jax.default_backend()
    return dict(
        platform=platform, device=results.cpu_name() if platform == "cpu" else device.device_kind,
        devices=jax.device_count(), processes=jax.process_count(), memory=memory.device_memory(),
        runtime=" ".join(device.client.platform_version.split()), driver=driver(),
        date=results.versions_and_date()["date"], versions=launch.versions(),
    )  # fmt: skip


def driver() -> list[str]:
    """What nvidia-smi says of each GPU: its name, the driver's version, its memory. Without it, nothing."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return []
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as e:
        return [kernel_checks.one_line(e)]


def say_machine(facts: dict) -> None:
    processes = f"{facts['processes']} process{'es' * (facts['processes'] > 1)}"
    say(
        f"machine: {facts['devices']} x {facts['device']}, platform {facts['platform']}, "
        f"{memory.gib(facts['memory'])} for each device, {processes}"
    )
    say(f"software: {', '.join(f'{name} {x}' for name, x in facts['versions'].items())}; {facts['date']}")
    if facts["platform"] != "cpu":
        say(f"runtime: {'; '.join(dict.fromkeys([facts['runtime'], *facts['driver']]))}")


# -------------------------------------------------------------------------------------- kernels, small models


def check_kernels(seeds: int) -> list[dict]:
    """What `run_check` finds of each kernel of the platform."""
    checks = kernel_checks.checks(jax.default_backend())
    return told(kernel_checks.run_check(check, seeds) for check in checks)


def check_models(most: int) -> list[dict]:
    """What `run_kind` finds of small models with random weights."""
    kinds, cpu = model_checks.kinds_of(jax.default_backend()), cpu_device()
    return told(model_checks.run_kind(kind, cpu) for kind in kinds[-most:])


def told(checks: Iterator[dict]) -> list[dict]:
    """What is found, each told in a line at once, and what other processes have found wrong."""
    found = []
    for one in checks:
        found.append(one)
        say(kernel_line(one))
    found, *others = gather(found)
    for process, theirs in enumerate(others, 1):
        for x in theirs:
            if not x["ok"]:
                found.append(x | dict(name=f"{x['name']}, in process {process}"))
                say(kernel_line(found[-1]))
    return found


def kernel_line(found: dict) -> str:
    verdict, remedy = ("ok   ", "") if found["ok"] else ("WRONG", f"; {found['remedy']}")
    what = found["failure"]
    if what is None:
        what = f"error {found['error']:.1e}, {found['share']:.2g} of what rounding explains"
    return f"{verdict}  {found['name']}: {what}{remedy}"


# ------------------------------------------------------------------------------------------------ the answers


def check_answers() -> list[dict]:
    """Greedy answers in float32 by the engine on all devices: every token is the forward pass's on a CPU."""
    every = []
    for folder in TINY:
        try:
            found = answers_of(folder)
        except Exception as e:  # of a kernel that does not compile, for example
            found = [dict(prompt="all prompts", ok=False, failure=kernel_checks.one_line(e))]
        every += [dict(model=folder.name) | x for x in found]
        wrong = [x for x in found if not x["ok"]]
        if not wrong:
            tokens = sum(x["tokens"] for x in found)
            say(f"ok     {len(found)} answers of {folder.name}, {tokens} tokens: those of a CPU")
        for x in wrong:
            say(f"WRONG  {folder.name}, {x['prompt']}: {x['failure']}")
    return every


def answers_of(folder: pathlib.Path) -> list[dict]:
    precision = jax.config.jax_default_matmul_precision
    try:
        llm = load(folder, dtype="float32", quantize="none", max_len=512)
        answers = llm.generate(list(PROMPTS), temperature=0, max_new_tokens=64)
        mesh = make_mesh(llm.cfg, devices=[cpu_device()])
        weights = load_weights(open_checkpoint(str(folder)), mesh, "float32", None, show=False)
        texts = [[*x.prompt_tokens, *x.tokens] for x in answers]
        tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        chosen = np.argmax(model.forward(tokens, weights, cfg=llm.cfg, mesh=mesh), -1)
    finally:
        jax.config.update("jax_default_matmul_precision", precision)  # which float32 has made exact
    found = []
    for prompt, x, row in zip(PROMPTS, answers, chosen, strict=True):
        start = len(x.prompt_tokens) - 1
        expected = row[start : start + len(x.tokens)].tolist()
        wrong = [i for i, token in enumerate(x.tokens) if token != expected[i]]
        failure = x.error or (None if x.tokens else "no token")
        if wrong and not failure:
            failure = f"token {wrong[0] + 1} is {x.tokens[wrong[0]]}, a CPU's is {expected[wrong[0]]}"
        found.append(dict(prompt=prompt, ok=not failure, tokens=len(x.tokens), failure=failure))
    return found


def cpu_device() -> jax.Device:
    """This process's CPU, beside its accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        platforms = jax.config.jax_platforms
        raise UserError(f"JAX_PLATFORMS={platforms}: say {platforms},cpu, for answers to compare") from None


# -------------------------------------------------------------------------------------------------- the speed


def measure_rates(dtypes: list[str], chip: Chip | None) -> tuple[float, dict[str, float]]:
    """One device's bytes per second, and operations per second by type, with the data sheet's beside them."""
    bandwidth = speed.measure_bandwidth()
    say(f"bandwidth: {bandwidth / 1e9:,.1f} GB/s{of_sheet(bandwidth, chip and chip.bandwidth, 1e9, 'GB/s')}")
    flops = {}
    for dtype in dtypes:
        flops[dtype] = speed.measure_flops(jnp.dtype(dtype))
        sheet = chip.flops if chip and dtype == "bfloat16" else None
        where = of_sheet(flops[dtype], sheet, 1e12, "TFLOP/s")
        say(f"matrix products in {dtype}: {flops[dtype] / 1e12:,.2f} TFLOP/s{where}")
    return bandwidth, flops


def of_sheet(measured: float, stated: float | None, unit: float, name: str) -> str:
    return f", {measured / stated:.0%} of the data sheet's {stated / unit:,.0f} {name}" if stated else ""


def deployment_of(name: str, cfg: Config, format: Format | None, longest: int) -> memory.Deployment:
    """A model on the mesh that is best for it, with the numbers that are fast here."""
    dtype, kv_dtype = placement.choose_dtypes(None, None, format)
    job = Job(cfg, 1, longest, format, kv_dtype, dtype)
    mesh = mesh_for(ModelOptions(name), launch.device_count(), job, lambda message: None)
    return memory.Deployment(cfg, mesh, dtype, format, kv_dtype)


def choose_model(sizes: Sizes) -> str:
    """The largest of MEASURED that fits in floats with all rows; on a CPU the smallest."""
    longest = max(sizes.context, sizes.prompt)
    for name in MEASURED[:-1] if jax.default_backend() != "cpu" else ():
        deployment = deployment_of(name, read_model(name), None, longest)
        if memory.needs([deployment], max(sizes.rows), longest).fit(memory.device_memory(), headroom=True):
            return name
    return MEASURED[-1]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A model to be measured. rates: of one device, measured: bytes per second, and operations by type."""

    name: str
    cfg: Config
    sizes: Sizes
    topology: Topology
    rates: tuple[float, dict[str, float]]
    trace: pathlib.Path | None

    def of_format(self, format_name: str) -> Iterator[dict]:
        """Decode and prefill with weights of one number format: rows of `speed.Bench.time` and the plan's."""
        cfg, sizes, longest = self.cfg, self.sizes, max(self.sizes.context, self.sizes.prompt)
        deployment = deployment_of(self.name, cfg, FORMATS[format_name], longest)
        memory.fit_cache([deployment], [], max(sizes.rows), longest)
        mesh, format = deployment.mesh, deployment.format
        dtype, kv_dtype = deployment.dtype, deployment.kv_dtype
        launch.log(f"making random weights, {format or dtype}")
        weights = model.init_weights(jax.random.key(0, impl="rbg"), cfg, mesh, jnp.dtype(dtype), format)
        rates = self.rates[0], self.rates[1][dtype]
        weights, profiles = jax.block_until_ready(weights), self.trace is not None
        bench = speed.Bench(cfg, mesh, weights, kv_dtype, sizes.repeat, *rates, profiles)
        chip = self.topology.chip or Chip(self.topology.name, 0, *rates, 0, math.inf)
        topology = dataclasses.replace(self.topology, chip=chip)
        shards, trace = mesh.shape["data"], self.trace and self.trace / format_name
        steps = [("decode", -(-rows // shards) * shards, sizes.context) for rows in sizes.rows]
        for phase, rows, positions in [*dict.fromkeys(steps), ("prefill", shards, sizes.prompt)]:
            step = Job(cfg, rows, positions, format, kv_dtype, dtype)
            step = step.prefill(positions, mesh) if phase == "prefill" else step
            bytes_read, operations = needed(step, mesh)
            collectives = expected_collectives(step, mesh, topology)
            planned = step_seconds(resource_seconds(bytes_read, operations, collectives, chip))
            row = getattr(bench, phase)(rows, positions, trace)
            yield dict(weights=str(format or dtype), planned=planned, planned_bytes=bytes_read) | row


def measure_steps(measurement: Measurement) -> list[dict]:
    """Decode and prefill in each number format. What does not fit is left out, what fails is told."""
    every, platform = [], jax.default_backend()
    for name in FORMAT_NAMES:
        if FORMATS[name] and FORMATS[name].on(platform) != FORMATS[name]:
            continue  # it is held as another
        try:
            for row in measurement.of_format(name):
                every.append(row | dict(ok=True))
                say(step_line(row, measurement.topology))
        except UserError as e:
            say(f"left out: --quantize {name}: {e}")
        except Exception as e:  # a compiler's error, for example
            if "RESOURCE_EXHAUSTED" in str(e):
                say(f"left out: --quantize {name}: out of device memory")
                continue
            every.append(dict(weights=name, ok=False, failure=kernel_checks.one_line(e)))
            say(f"WRONG  a step of {measurement.name}, --quantize {name}: {every[-1]['failure']}")
    return every


def step_line(row: dict, topology: Topology) -> str:
    plan = "the plan says" if topology.chip else "at the measured speeds it is"
    reached = f"{row['mbu']:.0%} of the measured bandwidth"
    if row["phase"] == "prefill":
        reached = f"{row['mfu']:.0%} of the measured operations"
    return (
        f"{row['phase']} {speed.size(row)}, {row['weights']}: {1e3 * row['seconds']:.1f} ms, "
        f"{row['tokens_per_second']:,.1f} tokens/s; {plan} {1e3 * row['planned']:.2f} ms, "
        f"{row['seconds'] / row['planned']:.2f} times that; {reached}"
    )


# ------------------------------------------------------------------------------------------------ the program


def summary(result: dict) -> str:
    """One line: what is wrong, or that all is right, and how much of the bandwidth decode reaches."""
    kernels, models, answers, steps = (result[name] for name in PARTS)
    wrong = [x["name"] for x in kernels if not x["ok"]]
    parts = [f"all {len(kernels)} kernels agree with their references"]
    if wrong:
        parts = [f"WRONG: {len(wrong)} of {len(kernels)} kernels ({'; '.join(wrong)})"]
    right = sum(x["ok"] for x in models)
    parts.append(f"{right} of {len(models)} models with random weights agree with a CPU")
    right = sum(x["ok"] for x in answers)
    parts.append(f"{right} of {len(answers)} answers are those of a CPU")
    if failed := [x["weights"] for x in steps if not x["ok"]]:
        parts.append(f"no step in {', '.join(failed)}")
    if decode := [x["mbu"] for x in steps if x.get("phase") == "decode"]:
        parts.append(f"decode reaches up to {max(decode):.0%} of the measured bandwidth")
    return "; ".join(parts)


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add, names = parser.add_argument, ", ".join(MODELS)
    add("--model", metavar="NAME_OR_CONFIG", help=f"to measure: {names} or a config.json; default: what fits")
    add("--quick", action="store_true", help="less of everything, and the speed of a tiny model")
    add("--json", default="first_hour.json", metavar="FILE", help="for a report; default: first_hour.json")
    add("--profile", metavar="DIR", help="keep a trace of each row there, for ui.perfetto.dev")
    return parser.parse_args(arguments)


def main() -> None:
    args, began = parse_arguments(), time.perf_counter()
    chosen = args.model or (str(TINY[0]) if args.quick else None)
    cfg = read_model(chosen) if chosen else None
    jax.config.update("jax_enable_compilation_cache", False)  # each kernel is compiled here and now
    launch.join_hosts(args)
    first, platform = jax.process_index() == 0, jax.default_backend()
    if first:
        results.check_writable(args.json)
    trace = pathlib.Path(args.profile) if args.profile else None
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
    cpu_device()  # or it is refused
    sizes = ON_CPU if platform == "cpu" else ON_ACCELERATOR
    sizes = QUICK if args.quick else sizes
    if cfg and cfg.max_positions < max(sizes.context, sizes.prompt):
        raise UserError(f"--model {chosen}: {cfg.max_positions} positions are too few to measure")
    result = dict(program="first_hour", machine=machine(), **{name: [] for name in PARTS})

    def keep(**found) -> None:
        """Add to the result, and write it: what was seen is kept, should a later part end the process."""
        result.update(found, seconds=time.perf_counter() - began)
        if first:
            results.write(result, args.json)

    say_machine(result["machine"])
    keep()
    keep(kernels=check_kernels(sizes.seeds))
    keep(models=check_models(sizes.models))
    keep(answers=check_answers())
    topology = topology_of(jax.devices(), placement.slice_count())
    dtypes = dict.fromkeys(placement.choose_dtypes(None, None, FORMATS[x])[0] for x in FORMAT_NAMES)
    rates = measure_rates(list(dtypes), topology.chip)
    keep(bandwidth=rates[0], flops=rates[1], data_sheet=topology.chip and dataclasses.asdict(topology.chip))
    chosen = chosen or choose_model(sizes)
    measurement = Measurement(chosen, cfg or read_model(chosen), sizes, topology, rates, trace)
    say(f"model: {args.model or pathlib.Path(chosen).name}, random weights")
    keep(model=pathlib.Path(chosen).name, steps=measure_steps(measurement))
    ok = all(x["ok"] for part in PARTS for x in result[part])
    keep(ok=ok, summary=summary(result))
    say(result["summary"])
    launch.log(f"{result['seconds']:.0f} s; for a report, attach {args.json}")
    if not ok:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
