"""The HTTP application: OpenAI's and Anthropic's APIs with server-sent events, the chat page, metrics.

It runs on an event loop of its own thread and reaches the engine only through server.loop.EngineLoop.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import pathlib
import traceback
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from conversation.grammar import GRAMMAR_STUCK
from server.access_log import CLIENT_LEFT, AccessLog, LineWriter
from server.api_requests import ApiRequest, BadRequest, ServedModel, parse_request
from server.api_responses import ApiResponse, CompletionResponse
from server.http import LINGER
from server.lanes import Lanes
from server.loop import ENGINE_FAILED, EngineLoop, Event, Job, Refused
from server.messages_input import count_tokens, parse_messages_request
from server.messages_output import MessageResponse, error_as_json
from server.responses_input import parse_responses_request
from server.responses_output import ResponseObject
from server.tokenizing import detokenize, tokenize

PAGE = pathlib.Path(__file__).with_name("page")  # the chat page's files
CURRENT = {"cache-control": "no-cache"}  # a browser asks each time whether its copy is still current
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
MESSAGES = "/v1/messages"
MAX_BODY = 8 << 20  # bytes
BODY_SECONDS = 30.0  # within which the body of a request must arrive
KEEP_ALIVE = 5.0  # seconds between two comments that keep a stream open
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def make_app(
    loop: EngineLoop, key: str | None, origins: list[str], local: bool, writer: LineWriter | None = None
) -> Starlette:
    """The application around an EngineLoop.

    key: the API key that clients must send, if any. origins: web origins whose pages may use the API. local:
    whether the port can be reached from this machine only; then requests for any other host name are refused,
    because a page of another site can make its own name resolve to this machine (DNS rebinding). writer: of
    the access log; None: there is none.
    """
    refusals = {404: no_such_path, 405: no_such_path, BadRequest: refused, Refused: refused}
    app = Starlette(
        routes=[
            Route("/", page),
            Mount("/page", PageFiles(directory=PAGE)),
            Route("/health", health),
            Route("/live", live),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/tokenize", partial(convert_tokens, convert=tokenize), methods=["POST"]),
            Route(
                f"{MESSAGES}/count_tokens", partial(convert_tokens, convert=count_tokens), methods=["POST"]
            ),
            Route("/detokenize", partial(convert_tokens, convert=detokenize), methods=["POST"]),
            *(Route(path, partial(answer, api=api), methods=["POST"]) for path, api in APIS.items()),
        ],
        middleware=[
            Middleware(AccessLog, writer=writer),
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]),
            Middleware(Guard, loop=loop, key=key, local=local),
        ],
        exception_handlers=refusals | {Exception: unexpected},
    )
    app.state.loop, app.state.served = loop, None
    app.state.lanes = lanes = Lanes(loop.capacity)
    loop.metrics.untokenized.set_function(lambda: lanes.waiting)
    loop.deliver = deliver_from_thread
    return app


def deliver_from_thread(events: list[tuple[Job, Event]]) -> None:
    """Called in the engine's thread: pass events to their jobs' listeners, which belong to event loops."""
    by_loop = {}
    for job, event in events:
        by_loop.setdefault(job.listener.loop, []).append((job, event))
    for loop, own in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(put_all, own)


def put_all(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.listener.events.append((job, event))
        job.listener.woken.set()


class Listener:
    """Collects the events of one response's jobs.

    woken: set when there are events and, after `tick`, every KEEP_ALIVE seconds.
    """

    def __init__(self):
        self.loop, self.events, self.woken = asyncio.get_running_loop(), [], asyncio.Event()
        self.timer = None

    def tick(self) -> None:
        if self.timer:
            self.woken.set()
        self.timer = self.loop.call_later(KEEP_ALIVE, self.tick)


class ErrorResponse(JSONResponse):
    """An error in the form of the API that was asked: Anthropic's from /v1/messages on, else OpenAI's."""

    def __init__(self, message: str, status: int, param: str | None, code: str | None, headers: dict):
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.of_messages = error_as_json(message, status)
        super().__init__(
            dict(error=dict(message=message, type=kind, param=param, code=code)), status, headers
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(MESSAGES):
            return await super().__call__(scope, receive, send)
        content = self.of_messages | dict(request_id=scope.get("state", {}).get("request_id"))
        kept = {name: x for name, x in self.headers.items() if not name.startswith("content-")}
        await JSONResponse(content, self.status_code, kept)(scope, receive, send)


def error(
    message: str, status: int, param: str | None = None, code: str | None = None, **headers
) -> Response:
    message, param = (x and x.encode(errors="replace").decode() for x in (message, param))
    return ErrorResponse(
        message, status, param, code, {name.replace("_", "-"): x for name, x in headers.items()}
    )


async def no_such_path(request: Request, e) -> Response:
    if e.status_code == 405:
        return error(f"{request.method} is not for {request.url.path[:60]}", 405, **(e.headers or {}))
    return error(f"there is no {request.url.path[:60]} here", 404)


async def refused(request: Request, e: BadRequest | Refused) -> Response:
    if isinstance(e, BadRequest):
        response = error(str(e), e.status, e.param, e.code)
    elif e.retry_after is None:
        response = error(f"the server is not ready: {e}", 503)
    else:
        response = error(str(e), 429, code="queue_full", retry_after=str(e.retry_after))
    request.app.state.loop.metrics.refused.labels(response.status_code).inc()
    return response


async def unexpected(request: Request, e: Exception) -> Response:
    """A fault of the server: the traceback goes to stderr, its type to the client."""
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk
        traceback.print_exception(e)
    message = f"the server has failed at this request: {type(e).__name__}"
    return error(message, 500, x_request_id=request.state.request_id)  # AccessLog does not see this response


class Guard:
    """Middleware that refuses requests without the API key or, if there is none, for foreign host names."""

    def __init__(self, app, loop: EngineLoop, key: str | None, local: bool):
        self.app, self.loop, self.key, self.local = app, loop, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))):
            self.loop.metrics.refused.labels(refusal.status_code).inc()
            return await refusal(scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if request.url.path in ("/health", "/live"):
            return None
        if self.key:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            read = dict(bearer=str, basic=password).get(kind.lower(), lambda given: "")
            keys = read(given), request.headers.get("x-api-key", "")
            if not any(hmac.compare_digest(key.encode(), self.key.encode()) for key in keys):
                challenge = dict(www_authenticate='Basic realm="API key as password"')
                return error("the API key is missing or wrong: Authorization: Bearer KEY", 401, **challenge)
        elif self.local and not is_local(request.headers.get("host", "")):
            return error("this server answers to the names of this machine only; see --host", 403)
        return None


def password(credentials: str) -> str:
    """The password in the credentials of HTTP basic authentication, which browsers ask their users for.

    "" if there is none.
    """
    try:
        return b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether a Host header names the loopback interface."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class PageFiles(StaticFiles):
    """The files that the chat page loads; a browser must not mix those of two versions."""

    def file_response(self, *args, **options) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(CURRENT)
        return response


async def page(request: Request) -> Response:
    """The chat page. Its content security policy allows the style and the scripts of this server, requests to
    this server, and no embedding in other pages. Trusted types: no script can parse a text as HTML.
    """
    headers = {"content-security-policy": PAGE_POLICY} | CURRENT
    return FileResponse(PAGE / "page.html", headers=headers)


def state_of(loop: EngineLoop) -> tuple[str, str | None]:
    """-> (the status in one word, why the server is not ready or None)."""
    if loop.failed:
        return "failed", ENGINE_FAILED
    if loop.draining:
        return "draining", "it is about to end"
    return ("ready", None) if loop.ready else ("loading", "the model is being loaded, or compiled")


async def live(request: Request) -> Response:
    """Whether the process is worth keeping: also while it loads the model, and while it drains."""
    failed = request.app.state.loop.failed
    return JSONResponse(dict(status="failed" if failed else "alive"), 503 if failed else 200)


async def health(request: Request) -> Response:
    """Whether the server answers requests."""
    status, why = state_of(request.app.state.loop)
    return JSONResponse(dict(status=status) | (dict(why=why) if why else {}), 503 if why else 200)


async def metrics(request: Request) -> Response:
    return Response(request.app.state.loop.metrics.text(), media_type="text/plain; version=0.0.4")


async def models(request: Request) -> Response:
    served: ServedModel | None = request.app.state.served
    if served is None:
        return error(f"the server is not ready: {state_of(request.app.state.loop)[1]}", 503, retry_after="5")
    described = dict(
        object="model", created=served.created, owned_by="llama-jax", max_model_len=served.max_len,
        default_sampling=served.default_sampling,
    )  # fmt: skip
    name = request.path_params.get("name")
    if name is None:
        return JSONResponse(dict(object="list", data=[dict(id=x) | described for x in served.names]))
    if not served.accepts(name):
        return error(f"the model {name[:60]!r} is not served here", 404, "model", "model_not_found")
    return JSONResponse(dict(id=name if name in served.names else served.names[0]) | described)


@dataclasses.dataclass(frozen=True)
class Api:
    """A way to ask for answers. parse: makes a request of a body. respond: makes a response of its jobs."""

    parse: Callable[[bytes, ServedModel], ApiRequest]
    respond: Callable[[ApiRequest, list[Job]], ApiResponse]


APIS = {
    "/v1/chat/completions": Api(partial(parse_request, chat=True), CompletionResponse),
    "/v1/completions": Api(partial(parse_request, chat=False), CompletionResponse),
    "/v1/responses": Api(parse_responses_request, ResponseObject),
    MESSAGES: Api(parse_messages_request, MessageResponse),
}


def served_model(request: Request) -> ServedModel:
    """The model of the server. Raises Refused if it is not ready."""
    loop, served = request.app.state.loop, request.app.state.served
    if served is None or not loop.ready:
        raise Refused(state_of(loop)[1], retry_after=None)
    return served


async def convert_tokens(
    request: Request, convert: Callable[[bytes, ServedModel], tuple[dict, tuple[str, ...]]]
) -> Response:
    """Respond with what `convert` makes of the body. It needs no engine, but a thread: texts may be long."""
    served, body = served_model(request), await read_body(request)
    lane = request.app.state.lanes.choose(body)
    working = lane.run(convert, body, served)
    content, request.state.ignored = await unless_client_leaves(request.receive, working)
    return JSONResponse(content)


async def answer(request: Request, api: Api) -> Response:
    """Parse the request, submit its jobs, and respond with one JSON object or a stream."""
    loop, served = request.app.state.loop, served_model(request)
    body = await read_body(request)
    lane = request.app.state.lanes.choose(body)
    parsed = await unless_client_leaves(request.receive, lane.run(api.parse, body, served))
    request.state.ignored = parsed.ignored
    if len(parsed.requests) > loop.capacity:
        what = f"{len(parsed.requests)} answers are more than this server has rows and places to wait"
        raise BadRequest(f"{what}: {loop.capacity}", "n")
    listener = Listener()
    jobs = [Job(request, parsed.new_stream, listener=listener) for request in parsed.requests]
    loop.submit(jobs)
    content = request.state.content = api.respond(parsed, jobs)
    kind = StreamedResponse if parsed.stream else WholeResponse
    return kind(loop, listener, jobs, content)


async def unless_client_leaves(receive: Receive, work: Awaitable, seconds: float | None = None) -> Any:
    """The result of the work. Cancels it and raises BadRequest if the client leaves before it ends.

    receive: of a request whose body has been read. seconds: after which the work is cancelled as well.
    """

    async def until_disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnected())
    try:
        await asyncio.wait({working, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise BadRequest("the client has left", status=CLIENT_LEFT)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises BadRequest if it is too large or too slow, or its type is not JSON.

    The type matters: a browser lets a page of another origin send text without asking this server, but not
    JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest("the content-type must be application/json", status=415)
    too_large = BadRequest(f"the body has more than {MAX_BODY} bytes", status=413)
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise BadRequest(f"the body has not arrived in {BODY_SECONDS:.0f} s", status=408) from None
    except ClientDisconnect:
        raise BadRequest("the client has left", status=CLIENT_LEFT) from None
    return b"".join(parts)


class JobsResponse(Response):
    """Sends a response by `respond`; cancels its jobs when the client disconnects or reads too slowly."""

    def __init__(self, loop: EngineLoop, listener: Listener, jobs: list[Job], content: ApiResponse):
        self.loop, self.listener, self.jobs, self.content = loop, listener, jobs, content
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.listener.tick()
        try:
            with contextlib.suppress(BadRequest):  # a client that has left needs no response
                seconds = self.loop.seconds + LINGER
                await unless_client_leaves(receive, self.respond(scope, receive, send), seconds)
        finally:
            self.loop.cancel(self.jobs)
            self.listener.timer.cancel()

    async def events(self) -> AsyncIterator[list[tuple[Job, Event]]]:
        """The events of all jobs up to their ends, those together that came together; none after a tick."""
        left = len(self.jobs)
        while left:
            await self.listener.woken.wait()
            self.listener.woken.clear()
            events, self.listener.events = self.listener.events, []
            left -= sum(event.finish_reason is not None for _, event in events)
            yield events


def failure(event: Event) -> tuple[str, int] | None:
    """The error that ended an answer, as a message and an HTTP status; None if there is none."""
    if event.finish_reason == "timeout":
        return "the request has taken longer than this server allows", 504
    if event.finish_reason == "error":
        return event.error, 400 if event.error.startswith(GRAMMAR_STUCK) else 500
    return ("it was cancelled", 500) if event.finish_reason == "cancelled" else None


class WholeResponse(JobsResponse):
    """One JSON object when all jobs have ended."""

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for events in self.events():
            for job, event in events:
                self.content.add(job, event)
                if failed := failure(event):
                    return await error(*failed)(scope, receive, send)
        await JSONResponse(self.content.whole())(scope, receive, send)


class StreamedResponse(JobsResponse):
    """Server-sent events.

    Events that have come together are written together. After a client has left, uvicorn drops what is
    written only once the event loop has run, and asyncio warns of several writes until then.
    """

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = STREAM_HEADERS | {"content-type": "text/event-stream; charset=utf-8"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send(dict(type="http.response.start", status=200, headers=raw))

        async def write(text: str, more: bool = True) -> None:
            await send(dict(type="http.response.body", body=text.encode(), more_body=more))

        await write("".join(map(server_sent, self.content.first_chunks())))
        failed = None
        async for events in self.events():
            chunks = []
            for job, event in events:
                if failed := failure(event):
                    self.content.add(job, event)
                    chunks += self.content.failed_chunks(*failed)
                    break
                chunks += self.content.chunks(job, event)
            await write("".join(map(server_sent, chunks)) or ": the answer is on its way\n\n")
            if failed:
                break
        last = () if failed else self.content.last_chunks()
        await write("".join(map(server_sent, last)) + self.content.end_of_stream, more=False)


def server_sent(content: dict) -> str:
    """An event. Those of the Responses and the Messages API have a type, which is also the event's name."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content, ensure_ascii=False)}\n\n"
