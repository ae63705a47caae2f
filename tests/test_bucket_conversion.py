"""Conversions into a bucket: whole or not to be opened, the same bytes as on a disk, also after a kill."""

import errno
import functools
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import boto3
import processes
import pytest
from buckets import Buckets, reachable
from conftest import CHECKPOINTS
from test_conversion import contents, edited, flip, random_model, small_model

import convert_checkpoint
from checkpoints.checkpoint import open_checkpoint
from checkpoints.file_plan import plan_files
from checkpoints.folders import INDEX, STATE
from checkpoints.remote import object_storage
from checkpoints.remote.bucket_folder import NewBucketFolder, most_at_once
from convert_checkpoint import convert, verify
from feedback.errors import UserError
from quantize import INT8

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"
SMALL_FILES = 150_000  # bytes of a file, so that tiny-llama4 in int8 has a dozen


class WatchedBuckets(Buckets):
    """A server that counts the requests by which something changes, from 1 on, and has `react` answer them.

    react(number, handle, environ, start_response): handle() does what is asked for. changes: (method, path,
    query) of each.
    """

    def __init__(self):
        super().__init__()
        self.counting = threading.Lock()
        self.reset()

    def reset(self, react=lambda number, handle, *_: handle()) -> None:
        self.react, self.changes = react, []

    def __call__(self, environ, start_response):
        handle = functools.partial(super().__call__, environ, start_response)
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return handle()
        with self.counting:
            self.changes.append(tuple(environ[x] for x in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING")))
            number = len(self.changes)
        return self.react(number, handle, environ, start_response)

    def contents(self, folder: str) -> dict[str, bytes]:
        """The content of each object in a folder of the bucket, as boto3 reads it."""
        client, prefix = boto3.client("s3"), f"{folder}/"
        listed = client.list_objects_v2(Bucket="models", Prefix=prefix).get("Contents", [])
        keys = [x["Key"] for x in listed]
        return {
            key.removeprefix(prefix): client.get_object(Bucket="models", Key=key)["Body"].read()
            for key in keys
        }


def put(name: str, content: bytes) -> None:
    boto3.client("s3").put_object(Bucket="models", Key=name, Body=content)


def unavailable(handle, environ, start_response):
    """The answer of a server that has too much to do."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response("503 Slow Down", [("Content-Length", "0")])
    return [b""]


def cut(handle, environ, start_response):
    """A connection that breaks after some of the request."""
    environ["wsgi.input"].read(min(1000, int(environ.get("CONTENT_LENGTH") or 0)))
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    start_response("200 OK", [])
    return []


def unheard(handle, environ, start_response):
    """A connection that breaks before the answer, when all is done."""
    answer = list(handle())
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return answer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with reachable(WatchedBuckets()) as found:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
        yield found


@pytest.fixture
def bucket(server, monkeypatch):
    monkeypatch.setattr(object_storage, "FIRST_WAIT", 0.001)
    server.reset()
    return server


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """The contents of a conversion of tiny-llama3 on a disk, in files of 50,000 bytes."""
    folder = tmp_path_factory.mktemp("llama3") / "x"
    convert(str(LLAMA3), str(folder), file_bytes=50_000)
    return contents(folder)


@pytest.mark.parametrize(("scheme", "source", "format"), [("s3", LLAMA4, INT8), ("gs", LLAMA3, None)])
def test_same_bytes_as_on_a_disk(scheme, source, format, bucket, tmp_path, capsys):
    """Every object; --verify finds them right, and names what is damaged; done again, nothing is written."""
    url, rng = f"{scheme}://models/same-{scheme}", random.Random(0)
    convert(str(source), str(tmp_path / "x"), format, file_bytes=SMALL_FILES)
    convert(str(source), f"{url}/", format, file_bytes=SMALL_FILES)
    whole = bucket.contents(f"same-{scheme}")
    assert whole == contents(tmp_path / "x")
    assert len(verify(url, str(source))) == 2
    bucket.reset()
    capsys.readouterr()
    convert(str(source), url, format, file_bytes=SMALL_FILES)
    assert f"{url} is there already" in capsys.readouterr().err and not bucket.changes
    last = sorted(name for name in whole if name.startswith("weights-"))[-1]
    damages = {
        last: whole[last][:4096] + flip(rng, whole[last][4096:]),
        "weights-00002.safetensors": whole["weights-00002.safetensors"][:-1],
        "weights-00003.safetensors": whole["weights-00004.safetensors"],
        "tokenizer.json": whole["tokenizer.json"] + b" ",
    }
    for name, content in damages.items():
        put(f"same-{scheme}/{name}", content)
        with pytest.raises(UserError, match=rf"{url}/{name}"):
            verify(url, str(source))
        put(f"same-{scheme}/{name}", whole[name])
    boto3.client("s3").delete_object(Bucket="models", Key=f"same-{scheme}/{last}")
    with pytest.raises(UserError, match=rf"{url}/{last}"):
        verify(url)


# ---------------------------------------------------------------------------------------------------- killed


@pytest.fixture(scope="module")
def large(tmp_path_factory, server):
    """A model with files that are uploaded in parts, and its conversion on a disk and in a bucket.

    -> (its folder, the contents of the converted folder, the requests that changed something in the bucket)
    """
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((LLAMA3 / "config.json").read_text())
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    sizes |= dict(intermediate_size=64, num_hidden_layers=1, vocab_size=150_000, tie_word_embeddings=False)
    source = random_model(folder / "source", LLAMA3, config | sizes)
    convert(str(source), str(folder / "x"), file_bytes=12 * 2**20)
    server.reset()
    convert(str(source), "s3://models/undisturbed", file_bytes=12 * 2**20)
    expected = contents(folder / "x")
    assert server.contents("undisturbed") == expected
    return source, expected, server.changes


def fatal_points(changes) -> list[tuple[int, bool]]:
    """(number of the request at which the conversion is killed, whether the server does it nevertheless)."""
    last = len(changes)
    start, end = (
        next(i for i, (method, _, query) in enumerate(changes, 1) if method == "POST" and text in query)
        for text in ("uploads", "uploadId")
    )
    assert end - start == 3 and "delete" in changes[last - 1][2] and changes[last - 2][1].endswith(INDEX)
    small = next(i for i, (_, path, _) in enumerate(changes, 1) if path.endswith("config.json"))
    return [
        (end, False),  # all parts are there, but not the file
        (last - 1, True),  # the index is there
        (1, False),
        (1, True),  # only conversion.json is there
        (start, True),
        (start + 1, True),  # a part
        (end, True),  # a file
        (small, False),
        (last - 1, False),
        (last, False),
        (last, True),
    ]


@pytest.mark.parametrize("point", [0, 1, *(pytest.param(i, marks=pytest.mark.deep) for i in range(2, 11))])
def test_killed_conversion_goes_on(point, large, bucket, tmp_path):
    """SIGKILL at a request: nothing opens that is not whole, and nothing is left on the local disk.

    The same command completes it. It writes no file again, unless a file is missing of an array in several.
    """
    source, expected, changes = large
    fatal, done = fatal_points(changes)[point]
    folder = f"killed-at-{point}"
    command = [sys.executable, convert_checkpoint.__file__, source, f"s3://models/{folder}", "--file-mib", 12]
    environment = os.environ | {"TMPDIR": str(tmp_path), "XLA_FLAGS": ""}
    started = threading.Event()

    def kill(number, handle, environ, start_response):
        started.wait()
        if number < fatal:
            return handle()
        answer = list(handle()) if done and number == fatal else unavailable(handle, environ, start_response)
        process.kill()
        process.wait()
        return answer

    bucket.reset(kill)
    process = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE)
    started.set()
    process.communicate(timeout=processes.SECONDS)
    assert process.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())
    last, before = len(changes), bucket.contents(folder)
    whole = fatal == last or (fatal, done) == (last - 1, True)
    if whole:
        assert {name: x for name, x in before.items() if name != STATE} == expected
        open_checkpoint(f"s3://models/{folder}")
    else:
        with pytest.raises(UserError, match="unfinished conversion" if before else "no config.json in it"):
            open_checkpoint(f"s3://models/{folder}")
    bucket.reset()
    convert(str(source), f"s3://models/{folder}", file_bytes=12 * 2**20)
    assert bucket.contents(folder) == expected
    verify(f"s3://models/{folder}", str(source))
    file_sets = plan_files(open_checkpoint(str(source)), None, "bfloat16", 12 * 2**20)
    kept = {name for x in file_sets for name in x.files if x.files.keys() <= before.keys()}
    assert kept.isdisjoint(path.rpartition("/")[2] for _, path, _ in bucket.changes)


def test_faults_that_pass(large, bucket):
    """Every request fails in each way before it is answered."""
    source, expected, changes = large
    faults = unavailable, cut, unheard

    def react(number, handle, environ, start_response):
        made_before = bucket.changes[: number - 1].count(bucket.changes[number - 1])
        if made_before < len(faults):
            return faults[made_before](handle, environ, start_response)
        return handle()

    bucket.reset(react)
    convert(str(source), "s3://models/faulty", file_bytes=12 * 2**20)
    assert bucket.contents("faulty") == expected and len(bucket.changes) == 4 * len(changes)


@pytest.mark.parametrize(("fault", "first"), [(unavailable, 1), (cut, 4), (unavailable, 30)])
def test_faults_that_stay(fault, first, bucket, llama3, monkeypatch):
    """One line that names the object and says what to do; and the same command goes on."""
    monkeypatch.setattr(object_storage, "RETRIES", 2)
    folder = f"stays-{fault.__name__}-{first}"

    def react(number, handle, environ, start_response):
        return fault(handle, environ, start_response) if number >= first else handle()

    bucket.reset(react)
    with pytest.raises(UserError, match=rf"s3://models/{folder}/\S+: .*run again to go on$") as error:
        convert(str(LLAMA3), f"s3://models/{folder}", file_bytes=50_000)
    assert "\n" not in str(error.value)
    bucket.reset()
    convert(str(LLAMA3), f"s3://models/{folder}", file_bytes=50_000)
    assert bucket.contents(folder) == llama3


# -------------------------------------------------------------------------------- other conversions and files


def test_whose_folder_it_is(bucket, tmp_path):
    """Another conversion's, unfinished or not; something else; not a bucket. Nothing in it is touched."""

    def refused(url, reason, **options):
        bucket.reset()
        folder = url.rpartition("/")[2]
        before = bucket.contents(folder)
        with pytest.raises(UserError, match=f"^{url}: {reason}"):
            convert(str(LLAMA3), url, **options)
        assert bucket.contents(folder) == before

    url = "s3://models/mine"
    convert(str(LLAMA3), url)
    refused(url, "exists and is something else", format=INT8)
    put(f"theirs/{STATE}", b'{"source": "another"}')
    refused("s3://models/theirs", "another conversion is writing there or has left its files")
    put("diary/today", b"nothing happened")
    refused("s3://models/diary", "exists and is something else")
    refused("https://example.com/x", "cannot be written to; give a bucket")
    with pytest.raises(UserError, match="s3://models/theirs: .*unfinished conversion"):
        open_checkpoint("s3://models/theirs")


def test_files_of_another_conversion(bucket):
    """In spite of the right conversion.json a file with other tensors is refused by name, and kept."""
    url, name = "s3://models/changed", "weights-00001.safetensors"
    convert(str(LLAMA3), url)
    whole = bucket.contents("changed")
    identity = json.loads(whole[INDEX])["metadata"]
    convert(str(LLAMA3), "s3://models/in-int8", INT8)
    others = bucket.contents("in-int8")[name], whole[name][:-1], b""
    for other in others:
        folder = f"changed-{len(other)}"
        put(f"{folder}/{STATE}", json.dumps(identity).encode())
        put(f"{folder}/{name}", other)
        with pytest.raises(UserError, match=f"^s3://models/{folder}/{name}: .*remove s3://models/{folder}"):
            convert(str(LLAMA3), f"s3://models/{folder}")
        assert bucket.contents(folder)[name] == other


def test_second_conversion_while_one_writes(bucket, llama3):
    """With the same identity both end, with another one the second is refused: the result is the first's."""
    url, outcomes = "s3://models/both", []

    def react(number, handle, *_):
        answer = list(handle())
        if number == 3:
            with pytest.raises(UserError, match=f"^{url}: another conversion is writing there"):
                convert(str(LLAMA3), url, INT8)
            convert(str(LLAMA3), url, file_bytes=50_000)
            outcomes.append(bucket.contents("both"))
        return answer

    bucket.reset(react)
    convert(str(LLAMA3), url, file_bytes=50_000)
    assert [*outcomes, bucket.contents("both")] == [llama3] * 2


@pytest.mark.parametrize("format", [None, INT8])
def test_second_conversion_that_overtakes_the_first(format, bucket, tmp_path):
    """It is done before the first writes its conversion.json, which is deleted again."""
    url, folder = f"s3://models/overtaken-{format}", f"overtaken-{format}"
    convert(str(LLAMA3), str(tmp_path / "x"), format)

    def react(number, handle, *_):
        if number == 1:
            convert(str(LLAMA3), url, format)
        return handle()

    bucket.reset(react)
    with pytest.raises(UserError, match=f"^{url}: another conversion was completed there just now"):
        convert(str(LLAMA3), url)
    assert bucket.contents(folder) == contents(tmp_path / "x")


def test_conversion_that_fails_at_once(bucket, tmp_path):
    """It leaves no conversion.json behind: the next one may be another."""
    source = small_model(tmp_path / "source")
    with edited(source) as tensors:
        tensors["model.norm.weight"][:] = float("nan")
    with pytest.raises(UserError, match="holds NaN or Inf"):
        convert(str(source), "s3://models/not-finite")
    assert not bucket.contents("not-finite")
    convert(str(source), "s3://models/not-finite", INT8, allow_nonfinite=True)


@pytest.mark.deep
def test_two_processes_divide_the_files(bucket, tmp_path):
    """The same bytes as of one process, and each file is written once."""
    convert(str(LLAMA4), str(tmp_path / "x"), file_bytes=2**20)
    bucket.reset()
    own = processes.Own((), os.environ | {"XLA_FLAGS": ""}, convert_checkpoint.__file__)
    command = [LLAMA4, "s3://models/together", "--file-mib", 1]
    (code, _, first), (other, _, second) = processes.finish(processes.start(2, 1, *command, own=[own] * 2))
    assert (code, other) == (0, 0), first + second
    assert bucket.contents("together") == contents(tmp_path / "x")
    assert len(set(bucket.changes)) == len(bucket.changes) == len(contents(tmp_path / "x")) + 2
    assert "to be written; at most" in first and "to be written" not in second


# ------------------------------------------------------------------------------------------------ local disk


def test_files_that_are_here_at_a_time():
    """Of a weight that is uploaded, and of those that are converted meanwhile."""
    share = [SimpleNamespace(nbytes=size, weights=[[]] * n) for size, n in ((5, 3), (1, 1), (7, 2), (2, 1))]
    assert [most_at_once(share, ahead) for ahead in range(6)] == [7, 9, 13, 13, 15, 15]
    assert most_at_once([], 3) == 0


def test_local_disk(bucket, tmp_path, monkeypatch):
    """It holds only files that are being written, at most as large as announced. A full one is one line."""
    file_sets = plan_files(open_checkpoint(str(LLAMA4)), INT8, "bfloat16", 50_000)
    bound, files = most_at_once(file_sets, NewBucketFolder.ahead), []
    assert bound < sum(file_set.nbytes for file_set in file_sets) / 2
    new, add = NewBucketFolder.new_file, NewBucketFolder.add_weights

    def new_file(*arguments):
        files.append(new(*arguments))
        return files[-1]

    def add_weights(*arguments):
        there = [os.fstat(file.file.fileno()) for file in files if not file.file.closed]
        whole_pages = 3 * 4096 * len(there)  # the header, and the ends of tensors
        assert sum(512 * x.st_blocks for x in there) <= bound + whole_pages
        add(*arguments)
        assert arguments[2].file.closed

    with monkeypatch.context() as patch:
        patch.setattr(NewBucketFolder, "new_file", new_file)
        patch.setattr(NewBucketFolder, "add_weights", add_weights)
        convert(str(LLAMA4), "s3://models/bounded", INT8, file_bytes=50_000)
    assert len(files) == sum(len(file_set.files) for file_set in file_sets)
    assert all(file.file.closed for file in files)

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda folder: usage._replace(free=bound - 1))
        message = rf"at most .* GB at a time are in {tmp_path}, which has .*; set TMPDIR to a folder on"
        with pytest.raises(UserError, match=message):
            convert(str(LLAMA4), "s3://models/full", INT8, file_bytes=50_000)
    pwrite, writes = os.pwrite, itertools.count()

    def full(*arguments):
        if next(writes) == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(UserError, match=f"{tmp_path}: No space left on device; make room, or set TMPDIR"):
            convert(str(LLAMA4), "s3://models/full", INT8, file_bytes=50_000)
    convert(str(LLAMA4), "s3://models/full", INT8, file_bytes=50_000)
    assert bucket.contents("full") == bucket.contents("bounded") and not list(tmp_path.iterdir())
