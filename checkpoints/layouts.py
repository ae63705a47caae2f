"""In what order a file holds the elements of a weight, and how any part of it is read in ours.

Stored letters are written as in ArrayInfo.stored, and a letter that is there twice is split: first the
number of a block, then the place in it. In our files the sharded letters come first, so that what a device
holds of a weight is a few long runs: "DkgH" is stored as "KGDH". Where that would leave single elements, a
letter is split: "Df" is stored as "FDF", and half of f is half of the tensor.
"""

import dataclasses
import math
import re

import numpy as np

from checkpoints.tensor_files import ALIGNMENT, StoredTensor, array_bytes
from model import ArrayInfo

SLAB_BYTES = 2**24  # of an array, converted or compared at a time
BLOCKS = 64  # into which a letter is split: a device's share is whole blocks on up to as many devices
Box = tuple[tuple[int, int], ...]  # of each letter of a weight, which elements [lo, hi)


def file_letters(info: ArrayInfo) -> str:
    """The order of a weight's letters in our files."""
    sharded = [letter for letter in info.letters if letter.islower()]
    if "".join(sharded) == info.letters[: len(sharded)]:
        return info.letters.upper()
    whole = [letter for letter in info.letters if letter not in sharded]
    split = [sharded[-1]] if info.letters.endswith(sharded[-1]) else []
    return "".join(sharded + whole + split).upper()


def stored_dimensions(letters: str) -> list[str]:
    """The letters of each stored dimension: "D(KGH)" -> ["D", "KGH"]."""
    return [joined or alone for joined, alone in re.findall(r"\((\w+)\)|(\w)", letters)]


def axes_of(letters: str) -> list[tuple[str, int]]:
    """The axes when all that is joined is taken apart, each with how often its letter came before."""
    flat = "".join(stored_dimensions(letters))
    return [(letter, flat[:i].count(letter)) for i, letter in enumerate(flat)]


def axis_sizes(letters: str, info: ArrayInfo) -> list[int]:
    """The size of each of these axes; of a digit, which picks one of two halves, 2."""
    sizes, axes = dict(zip(info.letters.upper(), info.shape, strict=True)), axes_of(letters)

    def size(letter: str, place: int) -> int:
        if letter.isdigit():
            return 2
        if (letter, 1) not in axes:
            return sizes[letter]
        blocks = math.gcd(sizes[letter], BLOCKS)
        return sizes[letter] // blocks if place else blocks

    return [size(*axis) for axis in axes]


def stored_shape(letters: str, info: ArrayInfo) -> tuple[int, ...]:
    sizes = iter(axis_sizes(letters, info))
    return tuple(math.prod(next(sizes) for _ in joined) for joined in stored_dimensions(letters))


def to_file_order(x, info: ArrayInfo):
    """An array in our layout, all of it or of some of its unsplit letters -> in the order of our files."""
    stored = axes_of(file_letters(info))
    sizes = dict(zip(stored, axis_sizes(file_letters(info), info), strict=True))
    ours, shape = [], []
    for letter, size in zip(info.letters.upper(), x.shape, strict=True):
        parts = [axis for axis in stored if axis[0] == letter]
        ours += parts
        shape += [sizes[axis] for axis in parts] if len(parts) > 1 else [size]
    return x.reshape(shape).transpose([ours.index(axis) for axis in stored])


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensors of one declared array, which follow one another along the first of `letters`."""

    info: ArrayInfo
    tensors: tuple[StoredTensor, ...]
    letters: str

    @property
    def nbytes(self) -> int:
        return array_bytes(self.tensors[0].dtype, self.info.shape)

    def read(self, box: Box) -> np.ndarray:
        """A part of the array in our layout: in place where the file has it so, else copied from there."""
        axes, sizes = axes_of(self.letters), axis_sizes(self.letters, self.info)
        ours = self.info.letters.upper()
        width = dict.fromkeys(ours, 1) | {axis[0]: n for axis, n in zip(axes, sizes, strict=True) if axis[1]}
        blocks = {x: (lo // width[x], -(-hi // width[x])) for x, (lo, hi) in zip(ours, box, strict=True)}
        index = [
            int(letter) if letter.isdigit() else slice(None) if place else slice(*blocks[letter])
            for letter, place in axes
        ]
        x = self._rows(*index, shape=sizes[1:])
        kept = [axis for axis in axes if not axis[0].isdigit()]
        x = x.transpose([i for letter in ours for i, axis in enumerate(kept) if axis[0] == letter])
        x = x.reshape([(hi - lo) * width[letter] for letter, (lo, hi) in blocks.items()])
        first = [lo * width[letter] for letter, (lo, _) in blocks.items()]
        return x[tuple(slice(lo - start, hi - start) for (lo, hi), start in zip(box, first, strict=True))]

    def _rows(self, rows: slice, *rest: slice | int, shape: list[int]) -> np.ndarray:
        """[rows, *rest] of the tensors one after another, each [..., *shape]."""
        parts, first = [], 0
        for tensor in self.tensors:
            x = tensor.values.reshape(-1, *shape)
            lo, hi = (min(max(row - first, 0), len(x)) for row in (rows.start, rows.stop))
            if lo < hi:
                parts.append(x[slice(lo, hi), *rest])
                tensor.read_ahead(parts[-1])
            first += len(x)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def slabs(self) -> tuple[str, list[tuple[int, int]]]:
        """How to read it bit by bit: a letter that is not contracted and nowhere split, and its ranges."""
        axes = axes_of(self.letters)
        unfit = {x for x, place in axes + axes_of(file_letters(self.info)) if place or x.isdigit()}
        unfit |= set(self.info.contracted.upper())
        letter = next(x for x, _ in axes if x not in unfit)
        size = self.info.shape[self.info.letters.upper().index(letter)]
        rows = max(SLAB_BYTES * size // self.nbytes, 1)
        return letter, [(lo, min(lo + rows, size)) for lo in range(0, size, rows)]

    def slab(self, letter: str, lo: int, hi: int) -> np.ndarray:
        """All of the array, but of one letter the elements [lo, hi)."""
        letters = zip(self.info.letters.upper(), self.info.shape, strict=True)
        return self.read(tuple((lo, hi) if x == letter else (0, size) for x, size in letters))

    def can_stay(self, part: np.ndarray) -> bool:
        """Whether XLA on a CPU uses this array where it is: in the file."""
        usable = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0
        return usable and any(np.may_share_memory(part, tensor.values) for tensor in self.tensors)

    def forget(self) -> None:
        """Give back the memory of what was read in place."""
        for tensor in self.tensors:
            tensor.forget()
