"""GGUF files: the header with its fields, and the tensors behind it, memory-mapped.

gguf's own reader takes 4 s of a CPU for a vocabulary of 49,152 tokens, and more for Llama 3's.
Source: ggml-org/ggml, docs/gguf.md.
"""

import dataclasses
import hashlib
import pathlib
import struct
from typing import Any

import numpy as np

from checkpoints.tensor_files import MappedFile, StoredTensor
from feedback.errors import UserError

VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}  # types of tensors that are not quantized
ALIGNMENT = 32  # of tensors, unless the file says otherwise


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file; a quantized one is a tensor of bytes, [..., bytes of a row].

    kind: GGML's number of the type.
    """

    kind: int


class GgufFile:
    """A GGUF file whose header has been read. It has the attributes of a TensorFile, and:

    fields:   numbers, texts and lists by name.
    checksum: of the header; of a model in several files, of all their headers, see `open_parts`.
    """

    def __init__(self, path: pathlib.Path):
        """Raises UserError naming the file, and the tensor that is wrong."""
        self.path, self.name, self.metadata = path, path.name, {}
        self.content = MappedFile(path)
        self.size, self.mapped = self.content.size, self.content.mapped
        self.position, self.fields = 4, {}
        if self.mapped[:4] != b"GGUF":
            self.refuse("not a GGUF file" if self.size else "is empty; download it again")
        try:
            if (version := self._number("I")) not in VERSIONS:
                self.refuse(f"has version {version} of GGUF, not {' or '.join(map(str, VERSIONS))}")
            count, more = self._number("Q"), self._number("Q")
            for _ in range(more):
                name = self._text()
                self.fields[name] = self._value(self._number("I"))
            heads = [self._head() for _ in range(count)]
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError, ValueError):
            self.refuse("cut off, or damaged, in its head; download it again")
        self.checksum = hashlib.sha256(self.mapped[: self.position]).hexdigest()
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            self.refuse(f"general.alignment = {alignment!r} makes no sense")
        self.data_start = -(-self.position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for head in heads:
            self._add(*head)

    def __str__(self) -> str:
        return str(self.path)

    def refuse(self, what: str):
        """Raises UserError naming the file."""
        raise UserError(f"{self.path}: {what}")

    def _number(self, code: str) -> Any:
        (number,) = struct.unpack_from("<" + code, self.mapped, self.position)
        self.position += struct.calcsize("<" + code)
        return number

    def _text(self) -> str:
        length = self._number("Q")
        start, self.position = self.position, self.position + length
        if self.position > self.size:
            raise ValueError
        return self.mapped[start : self.position].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._number(NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind in NUMBERS:
            dtype = np.dtype("<" + NUMBERS[kind])
            values = np.frombuffer(self.mapped, dtype, count, self.position)
            self.position += values.nbytes
            return values.tolist()
        return [self._value(kind) for _ in range(count)]

    def _head(self) -> tuple[str, tuple[int, ...], int, int]:
        """-> a tensor's (name, shape in numpy's order, number of its type, offset in the data section)"""
        name, dimensions = self._text(), self._number("I")
        shape = [self._number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(shape)), self._number("I"), self._number("Q")

    def _add(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError:
            self.refuse(f"tensor {name} has a type that is not known, {kind}; pip install -U gguf")
        if not shape or not all(0 < n < 2**40 for n in shape) or shape[-1] % block:
            self.refuse(f"tensor {name} has shape {shape}, in blocks of {block}")
        if kind not in PLAIN:
            shape = *shape[:-1], shape[-1] // block * nbytes
        start = self.data_start + offset
        stop = start + int(np.prod(shape, dtype=object)) * (nbytes if kind in PLAIN else 1)
        if stop > self.size:
            self.refuse(f"cut off: tensor {name} ends at byte {stop} of {self.size}; download it again")
        if name in self.tensors:
            self.refuse(f"tensor {name} is there twice")
        self.tensors[name] = GgufTensor(name, self, PLAIN.get(kind, "U8"), shape, start, stop, kind)


def open_parts(path: pathlib.Path) -> GgufFile:
    """A file; or the first of those that a model is split into, with the tensors of all of them.

    path: of any of them. The first has the fields. Raises UserError naming the part that is wrong.
    """
    given = GgufFile(path)
    count, number = given.fields.get("split.count", 1), given.fields.get("split.no", 0)
    if count in (0, 1):
        return given
    if not all(isinstance(x, int) for x in (count, number)) or not 0 <= number < count:
        given.refuse(f"is part {number!r} of {count!r}, which makes no sense")
    own = f"-{number + 1:05}-of-{count:05}.gguf"
    if not path.name.endswith(own):
        given.refuse(f"is part {number + 1} of {count}, so its name must end in {own}")
    start = path.name.removesuffix(own)
    paths = [path.with_name(f"{start}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for other in paths:
        if not other.is_file():
            raise UserError(f"{other}: no such file; {path.name} is one of {count} parts: download them all")
    return _joined([given if other == path else GgufFile(other) for other in paths])


def _joined(parts: list[GgufFile]) -> GgufFile:
    """The first part, with the tensors of all. Raises UserError naming a part that is of another model."""
    first, same = parts[0], ("split.count", "split.tensors.count")
    for i, part in enumerate(parts):
        for name, expected in {"split.no": i, **{name: first.fields.get(name) for name in same}}.items():
            if (value := part.fields.get(name)) != expected:
                part.refuse(f"{name} = {value!r}, not {expected!r}: it is not a part of the same model")
        for name in part.tensors if i else ():
            if name in first.tensors:
                part.refuse(f"tensor {name} is also in {first.tensors[name].file.name}")
        first.tensors |= part.tensors
    if len(first.tensors) != (expected := first.fields.get("split.tensors.count")):
        first.refuse(f"its {len(parts)} parts have {len(first.tensors)} tensors, but it says {expected}")
    first.checksum = hashlib.sha256("".join(part.checksum for part in parts).encode()).hexdigest()
    return first
