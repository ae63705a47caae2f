"""The HTTP side: OpenAI's API with server-sent events, the page, health and metrics. It knows no engine."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import pathlib
import re
import traceback
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from server.loop import EngineLoop, Job, News, Refused
from server.questions import BadRequest, Served, read_question
from server.replies import Reply

PAGE = pathlib.Path(__file__).with_name("page.html")
MAX_BODY = 8 << 20  # bytes
BODY_SECONDS = 30.0  # for a body to arrive
KEEP_ALIVE = 5.0  # seconds between two comments that say that a stream is alive
LINGER = 60.0  # seconds that a client may take to read the rest of an answer after its time is over
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def make_app(loop: EngineLoop, key: str | None, origins: list[str], local: bool) -> Starlette:
    """key: what a client must show, if anything. origins: whose pages may ask. local: whether only this
    machine can ask; then pages of other names, which another machine may have made lead here, cannot.
    """
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        middleware=[
            Middleware(Counted, loop=loop),
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]),
            Middleware(Guard, key=key, local=local),
        ],
        exception_handlers={404: no_such_path, 405: no_such_path, Exception: unexpected},
    )
    app.state.loop, app.state.served = loop, None
    loop.deliver = deliver_from_thread
    return app


def deliver_from_thread(news: list[tuple[Job, News]]) -> None:
    """What the engine's thread calls: each job's owner is a queue of an event loop that runs in another."""
    loops = {}
    for job, said in news:
        loops.setdefault(job.owner.loop, []).append((job, said))
    for loop, told in loops.items():
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(put_all, told)


def put_all(news: list[tuple[Job, News]]) -> None:
    for job, said in news:
        job.owner.queue.put_nowait((job, said))


class Listener:
    """Where the news of a reply's jobs arrive; from `tick` to `close`, now and then None."""

    def __init__(self):
        self.loop, self.queue, self.timer = asyncio.get_running_loop(), asyncio.Queue(), None

    def tick(self) -> None:
        if self.timer:
            self.queue.put_nowait(None)
        self.timer = self.loop.call_later(KEEP_ALIVE, self.tick)

    def close(self) -> None:
        self.timer.cancel()


def error(
    message: str, status: int, param: str | None = None, code: str | None = None, **headers
) -> Response:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = (x and x.encode(errors="replace").decode() for x in (message, param))
    content = dict(error=dict(message=message, type=kind, param=param, code=code))
    return JSONResponse(content, status, {name.replace("_", "-"): x for name, x in headers.items()})


async def no_such_path(request: Request, e) -> Response:
    if e.status_code == 405:
        return error(f"{request.method} is not for {request.url.path[:60]}", 405, **(e.headers or {}))
    return error(f"there is no {request.url.path[:60]} here", 404)


async def unexpected(request: Request, e: Exception) -> Response:
    """A fault of the server's, of which it tells those who run it more."""
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk
        traceback.print_exception(e)
    return error(f"the server has failed at this request: {type(e).__name__}", 500)


class Guard:
    """Lets in who has the key, if there is one, and on a local server no page of another origin."""

    def __init__(self, app, key: str | None, local: bool):
        self.app, self.key, self.local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))):
            return await refusal(scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if request.url.path == "/health":
            return None
        if self.key:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() == "basic":  # a browser, which asks for a password
                with contextlib.suppress(ValueError):
                    given = b64decode(given, validate=True).decode().partition(":")[2]
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                challenge = dict(www_authenticate='Basic realm="API key as password"')
                return error("the API key is missing or wrong: Authorization: Bearer KEY", 401, **challenge)
        elif self.local and not is_local(request.headers.get("host", "")):
            return error("this server answers to the names of this machine only; see --host", 403)
        return None


def is_local(host: str) -> bool:
    """Whether a name in a URL is this machine's for itself."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Counted:
    """Counts refusals by their status."""

    def __init__(self, app, loop: EngineLoop):
        self.app, self.loop = app, loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.loop.metrics.refused.labels(message["status"]).inc()
            await send(message)

        await self.app(scope, receive, count)


async def page(request: Request) -> Response:
    """It may run and ask for nothing but what is in it and on this server, and stand in no other page."""
    text = PAGE.read_text()
    policy = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    policy |= {"connect-src": "'self'"} | {f"{tag}-src": hashed(tag, text) for tag in ("style", "script")}
    header = "; ".join(f"{name} {value}" for name, value in policy.items())
    return HTMLResponse(text, headers={"content-security-policy": header})


def hashed(tag: str, page: str) -> str:
    """What allows the page's own element of this kind, and no other."""
    content = re.search(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)[1]
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def state_of(loop: EngineLoop) -> tuple[str, str | None]:
    """-> (a word, why the server is not ready)."""
    if loop.draining:
        return "draining", "it is about to end"
    return ("ready", None) if loop.ready else ("loading", "the model is being loaded, or compiled")


async def health(request: Request) -> Response:
    status, why = state_of(request.app.state.loop)
    return JSONResponse(dict(status=status) | (dict(why=why) if why else {}), 503 if why else 200)


async def metrics(request: Request) -> Response:
    return Response(request.app.state.loop.metrics.text(), media_type="text/plain; version=0.0.4")


async def models(request: Request) -> Response:
    served: Served | None = request.app.state.served
    if served is None:
        return not_ready(request)
    described = dict(
        id=served.names[0], object="model", created=served.created, owned_by="llama-jax",
        max_model_len=served.positions,
    )  # fmt: skip
    name = request.path_params.get("name")
    if name is None:
        return JSONResponse(dict(object="list", data=[described]))
    if name not in served.names:
        return error(f"the model {name[:60]!r} is not served here", 404, "model", "model_not_found")
    return JSONResponse(described)


def not_ready(request: Request) -> Response:
    _, why = state_of(request.app.state.loop)
    return error(f"the server is not ready: {why}", 503, retry_after="5")


async def chat_completions(request: Request) -> Response:
    return await answer(request, chat=True)


async def completions(request: Request) -> Response:
    return await answer(request, chat=False)


async def answer(request: Request, chat: bool) -> Response:
    """Check, submit, and reply: whole, or in parts as they come."""
    loop, served = request.app.state.loop, request.app.state.served
    if served is None or not loop.ready:
        return not_ready(request)
    try:
        body = await read_body(request)
        question = await asyncio.to_thread(read_question, body, served, chat)
    except BadRequest as e:
        return error(str(e), e.status, e.param, e.code)
    listener = Listener()
    jobs = [Job(x, question.new_stream(), listener) for x in question.requests]
    try:
        loop.submit(jobs)
    except Refused as e:
        if e.retry_after is None:
            return error(str(e), 503)
        return error(str(e), 429, code="queue_full", retry_after=str(e.retry_after))
    reply = Reply(question, jobs)
    if question.stream:
        return Events(loop, listener, jobs, reply)
    return Whole(loop, listener, jobs, reply)


async def read_body(request: Request) -> bytes:
    """Raises BadRequest for one that is too large, too slow, or does not say that it is JSON.

    A page of another origin cannot send JSON unasked, as it can send a text.
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
        raise BadRequest("the client has left", status=499) from None
    return b"".join(parts)


class Pending(Response):
    """A response whose jobs are cancelled when its client leaves, or does not read it."""

    def __init__(self, loop: EngineLoop, listener: Listener, jobs: list[Job], reply: Reply):
        self.loop, self.listener, self.jobs, self.reply = loop, listener, jobs, reply
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell = asyncio.ensure_future(self.tell(scope, receive, send))
        gone = asyncio.ensure_future(self.until_gone(receive))
        self.listener.tick()
        try:
            limit = self.loop.seconds + LINGER
            await asyncio.wait({tell, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if tell.done():
                tell.result()
        finally:
            self.loop.cancel(self.jobs)
            self.listener.close()
            for task in (tell, gone):
                task.cancel()
            await asyncio.gather(tell, gone, return_exceptions=True)

    async def until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def news(self) -> AsyncIterator[tuple[Job, News] | None]:
        """All of the jobs' news, to the end, and now and then None."""
        left = len(self.jobs)
        while left:
            told = await self.listener.queue.get()
            left -= told is not None and told[1].finish_reason is not None
            yield told


def failure(news: News) -> tuple[str, int] | None:
    """What went wrong with an answer, and the status that says so."""
    if news.finish_reason == "timeout":
        return "the request has taken longer than this server allows", 504
    return (news.error or "it was cancelled", 500) if news.finish_reason in ("error", "cancelled") else None


class Whole(Pending):
    async def tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for told in self.news():
            if told and (failed := failure(told[1])):
                return await error(*failed)(scope, receive, send)
            if told:
                self.reply.note(*told)
        await JSONResponse(self.reply.whole())(scope, receive, send)


class Events(Pending):
    """Server-sent events, the last of which is [DONE]."""

    async def tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = HEADERS | {"content-type": "text/event-stream; charset=utf-8"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send(dict(type="http.response.start", status=200, headers=raw))

        async def write(text: str, more: bool = True) -> None:
            await send(dict(type="http.response.body", body=text.encode(), more_body=more))

        for part in self.reply.beginnings():
            await write(event(part))
        async for told in self.news():
            if told is None:
                await write(": the answer is on its way\n\n")
            elif failed := failure(told[1]):
                await write(event(dict(error=dict(message=failed[0], type="server_error", code=failed[1]))))
                break
            else:
                await write(event(self.reply.part(*told)))
        else:
            if last := self.reply.last_part():
                await write(event(last))
        await write("data: [DONE]\n\n", more=False)


def event(content: dict) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
