"""Which tensors a converted folder will hold, and in which of its files."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from checkpoints.checkpoint import Checkpoint
from checkpoints.layouts import file_layout, to_file_order
from checkpoints.names import named_infos, stored_infos, type_name
from checkpoints.tensor_files import NewFile, array_bytes
from quantize import Format
from sharding.arrays import ArrayInfo

Fused = list[tuple[str, ArrayInfo]]  # the weights, by name, that one published tensor holds: read together


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Rows [lo, hi) of an array, which the file `file` holds as the tensor `name`."""

    file: str
    name: str
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True)
class PlannedArray:
    """An array of the new folder, and the tensors that will hold it. dtype: safetensors' name of its type."""

    info: ArrayInfo
    dtype: str
    parts: list[FilePart]

    def write(self, files: dict[str, NewFile], letter: str, lo: int, values: np.ndarray) -> None:
        """Write a slice of the array, which begins at element `lo` of a letter, to its files."""
        values = to_file_order(values, self.info)
        axes = file_layout(self.info).axes
        axis = [axis.letter for axis in axes].index(letter)
        lo //= axes[axis].block
        for part in self.parts:
            if axis:
                files[part.file].write(part.name, axis, lo, values[part.lo : part.hi])
            elif (first := max(part.lo, lo)) < (last := min(part.hi, lo + len(values))):
                files[part.file].write(part.name, 0, first - part.lo, values[first - lo : last - lo])


@dataclasses.dataclass(frozen=True)
class FileSet:
    """Files that are written together: one file of whole arrays, or several, for arrays that need more.

    weights: what the files are made of. arrays: what they hold, by name.
    files:   (type, shape) of each tensor, by the tensor's name, by the file's name.
    """

    weights: list[Fused]
    arrays: dict[str, PlannedArray]
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]]

    @property
    def nbytes(self) -> int:
        return sum(array_bytes(array.dtype, array.info.shape) for array in self.arrays.values())


def plan_files(checkpoint: Checkpoint, format: Format | None, dtype: str, file_bytes: int) -> list[FileSet]:
    """Divide the weights, in their order, among files of at most `file_bytes` of tensors."""
    file_sets: list[FileSet] = []

    def published_tensor(weight: tuple[str, ArrayInfo]) -> tuple[str, str]:
        return weight[1].stored.name, weight[1].letters

    for _, fused in itertools.groupby(named_infos(checkpoint.config, format=format), published_tensor):
        fused = list(fused)
        arrays = {
            name: PlannedArray(info, type_name(info, dtype), [])
            for weight in fused
            for name, info in stored_infos(*weight).items()
        }
        added = FileSet([fused], arrays, {})
        if file_sets and file_sets[-1].nbytes + added.nbytes <= file_bytes:
            file_sets[-1].weights.append(fused)
            file_sets[-1].arrays.update(arrays)
        else:
            file_sets.append(added)
    numbers = itertools.count(1)
    for file_set in file_sets:
        _fill_files(file_set, file_bytes, numbers)
    return file_sets


def _fill_files(file_set: FileSet, file_bytes: int, numbers: Iterator[int]) -> None:
    """Give each array of the set a place in a file; one that exceeds a file is cut along its first axis."""
    room = 0
    for name, array in file_set.arrays.items():
        shape = file_layout(array.info).shape
        row_bytes = array_bytes(array.dtype, shape[1:])
        rows = max(file_bytes // row_bytes, 1)
        for i, lo in enumerate(range(0, shape[0], rows)):
            hi = min(lo + rows, shape[0])
            if not file_set.files or (hi - lo) * row_bytes > room:
                file_set.files[f"weights-{next(numbers):05d}.safetensors"], room = {}, file_bytes
            room -= (hi - lo) * row_bytes
            file, part = next(reversed(file_set.files)), f"{name}/{i:05d}" if rows < shape[0] else name
            file_set.files[file][part] = array.dtype, (hi - lo, *shape[1:])
            array.parts.append(FilePart(file, part, lo, hi))


def divide(file_sets: list[FileSet], processes: int) -> list[list[FileSet]]:
    """Each process's share: about as many bytes as every other's, in the plan's order."""
    shares, loads = [[] for _ in range(processes)], [0] * processes
    for i in sorted(range(len(file_sets)), key=lambda i: -file_sets[i].nbytes):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += file_sets[i].nbytes
    return [[file_sets[i] for i in sorted(share)] for share in shares]
