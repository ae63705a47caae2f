"""Choose the block sizes of the ragged decode kernel.

    python3 benchmarks/tune.py [--topology v5e:2x2] [--write]

compiles it with each choice for a TPU that need not be here, and counts the instruction bundles of its loops:
bundles x trips are the cycles that it computes. Work on one block overlaps with reading the next, so a block
costs the longer of the two. `--time` runs each choice on this machine's TPU instead. `--write` puts the best
choice for each number of columns and cache type into ragged_attention.py.
"""
# ruff: noqa: E402  the environment must be set before jax is imported

import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

if "--time" not in sys.argv:
    import plan
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.errors import UserError
from ragged_attention import DECODE_BLOCKS, KV, Columns, key_beside_value, ragged_attention_tpu
from terminal.command_line import OneLineParser, run

# The cases that count alike: rows that fill their cache, rows of all lengths, short rows. One key/value head.
SLOTS, QUERIES = 8192, 8
LATENT = Columns(key=576, value=(0, 512), scale=1 / 16)  # GLM-4.7-Flash's
LENGTHS = {"full": [SLOTS] * 8, "ragged": list(range(512, SLOTS, 1024)), "short": [300] * 8}
CHOICES = list(itertools.product((2048, 4096, 8192), (256, 512, 1024, 2048)))
CLOCK = {"v5e": 1.5e9, "v6e": 1.75e9, "v5p": 1.75e9}  # cycles per second. Source: jax-ml/scaling-book tpus.md


def arguments(columns: int, itemsize: int, make, B: int = 8, S: int = SLOTS, T: int = 1) -> tuple:
    """(q, new, kv, length, place); of several tokens nothing is new. make(shape, dtype): an array."""

    def kv(slots: int) -> KV:
        scale = make((B, 1, 2, slots), jnp.bfloat16) if itemsize == 1 else None
        dtype = {1: jnp.int8, 2: jnp.bfloat16, 4: jnp.float32}[itemsize]
        return KV(make((B, 1, slots, columns), dtype), scale, used)

    used = LATENT if columns == LATENT.width else key_beside_value(columns // 2)
    q = make((B, T, 1, QUERIES, used.key), jnp.bfloat16)
    new, place = (kv(1), make((B,), jnp.int32)) if T == 1 else (None, None)
    return q, new, kv(S), make((B,), jnp.int32), place


def kernel(mesh: Mesh, blocks: tuple[int, int]):
    """The jitted kernel on one device; the cache is donated, for what writes to it."""

    def on_device(q, new, kv, length, place):
        return ragged_attention_tpu(q, kv, length, new=new, place=place, blocks=blocks)

    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P()), donate_argnums=2)


def one_device_mesh(device) -> Mesh:
    return Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))


def compile_kernel(topology: str, columns: int, itemsize: int, large: int, small: int, **sizes: int) -> None:
    """Compile it, for what the compiler writes about it. sizes: B, S, T."""
    mesh = one_device_mesh(plan.find_topology(topology).devices[0])
    sharding = NamedSharding(mesh, P())

    def make(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    kernel(mesh, (large, small)).lower(*arguments(columns, itemsize, make, **sizes)).compile()


def loop_bundles(
    topology: str, columns: int, itemsize: int, large: int, small: int, **sizes: int
) -> list[int]:
    """Bundles of the kernel's loops, without those inside: over rows, large blocks and small blocks."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        what = f"{topology!r}, {columns}, {itemsize}, {large}, {small}, **{sizes}"
        call = f"import tune; tune.compile_kernel({what})"
        command = [sys.executable, "-c", call]  # a process of its own: the flags are read when it starts
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "PYTHONPATH": str(FOLDER)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        files = [
            file
            for file in pathlib.Path(folder).glob("*ragged_*final_bundles.txt")
            if "schedule-analysis" not in file.name
        ]
        if done.returncode or len(files) != 1:
            lines = done.stderr.strip().splitlines()
            raise UserError(
                f"the kernel does not compile for {topology}: {lines[-1] if lines else 'no bundles found'}"
            )
        return count_bundles(files[0].read_text())


def count_bundles(text: str) -> list[int]:
    """Bundles of each loop in the order in which the loops begin, those of inner loops not counted."""
    counts, inside = [], []  # the numbers of the loops that a bundle is in
    for line in text.splitlines():
        bundle = re.match(r"\s*(?:0x[0-9a-f]+|0)\s*(LB)?[A-Z ]*:\s*(>*)\s*\{(\}?)", line)
        if not bundle:
            continue
        begins, depth, empty = bundle[1], len(bundle[2]), bundle[3]
        if not empty:  # an empty one does not say how deep it is
            del inside[depth - 1 if begins else depth :]
        if begins:
            inside.append(len(counts))
            counts.append(0)
        if inside:
            counts[inside[-1]] += 1
    return counts


def cycles(bundles: list[int], lengths: list[int], large: int, small: int, slot_cycles: float) -> float:
    """Of one call. slot_cycles: to read one slot."""
    per_row, per_large, per_small = bundles
    total = per_row * len(lengths)
    for length in lengths:
        total += length // large * max(per_large, large * slot_cycles)
        total += -(-(length % large) // small) * max(per_small, small * slot_cycles)
    return total


def compiled_costs(topology: str, columns: int, itemsize: int, choice: tuple[int, int]) -> dict[str, float]:
    """Cycles for each case, by the compiler."""
    kind = topology.split(":")[0]
    bundles = loop_bundles(topology, columns, itemsize, *choice)
    slot_bytes = columns * itemsize + (4 if itemsize == 1 else 0)
    slot_cycles = slot_bytes / plan.CHIPS[kind].bandwidth * CLOCK[kind]
    costs = {case: cycles(bundles, lengths, *choice, slot_cycles) for case, lengths in LENGTHS.items()}
    # What it computes counts too, though reading hides it here: another chip reads faster.
    return costs | {"computing": cycles(bundles, LENGTHS["full"], *choice, 0)}


def timed_costs(columns: int, itemsize: int, choice: tuple[int, int]) -> dict[str, float]:
    """Microseconds for each case on this machine's TPU: 200 calls in one program, the median of 10 runs."""
    mesh, costs, calls = one_device_mesh(jax.devices()[0]), {}, 200

    def on_device(q, new, kv, length, place):
        def call(_, carry):
            q, kv = carry
            (o, _), kv = ragged_attention_tpu(q, kv, length, new=new, place=place, blocks=choice)
            return o.astype(q.dtype), kv  # one call waits for the other

        return jax.lax.fori_loop(0, calls, call, (q, kv))

    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P()), donate_argnums=2)
    q, new, kv, _, _ = arguments(columns, itemsize, jnp.ones)
    for case, lengths in LENGTHS.items():
        length, seconds = jnp.array(lengths, jnp.int32), []
        for _ in range(11):  # the first one compiles
            began = time.perf_counter()
            _, kv = jax.block_until_ready(run(q, new, kv, length, length - 1))
            seconds.append(time.perf_counter() - began)
        costs[case] = 1e6 * float(np.median(seconds[1:])) / calls
    return costs


def write_table(best: dict) -> None:
    """Replace DECODE_BLOCKS in ragged_attention.py."""
    file = FOLDER.parent / "ragged_attention.py"
    table = "".join(f"    {key}: {choice},\n" for key, choice in best.items())
    source, found = re.subn(
        r"(?ms)^DECODE_BLOCKS = \{.*?\}", f"DECODE_BLOCKS = {{\n{table}}}", file.read_text()
    )
    if found != 1:
        raise UserError(f"{file} has no line that begins with DECODE_BLOCKS = {{")
    beside = file.with_suffix(".new")
    beside.write_text(source)
    os.replace(beside, file)


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--topology", default="v5e:2x2", help="of the TPU to compile for; default: v5e:2x2")
    parser.add_argument("--time", action="store_true", help="run on this machine's TPU instead")
    parser.add_argument("--write", action="store_true", help="put the best choices into ragged_attention.py")
    args = parser.parse_args()
    if args.time and jax.default_backend() != "tpu":
        raise UserError(f"--time: jax finds no TPU here, but {jax.default_backend()}; leave it out")
    if not args.time and plan.find_topology(args.topology).name.split(":")[0] not in CLOCK:
        raise UserError(f"--topology {args.topology}: the clock is known of {', '.join(CLOCK)} only")
    best = {}
    for columns, itemsize in DECODE_BLOCKS:
        print(f"head width {columns}, {itemsize} byte(s) per element:", "us" if args.time else "cycles")
        costs = {}
        for choice in CHOICES:
            if args.time:
                costs[choice] = timed_costs(columns, itemsize, choice)
            else:
                costs[choice] = compiled_costs(args.topology, columns, itemsize, choice)
            figures = ", ".join(f"{case} {cost:,.0f}" for case, cost in costs[choice].items())
            print(f"  blocks of {choice[0]} and {choice[1]}: {figures}", flush=True)
        least = {case: min(cost[case] for cost in costs.values()) for case in costs[choice]}
        relative = {choice: sum(cost[case] / least[case] for case in least) for choice, cost in costs.items()}
        best[columns, itemsize] = min(relative, key=relative.get)
        print(f"  best: {best[columns, itemsize]}")
    if args.write:
        write_table(best)


if __name__ == "__main__":
    run(main)
