"""The compilation cache: programs that one start compiled, which later starts read, in all processes.

jax computes a program's key from all that decides the program: its HLO, the compiler's version, options and
flags, and the devices. On TPU all processes have the same keys. On CPU the devices' description has only this
process's own, and the features of its CPU: each process has keys of its own.

In jax's own cache only process 0 writes, so that other hosts find nothing on their own disks; and an entry
that a full disk or a killed process has cut short is never replaced. So this file replaces how entries are
read and written.
"""

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import pathlib
import threading
import uuid
import warnings

import jax

from checkpoints.folders import cache_folder
from checkpoints.remote.object_storage import NoSuchObject, RemoteFolder, is_url
from feedback.errors import UserError
from feedback.progress import print_line

MAX_BYTES = 10 * 2**30  # of a folder, unless JAX_COMPILATION_CACHE_MAX_SIZE says otherwise
SUFFIX = ".program"  # jax's own entries, which have no checksum, have another one
CHECKSUM_BYTES = hashlib.sha256().digest_size
logger = logging.getLogger(__name__)


def enable_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, or in JAX_COMPILATION_CACHE_DIR if set.

    JAX_COMPILATION_CACHE_DIR: a folder or the URL of one in a bucket. Raises UserError if it cannot be one.
    Changes nothing if the program that calls this has configured another jax_compilation_cache_dir. Programs
    are logged in any case.
    """
    log_programs()
    if jax.config.jax_compilation_cache_dir != os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # another one, or an earlier call of this function
    settings = {
        "jax_compilation_cache_dir": str(cache_folder()),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    if is_url(place := os.environ.get("JAX_COMPILATION_CACHE_DIR", "")):
        RemoteFolder(place)  # or it is refused
        settings["jax_persistent_cache_enable_xla_caches"] = ""  # of GPUs: they are in folders only
    if take_over():
        settings["jax_compilation_cache_max_size"] = MAX_BYTES
    else:
        say_once("this version of jax keeps compiled programs in its own way: of several hosts, the first's")
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    # jax warns of an entry that it could not load; it compiles the program, and the entry is replaced.
    warnings.filterwarnings("ignore", message=".*persistent compilation cache", category=UserWarning)


@functools.cache
def log_programs() -> None:
    """Log every program of this process from now on, when it has been compiled or read from the cache."""
    latest = threading.local()  # source: of the program that this thread is about to get

    def note_source(event: str, **_) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            latest.source = "read from the cache"

    def log_program(event: str, seconds: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            source = vars(latest).pop("source", "compiled")
            logger.info("%s: %s in %.2f s", about.get("fun_name"), source, seconds)

    jax.monitoring.register_event_listener(note_source)
    jax.monitoring.register_event_duration_secs_listener(log_program)


def take_over() -> bool:
    """Let every process read and write jax's entries by `ProgramCache`; False if this version of jax cannot.

    jax 0.10 to 0.12 have no public names for the cache's class and the function in which process 0 writes.
    """
    try:
        from jax._src import compilation_cache, compiler

        put, _ = compilation_cache.put_executable_and_time, compilation_cache.LRUCache
        parameters = inspect.signature(compiler._cache_write).parameters.keys() - {"host_callbacks"}
    except (ImportError, AttributeError):
        return False
    if parameters != {"cache_key", "compile_time_secs", "module_name", "backend", "executable"}:
        return False

    def write(cache_key, compile_time_secs, module_name, backend, executable, host_callbacks=()) -> None:
        """Write a program that was compiled. jax 0.10 cannot read one that calls functions of its process."""
        if host_callbacks or compile_time_secs < jax.config.jax_persistent_cache_min_compile_time_secs:
            return
        try:
            put(cache_key, module_name, executable, backend, int(compile_time_secs))
        except Exception as e:  # jaxlib's, whose type is not public: it cannot serialize the program
            say_once(f"{module_name} is compiled again at the next start ({e})")

    compiler._cache_write, compilation_cache.LRUCache = write, ProgramCache
    return True


class ProgramCache:
    """Entries by their keys, each with a checksum: what is missing, damaged or cannot be read is compiled.

    path, max_size: jax's settings jax_compilation_cache_dir and jax_compilation_cache_max_size. A bucket may
    have any size, because it does not tell when a file was last read; its own rules can delete what is old.
    """

    def __init__(self, path: str, max_size: int):
        self._path = path  # jax logs it
        self.entries = Bucket(RemoteFolder(path)) if is_url(path) else Folder(pathlib.Path(path), max_size)

    def get(self, key: str) -> bytes | None:
        try:
            entry = self.entries.read(key + SUFFIX)
        except (OSError, UserError) as e:
            say_once(f"{self._what(e)}; programs that cannot be read there are compiled")
            return None
        if entry is None:
            return None
        checksum, program = entry[:CHECKSUM_BYTES], entry[CHECKSUM_BYTES:]
        return program if hashlib.sha256(program).digest() == checksum else None

    def put(self, key: str, value: bytes) -> None:
        try:
            self.entries.write(key + SUFFIX, hashlib.sha256(value).digest() + value)
        except (OSError, UserError) as e:
            say_once(f"{self._what(e)}; what is compiled now is compiled again at the next start")

    def _what(self, e: OSError | UserError) -> str:
        return str(e) if isinstance(e, UserError) else f"{self._path}: {e.strerror or e}"


class Folder:
    """Files that any number of processes read and write; the least recently used are removed.

    max_bytes: of all files together; -1: no limit. Each of the processes that write at the same time may
    exceed it by a hundredth.
    """

    def __init__(self, path: pathlib.Path, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        self.unseen = max_bytes  # bytes that this process has written since it last looked at all files

    def read(self, name: str) -> bytes | None:
        """The file's content; None if there is no such file. Its time of change becomes that of its use."""
        try:
            content = (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        with contextlib.suppress(OSError):  # a folder that is read only
            os.utime(self.path / name)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it, at once: no process ever reads a part of it."""
        if 0 <= self.max_bytes < len(content):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._make_room(len(content))
        unfinished = self.path / f"{uuid.uuid4().hex}{SUFFIX}"
        try:
            unfinished.write_bytes(content)
            unfinished.replace(self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files, until another one of this size has room."""
        self.unseen += size
        if self.max_bytes < 0 or self.unseen <= self.max_bytes // 100:
            return
        self.unseen = size
        files = []
        for path in self.path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has just removed it
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(bytes for _, bytes, _ in files) + size - self.max_bytes
        for _, bytes, path in sorted(files):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):  # removed, or another user's
                path.unlink()
            excess -= bytes


class Bucket:
    """Files in object storage that any number of processes read and write.

    A request that fails may have taken a minute, so the first failure is the last: no process waits for each
    of its programs.
    """

    def __init__(self, folder: RemoteFolder):
        self.folder, self.readable, self.writable = folder, True, True
        self.absent: set[str] = set()

    def read(self, name: str) -> bytes | None:
        """The file's content; None if there is no such file. Raises UserError."""
        if not self.readable:
            return None
        try:
            return self.folder.read(name)
        except NoSuchObject:
            self.absent.add(name)
            return None
        except UserError as e:
            self.readable = self.writable = False
            raise UserError(f"{e}; it is not asked again") from None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace one that was read and is of no use. Raises UserError.

        Of many hosts that found none, and all write it now, one does: storage services allow a file about one
        write in a second.
        """
        if not self.writable:
            return
        try:
            self.folder.write(name, content, create_only=name in self.absent)
        except UserError:
            self.writable = False
            raise


@functools.cache
def say_once(message: str) -> None:
    print_line(message)
