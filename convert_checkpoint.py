"""Convert a model to a folder that loads fast: python3 convert_checkpoint.py SRC DST [--quantize int8|none]

SRC is a folder or a hub id, DST a new folder. Weights go through memory in pieces, and DST appears when it is
whole. What was killed goes on where it stopped when it is started again, and ends byte for byte the same.
With --verify nothing is written: DST's checksums are computed again, and its weights compared with SRC's.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator

import jax
import numpy as np

from checkpoint import (
    COMPANIONS,
    FORMAT,
    INDEX,
    TYPES,
    Checkpoint,
    Source,
    axes_of,
    file_letters,
    in_order,
    named_infos,
    open_checkpoint,
    read_index,
    read_json,
    stored_infos,
    stored_shape,
    to_file_order,
)  # fmt: skip
from command_line import OneLineParser, interrupt, progress, run
from model import ArrayInfo
from quantize import quantize_large
from tensor_files import DTYPES, NewFile, TensorFile

FILE_MIB = 1024
SLAB_BYTES = 2**24  # of a stored weight, read and converted at a time
STATE = "conversion.json"  # in an unfinished folder: what it is to become

Group = list[tuple[str, ArrayInfo]]  # weights that Hugging Face stores in one tensor: read together


# -------------------------------------------------------------------------------------- what goes where


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements [lo, hi) along the first axis of an array, under the name `name` in a file."""

    file: str
    name: str
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True)
class Target:
    """An array of the new folder, in the order of its files."""

    info: ArrayInfo
    dtype: str
    parts: list[Part]

    def write(self, files: dict[str, NewFile], letter: str, lo: int, values: np.ndarray) -> None:
        """Put values, in our layout and from `lo` on along `letter`, in their places."""
        values = to_file_order(values, self.info)
        axis = axes_of(file_letters(self.info)).index((letter, 0))
        for part in self.parts:
            if axis:
                files[part.file].write(part.name, axis, lo, values[part.lo : part.hi])
            elif (first := max(part.lo, lo)) < (last := min(part.hi, lo + len(values))):
                files[part.file].write(part.name, 0, first - part.lo, values[first - lo : last - lo])


@dataclasses.dataclass(frozen=True)
class Batch:
    """Weights, the arrays that stand for them, and the files that hold just those: written together.

    files: (type, shape) of each tensor, by its name, by the name of the file.
    """

    groups: list[Group]
    targets: dict[str, Target]
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(x.info.shape) * DTYPES[x.dtype].itemsize for x in self.targets.values())


def plan(checkpoint: Checkpoint, quantized: bool, dtype: str, file_bytes: int) -> list[Batch]:
    """Divide the weights, in their order, among files of at most `file_bytes` of tensors."""
    dtypes = {"values": "I8", "scale": "F32"}
    numbers, batches, last = itertools.count(1), [], None

    def stored_name(weight: tuple[str, ArrayInfo]) -> str:
        return weight[1].stored[0][0]

    for _, group in itertools.groupby(named_infos(checkpoint.config), stored_name):
        group = list(group)
        targets = {
            name: Target(info, dtypes.get(name.rpartition(".")[2], TYPES[dtype]), [])
            for weight in group
            for name, info in stored_infos(*weight, quantized).items()
        }
        more = Batch([group], targets, {})
        if last and last.nbytes + more.nbytes <= file_bytes:
            last.groups.append(group)
            last.targets.update(targets)
        else:
            batches.append(last := more)
    for batch in batches:
        _fill_files(batch, file_bytes, numbers)
    return batches


def _fill_files(batch: Batch, file_bytes: int, numbers: Iterator[int]) -> None:
    """One file, or several where one cannot hold it all: then arrays are cut along their first axis."""
    room = 0
    for name, target in batch.targets.items():
        shape = stored_shape(file_letters(target.info), target.info)
        row = math.prod(shape[1:]) * DTYPES[target.dtype].itemsize
        rows = max(file_bytes // row, 1)
        for i, lo in enumerate(range(0, shape[0], rows)):
            hi = min(lo + rows, shape[0])
            if not batch.files or (hi - lo) * row > room:
                batch.files[f"weights-{next(numbers):05d}.safetensors"], room = {}, file_bytes
            room -= (hi - lo) * row
            part = Part([*batch.files][-1], f"{name}/{i:05d}" if rows < shape[0] else name, lo, hi)
            batch.files[part.file][part.name] = target.dtype, (hi - lo, *shape[1:])
            target.parts.append(part)


# ---------------------------------------------------------------------------------------------- converting


def convert(
    source: str,
    destination: str,
    quantized: bool = False,
    dtype: str | None = None,
    file_bytes: int = FILE_MIB * 2**20,
    allow_nonfinite: bool = False,
) -> None:
    """Write the model at `source` (a folder or hub id) to the new folder `destination` in our layout.

    dtype: of what is not int8, "bfloat16" or "float32"; None: the source's. Raises ValueError.
    """
    destination = pathlib.Path(os.path.expanduser(destination))
    checkpoint = open_checkpoint(source)
    if checkpoint.quantized and (dtype or not quantized):
        raise ValueError(f"{checkpoint.folder}: is int8 already; convert the original model instead")
    dtype = dtype or checkpoint.dtype
    identity = {
        "format": FORMAT, "dtype": dtype, "quantize": "int8" if quantized else "none",
        "file_bytes": file_bytes, "source": fingerprint(checkpoint),
    }  # fmt: skip
    if destination.exists():
        if identity_of(destination) != identity:
            raise ValueError(f"{destination}: exists and is something else; choose another name or remove it")
        print(f"{destination} is there already, converted from this source", file=sys.stderr)
        return
    partial = destination.with_name(destination.name + ".incomplete")
    partial.mkdir(parents=True, exist_ok=True)
    with claimed(partial, identity):
        batches = plan(checkpoint, quantized, dtype, file_bytes)
        try:
            checksums = write_weights(checkpoint, partial, batches, quantized, allow_nonfinite)
            finish(checkpoint, partial, batches, checksums, identity)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(f"{partial}: the disk is full; free some room and run again to go on") from None
        partial.rename(destination)
        sync(destination.parent)


def fingerprint(checkpoint: Checkpoint) -> str:
    """A checksum of the configuration and of each tensor's name, type, shape and first bytes."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    tensors = {tensor for source in checkpoint.sources.values() for tensor in source.tensors}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.name, tensor.start)):
        first = tensor.file.mapped[tensor.start : min(tensor.start + 256, tensor.stop)]
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode() + first)
    return digest.hexdigest()


def identity_of(folder: pathlib.Path) -> dict | None:
    """What a finished or unfinished folder is converted from and to; None if that is not known."""
    if (folder / STATE).is_file():
        return read_json(folder / STATE)
    return read_json(folder / INDEX).get("metadata") if (folder / INDEX).is_file() else None


@contextlib.contextmanager
def claimed(partial: pathlib.Path, identity: dict):
    """The unfinished folder, for this process alone and for this conversion. Raises ValueError."""
    with contextlib.ExitStack() as stack:
        folder = os.open(partial, os.O_RDONLY)
        stack.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another conversion is writing there") from None
        if {path.name for path in partial.iterdir()} - {STATE} and identity_of(partial) != identity:
            raise ValueError(f"{partial}: is left from another conversion; remove it, or choose another name")
        stack.callback(_remove_if_empty, partial)
        write_text(partial / STATE, json.dumps(identity))
        yield


def _remove_if_empty(partial: pathlib.Path) -> None:
    """Leave nothing of a conversion that wrote no weights."""
    if partial.exists() and {path.name for path in partial.iterdir()} <= {STATE}:
        (partial / STATE).unlink(missing_ok=True)
        partial.rmdir()


def write_text(path: pathlib.Path, text: str) -> None:
    """A small file that is there as a whole or not at all, even if the machine stops."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    sync(partial)
    partial.rename(path)


def sync(path: pathlib.Path) -> None:
    """Wait until a file or a folder's names are safe on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_weights(
    checkpoint: Checkpoint, folder: pathlib.Path, batches: list[Batch], quantized: bool, allow_nonfinite: bool
) -> dict[str, str]:
    """Write the files that are not there yet; returns the checksum of every tensor."""
    checksums, todo = {}, []
    for batch in batches:
        found = checksums_of(folder, batch)
        checksums |= found or {}
        todo += [batch] if found is None else []
    total, left = (sum(batch.nbytes for batch in some) for some in (batches, todo))
    if left > (free := shutil.disk_usage(folder).free):
        raise ValueError(f"{folder}: {left / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free")

    def tasks(opened: contextlib.ExitStack):
        for batch in todo:
            files = {
                name: opened.enter_context(NewFile(folder / name, tensors))
                for name, tensors in batch.files.items()
            }
            for group in batch.groups:
                yield batch, files, group

    def work(task: tuple[Batch, dict[str, NewFile], Group]):
        batch, files, group = task
        for letter, lo, arrays in convert_group(checkpoint, group, batch, quantized, allow_nonfinite):
            for name, values in arrays.items():
                batch.targets[name].write(files, letter, lo, values)
                with bar.get_lock():
                    bar.update(values.nbytes)
        names = [name for weight in group for name in stored_infos(*weight, quantized)]
        parts = [part for name in names for part in batch.targets[name].parts]
        found = {part.name: files[part.file].checksum(part.name) for part in parts}
        return files if group is batch.groups[-1] else {}, found

    with (
        progress("converting", total, total - left) as bar,
        contextlib.ExitStack() as opened,
        contextlib.closing(in_order(work, tasks(opened), ahead=32)) as results,
    ):
        for whole, found in results:
            checksums |= found
            for file in whole.values():
                file.finish({name: checksums[name] for name in file.tensors})
    return checksums


def checksums_of(folder: pathlib.Path, batch: Batch) -> dict[str, str] | None:
    """The checksums in the batch's files, if these are there."""
    checksums = {}
    for name, tensors in batch.files.items():
        if not (folder / name).exists():
            return None
        file = TensorFile(folder / name)
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors.values()} != tensors:
            raise ValueError(f"{folder / name}: is left from another conversion; remove {folder}")
        checksums |= file.metadata
    return checksums


def slabs(source: Source) -> tuple[str, list[tuple[int, int]]]:
    """How to divide a weight: a letter that is nowhere split and no scale is summed over, and its ranges."""
    info = source.info
    whole = [
        letter
        for letter, _ in axes_of(source.letters)
        if letter.isalpha()
        and letter not in info.contracted.upper()
        and (letter, 1) not in axes_of(source.letters) + axes_of(file_letters(info))
    ]
    size = info.shape[info.letters.upper().index(whole[0])]
    rows = max(SLAB_BYTES * size // source.nbytes, 1)
    return whole[0], [(lo, min(lo + rows, size)) for lo in range(0, size, rows)]


def convert_group(checkpoint: Checkpoint, group: Group, batch: Batch, quantized: bool, allow_nonfinite: bool):
    """Yields slabs of the weights of a group: (letter, first element along it, array by name)."""
    letter, ranges = slabs(checkpoint.sources[group[0][0]])
    for lo, hi in ranges:
        arrays = {}
        for name, info in group:
            source, names = checkpoint.sources[name], list(stored_infos(name, info, quantized))
            x = source.read(box_of(info, letter, lo, hi))
            made = (
                quantize_on_host(x, info)
                if len(names) == 2
                else [x.astype(DTYPES[batch.targets[name].dtype], copy=False)]
            )
            if not (allow_nonfinite or is_finite(made[-1])):  # int8: the scale tells
                wrong = [
                    tensor for tensor in source.tensors if not is_finite(tensor.values)
                ] or source.tensors
                where = f"{wrong[0].file.path}: tensor {wrong[0].name}"
                raise ValueError(f"{where} holds NaN or Inf; --allow-nonfinite converts it anyway")
            arrays |= zip(names, made, strict=True)
        yield letter, lo, arrays
        for name, _ in group:
            checkpoint.sources[name].forget()


def quantize_on_host(x: np.ndarray, info: ArrayInfo) -> list[np.ndarray]:
    """The int8 values and the scale."""
    x = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    q = jax.jit(quantize_large, static_argnums=1)(x, info.contracted_axes)
    return [np.asarray(q.values), np.asarray(q.scale)]


def box_of(info: ArrayInfo, letter: str, lo: int, hi: int):
    """All of a weight but for one letter's range."""
    return tuple(
        (lo, hi) if x == letter else (0, n) for x, n in zip(info.letters.upper(), info.shape, strict=True)
    )


def is_finite(x: np.ndarray) -> bool:
    """Whether no float in x is NaN or infinite: their exponents have all bits set."""
    bits = np.dtype(f"u{x.itemsize}")
    infinity = np.array(np.inf, x.dtype).view(bits)
    return bool((x.view(bits) << 1).max() < infinity << 1)


def finish(
    checkpoint: Checkpoint, folder: pathlib.Path, batches: list[Batch], checksums, identity: dict
) -> None:
    """Add the model's small files and the index, and leave nothing else."""
    for stale in folder.glob("*.partial"):
        stale.unlink()
    weight_map = {
        name: file for batch in batches for file, tensors in batch.files.items() for name in tensors
    }
    files = {name: {"bytes": (folder / name).stat().st_size} for name in sorted(set(weight_map.values()))}
    for path in sorted(path for pattern in COMPANIONS for path in checkpoint.folder.glob(pattern)):
        if path.is_file():
            content = path.read_bytes()
            (folder / path.name).write_bytes(content)
            sync(folder / path.name)
            files[path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    index = {"metadata": identity, "weight_map": weight_map, "checksums": checksums, "files": files}
    write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    (folder / STATE).unlink()
    sync(folder)


# ----------------------------------------------------------------------------------------------- verifying


def verify(folder: str, source: str | None = None) -> list[str]:
    """Compute the checksums of a converted folder again, and compare its weights with those of `source`.

    Returns what was found, in sentences. Raises ValueError naming the first tensor or file that is wrong.
    """
    ours = open_checkpoint(folder)
    if not ours.converted:
        raise ValueError(f"{ours.folder}: is not a converted folder; there are no checksums in it")
    index = read_index(ours.folder)
    for name, facts in index["files"].items():
        if "sha256" in facts:
            path = ours.folder / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != facts["sha256"]:
                raise ValueError(f"{path}: is not the file that {INDEX} knows")
    tensors = [tensor for source in ours.sources.values() for tensor in source.tensors]
    with progress("checksums", sum(tensor.stop - tensor.start for tensor in tensors)) as bar:
        for tensor, checksum in zip(
            tensors, in_order(lambda x: x.checksum(), tensors, ahead=32), strict=True
        ):
            if checksum != index["checksums"][tensor.name]:
                raise ValueError(
                    f"{tensor.file.path}: tensor {tensor.name} is damaged; convert the model again"
                )
            bar.update(tensor.stop - tensor.start)
    found = [f"{folder}: the checksums of {len(tensors)} tensors and of the model's other files are right"]
    if source is not None:
        found.append(f"{folder}: {_compare(ours, open_checkpoint(source))}")
    return found


def _compare(ours: Checkpoint, theirs: Checkpoint) -> str:
    if theirs.config != ours.config or theirs.quantized:
        raise ValueError(f"{theirs.folder}: is int8, or another model than {ours.folder}; give its source")

    def compare(weight: tuple[str, ArrayInfo]) -> tuple[str, float, int]:
        name, info = weight
        source, worst = theirs.sources[name], 0.0
        letter, ranges = slabs(source)
        parts = stored_infos(name, info, ours.quantized)
        for lo, hi in ranges:
            x = source.read(box_of(info, letter, lo, hi))
            here = [ours.sources[part].read(box_of(parts[part], letter, lo, hi)) for part in parts]
            worst = max(worst, _int8_error(x, *here, info) if len(here) > 1 else _difference(x, *here))
            for read in (source, *(ours.sources[part] for part in parts)):
                read.forget()
        return name, worst, source.nbytes

    total = sum(source.nbytes for source in theirs.sources.values())
    with progress("comparing", total) as bar:
        for name, worst, nbytes in in_order(compare, named_infos(ours.config), ahead=32):
            if worst > 1:
                raise ValueError(f"{ours.folder}: {name} is not what {theirs.folder} has")
            bar.update(nbytes)
    kind = "within half a step of int8 of" if ours.quantized else f"in {ours.dtype} exactly"
    return f"the weights are {kind} those of {theirs.folder}"


def _difference(x: np.ndarray, ours: np.ndarray) -> float:
    """0 if ours is x in its own type, bit for bit; else infinite."""
    bits = np.dtype(f"u{ours.itemsize}")
    same = np.array_equal(x.astype(ours.dtype, copy=False).view(bits), ours.view(bits))
    return 0.0 if same else math.inf


def _int8_error(x: np.ndarray, values: np.ndarray, scale: np.ndarray, info: ArrayInfo) -> float:
    """The largest error, in half steps; infinite if a scale is not that of the largest element."""
    x = x.astype(np.float32)
    step = np.expand_dims(scale, info.contracted_axes)
    largest = np.abs(x).max(info.contracted_axes, keepdims=True) / np.float32(127)
    if not np.allclose(step, largest, rtol=1e-6, atol=0, equal_nan=True):
        return math.inf
    step, known = np.where(np.isfinite(step), step, 1), np.isfinite(largest)
    error = np.max(np.abs(x - values * step) / np.where(step > 0, step, 1), initial=0, where=known)
    # Rounding of x / step and of values * step: at most 127 steps times 2^-23 each.
    return float(error) / (0.5 + 2**-15)


def main(arguments: list[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder, or OWNER/NAME or OWNER/NAME@REVISION on the hub")
    add("destination", metavar="DST", nargs="?", help="the new folder")
    add("--quantize", choices=("int8", "none"), default="none", help="default: none")
    add("--dtype", choices=tuple(TYPES), help="of what is not int8; default: the source's")
    add(
        "--file-mib",
        type=int,
        default=FILE_MIB,
        metavar="N",
        help=f"size of a file, at most; default: {FILE_MIB}",
    )
    add("--allow-nonfinite", action="store_true", help="convert weights that are NaN or infinite, too")
    add(
        "--verify",
        action="store_true",
        help="write nothing: check DST and compare it with SRC, or given one folder, check that",
    )
    args = parser.parse_args(arguments)
    parser.check_positive(args, "file_mib")
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy, and is not needed
    if args.verify:
        folder, source = (args.destination, args.source) if args.destination else (args.source, None)
        print("\n".join(verify(folder, source)))
    elif args.destination is None:
        parser.error("the following arguments are required: DST")
    else:
        convert(
            args.source, args.destination, args.quantize == "int8", args.dtype, args.file_mib * 2**20,
            args.allow_nonfinite,
        )  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    run(main)
