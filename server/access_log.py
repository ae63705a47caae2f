"""One line on stderr for each request, and the id that names a request to client, proxy and log."""

import contextlib
import datetime
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from server.api_responses import ApiResponse

NOT_LOGGED = {"/health", "/live", "/metrics"}  # probes ask for these every few seconds
CLIENT_LEFT = 499  # nginx's status of a request whose client left before it got a response
MAX_WAITING = 10_000  # lines
MAX_HEADER = 1000  # characters of the names of ignored fields
MAX_VALUE = 200  # characters
MAX_NAMES = 1000  # of ignored fields that have been logged
LAST_SECONDS = 1.0  # for the lines that still wait when the server ends


class LineWriter:
    """Writes lines in a thread of its own, so that a reader that is slow, stopped or gone delays no request.

    When MAX_WAITING lines wait, further ones are dropped, and their number is written later.
    """

    def __init__(self, write: Callable[[bytes], object] | None = None):
        """write: takes one line and may block or raise OSError; default: write it to stderr."""
        self.write = write or write_to_stderr
        self.lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self.dropped = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def add(self, line: str) -> None:
        """Called by one thread."""
        if self.dropped:
            line = f"{self.dropped} lines of the access log are missing here\n{line}"
        try:
            self.lines.put_nowait(line)
            self.dropped = 0
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the lines that wait, within LAST_SECONDS."""
        with contextlib.suppress(queue.Full):
            self.lines.put(None, timeout=LAST_SECONDS)
            self.thread.join(LAST_SECONDS)

    def _run(self) -> None:
        while (line := self.lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk, a closed file
                self.write(f"{line}\n".encode())


def write_to_stderr(line: bytes) -> None:
    """Write to the descriptor: a process cannot end while a blocked write holds the lock of sys.stderr."""
    os.write(sys.stderr.fileno(), line)


class AccessLog:
    """Middleware that gives each request an id, and writes a line when the request has ended.

    The id is the client's own `x-request-id` if that is an identifier, else a new one. The response has it in
    the same header, and handlers find it in `request.state.request_id`. A handler that submits jobs leaves
    the response's content in `request.state.content`, from which the line has the numbers of tokens.

    A handler that ignores fields of the request leaves their names in `request.state.ignored`. The response
    has them in the header `x-ignored-fields`; a line has those that no earlier line has.
    """

    def __init__(self, app, writer: LineWriter | None):
        """writer: None: no line is written."""
        self.app, self.writer, self.logged = app, writer, set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin, status = time.monotonic(), CLIENT_LEFT
        state = scope.setdefault("state", {})
        state["request_id"] = choose_request_id(Headers(scope=scope).get("x-request-id", ""))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", state["request_id"].encode())]
                if ignored := state.get("ignored"):
                    names = ", ".join(map(printable, ignored))[:MAX_HEADER]
                    own.append((b"x-ignored-fields", names.encode()))
                message = message | dict(headers=[*message.get("headers", ()), *own])
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:  # the outermost middleware responds
            status = 500
            raise
        finally:
            if self.writer and scope["path"] not in NOT_LOGGED:
                new = self._not_logged(state.get("ignored", ()))
                self.writer.add(log_line(scope, status, begin, state.get("content"), new))

    def _not_logged(self, ignored: tuple[str, ...]) -> list[str]:
        """The names of ignored fields that no line has had; none any more after MAX_NAMES."""
        new = [name for name in ignored if name not in self.logged][: MAX_NAMES - len(self.logged)]
        self.logged.update(new)
        return new


def choose_request_id(own: str) -> str:
    """The client's own id of a request, if it is safe to repeat in headers and logs, else a new one."""
    return own if re.fullmatch(r"[A-Za-z0-9._:/+=@-]{1,128}", own) else secrets.token_hex(16)


def log_line(scope: Scope, status: int, begin: float, content: ApiResponse | None, ignored: list[str]) -> str:
    """The line of a request: its time, then `name=value` fields, separated by spaces.

    begin: when the request came, of time.monotonic. content: of a request that was put into the queue.
    ignored: names of fields.
    """
    now, seconds = datetime.datetime.now(datetime.UTC), time.monotonic() - begin
    fields = dict(
        client=(scope.get("client") or ["-"])[0], method=scope["method"],
        path=quote(scope["path"], errors="replace"), status=status, id=scope["state"]["request_id"],
    )  # fmt: skip
    if content:
        usage = content.usage()
        fields |= dict(prompt_tokens=usage.prompt, cached_tokens=usage.cached, answer_tokens=usage.answer)
        first = [job.first_token for job in content.choices if job.first_token is not None]
        if first:
            fields |= dict(first_token=f"{min(first) - begin:.3f}")
        reasons = {choice.finish_reason or "cancelled" for choice in content.choices.values()}
        fields |= dict(finish=",".join(sorted(reasons)))
    fields |= dict(ignored=",".join(ignored)) if ignored else {}
    fields |= dict(seconds=f"{seconds:.3f}")
    described = (f"{name}={printable(value)}" for name, value in fields.items())
    return " ".join([now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{now.microsecond // 1000:03d}Z", *described])


def printable(value) -> str:
    """A value without spaces and control characters, so that it can neither end a line nor forge a field."""
    return re.sub(r"[^!-~]", "?", str(value))[:MAX_VALUE] or "-"
