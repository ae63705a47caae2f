"""Convert a model to a folder that loads fast: python3 convert_checkpoint.py SRC DST [--quantize FORMAT]

SRC is a folder or a hub id, DST a new folder. Weights go through memory in pieces, and DST appears when it is
whole. What was killed goes on where it stopped when it is started again, and ends byte for byte the same.
With --verify nothing is written: DST's checksums are computed again, and its weights compared with SRC's.
Several hosts that run the same command and share the disk divide the files among them.
"""
# ruff: noqa: E402  an interrupt is heard before the imports that take long

from terminal.command_line import hear_signals

if __name__ == "__main__":
    hear_signals()

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO

import jax
import numpy as np

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import UserError
from checkpoints.folders import FORMAT, INDEX, companions, read_index, read_json
from checkpoints.layouts import SLAB_BYTES, Source, file_layout, to_file_order
from checkpoints.names import FLOATS, named_infos, stored_infos, type_name
from checkpoints.progress import progress
from checkpoints.tensor_files import (
    DTYPES,
    PARTIAL,
    NewFile,
    TensorFile,
    array_bytes,
    partial_path,
    settle,
    sync,
)
from checkpoints.threads import in_order
from distributed.exchange import agree, from_first, gather, process_count, process_index
from quantize import FORMATS, Format
from sharding.arrays import ArrayInfo
from terminal.command_line import OneLineParser, run
from terminal.launch import add_processes, join_hosts

FILE_MIB = 1024
STATE = "conversion.json"  # in an unfinished folder: what it is to become; locked while it is written to
SECONDS_UNSEEN = 120  # a network disk shows a file that another host has written a minute later at most

Fused = list[tuple[str, ArrayInfo]]  # equal parts of one tensor of Hugging Face's: read together


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
        axes = file_layout(self.info).axes
        axis = [axis.letter for axis in axes].index(letter)
        lo //= axes[axis].width
        for part in self.parts:
            if axis:
                files[part.file].write(part.name, axis, lo, values[part.lo : part.hi])
            elif (first := max(part.lo, lo)) < (last := min(part.hi, lo + len(values))):
                files[part.file].write(part.name, 0, first - part.lo, values[first - lo : last - lo])


@dataclasses.dataclass(frozen=True)
class FileGroup:
    """Files that are written together, the weights that they hold, and the arrays that stand for those.

    files: (type, shape) of each tensor, by its name, by the name of the file.
    """

    weights: list[Fused]
    targets: dict[str, Target]
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]]

    @property
    def nbytes(self) -> int:
        return sum(array_bytes(x.dtype, x.info.shape) for x in self.targets.values())


def plan_files(checkpoint: Checkpoint, format: Format | None, dtype: str, file_bytes: int) -> list[FileGroup]:
    """Divide the weights, in their order, among files of at most `file_bytes` of tensors."""
    numbers, groups, last = itertools.count(1), [], None

    def stored(weight: tuple[str, ArrayInfo]) -> tuple[str, str]:
        return weight[1].stored[0].name, weight[1].letters

    for _, fused in itertools.groupby(named_infos(checkpoint.config, format=format), stored):
        fused = list(fused)
        targets = {
            name: Target(info, type_name(info, dtype), [])
            for weight in fused
            for name, info in stored_infos(*weight).items()
        }
        more = FileGroup([fused], targets, {})
        if last and last.nbytes + more.nbytes <= file_bytes:
            last.weights.append(fused)
            last.targets.update(targets)
        else:
            groups.append(last := more)
    for group in groups:
        _fill_files(group, file_bytes, numbers)
    return groups


def _fill_files(group: FileGroup, file_bytes: int, numbers: Iterator[int]) -> None:
    """One file, or several where one cannot hold it all: then arrays are cut along their first axis."""
    room = 0
    for name, target in group.targets.items():
        shape = file_layout(target.info).shape
        row = array_bytes(target.dtype, shape[1:])
        rows = max(file_bytes // row, 1)
        for i, lo in enumerate(range(0, shape[0], rows)):
            hi = min(lo + rows, shape[0])
            if not group.files or (hi - lo) * row > room:
                group.files[f"weights-{next(numbers):05d}.safetensors"], room = {}, file_bytes
            room -= (hi - lo) * row
            part = Part(next(reversed(group.files)), f"{name}/{i:05d}" if rows < shape[0] else name, lo, hi)
            group.files[part.file][part.name] = target.dtype, (hi - lo, *shape[1:])
            target.parts.append(part)


# ---------------------------------------------------------------------------------------------- converting


def convert(
    source: str,
    destination: str,
    format: Format | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_MIB * 2**20,
    allow_nonfinite: bool = False,
) -> None:
    """Write the model at `source` (a folder or hub id) to the new folder `destination` in our layout.

    format: of what a matmul contracts. dtype: of what is not in it and declares no other, "bfloat16" or
    "float32"; None: the source's. Raises UserError.
    """
    destination = pathlib.Path(os.path.abspath(os.path.expanduser(destination)))
    checkpoint = open_checkpoint(source)
    if checkpoint.format:
        was = f"{checkpoint.folder}: is {checkpoint.format} already"
        raise UserError(f"{was}; convert the original model instead")
    dtype = dtype or checkpoint.dtype
    identity = {
        "format": FORMAT, "dtype": dtype, "quantize": str(format or "none"),
        "file_bytes": file_bytes, "source": fingerprint(checkpoint),
    }  # fmt: skip
    agree({f"the conversion of {source}": identity}, "all processes must see the same files")
    if from_first(lambda: is_there(destination, identity)):
        return
    partial = destination.with_name(destination.name + ".incomplete")
    groups = plan_files(checkpoint, format, dtype, file_bytes)

    def complete() -> None:
        with room_in(partial):
            finish(checkpoint, partial, groups, identity)
        if fingerprint(checkpoint) != identity["source"]:
            raise UserError(f"{checkpoint.folder}: changed in the meantime; remove {partial} and run again")
        partial.rename(destination)
        sync(destination.parent)

    with contextlib.ExitStack() as stack:
        from_first(lambda: stack.enter_context(claimed(partial, identity)))
        stack.enter_context(shared(partial))
        write_weights(checkpoint, partial, groups, allow_nonfinite)
        gather("written")
        from_first(complete)


@contextlib.contextmanager
def room_in(folder: pathlib.Path):
    """Raises UserError where the disk has no more room."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(f"{folder}: {e.strerror}; make room and run again to go on") from None


def is_there(destination: pathlib.Path, identity: dict) -> bool:
    """Whether it has been converted before, to the same. Raises UserError if something else is there."""
    if not os.path.lexists(destination):
        return False
    if identity_of(destination) != identity:
        raise UserError(f"{destination}: exists and is something else; choose another name or remove it")
    open_checkpoint(str(destination))  # it may have been damaged since
    print(f"{destination} is there already, converted from this source", file=sys.stderr)
    return True


def fingerprint(checkpoint: Checkpoint) -> str:
    """A checksum of the small files, and of each large one's name, size, time of change and tensors."""
    digest = hashlib.sha256()
    for path in companions(checkpoint.folder):
        digest.update(hashlib.sha256(path.name.encode() + b"\0" + path.read_bytes()).digest())
    files = {tensor.file for source in checkpoint.sources.values() for tensor in source.tensors}
    for file in sorted(files, key=lambda file: file.path):
        tensors = [(x.name, x.dtype, x.shape) for x in file.tensors.values()]
        digest.update(repr((file.path.name, file.size, file.path.stat().st_mtime_ns, tensors)).encode())
    return digest.hexdigest()


def identity_of(folder: pathlib.Path) -> dict | None:
    """What a finished or unfinished folder is converted from and to; None if that is not known."""
    if (folder / INDEX).is_file():
        return read_json(folder / INDEX).get("metadata")
    return read_json(folder / STATE) if (folder / STATE).is_file() else None


@contextlib.contextmanager
def claimed(partial: pathlib.Path, identity: dict):
    """The unfinished folder, for this conversion alone. Raises UserError."""
    partial.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in partial.iterdir()} - {STATE}
    found = identity_of(partial) if names else identity
    with contextlib.ExitStack() as stack:
        if found:
            state = stack.enter_context((partial / STATE).open("a+"))
            lock(state, fcntl.LOCK_EX)
            stack.callback(_remove_if_empty, partial)
        if found != identity:
            raise UserError(f"{partial}: is left from another conversion; remove it, or choose another name")
        if not names:
            state.truncate(0)
            state.write(json.dumps(identity))
            state.flush()
            os.fsync(state.fileno())
            sync(partial)
        lock(state, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def shared(partial: pathlib.Path):
    """What process 0 has claimed, held by the others, too: they may still write when it has been killed."""
    if process_index() == 0:
        yield
        return
    await_files([partial / STATE])
    with (partial / STATE).open() as state:
        lock(state, fcntl.LOCK_SH)
        yield


def lock(file: IO, how: int) -> None:
    """Lock a file where the disk can. Raises UserError if another conversion holds it.

    A file, open for reading and writing: NFS asks for that, and tells other hosts of no lock on a folder.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{pathlib.Path(file.name).parent}: another conversion is writing there") from None
    except OSError as e:
        if how == fcntl.LOCK_EX:
            print(f"{file.name}: {e.strerror}; start no other conversion to there", file=sys.stderr)


def await_files(paths: Iterable[pathlib.Path]) -> None:
    """Wait until files that other processes have written are seen here, too. Raises UserError."""
    end = time.monotonic() + SECONDS_UNSEEN
    for path in paths:
        while not path.exists():
            if time.monotonic() > end:
                raise UserError(f"{path}: is not there, though another process wrote it; is the disk shared?")
            time.sleep(0.1)


def _remove_if_empty(partial: pathlib.Path) -> None:
    """Leave nothing of a conversion that wrote no weights."""
    if partial.exists() and {path.name for path in partial.iterdir()} <= {STATE}:
        (partial / STATE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # NFS keeps a file that is open, under another name
            partial.rmdir()


def write_text(path: pathlib.Path, text: str) -> None:
    """A small file that is there as a whole or not at all, even if the machine stops."""
    partial_path(path).write_text(text)
    settle(path)
    sync(path.parent)


def missing(folder: pathlib.Path, groups: list[FileGroup]) -> list[int]:
    """Which groups' files are not there yet; those that were begun are removed. UserError without room."""
    for stale in folder.glob("*" + PARTIAL):
        stale.unlink()
    found = [i for i, group in enumerate(groups) if checksums_of(folder, group) is None]
    left = sum(groups[i].nbytes for i in found)
    if left > (free := shutil.disk_usage(folder).free):
        raise UserError(f"{folder}: {left / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free")
    return found


def divide(groups: list[FileGroup], count: int) -> list[list[FileGroup]]:
    """So many shares of about as many bytes each; in a share the order stays."""
    shares, loads = [[] for _ in range(count)], [0] * count
    for i in sorted(range(len(groups)), key=lambda i: -groups[i].nbytes):
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += groups[i].nbytes
    return [[groups[i] for i in sorted(share)] for share in shares]


def write_weights(
    checkpoint: Checkpoint, folder: pathlib.Path, groups: list[FileGroup], allow_nonfinite: bool
) -> None:
    """Write the files that are not there yet, this process its share of them."""
    todo = divide([groups[i] for i in from_first(lambda: missing(folder, groups))], process_count())
    todo, checksums, first = todo[process_index()], {}, process_index() == 0

    def tasks(opened: contextlib.ExitStack):
        for group in todo:
            new = {name: NewFile(folder / name, tensors) for name, tensors in group.files.items()}
            for file in new.values():
                opened.enter_context(file)
            for fused in group.weights:
                yield group, fused, new

    def work(task):
        group, fused, new = task
        for letter, lo, arrays in convert_fused(checkpoint, fused, group, allow_nonfinite):
            for name, values in arrays.items():
                group.targets[name].write(new, letter, lo, values)
                with bar.get_lock():
                    bar.update(values.nbytes)
        names = [name for weight in fused for name in stored_infos(*weight)]
        parts = [part for name in names for part in group.targets[name].parts]
        return *task, {part.name: new[part.file].checksum(part.name) for part in parts}

    with (
        progress("converting", sum(group.nbytes for group in todo), show=first) as bar,
        room_in(folder),
        contextlib.ExitStack() as opened,
        contextlib.closing(in_order(work, tasks(opened), ahead=32)) as results,
    ):
        for group, fused, new, found in results:
            checksums |= found
            if fused is group.weights[-1]:
                for file in new.values():
                    file.finish(checksums)


def checksums_of(folder: pathlib.Path, group: FileGroup) -> dict[str, str] | None:
    """The checksums in the group's files, if these are there."""
    checksums = {}
    for name, tensors in group.files.items():
        if not (folder / name).exists():
            return None
        try:
            file = TensorFile(folder / name)
        except UserError as e:
            raise UserError(f"{e}, or remove {folder} and run again") from None
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors.values()} != tensors:
            raise UserError(f"{folder / name}: is left from another conversion; remove {folder}")
        checksums |= file.metadata
    return checksums


def convert_fused(checkpoint: Checkpoint, fused: Fused, group: FileGroup, allow_nonfinite: bool):
    """Yields slabs of weights that are read together: (letter, first element along it, array by name)."""
    first = checkpoint.sources[fused[0][0]]
    letter, ranges = first.slabs(file_layout(x) for x in stored_infos(*fused[0]).values())
    for lo, hi in ranges:
        arrays = {}
        for name, info in fused:
            source, names = checkpoint.sources[name], list(stored_infos(name, info))
            dtype = DTYPES[group.targets[names[-1]].dtype]
            made = [checkpoint.sources[x].slab(letter, lo, hi) for x in checkpoint.stored(name, info)]
            if len(made) < len(names):
                made = form_on_host(*made, info)
            elif not info.quantization:
                made = [made[0].astype(dtype, copy=False)]
            if not (allow_nonfinite or is_finite(made[-1])):  # of a quantized weight the scale
                refuse_nonfinite(source, dtype)
            arrays |= zip(names, made, strict=True)
        yield letter, lo, arrays
        for name, _ in fused:
            checkpoint.sources[name].forget()


def refuse_nonfinite(source: Source, dtype: np.dtype):
    """Raises UserError naming the tensor that holds NaN or Inf, or what becomes that in `dtype`."""
    for what, as_type in (("NaN or Inf", None), (f"numbers that are too large for {dtype}", dtype)):
        for tensor in source.tensors:
            if not is_finite(tensor.values, as_type):
                where = f"{tensor.file.path}: tensor {tensor.name}"
                raise UserError(f"{where} holds {what}; --allow-nonfinite converts it anyway")


def form_on_host(x: np.ndarray, info: ArrayInfo) -> list[np.ndarray]:
    """A weight's components as files have them."""
    x = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    return [np.asarray(component) for component in _form(x, dataclasses.replace(info, stored=()))]


@functools.partial(jax.jit, static_argnames="info")
def _form(x: jax.Array, info: ArrayInfo) -> tuple[jax.Array, jax.Array]:
    return info.quantization.pack(info.quantization.encode(x, info), info)


def is_finite(x: np.ndarray, dtype: np.dtype | None = None) -> bool:
    """Whether no float in x, as `dtype`, is NaN or infinite: their exponents have all bits set."""
    rows = max(SLAB_BYTES * len(x) // x.nbytes, 1)
    for first in range(0, len(x), rows):
        part = x[first : first + rows].astype(dtype or x.dtype, copy=False)
        bits = np.dtype(f"u{part.itemsize}")
        infinity = np.array(np.inf, part.dtype).view(bits)
        if (part.view(bits) << 1).max() >= infinity << 1:
            return False
    return True


def finish(checkpoint: Checkpoint, folder: pathlib.Path, groups: list[FileGroup], identity: dict) -> None:
    """Add the model's small files and the index, and leave nothing else."""
    await_files(folder / name for group in groups for name in group.files)
    checksums = {name: x for group in groups for name, x in checksums_of(folder, group).items()}
    weight_map = {name: file for group in groups for file, tensors in group.files.items() for name in tensors}
    files = {name: {"bytes": (folder / name).stat().st_size} for name in sorted(set(weight_map.values()))}
    for path in companions(checkpoint.folder):
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

    Returns what was found, in sentences. Raises UserError naming the first tensor or file that is wrong.
    """
    ours = open_checkpoint(folder)
    if not ours.converted:
        raise UserError(f"{ours.folder}: is not a converted folder; there are no checksums in it")
    index = read_index(ours.folder)
    known = {name: facts.get("sha256") for name, facts in index["files"].items()}
    weights = set(index["weight_map"].values())
    for path in {ours.folder / name for name in known.keys() - weights} | set(companions(ours.folder)):
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != known.get(path.name):
            raise UserError(f"{path}: is not the file that {INDEX} knows")
    tensors = [tensor for source in ours.sources.values() for tensor in source.tensors]
    with progress("checksums", sum(tensor.stop - tensor.start for tensor in tensors)) as bar:
        for tensor, checksum in zip(
            tensors, in_order(lambda x: x.checksum(), tensors, ahead=32), strict=True
        ):
            if checksum != index["checksums"][tensor.name]:
                raise UserError(
                    f"{tensor.file.path}: tensor {tensor.name} is damaged; convert the model again"
                )
            bar.update(tensor.stop - tensor.start)
    found = [f"{folder}: the checksums of {len(tensors)} tensors and of the model's other files are right"]
    if source is not None:
        found.append(f"{folder}: {_compare(ours, open_checkpoint(source))}")
    return found


def _compare(ours: Checkpoint, theirs: Checkpoint) -> str:
    if theirs.format:
        raise UserError(
            f"{theirs.folder}: is {theirs.format}; give the float model that {ours.folder} was made of"
        )
    if theirs.config != ours.config:
        raise UserError(f"{theirs.folder}: is another model than {ours.folder}")

    def compare(weight: tuple[str, ArrayInfo]) -> tuple[str, float, int]:
        name, info = weight
        exact = [theirs.sources[x] for x in theirs.stored(name, info)]
        made = [ours.sources[x] for x in stored_infos(name, info)]
        whole = theirs.sources[name]
        letter, ranges = whole.slabs(source.layout for source in made)
        worst = 0.0
        for lo, hi in ranges:
            x, y = ([source.slab(letter, lo, hi) for source in sources] for sources in (exact, made))
            if len(x) == len(y):
                worst = max(worst, *map(_difference, x, y))
            else:
                worst = max(worst, info.quantization.error(*x, *y, info))
            for source in (*exact, *made):
                source.forget()
        return name, worst, whole.nbytes

    total = sum(theirs.sources[name].nbytes for name, _ in named_infos(ours.config))
    with progress("comparing", total) as bar:
        for name, worst, nbytes in in_order(compare, named_infos(ours.config, format=ours.format), ahead=32):
            if worst > 1:
                raise UserError(f"{ours.folder}: {name} is not what {theirs.folder} has")
            bar.update(nbytes)
    kind = f"in {ours.dtype} exactly"
    if ours.format:
        kind = f"within half a step of {ours.format} of"
    return f"the weights are {kind} those of {theirs.folder}"


def _difference(x: np.ndarray, ours: np.ndarray) -> float:
    """0 if ours is x in its own type, bit for bit; else infinite."""
    bits = np.dtype(f"u{ours.itemsize}")
    same = np.array_equal(x.astype(ours.dtype, copy=False).view(bits), ours.view(bits))
    return 0.0 if same else math.inf


def main(arguments: list[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder, a GGUF file, or OWNER/NAME[@REVISION] on the hub")
    add("destination", metavar="DST", nargs="?", help="the new folder")
    add(
        "--quantize",
        choices=FORMATS,
        default="none",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}; g64: a scale for every 64 weights, not 128; default: none",
    )
    add(
        "--dtype",
        choices=FLOATS,
        help="of what stays float; default: bfloat16, or float32 if SRC has that",
    )
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
    add_processes(parser)
    args = parser.parse_args(arguments)
    parser.check_positive(args, "file_mib", "timeout")
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy, and is not needed
    if args.destination is None and not args.verify:
        parser.error("the following arguments are required: DST")
    join_hosts(args)
    if args.verify:
        folder, source = (args.destination, args.source) if args.destination else (args.source, None)
        found = from_first(lambda: verify(folder, source))
        if process_index() == 0:
            print("\n".join(found))
    else:
        convert(
            args.source, args.destination, FORMATS[args.quantize], args.dtype, args.file_mib * 2**20,
            args.allow_nonfinite,
        )  # fmt: skip


if __name__ == "__main__":
    run(main)
