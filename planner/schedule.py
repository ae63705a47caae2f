"""When one device computes and when it waits, in one run of a compiled program.

The compiler fixes the order in which a device executes the instructions of a program. It lets transfers from
HBM and some collectives begin early, so that they go on beside other instructions. `read_schedule` walks
through this order with a clock:

- HBM makes one transfer after another, at the data sheet's bandwidth, in the order in which they are started.
- An instruction ends when it has computed, and when its own bytes have been read and written. Its products
  take as long as the data sheet says; its other operations, one by one, go through the vector units.
- The experts' kernel multiplies as many rows as are expected: of its operands the program says no more.
- A synchronous collective lets the device wait for as long as deployment/estimates.py says. Transfers from
  HBM that have been started go on meanwhile.
- Asynchronous collectives go on beside the instructions that follow, one after another; only permutations
  between other pairs of devices go at the same time. The instruction that takes the result waits for the end.

On a GPU an instruction is a kernel: one after another, each takes as long as its operations or its bytes, and
`kernel_seconds` more.

So the result is an estimate, of a schedule that is the compiler's own.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from numpy.polynomial.polynomial import polypow

from deployment.chips import Chip
from model import Config
from ops.delta_rule import CHUNK
from ops.grouped_matmul import FEW_ROWS, TILES
from planner.hlo import Array, Computation, Instruction
from planner.traffic import CALLS, COLLECTIVES, Collective, Origins, Reader, Traffic, channel

# A product whose narrower operand has fewer rows is assumed to take as long as one with so many, because the
# matrix units load the wider operand meanwhile.
LEAST_ROWS = 32
NO_WORK = (
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota", "reshape", "copy",
    "copy-start", "copy-done", "slice-start", "slice-done", "slice", "dynamic-slice", "custom-call",
    "partition-id",
)  # fmt: skip
NOTHING = "computing", 0.0
SCALAR = 8  # bytes: what is no larger is assumed to be in registers, and waits for no transfer


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Seconds of one device in one run of a program, or in a step of several. Their sum is the whole time.

    computing: it executes instructions. memory: it waits for HBM. collectives: it waits for other devices.
    """

    computing: float = 0.0
    memory: float = 0.0
    collectives: float = 0.0

    @property
    def seconds(self) -> float:
        return self.computing + self.memory + self.collectives

    def __add__(self, other: "Schedule") -> "Schedule":
        return Schedule(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, runs: float) -> "Schedule":
        return Schedule(*(runs * x for x in dataclasses.astuple(self)))


class Passed(NamedTuple):
    """Seconds that pass in a program. what: the field of `Schedule` that counts them. scope: of the code."""

    what: str
    seconds: float
    scope: str


def read_schedule(
    reader: Reader,
    chip: Chip,
    seconds: Callable[[Collective], float],
    expert_rows: float = 0.0,
    timeline: list[Passed] | None = None,
    kernel_seconds: float = 0.0,
) -> Schedule:
    """The schedule of a program.

    seconds: how long a collective takes if nothing else uses its links. expert_rows: that the experts' kernel
    multiplies in a layer, all experts together. timeline: a list to which all that passes is added, in order.
    kernel_seconds: what every instruction that moves bytes takes beside them.
    """
    clock = _Clock(reader, chip, seconds, expert_rows, kernel_seconds)
    clock.run(reader.entry, None)
    if timeline is not None:
        timeline += clock.timeline
    return clock.spent


class _Clock:
    """now, memory: when the device, and HBM, have done all that they have begun. scope: of what it does.

    links: the same of asynchronous collectives: permutations by their pairs of devices, all others together.
    """

    def __init__(
        self, reader: Reader, chip: Chip, seconds: Callable[[Collective], float], expert_rows: float,
        kernel_seconds: float,
    ):  # fmt: skip
        self.reader, self.chip, self.seconds_of, self.expert_rows = reader, chip, seconds, expert_rows
        self.kernel_seconds = kernel_seconds
        self.now, self.memory, self.links, self.spent = 0.0, 0.0, Counter(), Schedule()
        self.scope, self.timeline = "", []

    def run(self, body: Computation, inputs: Origins | None) -> None:
        """Execute a computation. inputs: the origins of its parameters."""
        # What was started and when it ends, by the name of the instruction and by the collective's channel.
        started: dict[str, tuple[str, float]] = {}
        last_parts = {key: x.name for x in body.values() for key in self.fused_channels(x)}
        for x, given, origin in self.reader.instructions(body, inputs):
            self.scope = x.scope or self.scope
            if x.opcode == "while":
                self.loop(x, given)
            elif x.opcode == "conditional":
                self.run(*self.reader.largest_branch(x, given[1:]))
            elif x.opcode in CALLS:
                self.run(self.reader.computations[x.calls], given)
            elif x.opcode.endswith("-done"):
                self.pass_time(*started.get(x.operands[0], started.get(channel(x), NOTHING)))
            else:
                self.execute(x, body, list(self.reader.execute(x, body, given, origin)), started)
            for key in self.fused_channels(x):
                if last_parts[key] == x.name:
                    self.pass_time(*started.get(key, NOTHING))

    def loop(self, x: Instruction, given: Origins) -> None:
        """Trips take as long as the second one, except the first, which may wait for what came before."""
        body, trips = self.reader.computations[x.calls], self.reader.loop(x).trips
        for _ in range(min(trips, 2)):
            spent, memory = self.spent, self.memory
            self.run(body, given)
        others = max(0, trips - 2)
        rest = (self.spent + spent * -1) * others
        self.spent, self.now = self.spent + rest, self.now + rest.seconds
        self.timeline += [Passed(what, n, self.scope) for what, n in dataclasses.asdict(rest).items() if n]
        self.memory += (self.memory - memory) * others

    def execute(self, x: Instruction, body: Computation, events: list, started: dict) -> None:
        """Execute an instruction, or start what goes on beside the next ones.

        events: what the reader says that it does. started: see `run`.
        """
        traffic = [event.bytes for event in events if isinstance(event, Traffic)]
        moved = sum(size for size in traffic if size > SCALAR) / self.chip.bandwidth
        if moved:
            self.memory = max(self.memory, self.now) + moved
        if x.opcode in ("copy-start", "slice-start"):
            started[x.name] = "memory", self.memory
            return
        collectives = [event for event in events if isinstance(event, Collective)]
        for event in collectives:
            if event.asynchronous:
                link, seconds = x.attribute(r"source_target_pairs=(\S+)"), self.seconds_of(event)
                # The bytes of the next permutation follow before those of this one have arrived.
                latency = self.seconds_of(dataclasses.replace(event, bytes=0)) if link else 0
                self.links[link] = max(self.links[link], self.now) + seconds - latency
                keys = {x.name, channel(x), *self.fused_channels(x)} - {""}
                started |= dict.fromkeys(keys, ("collectives", self.links[link] + latency))
        self.pass_time("computing", self.now + self.computing(x, body))
        if moved:
            self.pass_time("memory", self.memory)
        if traffic:
            self.pass_time("computing", self.now + self.kernel_seconds)
        for event in collectives:
            if not event.asynchronous:
                self.pass_time("collectives", self.now + self.seconds_of(event))

    def pass_time(self, what: str, until: float) -> None:
        """Compute, or wait for something, until then, unless that time has come."""
        passed = max(0.0, until - self.now)
        self.spent, self.now = self.spent + Schedule(**{what: passed}), self.now + passed
        if passed:
            self.timeline.append(Passed(what, passed, self.scope))

    def fused_channels(self, x: Instruction) -> set[str]:
        """The channels of the collectives that are fused into an instruction."""
        fused = self.reader.computations[x.calls].values() if x.opcode == "fusion" else ()
        return {channel(y) or x.name for y in fused if y.opcode in COLLECTIVES}

    def computing(self, x: Instruction, body: Computation) -> float:
        """Seconds for which an instruction computes, whatever it reads."""
        operands = [body[name] for name in x.operands]
        products, others = self.operations(x, operands)
        return max(products / self.chip.flops, others / self.chip.vector)

    def operations(self, x: Instruction, operands: list[Instruction]) -> tuple[float, float]:
        """How many operations of products, in bfloat16, and how many others an instruction does."""
        if x.opcode == "fusion":
            fused = self.reader.computations[x.calls]
            every = [self.operations(y, [fused[name] for name in y.operands]) for y in fused.values()]
            return tuple(map(sum, zip((0, 0), *every, strict=True)))
        if x.opcode in ("dot", "convolution"):
            return product_operations(x, *(y.results[0] for y in operands[:2])), 0
        if x.kernel.startswith("splash"):
            return attention_operations([y.results[0] for y in operands]), 0
        if x.kernel.startswith("ragged-dot-none"):
            return ragged_operations(x, [y.results[0] for y in operands]), 0
        if x.kernel in ("flash", "grouped_dot", "joined_dot"):
            return gpu_kernel_operations(x, [y.results[0] for y in operands]), 0
        if x.kernel == "delta_steps":
            return 0, delta_operations([y.results[0] for y in operands])
        if x.kernel == "delta_chunks":
            return chunk_operations([y.results[0] for y in operands]), 0
        if x.kernel.startswith("active_experts"):
            return self.expert_rows * expert_operations(x, [y.results[0] for y in operands]), 0
        if x.opcode in NO_WORK or x.opcode.removesuffix("-start") in COLLECTIVES:
            return 0, 0
        arrays = [array for y in (x, *operands) for array in y.results]
        return 0, max((array.size for array in arrays), default=0)


def product_operations(x: Instruction, left: Array, right: Array) -> float:
    """Operations of [B,M,K] x [B,K,N]: a dot, or the convolution that XLA makes of it.

    Products of 8-bit integers count half, since the matrix units do twice as many of them.
    """
    out = x.results[0]
    B = batch_size(x, left, right)
    K = math.sqrt(left.size / B * right.size / out.size)
    narrow, wide = sorted((left.size / B / K, right.size / B / K))
    integers = {left.dtype, right.dtype} <= {"s8", "u8", "s4", "u4"}
    return (1 if integers else 2) * B * K * wide * max(narrow, LEAST_ROWS)


def batch_size(x: Instruction, left: Array, right: Array) -> int:
    """The size of the dimensions that both operands and the result of a product share."""
    if x.opcode == "dot":
        shared = x.attribute(r"lhs_batch_dims=\{([\d,]*)\}")
        return math.prod(left.shape[int(i)] for i in shared.split(",") if i)
    # b0f_o0i->bf0: a digit is a dimension of both operands and of the result.
    labels = re.split("_|->", x.attribute(r"dim_labels=(\w+_\w+->\w+)"))
    arrays = left, right, x.results[0]
    sizes = [{c: n for c, n in zip(y, z.shape, strict=True)} for y, z in zip(labels, arrays, strict=True)]
    digits = [c for c in labels[0] if c.isdigit()]
    return math.prod(sizes[0][c] for c in digits if sizes[0][c] == sizes[1][c] == sizes[2][c])


def attention_operations(operands: list[Array]) -> float:
    """Operations of jax's splash attention: queries [...,T,H] with keys [...,S,H], then with values."""
    queries, keys, values = [array.shape for array in operands if array.dtype == "bf16"][:3]
    return 2 * math.prod(queries[:-1]) * keys[-2] * (keys[-1] + values[-1])


def gpu_kernel_operations(x: Instruction, operands: list[Array]) -> float:
    """Operations of products of the kernels for GPUs. Those of 8-bit integers count half.

    flash: its second operand are keys and values [B,S,2H], its first result [parts,R,N,H]. joined_dot: rows
    [N,1,D], or [N,2,D] of two integers each, and matrices [M,D]. grouped_dot: rows [N,D], and products that
    are stored as [parts,N,...].
    """
    if x.kernel == "flash":
        (_, R, N, _), (_, S, C) = x.results[0].shape, operands[1].shape
        return 2 * R * N * S * C
    rows = operands[0]
    each = 1 if rows.dtype == "s8" else 2
    if x.kernel == "joined_dot":
        return each * rows.size * sum(y.shape[0] for y in operands[1:] if y.shape[1:] == rows.shape[2:])
    return each * rows.shape[1] * sum(math.prod(y.shape[1:]) for y in x.results)


def ragged_operations(x: Instruction, operands: list[Array]) -> float:
    """Operations of XLA's kernel of lax.ragged_dot: a product of each tile of rows with its group's matrix.

    A tile has rows of one group only, so there are up to as many more tiles as there are groups, less one.
    The kernel is given the group of each tile, and at last rows [m,K] and matrices [E,K,N].
    """
    rows, k, n = map(int, x.attribute(r'ragged_dot_tiling="([\d,]+)"').split(","))
    tiles, (K, N) = operands[2].size, operands[-1].shape[-2:]
    return 2 * tiles * rows * (-(-K // k) * k) * (-(-N // n) * n)


def delta_operations(operands: list[Array]) -> float:
    """Operations of the kernel of the delta rule, 7 for each token and number of a state [...,X,Y].

    One lets it fade; two each read it with a key, change it, and read it with a query. Before the states
    comes an operand that has 5 lines, and at last a few of padding, for each token.
    """
    lines, states = operands[-2:]
    return 7 * (lines.shape[-2] // 5) * states.size


def chunk_operations(operands: list[Array]) -> float:
    """Operations of the kernel of the delta rule by chunks, of products in bfloat16: three for each product.

    Its operands end with keys [B,J,T,X], values [B,N,T,Y], gates and states. For each head of values there
    are two products with the state and one that changes it, two with a triangle and ten that invert it; for
    each head of keys two that make triangles. Products of a triangle have one of another chunk beside it.
    """
    keys, values = (array.shape for array in operands[-4:-2])
    (B, J, T, X), (_, N, _, Y) = keys, values
    of_a_token = N * (3 * X * Y + 2 * CHUNK * 2 * Y + 10 * CHUNK * 2 * CHUNK) + J * 2 * CHUNK * 2 * X
    return 3 * 2 * B * T * of_a_token


def expert_operations(x: Instruction, operands: list[Array]) -> float:
    """Operations of the experts' kernel for one row of one expert: three products with D x M weights.

    Its result is [R,D]. The first operand with experts is gate: [E,D,M], or more dimensions in place of D.
    Integers of int4 count as much: there are two parts of each row, of half an operation.
    """
    gate = next(array for array in operands if len(array.shape) > 2)
    return 2 * 3 * x.results[0].shape[-1] * gate.shape[-1]


def expert_rows(cfg: Config, tokens: int, shards: int = 1) -> float:
    """Rows that the experts' kernel multiplies in a layer, by all experts of one of `shards` expert shards.

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
