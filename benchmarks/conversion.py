"""Speed and memory of converting and loading, beside copying: python3 benchmarks/conversion.py --folder DIR

Makes a checkpoint with a published model's shapes and random bfloat16 weights in DIR, and removes it again.
In each round the same files are copied, converted and loaded, each in a process of its own and from the disk,
not from the system's cache. Needs room for three times the model. Linux.
"""
# ruff: noqa: E402  the folder must be on the path first

import datetime
import json
import math
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from checkpoints.errors import UserError  # noqa: E402  the folders must be on the path first

# What is done, with which folder, and how it is said in the table.
JOBS = {
    "copy": ("source", "copy the files"),
    "bfloat16": ("source", "convert, bfloat16"),
    "int8": ("source", "convert, int8"),
    "load source": ("source", "load the Hugging Face folder"),
    "load bfloat16": ("bfloat16", "load what was converted, bfloat16"),
    "load int8": ("int8", "load what was converted, int8"),
    "half bfloat16": ("bfloat16", "what one of two devices holds of it, bfloat16"),
    "half int8": ("int8", "what one of two devices holds of it, int8"),
}


def work(job: str, folder: pathlib.Path) -> dict:
    """Do one of JOBS in this process, in which nothing was done before.

    Returns the seconds; the bytes to be read, and those that came from the disk; the peak of memory above the
    start, imports included.
    """
    start = memory("VmRSS")
    wanted, do = prepare(job, folder)
    before, began = bytes_from_disk(), time.perf_counter()
    do()
    seconds, read = time.perf_counter() - began, bytes_from_disk() - before
    return dict(seconds=seconds, bytes=wanted, read=read, peak=memory("VmHWM") - start)


def prepare(job: str, folder: pathlib.Path):
    """The bytes that a job is to read, and the function that does it."""
    source = folder / JOBS[job][0]
    if job.startswith("half"):
        return half_load(source)
    files = [path for path in source.iterdir() if path.suffix == ".safetensors"]
    wanted = sum(path.stat().st_size for path in files)
    if job == "copy":
        return wanted, partial(copy, files, folder / "copy")
    if job.startswith("load"):
        return wanted, whole_load(source)
    from convert_checkpoint import convert
    from quantize import INT8

    return wanted, partial(convert, str(source), str(folder / job), format=INT8 if job == "int8" else None)


def copy(files: list[pathlib.Path], target: pathlib.Path) -> None:
    target.mkdir()
    for path in files:
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as copied:
            os.fsync(copied.fileno())


def whole_load(source: pathlib.Path):
    """Loads a folder onto one device, and looks at every weight: some may be in the file still."""
    import jax
    import jax.numpy as jnp

    import model
    from checkpoints.checkpoint import open_checkpoint
    from checkpoints.loading import load
    from sharding.arrays import abstract
    from sharding.mesh import make_mesh

    checkpoint = open_checkpoint(str(source))
    infos = model.weight_infos(checkpoint.config, format=checkpoint.format)
    mesh = make_mesh(checkpoint.config)
    shapes = abstract(infos, mesh, jnp.bfloat16)
    look = jax.jit(lambda weights: [jnp.max(x) for x in jax.tree.leaves(weights)]).lower(shapes).compile()

    def do() -> None:
        weights = load(checkpoint, mesh, "bfloat16", checkpoint.format, show=False)
        jax.block_until_ready(look(weights))

    return do


def half_load(source: pathlib.Path):
    """The bytes that the first of two tensor-parallel devices holds, and a function that reads them."""
    import jax
    from jax.sharding import NamedSharding

    jax.config.update("jax_num_cpu_devices", 2)
    from checkpoints.checkpoint import open_checkpoint
    from sharding.mesh import make_mesh

    checkpoint = open_checkpoint(str(source))
    mesh = make_mesh(checkpoint.config, tensor=2)
    parts = []
    for array in checkpoint.sources.values():
        shape = array.info.shape  # two devices need no padding
        index = NamedSharding(mesh, array.info.spec).devices_indices_map(shape)[mesh.devices.flat[0]]
        parts.append((array, tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))))
    share = [math.prod(hi - lo for lo, hi in box) / math.prod(array.info.shape) for array, box in parts]
    held = sum(array.nbytes * of for (array, _), of in zip(parts, share, strict=True))

    def do() -> None:
        for array, box in parts:
            array.read(box).view("uint8").max()

    return held, do


def bytes_from_disk() -> int:
    """What this process has had read from a disk, as the system counts it."""
    return int(re.search(r"read_bytes: (\d+)", pathlib.Path("/proc/self/io").read_text())[1])


def memory(name: str) -> int:
    """Bytes of this process's resident memory: VmRSS now, VmHWM at most so far, both with mapped files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def make_checkpoint(name: str, layers: int | None, shards: int, folder: pathlib.Path) -> None:
    """A Hugging Face folder of this shape, with weights that are about as large as real ones."""
    import numpy as np
    from ml_dtypes import bfloat16
    from models import MODELS
    from safetensors.numpy import save_file

    from checkpoints.folders import THEIR_INDEX
    from checkpoints.layouts import layout_of
    from checkpoints.names import named_infos
    from families.registry import read_config

    config = MODELS[name] | ({"num_hidden_layers": layers} if layers else {})
    tensors = {}
    for _, info in named_infos(read_config(config)):
        tensors[info.stored.name] = layout_of(info, info.stored).shape
    size = sum(2 * math.prod(shape) for shape in tensors.values())
    noise = np.random.default_rng(0).standard_normal(2**24, np.float32) / 50
    noise = (noise.view(np.uint32) >> 16).astype(np.uint16)  # as bfloat16
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map, done = {}, 0
    for stored, shape in tensors.items():
        shard = done * shards // size + 1
        weight_map[stored] = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        done += 2 * math.prod(shape)
    for file in sorted(set(weight_map.values())):
        here = {name: np.resize(noise, shape) for name, shape in tensors.items() if weight_map[name] == file}
        save_file({name: x.view(bfloat16) for name, x in here.items()}, folder / file)
    (folder / THEIR_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def forget(folder: pathlib.Path) -> None:
    """Have the system write these files to the disk, and drop them from its cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: pathlib.Path, rounds: int) -> dict[str, list[dict]]:
    found = {job: [] for job in JOBS}
    for number in range(rounds):
        for made in ("copy", "bfloat16", "int8"):
            shutil.rmtree(folder / made, ignore_errors=True)
        for job in JOBS:
            forget(folder)
            command = [sys.executable, __file__, "--worker", job, str(folder)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if answer.returncode:
                raise UserError(f"{job} failed with exit code {answer.returncode}")
            found[job].append(json.loads(answer.stdout))
            print(f"round {number + 1}: {job} took {found[job][-1]['seconds']:.1f} s", file=sys.stderr)
            if job == "copy":
                shutil.rmtree(folder / "copy")
    return found


def table(result: dict) -> str:
    """That of docs/, in Markdown."""
    head = "| | s (least..most) | GB/s | of a copy's | from the disk | peak memory |"
    lines, rates = [head, "|---" * 6 + "|"], {}
    for job, (_, words) in JOBS.items():
        runs = result["runs"][job]
        seconds, wanted = [run["seconds"] for run in runs], runs[0]["bytes"]
        rates[job] = wanted / 1e9 / statistics.median(seconds)
        spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f}..{max(seconds):.1f})"
        share, peak = rates[job] / rates["copy"], max(run["peak"] for run in runs) / 1e9
        read = max(run["read"] for run in runs) / wanted
        lines.append(f"| {words} | {spread} | {rates[job]:.2f} | {share:.2f} | {read:.1%} | {peak:.2f} GB |")
    facts = (
        "{model}, {gigabytes:.1f} GB in {shards} file(s), {layers} layers; {cores} cores; {versions}; {date}."
    )
    return "\n".join([*lines, "", facts.format(**result)])


def main() -> None:
    from models import MODELS, read_model

    from terminal.command_line import OneLineParser

    parser = OneLineParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="llama3.2-1b", help="default: llama3.2-1b")
    add("--layers", type=int, metavar="N", help="default: all that the model has")
    add("--shards", type=int, default=1, metavar="N", help="files of the checkpoint; default: 1")
    add("--rounds", type=int, default=3, metavar="N", help="default: 3")
    add("--folder", required=True, metavar="DIR", help="on the disk that is to be measured")
    add("--json", metavar="FILE", help="keep what was measured")
    args = parser.parse_args()
    parser.check_positive(args, "layers", "shards", "rounds")
    import jax

    if args.json:
        open(args.json, "a").close()  # a file that cannot be written is known before the measuring
    with tempfile.TemporaryDirectory(dir=os.path.expanduser(args.folder)) as folder:
        folder = pathlib.Path(folder)
        print("making a checkpoint", file=sys.stderr)
        make_checkpoint(args.model, args.layers, args.shards, folder / "source")
        runs = measure(folder, args.rounds)
    result = dict(
        model=args.model, layers=args.layers or len(read_model(args.model).layers), shards=args.shards,
        gigabytes=runs["copy"][0]["bytes"] / 1e9, cores=os.cpu_count(),
        versions=f"python {platform.python_version()}, jax {jax.__version__}",
        date=str(datetime.date.today()), runs=runs,
    )  # fmt: skip
    print(table(result))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(sys.argv[2], pathlib.Path(sys.argv[3]))))
    else:
        from terminal.command_line import run

        run(main)
