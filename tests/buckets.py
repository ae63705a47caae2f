"""A server of buckets on this machine: python3 tests/buckets.py PORT

It is moto's S3, which serves gs:// as well: Google's XML interface is S3's but for two headers.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

SIGNED = "AWS4-HMAC-SHA256 Credential=AKIAOURS/20260101/us-east-1/s3/aws4_request"  # as much as moto reads
VARIABLES = {"AWS_ACCESS_KEY_ID": "AKIAOURS", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_REGION": "us-east-1"}


class Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open

    def log(self, *_):
        pass


class Buckets:
    """The server. requests: (method, path, bytes that were asked for or None) of each."""

    def __init__(self, port: int = 0):
        self.app, self.requests = DomainDispatcherApplication(create_backend_app), []
        self.server = make_server("127.0.0.1", port, self, threaded=True, request_handler=Silent)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def __call__(self, environ, start_response):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE")))
        for name in ("RAW_URI", "REQUEST_URI"):  # moto does not decode the bucket's name in them
            environ[name] = environ[name].replace("%2D", "-")
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer "):
            environ["HTTP_AUTHORIZATION"] = SIGNED
        return self.app(environ, start_response)


@contextlib.contextmanager
def reachable(found: Buckets) -> Iterator[Buckets]:
    """A server with the bucket "models", whose address the variables have until it is shut down."""
    before = dict(os.environ)
    os.environ.update(VARIABLES, AWS_ENDPOINT_URL_S3=found.url, STORAGE_EMULATOR_HOST=found.url)
    boto3.client("s3").create_bucket(Bucket="models")
    yield found
    found.server.shutdown()
    found.server.server_close()
    os.environ.clear()
    os.environ.update(before)


if __name__ == "__main__":
    Buckets(int(sys.argv[1])).thread.join()
