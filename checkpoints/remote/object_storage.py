"""Folders in object storage (gs://, s3://) and on web servers (https://): list, read and write their files.

The library obstore makes the requests; which variables hold its credentials, `_store` says. A read is retried
here, from the byte on at which an answer broke off, and each answer is compared with what was known of the
file when it was opened: its size, and its ETag or time of change.
"""

import dataclasses
import functools
import io
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple, TypeVar

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import from_url

from feedback.errors import UserError

SCHEMES = ("gs", "s3", "https", "http")
HEAD = 2**18  # bytes that `open` reads: those of most files' headers
RETRIES = 7  # of a request, after FIRST_WAIT seconds, twice as many, and so on: 13 s in all
FIRST_WAIT = 0.1
PART = 2**23  # bytes of a large file that are sent in one request; PARTS is about the most that S3 allows
PARTS = 9_999
CHUNK = 2**20  # bytes of an answer that are copied to their place at a time
CLIENT = {
    "allow_http": True,
    "connect_timeout": "10s",
    "read_timeout": "20s",  # without a byte; a slow answer may take longer
    "timeout": "15min",
    "user_agent": "llama-jax",
}
CREDENTIALS = {
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials; GOOGLE_SKIP_SIGNATURE=true reads a "
    "public bucket without",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_SKIP_SIGNATURE=true reads a "
    "public bucket without",
    **dict.fromkeys(("https", "http"), "give a URL that anybody may read, or download the folder"),
}
# In URLs of the services that give a cloud's machine its account; they are asked where no variable is set.
MACHINES_ACCOUNT = r"169\.254\.|/latest/(api/token|meta-data)|metadata\.google|/computeMetadata/"
Result = TypeVar("Result")


class NoSuchObject(UserError):
    """What a URL names is not there."""


class WrongAnswer(Exception):
    """An answer that is not what was asked for; asking again may help."""


class Identity(NamedTuple):
    """What tells the content of a file from another, as far as the server says. size: in bytes."""

    size: int
    etag: str | None
    changed: str  # ISO 8601; "" if the server does not say


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


@dataclasses.dataclass(frozen=True)
class RemoteFolder:
    """A folder of files that a URL names. Threads may share it.

    locate: of a folder whose files never change, from a file's name to the URL that its bytes are read from,
    which may expire, and the HTTP headers to send, such as a token.
    All methods raise UserError naming the URL, and none of the messages has a credential in it.
    """

    url: str
    locate: Callable[[str], tuple[str, dict[str, str]]] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        if self.scheme not in SCHEMES:
            known = ", ".join(f"{x}://" for x in SCHEMES)
            raise UserError(f"{_without_secrets(self.url)}: such a URL is not supported ({known})")
        if _without_secrets(self.url) != self.url:
            raise UserError(
                f"{_without_secrets(self.url)}: give the URL without a user name and without ?..."
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0].lower()

    @functools.cached_property
    def _reading(self):
        """obstore's store; what fails is asked for again here."""
        return _store(self.url, 0)

    @functools.cached_property
    def _located(self) -> dict:
        """obstore's stores of single files, by name."""
        return {}

    def _place(self, name: str) -> tuple:
        """-> (obstore's store, the path in it) of a file to read."""
        if not self.locate:
            return self._reading, name
        if (store := self._located.get(name)) is None:
            url, headers = self.locate(name)
            store = self._located[name] = _store(url, 0, headers, called=self.url)
        return store, ""

    def _get(self, name: str, **options):
        """obstore's answer for a file."""
        store, path = self._place(name)
        try:
            return obstore.get(store, path, options=options)
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as e:
            if not self.locate:
                raise
            if self._located.get(name) is store:  # else another thread has noticed that the URL has expired
                self._located.pop(name, None)
            raise WrongAnswer(_reason(str(e))) from None

    def _identity(self, meta: dict) -> Identity:
        """meta: obstore's ObjectMeta."""
        if self.locate:  # servers that share the files may send ETags of their own
            return Identity(meta["size"], None, self.url)
        changed = meta["last_modified"]
        return Identity(meta["size"], meta["e_tag"], changed.isoformat() if changed.timestamp() else "")

    @functools.cached_property
    def _writing(self):
        """obstore's store; it sends parts of a file that fail again."""
        return _store(self.url, RETRIES)

    def open(self, name: str) -> tuple[Identity, bytes]:
        """-> (which file this is, its first HEAD bytes). Raises NoSuchObject if it is not there."""

        def ask() -> tuple[Identity, bytes]:
            try:
                answer = self._get(name, range=(0, HEAD))
            except exceptions.GenericError as e:
                if "status code: 416" not in str(e):
                    raise
                # An empty file has no byte that could be asked for.
                return self._identity(obstore.head(*self._place(name))), b""
            identity, text = self._identity(answer.meta), bytes(answer.bytes())
            if len(text) != min(HEAD, identity.size):
                raise WrongAnswer(f"{len(text)} bytes instead of {min(HEAD, identity.size)}")
            return identity, text

        return self._retried(ask, name)

    def read_into(
        self, place: np.ndarray, name: str, start: int, identity: Identity, abandoned: threading.Event
    ) -> None:
        """Fill an array of bytes with those of a file from `start` on.

        identity: of the file when it was opened. abandoned: set when nobody wants the bytes any longer; what
        has not come is not asked for again.
        Raises UserError if the file has changed since it was opened, or if the bytes do not come.
        """
        done, stop = 0, start + len(place)

        def ask() -> None:
            nonlocal done
            if done == len(place):  # what failed after all bytes had come is asked for again as a whole
                done = 0
            for chunk in self._chunks(name, start + done, stop, identity):
                if done + len(chunk) > len(place):
                    raise WrongAnswer("more bytes than it was asked for")
                place[done : done + len(chunk)] = chunk
                done += len(chunk)
            if done < len(place):
                raise WrongAnswer("fewer bytes than it was asked for")

        self._retried(ask, name, abandoned.wait)

    def _chunks(self, name: str, start: int, stop: int, identity: Identity) -> Iterator[np.ndarray]:
        """The bytes [start, stop), some at a time, of a file that is still the same."""
        options = {}
        if identity.etag and not identity.etag.startswith(
            "W/"
        ):  # no condition that a weak ETag could fulfill
            options["if_match"] = identity.etag
        answer = self._get(name, range=(start, stop), **options)
        if self._identity(answer.meta) != identity:
            raise UserError(f"{self.url}/{name}: was changed while it was read; run again")
        if answer.range != (start, stop):
            raise WrongAnswer(f"bytes {answer.range} instead of {(start, stop)}")
        for chunk in answer.stream(min_chunk_size=CHUNK):
            yield np.frombuffer(chunk, np.uint8)

    def list(self) -> dict[str, int]:
        """The size of each file by its name, of those in this folder itself; {} if there is no such folder.

        Web servers cannot list a folder.
        """
        found = self._retried(lambda: obstore.list_with_delimiter(self._reading))["objects"]
        return {file["path"].rpartition("/")[2]: file["size"] for file in found}

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises NoSuchObject if it is not there."""

        def ask() -> bytes:
            answer = self._get(name)
            text = bytes(answer.bytes())
            if len(text) != answer.meta["size"]:
                raise WrongAnswer(f"{len(text)} bytes instead of {answer.meta['size']}")
            return text

        return self._retried(ask, name)

    def write(self, name: str, content: bytes | io.FileIO, create_only: bool = False) -> bool:
        """Write a file whole: it is there when it is complete, and not before.

        content: its bytes, or an open local file, of which a few parts are in memory at a time.
        create_only: leave a file of this name as it is if there is one; of several processes that do this at
        the same time one writes. Returns whether the file was written.
        """
        options = {"mode": "create", "use_multipart": False} if create_only else {}
        if isinstance(content, io.FileIO):
            content.seek(0)
            size = os.fstat(content.fileno()).st_size
            options["chunk_size"] = max(PART, -(-size // PARTS))
        try:
            obstore.put(self._writing, name, content, **options)
        except exceptions.AlreadyExistsError:
            return False
        except Exception as e:
            raise self._error(e, name) from None
        return True

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        try:
            obstore.delete(self._writing, name)
        except FileNotFoundError:
            pass
        except Exception as e:
            raise self._error(e, name) from None

    def _retried(self, ask: Callable[[], Result], name: str = "", wait: Callable = time.sleep) -> Result:
        """ask(), a bounded number of times if an answer is cut off, wrong or a server's error.

        wait: for so many seconds before a retry; there is none if it returns True.
        """
        for retry in itertools.count():
            try:
                return ask()
            except Exception as e:
                # With some chance, so that requests that failed together are not repeated together.
                pause = FIRST_WAIT * 2**retry * random.uniform(0.5, 1)
                if retry == RETRIES or not _may_pass(e) or wait(pause):
                    raise self._error(e, name) from None

    def _error(self, e: Exception, name: str) -> Exception:
        """The UserError that says what happened and what to do; a fault of this program stays as it is."""
        where = f"{self.url}/{name}" if name else self.url
        if isinstance(e, WrongAnswer):
            return UserError(f"{where}: the server sends {e}, also when it is asked again; try again later")
        if not isinstance(e, (exceptions.BaseError, FileNotFoundError)):
            return e
        text, reason = str(e), _reason(str(e))
        if "NoSuchBucket" in text:
            return NoSuchObject(f"{self.url}: there is no such bucket; check its name")
        if isinstance(e, FileNotFoundError) or re.search(r"status code: 404", text):
            return NoSuchObject(f"{where}: there is no such file; check the name")
        if isinstance(e, exceptions.PreconditionError):
            return UserError(f"{where}: was changed while it was read; run again")
        if isinstance(e, exceptions.NotSupportedError):
            return UserError(f"{where}: the server does not send parts of a file; download the folder first")
        words = re.sub(r"\S+://\S+", "", text)  # a URL may have any words, as in tokenizer.json
        refused = re.search(r"status code: 40[13]|token|credential", words, re.IGNORECASE)
        if refused or re.search(MACHINES_ACCOUNT, text):
            check = "check HF_TOKEN" if self.locate else CREDENTIALS[self.scheme]
            return UserError(f"{where}: access refused ({reason}); {check}")
        what = "check the URL, the network, and the endpoint if a variable sets one"
        return UserError(f"{where}: could not be reached ({reason}); {what}")


def _store(url: str, retries: int, headers: dict[str, str] | None = None, called: str = ""):
    """obstore's store of a URL, with credentials from the variables that the services' own tools read.

    called: what messages call a URL that has secrets in it.

    s3: AWS_ACCESS_KEY_ID and the like, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION, AWS_SKIP_SIGNATURE,
        a machine's role; AWS_PROFILE and ~/.aws if boto3 is installed.
    gs: GOOGLE_APPLICATION_CREDENTIALS, gcloud's login, a machine's account, GOOGLE_SKIP_SIGNATURE,
        STORAGE_EMULATOR_HOST.
    """
    options = dict(CLIENT)
    if headers:
        options["default_headers"] = headers
    scheme = url.partition("://")[0].lower()
    service = {"s3": _aws_profile, "gs": _gcs_emulator}.get(scheme, dict)()
    retry = {
        "max_retries": retries,
        "backoff": {"init_backoff": timedelta(seconds=FIRST_WAIT)},
        "retry_timeout": timedelta(minutes=2),
    }
    try:
        return from_url(url, client_options=options, retry_config=retry, **service)
    except (exceptions.BaseError, ValueError, OSError) as e:
        reason = str(e).split("\n")[0].removeprefix("Generic ")
        raise UserError(f"{called or url}: {reason}; {CREDENTIALS[scheme]}") from None


def _aws_profile() -> dict:
    """Credentials from the files in ~/.aws, which boto3 knows how to read."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return {}
    profile = os.environ.get("AWS_PROFILE")
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", os.path.expanduser("~/.aws/credentials"))
    if not profile and not os.path.exists(file):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if profile:
            raise UserError(f"AWS_PROFILE={profile}: pip install boto3, which reads ~/.aws") from None
        return {}
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as e:  # botocore's own
        what = f"AWS_PROFILE={profile}" if profile else file
        raise UserError(f"{what}: {type(e).__name__}; check the names in ~/.aws") from None


def _gcs_emulator() -> dict:
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return {}
    # An emulator checks no token, but obstore writes nothing without one.
    return {"base_url": host if is_url(host) else f"http://{host}", "bearer_token": "none"}


def _may_pass(e: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = re.search(r"status code: (\d+)", str(e))
    refused = status and 400 <= int(status[1]) < 500 and int(status[1]) not in (408, 429)
    return isinstance(e, WrongAnswer) or isinstance(e, exceptions.GenericError) and not refused


def _reason(text: str) -> str:
    """What obstore's error says, without what may be secret: no URLs with a query and no server's text."""
    if status := re.search(r"status code: (\d+[ \w]*)", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        return status[1].strip() + (f", {code[1]}" if code else "")
    if cause := re.findall(r'(?:message|error): "([\w ,./:\'-]+)"', text):
        return cause[-1]
    if "TimedOut" in text:
        return "timed out"
    return re.sub(r"\S+://\S+", "...", text.split("\n")[0]).removeprefix("Generic ")


def _without_secrets(url: str) -> str:
    """A URL without a user name, a password, a query and a fragment."""
    return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url)[0])
