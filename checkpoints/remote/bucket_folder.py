"""A converted folder that is being written into a bucket: whole or not at all, though nothing can be renamed.

Every object has its final name from the start. What makes them a converted folder is the index, which is
written last. Until then conversion.json says which conversion is writing there. It is written on the
condition that there is none, so that of two different conversions the second one is refused.

A weights file is assembled on the local disk and uploaded when it is whole. It has no name on the local disk,
so that its space is free again however this process ends.
"""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator

from checkpoints.file_plan import FileSet
from checkpoints.folders import INDEX, STATE
from checkpoints.remote.fetching import FetchedFile
from checkpoints.remote.object_storage import RemoteFolder
from checkpoints.tensor_files import NewFile, TensorFile, parse_json
from checkpoints.threads import WORKERS
from checkpoints.unfinished import accept_converted
from distributed.exchange import from_first, process_index
from feedback.errors import UserError


class NewBucketFolder:
    """The folder of a conversion in a bucket, with the methods of unfinished.NewFolder.

    ahead: see `in_order`. It is small because the files of all weights that were begun are on the local disk.
    """

    ahead, remedy = WORKERS, "make room, or set TMPDIR to a folder elsewhere,"

    def __init__(self, url: str):
        self.remote, self.disk = RemoteFolder(url), tempfile.gettempdir()
        self.url = self.remote.url
        if self.remote.scheme not in ("s3", "gs"):
            raise UserError(f"{url}: cannot be written to; give a bucket, such as s3://BUCKET/PATH")

    def __str__(self) -> str:
        return self.url

    def is_converted(self, identity: dict) -> bool:
        """Whether the same conversion has been done before. Raises UserError if something else is there."""
        names = self.remote.list()
        if not names or (INDEX not in names and STATE in names):
            return False
        found = self._read(INDEX).get("metadata") if INDEX in names else None
        accept_converted(self.url, found, identity)
        if STATE in names and self._read(STATE) == identity:  # the conversion was killed at its very end
            self.remote.delete(STATE)
        return True

    def _read(self, name: str) -> dict:
        return parse_json(self.remote.read(name), f"{self.url}/{name}")

    @contextlib.contextmanager
    def claimed(self, identity: dict) -> Iterator[None]:
        """Write conversion.json, unless this conversion did so before.

        Two conversions with the same identity disturb nothing: they write the same bytes. Raises UserError if
        another conversion is writing there or has left its files.
        """
        new = from_first(lambda: self._claim(identity))
        if process_index() != 0:
            self.await_files([STATE])
        try:
            yield
        except Exception:
            with contextlib.suppress(UserError):  # the first error is what matters
                if process_index() == 0 and new and self.remote.list().keys() <= {STATE}:
                    self.remote.delete(STATE)
            raise

    def _claim(self, identity: dict) -> bool:
        """-> whether conversion.json is new."""
        new = self._change(self.remote.write, STATE, json.dumps(identity).encode(), create_only=True)
        if not new and self._read(STATE) != identity:
            raise UserError(
                f"{self.url}: another conversion is writing there or has left its files; remove them, or "
                "choose another name"
            )
        if new and INDEX in self.remote.list():  # which was not there when `is_converted` looked
            self.remote.delete(STATE)
            raise UserError(f"{self.url}: another conversion was completed there just now; run again")
        return new

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """The size in bytes of each of these objects that is there, by name."""
        there = self.remote.list()
        return {name: there[name] for name in names if name in there}

    def tensor_file(self, name: str) -> TensorFile:
        return TensorFile(FetchedFile(self.remote, name))

    def await_files(self, names: Iterable[str]) -> None:
        """Raises UserError if an object is missing. There is no wait: storage shows a new object at once."""
        there = self.remote.list()
        for name in names:
            if name not in there:
                raise UserError(
                    f"{self.url}/{name}: is not there, though another process wrote it; do all processes "
                    "use the same storage?"
                )

    def check_room(self, missing: list[FileSet], share: list[FileSet]) -> None:
        """Say how much is to be uploaded, and how much of it is on the local disk at a time.

        Raises UserError if the local disk has too little room.
        """
        most, free = most_at_once(share, self.ahead), shutil.disk_usage(self.disk).free
        here = f"at most {most / 1e9:.2f} GB at a time are in {self.disk}, which has {free / 1e9:.2f} GB free"
        if most > free:
            raise UserError(f"{self.url}: {here}; set TMPDIR to a folder on a larger disk")
        if process_index() == 0:
            total = sum(file_set.nbytes for file_set in missing)
            print(f"{self.url}: {total / 1e9:.2f} GB are to be written; {here}", file=sys.stderr, flush=True)

    def new_file(self, name: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> NewFile:
        return NewFile(tempfile.TemporaryFile(buffering=0), tensors)

    def add_weights(self, name: str, file: NewFile) -> None:
        """Upload a file that is whole. Nothing of it is left on this machine."""
        self._change(self.remote.write, name, file.file)
        file.file.close()

    def add_small(self, name: str, content: bytes) -> None:
        self._change(self.remote.write, name, content)

    def publish(self, index: bytes) -> None:
        """Add the index, which makes this a converted folder."""
        self._change(self.remote.write, INDEX, index)
        self._change(self.remote.delete, STATE)

    def _change(self, change: Callable, *arguments, **options):
        """Write or delete an object. A UserError says that the same command goes on with the conversion."""
        try:
            return change(*arguments, **options)
        except UserError as e:
            raise UserError(f"{e}; run again to go on") from None


def most_at_once(share: list[FileSet], ahead: int) -> int:
    """The most bytes of files that `ahead` weights and the one before them belong to, wherever they begin."""
    begun = [i for i, file_set in enumerate(share) for _ in file_set.weights]
    windows = (set(begun[first : first + ahead + 1]) for first in range(len(begun)))
    return max((sum(share[i].nbytes for i in window) for window in windows), default=0)
