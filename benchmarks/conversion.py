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

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

# What is done, with which folder, and how it is said in the table.
JOBS = {
    "copy": ("source", "copy the files"),
    "bfloat16": ("source", "convert, bfloat16"),
    "int8": ("source", "convert, int8"),
    "load source": ("source", "load the Hugging Face folder"),
    "load bfloat16": ("bfloat16", "load what was converted, bfloat16"),
    "load int8": ("int8", "load what was converted, int8"),
}


def work(job: str, folder: pathlib.Path) -> dict:
    """Do one of JOBS in this process, in which nothing was done before.

    Returns the seconds, the bytes to be read, and the peak of memory above the start, imports included.
    """
    start = memory("VmRSS")
    source = folder / JOBS[job][0]
    files = [path for path in source.iterdir() if path.suffix == ".safetensors"]
    if job == "copy":
        target = folder / "copy"
        target.mkdir()
        began = time.perf_counter()
        for path in files:
            shutil.copyfile(path, target / path.name)
            with (target / path.name).open("rb") as copied:
                os.fsync(copied.fileno())
    elif job in ("bfloat16", "int8"):
        from convert_checkpoint import convert

        began = time.perf_counter()
        convert(str(source), str(folder / job), quantized=job == "int8")
    else:
        import jax
        import jax.numpy as jnp

        import model
        from checkpoint import load, open_checkpoint

        checkpoint = open_checkpoint(str(source))
        mesh = model.make_mesh(checkpoint.config)
        infos = model.weight_infos(checkpoint.config)
        abstract = model.abstract(infos, mesh, jnp.bfloat16, checkpoint.quantized)
        look = (
            jax.jit(lambda weights: [jnp.max(x) for x in jax.tree.leaves(weights)]).lower(abstract).compile()
        )
        began = time.perf_counter()
        weights = load(checkpoint, mesh, "bfloat16", checkpoint.quantized, show=False)
        jax.block_until_ready(look(weights))  # at all of them: some may be in the file still
    seconds = time.perf_counter() - began
    peak = memory("VmHWM") - start
    return dict(seconds=seconds, bytes=sum(path.stat().st_size for path in files), peak=peak)


def memory(name: str) -> int:
    """Bytes of this process's resident memory: VmRSS now, VmHWM at most so far, both with mapped files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def make_checkpoint(name: str, layers: int | None, shards: int, folder: pathlib.Path) -> None:
    """A Hugging Face folder of this shape, with weights that are about as large as real ones."""
    import numpy as np
    from models import MODELS

    from checkpoint import THEIR_INDEX, named_infos, read_config, stored_shape
    from tensor_files import NewFile

    config = MODELS[name] | ({"num_hidden_layers": layers} if layers else {})
    tensors = {}
    for _, info in named_infos(read_config(config)):
        (stored, letters), *_ = info.stored
        tensors[stored] = ("BF16", stored_shape(letters, info))
    size = sum(2 * math.prod(shape) for _, shape in tensors.values())
    noise = np.random.default_rng(0).standard_normal(2**24, np.float32) / 50
    noise = (noise.view(np.uint32) >> 16).astype(np.uint16)  # as bfloat16
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map, done = {}, 0
    for stored, (_, shape) in tensors.items():
        shard = done * shards // size + 1
        weight_map[stored] = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        done += 2 * math.prod(shape)
    for file in sorted(set(weight_map.values())):
        here = {stored: tensors[stored] for stored in tensors if weight_map[stored] == file}
        new = NewFile(folder / file, here)
        for stored, (_, shape) in here.items():
            rows = max(len(noise) // math.prod(shape[1:]), 1)
            for lo in range(0, shape[0], rows):
                part = (min(rows, shape[0] - lo), *shape[1:])
                new.write(stored, 0, lo, np.resize(noise, part))
        new.finish(dict.fromkeys(here, "0" * 64))
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
                raise ValueError(f"{job} failed with exit code {answer.returncode}")
            found[job].append(json.loads(answer.stdout))
            print(f"round {number + 1}: {job} took {found[job][-1]['seconds']:.1f} s", file=sys.stderr)
            if job == "copy":
                shutil.rmtree(folder / "copy")
    return found


def table(result: dict) -> str:
    """The README's, in Markdown."""
    lines = ["| | s (least..most) | GB/s | of a copy's | peak memory |", "|---|---|---|---|---|"]
    rates = {}
    for job, (_, words) in JOBS.items():
        runs = result["runs"][job]
        seconds = [run["seconds"] for run in runs]
        rates[job] = runs[0]["bytes"] / 1e9 / statistics.median(seconds)
        spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f}..{max(seconds):.1f})"
        share, peak = rates[job] / rates["copy"], max(run["peak"] for run in runs) / 1e9
        lines.append(f"| {words} | {spread} | {rates[job]:.2f} | {share:.2f} | {peak:.2f} GB |")
    facts = (
        "{model}, {gigabytes:.1f} GB in {shards} file(s), {layers} layers; {cores} cores; {versions}; {date}."
    )
    return "\n".join([*lines, "", facts.format(**result)])


def main() -> None:
    from models import MODELS, read_model

    from command_line import OneLineParser

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
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(sys.argv[2], pathlib.Path(sys.argv[3]))))
    else:
        from command_line import run

        run(main)
