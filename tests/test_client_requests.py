"""Requests of client libraries, replayed: they are answered.

client_requests.jsonl has a request per line: the `client` and its version, what it `sends`, the `path` and
the `body`. `recorded`: whether the client sent it to a recording server; the others were written after what
the sources of their clients send. `refused`: the field by whose name the server refuses the request, because
it asks for an answer that the server cannot give.
"""

import json
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers
from conftest import CHECKPOINTS
from test_server import post_text, started

LINES = pathlib.Path(__file__).with_name("client_requests.jsonl").read_text().splitlines()
REQUESTS = [json.loads(line) for line in LINES]
CHAT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A random model, the smallest there can be. Its rows are long, because descriptions of tools are."""
    folder = tmp_path_factory.mktemp("random") / "tiny-llama3"
    shutil.copytree(CHECKPOINTS / "tiny-llama3", folder)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=1024)
    heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    config = transformers.AutoConfig.from_pretrained(folder, **sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    options = "--max-len 1024 --max-new-tokens 4 --prefill-budget 0".split()
    found = started("--checkpoint", str(folder), *options, width=256)
    yield found
    found.end()


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
        replies = pool.map(lambda request: post_text(server, request["path"], request["body"]), REQUESTS)
        for request, (status, text) in zip(REQUESTS, replies, strict=True):
            where = request["client"], request["sends"], text[:300]
            if "refused" in request:
                assert status == 400 and json.loads(text)["error"]["param"] == request["refused"], where
            else:
                assert status == 200, where
                check_answer(request, text)
