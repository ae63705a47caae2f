"""What a compiled TPU program moves, read from its optimised HLO text (`compiled.as_text()`).

An array whose layout ends in S(1) is in VMEM, on the chip's core; one without S is in HBM. So HBM traffic is
what the instructions of the entry computation, and of the loops that it runs, read and write outside S. Each
operand is taken to be read once, of a slice or a gather its result; Pallas kernels fetch what they please,
and the caller says how much. (`cost_analysis()["bytes accessed"]` counts copies within VMEM, leaves out what
Pallas kernels read, and takes a loop's body once.)
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64,
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MOVES = ("copy", "copy-start", "transpose", "reshape", "convert")  # the same numbers in another place or form
SLICES = ("dynamic-slice", "slice", "slice-start", "gather")  # read only what they return
UPDATES = ("dynamic-update-slice", "scatter")  # write only their update
FREE = (
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "opt-barrier", "after-all",
    "add-dependency", "partition-id", "replica-id",
)  # fmt: skip
FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer|MaskAggregatorBlock)"')

HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$", re.DOTALL)
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result, such as bf16[8,128]{1,0:T(8,128)(2,1)S(1)}."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def in_hbm(self) -> bool:
        return "S(" not in self.layout

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """In memory: the minor dimensions are padded to whole tiles, T(8,128) for example."""
        minor_to_major, _, tiling = self.layout.partition(":")
        shape = [self.shape[int(i)] for i in minor_to_major.split(",") if i] or list(self.shape)[::-1]
        tile = re.search(r"T\(([\d,]+)\)", tiling)
        tile = [int(n) for n in tile[1].split(",")][::-1] if tile else []
        for i, n in enumerate(tile[: len(shape)]):
            shape[i] = -(-shape[i] // n) * n
        return math.prod(shape) * BITS.get(self.dtype, 0) / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. literal: what stands in its parentheses; attributes: what follows them."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    literal: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.-]+)", self.literal))

    @property
    def scope(self) -> str:
        """The named scopes that it stems from; of an entry parameter, the argument's name."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def calls(self) -> str:
        return self.attribute(r"(?:calls|to_apply|body)=%?([\w.-]+)")

    @property
    def is_kernel(self) -> bool:
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.attributes

    @property
    def part(self) -> Array:
        """Of a slicing instruction, the slice; slice-start returns ((operand), slice, context)."""
        return self.results[1 if self.opcode == "slice-start" else 0]

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]  # in order


@dataclasses.dataclass(frozen=True)
class Traffic:
    """HBM bytes that an instruction reads or writes of one array.

    argument: the entry argument that the array is, or is another form of; "" for temporaries.
    kernel: the name of the Pallas kernel, if it is one.
    """

    instruction: str
    argument: str
    scope: str
    kernel: str
    bytes: float
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Collective:
    """bytes: of the larger of operands and results, on one device. group: devices that exchange.

    between_stages: whether some of them are in other stages of layers.
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
    """The same numbers in another place, layout or type. prefetch: as any user in VMEM needs them."""

    opcode: str
    shape: str
    bytes: float
    prefetch: bool
    argument: str
    scope: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Loop:
    """known: False if the bound is computed."""

    instruction: str
    trips: int
    known: bool
    count: int = 1


@dataclasses.dataclass
class Program:
    """All that one device does in one run."""

    traffic: list[Traffic]
    collectives: list[Collective]
    copies: list[Copy]
    loops: list[Loop]

    @property
    def hbm_bytes(self) -> float:
        return sum(x.bytes * x.count for x in self.traffic)


def parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """All computations by name, and the entry."""
    lines, entry = {}, ""
    for line in text.splitlines():
        if header := HEADER.match(line):
            here = lines[header[2]] = []
            entry = header[2] if header[1] else entry
        elif re.match(r"  (ROOT )?%?[\w.-]+ = ", line):
            here.append(line)
        elif lines and here and line.strip() not in ("", "}"):
            here[-1] += "\n" + line  # attributes may hold line breaks and braces of their own
    computations = {name: dict(map(_instruction, body)) for name, body in lines.items()}
    return computations, computations[entry]


def _instruction(line: str) -> tuple[str, Instruction]:
    root, name, result, opcode, rest = INSTRUCTION.match(line).groups()
    arrays = ((dtype, shape, layout) for dtype, shape, layout in ARRAY.findall(result))
    results = tuple(Array(d, tuple(int(n) for n in shape.split(",") if n), x) for d, shape, x in arrays)
    end, depth = 0, 1
    while depth:
        depth += (rest[end] == "(") - (rest[end] == ")")
        end += 1
    return name, Instruction(name, opcode, results, rest[: end - 1], rest[end:], bool(root))


def read_program(
    text: str,
    kernel_share: Callable[[str, str], float] = lambda kernel, argument: 1,
    computed_trips: int | None = None,
    arguments: tuple[str, ...] = (),
    stages: int = 1,
) -> Program:
    """Walk through a program as one device runs it.

    kernel_share(kernel, argument): the share of an HBM operand that a Pallas kernel reads, where the operand
    is (a form of) that entry argument. Outputs that alias an operand are updated in place, and not counted.
    computed_trips: of loops whose bound is computed; else they are taken to walk once over what they slice.
    arguments: their names in order, which the text lacks where XLA takes very many of them as one tuple.
    stages: of layers in a slice of TPUs, of as many devices each, one after the other. Slices are taken to
    have other stages.
    """
    computations, entry = parse(text)
    events = list(_Reader(computations, kernel_share, computed_trips, arguments, stages).run(entry))
    kinds = (Traffic, Collective, Copy, Loop)
    return Program(*([x for x in events if isinstance(x, kind)] for kind in kinds))


@dataclasses.dataclass(frozen=True)
class _Reader:
    computations: dict[str, Computation]
    kernel_share: Callable[[str, str], float]
    computed_trips: int | None
    arguments: tuple[str, ...]
    stages: int

    def run(self, body: Computation, inputs: list[tuple[str, ...]] | None = None) -> Iterator:
        """All that happens in a computation. inputs: what its parameters are, as from `origin`."""
        origins: dict[str, tuple[str, ...]] = {}
        for_the_next_run = _unused_prefetches(body)
        for x in body.values():
            origins[x.name] = self.origin(x, body, origins, inputs)
            given = [origins[name] for name in x.operands]
            if x.opcode == "while":
                loop = self.loop(x)
                yield loop
                for event in self.run(self.computations[x.calls], given):
                    yield dataclasses.replace(event, count=event.count * loop.trips)
            elif x.opcode == "conditional":
                yield from self.largest_branch(x, given[1:])
            elif x.opcode in ("call", "async-start"):
                yield from self.run(self.computations[x.calls], given)
            elif x.name not in for_the_next_run:  # the one before has fetched it for this run
                yield from self.execute(x, body, given, origins[x.name])

    def origin(self, x: Instruction, body: Computation, origins, inputs) -> tuple[str, ...]:
        """The entry argument of which each result is a part or another form; "" if of none."""
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
        # What is moved, or updated in place, stays what it was: the operand of that size.
        operands = [body[name] for name in x.operands]
        moves = x.opcode == "bitcast" or self.only_moves(x)
        sizes = [array.size for operand in operands for array in operand.results]
        known = [pair for pair in zip(sizes, sum(given, ()), strict=False) if pair[1]]
        return tuple(
            next((argument for size, argument in known if size == array.size), "")
            if moves or self.share_written(x, operands, i) < 1
            else ""
            for i, array in enumerate(x.results)
        )

    def execute(self, x: Instruction, body: Computation, given, origin) -> Iterator:
        """What one instruction moves."""
        if x.opcode in FREE or x.opcode.endswith("-done") or FREE_CALLS.search(x.attributes):
            return
        operands = [body[name] for name in x.operands]
        kernel = re.sub(r"\.\d+$", "", x.name) if x.is_kernel else ""
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
                yield Traffic(x.name, argument, x.scope, kernel, array.bytes * share)
        yield from self.collectives(x, body)
        if self.only_moves(x):
            to_vmem = operands[0].results[0].in_hbm and not x.results[0].in_hbm
            prefetch = x.opcode == "copy-start" and to_vmem
            yield Copy(x.opcode, str(x.results[0]), x.results[0].bytes, prefetch, origin[0], x.scope)

    def only_moves(self, x: Instruction) -> bool:
        fused = self.computations[x.calls].values() if x.opcode == "fusion" else [x]
        return bool(x.operands) and all(y.opcode in ("parameter", "bitcast", *MOVES) for y in fused)

    def is_view(self, x: Instruction) -> bool:
        """Whether this is its operand in place, seen in another tiling: XLA so nests fusions of one copy."""
        return x.opcode == "fusion" and "output_to_operand_aliasing" in x.attributes and self.only_moves(x)

    def share_read(self, x: Instruction, operand: Instruction, i: int, argument: str) -> float:
        """How much of operand number i an instruction reads."""
        if x.is_kernel:
            return self.kernel_share(re.sub(r"\.\d+$", "", x.name), argument)
        if x.opcode == "fusion":
            fused = self.computations[x.calls]
            parameters = (y for y in fused.values() if y.opcode == "parameter")
            return min(1, self.share_used(fused, next(y.name for y in parameters if int(y.literal) == i)))
        if x.opcode in SLICES and i == 0:
            return x.part.size / operand.results[0].size
        return 0 if x.opcode in UPDATES and i == 0 else 1

    def share_used(self, fused: Computation, name: str) -> float:
        """How much of one of its values a fused computation looks at."""
        if fused[name].is_root:
            return 1  # all of it is returned
        users = [(x, x.operands.index(name)) for x in fused.values() if name in x.operands]
        return sum(
            self.share_used(fused, x.name)
            if x.opcode == "bitcast" or self.only_moves(x)
            else self.share_read(x, fused[name], i, "")
            for x, i in users
        )

    def share_written(self, x: Instruction, operands: list[Instruction], i: int) -> float:
        """How much of result number i an instruction writes: not what it leaves as it was, in place."""
        if x.is_kernel:
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
            # The result holds the operand too: of two that are alike, one is written.
            given = [array for operand in operands for array in operand.results]
            return 0 if x.results[i] in given and x.results[i] not in x.results[i + 1 :] else 1
        return 1

    def share_updated(self, fused: Computation, x: Instruction) -> float:
        """The same of a value that a fused computation returns."""
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
            # One that is started returns (operands, results, context).
            results = x.results[len(operands) :][: len(operands)] or x.results
            size = max(sum(array.bytes for array in arrays) for arrays in (operands, results))
            shape, started = " ".join(map(str, results)), fused or x.opcode != kind
            groups = device_groups(x.attributes)
            stages = groups // ((groups.max() + 1) // self.stages)  # that of each device
            between = bool((stages != stages[:, :1]).any())
            yield Collective(kind, shape, size, groups.shape[1], started, x.scope, between)
        elif x.opcode == "send" and "_xla_megascale_target" in x.attributes:  # to another slice
            kind = "all-reduce" if "ALL_REDUCE" in x.attributes else "collective-permute"
            array = x.results[0]
            yield Collective(kind, str(array), array.bytes, 2, True, x.scope, between_stages=True)
        elif x.opcode == "fusion":  # XLA may fuse a collective with what it overlaps
            inner = self.computations[x.calls]
            for y in inner.values():
                yield from self.collectives(y, inner, fused=True)

    def largest_branch(self, x: Instruction, given) -> list:
        """What the branch does that moves the most; one of them runs."""
        names = re.findall(r"(?:true_computation=|false_computation=|[{,] ?)%([\w.-]+)", x.attributes)
        branches = [self.run(self.computations[y], [z]) for y, z in zip(names, given, strict=False)]
        branches = [list(events) for events in branches]
        return max(
            branches, key=lambda events: sum(x.bytes * x.count for x in events if isinstance(x, Traffic))
        )

    def loop(self, x: Instruction) -> Loop:
        condition = self.computations[x.attribute(r"condition=%?([\w.-]+)")]
        bounds = [
            int(c.literal) for c in condition.values() if c.opcode == "constant" and c.literal.isdigit()
        ]
        known = x.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if known or bounds:  # jax counts from 0 to a constant
            return Loop(x.name, int(known or max(bounds)), True)
        if self.computed_trips:
            return Loop(x.name, self.computed_trips, False)
        # It slices the largest array a block at a time along one axis.
        slices = [(a, b) for a, b in self.slices(x.calls) if len(a.shape) == len(b.shape)]
        whole, part = max(slices, key=lambda pair: pair[0].bytes, default=(None, None))
        trips = [-(-n // m) for n, m in zip(whole.shape, part.shape, strict=True)] if slices else [1]
        return Loop(x.name, max(trips), False)

    def slices(self, name: str) -> Iterator[tuple[Array, Array]]:
        """Each (array, slice of it) in a computation and in what it fuses."""
        body = self.computations[name]
        for x in body.values():
            if x.opcode in SLICES:
                yield body[x.operands[0]].results[0], x.part
            elif x.opcode == "fusion":
                yield from self.slices(x.calls)


def _unused_prefetches(body: Computation) -> set[str]:
    """The copies whose results nobody uses: at its end a program fetches what its next run begins with."""
    used = {name for x in body.values() for name in x.operands}
    ends = (x for x in body.values() if x.opcode == "copy-done" and not x.is_root and x.name not in used)
    return {x.operands[0] for x in ends}


def device_groups(attributes: str) -> np.ndarray:
    """Which devices exchange with one another, [groups,n]; of a permutation, who sends to whom.

    {{0,1},{2,3}}, [2,2]<=[4] and mesh['x'=2,'y'=2] {'y'} are the same.
    """
    if groups := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", attributes):
        return np.array([_integers(group) for group in re.findall(r"\{([\d,]+)\}", groups[1])])
    if groups := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, sizes, order = map(_integers, groups.groups(""))
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order or None).reshape(shape)
    groups = re.search(r"replica_groups=mesh\[([^\]]*)\](?: \{([^}]*)\})?", attributes)
    axes = {name: (1, int(size), 1) for name, size in re.findall(r"'([^']+)'=(\d+)", groups[1])}
    used = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", groups[2] or groups[1])
    for name, before, part in used:
        if part:  # a part of the axis, after `before` others
            axes[name] = int(before), int(part), axes[name][1] // int(before) // int(part)
    places = [3 * list(axes).index(name) + 1 for name, _, _ in used]
    devices = np.arange(math.prod(map(math.prod, axes.values()))).reshape(sum(axes.values(), ()))
    others = [i for i in range(devices.ndim) if i not in places]
    return devices.transpose(others + places).reshape(-1, math.prod(devices.shape[i] for i in places))


def _integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
