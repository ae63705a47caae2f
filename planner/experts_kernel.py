"""The experts' kernel for TPUs: the rows that it multiplies, and its instruction bundles when compiled alone.

`python3 -m planner.experts_kernel v5e:4x4 mxfp4` prints one expert's bundles beside the cycles of reading its
weights; planner/decode_kernel.py explains them.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.polynomial.polynomial import polypow

from feedback.errors import UserError
from model import Config, SwiGLU
from ops.grouped_matmul import FEW_ROWS, TILES, active_experts, block_width
from planner.decode_kernel import bundles_of
from planner.schedule import LEAST_ROWS
from planner.topologies import find_topology
from quantize import FORMATS, QuantizedArray
from sharding.arrays import ArrayInfo
from terminal.command_line import run

E, A, D, M = 8, 4, 2880, 2944  # experts of a chip and of a token; gpt-oss's widths, M padded as on TPUs
BYTES_PER_CYCLE = {"v5e": 546, "v6e": 937}  # of HBM: bandwidth / clock


def expert_rows(cfg: Config, tokens: int, shards: int = 1) -> float:
    """Rows that the kernel multiplies in a layer, by all experts of one of `shards` expert shards together.

    Expected, if each of the tokens goes to A of the E experts at random.
    """
    if not cfg.moe:
        return 0.0
    chance = cfg.moe.A / cfg.moe.E
    probability = polypow([1 - chance, chance], tokens)  # that 0, 1, 2... tokens go to an expert
    all_rows = max(tokens, LEAST_ROWS)
    rows = [all_rows * (n > 0) if tokens <= FEW_ROWS else rows_in_tiles(n) for n in range(tokens + 1)]
    return cfg.moe.E / shards * float(probability @ rows)


def rows_in_tiles(count: int) -> int:
    """Rows of the tiles for one expert: each has most of TILES, but the last one as few as hold the rest."""
    full, rest = divmod(count, max(TILES))
    return full * max(TILES) + next(size for size in (0, *TILES) if rest <= size)


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
    """-> (bundles x trips, cycles of reading) of one expert.

    Raises UserError for more than FEW_ROWS rows: how often that kernel's loops run depends on the router.
    """
    if rows > FEW_ROWS:
        raise UserError(f"{rows} rows: bundles are counted for at most {FEW_ROWS}")
    what = f"{topology!r}, {format!r}, {rows}"
    call = f"from planner.experts_kernel import compile_kernel; compile_kernel({what})"
    (bundles,) = bundles_of(call, "active_experts", topology)
    gate, up, down = every = weights(format)
    read = sum(x.size * itemsize_bits(x.dtype) / 8 for x in jax.tree.leaves(every)) / E
    trips = M // block_width(gate, down, jax.ShapeDtypeStruct((rows, D), jnp.bfloat16))
    return bundles * trips, read / BYTES_PER_CYCLE[topology.partition(":")[0]]


def main() -> None:
    topology, format, *rows = sys.argv[1:]
    computed, read = cycles(topology, format, *map(int, rows))
    print(f"{format} on {topology}: {computed:,} bundles, {read:,.0f} cycles to read, of one expert")


if __name__ == "__main__":
    run(main)
