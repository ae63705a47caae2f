"""Writing a converted folder: weights are read in slices, quantized, and written to their places in files.

A conversion that was stopped goes on with the files that are missing. The folder is on a disk (unfinished.py)
or in a bucket (bucket_folder.py).
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
from collections.abc import Iterator

import jax
import numpy as np

from checkpoints.checkpoint import Checkpoint
from checkpoints.file_plan import FileSet, Fused, divide
from checkpoints.folders import companions
from checkpoints.layouts import SLICE_BYTES, Source, file_layout
from checkpoints.names import stored_infos
from checkpoints.remote.bucket_folder import NewBucketFolder
from checkpoints.tensor_files import DTYPES
from checkpoints.threads import WAITING, in_order
from checkpoints.unfinished import NewFolder, source_fingerprint
from distributed.exchange import from_first, gather, process_count, process_index
from feedback.errors import UserError
from feedback.progress import progress
from sharding.arrays import ArrayInfo

NewConversion = NewFolder | NewBucketFolder


def write_weights(
    checkpoint: Checkpoint, folder: NewConversion, file_sets: list[FileSet], allow_nonfinite: bool
) -> None:
    """Write the weights files that are not there yet; each process writes its share and waits for the others.

    Raises UserError if a weight is NaN or infinite, or if the disk has too little room.
    """
    missing = [file_sets[i] for i in from_first(lambda: _missing(folder, file_sets))]
    share, first = divide(missing, process_count())[process_index()], process_index() == 0
    folder.check_room(missing, share)

    def tasks(opened: contextlib.ExitStack):
        for file_set in share:
            files = {name: folder.new_file(name, tensors) for name, tensors in file_set.files.items()}
            for new in files.values():
                opened.callback(new.file.close)
            for fused in file_set.weights:
                yield file_set, fused, files

    def convert(task):
        file_set, fused, files = task
        for letter, lo, arrays in convert_fused(checkpoint, fused, file_set, allow_nonfinite):
            for name, values in arrays.items():
                file_set.arrays[name].write(files, letter, lo, values)
                with bar.get_lock():
                    bar.update(values.nbytes)
        names = [name for weight in fused for name in stored_infos(*weight)]
        parts = [part for name in names for part in file_set.arrays[name].parts]
        return *task, {part.name: files[part.file].checksum(part.name) for part in parts}

    checksums: dict[str, str] = {}
    with (
        progress("converting", sum(file_set.nbytes for file_set in share), show=first) as bar,
        full_disk_reported(folder),
        contextlib.ExitStack() as opened,
        contextlib.closing(in_order(convert, tasks(opened), folder.ahead)) as results,
    ):
        for file_set, fused, files, found in results:
            checksums |= found
            if fused is file_set.weights[-1]:
                for name, file in files.items():
                    file.finish(checksums)
                    folder.add_weights(name, file)
    gather("written")


@contextlib.contextmanager
def full_disk_reported(folder: NewConversion) -> Iterator[None]:
    """Raises UserError where the disk that files are written to is full."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(f"{folder.disk}: {e.strerror}; {folder.remedy} and run again to go on") from None


def _missing(folder: NewConversion, file_sets: list[FileSet]) -> list[int]:
    """The indices of the sets that are to be written."""
    sizes = folder.sizes(name for file_set in file_sets for name in file_set.files)
    return [i for i, found in enumerate(_checksums(folder, file_sets, sizes)) if found is None]


def _checksums(
    folder: NewConversion, file_sets: list[FileSet], sizes: dict[str, int]
) -> Iterator[dict[str, str] | None]:
    """For each set the checksums of its tensors, by name, as its files tell them; None if a file is missing.

    sizes: of the files that are there, by name. Raises UserError if a file is not this conversion's.
    """

    def checksums(file_set: FileSet) -> dict[str, str] | None:
        found = {}
        for name, tensors in file_set.files.items():
            if name not in sizes:
                return None
            try:
                file = folder.tensor_file(name)
            except UserError as e:
                raise UserError(f"{e}, or remove {folder} and run again") from None
            if {x.name: (x.dtype, x.shape) for x in file.tensors.values()} != tensors:
                raise UserError(f"{file}: is left from another conversion; remove {folder}")
            found |= file.metadata
        return found

    return in_order(checksums, file_sets, ahead=2 * WAITING, workers=WAITING)


def convert_fused(
    checkpoint: Checkpoint, fused: Fused, file_set: FileSet, allow_nonfinite: bool
) -> Iterator[tuple[str, int, dict[str, np.ndarray]]]:
    """Yields slices of weights in one published tensor: (letter, first element along it, array by name)."""
    stored = [[checkpoint.sources[x] for x in checkpoint.stored(*weight)] for weight in fused]
    layouts = [file_layout(info) for info in stored_infos(*fused[0]).values()]
    every = [source for sources in stored for source in sources]
    for letter, lo, slices in checkpoint.sources[fused[0][0]].read_slices(every, layouts):
        left, arrays = iter(slices), {}
        for (name, info), sources in zip(fused, stored, strict=True):
            names, made = list(stored_infos(name, info)), [next(left) for _ in sources]
            dtype = DTYPES[file_set.arrays[names[-1]].dtype]
            if len(made) < len(names):
                made = quantize_on_host(*made, info)
            elif not info.quantization:
                made = [made[0].astype(dtype, copy=False)]
            if not (allow_nonfinite or _is_finite(made[-1])):  # a quantized weight's last array is its scale
                _refuse_nonfinite(checkpoint.sources[name], dtype)
            arrays |= zip(names, made, strict=True)
        yield letter, lo, arrays


def quantize_on_host(x: np.ndarray, info: ArrayInfo) -> list[np.ndarray]:
    """Quantize on the CPU: -> a weight's components as files hold them."""
    x = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    return [np.asarray(component) for component in _quantize(x, dataclasses.replace(info, stored=None))]


@functools.partial(jax.jit, static_argnames="info")
def _quantize(x: jax.Array, info: ArrayInfo) -> tuple[jax.Array, jax.Array]:
    return info.quantization.pack(info.quantization.encode(x, info), info)


def _is_finite(x: np.ndarray, dtype: np.dtype | None = None) -> bool:
    """Whether x, converted to `dtype`, has no NaN or infinity: no float whose exponent has all bits set.

    Bytes are the exponents that are the scales of MXFP4.
    """
    if x.dtype == np.uint8:
        return not (x == 255).any()
    rows = max(SLICE_BYTES * len(x) // x.nbytes, 1)
    for first in range(0, len(x), rows):
        part = x[first : first + rows].astype(dtype or x.dtype, copy=False)
        bits = np.dtype(f"u{part.itemsize}")
        infinity = np.array(np.inf, part.dtype).view(bits)
        if (part.view(bits) << 1).max() >= infinity << 1:
            return False
    return True


def _refuse_nonfinite(source: Source, dtype: np.dtype):
    """Raises UserError naming the tensor that holds NaN or Inf, or numbers that become Inf in `dtype`."""
    for what, as_type in (("NaN or Inf", None), (f"numbers that are too large for {dtype}", dtype)):
        for tensor in source.tensors:
            if not _is_finite(tensor.values, as_type):
                raise UserError(f"{tensor} holds {what}; --allow-nonfinite converts it anyway")


def publish(checkpoint: Checkpoint, folder: NewConversion, file_sets: list[FileSet], identity: dict) -> None:
    """Complete an unfinished folder with the model's small files and the index.

    Raises UserError if the source has changed while it was converted.
    """
    with full_disk_reported(folder):
        index = _add_small_files(checkpoint, folder, file_sets, identity)
        if source_fingerprint(checkpoint) != identity["source"]:
            raise UserError(f"{checkpoint.name}: changed in the meantime; remove {folder} and run again")
        folder.publish((json.dumps(index, indent=1) + "\n").encode())


def _add_small_files(
    checkpoint: Checkpoint, folder: NewConversion, file_sets: list[FileSet], identity: dict
) -> dict:
    """Add config.json and the tokenizer, once all weights are there, and return the content of the index."""
    names = [name for file_set in file_sets for name in file_set.files]
    folder.await_files(names)
    sizes, weight_map, checksums, files = folder.sizes(names), {}, {}, {}
    for file_set, found in zip(file_sets, _checksums(folder, file_sets, sizes), strict=True):
        checksums |= found
        for file, tensors in file_set.files.items():
            weight_map |= dict.fromkeys(tensors, file)
            files[file] = {"bytes": sizes[file]}
    for path in companions(checkpoint.folder):
        content = path.read_bytes()
        folder.add_small(path.name, content)
        files[path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {"metadata": identity, "weight_map": weight_map, "checksums": checksums, "files": files}
