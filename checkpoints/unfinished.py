"""A converted folder that is being written on a disk: who may write to DST.incomplete, how it becomes DST.

bucket_folder.py has the same for a folder in a bucket.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.file_plan import FileSet
from checkpoints.folders import FORMAT, INDEX, STATE, companions, read_json
from checkpoints.tensor_files import MappedFile, NewFile, TensorFile
from distributed.exchange import from_first, process_index
from feedback.errors import UserError
from quantize import Format

BEGUN = ".partial"  # suffix of a file that is being written
SECONDS_UNSEEN = 120  # a network disk shows a file that another host has written a minute later at most


def conversion_identity(
    checkpoint: Checkpoint, format: Format | None, dtype: str, file_bytes: int
) -> dict[str, str | int]:
    """What determines every byte of a converted folder: two conversions with the same identity are equal."""
    return {
        "format": FORMAT, "dtype": dtype, "quantize": str(format or "none"), "file_bytes": file_bytes,
        "source": source_fingerprint(checkpoint),
    }  # fmt: skip


def source_fingerprint(checkpoint: Checkpoint) -> str:
    """A checksum of the small files, and of each weights file's name, size, version and tensors."""
    digest = hashlib.sha256()
    for path in companions(checkpoint.folder):
        digest.update(hashlib.sha256(path.name.encode() + b"\0" + path.read_bytes()).digest())
    for file in sorted({tensor.file for tensor in checkpoint.tensors}, key=lambda file: file.name):
        tensors = [(x.name, x.dtype, x.shape) for x in file.tensors.values()]
        digest.update(repr((file.name, file.size, file.content.version, tensors)).encode())
    return digest.hexdigest()


class NewFolder:
    """The folder DST.incomplete of a conversion, which is renamed to DST when it is complete.

    Every file in it has a temporary name until it is whole. ahead: see `in_order`. disk, remedy: what may be
    full, and what to do about it.
    """

    ahead, remedy = 32, "make room"

    def __init__(self, destination: pathlib.Path):
        self.destination = destination
        self.partial = self.disk = destination.with_name(destination.name + ".incomplete")

    def __str__(self) -> str:
        return str(self.partial)

    def is_converted(self, identity: dict) -> bool:
        """Whether the same conversion has been done before. Raises UserError if something else is there."""
        if not os.path.lexists(self.destination):
            return False
        accept_converted(str(self.destination), _identity_of(self.destination), identity)
        return True

    @contextlib.contextmanager
    def claimed(self, identity: dict) -> Iterator[None]:
        """Hold the lock of this folder: new, or with the files that this conversion wrote before.

        Raises UserError if another conversion is writing there or has left its files.
        """
        with contextlib.ExitStack() as stack:
            from_first(lambda: stack.enter_context(self._claimed(identity)))
            if process_index() != 0:  # if process 0 is killed, this process may still write
                self.await_files([STATE])
                _lock(stack.enter_context((self.partial / STATE).open()), fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def _claimed(self, identity: dict) -> Iterator[None]:
        """`claimed`, in process 0, which makes the folder and removes files that were begun."""
        partial = self.partial
        partial.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in partial.iterdir()} - {STATE}
        found = _identity_of(partial) if names else identity
        with contextlib.ExitStack() as stack:
            if found:
                state = stack.enter_context((partial / STATE).open("a+"))
                _lock(state, fcntl.LOCK_EX)
                stack.callback(_remove_if_empty, partial)
            if found != identity:
                raise UserError(
                    f"{partial}: is left from another conversion; remove it, or choose another name"
                )
            if not names:
                state.truncate(0)
                state.write(json.dumps(identity))
                state.flush()
                os.fsync(state.fileno())
                sync(partial)
            for begun in partial.glob("*" + BEGUN):
                begun.unlink()
            _lock(state, fcntl.LOCK_SH)
            yield

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """The size in bytes of each of these files that is there, by name."""
        paths = (self.partial / name for name in names)
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def tensor_file(self, name: str) -> TensorFile:
        return TensorFile(MappedFile(self.partial / name))

    def await_files(self, names: Iterable[str]) -> None:
        """Wait until this host sees files that other processes have written. Raises UserError."""
        end = time.monotonic() + SECONDS_UNSEEN
        for path in (self.partial / name for name in names):
            while not path.exists():
                if time.monotonic() > end:
                    raise UserError(
                        f"{path}: is not there, though another process wrote it; is the disk shared?"
                    )
                time.sleep(0.1)

    def check_room(self, missing: list[FileSet], share: list[FileSet]) -> None:
        """Raises UserError if the disk has too little room for the missing files."""
        needed = sum(file_set.nbytes for file_set in missing)
        free = from_first(lambda: shutil.disk_usage(self.partial).free)
        if needed > free:
            sizes = f"{needed / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free"
            raise UserError(f"{self.partial}: {sizes}")

    def new_file(self, name: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> NewFile:
        return NewFile((self.partial / (name + BEGUN)).open("w+b", buffering=0), tensors)

    def add_weights(self, name: str, file: NewFile) -> None:
        """Give a file that is whole its name."""
        file.file.close()
        self._settle(name)

    def add_small(self, name: str, content: bytes) -> None:
        """Write a small file."""
        (self.partial / (name + BEGUN)).write_bytes(content)
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Give a file its name once its content is on the disk."""
        begun = self.partial / (name + BEGUN)
        sync(begun)
        begun.rename(self.partial / name)
        sync(self.partial)

    def publish(self, index: bytes) -> None:
        """Add the index, and give the folder its name."""
        self.add_small(INDEX, index)
        (self.partial / STATE).unlink()
        sync(self.partial)
        self.partial.rename(self.destination)
        sync(self.destination.parent)


def accept_converted(destination: str, found: dict | None, identity: dict) -> None:
    """Say that a converted folder is there. Raises UserError if it is not this conversion's, or damaged."""
    if found != identity:
        raise UserError(f"{destination}: exists and is something else; choose another name or remove it")
    open_checkpoint(destination, alone=True)  # refuses a folder that has been damaged since
    print(f"{destination} is there already, converted from this source", file=sys.stderr)


def sync(path: pathlib.Path) -> None:
    """Wait until a file's content or a folder's list of names is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _identity_of(folder: pathlib.Path) -> dict | None:
    """The identity of the conversion that made or began a folder; None if the folder does not say."""
    if (folder / INDEX).is_file():
        return read_json(folder / INDEX).get("metadata")
    return read_json(folder / STATE) if (folder / STATE).is_file() else None


def _lock(file: IO, how: int) -> None:
    """Lock a file where the disk has locks. Raises UserError if another conversion holds the lock.

    A file that is open for reading and writing, not the folder: NFS shows other hosts no other locks.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{pathlib.Path(file.name).parent}: another conversion is writing there") from None
    except OSError as e:
        if how == fcntl.LOCK_EX:
            print(f"{file.name}: {e.strerror}; start no other conversion to there", file=sys.stderr)


def _remove_if_empty(partial: pathlib.Path) -> None:
    """Remove the folder of a conversion that wrote no weights."""
    if partial.exists() and {path.name for path in partial.iterdir()} <= {STATE}:
        (partial / STATE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # NFS keeps a file that is open, under another name
            partial.rmdir()
