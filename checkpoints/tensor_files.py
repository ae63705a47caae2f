"""safetensors files: headers are checked, values memory-mapped, and new files written in any order.

The safetensors library would copy what it reads, hold a file in memory to write it, and not say which tensor
is wrong. Source of the format: huggingface/safetensors README.
"""

import collections
import dataclasses
import hashlib
import io
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from feedback.errors import UserError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(bfloat16),
    "I8": np.dtype(np.int8),
    # Only in checkpoints that others quantized, see dequantized.py.
    "F8_E4M3": np.dtype(float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
FLOAT_TYPES = ("F32", "F16", "BF16")
OTHER_SIZES = {"BOOL": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "U32": 4, "F64": 8, "U64": 8}
MAX_HEADER = 100_000_000  # the format's own limit
READ_AHEAD = 2**17  # bytes; systems may cut a longer request short
PAGE = 4096  # the data section of our files begins at a multiple of PAGE,
ALIGNMENT = 64  # and a tensor at a multiple of ALIGNMENT, so that XLA can use it in place
SAMPLES = 16  # pages that `StoredTensor.sample` reads


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Like np.empty, but aligned, so that XLA on a CPU uses the array in place instead of copying it."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def aligned_copy(x: np.ndarray) -> np.ndarray:
    copy = aligned_empty(x.shape, x.dtype)
    copy[...] = x
    return copy


def parse_json(text: bytes | str, path: pathlib.Path | str) -> dict:
    """Parse a JSON object in which no name occurs twice. Raises UserError naming the text's file."""

    def unique(pairs: list[tuple]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = collections.Counter(name for name, _ in pairs)
            raise UserError(f"{names.most_common(1)[0][0]} is there twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


class Content:
    """The bytes of a weights file: a MappedFile, or a fetching.FetchedFile. `str` names it in errors."""

    name: str
    size: int
    remote: bool  # whether reading takes requests, of which many should be under way
    version: str  # differs if the bytes have changed; "" if that cannot be known

    def space(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] of uint8, a place for these bytes; they are there after `bring`."""
        raise NotImplementedError

    def bring(self, part: np.ndarray, space: np.ndarray, start: int) -> None:
        """Have the bytes of a view of a space, which begins at `start`, read into it."""
        raise NotImplementedError

    def checksum(self, start: int, stop: int) -> str:
        raise NotImplementedError

    def array(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] of uint8: these bytes."""
        space = self.space(start, stop)
        self.bring(space, space, start)
        return space

    def holds(self, part: np.ndarray) -> bool:
        """Whether an array is a view of the file itself, whose memory is the system's to release."""
        return False

    def forget(self, start: int, stop: int) -> None:
        """Release the memory of these bytes; they are read again when they are used again."""


class MappedFile(Content):
    """A local file, whose bytes are read from the disk when they are used."""

    remote = False

    def __init__(self, path: pathlib.Path):
        self.path, self.name = path, path.name
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        if self.size:
            self.mapped.madvise(mmap.MADV_RANDOM)  # reading ahead would fetch other processes' shards

    def __str__(self) -> str:
        return str(self.path)

    @property
    def version(self) -> str:
        return str(self.path.stat().st_mtime_ns)

    def space(self, start: int, stop: int) -> np.ndarray:
        return np.frombuffer(self.mapped, np.uint8, stop - start, start)

    def bring(self, part: np.ndarray, space: np.ndarray, start: int) -> None:
        """Have the system begin to read a part, and gaps in it shorter than READ_AHEAD."""
        for first, stop in runs(part, space, READ_AHEAD):
            first, stop = start + first, start + stop
            for piece in range(first // mmap.PAGESIZE * mmap.PAGESIZE, stop, READ_AHEAD):
                self.mapped.madvise(mmap.MADV_WILLNEED, piece, min(READ_AHEAD, stop - piece))

    def holds(self, part: np.ndarray) -> bool:
        return np.may_share_memory(part, np.frombuffer(self.mapped, np.uint8))

    def forget(self, start: int, stop: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.mapped.madvise(mmap.MADV_DONTNEED, first, max(stop - first, 1))

    def checksum(self, start: int, stop: int) -> str:
        return file_checksum(self.path, start, stop)


def runs(part: np.ndarray, space: np.ndarray, gap: int) -> Iterator[tuple[int, int]]:
    """The bytes [first, stop) of a space that a view of it covers, and gaps in it shorter than `gap`."""
    axis, run = part.ndim, part.itemsize
    while axis and (part.shape[axis - 1] == 1 or part.strides[axis - 1] < run + gap):
        axis -= 1
        run += (part.shape[axis] - 1) * part.strides[axis]
    start = part.ctypes.data - space.ctypes.data
    if part.size and not 0 <= start < len(space):
        raise ValueError("not a view of this space")  # a copy would hold what was there before it was read
    for index in np.ndindex(part.shape[:axis] if part.size else (0,)):
        first = start + sum(i * stride for i, stride in zip(index, part.strides, strict=False))
        yield first, first + run


class TensorFile:
    """A safetensors file whose header has been read. tensors: by name. metadata: texts by name."""

    def __init__(self, content: Content):
        """Raises UserError naming the file and the tensor that is wrong."""
        self.content, self.size = content, content.size
        header, self.data_start = self._read_header()
        metadata = header.pop("__metadata__", {})
        self.metadata = metadata if isinstance(metadata, dict) else {}
        self.tensors = {name: self._tensor(name, fields) for name, fields in header.items()}
        end, before = self.data_start, "the header"
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            if tensor.start < end:
                self._refuse(f"tensor {tensor.name} overlaps {before}")
            if tensor.start > end:
                self._refuse(f"there is a gap before tensor {tensor.name}")
            end, before = tensor.stop, f"tensor {tensor.name}"
        if end < self.size:
            self._refuse(f"{self.size - end} bytes follow {before}, the last")

    def __str__(self) -> str:
        return str(self.content)

    @property
    def name(self) -> str:
        return self.content.name

    def _refuse(self, what: str):
        raise UserError(f"{self}: {what}; download or convert it again")

    def _read_header(self) -> tuple[dict, int]:
        """-> (the header, the position of its end)"""
        length = int.from_bytes(self.content.array(0, min(8, self.size)), "little")
        if self.size < 8 or length > min(MAX_HEADER, self.size - 8):
            self._refuse(f"not a whole safetensors file: {self.size} bytes, of which {length} are a header")
        return parse_json(self.content.array(8, 8 + length).tobytes(), str(self)), 8 + length

    def _tensor(self, name: str, fields) -> "StoredTensor":
        try:
            dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
            numbers = (*shape, start, stop)
            if not isinstance(dtype, str) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            self._refuse(f"tensor {name} has no proper dtype, shape and data_offsets in the header")
        itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_SIZES.get(dtype)
        if start > stop or itemsize and stop - start != math.prod(shape) * itemsize:
            self._refuse(f"tensor {name} has shape {shape} of {dtype}, but bytes {start} to {stop}")
        start, stop = self.data_start + start, self.data_start + stop
        if stop > self.size:
            self._refuse(f"cut off: tensor {name} ends at byte {stop} of {self.size}")
        return StoredTensor(name, self, dtype, shape, start, stop)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in bytes [start, stop) of a file."""

    name: str
    file: TensorFile
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def remote(self) -> bool:
        return self.file.content.remote

    @property
    def values(self) -> np.ndarray:
        """[*shape]"""
        return self.read()

    def read(
        self,
        lo: int = 0,
        hi: int | None = None,
        select: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> np.ndarray:
        """select(rows [lo, hi)), where `select` returns a view, of whose bytes alone the file is read.

        Of a local file this is a view of the file, which is read page by page when elements are used.
        """
        rows = self.shape[:1] or (1,)
        hi, row = rows[0] if hi is None else hi, self.nbytes // max(*rows, 1)
        start, content = self.start + lo * row, self.file.content
        space = content.space(start, self.start + hi * row)
        shape = (hi - lo, *self.shape[1:]) if self.shape else ()
        part = select(space.view(DTYPES[self.dtype]).reshape(shape))
        content.bring(part, space, start)
        return part

    def holds(self, part: np.ndarray) -> bool:
        """Whether an array is a view of the local file."""
        return self.file.content.holds(part)

    def forget(self) -> None:
        """Release the pages that were read; they are read again when they are used again."""
        self.file.content.forget(self.start, self.stop)

    def sample(self) -> str:
        """sha256, in hexadecimal, of SAMPLES pages at even distances; of all bytes if there are no more.

        Of a remote file whose version is known: of that and of the tensor's place, which takes no request.
        The pages are released.
        """
        content, size = self.file.content, self.nbytes
        if content.remote and content.version:
            return hashlib.sha256(repr((content.version, self.start, self.stop)).encode()).hexdigest()
        firsts = range(0, size, PAGE)
        if size > SAMPLES * PAGE:
            firsts = [i * (size - PAGE) // (SAMPLES - 1) for i in range(SAMPLES)]
        pages = [content.array(self.start + x, self.start + min(x + PAGE, size)) for x in firsts]
        digest = hashlib.sha256()
        for page in pages:
            digest.update(page)
        self.forget()
        return digest.hexdigest()

    def checksum(self) -> str:
        """sha256 of its bytes, in hexadecimal."""
        return self.file.content.checksum(self.start, self.stop)


def file_checksum(path: pathlib.Path, start: int = 0, stop: int | None = None) -> str:
    """sha256 of bytes [start, stop) of a file, by default of the whole file, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return _checksum(file, start, path.stat().st_size if stop is None else stop)


def _checksum(file: io.FileIO, start: int, stop: int) -> str:
    """sha256 of bytes [start, stop) of an open file, whose position is neither used nor changed."""
    digest = hashlib.sha256()
    while start < stop:
        data = os.pread(file.fileno(), min(2**20, stop - start), start)
        if not data:
            raise UserError(f"{file.name}: became shorter while it was read")
        digest.update(data)
        start += len(data)
    return digest.hexdigest()


class NewFile:
    """A safetensors file that is being written, in any order. Threads may share it.

    file: empty, and opened for reading and writing without a buffer. tensors: (type, shape) by name. The
    finished file's metadata has the sha256 of each tensor.
    """

    def __init__(self, file: io.FileIO, tensors: dict[str, tuple[str, tuple[int, ...]]]):
        # A tensor whose size is no multiple of ALIGNMENT comes last: tensors behind it are not aligned.
        by_alignment = sorted(tensors.items(), key=lambda item: array_bytes(*item[1]) % ALIGNMENT != 0)
        self.file, self.tensors = file, dict(by_alignment)
        blank = dict.fromkeys(tensors, "0" * hashlib.sha256().digest_size * 2)
        self.starts, position = {}, len(self._header(blank))
        for name, facts in self.tensors.items():
            self.starts[name] = position
            position += array_bytes(*facts)
        self.file.truncate(position)

    def _header(self, checksums: dict[str, str]) -> bytes:
        """The header. Its length does not depend on the checksums."""
        fields, position = {"__metadata__": checksums}, 0
        for name, (dtype, shape) in self.tensors.items():
            first, position = position, position + array_bytes(dtype, shape)
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, position]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    def write(self, name: str, axis: int, first: int, values: np.ndarray) -> None:
        """Write values to [..., first : first + n, ...] of a tensor, where n is their size along `axis`."""
        _, shape = self.tensors[name]
        before, row = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]) * values.itemsize
        runs = np.ascontiguousarray(values).reshape(before, -1).view(np.uint8)
        for i, run in enumerate(runs):
            self._put(run.data, self.starts[name] + (i * shape[axis] + first) * row)

    def _put(self, data: memoryview | bytes, position: int) -> None:
        while len(data):  # a system call writes at most 2 GiB
            n = os.pwrite(self.file.fileno(), data, position)
            data, position = data[n:], position + n

    def checksum(self, name: str) -> str:
        """sha256 of a tensor's bytes as they are in the file now."""
        start = self.starts[name]
        return _checksum(self.file, start, start + array_bytes(*self.tensors[name]))

    def finish(self, checksums: dict[str, str]) -> None:
        """Write the header: the file is whole."""
        self._put(self._header({name: checksums[name] for name in self.tensors}), 0)
