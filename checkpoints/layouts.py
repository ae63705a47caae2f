"""In what order a file holds the elements of a weight, and how any part of it is read in ours.

Orders are written in letters as in Stored. A letter that is there twice is split: first the number of a
block, then the place in it. In our files the sharded letters come first, so that what a device holds of a
weight is a few long runs: "DkgH" is stored as "KGDH". Where that would leave single elements, a letter is
split: "Df" is stored as "FDF", and half of f is half of the tensor.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from checkpoints.tensor_files import ALIGNMENT, StoredTensor, aligned_copy, array_bytes
from sharding.arrays import ArrayInfo, Stored

SLICE_BYTES = 2**24  # of an array, converted or compared at a time
BLOCKS = 64  # into which a letter is split: a device's share is whole blocks on up to as many devices
Box = tuple[tuple[int, int], ...]  # of each letter of a weight, which elements [lo, hi)


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a stored tensor: one step along it is `width` elements along the letter.

    width: 1, but where the letter is split: there the size of a block, and 0 for the place in one.
    """

    letter: str
    size: int
    width: int = 1

    def steps(self, lo: int, hi: int) -> slice:
        """Those that have the elements [lo, hi) of the letter."""
        return slice(lo // self.width, -(-hi // self.width)) if self.width else slice(None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a stored tensor holds an array.

    shape:  the tensor's.
    within: its axes when what is joined is taken apart, the parts in brackets still together: of each its
            size, and which of it is the array's.
    axes:   those of the array, in the tensor's order.
    """

    shape: tuple[int, ...]
    within: tuple[tuple[int, slice], ...]
    axes: tuple[Axis, ...]

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """Where in the tensor's first dimension the steps [lo, hi) of the first axis are."""
        size, ours = self.within[0]
        width = self.shape[0] // size
        step = width * (ours.stop - ours.start) // self.axes[0].size
        return ours.start * width + lo * step, ours.start * width + hi * step

    def view(self, rows: np.ndarray) -> np.ndarray:
        """Such rows of the tensor -> what of them is the array's, axis by axis, in place."""
        rows = rows.reshape(-1, *(size for size, _ in self.within[1:]))
        rows = rows[:, *(ours for _, ours in self.within[1:])]
        return rows.reshape(-1, *(axis.size for axis in self.axes[1:]))

    @property
    def split(self) -> set[str]:
        """The letters that have two axes: the number of a block, and the place in it."""
        return {axis.letter for axis in self.axes if not axis.width}

    def order(self, info: ArrayInfo) -> list[int]:
        """Which of the axes are those of each of our letters in turn."""
        axes = list(enumerate(self.axes))
        return [i for letter in info.letters.upper() for i, axis in axes if axis.letter == letter]


def layout_of(info: ArrayInfo, stored: Stored) -> Layout:
    """How the tensor at one of the places that are declared for an array holds it."""
    sizes = dict(stored.sizes) | dict(zip(info.letters.upper(), info.shape, strict=True))
    shape, within, axes = [], [], []
    for joined, alone in re.findall(r"\((.*?)\)|(\[.*?\]|\w)", stored.letters):
        shape.append(1)
        for factor in re.findall(r"\[.*?\]|\w", joined or alone):
            parts = factor.strip("[]").split("+")
            part = stored.part if len(parts) > 1 else 0
            widths = (math.prod(sizes[letter] for letter in letters) for letters in parts)
            ends = list(itertools.accumulate(widths, initial=0))
            within.append((ends[-1], slice(*ends[part : part + 2])))
            axes += [Axis(letter, sizes[letter]) for letter in parts[part]]
            shape[-1] *= ends[-1]
    return Layout(tuple(shape), tuple(within), tuple(axes))


def file_layout(info: ArrayInfo) -> Layout:
    """How our files hold an array."""
    sizes = dict(zip(info.letters, info.shape, strict=True))
    sharded = [letter for letter in info.letters if letter.islower()]
    whole = [letter for letter in info.letters if letter not in sharded]
    axes = [Axis(letter.upper(), sizes[letter]) for letter in sharded + whole]
    if whole and info.letters[-1] in sharded:
        letter, size = sharded[-1], sizes[sharded[-1]]
        blocks = math.gcd(size, BLOCKS)
        axes[len(sharded) - 1] = Axis(letter.upper(), blocks, size // blocks)
        axes.append(Axis(letter.upper(), size // blocks, 0))
    shape = tuple(axis.size for axis in axes)
    return Layout(shape, tuple((size, slice(0, size)) for size in shape), tuple(axes))


def to_file_order(x, info: ArrayInfo):
    """An array in our layout, all of it or whole blocks of some letters -> in the order of our files."""
    layout, sizes = file_layout(info), dict(zip(info.letters.upper(), x.shape, strict=True))
    order = layout.order(info)
    axes = [layout.axes[i] for i in order]
    shape = [sizes[axis.letter] // axis.width if axis.width else axis.size for axis in axes]
    return x.reshape(shape).transpose(np.argsort(order))


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensors of one declared array, which follow one another along the first axis of `layout`."""

    info: ArrayInfo
    tensors: tuple[StoredTensor, ...]
    layout: Layout

    @property
    def nbytes(self) -> int:
        return array_bytes(self.tensors[0].dtype, self.info.shape)

    def read(self, box: Box) -> np.ndarray:
        """A part of the array in our layout: in place where the file has it so, else copied from there."""
        axes, bounds = self.layout.axes, dict(zip(self.info.letters.upper(), box, strict=True))
        width = {axis.letter: axis.width for axis in axes if axis.width}
        x = self._read(*(axis.steps(*bounds[axis.letter]) for axis in axes))
        x = x.transpose(self.layout.order(self.info))
        if self.layout.split:
            x = aligned_copy(x)
        x = x.reshape([-1 if width[letter] > 1 else hi - lo for letter, (lo, hi) in bounds.items()])
        first = {letter: lo % width[letter] for letter, (lo, _) in bounds.items()}  # in its block
        return x[tuple(slice(first[key], first[key] + hi - lo) for key, (lo, hi) in bounds.items())]

    def _read(self, rows: slice, *rest: slice) -> np.ndarray:
        """[rows, *rest] of the array in the order of the tensors, which it joins."""
        parts, first = [], 0
        for tensor in self.tensors:
            alone = len(tensor.shape) < len(self.layout.shape)  # of one expert: one step of the axis
            whole = self.layout.axes[0].size if len(self.tensors) == 1 else tensor.shape[0]
            steps = 1 if alone else whole
            lo, hi = (min(max(row - first, 0), steps) for row in (rows.start, rows.stop))
            if lo < hi:
                x = tensor.rows(*((0, tensor.shape[0]) if alone else self.layout.rows(lo, hi)))
                parts.append(self.layout.view(x)[:, *rest])
                tensor.read_ahead(parts[-1])
            first += steps
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_slices(
        self, sources: Iterable["Source"], layouts: Iterable[Layout] = ()
    ) -> Iterator[tuple[str, int, list[np.ndarray]]]:
        """Read arrays with the letters of this one together, about SLICE_BYTES of this one at a time.

        Yields (letter, lo, the slice of each source from `lo` on along the letter, which is not contracted).
        layouts: of the files that the slices are written to or compared with; each slice is whole blocks of
        a letter that one of them splits. The memory of a slice is given back when the next one is asked for.
        """
        sources, sizes = list(sources), dict(zip(self.info.letters.upper(), self.info.shape, strict=True))
        letter = next(x.letter for x in self.layout.axes if x.letter not in self.info.contracted.upper())
        axes = (axis for layout in (self.layout, *layouts) for axis in layout.axes)
        block, size = max(axis.width for axis in axes if axis.letter == letter), sizes[letter]
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
        """Whether XLA on a CPU uses this array where it is: in the file."""
        usable = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0
        return usable and any(tensor.holds(part) for tensor in self.tensors)

    def forget(self) -> None:
        """Give back the memory of what was read in place."""
        for tensor in self.tensors:
            tensor.forget()


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays of one type are equal, NaN and signs of zero included."""
    bits = np.dtype(f"u{x.itemsize}")
    return np.array_equal(x.view(bits), y.view(bits))
