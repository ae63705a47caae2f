"""The --output file: JSON lines, which a later run of the same command completes."""

import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

import jax

from distributed.exchange import from_first
from feedback.errors import UserError
from terminal.answers import PromptReply
from terminal.launch import log
from terminal.loaded_models import Session

LINE = b'{"index": '  # the beginning of every line


class OutputFile:
    """A file of JSON lines, which is valid after every line.

    The line of a reply is written when it is done; `finish` sorts the lines. Each has `settings`, a digest of
    what the answer depends on.

    answered: the keys of replies that the file has already. Raises UserError if the file has other lines.
    """

    def __init__(self, name: str, replies: list[PromptReply], settings: Callable[[PromptReply], str]):
        path = pathlib.Path(os.path.expanduser(name))
        self.name, self.settings = f"--output {name}", settings
        if path.exists() and not path.is_file():
            raise UserError(f"{self.name}: not a regular file")
        self.path = path.resolve()
        self.file = self._open()
        try:
            self.answered = self._read({reply.key: reply for reply in replies})
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):  # `show` has reported it
            self.file.close()

    def _open(self) -> BinaryIO:
        """Open and lock the file."""
        file = open(self.path, "a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):  # replaced in between
                raise BlockingIOError
        except BlockingIOError:
            file.close()
            raise UserError(f"{self.name}: another process is writing to it") from None
        return file

    def _read(self, expected: dict[tuple[int, int], PromptReply]) -> set[tuple[int, int]]:
        """The keys of the file's lines. Dropped are empty lines, a line that was cut short, errors, and what
        editors add: a byte-order mark and other line ends.
        """
        self.file.seek(0)
        whole = self.file.read()
        *lines, torn = (line.strip() for line in whole.removeprefix(codecs.BOM_UTF8).split(b"\n"))
        parsed = [line and self._parse(line, i, expected) for i, line in enumerate(lines, 1)]
        kept = {key: line for key, line in zip(parsed, lines, strict=True) if key}
        if torn[: len(LINE)] != LINE[: len(torn)]:
            raise UserError(f"{self.name}, line {len(parsed) + 1}: not of an earlier run; give another file")
        if b"".join(line + b"\n" for line in kept.values()) != whole:
            self._rewrite(list(kept.values()))
        return set(kept)

    def _parse(self, line: bytes, number: int, expected: dict) -> tuple[int, int] | None:
        """The key of a line; None if it has an error."""
        where = f"{self.name}, line {number}"
        try:
            found = json.loads(line)
            key = found["index"], found.get("sample", 0)
            reply = expected.get(key)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise UserError(f"{where}: not of an earlier run; give another file") from None
        if reply is None or reply.prompt.text != found.get("prompt", found.get("messages")):
            raise UserError(f"{where}: not an answer to these prompts; give another file")
        if "error" in found:
            return None
        if reply.error is None and found.get("settings") != self.settings(reply):
            raise UserError(f"{where}: made with another model or other options; give another file")
        return key

    def show(self, done: list[PromptReply]) -> None:
        for reply in done:
            settings = {} if reply.error is not None else dict(settings=self.settings(reply))
            self.file.write(json.dumps(reply.as_json() | settings, ensure_ascii=False).encode() + b"\n")
        try:
            self.file.flush()
        except OSError as e:
            raise OSError(f"{self.name}: {e.strerror}; run this again to go on from here") from None

    def finish(self) -> None:
        self.file.seek(0)
        lines = self.file.read().splitlines(keepends=True)
        ordered = sorted(lines, key=self._key)
        if ordered != lines:
            self._rewrite([line.removesuffix(b"\n") for line in ordered])

    def _key(self, line: bytes) -> tuple[int, int]:
        found = json.loads(line)
        return found["index"], found.get("sample", 0)

    def _rewrite(self, lines: list[bytes]) -> None:
        """Replace the file atomically."""
        descriptor, beside = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name + ".")
        with open(descriptor, "wb") as file:
            file.write(b"".join(line + b"\n" for line in lines))
            os.fsync(file.fileno())
        shutil.copymode(self.path, beside)
        os.replace(beside, self.path)
        self.file.close()
        self.file = self._open()


def settings_digest(session: Session) -> Callable[[PromptReply], str]:
    """The function that digests all that a reply depends on, for the process that writes --output."""
    args, target = session.args, session.models[0]
    types = target.dtype, str(target.format), target.kv_dtype
    asked = args.n > 1, *types, args.logprobs, args.score, args.stop, sorted(session.builder.stop_tokens)
    writes = args.output and jax.process_index() == 0
    common = [target.checkpoint.fingerprint() if writes else None, asked]
    common = hashlib.sha256(json.dumps(common).encode())

    def digest(reply: PromptReply) -> str:
        request, whole = reply.request, common.copy()
        whole.update(
            json.dumps([request.prompt.tolist(), request.max_new_tokens, vars(request.sampling)]).encode()
        )
        return whole.hexdigest()[:16]

    return digest


@contextlib.contextmanager
def output_file(
    session: Session, replies: list[PromptReply]
) -> Iterator[tuple[OutputFile | None, list[PromptReply]]]:
    """-> (the --output file in the first process, else None; the replies that it does not have yet)."""
    args, settings, file = session.args, settings_digest(session), None

    def open_file() -> list[bool]:
        nonlocal file
        file = OutputFile(args.output, replies, settings)
        return [reply.key in file.answered for reply in replies]

    answered = from_first(open_file) if args.output else [False] * len(replies)
    missing = [reply for reply, known in zip(replies, answered, strict=True) if not known]
    with file or contextlib.nullcontext():
        yield file, missing
        if file is not None:
            file.finish()
            log(f"{args.output} has all {len(replies)} lines")
