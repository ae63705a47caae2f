"""The command plan.py: its options, and what it prints."""

import dataclasses
import json
import os
import pathlib
import re

from deployment.job import Job
from deployment.memory import gib
from feedback.errors import UserError
from planner.compiled_step import Step
from planner.gpus import COPY_SHARE, KERNEL_SECONDS
from planner.planning import Plan, make_plan
from planner.published_models import MODELS, read_model
from planner.topologies import find_topology
from quantize import FORMATS
from sharding import collective_matmul
from sharding.mesh import STAGE
from terminal.command_line import OneLineParser


def parse_arguments():
    question = "Does a model fit on these TPUs or GPUs, and how fast would it be?"
    parser = OneLineParser(description=question, allow_abbrev=False)
    add = parser.add_argument
    names = ", ".join(MODELS)
    add("--model", required=True, metavar="NAME_OR_CONFIG", help=f"{names}, a config.json or its folder")
    add("--topology", required=True, metavar="KIND:SHAPE", help="v5e:4x4, v6e:8x8, v5p:2x2x2, h100:8, ...")
    add("--batch", type=int, default=1, metavar="B", help="rows that decode together; default: 1")
    add("--context", type=int, default=8192, metavar="S", help="filled cache slots per row; default: 8192")
    add("--prefill", type=int, metavar="T", help="compile also a chunk of a prompt of T tokens")
    for name in ("data", "expert", "tensor"):
        add(f"--{name[0]}p", type=int, metavar="N", help=f"{name} parallelism; default: the best by estimate")
    add("--pp", type=int, default=1, metavar="N", help="stages of layers; default: 1")
    add("--slices", type=int, default=1, metavar="N", help="number of such slices of TPUs; default: 1")
    add("--quantize", choices=FORMATS, default="int8", help="weights; default: int8; none: bfloat16")
    add("--kv-cache-dtype", choices=("int8", "bfloat16"), default="int8", help="default: int8")
    add("--no-columns", action="store_true", help="run no step by columns, see docs/sharding.md")
    add("--layers", type=int, metavar="L", help="only the first L layers")
    add("--json", action="store_true", help="print one JSON object")
    add("--dump-hlo", metavar="FILE", help="write the optimized HLO text of the decode step")
    args = parser.parse_args()
    parser.check_positive(args, "batch", "context", "prefill", "dp", "ep", "tp", "pp", "slices", "layers")
    if args.batch > 2**20:
        parser.error(f"--batch {args.batch} is more than {2**20}")
    if args.prefill and args.prefill > args.context:
        parser.error(f"--prefill {args.prefill} is more than --context {args.context}")
    return args


def main() -> None:
    args = parse_arguments()
    cfg = read_model(args.model)
    if args.context > cfg.max_positions:
        raise UserError(f"--context {args.context}: the model's limit is {cfg.max_positions} positions")
    if args.layers and args.layers > len(cfg.layers):
        raise UserError(f"--layers {args.layers}: the model has {len(cfg.layers)}")
    cfg = dataclasses.replace(cfg, layers=cfg.layers[: args.layers])
    formats = FORMATS[args.quantize], args.kv_cache_dtype
    if args.no_columns:
        collective_matmul.LEAST_TOKENS = 2**60
    job = Job(cfg, args.batch, args.context, *formats)
    topology = find_topology(args.topology, args.slices)
    # Compiling takes minutes: whether the file can be written is checked before.
    if args.dump_hlo is not None and not os.access(pathlib.Path(args.dump_hlo).parent, os.W_OK):
        raise UserError(f"--dump-hlo {args.dump_hlo}: its folder cannot be written to")
    degrees = args.dp, args.ep, args.tp
    plan = make_plan(job, topology, args.prefill, degrees, args.dump_hlo, args.pp)
    if not args.json:
        show(plan, args.model, args.quantize, args.kv_cache_dtype)
        return
    fields = dataclasses.asdict(plan)
    asked = dict(model=args.model, quantize=args.quantize, kv_cache_dtype=args.kv_cache_dtype)
    print(json.dumps(asked | fields.pop("decode") | fields))


def show(plan: Plan, name: str, quantize: str, kv_cache_dtype: str) -> None:
    """Print the plan for the model of that name."""
    print(f"{name}, {plan.layers} layers, on {plan.topology}: {plan.devices} device(s)")
    print(f"batch {plan.batch}, context {plan.context}, weights {quantize}, cache {kv_cache_dtype}")
    for x in plan.ranking[:4]:
        note = "" if x.fits else ", does not fit"
        ms = f"{x.estimated_step_seconds * 1e3:.2f} ms before compiling ({_milliseconds(x.seconds)})"
        taken = (x.dp, x.ep, x.tp) == tuple(plan.mesh.values())[:3]
        stages = f"pp {plan.mesh[STAGE]} x " if STAGE in plan.mesh else ""
        copies = f", {x.copies} copies of caches" if x.copies > 1 else ""
        print(f"{'mesh' if taken else 'or'} {stages}dp {x.dp} x ep {x.ep} x tp {x.tp}{copies}: {ms}{note}")
    show_step("A turn of the decode step" if STAGE in plan.mesh else "Decode step", plan.decode, plan)
    if plan.prefill:
        rows = "one row" + " of each data shard" * (plan.mesh["data"] > 1)
        show_step(f"Prefill, a chunk of {plan.prefill_piece} tokens of {rows}", plan.prefill, plan)


def show_step(title: str, step: Step, plan: Plan) -> None:
    """Print a compiled step: facts first, then estimates."""
    verdict = "fits" if step.fits else "DOES NOT FIT"
    title += ", by columns" * bool(step.by_columns)
    print(f"\n{title}: {verdict}, {gib(step.peak_bytes)} of {gib(plan.hbm_capacity_bytes)}")
    print(f"  Needed per device: weights {gib(plan.weights_bytes)}, cache {gib(plan.cache_bytes)}")
    if step.seconds is None:
        return
    print(f"  As compiled, per device (in {step.compile_seconds:.0f} s)")
    if step.programs and len(step.programs) > 1:
        print(f"    programs: {_counts(step.programs)}")
    print(f"    arguments {gib(step.argument_bytes)}, temporaries {gib(step.temp_bytes)}", end="")
    print(f", {step.kernels:,} kernels" if step.code_bytes is None else f", code {gib(step.code_bytes)}")
    moved, floor = step.hbm_bytes_per_step, step.floor_bytes_per_step
    print(f"    HBM traffic {moved / 1e6:,.1f} MB: {moved / floor:.3f} x the floor of {floor / 1e6:,.1f} MB")
    for part, size in step.hbm_bytes_by_part.items():
        print(f"      {part.replace('_', ' '):10}{size / 1e6:11,.1f} MB")
    for x in step.copies[:5]:
        if x["bytes"] * x["count"] > moved / 100:
            print(f"    copied: {x['count']} x {x['shape']}, {x['argument'] or 'temporary'}")
    if step.collectives_per_layer is not None:
        print(f"    collectives per layer: {_counts(step.collectives_per_layer)}")
    if STAGE in plan.mesh:
        print(f"    between stages: {_counts(step.between_stages)}; all collectives:")
    for x in step.collectives:
        scopes = re.split(r"/?jit\(\w*\)/|/?shard_map/|/", x["scope"])
        scope = next(filter(None, scopes), "")
        where = "between stages" if x.get("between_stages") else f"among {x['group']}"
        where += f", in {scope}" if scope else ""
        print(f"      {x['count']} x {x['kind']} of {x['shape']} {where}")
    print("  Estimate from the compiler's schedule (data sheet speeds)")
    ms = {what: f"{seconds * 1e3:.2f} ms" for what, seconds in step.schedule.items()}
    least, cautious = (f"{x * 1e3:.2f} ms" for x in (step.scheduled_seconds, step.cautious_seconds))
    print(f"    {least}: computing {ms['computing']}", end="")
    print(f", waiting for HBM {ms['memory']}, for other devices {ms['collectives']}")
    sending = step.seconds["interconnect"]
    if sending:
        print(f"    collectives add {step.exposed_seconds * 1e3:.2f} ms, and take {sending * 1e3:.2f} ms")
    if step.kernels:
        losses = f"with {KERNEL_SECONDS * 1e6:.1f} us for each kernel, and {COPY_SHARE:.0%} of the bandwidth"
        print(f"    {cautious} {losses}, as measured on an H100")
    elif cautious != least:
        print(f"    {cautious} if a hop takes 1 us and an all-reduce goes all hops twice")
    print("  Estimate without it (data sheet speeds, no collective hidden)")
    print(f"    {_milliseconds(step.seconds)}")
    per_row, in_all = step.tokens_per_second_per_sequence, step.tokens_per_second
    print(f"    {step.estimated_step_seconds * 1e3:.2f} ms, bound by {step.bound_by}: ", end="")
    print(f"{per_row:,.1f} tokens/s per row, {in_all:,.1f} in all")


def _milliseconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {x * 1e3:.2f} ms" for name, x in seconds.items())


def _counts(kinds: dict[str, float]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none"
