"""Reads the HLO text of a compiled program (`compiled.as_text()`): computations, instructions, arrays."""

import dataclasses
import functools
import math
import re

import numpy as np

HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$", re.DOTALL)
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


def bits(dtype: str) -> int:
    """Bits of a number of XLA's type `dtype`: s4, bf16, f8e4m3fn or pred, for example; 0 of a token."""
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 8 * (dtype == "pred")


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
        """Bytes in memory: the minor dimensions are padded to whole tiles, T(8,128) for example."""
        minor_to_major, _, tiling = self.layout.partition(":")
        shape = [self.shape[int(i)] for i in minor_to_major.split(",") if i] or list(self.shape)[::-1]
        tile = re.search(r"T\(([\d,]+)\)", tiling)
        tile = [int(n) for n in tile[1].split(",")][::-1] if tile else []
        for i, n in enumerate(tile[: len(shape)]):
            shape[i] = -(-shape[i] // n) * n
        return math.prod(shape) * bits(self.dtype) / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. literal: the text in its parentheses; attributes: the text after them."""

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
        """The named scopes of the code that it stems from; for an entry parameter, the argument's name."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def calls(self) -> str:
        """The computation that it runs."""
        return self.attribute(r"(?:calls|to_apply|body)=%?([\w.-]+)")

    @functools.cached_property
    def kernel(self) -> str:
        """The name of the Pallas kernel that it runs, "" if it runs none."""
        target = self.attribute('custom_call_target="([^"]*)"') if self.opcode == "custom-call" else ""
        if target == "tpu_custom_call":
            return re.sub(r"\.\d+$", "", self.name)
        return self.attribute(r'\bname = "(\w+)"') if target == "__gpu$xla.gpu.triton" else ""

    @property
    def slice(self) -> Array:
        """The slice that a slicing instruction returns; slice-start returns ((operand), slice, context)."""
        return self.results[1 if self.opcode == "slice-start" else 0]

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]  # in the order of the text


def parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """All computations by name, and the entry computation."""
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


def device_groups(attributes: str) -> np.ndarray:
    """The devices that exchange data with one another, [groups,n]; for a permutation, (sender, receiver).

    {{0,1},{2,3}}, [2,2]<=[4] and mesh['x'=2,'y'=2] {'y'} are the same groups.
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
