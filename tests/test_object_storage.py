"""Checkpoints in object storage and on web servers give the same weights as a local folder, or one line."""

import collections
import hashlib
import http.server
import os
import pathlib
import socket
import threading
import time

import boto3
import jax
import numpy as np
import pytest
from conftest import CHECKPOINTS, mesh_of
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from test_dequantized import publish
from werkzeug.serving import WSGIRequestHandler, make_server

from checkpoints import fetching, object_storage
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.object_storage import NoSuchObject, RemoteFolder, is_url
from convert_checkpoint import convert
from feedback.errors import UserError
from quantize import FORMATS

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"
SIGNED = "AWS4-HMAC-SHA256 Credential=AKIAOURS/20260101/us-east-1/s3/aws4_request"  # as much as moto reads


class Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open

    def log(self, *_):
        pass


class Buckets:
    """moto's S3, which serves gs:// as well: Google's XML interface is S3's but for two headers.

    requests: (method, path, bytes that were asked for or None) of each.
    """

    def __init__(self):
        self.app, self.requests = DomainDispatcherApplication(create_backend_app), []
        self.server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Silent)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE")))
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer "):
            environ["HTTP_AUTHORIZATION"] = SIGNED
        return self.app(environ, start_response)


VARIABLES = {"AWS_ACCESS_KEY_ID": "AKIAOURS", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def buckets():
    """A server with the bucket "models", whose address the variables have."""
    found, before = Buckets(), dict(os.environ)
    os.environ.update(VARIABLES, AWS_ENDPOINT_URL_S3=found.url, STORAGE_EMULATOR_HOST=found.url)
    boto3.client("s3").create_bucket(Bucket="models")
    yield found
    found.server.shutdown()
    found.server.server_close()
    os.environ.clear()
    os.environ.update(before)


class Web(http.server.ThreadingHTTPServer):
    """A web server of files that sends parts of them.

    files:  content by path.
    faults: what to do instead, at each of the next requests for bytes of weights; None: nothing.
    ranges: (path, first, stop) of each part that it has sent.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), WebHandler)
        self.files, self.faults, self.ranges = {}, collections.deque(), []
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

    def log_message(self, *_):
        pass

    def do_GET(self):
        web, content = self.server, self.server.files.get(self.path)
        weights = self.path.endswith(".safetensors") and web.faults
        fault = web.faults.popleft() if weights else None
        if content is None or fault in (403, 500, 503):
            return self.answer(fault or 404, b"<Error><Code>Odd</Code><AWSAccessKeyId>hush</AWSAccessKeyId>")
        if fault == "changed":
            content = web.files[self.path] = content[:-1] + bytes([content[-1] ^ 1])
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        if self.headers.get("If-Match", etag) != etag:
            return self.answer(412, b"")
        asked = self.headers.get("Range")
        if not asked or fault == "whole":
            return self.answer(200, content, {"ETag": etag})
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        first, stop = first + (fault == "shifted"), min(last + 1, len(content))
        part = content[first:stop]
        place = f"bytes {first}-{stop - 1}/{len(content)}"
        web.ranges.append((self.path, first, stop))
        part = {"short": part[:-1], "long": part + b"x"}.get(fault, part)
        self.answer(206, part, {"ETag": etag, "Content-Range": place}, fault)

    def answer(self, status, body, headers=None, fault=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        half = len(body) // 2 if fault in ("cut", "reset", "slow") else len(body)
        self.wfile.write(body[:half])
        self.wfile.flush()
        if fault == "slow":
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of each kind, by name."""
    root = tmp_path_factory.mktemp("folders")
    for format in ("none", "int8", "int4"):
        convert(str(LLAMA4), str(root / format), FORMATS[format], file_bytes=50_000)
    others = ("gptq, ordered", "awq", "w4a16, asymmetric", "fp8", "mxfp4", "int8")
    quantized = {name: publish(root / f"by others, {i}", name)[0] for i, name in enumerate(others)}
    ours = {format: root / format for format in ("none", "int8", "int4")}
    return (
        {"llama3": LLAMA3, "llama4": LLAMA4}
        | ours
        | {f"{name} of others": x for name, x in quantized.items()}
    )


KINDS = ["llama3", "llama4", "none", "int8", "int4"]
KINDS += [f"{x} of others" for x in ("gptq, ordered", "awq", "w4a16, asymmetric", "fp8", "mxfp4", "int8")]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_local_folder(kind, folders, web):
    check_equal(web.add(folders[kind], kind.replace(" ", "-").replace(",", "")), folders[kind])


@pytest.mark.parametrize("kind", ["llama3", "int8"])
def test_in_buckets(kind, folder, folders):
    url = f"{folder.url}/{kind}"
    for path in folders[kind].iterdir():
        RemoteFolder(url).write(path.name, path)
    check_equal(url, folders[kind])


@pytest.mark.parametrize("kind, mesh", [("llama4", "tp8"), ("none", "ep2-tp4"), ("int8", "tp8")])
def test_loaded(kind, mesh, folders, web):
    """On several devices, each weight of which is fetched once."""
    url = web.add(folders[kind], f"loaded-{kind}")
    theirs, ours = open_checkpoint(url), open_checkpoint(folders[kind])
    web.ranges.clear()
    arrays = [load(x, mesh_of(x.config, mesh), "bfloat16", x.format, show=False) for x in (theirs, ours)]
    jax.tree.map(np.testing.assert_array_equal, *arrays)
    held = sum(x.nbytes for x in theirs.tensors)
    assert sum(stop - first for _, first, stop in web.ranges) <= held
