"""The server, in this process and over a socket: what clients ask, what they may not, and many at once."""

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import http.client
import json
import pathlib
import queue
import random
import shutil
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jsonschema
import numpy as np
import openai
import pytest
from conftest import CHECKPOINTS
from processes import free_port, until
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import model
from conversation import text as conversation_text
from conversation.grammar import grammar_tokenizer
from generation import request_builder
from server import access_log, api_requests, lanes
from server import app as server_app
from server import http as server_http
from server.loop import EngineLoop, Job, Refused
from server.metrics import Metrics
from serving import chunks
from sharding.sampling import Sampling
from terminal import serve_command
from terminal.launch import Startup
from terminal.loaded_models import open_session
from terminal.options import parse_arguments

ROWS, MAX_LEN, QUEUE = 8, 128, 400
GREETING = [{"role": "user", "content": "Tell me your name"}]


def started(*options: str, width: int = 32) -> SimpleNamespace:
    """A server in a thread of its own: its url and its EngineLoop; `end` drains it. width: of its chunks."""
    found = SimpleNamespace(port=free_port(), loop=None)
    found.url = f"http://127.0.0.1:{found.port}"

    def kept(name: str, make):
        """A function that makes what `make` does, and keeps it under this name."""

        def made(*arguments):
            setattr(found, name, make(*arguments))
            return getattr(found, name)

        return made

    sizes = f"--serve --port {found.port} --rows {ROWS} --max-len {MAX_LEN} --max-queue {QUEUE}"
    found.session = open_session(parse_arguments([*sizes.split(), *options]), 1, Startup())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_command, "EngineLoop", kept("loop", EngineLoop))
        patch.setattr(serve_command, "make_app", kept("app", server_app.make_app))
        patch.setattr(serve_command, "LineWriter", kept("writer", partial(access_log.LineWriter, len)))
        patch.setattr(chunks, "CPU_SHAPES", ((1, width),))  # fewer to compile, and more chunks of a prompt
        thread = threading.Thread(target=serve_command.serve, args=(found.session,), daemon=True)
        thread.start()
        while not (found.loop and found.loop.ready) and thread.is_alive():
            time.sleep(0.05)
    assert thread.is_alive()

    def end() -> None:
        found.loop.drain()
        thread.join(60)
        assert not thread.is_alive()

    found.engine, found.tokenizer, found.end = found.loop.engine, found.session.builder.tokenizer, end
    return found


def shallow(folder: pathlib.Path, layers: int = 2) -> pathlib.Path:
    """A copy in `folder` of tiny-llama3 with its first layers only, which answer sooner."""
    copy, own = folder / "tiny-llama3", [f"model.layers.{i}." for i in range(layers)]
    shutil.copytree(CHECKPOINTS / "tiny-llama3", copy)
    config = json.loads((copy / "config.json").read_text()) | dict(num_hidden_layers=layers)
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if "layers" not in name or name.startswith(tuple(own))}
    save_file(tensors, copy / "model.safetensors")
    return copy


def server_with(*options: str):
    """A fixture: a server of the shallow Llama 3 with these options."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory):
        found = started("--checkpoint", str(shallow(tmp_path_factory.mktemp("shallow"))), *options)
        yield found
        found.end()

    return server


server = server_with()


def post(server, path: str, body, **headers) -> tuple[int, dict]:
    """-> (status, the reply's object). body: an object, or bytes as they are."""
    status, text = post_text(server, path, body, **headers)
    return status, json.loads(text)


def post_text(server, path: str, body, **headers) -> tuple[int, str]:
    """-> (status, the reply)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    own = {name.replace("_", "-"): x for name, x in headers.items()}
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"} | own)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def begin_post(server, body: dict) -> http.client.HTTPConnection:
    """A connection on which a completion has been asked for, whose response has not been read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def complete(server, **fields) -> dict:
    status, reply = post(server, "/v1/completions", fields)
    assert status == 200, reply
    return reply


def idle(server) -> bool:
    return not server.loop.open_jobs and all(row.free for row in server.engine.scheduler.rows)


def metric(server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = [line.split() for line in response.read().decode().splitlines()]
    return sum(float(line[1]) for line in lines if line[0].partition("{")[0] == name)


# ------------------------------------------------------------------------------------- what clients ask


def test_chat(server, client):
    """Whole and streamed: the same text, of the same tokens."""
    asked = dict(model="tiny-llama3", messages=GREETING, temperature=0, max_tokens=60)
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    prompt = server.tokenizer.apply_chat_template(GREETING, add_generation_prompt=True, return_dict=False)
    assert whole.choices[0].finish_reason == "stop" and len(text) > 10
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.total_tokens == len(prompt) + whole.usage.completion_tokens

    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    cached = dict(prompt_tokens_details=None)  # the later requests find the prompt in the cache
    usage = whole.usage.model_copy(update=cached)
    assert parts[-1].usage.model_copy(update=cached) == usage and not parts[-1].choices
    always = dict(include_usage=True, continuous_usage_stats=True)
    *_, last, end = client.chat.completions.create(**asked, stream=True, stream_options=always)
    assert last.usage == end.usage and end.usage.model_copy(update=cached) == usage
    deltas = [part.choices[0] for part in parts[:-1]]
    assert deltas[0].delta.role == "assistant" and len(deltas) > 5
    assert "".join(x.delta.content or "" for x in deltas) == text
    assert [x.finish_reason for x in deltas if x.finish_reason] == ["stop"]


def test_cached_tokens(server, client):
    """Tokens of the prompt that the engine found in a row's cache: all but the last of a repeated prompt."""
    rng = np.random.default_rng(7)
    first, second = (rng.integers(5, 512, 50).tolist() for _ in range(2))

    def cached(**fields) -> int:
        return complete(server, max_tokens=2, temperature=0, **fields)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert [cached(prompt=first), cached(prompt=first)] == [0, 49]
    assert cached(prompt=second, n=3) == 0  # one of the samples computes what the others reuse
    assert cached(prompt=[first, second], n=2) == 98
    assert cached(prompt=first[:40] + second[:20]) == 40
    assert cached(prompt=second, echo=True, logprobs=0) == 0  # a scored prompt is computed
    messages = [dict(role="user", content="What is 3 + 4, and why do you count so?")]
    asked = dict(model="tiny-llama3", messages=messages, max_tokens=2)
    usage = client.chat.completions.create(**asked).usage
    *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert usage.prompt_tokens_details.cached_tokens < 20 < usage.prompt_tokens - 1
    assert last.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_models_and_health(server, client):
    """/v1/models tells what the checkpoint or the command line gives: of this checkpoint, nothing."""
    (described,) = client.models.list()
    assert described.id == "tiny-llama3" and described.max_model_len == MAX_LEN
    assert described.default_sampling == {}
    greedy = Sampling(seed=0, temperature=0, top_k=20)
    assert serve_command.given_options(greedy) == dict(temperature=0, top_k=20)
    assert client.models.retrieve("tiny-llama3").id == "tiny-llama3"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")
    for path, status in (("health", "ready"), ("live", "alive")):
        with urllib.request.urlopen(f"{server.url}/{path}") as response:
            assert json.load(response) == {"status": status}


def test_served_model_name(server, client, request):
    """The first name is the one of responses; the other and that of the checkpoint are accepted."""
    named = SimpleNamespace(
        args=parse_arguments(
            "--serve --checkpoint x/y --served-model-name gpt-4o small gpt-4o --strict-fields".split()
        ),
        builder=server.session.builder,
    )
    served = serve_command.served_model(named, server.app.state.served.grammar_tokenizer)
    default = server.app.state.served
    assert default.names == ("tiny-llama3",) and default.checkpoint == server.session.args.checkpoint
    assert complete(server, **TEXT, model=default.checkpoint)["model"] == "tiny-llama3"
    request.addfinalizer(lambda: setattr(server.app.state, "served", default))
    server.app.state.served = served
    assert served.strict_fields and not default.strict_fields
    assert [x.id for x in client.models.list()] == ["gpt-4o", "small"]
    assert client.models.retrieve("small").id == "small"
    for name in ("gpt-4o", "small", ""):
        assert complete(server, **TEXT, model=name)["model"] == "gpt-4o"
    for name in ("tiny-llama3", "x/y", "y"):
        assert post(server, "/v1/completions", TEXT | dict(model=name))[0] == 404
    for wrong in ("", "a\nb", "\udcff"):
        with pytest.raises(SystemExit):
            parse_arguments(["--serve", "--served-model-name", "a", wrong])


def test_request_ids(server, client):
    """The client's own id if it is safe to repeat, else a new one; of refused requests, too."""
    own = client.completions.create(model="", **TEXT, extra_headers={"x-request-id": "own:1/2_a=b@c"})
    assert own._request_id == "own:1/2_a=b@c"
    new = {client.completions.create(model="", **TEXT)._request_id for _ in range(2)}
    assert len(new) == 2 and all(len(x) == 32 for x in new)
    for wrong in ("", "a b", "a" * 129, "\u00e9"):
        headers = {"x-request-id": wrong, "content-type": "application/json"}
        with raw_reply(server, "POST", "/v1/completions", b"{}", headers) as reply:
            assert reply.status == 400 and len(reply.headers["x-request-id"]) == 32
    with raw_reply(server, "GET", "/nothing", None, {"x-request-id": "mine"}) as reply:
        assert reply.status == 404 and reply.headers["x-request-id"] == "mine"


@contextlib.contextmanager
def raw_reply(server, method: str, path: str, body: bytes | None, headers: dict):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(method, path, body, headers)
    with contextlib.closing(connection), connection.getresponse() as reply:
        reply.read()
        yield reply


FIELDS = "client method path status id prompt_tokens cached_tokens answer_tokens first_token finish seconds"


def test_access_log(server, client, lines):
    """A line per request: what it asked for, what became of it; nothing of its text, nothing of probes."""
    asked = dict(model="tiny-llama3", messages=GREETING, temperature=0, max_tokens=9)
    usage = client.chat.completions.create(**asked, extra_headers={"x-request-id": "mine"}).usage
    (line,) = lines(1)
    when, *fields = line.split(" ")
    found = dict(field.split("=", 1) for field in fields)
    assert list(found) == FIELDS.split()
    assert abs(datetime.datetime.fromisoformat(when).timestamp() - time.time()) < 60
    assert 0 <= float(found.pop("first_token")) <= float(found.pop("seconds")) < 60
    assert found == dict(
        client="127.0.0.1", method="POST", path="/v1/chat/completions", status="200", id="mine",
        prompt_tokens=str(usage.prompt_tokens), answer_tokens="9", finish="length",
        cached_tokens=str(usage.prompt_tokens_details.cached_tokens),
    )  # fmt: skip
    with client.chat.completions.create(**asked | dict(max_tokens=90), stream=True) as stream:
        next(iter(stream))
    assert "status=200" in (line := lines(1)[0]) and "finish=cancelled" in line
    until(lambda: idle(server))
    for path in ("/health", "/live", "/metrics"):
        urllib.request.urlopen(server.url + path).close()
    headers = {"x-request-id": "a b", "x-forwarded-for": "1.2.3.4 status=200", "authorization": "Bearer key"}
    with raw_reply(server, "GET", "/a%0Ab%20status=1%C3%A9?q=" + "x" * 9, None, headers):
        pass
    (line,) = lines(1)
    assert " client=1.2.3.4?status=200 method=GET path=/a%0Ab%20status%3D1%C3%A9 status=404 id=" in line
    assert "key" not in line and "xxx" not in line
    names = [field.partition("=")[0] for field in line.split(" ")[1:]]
    assert names == ["client", "method", "path", "status", "id", "seconds"]


@pytest.fixture
def lines(server, monkeypatch):
    """Lines of the access log from here on: `lines(n)` waits until there are n, and takes them."""
    found: queue.SimpleQueue = queue.SimpleQueue()
    until(lambda: not server.writer.lines.qsize())
    monkeypatch.setattr(server.writer, "write", lambda line: found.put(line.decode().rstrip("\n")))

    def take(n: int) -> list[str]:
        taken = [found.get(timeout=20) for _ in range(n)]
        assert found.empty()
        return taken

    return take


def test_lines_that_nobody_reads(monkeypatch):
    """A write that blocks holds up nobody; what does not fit is counted, and a failing write ends nothing."""
    monkeypatch.setattr(access_log, "MAX_WAITING", 3)
    begun, go, found = threading.Event(), threading.Event(), []

    def write(line: bytes) -> None:
        begun.set()
        go.wait(20)
        found.append(line.decode())
        if len(found) == 2:
            raise BrokenPipeError

    writer = access_log.LineWriter(write)
    writer.add("0")
    begun.wait(20)
    for i in range(1, 10):
        writer.add(str(i))  # 4 to 9 do not fit
    go.set()
    until(lambda: len(found) == 4)
    writer.add("10")
    writer.close()
    assert "".join(found) == "0\n1\n2\n3\n6 lines of the access log are missing here\n10\n"


def test_engine_failure():
    """Every job gets an error, also one that was submitted meanwhile; the server says that it is dead."""
    from starlette.testclient import TestClient

    loop, found = EngineLoop(1, 9, 60, Metrics()), []
    app = TestClient(server_app.make_app(loop, "secret", [], local=False))
    jobs = [Job(None, None) for _ in range(3)]

    class Broken:
        busy = True

        def add(self, request):
            return object()

        def advance(self):
            assert app.get("/live").status_code == 200
            loop.submit(jobs[2:])
            raise RuntimeError("injected")

    loop.deliver = found.extend
    loop.submit(jobs[:2])
    with pytest.raises(RuntimeError):
        loop.run(Broken())
    assert {job for job, _ in found} == set(jobs) and len(found) == 3
    assert {event.finish_reason for _, event in found} == {"error"}
    for path in ("/live", "/health"):
        assert app.get(path).status_code == 503 and app.get(path).json()["status"] == "failed"
    with pytest.raises(Refused, match="the engine has failed"):
        loop.submit([Job(None, None)])


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities(server, client, chat):
    """Of each token and of the likeliest in its place, by a forward of the whole text; streamed, the same."""
    asked = dict(model="tiny-llama3", temperature=0.7, seed=3, max_tokens=12)
    if chat:
        ask = client.chat.completions.create
        asked |= dict(messages=GREETING, logprobs=True, top_logprobs=4)
    else:
        ask = client.completions.create
        asked |= dict(prompt=[5, 9, 70, 200, *range(31, 100)], logprobs=4, echo=True)
    found = ask(**asked).choices[0].logprobs
    streamed = [part.choices[0].logprobs for part in ask(**asked, stream=True) if part.choices]
    streamed = [x for x in streamed if x]
    if chat:
        prompt = server.tokenizer.apply_chat_template(GREETING, add_generation_prompt=True, return_dict=False)
        logprobs = [x.logprob for x in found.content]
        tops = [{x.token: x.logprob for x in place.top_logprobs} for place in found.content]
        texts = [bytes(x.bytes) for x in found.content]
        assert [x for part in streamed for x in part.content] == found.content
    else:
        prompt, logprobs, tops = asked["prompt"], found.token_logprobs, found.top_logprobs
        texts = [x.encode() for x in found.tokens]
        assert [x for part in streamed for x in part.tokens] == found.tokens
        assert [x for part in streamed for x in part.text_offset] == found.text_offset
        assert [x for part in streamed for x in part.token_logprobs] == logprobs
        assert logprobs[0] is None and tops[0] is None
    name = server.tokenizer.decode
    again = complete(server, prompt=prompt, max_tokens=12, temperature=0.7, seed=3, logprobs=0)
    tokens = ids_of(server, again["choices"][0]["logprobs"]["tokens"])
    text = prompt + tokens
    expected = forward(server, text)
    first = len(prompt) if chat else 1
    assert b"".join(texts) == b"".join(name([t]).encode() for t in text[0 if not chat else first :])
    for i, (logprob, top) in enumerate(zip(logprobs[not chat :], tops[not chat :], strict=True)):
        row = expected[first + i - 1]
        assert logprob == pytest.approx(row[text[first + i]], abs=1e-4)
        best = np.sort(row)[::-1][:4]
        assert sorted(top.values(), reverse=True)[:4] == pytest.approx(best.tolist(), abs=1e-4)


def offsets_in(text: str, tokens: list[str]) -> list[int]:
    """Of consecutive tokens of a text: the characters before the one in which each token begins."""
    sizes = [x.count("\\x") if x.startswith("bytes:") else len(x.encode()) for x in tokens]
    return [len(text.encode()[: sum(sizes[:i])].decode(errors="ignore")) for i in range(len(tokens))]


PROMPTS = {  # each with its text to echo, the number of tokens before the text, and its offsets if known
    "nothing": ("a", "", 0, []),
    "text": ("What is 🦙 + é? <|eot_id|> x", "What is 🦙 + é? <|eot_id|> x", 1, None),
    "ids": ([0, 250, 100, 254, 179, 71], "<|begin_of_text|>\ufffd~\ufffd\ufffda", 0, [0, *range(17, 22)]),
}


@pytest.mark.parametrize(
    ("stop", "prompt"),
    [((), "nothing"), ((), "text"), ((" es",), "text"), (("éx", "🦙é"), "ids"), (("é", "s🦙"), "text")],
)
def test_text_offsets(server, client, stop, prompt):
    """They count the characters of the whole text, in a stream too; tokens of one character share one."""
    prompt, before, added, expected = PROMPTS[prompt]
    whole = "less is 🦙, 🦙s essé"
    answer = whole[: min((whole.index(x) for x in stop if x in whole), default=len(whole))]
    asked = dict(model="", prompt=prompt, max_tokens=40, logprobs=1, stop=list(stop), echo=bool(before))
    asked |= dict(extra_body=dict(guided_choice=[whole]))
    choice = client.completions.create(**asked).choices[0]
    assert choice.text == before + answer
    tokens, found = choice.logprobs.tokens, choice.logprobs.text_offset
    size = len(prompt) if expected else 0
    if expected is None:
        size = len(server.tokenizer(prompt).input_ids)
        expected = [0] * added + offsets_in(before, tokens[added:size])
    expected = expected + [len(before) + min(x, len(answer)) for x in offsets_in(whole, tokens[size:])]
    assert found == expected and len(found) > size + 9
    parts = [x.choices[0] for x in client.completions.create(**asked, stream=True)]
    assert "".join(x.text for x in parts) == choice.text
    assert [x for part in parts for x in part.logprobs.tokens] == tokens
    assert [x for part in parts for x in part.logprobs.text_offset] == found


def test_text_offsets_of_broken_characters(server):
    """A token that follows half a character begins behind the sign that stands for the half."""
    half, whole = server.tokenizer("é", add_special_tokens=False).input_ids[0], 100
    bias = {str(half): 100, str(whole): 100}
    for seed in range(4):
        asked = dict(prompt="a", logit_bias=bias, temperature=5, max_tokens=20, seed=seed, logprobs=0)
        choice = complete(server, **asked)["choices"][0]
        tokens, found = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert choice["text"] == "".join("~" if x == "~" else "\ufffd" for x in tokens)
        assert len(set(tokens)) == 2 and found == sorted(found)
        assert all(choice["text"][x] == choice["text"][i] for i, x in enumerate(found))
        assert all(x == i for i, x in enumerate(found) if tokens[i] == "~")


def ids_of(server, texts: list[str]) -> list[int]:
    """Of tokens whose texts are no others'."""
    by_text = {server.tokenizer.decode([i]): i for i in range(512)}
    return [by_text[text] for text in texts]


def forward(server, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T,V] after each of these tokens."""
    of = server.engine.programs
    padded = np.array([tokens + [0] * (MAX_LEN - len(tokens))], np.int32)
    logits = model.forward(padded, of.weights, cfg=of.cfg, mesh=of.mesh)[0]
    return np.asarray(jax.nn.log_softmax(logits))


def test_ids_without_a_token(server, client, request):
    """Of a model with more ids than its tokenizer has tokens: no text, and no bytes, but a list of them."""
    default, names = server.app.state.served, ("vocab", "merges")
    content = json.loads(server.tokenizer.backend_tokenizer.to_str())
    fewer = [list(content["model"][name])[:-9] for name in names]
    content["model"] |= dict(vocab={x: content["model"]["vocab"][x] for x in fewer[0]}, merges=fewer[1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    tokenizer.chat_template = server.tokenizer.chat_template
    request.addfinalizer(lambda: setattr(server.app.state, "served", default))
    server.app.state.served = dataclasses.replace(
        default, tokenizer=tokenizer, grammar_tokenizer=grammar_tokenizer(tokenizer, 512, frozenset([6]))
    )
    asked = dict(model="", temperature=0, max_tokens=3, logit_bias={"511": 100})
    choice = client.chat.completions.create(
        **asked, messages=GREETING, logprobs=True, top_logprobs=20
    ).choices[0]
    places = choice.logprobs.content
    assert choice.message.content == "" and [(x.token, x.bytes) for x in places] == [("", [])] * 3
    assert all(x.bytes == list(x.token.encode()) for place in places for x in place.top_logprobs)
    choice = client.completions.create(**asked, prompt=[71, 511, 71], echo=True, logprobs=1).choices[0]
    assert choice.text == "aa" and choice.logprobs.tokens == ["a", "", "a", "", "", ""]
    assert choice.logprobs.text_offset == [0, 1, 1, 2, 2, 2]


def test_samples_and_seeds(server, client):
    """n samples have the seeds that follow one another; a seed draws the same alone and in a crowd."""
    asked = dict(
        model="tiny-llama3", prompt=["What is", [40, 41, 42]], temperature=1.3, max_tokens=10, seed=11
    )
    together = [x.text for x in client.completions.create(**asked, n=3).choices]
    alone = [
        client.completions.create(**asked | dict(prompt=prompt, seed=11 + i)).choices[0].text
        for prompt in asked["prompt"]
        for i in range(3)
    ]
    assert together == alone and len(set(together)) > 3
    asked.pop("seed")
    other = [x.text for x in client.completions.create(**asked, n=3).choices]
    assert other != together
    huge = [
        client.completions.create(**asked, seed=seed).choices[0].text for seed in (2**33 + 11, 11 - 2**33)
    ]
    assert huge == [client.completions.create(**asked, seed=11).choices[0].text] * 2


def test_stops(server, client):
    """Texts end an answer before themselves, tokens with themselves; both say "stop"."""
    asked = dict(model="tiny-llama3", messages=GREETING, temperature=0)
    text = client.chat.completions.create(**asked).choices[0].message.content
    middle = text[7:10]
    for stop in (middle, ["nothing of this", middle]):
        choice = client.chat.completions.create(**asked, stop=stop).choices[0]
        assert choice.message.content == text[: text.index(middle)] and choice.finish_reason == "stop"
        streamed = client.chat.completions.create(**asked, stop=stop, stream=True)
        assert "".join(x.choices[0].delta.content or "" for x in streamed) == choice.message.content
    first = server.tokenizer.encode(text, add_special_tokens=False)[3]
    more = dict(stop_token_ids=[first])
    choice = client.chat.completions.create(**asked, extra_body=more).choices[0]
    assert text.startswith(choice.message.content) and len(choice.message.content) < len(text)
    on = client.chat.completions.create(**asked, max_tokens=60, extra_body=dict(ignore_eos=True))
    assert on.choices[0].finish_reason == "length" and on.usage.completion_tokens == 60
    assert on.choices[0].message.content.startswith(text)
    until(lambda: idle(server))


def test_penalties_and_biases(server):
    """A bias makes a token certain or impossible; penalties end a repetition; what comes later is plain."""
    asked = dict(prompt="What is", temperature=0, max_tokens=12, ignore_eos=True)
    plain = complete(server, **asked, logprobs=0)["choices"][0]
    only = complete(server, **asked, logit_bias={"65": 100})["choices"][0]["text"]
    assert only == server.tokenizer.decode([65]) * 12
    banned = ids_of(server, plain["logprobs"]["tokens"][:1])[0]
    without = complete(server, **asked, logit_bias={str(banned): -100}, logprobs=0)["choices"][0]
    assert banned not in ids_of(server, without["logprobs"]["tokens"])
    three = asked | dict(logit_bias={"65": 32, "66": 31, "67": 30}, logprobs=0)
    repeated = complete(server, **three)["choices"][0]["logprobs"]["tokens"]
    often = complete(server, **three, frequency_penalty=2)["choices"][0]["logprobs"]["tokens"]
    once = complete(server, **three, presence_penalty=2)["choices"][0]["logprobs"]["tokens"]
    assert len(set(repeated)) < len(set(often)) == 3 and set(once) <= set(often)
    assert complete(server, **asked)["choices"][0]["text"] == plain["text"]


def test_echo_without_an_answer(server):
    """As `--score`: the log-likelihood of a text; with texts and ids alike, and several at a time."""
    ids = server.tokenizer("What is 3 + 4?").input_ids
    fields = dict(max_tokens=0, echo=True, logprobs=1, temperature=0)
    found = complete(server, prompt=["What is 3 + 4?", ids, ids[:3]], **fields)["choices"]
    assert found[0]["text"] == "What is 3 + 4?" and found[0]["finish_reason"] == "length"
    assert found[0]["logprobs"]["token_logprobs"] == found[1]["logprobs"]["token_logprobs"]
    assert found[2]["logprobs"]["token_logprobs"] == pytest.approx(
        found[0]["logprobs"]["token_logprobs"][:3], abs=1e-4, nan_ok=True
    )
    expected = forward(server, ids)
    likely = [expected[i - 1, token] for i, token in enumerate(ids)][1:]
    assert found[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(likely, abs=1e-4)
    plain = complete(server, prompt="What is 3 + 4?", max_tokens=2, echo=True, temperature=0)["choices"][0]
    assert plain["text"].startswith("What is 3 + 4?") and plain["logprobs"] is None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sum": {"type": "integer", "minimum": -20, "maximum": 999},
        "kind": {"enum": ["a", "b", "something long"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "sum", "kind", "parts"],
    "additionalProperties": False,
}


def test_json_schema(server):
    """All answers, greedy and drawn, beside rows without a grammar, whose tokens stay as they are."""
    count = 12
    form = dict(type="json_schema", json_schema=dict(name="x", schema=SCHEMA, strict=True))
    turns = [[dict(role="user", content=f"What is {i} + {i % 7}?")] for i in range(count)]
    asked = [
        dict(messages=turns[i], response_format=form, max_tokens=80)
        | (dict(temperature=0) if i % 2 else dict(temperature=1.5, seed=i))
        for i in range(count)
    ]
    beside = dict(messages=GREETING, temperature=0, max_tokens=30)
    alone = post(server, "/v1/chat/completions", beside)[1]["choices"]
    bodies = [x for some in asked for x in (some, beside)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: post(server, "/v1/chat/completions", body)[1], bodies))
    texts = [reply["choices"][0]["message"]["content"] for reply in found[::2]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert list(json.loads(text)) == SCHEMA["required"]
    assert len(set(texts)) > count / 4
    assert {reply["choices"][0]["finish_reason"] for reply in found[::2]} == {"stop"}
    assert all(reply["choices"] == alone for reply in found[1::2])


def test_tokenize(server):
    """By the tokenizer of transformers: of texts and chats, and back."""
    reference, text = server.tokenizer, "What is 3 + 4? \U0001f999 <|eot_id|>"

    def tokens(**fields) -> dict:
        status, reply = post(server, "/tokenize", fields)
        assert status == 200 and reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == MAX_LEN
        return reply

    found = tokens(prompt=text, return_token_strs=True)
    assert found["tokens"] == reference(text).input_ids
    assert found["token_strs"] == reference.convert_ids_to_tokens(found["tokens"])
    assert tokens(prompt="") == dict(
        count=1, max_model_len=MAX_LEN, tokens=[reference.bos_token_id], token_strs=None
    )
    plain = tokens(prompt=text, add_special_tokens=False)
    assert plain["tokens"] == reference(text, add_special_tokens=False).input_ids == found["tokens"][1:]
    status, back = post(server, "/detokenize", dict(tokens=found["tokens"], model="tiny-llama3"))
    assert status == 200 and back == dict(prompt=reference.decode(found["tokens"]))
    template = partial(reference.apply_chat_template, return_dict=False)
    assert tokens(messages=GREETING)["tokens"] == template(GREETING, add_generation_prompt=True)
    assert tokens(messages=GREETING, add_generation_prompt=False)["tokens"] == template(GREETING)
    begun = [*GREETING, dict(role="assistant", content="My name")]
    continued = tokens(messages=begun, continue_final_message=True)["tokens"]
    assert continued == template(begun, continue_final_message=True)
    function = dict(name="f", description=None, parameters=None)  # null is absent at any depth
    offered = tokens(messages=GREETING, prompt=None, tools=[dict(type="function", function=function)])
    assert offered == tokens(messages=GREETING, tools=[dict(type="function", function=dict(name="f"))])
    assert tokens(prompt="a", messages=None) == tokens(prompt="a")
    for path, fields, message in (
        ("tokenize", {}, "'prompt' must be a text"),
        ("tokenize", dict(prompt="\ud800"), "'prompt' must be a text"),
        ("tokenize", dict(messages=[]), "messages must be"),
        ("tokenize", dict(messages=GREETING, add_special_tokens=True), "'add_special_tokens'"),
        ("tokenize", dict(prompt="a", chat_template="x"), "'chat_template' is not supported"),
        ("detokenize", dict(tokens=[512]), "no token id below 512"),
        ("detokenize", {}, "'tokens' must be a list"),
        ("detokenize", dict(tokens=[1], model="other"), "not served here"),
    ):
        status, reply = post(server, f"/{path}", fields)
        assert status in (400, 404) and message in reply["error"]["message"], fields


# --------------------------------------------------------------------------------- what they may not


def form(**schema) -> dict:
    return dict(type="json_schema", json_schema=dict(schema=schema))


CHAT, TEXT = dict(messages=GREETING), dict(prompt="a")
WRONG = [
    ({}, "'prompt' must be"),
    (TEXT | dict(temperature=-1), "'temperature' -1 is not"),
    (TEXT | dict(temperature=1e400), "inf"),
    (TEXT | dict(temperature=True), "'temperature' True is not"),
    (TEXT | dict(top_p=0), "'top_p' 0 is not"),
    (TEXT | dict(top_p="\ud800"), "'top_p' ? is not"),
    (TEXT | dict(top_k=2**40), "'top_k'"),
    (TEXT | dict(frequency_penalty=3), "between -2 and 2"),
    (TEXT | dict(n=0), "'n' must be"),
    (TEXT | dict(n=10**30), "'n' must be"),
    (TEXT | dict(n=100, prompt=["a", "b"]), "more than 128 answers"),
    (TEXT | dict(max_tokens=0), "'max_tokens' must be"),
    (dict(prompt=[7] * 128), "exceed --max-len of 128"),
    (dict(prompt=[]), "'prompt'"),
    (dict(prompt=[[]]), "'prompt' is empty"),
    (dict(prompt=[1, 512]), "512 is no token id below 512"),
    (dict(prompt=[1, "a"]), "'a' is no token id"),
    (dict(prompt="\ud800"), "not a text"),
    (dict(prompt={}), "'prompt' must be"),
    (TEXT | dict(stop=["a"] * 17), "'stop'"),
    (TEXT | dict(stop_token_ids=[-1]), "'stop_token_ids'"),
    (TEXT | dict(logprobs=21), "'logprobs' must be"),
    (CHAT | dict(logprobs=3), "'logprobs' must be"),
    (TEXT | dict(logit_bias={"a": 1}), "'a' is no token id"),
    (TEXT | dict(logit_bias={"1": 101}), "between -100 and 100"),
    (TEXT | dict(logit_bias={str(i): 1 for i in range(301)}), "301"),
    (TEXT | dict(seed=1.5), "'seed' must be"),
    (TEXT | dict(stream="yes"), "'stream' must be"),
    (dict(messages=[]), "messages must be"),
    (
        dict(messages=[dict(role="user", content=[dict(type="image_url", image_url="http://x")])]),
        "messages[0]: content of type 'image_url' is not supported, only text is",
    ),
    (TEXT | dict(response_format=dict(type="grammar", grammar="start: x")), "unknown name"),
    (TEXT | dict(response_format=dict(type="grammar", grammar="start: start")), "'response_format': "),
    (TEXT | dict(response_format=dict(type="regex", regex="a" * 300_000)), "300000 characters"),
    (CHAT | dict(response_format=form(const="\ud800")), "'response_format': "),
    (CHAT | dict(response_format=form(**{"$ref": "#"})), "'response_format': "),
]


@pytest.mark.parametrize(("body", "message"), WRONG, ids=[x[1] for x in WRONG])
def test_wrong_fields(server, body, message):
    """400, one line that names the field."""
    status, reply = post(
        server,
        "/v1/chat/completions" if "messages" in body and "prompt" not in body else "/v1/completions",
        body,
    )
    assert status == 400 and message in reply["error"]["message"] and "\n" not in reply["error"]["message"]
    assert reply["error"]["type"] == "invalid_request_error" and idle(server)


def test_other_refusals(server):
    twice, nested, digits = b'{"prompt": "a", "prompt": "b"}', b"[" * 100_000, b"9" * 5000
    for body in (b"", b"{", b"[]", b"\xff\xfe{}", twice, nested, digits):
        status, reply = post(server, "/v1/completions", body)
        assert status == 400 and reply["error"]["message"].startswith("the body: not")
    assert post(server, "/v1/completions", TEXT | dict(model="other"))[0] == 404
    assert post(server, "/v1/embeddings", {})[0] == 404
    assert post(server, "/v1/models", {})[0] == 405
    assert post(server, "/v1/completions", TEXT, content_type="text/plain")[0] == 415
    assert post(server, "/v1/completions", TEXT, host="evil.example")[0] == 403
    assert (
        post(server, "/v1/completions", TEXT | dict(max_tokens=1), host=f"localhost:{server.port}")[0] == 200
    )
    with socket.create_connection(("127.0.0.1", server.port)) as s:  # what is too large is not read
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        s.sendall(b"content-length: 99999999\r\n\r\n")
        assert b" 413 " in s.recv(100)


def test_guard():
    """A key guards all but /health and /live; a browser may send it as a password. Origins only as asked."""
    from starlette.testclient import TestClient

    loop = EngineLoop(1, 9, 60, Metrics())
    loop.ready = True
    guarded = TestClient(server_app.make_app(loop, "secret", ["https://a.example"], local=False))
    basic = base64.b64encode(b"me:secret").decode()
    wrong = (
        {},
        dict(authorization="Bearer secre"),
        dict(authorization="Basic !"),
        dict(authorization="secret"),
    )
    for path in ("/", "/page/page.js", "/v1/models", "/metrics", "/nothing"):
        for headers in wrong:
            reply = guarded.get(path, headers=headers)
            assert reply.status_code == 401 and "Basic" in reply.headers["www-authenticate"]
        given = [dict(authorization=header) for header in ("Bearer secret", f"Basic {basic}")]
        for headers in (*given, {"x-api-key": "secret"}):
            assert guarded.get(path, headers=headers).status_code != 401
        assert guarded.get(path, headers={"x-api-key": "secre"}).status_code == 401
    assert guarded.get("/health").status_code == guarded.get("/live").status_code == 200
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = guarded.options("/v1/models", headers=dict(origin="https://a.example") | asks)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = guarded.options("/v1/models", headers=dict(origin="https://b.example") | asks)
    assert "access-control-allow-origin" not in refused.headers


# ------------------------------------------------------------------------------------- many at once


def test_queue(server, monkeypatch):
    """What does not fit into rows and queue is refused with the time to wait; the others are answered."""
    monkeypatch.setattr(server.loop, "max_queue", 32)
    body = dict(prompt="What is", n=10, max_tokens=20, ignore_eos=True, temperature=1)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: post(server, "/v1/completions", body), range(6)))
    status = sorted(x[0] for x in results)
    assert set(status) == {200, 429} and status.count(200) >= (ROWS + 32) // 10
    refused = next(reply for code, reply in results if code == 429)
    assert refused["error"]["code"] == "queue_full"
    assert idle(server)
    status, reply = post(server, "/v1/completions", body | dict(n=41))
    assert status == 400 and reply["error"]["message"].endswith("places to wait: 40")
    monkeypatch.setattr(server.loop, "max_queue", 1 - ROWS)
    monkeypatch.setattr(server.loop, "open_jobs", 1)
    with contextlib.closing(begin_post(server, TEXT)) as connection:
        response = connection.getresponse()
    assert response.status == 429 and 1 <= int(response.headers["retry-after"]) <= 600
    monkeypatch.undo()


def test_a_client_that_leaves(server):
    """Of 100 samples, after the first part: what waits and what is answered ends, in the engine too."""
    body = TEXT | dict(n=100, max_tokens=100, ignore_eos=True, stream=True, temperature=1)
    with contextlib.closing(begin_post(server, body)) as connection, connection.getresponse() as response:
        response.readline()
        answers = list(server.loop.replies.open)
    until(lambda: idle(server))
    assert len(answers) > 80 and sum(x.finish_reason == "cancelled" for x in answers) > len(answers) / 2


LARGE = "the lazy dog " * 6000  # more than LARGE_BODY bytes


@pytest.fixture
def slow(monkeypatch):
    """Large prompts take as long to tokenize as `gate` is closed. late: those for which this was too long."""
    found, encode = SimpleNamespace(gate=threading.Event(), begun=[], late=[]), request_builder.encode

    def slowly(tokenizer, text, *arguments, **options):
        if len(text) >= len(LARGE):
            found.begun.append(text)
            if not found.gate.wait(60):
                found.late.append(text)
        return encode(tokenizer, text, *arguments, **options)

    monkeypatch.setattr(request_builder, "encode", slowly)
    yield found
    found.gate.set()


def test_large_prompts_delay_one_another_only(server, client, slow):
    """Eight of them, more than there are threads, are tokenized one by one; chats are answered meanwhile."""
    assert len(LARGE) > lanes.LARGE_BODY
    body = dict(prompt=LARGE, max_tokens=1)
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(post, server, "/v1/completions", body) for _ in range(8)]
        until(lambda: metric(server, "llama_untokenized_requests") == 7)
        for _ in range(3):
            assert client.chat.completions.create(model="", messages=GREETING, max_tokens=4).choices
        assert len(slow.begun) == 1 and not any(x.done() for x in replies) and not slow.late
        slow.gate.set()
    found = [(status, x["error"]["code"]) for status, x in (reply.result() for reply in replies)]
    assert found == [(400, "context_length_exceeded")] * 8
    assert metric(server, "llama_untokenized_requests") == 0


def test_a_client_that_leaves_before_its_prompt_is_tokenized(server, slow):
    """Its place is free at once, and its prompt is never tokenized."""
    first = begin_post(server, dict(prompt=LARGE, max_tokens=1))
    until(lambda: slow.begun)
    second = begin_post(server, dict(prompt=LARGE, max_tokens=1))
    until(lambda: metric(server, "llama_untokenized_requests") == 1)
    second.close()
    until(lambda: metric(server, "llama_untokenized_requests") == 0)
    assert len(slow.begun) == 1 and not slow.late
    slow.gate.set()
    assert first.getresponse().status == 400
    first.close()
    assert complete(server, **TEXT) and len(slow.begun) == 1


def test_prompts_that_cannot_fit(server, monkeypatch):
    """They are refused when twice as many tokens as fit have been made, wherever the long text is."""
    made, tokenize = [], conversation_text.tokenize

    def counting(*arguments, **options):
        ids = tokenize(*arguments, **options)
        made.append(len(ids))
        return ids

    monkeypatch.setattr(conversation_text, "tokenize", counting)
    long = LARGE * 10
    for path, body in [
        ("/v1/completions", dict(prompt=long)),
        ("/v1/completions", dict(prompt=["short", long])),
        ("/v1/chat/completions", dict(messages=[dict(role="system", content=long), *GREETING])),
        ("/v1/chat/completions", dict(messages=[dict(role="user", content=long)])),
        ("/v1/chat/completions", dict(messages=[dict(role="user", content="<|eot_id|>" + long)])),
    ]:
        status, reply = post(server, path, body)
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert reply["error"]["message"].endswith(f"more than the {MAX_LEN} tokens that a row can hold")
        assert 2 * MAX_LEN < sum(made) < 8 * MAX_LEN
        made.clear()


def test_a_client_that_leaves_unnoticed(server, caplog):
    """No warning of asyncio's, which goes to stderr, about writing many times to a lost connection.

    The server's event loop is held up while the client resets the connection, and meanwhile events pile up.
    """
    body = json.dumps(TEXT | dict(n=32, max_tokens=100, ignore_eos=True, stream=True, temperature=1)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    released = threading.Event()
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        assert s.recv(9) == b"HTTP/1.1 "
        until(lambda: server.loop.replies.open)
        jobs = list(server.loop.replies.open.values())
        jobs[0].listener.loop.call_soon_threadsafe(released.wait, 20)
        before = server.engine.stats.tokens
        until(lambda: server.engine.stats.tokens > before + 60)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    released.set()
    until(lambda: idle(server))
    assert [job.answer.finish_reason for job in jobs].count("cancelled") > 0
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_many_streams(server):
    """On 8 rows, a third of them cancelled at random moments: the others have exactly their solo tokens."""
    count = 60
    rng = random.Random(count)
    before = {name: metric(server, f"llama_{name}_total") for name in ("requests", "generated_tokens")}
    asked = [
        dict(
            prompt=[rng.randrange(5, 512) for _ in range(rng.randint(1, 60))], max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0, 0, 0.8]), seed=i, ignore_eos=True,
            **rng.choice([{}, {}, dict(presence_penalty=1), dict(logprobs=2), dict(top_k=9)]),
        )
        for i in range(count)
    ]  # fmt: skip
    cancelled = {i: rng.choice([0, 0, 1, 2, 5, 20]) for i in rng.sample(range(count), count // 3)}
    alone = {i: complete(server, **x)["choices"][0] for i, x in enumerate(asked) if i not in cancelled}
    texts, logprobs = {}, {}

    async def stream(client, i: int) -> None:
        own = asked[i]
        more = {name: own[name] for name in ("ignore_eos", "top_k") if name in own}
        fields = {name: x for name, x in own.items() if name not in more}
        await asyncio.sleep(rng.random())
        call = client.completions.create(model="tiny-llama3", **fields, stream=True, extra_body=more)
        if cancelled.get(i) == 0:  # while it is queued, or its prompt is read
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(call, rng.random() / 20)
            return
        parts = await call
        found = []
        async for part in parts:
            found.append(part.choices[0])
            if len(found) == cancelled.get(i):
                return await parts.close()
        texts[i] = "".join(x.text for x in found)
        logprobs[i] = [x for part in found if part.logprobs for x in part.logprobs.token_logprobs]

    async def ask() -> None:
        address = dict(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with openai.AsyncOpenAI(**address) as client:
            await asyncio.gather(*(stream(client, i) for i in range(count)))

    asyncio.run(ask())
    for i, choice in alone.items():
        assert texts[i] == choice["text"], asked[i]
        if choice["logprobs"]:
            assert logprobs[i] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    until(lambda: idle(server))
    assert not server.loop.replies.open and not server.engine.scheduler.queue and server.loop.inbox.empty()
    until(lambda: metric(server, "llama_rows_in_use") == 0)
    ended = metric(server, "llama_requests_total") - before["requests"]
    assert len(alone) * 2 <= ended <= len(alone) * 2 + len(cancelled)
    tokens = metric(server, "llama_generated_tokens_total") - before["generated_tokens"]
    assert tokens >= 2 * sum(asked[i]["max_tokens"] for i in alone)


VALUES = [
    *(None, True, -1, 0, 2, 1.5, 1e400, 10**40, "", "a", "\ud800", [], [[]], [1], ["a"], {}, {"a": 1}, [{}]),
    {"type": "regex", "regex": "("},
    [{"role": "user", "content": "a"}],
]


def test_malformed(server):
    """Wrong types, damaged bytes, cut bodies, half-closed sockets: a 4xx with one message, or an end."""
    count, fine = 150, 0
    rng = random.Random(count)
    names = sorted((api_requests.CHAT | api_requests.COMPLETION) - {"n", "max_tokens"} | {"unknown", "tools"})
    for _ in range(count):
        chat = rng.random() < 0.5
        body = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(0, 4))}
        if rng.random() < 0.7:
            body |= CHAT if chat else TEXT
        data = json.dumps(body | dict(max_tokens=1) if rng.random() < 0.5 else body).encode()
        if rng.random() < 0.4:
            data = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            data = bytes(data)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        how = rng.random()
        if how < 0.15:
            raw(server, path, data, length=len(data) + rng.randint(1, 50), half=rng.random() < 0.5)
            continue
        if how < 0.2:
            with socket.create_connection(("127.0.0.1", server.port)) as s:
                s.sendall(rng.randbytes(rng.randint(1, 300)) + b"\r\n\r\n")
                s.settimeout(5)
                with contextlib.suppress(OSError):
                    assert s.recv(4096)[9:12] in (b"400", b"")
            continue
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status == 200:
            fine += 1
        else:
            message = json.loads(text)["error"]["message"]
            right = 400 <= response.status < 500 and 0 < len(message) < 500 and "\n" not in message
            assert right and "Traceback" not in message, (data, text)
    assert fine < count / 2
    until(lambda: idle(server))
    assert complete(server, prompt="a", max_tokens=3)["usage"]["completion_tokens"] <= 3


def raw(server, path: str, data: bytes, length: int, half: bool) -> None:
    """A body that ends before its length: the client leaves, or only says that it will send no more."""
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        s.sendall(f"{head}content-length: {length}\r\n\r\n".encode() + data)
        if half:
            s.shutdown(socket.SHUT_WR)
            s.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert s.recv(4096)[9:10] in (b"4", b"")


def test_time_limit(server, monkeypatch):
    """A request that takes too long ends with 504, and its row is free."""
    monkeypatch.setattr(server.loop, "seconds", 0.05)
    status, reply = post(server, "/v1/completions", dict(prompt="a", n=100, max_tokens=100, ignore_eos=True))
    assert status == 504 and "longer" in reply["error"]["message"]
    until(lambda: idle(server))


def test_slow_head(server, monkeypatch):
    """Of a first request and of a later one on the same connection."""
    monkeypatch.setattr(server_http, "HEAD_SECONDS", 0.2)
    for before in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.settimeout(10)
            s.sendall(before)
            found = b""
            while before and b"}" not in found:
                found += s.recv(4096)
            s.sendall(b"GET / HTTP/1.1\r\nho")
            assert s.recv(4096) == b""


def test_slow_body(server, monkeypatch):
    monkeypatch.setattr(server_app, "BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        s.sendall(b"content-length: 20\r\n\r\n{")
        s.settimeout(10)
        assert b" 408 " in s.recv(4096)
