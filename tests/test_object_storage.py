"""Checkpoints in object storage and on web servers give the same weights as a local folder, or one line."""

import os
import threading

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from checkpoints.object_storage import NoSuchObject, RemoteFolder, is_url
from feedback.errors import UserError

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
    import boto3

    found, before = Buckets(), dict(os.environ)
    os.environ.update(VARIABLES, AWS_ENDPOINT_URL_S3=found.url, STORAGE_EMULATOR_HOST=found.url)
    boto3.client("s3").create_bucket(Bucket="models")
    yield found
    found.server.shutdown()
    found.server.server_close()
    os.environ.clear()
    os.environ.update(before)


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
