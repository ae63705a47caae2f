"""Requests of client libraries, replayed: none is refused for a field that changes nothing.

client_requests.jsonl has a request per line: the `client` and its version, what it `sends`, the `path` and
the `body`. `recorded`: whether the client sent it to a recording server; the others were written after what
the sources of their clients send. `refused`: the field by whose name the server refuses the request, because
it asks for an answer that the server cannot give.
"""

import json
import pathlib
import shutil
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from conftest import CHECKPOINTS
from test_server import started

LINES = pathlib.Path(__file__).with_name("client_requests.jsonl").read_text().splitlines()
REQUESTS = [json.loads(line) for line in LINES]
CHAT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The tiny model with longer rows than it was trained for, because descriptions of tools are long."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-llama3"
    shutil.copytree(CHECKPOINTS / "tiny-llama3", folder)
    config = json.loads((folder / "config.json").read_text()) | dict(max_position_embeddings=1024)
    (folder / "config.json").write_text(json.dumps(config))
    options = "--max-len 1024 --max-new-tokens 8 --prefill-budget 0".split()
    found = started("--checkpoint", str(folder), *options)
    yield found
    found.end()


def reply(server, request: dict) -> tuple[int, str]:
    """-> (the status, the text) of the response, whole or streamed."""
    headers = {"content-type": "application/json"}
    body = json.dumps(request["body"]).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + request["path"], body, headers)
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def check_answer(request: dict, text: str) -> None:
    """It is complete: whole or streamed, of the kind that was asked for."""
    if request["body"].get("stream"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if request["path"] == RESPONSES_PATH:
            assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete")
        else:
            assert events.pop() == "[DONE]" and events
            assert all("choices" in json.loads(event) for event in events)
    elif request["path"] == RESPONSES_PATH:
        assert json.loads(text)["status"] in ("completed", "incomplete")
    else:
        assert json.loads(text)["choices"]


def test_requests_of_clients(server):
    with ThreadPoolExecutor(16) as pool:
        replies = pool.map(partial(reply, server), REQUESTS)
        for request, (status, text) in zip(REQUESTS, replies, strict=True):
            where = request["client"], request["sends"], text[:300]
            if "refused" in request:
                assert status == 400 and json.loads(text)["error"]["param"] == request["refused"], where
            else:
                assert status == 200, where
                check_answer(request, text)


def test_what_is_replayed():
    """At least a hundred recorded requests that are answered, most of them with tools."""
    answered = [x for x in REQUESTS if "refused" not in x]
    recorded = [x for x in answered if x["recorded"]]
    assert len(recorded) >= 100 and len({x["client"] for x in answered}) > 10
    assert sum("tools" in x["body"] for x in recorded) > 50
    for asked in ("none", "auto", "required"):
        assert any(x["body"].get("tool_choice") == asked for x in recorded), asked
    assert any(isinstance(x["body"].get("tool_choice"), dict) for x in recorded)
    refused = Counter(x["refused"] for x in REQUESTS if "refused" in x)
    assert refused == dict(previous_response_id=5, messages=1)
    lines = [json.dumps(x, sort_keys=True) for x in REQUESTS]
    assert len(set(lines)) == len(lines)
