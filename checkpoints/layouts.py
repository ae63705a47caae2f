"""The order in which a file stores the elements of a weight, and how any part of a weight is read from it.

A layout is written in letters, as in sharding.arrays.Stored. In a converted folder sharded letters come
first, so that a device's shard is a few long runs of the file: "DkgH" is stored as "KGDH". If the innermost
letter is sharded, runs would be short, so that letter is split into two axes, the number of a block and the
position in the block: "Df" is stored as "FDF", and half of f is half of the tensor.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from checkpoints.tensor_files import ALIGNMENT, DTYPES, StoredTensor, aligned_copy
from checkpoints.threads import together
from sharding.arrays import ArrayInfo, Stored

SLICE_BYTES = 2**24  # of an array that are converted or compared at a time
BLOCKS = 64  # of a split letter, at most: on up to 64 devices a device's share is whole blocks
Bounds = tuple[tuple[int, int], ...]  # the elements [lo, hi) of each letter of an array


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a stored tensor, of `size` steps, which counts something of a letter.

    counts: "elements"; or of a letter that is split, "blocks" of `block` elements, or "positions" in a block.
    """

    letter: str
    size: int
    counts: Literal["elements", "blocks", "positions"] = "elements"
    block: int = 1

    def steps(self, lo: int, hi: int) -> slice:
        """The steps that contain the elements [lo, hi) of the letter."""
        return slice(None) if self.counts == "positions" else slice(lo // self.block, -(-hi // self.block))


class Factor(NamedTuple):
    """A factor of a dimension of a stored tensor: "(KH)D" has the factors K, H and D.

    Parts in brackets, as in "[H+V]" and "[1+1]", are one factor. ours: the slice of it that the array is.
    """

    size: int
    ours: slice


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a stored tensor contains an array.

    shape: of the tensor. factors: of its dimensions. axes: of the array, in the tensor's order.
    """

    shape: tuple[int, ...]
    factors: tuple[Factor, ...]
    axes: tuple[Axis, ...]

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """The rows [first, last) of the tensor that contain the steps [lo, hi) of the first axis."""
        size, ours = self.factors[0]
        width = self.shape[0] // size
        step = width * (ours.stop - ours.start) // self.axes[0].size
        return ours.start * width + lo * step, ours.start * width + hi * step

    def view(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the tensor -> a view of the array's part of them, one dimension for each axis."""
        rows = rows.reshape(-1, *(factor.size for factor in self.factors[1:]))
        rows = rows[:, *(factor.ours for factor in self.factors[1:])]
        return rows.reshape(-1, *(axis.size for axis in self.axes[1:]))

    def order(self, info: ArrayInfo) -> list[int]:
        """The indices of the axes in the order of the declared letters."""
        axes = list(enumerate(self.axes))
        return [i for letter in info.letters.upper() for i, axis in axes if axis.letter == letter]

    def block(self, letter: str) -> int:
        """Elements in a block of a letter; 1 if the letter is not split."""
        return max(axis.block for axis in self.axes if axis.letter == letter)


def layout_of(info: ArrayInfo, stored: Stored) -> Layout:
    """The layout of an array in one of the published tensors that are declared for it."""
    sizes = {"1": 1} | dict(stored.sizes) | dict(zip(info.letters.upper(), info.shape, strict=True))
    shape, factors, axes = [], [], []
    halves = {}  # letters of the tensor -> the axes of the array's letters that they are halves of
    for letter, outer, inner in (pair for pair in stored.pairs if pair[0] in info.letters.upper()):
        halves[outer] = Axis(letter, sizes[outer], "blocks", sizes[inner])
        halves[inner] = Axis(letter, sizes[inner], "positions")
    for joined, alone in re.findall(r"\((.*?)\)|(\[.*?\]|\w)", stored.letters):
        shape.append(1)
        for factor in re.findall(r"\[.*?\]|\w", joined or alone):
            parts = factor.strip("[]").split("+")
            part = stored.part if len(parts) > 1 else 0
            widths = (math.prod(sizes[letter] for letter in letters) for letters in parts)
            ends = list(itertools.accumulate(widths, initial=0))
            factors.append(Factor(ends[-1], slice(*ends[part : part + 2])))
            own = [letter for letter in parts[part] if letter != "1"]
            axes += [halves.get(letter, Axis(letter, sizes[letter])) for letter in own]
            shape[-1] *= ends[-1]
    return Layout(tuple(shape), tuple(factors), tuple(axes))


def file_layout(info: ArrayInfo) -> Layout:
    """The layout of an array in a converted folder."""
    sizes = dict(zip(info.letters, info.shape, strict=True))
    sharded = [letter for letter in info.letters if letter.islower()]
    whole = [letter for letter in info.letters if letter not in sharded]
    axes = [Axis(letter.upper(), sizes[letter]) for letter in sharded + whole]
    if whole and info.letters[-1] in sharded:
        letter, size = sharded[-1], sizes[sharded[-1]]
        blocks = math.gcd(size, BLOCKS)
        axes[len(sharded) - 1] = Axis(letter.upper(), blocks, "blocks", size // blocks)
        axes.append(Axis(letter.upper(), size // blocks, "positions"))
    shape = tuple(axis.size for axis in axes)
    return Layout(shape, tuple(Factor(size, slice(0, size)) for size in shape), tuple(axes))


def to_file_order(x, info: ArrayInfo):
    """An array in the declared order, or whole blocks of it -> the order of `file_layout`."""
    layout, sizes = file_layout(info), dict(zip(info.letters.upper(), x.shape, strict=True))
    order = layout.order(info)
    axes = [layout.axes[i] for i in order]
    shape = [axis.size if axis.counts == "positions" else sizes[axis.letter] // axis.block for axis in axes]
    return x.reshape(shape).transpose(np.argsort(order))


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensors of one declared array: together they are the first axis of `layout`."""

    info: ArrayInfo
    tensors: tuple[StoredTensor, ...]
    layout: Layout

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.tensors[0].dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the array when it has been read."""
        return math.prod(self.info.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files; of tensors that hold several arrays, this array's part."""
        share = math.prod(self.info.shape) / sum(math.prod(tensor.shape) for tensor in self.tensors)
        return round(share * sum(tensor.nbytes for tensor in self.tensors))

    @property
    def remote(self) -> bool:
        return any(tensor.remote for tensor in self.tensors)

    def read(self, bounds: Bounds) -> np.ndarray:
        """A part of the array in the declared order: a view of the file if it has that order, else a copy."""
        if not elements(bounds):
            return np.empty([hi - lo for lo, hi in bounds], self.dtype)
        axes, bounds = self.layout.axes, dict(zip(self.info.letters.upper(), bounds, strict=True))
        x = self._read(*(axis.steps(*bounds[axis.letter]) for axis in axes))
        x = x.transpose(self.layout.order(self.info))
        if any(axis.counts == "positions" for axis in axes):
            x = aligned_copy(x)  # `reshape` joins the two axes of a split letter by a copy
        block = {letter: self.layout.block(letter) for letter in bounds}
        x = x.reshape([-1 if block[letter] > 1 else hi - lo for letter, (lo, hi) in bounds.items()])
        first = {letter: lo % block[letter] for letter, (lo, _) in bounds.items()}  # position in its block
        return x[tuple(slice(first[key], first[key] + hi - lo) for key, (lo, hi) in bounds.items())]

    def _read(self, rows: slice, *rest: slice) -> np.ndarray:
        """[rows, *rest] of the array in the order of the tensors, which are concatenated."""
        reads, first = [], 0
        for tensor in self.tensors:
            alone = len(tensor.shape) < len(self.layout.shape)  # one expert's tensor: one step of the axis
            whole = self.layout.axes[0].size if len(self.tensors) == 1 else tensor.shape[0]
            steps = 1 if alone else whole
            lo, hi = (min(max(row - first, 0), steps) for row in (rows.start, rows.stop))
            if lo < hi:
                lo, hi = (0, tensor.shape[0]) if alone else self.layout.rows(lo, hi)
                reads.append(functools.partial(tensor.read, lo, hi, lambda x: self.layout.view(x)[:, *rest]))
            first += steps
        parts = together(reads) if self.remote and len(reads) > 1 else [read() for read in reads]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_slices(
        self, sources: Iterable["Source"], layouts: Iterable[Layout] = ()
    ) -> Iterator[tuple[str, int, list[np.ndarray]]]:
        """Read arrays with the letters of this one together, about SLICE_BYTES of this one at a time.

        Yields (letter, lo, slices): of each source the elements of one letter from `lo` on, and all of the
        other letters. The letter is not contracted. The slices' memory is released at the next step.
        layouts: of the files that slices are written to or compared with; where one of them splits the
        letter, a slice is whole blocks.
        """
        sources, sizes = list(sources), dict(zip(self.info.letters.upper(), self.info.shape, strict=True))
        letter = next(x.letter for x in self.layout.axes if x.letter not in self.info.contracted.upper())
        block, size = max(layout.block(letter) for layout in (self.layout, *layouts)), sizes[letter]
        step = max(SLICE_BYTES * size // self.nbytes // block * block, block)
        for lo in range(0, size, step):
            yield letter, lo, [source._read_range(letter, lo, min(lo + step, size)) for source in sources]
            for source in sources:
                source.forget()

    def _read_range(self, letter: str, lo: int, hi: int) -> np.ndarray:
        """The elements [lo, hi) of one letter and all of the others."""
        letters = zip(self.info.letters.upper(), self.info.shape, strict=True)
        return self.read(tuple((lo, hi) if x == letter else (0, size) for x, size in letters))

    def can_stay(self, part: np.ndarray) -> bool:
        """Whether XLA on a CPU uses this array in place, that is in the mapped file."""
        usable = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0
        return usable and any(tensor.holds(part) for tensor in self.tensors)

    def forget(self) -> None:
        """Release the pages of the files that were read."""
        for tensor in self.tensors:
            tensor.forget()


def elements(bounds: Bounds) -> int:
    return math.prod(hi - lo for lo, hi in bounds)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays of one type are equal, NaN and signs of zero included."""
    bits = np.dtype(f"u{x.itemsize}")
    return np.array_equal(x.view(bits), y.view(bits))
