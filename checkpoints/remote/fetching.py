"""Weights files in object storage: a read fetches its bytes, in many pieces at once, into memory of its own.

Reads share no memory that one of them could release or find empty. It is freed with the array that was read.
"""

import collections
import concurrent.futures
import functools
import hashlib
import mmap
import threading
from collections.abc import Callable

import numpy as np

from checkpoints.remote.object_storage import RemoteFolder
from checkpoints.tensor_files import Content, aligned_empty, runs

CONNECTIONS = 32  # requests under way at a time, in all
PIECE = 2**23  # bytes that a request asks for, at most
GAP = 2**19  # bytes that take less time than another request would
SMALL = 2**16  # bytes for which a mapping of their own would be wasteful
WASTE = 1.5  # times the bytes that a read wants: if it fetches more, whole rows are kept for the next reads
MOST_KEPT = 2**28  # bytes of such rows


class FetchedFile(Content):
    """A file in object storage."""

    remote = True

    def __init__(self, folder: RemoteFolder, name: str):
        """Raises UserError."""
        self.folder, self.name = folder, name
        self.identity, self.head = folder.open(name)
        self.size, known = self.identity.size, self.identity.etag or self.identity.changed
        self.version = repr(tuple(self.identity)) if known else ""

    def __str__(self) -> str:
        return f"{self.folder.url}/{self.name}"

    def space(self, start: int, stop: int) -> np.ndarray:
        """Memory that is taken page by page as it is filled, aligned so that XLA can use it in place."""
        if (size := stop - start) < SMALL:
            return aligned_empty((size,), np.uint8)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8)

    def bring(self, part: np.ndarray, space: np.ndarray, start: int) -> None:
        """Fetch a part of a space, and gaps in it shorter than GAP."""
        wanted = list(runs(part, space, GAP))
        if sum(stop - first for first, stop in wanted) <= WASTE * part.nbytes:
            return self._fetch(space, start, wanted)
        # Columns. The others will be asked for, too: a fused tensor has several weights, a slice a successor.
        rows = _kept.get(self, start, len(space), lambda: self.array(start, start + len(space)))
        offset = part.ctypes.data - space.ctypes.data
        part[...] = np.ndarray(part.shape, part.dtype, rows, offset, part.strides)

    def _fetch(self, space: np.ndarray, start: int, wanted: list[tuple[int, int]]) -> None:
        """Fill bytes [first, stop) of a space, of all these."""
        pieces, abandoned = [], threading.Event()
        for first, stop in wanted:
            if start + stop <= len(self.head):
                space[first:stop] = np.frombuffer(self.head, np.uint8)[start + first : start + stop]
                continue
            for piece in range(first, stop, PIECE):
                place = space[piece : min(piece + PIECE, stop)]
                what = self.name, start + piece, self.identity
                pieces.append(_pool().submit(self.folder.read_into, place, *what, abandoned))
        try:
            for piece in concurrent.futures.as_completed(pieces):
                piece.result()
        finally:
            abandoned.set()
            for piece in pieces:
                piece.cancel()

    def checksum(self, start: int, stop: int) -> str:
        digest = hashlib.sha256()
        for first in range(start, stop, 4 * PIECE):
            digest.update(self.array(first, min(first + 4 * PIECE, stop)))
        return digest.hexdigest()


class Kept:
    """The rows that were fetched last, MOST_KEPT bytes of them. Nobody writes to them."""

    def __init__(self):
        self.rows: collections.OrderedDict[tuple, concurrent.futures.Future] = collections.OrderedDict()
        self.lock = threading.Lock()

    def get(self, file: FetchedFile, start: int, size: int, fetch: Callable[[], np.ndarray]) -> np.ndarray:
        """fetch(), or what it has returned or is about to return to another thread."""
        key, ours = (file, start, size), concurrent.futures.Future()
        with self.lock:
            found = self.rows.setdefault(key, ours)
            self.rows.move_to_end(key)
            while len(self.rows) > 1 and sum(size for _, _, size in self.rows) > MOST_KEPT:
                self.rows.popitem(last=False)
        if found is ours:
            try:
                ours.set_result(fetch())
            except Exception as e:
                ours.set_exception(e)
                self.clear()
        return found.result()

    def clear(self) -> None:
        with self.lock:
            self.rows.clear()


_kept = Kept()


def release() -> None:
    """Free what is kept for further reads."""
    _kept.clear()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(CONNECTIONS)
