"""The HTTP side: OpenAI's API with server-sent events, the page, health and metrics. It knows no engine."""

import asyncio
import concurrent.futures
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

from server.http import LINGER
from server.loop import EngineLoop, Job, News, Refused
from server.questions import BadRequest, Served, read_question
from server.replies import Reply
from serving.grammar import NO_WAY_ON

PAGE = pathlib.Path(__file__).with_name("page.html")
MAX_BODY = 8 << 20  # bytes
BODY_SECONDS = 30.0  # for a body to arrive
KEEP_ALIVE = 5.0  # seconds between two comments that say that a stream is alive
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
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]),
            Middleware(Guard, loop=loop, key=key, local=local),
        ],
        exception_handlers={404: no_such_path, 405: no_such_path, Exception: unexpected},
    )
    app.state.loop, app.state.served = loop, None
    app.state.grammars = concurrent.futures.ThreadPoolExecutor(1)  # some take long: they wait for one another
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

    def __init__(self, app, loop: EngineLoop, key: str | None, local: bool):
        self.app, self.loop, self.key, self.local = app, loop, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))):
            self.loop.metrics.refused.labels(refusal.status_code).inc()
            return await refusal(scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if request.url.path == "/health":
            return None
        if self.key:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            read = dict(bearer=str, basic=password).get(kind.lower(), lambda given: "")
            if not hmac.compare_digest(read(given).encode(), self.key.encode()):
                challenge = dict(www_authenticate='Basic realm="API key as password"')
                return error("the API key is missing or wrong: Authorization: Bearer KEY", 401, **challenge)
        elif self.local and not is_local(request.headers.get("host", "")):
            return error("this server answers to the names of this machine only; see --host", 403)
        return None


def password(credentials: str) -> str:
    """That of HTTP's basic authentication, by which browsers ask for one; "" if there is none."""
    try:
        return b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether a name in a URL is this machine's for itself."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


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
        return error(f"the server is not ready: {state_of(request.app.state.loop)[1]}", 503, retry_after="5")
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


async def chat_completions(request: Request) -> Response:
    return await answer(request, chat=True)


async def completions(request: Request) -> Response:
    return await answer(request, chat=False)


async def answer(request: Request, chat: bool) -> Response:
    """Check, submit, and reply: whole, or in parts as they come."""
    loop, served = request.app.state.loop, request.app.state.served
    try:
        if served is None or not loop.ready:
            raise Refused(state_of(loop)[1], retry_after=None)
        body = await read_body(request)
        # Others do not wait for a grammar that takes long.
        threads = request.app.state.grammars if b"response_format" in body else None
        question = await asyncio.get_running_loop().run_in_executor(
            threads, read_question, body, served, chat
        )
        if len(question.requests) > loop.capacity:
            what = f"{len(question.requests)} answers are more than this server has rows and places to wait"
            raise BadRequest(f"{what}: {loop.capacity}", "n")
        listener = Listener()
        jobs = [Job(x, question.new_stream(), listener) for x in question.requests]
        loop.submit(jobs)
    except BadRequest as e:
        refusal = error(str(e), e.status, e.param, e.code)
    except Refused as e:
        if e.retry_after is None:
            refusal = error(f"the server is not ready: {e}", 503)
        else:
            refusal = error(str(e), 429, code="queue_full", retry_after=str(e.retry_after))
    else:
        reply = Reply(question, jobs)
        return (Events if question.stream else Whole)(loop, listener, jobs, reply)
    loop.metrics.refused.labels(refusal.status_code).inc()
    return refusal


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
    if news.finish_reason == "error":
        return news.error, 400 if news.error.startswith(NO_WAY_ON) else 500
    return ("it was cancelled", 500) if news.finish_reason == "cancelled" else None


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
