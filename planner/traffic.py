"""What one device reads, writes, copies and sends in one run of a compiled program, counted from its HLO.

On a TPU, an array whose layout ends in S(1) is in VMEM, on the chip's core; one without S is in HBM. So HBM
traffic is what the instructions of the entry computation, and of the loops that it runs, read and write
outside of S. On a GPU such an instruction is a kernel, and no layout tells what stays on the chip: what one
kernel writes and another reads counts as HBM traffic, although the L2 cache may hold it.
Each operand counts as read once; of a slice or a gather, only its result. Which part of its operands a Pallas
kernel fetches does not stand in the HLO: the caller says it. (`cost_analysis()["bytes accessed"]` counts
copies within VMEM, leaves out what Pallas kernels read, and counts the body of a loop once.)
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

from planner.hlo import Computation, Instruction, device_groups, parse

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MOVES = ("copy", "copy-start", "transpose", "reshape", "convert")  # change the place, layout or type only
JOINS = ("concatenate", "pad", "constant")  # with moves alone: copy whole arrays into a larger one
SLICES = ("dynamic-slice", "slice", "slice-start", "gather")  # read only what they return
UPDATES = ("dynamic-update-slice", "scatter")  # write only their update
FREE = (
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "opt-barrier", "after-all",
    "add-dependency", "partition-id", "replica-id",
)  # fmt: skip
CALLS = ("call", "async-start")  # run another computation
FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer|MaskAggregatorBlock)"')

# For each of several arrays or tuples, the entry argument that each of its parts is, or is a part or copy of.
Origins = list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """HBM bytes that an instruction reads or writes of one array.

    argument: the entry argument that the array is, or is a copy or slice of; "" for temporaries.
    kernel: the name of the Pallas kernel, "" if the instruction is none.
    """

    instruction: str
    argument: str
    scope: str
    kernel: str
    bytes: float
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Collective:
    """bytes: the larger of operands and results, on one device. group: how many devices exchange data.

    between_stages: whether some of these devices belong to other stages of layers.
    """

    kind: str
    shape: str
    bytes: float
    group: int
    asynchronous: bool
    scope: str
    between_stages: bool = False
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """The same numbers in another place, layout or type, or in a part of a larger array.

    prefetch: from HBM to VMEM, ahead of their use.
    """

    opcode: str
    shape: str
    bytes: float
    prefetch: bool
    argument: str
    scope: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Loop:
    """known: False if the program computes the number of trips, so that `trips` is an assumption."""

    instruction: str
    trips: int
    known: bool
    count: int = 1


@dataclasses.dataclass
class Program:
    """All that one device does in one run, or in all runs of all programs of a step."""

    traffic: list[Traffic]
    collectives: list[Collective]
    copies: list[Copy]
    loops: list[Loop]

    @property
    def hbm_bytes(self) -> float:
        return sum(x.bytes * x.count for x in self.traffic)

    @staticmethod
    def of_all(programs: "list[Program]") -> "Program":
        fields = [field.name for field in dataclasses.fields(Program)]
        return Program(*(sum((getattr(x, name) for x in programs), []) for name in fields))

    def in_step(self, names: dict[str, str], runs: int) -> "Program":
        """All runs in a step. names: the step's name of each argument by the program's own, or nothing."""

        def changed(x):
            argument = dict(argument=names.get(x.argument, "")) if hasattr(x, "argument") else {}
            return dataclasses.replace(x, count=x.count * runs, **argument)

        events = self.traffic, self.collectives, self.copies, self.loops
        return Program(*([changed(x) for x in each] for each in events))


def read_program(text: str, *arguments, **options) -> Program:
    """All that a device does in one run of a program, from its HLO text. Arguments: those of `Reader`."""
    return Reader(text, *arguments, **options).program()


class Reader:
    """Walks through the HLO text of a program as one device runs it.

    kernel_share(kernel, argument): the share of an HBM operand that a Pallas kernel reads, where the operand
    is (a copy of) that entry argument. Outputs that alias an operand are updated in place, and do not count.
    computed_trips: the trips of loops whose number of trips is computed.
    block_kernel: the name of the Pallas kernel that copies a block of the slots of some rows. A loop that
    runs it is assumed to walk once over all slots.
    arguments: the names of the entry arguments in order, for programs whose very many arguments XLA passes as
    one tuple without names.
    stages: how many stages of layers one slice of TPUs has, each on as many devices as the others, one after
    the other. Other slices of TPUs are assumed to have other stages.
    """

    def __init__(
        self,
        text: str,
        kernel_share: Callable[[str, str], float] = lambda kernel, argument: 1,
        computed_trips: int = 1,
        block_kernel: str = "",
        arguments: tuple[str, ...] = (),
        stages: int = 1,
    ):
        self.computations, self.entry = parse(text)
        self.kernel_share, self.computed_trips = kernel_share, computed_trips
        self.block_kernel = block_kernel
        self.arguments, self.stages = arguments, stages

    def program(self) -> Program:
        events = list(self.run(self.entry))
        kinds = (Traffic, Collective, Copy, Loop)
        return Program(*([x for x in events if isinstance(x, kind)] for kind in kinds))

    def run(self, body: Computation, inputs: Origins | None = None) -> Iterator:
        """All events of a computation. inputs: the origins of its parameters, as `origin` returns them."""
        for x, given, origin in self.instructions(body, inputs):
            if x.opcode == "while":
                loop = self.loop(x)
                yield loop
                for event in self.run(self.computations[x.calls], given):
                    yield dataclasses.replace(event, count=event.count * loop.trips)
            elif x.opcode == "conditional":
                yield from self.run(*self.largest_branch(x, given[1:]))
            elif x.opcode in CALLS:
                yield from self.run(self.computations[x.calls], given)
            else:
                yield from self.execute(x, body, given, origin)

    def instructions(
        self, body: Computation, inputs: Origins | None = None
    ) -> Iterator[tuple[Instruction, Origins, tuple[str, ...]]]:
        """The instructions of a computation, each with the origins of its operands and of its results."""
        origins: dict[str, tuple[str, ...]] = {}
        for_the_next_run = _unused_prefetches(body)
        for x in body.values():
            origins[x.name] = self.origin(x, body, origins, inputs)
            if x.name not in for_the_next_run:  # the run before has fetched this array for this run
                yield x, [origins[name] for name in x.operands], origins[x.name]

    def origin(self, x: Instruction, body: Computation, origins, inputs) -> tuple[str, ...]:
        """For each result of an instruction, the entry argument that it is a part or a copy of, or ""."""
        given = [origins[name] for name in x.operands]
        if x.opcode == "parameter" and inputs is None:
            in_one = len(x.results) > 1 and len(x.results) == len(self.arguments)
            return self.arguments if in_one else (x.scope,) * len(x.results)
        if x.opcode == "parameter":
            return inputs[int(x.literal)]
        if x.opcode == "tuple":
            return sum(given, ())
        if x.opcode == "get-tuple-element":
            return given[0][int(x.attribute(r"index=(\d+)")) :][:1] or ("",)
        if x.opcode in ("while", "opt-barrier"):
            return given[0]
        if x.opcode in SLICES or x.opcode.endswith("-done") or "ConcatBitcast" in x.attributes:
            return given[0][:1] * len(x.results)
        if x.opcode == "bitcast":  # perhaps to numbers of another size
            return given[0]
        # A result that is moved or updated in place has the origin of the operand of the same size.
        operands = [body[name] for name in x.operands]
        moves = self.only_moves(x)
        sizes = [array.size for operand in operands for array in operand.results]
        known = [pair for pair in zip(sizes, sum(given, ()), strict=False) if pair[1]]
        return tuple(
            next((argument for size, argument in known if size == array.size), "")
            if moves or self.share_written(x, operands, i) < 1
            else ""
            for i, array in enumerate(x.results)
        )

    def execute(self, x: Instruction, body: Computation, given, origin) -> Iterator:
        """The events of one instruction."""
        if x.opcode in FREE or x.opcode.endswith("-done") or FREE_CALLS.search(x.attributes):
            return
        operands = [body[name] for name in x.operands]
        read = [
            (array, argument, self.share_read(x, operand, i, argument))
            for i, (operand, arguments) in enumerate(zip(operands, given, strict=True))
            for array, argument in zip(operand.results, arguments, strict=False)
        ]
        written = [
            (array, argument, self.share_written(x, operands, i))
            for i, (array, argument) in enumerate(zip(x.results, origin, strict=False))
        ]
        for array, argument, share in read + written:
            if array.in_hbm and share:
                yield Traffic(x.name, argument, x.scope, x.kernel, array.bytes * share)
        yield from self.collectives(x, body)
        if self.only_moves(x):
            to_vmem = operands[0].results[0].in_hbm and not x.results[0].in_hbm
            prefetch = x.opcode == "copy-start" and to_vmem
            yield Copy(x.opcode, str(x.results[0]), x.results[0].bytes, prefetch, origin[0], x.scope)
        elif self.only_moves(x, JOINS):
            for array, argument, _ in read:
                if argument:
                    yield Copy(x.opcode, str(array), array.bytes, False, argument, x.scope)

    def only_moves(self, x: Instruction, more: tuple[str, ...] = ()) -> bool:
        """Whether the result has the operand's numbers, elsewhere or in another layout or type.

        more: other opcodes that it may consist of.
        """
        fused = self.computations[x.calls].values() if x.opcode == "fusion" else [x]
        return bool(x.operands) and all(y.opcode in ("parameter", "bitcast", *MOVES, *more) for y in fused)

    def is_view(self, x: Instruction) -> bool:
        """Whether the result is the operand in place, in another tiling: XLA nests such fusions of a copy."""
        return x.opcode == "fusion" and "output_to_operand_aliasing" in x.attributes and self.only_moves(x)

    def share_read(self, x: Instruction, operand: Instruction, i: int, argument: str) -> float:
        """The share of operand number i that an instruction reads."""
        if x.kernel:
            return self.kernel_share(x.kernel, argument)
        if x.opcode == "fusion":
            fused = self.computations[x.calls]
            parameters = (y for y in fused.values() if y.opcode == "parameter")
            return min(1, self.share_used(fused, next(y.name for y in parameters if int(y.literal) == i)))
        if x.opcode in SLICES and i == 0:
            return x.slice.size / operand.results[0].size
        return 0 if x.opcode in UPDATES and i == 0 else 1

    def share_used(self, fused: Computation, name: str) -> float:
        """The share of one of its values that a fused computation reads."""
        if fused[name].is_root:
            return 1  # the computation returns all of it
        users = [(x, x.operands.index(name)) for x in fused.values() if name in x.operands]
        return sum(
            self.share_used(fused, x.name)
            if x.opcode == "bitcast" or self.only_moves(x)
            else self.share_read(x, fused[name], i, "")
            for x, i in users
        )

    def share_written(self, x: Instruction, operands: list[Instruction], i: int) -> float:
        """The share of result number i that an instruction writes; the rest stays as it was, in place."""
        if x.kernel:
            # {}: (2, {}) for a single result, {1}: (2, {}) for the second of several.
            place = i if len(x.results) > 1 else ""
            return 0 if re.search(rf"output_to_operand_aliasing=.*?\{{{place}\}}: \(", x.attributes) else 1
        if x.opcode == "fusion":
            fused = self.computations[x.calls]
            root = next(y for y in fused.values() if y.is_root)
            return self.share_updated(fused, fused[root.operands[i]] if root.opcode == "tuple" else root)
        if x.opcode in UPDATES:
            update = operands[1 if x.opcode == "dynamic-update-slice" else -1].results[0]
            return update.size / x.results[i].size
        if x.opcode.endswith("-start") and x.opcode != "all-reduce-start":
            # The results include the operand: of two equal arrays in the results, only one is written.
            given = [array for operand in operands for array in operand.results]
            return 0 if x.results[i] in given and x.results[i] not in x.results[i + 1 :] else 1
        return 1

    def share_updated(self, fused: Computation, x: Instruction) -> float:
        """The share that is written of a value that a fused computation returns."""
        operands = [fused[name] for name in x.operands]
        if x.opcode == "bitcast":
            return self.share_updated(fused, operands[0])
        target = operands[0] if operands else x
        while target.opcode == "bitcast" or self.is_view(target):
            target = fused[target.operands[0]]
        in_place = x.opcode in UPDATES and target.opcode == "parameter"
        return self.share_written(x, operands, 0) if x.opcode == "fusion" or in_place else 1

    def collectives(self, x: Instruction, body: Computation, fused: bool = False) -> Iterator[Collective]:
        kind = x.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            operands = [array for name in x.operands for array in body[name].results]
            # A collective that is started here and done later returns (operands, results, context).
            results = x.results[len(operands) :][: len(operands)] or x.results
            size = max(sum(array.bytes for array in arrays) for arrays in (operands, results))
            started = fused or x.opcode != kind and '"is_sync":true' not in x.attributes
            shape = " ".join(map(str, results))
            groups = device_groups(x.attributes)
            stages = groups // ((groups.max() + 1) // self.stages)  # the stage of each device
            between = bool((stages != stages[:, :1]).any())
            yield Collective(kind, shape, size, groups.shape[1], started, x.scope, between)
        elif x.opcode == "send" and "_xla_megascale_target" in x.attributes:  # to another slice of TPUs
            kind = "all-reduce" if "ALL_REDUCE" in x.attributes else "collective-permute"
            array = x.results[0]
            yield Collective(kind, str(array), array.bytes, 2, True, x.scope, between_stages=True)
        elif x.opcode == "fusion":  # XLA may fuse a collective with the work that it overlaps
            inner = self.computations[x.calls]
            for y in inner.values():
                if channel(y) not in self.started_channels or starts_collective(inner):
                    yield from self.collectives(y, inner, fused=True)

    @functools.cached_property
    def started_channels(self) -> set[str]:
        """The channels of collectives that one fusion starts. The fusions that they overlap repeat them."""
        starts = filter(starts_collective, self.computations.values())
        return {channel(x) for computation in starts for x in computation.values()} - {""}

    def largest_branch(self, x: Instruction, given: Origins) -> tuple[Computation, Origins]:
        """The branch that moves the most bytes, and the origins of its parameter; only one branch runs."""
        names = re.findall(r"(?:true_computation=|false_computation=|[{,] ?)%([\w.-]+)", x.attributes)
        branches = [(self.computations[y], [z]) for y, z in zip(names, given, strict=False)]
        return max(
            branches,
            key=lambda branch: sum(x.bytes * x.count for x in self.run(*branch) if isinstance(x, Traffic)),
        )

    def loop(self, x: Instruction) -> Loop:
        condition = self.computations[x.attribute(r"condition=%?([\w.-]+)")]
        bounds = [
            int(c.literal) for c in condition.values() if c.opcode == "constant" and c.literal.isdigit()
        ]
        known = x.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if known or bounds:  # jax counts from 0 to a constant
            return Loop(x.name, int(known or max(bounds)), True)
        blocks = list(self.blocks_of_slots(x.calls))
        if blocks:
            return Loop(x.name, max(-(-n // m) for pair in blocks for n, m in zip(*pair, strict=True)), False)
        return Loop(x.name, self.computed_trips, False)

    def blocks_of_slots(self, name: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The sizes of the slots of each cache that a computation copies by block, and of a block."""
        body = self.computations[name]
        for x in body.values():
            if x.kernel and x.kernel == self.block_kernel:
                yield body[x.operands[-1]].results[0].shape[2:], x.results[0].shape[2:]


def channel(x: Instruction) -> str:
    """The number that all parts of a collective have in common; "" for what is no collective."""
    return x.attribute(r"channel_id=(\d+)")


def starts_collective(fused: Computation) -> bool:
    return any("AsyncCollectiveStart" in x.attributes for x in fused.values())


def _unused_prefetches(body: Computation) -> set[str]:
    """Copies whose results nobody uses: at its end a program fetches what its next run begins with."""
    used = {name for x in body.values() for name in x.operands}
    ends = (x for x in body.values() if x.opcode == "copy-done" and not x.is_root and x.name not in used)
    return {x.operands[0] for x in ends}
