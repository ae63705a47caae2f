"""The experts' kernel compiled alone for a TPU: its instruction bundles beside the cycles of reading weights.

`python3 -m planner.experts_kernel v5e:4x4 mxfp4` prints one expert's; planner/decode_kernel.py explains them.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model import SwiGLU
from ops.grouped_matmul import active_experts, block_width
from planner.decode_kernel import bundles_of
from planner.topologies import find_topology
from quantize import FORMATS, QuantizedArray
from sharding.arrays import ArrayInfo

E, A, D, M = 8, 4, 2880, 2944  # experts of a chip and of a token; gpt-oss's widths, M padded as on TPUs
BYTES_PER_CYCLE = {"v5e": 546, "v6e": 937}  # of HBM: bandwidth / clock


def weights(format: str, sharding: NamedSharding | None = None) -> list[QuantizedArray]:
    """gate, up and down, without data."""
    shapes = [("eDm", "D", (E, D, M))] * 2 + [("emD", "m", (E, M, D))]
    infos = [ArrayInfo(x, y, shape=shape, format=FORMATS[format]) for x, y, shape in shapes]
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), [x.components for x in infos]
    )


def compile_kernel(topology: str, format: str, rows: int = 8) -> None:
    """Compile the kernel for one chip, with biases."""
    mesh = Mesh(np.array(find_topology(topology).devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P())

    def make(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def on_device(x, expert, factor, gate, up, down, biases):
        return active_experts(x, expert, factor, gate, up, down, biases, SwiGLU(), "output")

    tokens = make((rows, D), jnp.bfloat16), make((rows, A), jnp.int32), make((rows, A), jnp.float32)
    biases = tuple(make((E, n), jnp.bfloat16) for n in (M, M, D))
    kernel = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P()))
    kernel.lower(*tokens, *weights(format, sharding), biases).compile()


def cycles(topology: str, format: str, rows: int = 8) -> tuple[int, float]:
    """-> (bundles x trips, cycles of reading) of one expert."""
    what = f"{topology!r}, {format!r}, {rows}"
    call = f"from planner.experts_kernel import compile_kernel; compile_kernel({what})"
    (bundles,) = bundles_of(call, "active_experts", topology)
    gate, up, down = every = weights(format)
    read = sum(x.size * itemsize_bits(x.dtype) / 8 for x in jax.tree.leaves(every)) / E
    trips = M // block_width(gate, down)
    return bundles * trips, read / BYTES_PER_CYCLE[topology.partition(":")[0]]


if __name__ == "__main__":
    topology, format, *rows = sys.argv[1:]
    computed, read = cycles(topology, format, *map(int, rows))
    print(f"{format} on {topology}: {computed:,} bundles, {read:,.0f} cycles to read, of one expert")
