"""The folder DST.incomplete of a conversion: what it will be, who may write there, and how it becomes DST."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.folders import FORMAT, INDEX, companions, read_json
from checkpoints.tensor_files import sync
from distributed.exchange import from_first, process_index
from feedback.errors import UserError
from quantize import Format

STATE = "conversion.json"  # holds the identity of an unfinished conversion; locked while one is running
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


def is_converted(destination: pathlib.Path, identity: dict) -> bool:
    """Whether the same conversion has been done before. Raises UserError if something else is there."""
    if not os.path.lexists(destination):
        return False
    if _identity_of(destination) != identity:
        raise UserError(f"{destination}: exists and is something else; choose another name or remove it")
    open_checkpoint(str(destination))  # refuses a folder that has been damaged since
    print(f"{destination} is there already, converted from this source", file=sys.stderr)
    return True


def _identity_of(folder: pathlib.Path) -> dict | None:
    """The identity of the conversion that made or began a folder; None if the folder does not say."""
    if (folder / INDEX).is_file():
        return read_json(folder / INDEX).get("metadata")
    return read_json(folder / STATE) if (folder / STATE).is_file() else None


@contextlib.contextmanager
def unfinished_folder(destination: pathlib.Path, identity: dict) -> Iterator[pathlib.Path]:
    """The folder that becomes `destination`, for this conversion alone: new, or with what it wrote before.

    Raises UserError if another conversion is writing there or has left its files.
    """
    partial = destination.with_name(destination.name + ".incomplete")
    with contextlib.ExitStack() as stack:
        from_first(lambda: stack.enter_context(claimed(partial, identity)))
        if process_index() != 0:  # if process 0 is killed, this process may still write
            await_files([partial / STATE])
            _lock(stack.enter_context((partial / STATE).open()), fcntl.LOCK_SH)
        yield partial


@contextlib.contextmanager
def full_disk_reported(folder: pathlib.Path) -> Iterator[None]:
    """Raises UserError where the disk is full."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(f"{folder}: {e.strerror}; make room and run again to go on") from None


@contextlib.contextmanager
def claimed(partial: pathlib.Path, identity: dict) -> Iterator[None]:
    """Hold the lock of an unfinished folder, which is made if it is not there. Raises UserError."""
    partial.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in partial.iterdir()} - {STATE}
    found = _identity_of(partial) if names else identity
    with contextlib.ExitStack() as stack:
        if found:
            state = stack.enter_context((partial / STATE).open("a+"))
            _lock(state, fcntl.LOCK_EX)
            stack.callback(_remove_if_empty, partial)
        if found != identity:
            raise UserError(f"{partial}: is left from another conversion; remove it, or choose another name")
        if not names:
            state.truncate(0)
            state.write(json.dumps(identity))
            state.flush()
            os.fsync(state.fileno())
            sync(partial)
        _lock(state, fcntl.LOCK_SH)
        yield


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


def await_files(paths: Iterable[pathlib.Path]) -> None:
    """Wait until this host sees files that other processes have written. Raises UserError."""
    end = time.monotonic() + SECONDS_UNSEEN
    for path in paths:
        while not path.exists():
            if time.monotonic() > end:
                raise UserError(f"{path}: is not there, though another process wrote it; is the disk shared?")
            time.sleep(0.1)
