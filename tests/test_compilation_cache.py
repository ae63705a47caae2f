"""Compiled programs are kept for all processes: the next start compiles none, and damage is only a miss."""

import errno
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import pytest
from buckets import VARIABLES
from conftest import CHECKPOINTS, FAST
from jax._src import compilation_cache as jax_cache
from jax._src import compiler
from processes import Own, finish, start
from test_object_storage import buckets  # noqa: F401  a fixture

import main
from checkpoints.remote.object_storage import NoSuchObject, RemoteFolder
from deployment import compilation_cache
from deployment.compilation_cache import SUFFIX, Bucket, Folder, ProgramCache, enable_compilation_cache
from feedback.errors import UserError

LLAMA4 = CHECKPOINTS / "tiny-llama4"
ROOT = pathlib.Path(main.__file__).parent
COUNT = ROOT / "tests" / "count_programs.py"
deep = pytest.mark.deep


def counts(stderr: str) -> dict[str, int]:
    """What count_programs.py wrote."""
    return json.loads(re.search(r"^programs (.*)$", stderr, re.MULTILINE)[1])


# Processes of main.py


@pytest.fixture(scope="module")
def alone():
    """The truth: what one process with one device answers, which uses no cache."""
    command = [sys.executable, main.__file__, "--checkpoint", LLAMA4, "--json", "--prompt", "Who are you?"]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["responses"]


def start_two(variables: list[dict], *options) -> tuple[list, list[dict[str, int]]]:
    """The answers of two processes of two devices, and how many programs each of them compiled and read."""
    own = [Own(variables=x) for x in variables]
    arguments = ["--checkpoint", LLAMA4, "--json", "--prompt", "Who are you?", *options]
    ended = finish(start(2, 2, *arguments, wrapper=[COUNT.name], own=own, cached=False))
    assert [code for code, *_ in ended] == [0, 0], ended
    return json.loads(ended[0][1])["responses"], [counts(stderr) for *_, stderr in ended]


def check_two_starts(variables: list[dict], alone) -> None:
    answers, first = start_two(variables)
    assert answers == alone
    assert all(x["compiled"] >= 4 and x["read"] == 0 for x in first), first
    answers, second = start_two(variables)
    assert answers == alone
    assert second == [{"compiled": 0, "read": x["compiled"]} for x in first]


def test_each_process_has_a_disk(alone, tmp_path):
    """Also process 1 writes what it compiles: the second start compiles nothing on any host."""
    homes = [tmp_path / "0", tmp_path / "1"]
    check_two_starts([{"XDG_CACHE_HOME": str(home)} for home in homes], alone)
    kept = [{file.name for file in (home / "llama-jax").iterdir()} for home in homes]
    assert not kept[0] & kept[1]  # on CPU each process has keys of its own, of the devices that it can reach


@deep
def test_a_new_disk(alone, tmp_path):
    """One host compiles what the other reads: they wait for one another before they run anything."""
    variables = [{"XDG_CACHE_HOME": str(tmp_path / x)} for x in "01"]
    _, first = start_two(variables)
    (tmp_path / "1").rename(tmp_path / "broken")
    answers, second = start_two(variables)
    assert answers == alone
    assert [x["compiled"] for x in second] == [0, first[1]["compiled"]]


@deep
def test_processes_share_a_folder(alone, tmp_path):
    shared = tmp_path / "shared"
    variables = {"JAX_COMPILATION_CACHE_DIR": str(shared)}
    check_two_starts([variables | {"XDG_CACHE_HOME": str(tmp_path / x)} for x in "01"], alone)
    assert list(tmp_path.iterdir()) == [shared]
    # Another width of the cache is another program. The small programs, which have no such width, are read.
    _, wider = start_two([variables] * 2, "--max-len", 64)
    assert all(x["compiled"] >= 2 for x in wider), wider
    # Every second entry is damaged: each process compiles what it cannot read, and still answers.
    for file in sorted(shared.iterdir())[::2]:
        file.write_bytes(file.read_bytes()[:-1])
    answers, damaged = start_two([variables] * 2)
    assert answers == alone and sum(x["compiled"] for x in damaged) >= 4
    _, mended = start_two([variables] * 2)
    assert [x["compiled"] for x in mended] == [0, 0]


@deep
def test_processes_share_a_bucket(alone, buckets):  # noqa: F811
    variables = VARIABLES | {
        "AWS_ENDPOINT_URL_S3": buckets.url,
        "JAX_COMPILATION_CACHE_DIR": "s3://models/compiled",
    }
    check_two_starts([variables] * 2, alone)


# Programs in jax

PROGRAM = """
import sys, jax
from deployment.compilation_cache import enable_compilation_cache
enable_compilation_cache()
x = jax.numpy.arange(float(sys.argv[1]))
print(jax.jit(lambda x: (x * x).sum())(x))
"""


def run_counted(program: str, tmp_path, *arguments, **variables) -> tuple[dict[str, int], str, str]:
    """How many programs were compiled and read; stdout and stderr."""
    (tmp_path / "program.py").write_text(program)
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": FAST} | variables
    command = [sys.executable, COUNT, tmp_path / "program.py", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    stderr = re.sub("^programs .*$", "", done.stderr, flags=re.MULTILINE).strip()
    return counts(done.stderr), done.stdout, stderr


def run_program(tmp_path, cache: str, width=4, **variables) -> tuple[dict[str, int], str]:
    """How many programs were compiled and read, and stderr. The sum is right: 0 + 1 + 4 + 9."""
    variables = {"JAX_COMPILATION_CACHE_DIR": cache} | variables
    found, stdout, stderr = run_counted(PROGRAM, tmp_path, width, **variables)
    assert float(stdout) == sum(i * i for i in range(width))
    return found, stderr


def cut(entry: pathlib.Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-100])


def change(entry: pathlib.Path) -> None:
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)


def empty(entry: pathlib.Path) -> None:
    entry.write_bytes(b"")


def replace(entry: pathlib.Path) -> None:
    """By what a jaxlib cannot load, with the right checksum."""
    key = entry.name.removesuffix(SUFFIX)
    ProgramCache(str(entry.parent), -1).put(key, jax_cache.compress_executable(b"\0\0\0\0no program"))


@pytest.mark.parametrize("damage", [change, *(pytest.param(x, marks=deep) for x in (cut, empty, replace))])
def test_damaged_entries_are_replaced(damage, tmp_path):
    cache = tmp_path / "cache"
    first, stderr = run_program(tmp_path, str(cache))
    assert first["compiled"] > 0 and first["read"] == 0 and stderr == ""
    for entry in cache.iterdir():
        damage(entry)
    assert run_program(tmp_path, str(cache)) == (first, "")
    assert run_program(tmp_path, str(cache)) == ({"compiled": 0, "read": first["compiled"]}, "")


@deep
def test_other_programs_miss(tmp_path):
    """Another width, another flag of the compiler, and other optimizations are other programs."""
    cache = str(tmp_path / "cache")
    assert run_program(tmp_path, cache)[0]["compiled"]
    assert run_program(tmp_path, cache, width=5)[0]["compiled"]
    assert run_program(tmp_path, cache, XLA_FLAGS=f"{FAST} --xla_cpu_enable_fast_math=true")[0]["read"] == 0
    assert run_program(tmp_path, cache, JAX_DISABLE_MOST_OPTIMIZATIONS="1")[0]["read"] == 0
    assert run_program(tmp_path, cache)[0]["compiled"] == 0


def test_a_folder_that_cannot_be_written(tmp_path):
    """/proc is a folder in which nobody can make files: one line, however many programs there are."""
    found, stderr = run_program(tmp_path, "/proc/llama-jax")
    assert found["compiled"] > 1
    assert re.fullmatch(
        "/proc/llama-jax: .*; what is compiled now is compiled again at the next start", stderr
    )


# Programs that call generation.llm.load

FROM_PYTHON = """
import sys, jax
jax.jit(lambda: 0)()  # compiled before there is a cache
before = dict(jax.config.values)
from generation.llm import load
assert dict(jax.config.values) == before
if sys.argv[2:]:
    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
print(load(sys.argv[1]).generate("Tell me your name"))
"""


def test_from_python(tmp_path):
    """`load` keeps what it compiles where main.py does: the second process compiles nothing."""
    arguments, home = (FROM_PYTHON, tmp_path, CHECKPOINTS / "tiny-llama3"), {"XDG_CACHE_HOME": str(tmp_path)}
    first, answer, stderr = run_counted(*arguments, **home)
    assert "Tiny Llama" in answer and stderr == ""
    assert first["compiled"] > 4 and first["read"] == 0
    found, *printed = run_counted(*arguments, **home)
    assert found == {"compiled": 1, "read": first["compiled"] - 1}  # the one before `load`
    assert printed == [answer, stderr]


def test_from_python_with_a_cache_of_its_own(tmp_path):
    """What the calling program has configured stays, and is not taken over."""
    own, home = tmp_path / "own", {"XDG_CACHE_HOME": str(tmp_path)}
    run_counted(FROM_PYTHON, tmp_path, CHECKPOINTS / "tiny-llama3", own, **home)
    entries = [path.name for path in own.iterdir()]
    assert entries and not any(name.endswith(SUFFIX) for name in entries)
    assert not (tmp_path / "llama-jax").exists()


# Settings


def test_a_url_of_another_kind(settings, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "ftp://somewhere/compiled")
    jax.config.update("jax_compilation_cache_dir", "ftp://somewhere/compiled")  # as jax does at its import
    with pytest.raises(UserError, match="ftp://somewhere/compiled"):
        enable_compilation_cache()


@pytest.fixture
def settings():
    """enable_compilation_cache may change jax's; the tests' own are there again afterwards."""
    names = "dir", "max_size"
    before = {f"jax_compilation_cache_{x}": getattr(jax.config, f"jax_compilation_cache_{x}") for x in names}
    functions = compiler._cache_write, jax_cache.LRUCache
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    yield
    compiler._cache_write, jax_cache.LRUCache = functions
    for name, value in before.items():
        jax.config.update(name, value)


def test_sizes(settings, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_max_size == 10 * 2**30
    cache, _ = jax_cache.get_file_cache("somewhere")
    assert isinstance(cache, ProgramCache) and cache.entries.max_bytes == 10 * 2**30
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "5")
    jax.config.update("jax_compilation_cache_max_size", 5)  # as jax does when it is imported
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_max_size == 5


def without_a_name(monkeypatch):
    monkeypatch.delattr(compiler, "_cache_write")


def with_another_parameter(monkeypatch):
    monkeypatch.setattr(compiler, "_cache_write", lambda cache_key, executable: None)


@pytest.mark.parametrize("change", [without_a_name, with_another_parameter])
def test_another_jax(change, settings, monkeypatch, capsys):
    """A jax that is unknown keeps programs in its own way."""
    own = type("LRUCache", (), {})
    monkeypatch.setattr(jax_cache, "LRUCache", own)
    jax.config.update("jax_compilation_cache_max_size", -1)
    compilation_cache.say_once.cache_clear()
    change(monkeypatch)
    enable_compilation_cache()
    assert jax_cache.LRUCache is own and jax.config.jax_compilation_cache_max_size == -1
    assert capsys.readouterr().err.count("\n") == 1


# Folders and buckets


@pytest.fixture
def said(capsys):
    """The lines on stderr."""
    compilation_cache.say_once.cache_clear()
    return lambda: capsys.readouterr().err.splitlines()


def test_the_least_recently_used_go_first(tmp_path):
    folder, size = Folder(tmp_path, 3500), 1000
    for age, name in enumerate("abc"):
        folder.write(name + SUFFIX, bytes(size))
        os.utime(tmp_path / (name + SUFFIX), (age, age))
    (tmp_path / "other").write_bytes(bytes(size))  # which is not an entry, and has no part in this
    assert folder.read("a" + SUFFIX) == bytes(size)  # now the most recently used
    folder.write("d" + SUFFIX, bytes(size))
    assert {x.name.partition(".")[0] for x in tmp_path.iterdir()} == {"a", "c", "d", "other"}
    folder.write("e" + SUFFIX, bytes(2 * size))  # two must go
    assert len(list(tmp_path.iterdir())) == 3 and folder.read("c" + SUFFIX) is None
    folder.write("f" + SUFFIX, bytes(4 * size))  # larger than all may be together
    assert len(list(tmp_path.iterdir())) == 3 and folder.read("f" + SUFFIX) is None


def test_many_processes_keep_the_limit(tmp_path, monkeypatch):
    """They look at all the files now and then, not at each program."""
    looks, glob = [], pathlib.Path.glob
    monkeypatch.setattr(pathlib.Path, "glob", lambda *arguments: looks.append(1) or glob(*arguments))
    folders, limit, size, most = [Folder(tmp_path, 10_000) for _ in range(3)], 10_000, 20, 0
    for i in range(900):
        folders[i % 3].write(f"{i}{SUFFIX}", bytes(size))
        most = max(most, size * len(os.listdir(tmp_path)))
    assert limit - 3 * size <= most <= limit + 3 * limit // 100
    assert len(looks) <= 900 * size / (limit / 100) + 3


@pytest.mark.parametrize(("limit", "kept"), [(-1, 9), (0, 0)])
def test_no_limit_and_nothing_at_all(limit, kept, tmp_path):
    folder = Folder(tmp_path / "cache", limit)
    for i in range(9):
        folder.write(f"{i}{SUFFIX}", b"program")
    assert len(list(tmp_path.glob("cache/*"))) == kept


def test_a_full_disk(tmp_path, monkeypatch, said):
    """What was there stays, and no part of a file is left."""
    cache, write_bytes = ProgramCache(str(tmp_path), -1), pathlib.Path.write_bytes
    cache.put("a", b"old")

    def fill(self, content):
        write_bytes(self, content[:-1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(pathlib.Path, "write_bytes", fill)
    cache.put("a", b"new")
    cache.put("b", b"new")
    line = f"{tmp_path}: No space left on device; what is compiled now is compiled again at the next start"
    assert said() == [line]
    assert cache.get("a") == b"old" and cache.get("b") is None
    assert [x.name for x in tmp_path.iterdir()] == ["a" + SUFFIX]


def test_what_cannot_be_read(tmp_path, said):
    """A folder in an entry's place, which stands for a file of another user's, and a disk's fault."""
    (tmp_path / ("a" + SUFFIX)).mkdir()
    cache = ProgramCache(str(tmp_path), -1)
    assert cache.get("a") is None and cache.get("a") is None
    assert said() == [f"{tmp_path}: Is a directory; programs that cannot be read there are compiled"]
    assert cache.get("b") is None and said() == []


def test_many_write_the_same_entry(tmp_path):
    """Whoever reads, reads one of them whole."""
    values, stop, found = [bytes([i]) * 2**20 for i in range(3)], threading.Event(), set()
    cache = ProgramCache(str(tmp_path), -1)
    cache.put("a", values[0])

    def write(value: bytes) -> None:
        while not stop.is_set():
            ProgramCache(str(tmp_path), -1).put("a", value)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for _ in range(200):
        found.add(cache.get("a"))
    stop.set()
    for thread in threads:
        thread.join()
    assert found <= set(values) and len(found) > 1
    assert [x.name for x in tmp_path.iterdir()] == ["a" + SUFFIX]


def test_a_bucket(buckets):  # noqa: F811
    """One of many hosts writes what none has found; what was found damaged is replaced."""
    one, other = (ProgramCache("s3://models/programs", 5) for _ in range(2))
    assert one.get("a") is None and other.get("a") is None
    one.put("a", b"first")
    other.put("a", b"second")
    assert one.get("a") == other.get("a") == b"first"
    RemoteFolder("s3://models/programs").write("a" + SUFFIX, b"damaged")
    third = ProgramCache("s3://models/programs", 5)
    assert third.get("a") is None
    third.put("a", b"third")
    assert one.get("a") == b"third"


class Unreachable:
    """A RemoteFolder whose server does not answer. requests: how many it has had."""

    def __init__(self, reads: bool):
        self.reads, self.requests = reads, 0

    def read(self, name: str) -> bytes:
        self.requests += 1
        raise NoSuchObject(name) if self.reads else UserError("s3://models: could not be reached")

    def write(self, name: str, content: bytes, create_only: bool) -> bool:
        self.requests += 1
        raise UserError("s3://models: access refused")


@pytest.mark.parametrize(("reads", "requests"), [(False, 1), (True, 4)])
def test_a_bucket_that_is_lost(reads, requests, said):
    """After the first failure there is no other: a request may wait for a minute."""
    cache, folder = ProgramCache("s3://models", 5), Unreachable(reads)
    cache.entries = Bucket(folder)
    for key in "abc":
        assert cache.get(key) is None
        cache.put(key, b"program")
    assert folder.requests == requests and len(said()) == 1
