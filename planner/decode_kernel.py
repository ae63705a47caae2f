"""The ragged decode kernel compiled alone for a TPU, and the instruction bundles of its loops.

A bundle takes one cycle, so bundles x trips is a lower bound on the cycles that the kernel computes; waiting
for memory is left out. Computing on one block overlaps with reading the next.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedback.errors import UserError
from ops.kv_cache import KV, SlotLayout, key_beside_value
from planner.topologies import find_topology
from ragged_attention import ragged_attention_tpu

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUERIES = 8  # per token, of one key/value head
LATENT = SlotLayout(key=576, value=(0, 512), scale=1 / 16)  # GLM-4.7-Flash's


def compile_kernel(
    topology: str, columns: int, itemsize: int, blocks: tuple[int, int], B: int = 8, S: int = 8192, T: int = 1
) -> None:
    """Compile the kernel for B rows of S slots, T tokens and one key/value head, on one device.

    columns: of a slot. itemsize: bytes of a cached element. blocks: slots of a large and of a small block.
    """
    mesh = Mesh(np.array(find_topology(topology).devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    used = LATENT if columns == LATENT.width else key_beside_value(columns // 2)
    dtype = {1: jnp.int8, 2: jnp.bfloat16, 4: jnp.float32}[itemsize]

    def make(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def kv(slots: int) -> KV:
        scale = make((B, 1, 2, slots), jnp.bfloat16) if itemsize == 1 else None
        return KV(make((B, 1, slots, columns), dtype), scale, used)

    def on_device(q, new, kv, length, place):
        return ragged_attention_tpu(q, kv, length, new=new, place=place, blocks=blocks)

    q = make((B, T, 1, QUERIES, used.key), jnp.bfloat16)
    # The kernel writes a single new token to the cache; several tokens are written before it runs.
    new, place = (kv(1), make((B,), jnp.int32)) if T == 1 else (None, None)
    kernel = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P())
    kernel = jax.jit(kernel, donate_argnums=2)  # the cache is updated in place
    kernel.lower(q, new, kv(S), make((B,), jnp.int32), place).compile()


def loop_bundles(topology: str, columns: int, itemsize: int, blocks: tuple[int, int]) -> list[int]:
    """Bundles of the loops over rows, large blocks and small blocks, each without its inner loops."""
    what = f"{topology!r}, {columns}, {itemsize}, {blocks}"
    call = f"from planner.decode_kernel import compile_kernel; compile_kernel({what})"
    return bundles_of(call, "ragged_", topology)


def bundles_of(call: str, kernel: str, topology: str) -> list[int]:
    """Bundles of the loops of the kernel that a call of Python compiles. kernel: how its name begins."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-c", call]  # a process of its own: libtpu reads the flags when it starts
        environment = os.environ | {
            "LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"
        }  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        files = [
            file
            for file in pathlib.Path(folder).glob(f"*{kernel}*final_bundles.txt")
            if "schedule-analysis" not in file.name
        ]
        if done.returncode or len(files) != 1:
            reason = (done.stderr.strip() or "no bundles found").split("\n")[-1]
            raise UserError(f"the kernel does not compile for {topology}: {reason}")
        return count_bundles(files[0].read_text())


def count_bundles(text: str) -> list[int]:
    """Bundles of each loop, in the order in which the loops begin, each without its inner loops."""
    counts, inside = [], []  # the numbers of the loops that a bundle is in
    for line in text.splitlines():
        bundle = re.match(r"\s*(?:0x[0-9a-f]+|0)\s*(LB)?[A-Z ]*:\s*(>*)\s*\{(\}?)", line)
        if not bundle:
            continue
        begins, depth, empty = bundle[1], len(bundle[2]), bundle[3]
        if not empty:  # an empty bundle does not say how deep it is
            del inside[depth - 1 if begins else depth :]
        if begins:
            inside.append(len(counts))
            counts.append(0)
        if inside:
            counts[inside[-1]] += 1
    return counts
