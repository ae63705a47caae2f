"""Checkpoints in object storage and on web servers give the same weights as a local folder, or one line."""

import collections
import hashlib
import http.server
import os
import pathlib
import re
import socket
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest
from buckets import Buckets, reachable
from conftest import CHECKPOINTS, mesh_of
from obstore.exceptions import GenericError
from processes import Own, finish, start
from test_dequantized import publish

from checkpoints import layouts
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.remote import fetching, object_storage
from checkpoints.remote.object_storage import NoSuchObject, RemoteFolder, is_url
from checkpoints.unfinished import source_fingerprint
from convert_checkpoint import convert
from feedback.errors import UserError
from quantize import FORMATS

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"


@pytest.fixture(scope="module")
def buckets():
    with reachable(Buckets()) as found:
        yield found


class Web(http.server.ThreadingHTTPServer):
    """A web server of files that sends parts of them.

    files:  content by path.
    faults: what to do instead, at each of the next requests for bytes of weights; None: nothing.
    conditions: whether it heeds If-Match.
    ranges: (path, first, stop, its name as the client knows it) of each part that it has sent.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), WebHandler)
        self.files, self.faults, self.ranges, self.conditions = {}, collections.deque(), [], True
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def add(self, folder: pathlib.Path, name: str) -> str:
        """The URL of a copy of a folder."""
        self.files |= {f"/{name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
        return f"{self.url}/{name}"

    def close(self):
        self.shutdown()
        self.server_close()


class WebHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        web, self.path = self.server, urllib.parse.unquote(self.path)
        content, weights = web.files.get(self.path), self.path.endswith(".safetensors") and web.faults
        fault = web.faults.popleft() if weights else None
        if content is None or fault in (403, 500, 503):
            return self.answer(fault or 404, b"<Error><Code>Odd</Code><AWSAccessKeyId>hush</AWSAccessKeyId>")
        if fault == "changed":
            content = web.files[self.path] = content[:-1] + bytes([content[-1] ^ 1])
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        if web.conditions and self.headers.get("If-Match", etag) != etag:
            return self.answer(412, b"")
        asked = self.headers.get("Range")
        if not asked or fault == "whole":
            return self.answer(200, content, {"ETag": etag})
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        first, stop = first + (fault == "shifted"), min(last + 1, len(content))
        part = content[first:stop]
        place = f"bytes {first}-{stop - 1}/{len(content)}"
        web.ranges.append((self.path, first, stop, self.headers["Host"].partition(":")[0]))
        part = {"short": part[:-1], "long": part + b"x", "late": part + b"x"}.get(fault, part)
        self.answer(206, part, {"ETag": etag, "Content-Range": place}, fault)

    def answer(self, status, body, headers=None, fault=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        half = len(body) - (fault == "late")
        half = len(body) // 2 if fault in ("cut", "reset", "slow") else half
        self.wfile.write(body[:half])
        self.wfile.flush()
        if fault in ("slow", "late"):
            time.sleep(0.3)
            self.wfile.write(body[half:])
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + 7 * [0]))
        if fault in ("cut", "reset"):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


@pytest.fixture(scope="module")
def web():
    found = Web()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    """Tiny models are read in many requests, and retried soon; the cache is a new one."""
    monkeypatch.setattr(object_storage, "HEAD", 2**12)
    monkeypatch.setattr(object_storage, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(object_storage, "CHUNK", 2**12)
    monkeypatch.setattr(fetching, "PIECE", 2**14)
    monkeypatch.setattr(fetching, "GAP", 2**9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["s3", "gs"])
def folder(request, buckets):
    return RemoteFolder(f"{request.param}://models/a folder/{request.param}")


def test_files_of_a_folder(folder, tmp_path):
    assert folder.list() == {}
    assert folder.write("small", b"one")
    large = tmp_path / "large"
    large.write_bytes(os.urandom(11 * 2**20))
    with large.open("rb", buffering=0) as file:
        assert folder.write("large", file) and folder.write("deeper/x", b"")
    assert folder.list() == {"small": 3, "large": large.stat().st_size}
    assert folder.read("small") == b"one" and folder.read("large") == large.read_bytes()
    assert not folder.write("small", b"two", create_only=True) and folder.read("small") == b"one"
    assert folder.write("new", b"new", create_only=True) and folder.write("small", b"two")
    assert folder.read("small") == b"two"
    folder.delete("small")
    folder.delete("small")
    assert folder.list().keys() == {"large", "new"}
    with pytest.raises(NoSuchObject, match=f"{folder.url}/small: there is no such file"):
        folder.read("small")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Error performing GET https://storage.googleapis.com/b/x/tokenizer.json - timed out", "be reached"),
        ("Error performing GET https://storage.googleapis.com/b/x/config.json: status code: 403", "refused"),
        ("Error performing token request: Error performing GET http://metadata.google.internal/", "refused"),
    ],
)
def test_what_is_wrong(text, said):
    """Words of a URL say nothing of what is wrong."""
    error = RemoteFolder("gs://b/x")._error(GenericError(text), "tokenizer.json")
    assert re.match(f"gs://b/x/tokenizer.json: .*{said}", str(error))


def test_urls():
    assert is_url("gs://b/x") and is_url("foo+1://") and not is_url("a/b") and not is_url("/gs://b")
    with pytest.raises(UserError, match=r"^ftp://b/x: such a URL is not supported \(gs://, s3://, https"):
        RemoteFolder("ftp://me:hush@b/x")
    for url in ("https://me:hush@host/x", "https://host/x?token=hush"):
        with pytest.raises(UserError, match="^https://host/x: give the URL without") as caught:
            RemoteFolder(url)
        assert "hush" not in str(caught.value)
    assert RemoteFolder("s3://b/x/") == RemoteFolder("s3://b/x")


# ------------------------------------------------------------------------------------------------- weights


def check_equal(url: str, folder) -> None:
    """All arrays of the two, whole and in part, are the same bits."""
    theirs, ours = open_checkpoint(url), open_checkpoint(folder)
    assert theirs.remote and not ours.remote and theirs.config == ours.config and theirs.name == url
    assert theirs.sources.keys() == ours.sources.keys() and theirs.format == ours.format
    rng = np.random.default_rng(0)
    for name, source in theirs.sources.items():
        shape = source.info.shape
        ends = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in shape]
        for box in (tuple((0, n) for n in shape), tuple((int(lo), int(hi)) for lo, hi in ends)):
            found, expected = source.read(box), ours.sources[name].read(box)
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert found.tobytes() == expected.tobytes(), name


OURS = "none", "int8", "int4"
OTHERS = "gptq, ordered", "awq", "w4a16, asymmetric", "fp8", "mxfp4", "int8"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of each kind, by name."""
    root = tmp_path_factory.mktemp("folders")
    for format in OURS:
        convert(str(LLAMA4), str(root / format), FORMATS[format], file_bytes=50_000)
    quantized = {f"{x} of others": publish(root / f"by others, {x}", x)[0] for x in OTHERS}
    return {"llama3": LLAMA3, "llama4": LLAMA4, **{x: root / x for x in OURS}, **quantized}


@pytest.mark.parametrize("kind", ["llama3", "llama4", *OURS, *(f"{x} of others" for x in OTHERS)])
def test_equals_the_local_folder(kind, folders, web):
    check_equal(web.add(folders[kind], kind.replace(" ", "-").replace(",", "")), folders[kind])


def test_in_buckets(folder):
    url = f"{folder.url}/llama3"
    for path in LLAMA3.iterdir():
        RemoteFolder(url).write(path.name, path)
    check_equal(url, LLAMA3)


@pytest.mark.parametrize("kind", ["llama4", "none", "fp8 of others"])
def test_loaded(kind, folders, web):
    """On several devices, each weight of which is fetched once."""
    mesh = "ep2-tp4" if kind == "none" else "tp8"
    url = web.add(folders[kind], f"loaded-{kind}".replace(" ", "-"))
    theirs, ours = open_checkpoint(url), open_checkpoint(folders[kind])
    web.ranges.clear()
    fetching.release()
    arrays = [load(x, mesh_of(x.config, mesh), "bfloat16", x.format, show=False) for x in (theirs, ours)]
    theirs_there, ours_there = (jax.tree.leaves(jax.device_get(x)) for x in arrays)
    for x, y in zip(theirs_there, ours_there, strict=True):
        assert x.tobytes() == y.tobytes()  # some values in FP8 are NaN
    there = sum(content.size for content in {x.file.content for x in theirs.tensors})
    assert sum(stop - first for _, first, stop, _ in web.ranges) <= there


# ------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", [500, 503, "cut", "reset", "slow", "short", "long", "late", "shifted"])
def test_asked_again(fault, web):
    """Until the answer is right; a connection that is cut is taken up where it was cut."""
    web.faults.extend([] if fault == "slow" else [fault, fault])
    checkpoint = open_checkpoint(web.add(LLAMA3, f"again-{fault}"))
    assert checkpoint.remote and not web.faults
    (tensor,) = checkpoint.sources["embed"].tensors
    web.faults.extend([fault, None, fault, fault])
    web.ranges.clear()
    expected = open_checkpoint(LLAMA3).sources["embed"].tensors[0]
    np.testing.assert_array_equal(tensor.values, expected.values)
    assert not web.faults
    if fault == "cut":
        starts = [first for _, first, _, _ in web.ranges]
        assert len(set(starts)) == len(starts), "what had come was asked for again"


REFUSED = {
    503: "could not be reached (503 Service Unavailable, Odd); check the URL",
    403: "access refused (403 Forbidden, Odd); give a URL that anybody may read",
    "whole": "the server does not send parts of a file; download the folder first",
    "short": "the server sends fewer bytes than it was asked for, also when it is asked again",
    "shifted": "could not be reached",
    "changed": "was changed while it was read; run again",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(fault, web, monkeypatch):
    """In one line without a secret, and never with wrong weights; asked a bounded number of times."""
    url = web.add(LLAMA3, f"refused-{fault}")
    (tensor,) = open_checkpoint(url).sources["embed"].tensors
    web.faults.extend([fault] * 1000)
    with pytest.raises(UserError) as caught:
        tensor.read(0, 8)
    message = str(caught.value)
    web.faults.clear()
    assert message.startswith(f"{url}/model.safetensors: {REFUSED[fault]}") and "\n" not in message, message
    assert "hush" not in message


@pytest.mark.parametrize("conditions", [True, False])
def test_changed_in_between(conditions, web, monkeypatch):
    """A file that was replaced by one of the same size and shape after it was opened."""
    monkeypatch.setattr(web, "conditions", conditions)
    checkpoint = open_checkpoint(web.add(LLAMA3, "replaced"))
    name = "/replaced/model.safetensors"
    web.files[name] = web.files[name][:-1] + b"!"
    with pytest.raises(UserError, match="replaced/model.safetensors: was changed while it was read; run"):
        checkpoint.sources["embed"].tensors[0].read(0, 8)


def test_truncated(web, folders):
    url = web.add(folders["none"], "truncated")
    path = next(path for path in web.files if path.startswith("/truncated/weights"))
    web.files[path] = web.files[path][:-1]
    with pytest.raises(UserError, match=r"truncated/weights-.*: has \d+ bytes, not \d+ as "):
        open_checkpoint(url)
    del web.files[path]
    with pytest.raises(UserError, match=r"truncated/weights-.*: no such file; is the upload complete\?"):
        open_checkpoint(url)
    del web.files["/truncated/config.json"]
    with pytest.raises(UserError, match=r"/truncated: no config.json in it; is it a model's folder"):
        open_checkpoint(url)
    with pytest.raises(UserError, match=r"/x.gguf: GGUF files are read from a disk only; download it"):
        open_checkpoint(f"{web.url}/x.gguf")


def test_no_bucket_no_network_no_credentials(buckets, monkeypatch):
    with pytest.raises(UserError, match="^s3://other/x: there is no such bucket; check its name$"):
        open_checkpoint("s3://other/x")
    with pytest.raises(UserError, match="^s3://models/nothing: no config.json in it"):
        open_checkpoint("s3://models/nothing")
    with pytest.raises(UserError, match=r"^http://127.0.0.1:1/x/.*: could not be reached \(Connection ref"):
        open_checkpoint("http://127.0.0.1:1/x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="^s3://models/x: access refused .*; set AWS_ACCESS_KEY_ID and"):
        open_checkpoint("s3://models/x")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none.json")
    with pytest.raises(UserError, match="^gs://models/x: .*/none.json: No such file.*; set GOOGLE_APP"):
        open_checkpoint("gs://models/x")


# --------------------------------------------------------------------------------------------- small files


def test_small_files_are_kept_by_content(web, tmp_path, monkeypatch):
    """A folder that has changed gets another copy; a home that cannot be written is no obstacle."""
    url = web.add(LLAMA3, "small")
    first, again = (open_checkpoint(url) for _ in range(2))
    assert first.folder == again.folder and first.folder.is_relative_to(tmp_path)
    assert first.checksums() == again.checksums()
    weights = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.safetensors"))
    assert not weights
    web.files["/small/chat_template.jinja"] += b" "
    other = open_checkpoint(url)
    assert other.folder != first.folder and other.checksums() != first.checksums()
    assert (other.folder / "chat_template.jinja").read_bytes() == web.files["/small/chat_template.jinja"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert (open_checkpoint(url).folder / "config.json").is_file()


def test_checksums_take_no_requests(web):
    """Of a file whose version the server tells; they tell one version from another."""
    url = web.add(LLAMA3, "checksums")
    checkpoint = open_checkpoint(url)
    web.ranges.clear()
    found, fingerprint = checkpoint.checksums(), source_fingerprint(checkpoint)
    assert not web.ranges
    again = open_checkpoint(url)
    assert found == again.checksums() and fingerprint == source_fingerprint(again)
    name = "/checksums/model.safetensors"
    web.files[name] = web.files[name][:-1] + b"!"
    other = open_checkpoint(url)
    assert other.checksums()["weights"] != found["weights"] and source_fingerprint(other) != fingerprint


def test_columns_are_fetched_once(web, folders, tmp_path, monkeypatch):
    """GPTQ's rows are our columns: a conversion reads some of them at a time."""
    theirs = folders["gptq, ordered of others"]
    monkeypatch.setattr(layouts, "SLICE_BYTES", 2**14)
    convert(str(theirs), str(tmp_path / "local"))
    url = web.add(theirs, "gptq")
    web.ranges.clear()
    convert(url, str(tmp_path / "remote"))
    for path in (tmp_path / "local").glob("*.safetensors"):
        assert (tmp_path / "remote" / path.name).read_bytes() == path.read_bytes()
    fetched = sum(stop - first for _, first, stop, _ in web.ranges)
    assert fetched <= 1.1 * (theirs / "model.safetensors").stat().st_size


# ------------------------------------------------------------------------------------------ several processes

LOAD = """
import os
import sys
import jax
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, int(os.environ["JAX_PROCESS_ID"]))
from checkpoints.remote import fetching, object_storage
from checkpoints import layouts
from checkpoints.loading import load
from deployment.deploy import ModelOptions, open_agreed
from sharding.mesh import make_mesh
object_storage.HEAD, fetching.GAP, fetching.PIECE = 2**12, 2**9, 2**14
checkpoint = open_agreed(ModelOptions(sys.argv[1]), "checkpoint")
print(f"opened {checkpoint.remote}", flush=True)
mesh = make_mesh(checkpoint.config, 1, 1, 2, jax.devices())
weights = load(checkpoint, mesh, "bfloat16", checkpoint.format)
print(sum(shard.data.nbytes for x in jax.tree.leaves(weights) for shard in x.addressable_shards))
"""


@pytest.mark.deep
def test_each_process_fetches_its_part(web, folders, tmp_path):
    """They agree about the checkpoint, and read what their devices hold: half of the sharded weights."""
    url, program = web.add(folders["none"], "two"), tmp_path / "load.py"
    program.write_text(LOAD)
    web.ranges.clear()
    variables = {"PYTHONPATH": str(CHECKPOINTS.parents[1]), "XDG_CACHE_HOME": str(tmp_path)}
    # The server tells them apart by what they call it.
    urls = url, url.replace("127.0.0.1", "localhost")
    own = [Own([x], variables, program) for x in urls]
    outputs = finish(start(2, 1, own=own))
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    for host, (_, stdout, _) in zip(("127.0.0.1", "localhost"), outputs, strict=True):
        opened, held = stdout.split("\n")[:2]
        fetched = [(first, stop) for path, first, stop, by in web.ranges if by == host]
        heads = [stop - first for first, stop in fetched if not first]
        assert opened == "opened True"
        assert abs(sum(stop - first for first, stop in fetched) - int(held)) <= sum(heads)
