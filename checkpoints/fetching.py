"""Weights files in object storage: a read fetches its bytes, in many pieces at once, into memory of its own.

There is no copy of the file that reads share, so none of them can find bytes that another has released, or
that never came. The memory is freed with the array that was read.
"""

import concurrent.futures
import functools
import hashlib
import mmap
import threading

import numpy as np

from checkpoints.object_storage import RemoteFolder
from checkpoints.tensor_files import aligned_empty, runs

CONNECTIONS = 32  # requests under way at a time, in all
PIECE = 2**23  # bytes that a request asks for, at most
GAP = 2**19  # bytes that take less time than another request would
SMALL = 2**16  # bytes for which a mapping of their own would be wasteful


class FetchedFile:
    """A file in object storage. It is a tensor_files.Content."""

    remote = True

    def __init__(self, folder: RemoteFolder, name: str):
        """Raises UserError."""
        self.file, self.head = folder.open(name)
        self.name, self.size = name, self.file.size
        known = self.file.etag or self.file.changed
        self.version = repr((self.size, self.file.etag, self.file.changed)) if known else ""

    def __str__(self) -> str:
        return str(self.file)

    def read(self, start: int, stop: int) -> bytes:
        space = self.space(start, stop)
        self.bring(space, space, start)
        return space.tobytes()

    def space(self, start: int, stop: int) -> np.ndarray:
        """Memory that is taken page by page as it is filled, aligned so that XLA can use it in place."""
        if (size := stop - start) < SMALL:
            return aligned_empty((size,), np.uint8)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8)

    def bring(self, part: np.ndarray, space: np.ndarray, start: int) -> None:
        """Fetch a part of a space, and gaps in it shorter than GAP."""
        pieces, abandoned = [], threading.Event()
        for first, stop in runs(part, space, GAP):
            if start + stop <= len(self.head):
                space[first:stop] = np.frombuffer(self.head, np.uint8)[start + first : start + stop]
                continue
            for piece in range(first, stop, PIECE):
                place = space[piece : min(piece + PIECE, stop)]
                pieces.append(_pool().submit(self.file.read_into, place, start + piece, abandoned))
        try:
            for piece in concurrent.futures.as_completed(pieces):
                piece.result()
        finally:
            abandoned.set()
            for piece in pieces:
                piece.cancel()

    def holds(self, part: np.ndarray) -> bool:
        return False

    def forget(self, start: int, stop: int) -> None:
        pass

    def checksum(self, start: int, stop: int) -> str:
        digest = hashlib.sha256()
        for first in range(start, stop, 4 * PIECE):
            space = self.space(first, min(first + 4 * PIECE, stop))
            self.bring(space, space, first)
            digest.update(space)
        return digest.hexdigest()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(CONNECTIONS)
