"""The command plan.py: its options, and what it prints."""

import dataclasses
import json
import os
import pathlib

from feedback.errors import UserError
from planner.job import Job
from planner.plan_report import show
from planner.planning import make_plan
from planner.published_models import MODELS, read_model
from planner.topologies import find_topology
from quantize import FORMATS
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
    add("--no-columns", action="store_true", help="do not run the chunk by columns, see docs/sharding.md")
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
    job = Job(cfg, args.batch, args.context, *formats, by_columns=not args.no_columns)
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
