"""Anthropic's Messages API: the client's own parser reads it, and it answers as the chat API does."""

import json
import random
import urllib.request

import anthropic
import anthropic.types
import pydantic
import pytest
from processes import until
from test_server import GREETING, idle, post, post_text, server_with
from test_server_fields import post_whole
from test_server_fields import thinker as thinker  # a fixture

from server.messages_input import CONVERTED, chat_fields

PATH = "/v1/messages"
ASKED = dict(model="tiny-llama3", max_tokens=60, messages=GREETING)
GREEDY = dict(extra_body=dict(temperature=0))  # the client has no such field any more
EVENT = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
MESSAGE = pydantic.TypeAdapter(anthropic.types.Message)


server = server_with("--max-len", "512", "--rows", "2")


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def streamed(server, **fields) -> list[dict]:
    """The events of a stream, each of which Anthropic's own types accept as it was sent, under its name."""
    status, text = post_text(server, f"{PATH}?beta=true", ASKED | dict(temperature=0, stream=True) | fields)
    assert status == 200, text
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
            if events[-1]["type"] != "error":
                EVENT.validate_python(events[-1])
    return events


def answered(server, **fields) -> dict:
    status, reply = post(server, PATH, ASKED | dict(temperature=0) | fields)
    assert status == 200, reply
    MESSAGE.validate_python(reply)
    return reply


def kinds(events: list[dict]) -> list[str]:
    """The types of events, of deltas those of the deltas; runs of one type count once."""
    found = []
    for event in events:
        kind = event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        found += [] if found[-1:] == [kind] else [kind]
    return found


def texts(events: list[dict], name: str) -> str:
    return "".join(x["delta"].get(name, "") for x in events if x["type"] == "content_block_delta")


def test_text(server, client, claude):
    """The same text and tokens as by the chat API, whole and streamed."""
    chat = client.chat.completions.create(model="", messages=GREETING, temperature=0, max_tokens=60)
    whole = claude.messages.create(**ASKED, **GREEDY)
    (block,) = whole.content
    assert block.type == "text" and block.text == chat.choices[0].message.content and len(block.text) > 10
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert claude.messages.count_tokens(model="", messages=GREETING).input_tokens == chat.usage.prompt_tokens
    with claude.messages.stream(**ASKED, **GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        last = stream.get_final_message()
    assert last.content[0].text == block.text and last.stop_reason == "end_turn"
    assert last.usage.input_tokens == 1 and last.usage.output_tokens == usage.output_tokens
    assert last.usage.cache_read_input_tokens == chat.usage.prompt_tokens - 1
    assert {whole.id, last.id} & {chat.id} == set() and whole.id != last.id


def test_stream(server):
    events = streamed(server)
    assert kinds(events) == [
        "message_start", "content_block_start", "text_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    first, begin, end, delta = events[0]["message"], events[1], events[-3], events[-2]
    assert first["content"] == [] and first["stop_reason"] is None and first["usage"]["output_tokens"] == 0
    assert begin == dict(type="content_block_start", index=0, content_block=dict(type="text", text=""))
    assert end["index"] == 0 and delta["delta"] == dict(stop_reason="end_turn", stop_sequence=None)
    assert texts(events, "text") == answered(server)["content"][0]["text"]
    assert delta["usage"]["output_tokens"] > 5


def test_ends(server):
    """By the limit, and by a stop text, which is named."""
    cut = answered(server, max_tokens=3)
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3
    assert streamed(server, max_tokens=3)[-2]["delta"]["stop_reason"] == "max_tokens"
    text = answered(server)["content"][0]["text"]
    stops = [
        text[6:8],
        text[5:8],
        "never in it",
    ]  # two of them end with one character; the longer begins first
    found = answered(server, stop_sequences=stops)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert found["content"][0]["text"] == text[: text.index(text[5:8])]
    last = streamed(server, stop_sequences=stops)[-2]["delta"]
    assert last == dict(stop_reason="stop_sequence", stop_sequence=text[5:8])
    assert answered(server, stop_sequences=[text[:2]])["content"] == []
    begun = [*GREETING, dict(role="assistant", content=text[:4])]
    continued = answered(server, messages=begun)
    chat = dict(messages=begun, temperature=0, continue_final_message=True, max_tokens=60)
    expected = post(server, "/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"]
    assert continued["content"][0]["text"] == expected


ADD = dict(name="add", description="Add.", input_schema=dict(
    type="object", properties=dict(a=dict(enum=[1, 2, 3]), b=dict(enum=[4, 5])), required=["a", "b"],
))  # fmt: skip
SEARCH = dict(type="web_search_20250305", name="web_search")


@pytest.mark.parametrize("choice", [dict(type="any"), dict(type="tool", name="add")], ids=["any", "tool"])
def test_tools(server, client, claude, choice):
    """Whole and streamed; the call and its result go back as they are, as in the chat API."""
    asked = dict(tools=[ADD | dict(type="custom", cache_control=dict(type="ephemeral"))])
    forced = asked | dict(tool_choice=choice | dict(disable_parallel_tool_use=True))
    whole = answered(server, **forced)
    (call,) = whole["content"]
    assert whole["stop_reason"] == "tool_use" and (call["type"], call["name"]) == ("tool_use", "add")
    assert call["input"]["a"] in (1, 2, 3) and call["input"]["b"] in (4, 5)
    events = streamed(server, **forced)
    assert kinds(events) == [
        "message_start", "content_block_start", "input_json_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert json.loads(texts(events, "partial_json")) == call["input"]
    assert events[1]["content_block"]["input"] == {} and events[-2]["delta"]["stop_reason"] == "tool_use"
    with claude.messages.stream(**ASKED, **forced) as stream:
        assert stream.get_final_message().content[0].input["b"] in (4, 5)
    result = dict(type="tool_result", tool_use_id=call["id"], content=[dict(type="text", text="7")])
    turns = [*GREETING, dict(role="assistant", content=[call]), dict(role="user", content=[result])]
    found = answered(server, messages=turns, max_tokens=2, **asked)["usage"]
    function = dict(name="add", arguments=json.dumps(call["input"]))
    calls = [dict(id=call["id"], type="function", function=function)]
    chat = [*GREETING, dict(role="assistant", tool_calls=calls)]
    chat.append(dict(role="tool", tool_call_id=call["id"], content="7"))
    parameters = {name: x for name, x in ADD.items() if name != "input_schema"}
    nested = dict(type="function", function=parameters | dict(parameters=ADD["input_schema"]))
    expected = client.chat.completions.create(model="", messages=chat, tools=[nested], max_tokens=2).usage
    assert found["input_tokens"] + found["cache_read_input_tokens"] == expected.prompt_tokens
    counted = claude.messages.count_tokens(model="", messages=turns, **asked)
    assert counted.input_tokens == expected.prompt_tokens
    cut = answered(server, max_tokens=whole["usage"]["output_tokens"] - 3, **forced)
    assert cut["content"] == [] and cut["stop_reason"] == "max_tokens"


def test_fields_of_tools(server):
    served = server.app.state.served

    def fields(**asked) -> dict:
        found = chat_fields(dict(messages=GREETING, tools=[ADD]) | asked, served, [])
        return {name: x for name, x in found.items() if name not in ("messages", "tools")}

    assert fields() == dict(tool_choice="auto") and fields(tools=[]) == fields(tools=[SEARCH]) == {}
    several = dict(type="any", disable_parallel_tool_use=False)
    assert fields(tool_choice=several) == dict(tool_choice="required")
    one = several | dict(disable_parallel_tool_use=True)
    assert fields(tool_choice=one) == dict(tool_choice="required", parallel_tool_calls=False)
    assert fields(tool_choice=dict(type="none")) == dict(tool_choice="none")


def test_structured_output(server):
    form = dict(type="json_schema", schema=dict(const="a b"))
    (block,) = answered(server, output_config=dict(format=form, effort="high"))["content"]
    assert block["text"] == '"a b"'


def test_thinking(thinker):
    """A block of its own, with a signature; off if the request says so."""
    asked = dict(max_tokens=16)
    (block,) = answered(thinker, **asked, thinking=dict(type="enabled", budget_tokens=1024))["content"]
    assert block["type"] == "thinking" and len(block["thinking"]) > 5 and block["signature"]
    events = streamed(thinker, **asked, thinking=dict(type="adaptive"))
    assert kinds(events) == [
        "message_start", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert texts(events, "thinking") == block["thinking"] and texts(events, "signature")
    details = events[-2]["usage"]["output_tokens_details"]
    assert details["thinking_tokens"] == events[-2]["usage"]["output_tokens"] > 5
    plain = answered(thinker, **asked, thinking=dict(type="disabled"))
    assert [x["type"] for x in plain["content"]] == ["text"]
    form = dict(type="json_schema", schema=dict(const="a"))
    assert answered(thinker, **asked, output_config=dict(format=form))["content"][0]["text"] == '"a"'


def text(value: str, **more) -> dict:
    return dict(type="text", text=value) | more


USE = dict(type="tool_use", id="c", name="f", input=dict(x=None))
RESULT = dict(type="tool_result", tool_use_id="c", content="3", is_error=False)
CALLS = [dict(id="c", type="function", function=dict(name="f", arguments=dict(x=None)))]
TOLD = dict(role="tool", tool_call_id="c", content="3")


def said(role: str, content, **more) -> dict:
    return dict(role=role, content=content) | more


INPUTS = {  # {what it has: (system, messages, the messages of the chat)}
    "a text": ("", [said("user", "a")], [said("user", "a")]),
    "a system text": ("s", [said("user", "a")], [said("system", "s"), said("user", "a")]),
    "blocks": (
        [text("s", cache_control=dict(type="ephemeral")), text("t")],
        [said("user", [text("a"), text("b", citations=None)])],
        [said("system", "s\n\nt"), said("user", "a\n\nb")],
    ),
    "system messages": (
        "s", [said("system", "t"), said("user", "a"), said("system", [text("u")]), said("user", "b")],
        [said("system", "s\n\nt"), said("user", "a\n\nu\n\nb")],
    ),
    "thinking, text, a call": (
        None,
        [said("user", "a"), said("assistant", [
            dict(type="thinking", thinking="hm", signature="x"), dict(type="redacted_thinking", data="x"),
            text("b"), USE,
        ]), said("user", [RESULT, text("c"), text("d")])],
        [said("user", "a"), said("assistant", "b", reasoning_content="hm", tool_calls=CALLS), TOLD,
         said("user", "c\n\nd")],
    ),
    "two results": (
        "", [said("user", "a"), said("assistant", [USE, USE | dict(id="d")]),
             said("user", [RESULT, RESULT | dict(tool_use_id="d", content=[text("4"), text("5")])])],
        [said("user", "a"), said("assistant", "", tool_calls=[CALLS[0], CALLS[0] | dict(id="d")]), TOLD,
         dict(role="tool", tool_call_id="d", content="4\n\n5")],
    ),
    "a result that is an error": (
        "", [said("user", "a"), said("assistant", [USE]), said("user", [RESULT | dict(is_error=True)])],
        [said("user", "a"), said("assistant", "", tool_calls=CALLS), dict(TOLD, content="Error: 3")],
    ),
    "a result without a content": (
        "", [said("user", "a"), said("assistant", [USE]),
             said("user", [dict(type="tool_result", tool_use_id="c")])],
        [said("user", "a"), said("assistant", "", tool_calls=CALLS), dict(TOLD, content="")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_input(server, name):
    system, messages, expected = INPUTS[name]
    fields = chat_fields(dict(messages=messages, system=system), server.app.state.served, [])
    assert fields == dict(messages=expected)


def test_what_claude_code_sends(server):
    """The fields and blocks of Claude Code 2.1.197, with short texts; what the server ignores is named."""
    ephemeral = dict(cache_control=dict(type="ephemeral"))
    body = dict(
        model="tiny-llama3", max_tokens=3, stream=False, thinking=dict(type="adaptive"),
        metadata=dict(user_id="u"), output_config=dict(effort="high"),
        context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")]),
        system=[text("x-anthropic-billing-header: a"), text("You are an agent.", **ephemeral)],
        messages=[
            said("user", [text("<system-reminder>"), text("say hi", **ephemeral)]),
            said("system", "Available agents: none."),
        ],
        tools=[ADD | dict(defer_loading=True), SEARCH],
    )  # fmt: skip
    status, reply, headers = post_whole(server, f"{PATH}?beta=true", body)
    assert status == 200 and reply["stop_reason"] in ("max_tokens", "end_turn"), reply
    assert headers["x-ignored-fields"] == "context_management, tools.web_search_20250305, tools.defer_loading"
    status, counted, headers = post_whole(server, f"{PATH}/count_tokens?beta=true", body)
    usage = reply["usage"]
    assert (
        status == 200 and counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    )
    assert headers["x-ignored-fields"].startswith("context_management")
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/", method="HEAD")) as response:
        assert response.status == 200 and not response.read()


USER = said("user", "a")
IMAGE = dict(type="image", source=dict(type="url", url="x"))
REFUSED = [
    (dict(model="other"), "'other' is not served here"),
    (dict(messages=[]), "'messages' must be a list"),
    (dict(messages=[said("nobody", "a")]), "'messages[0]': it must be an object"),
    (dict(messages=[said("user", 3)]), "'messages[0]': its content must be"),
    (dict(messages=[said("user", [IMAGE])]), "'messages[0]': content of type 'image'"),
    (dict(messages=[USER, said("assistant", [RESULT])]), "'messages[1]': content of type 'tool_result'"),
    (dict(messages=[said("user", [text(3)])]), "'messages[0]': the 'text' of a block"),
    (dict(messages=[said("user", [RESULT | dict(content=[IMAGE])])]), "content of type 'image'"),
    (dict(messages=[said("assistant", [USE | dict(input=3)])]), "the 'input' of a tool_use"),
    (dict(system=3), "'system': its content must be a text"),
    (dict(max_tokens=0), "'max_tokens' must be a whole number"),
    (dict(temperature=-1), "'temperature' -1 is not"),
    (dict(stop_sequences=3), "'stop_sequences' must be a text"),
    (dict(thinking="yes"), "'thinking' must be an object"),
    (dict(output_config=dict(format=3)), "'output_config.format': it must be"),
    (dict(output_config=dict(effort=3)), "'output_config.effort' must be a text"),
    (dict(tools=3), "'tools' must be a list of objects"),
    (dict(tools=[dict(name="a b", input_schema={})]), "must have a 'name'"),
    (dict(tools=[ADD], tool_choice="auto"), "'tool_choice' must be an object"),
    (dict(tools=[ADD], tool_choice=dict(type="tool", name="f")), "'f', which is not"),
    (dict(tools=[SEARCH], tool_choice=dict(type="any")), "'tools' is empty"),
    (dict(messages=[said("user", "a " * 600)]), "prompt is too long: "),
]  # fmt: skip
NOT_COUNTED = {"max_tokens", "temperature", "stop_sequences", "output_config"}


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[x[1] for x in REFUSED])
def test_refused(server, fields, message):
    """One line, in the form and the terms of this API; a count refuses what is wrong with the prompt."""
    expected = (404, "not_found_error") if "model" in fields else (400, "invalid_request_error")
    for path in (PATH, f"{PATH}/count_tokens"):
        status, reply, headers = post_whole(server, path, ASKED | fields)
        if path != PATH and (NOT_COUNTED & fields.keys() or "too long" in message):
            continue
        assert (status, reply["error"]["type"]) == expected, reply
        assert message in reply["error"]["message"] and "\n" not in reply["error"]["message"]
        assert reply == dict(type="error", error=reply["error"], request_id=headers["x-request-id"])


def test_other_errors(server, claude, monkeypatch):
    for path, status, kind in (
        (f"{PATH}/other", 404, "not_found_error"),
        (PATH, 415, "invalid_request_error"),
    ):
        found, text = post_text(server, path, ASKED, content_type="text/plain")
        assert found == status and json.loads(text)["error"]["type"] == kind
    monkeypatch.setattr(server.loop, "open_jobs", 10_000)
    with pytest.raises(anthropic.RateLimitError) as e:
        claude.messages.create(**ASKED)
    assert e.value.body["error"]["type"] == "rate_limit_error" and "retry-after" in e.value.response.headers
    monkeypatch.undo()
    monkeypatch.setattr(server.loop, "seconds", 0)
    monkeypatch.setattr(server.loop, "pace", 1)
    long = dict(max_tokens=400, messages=[said("user", "a")])
    last = streamed(server, **long)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
    assert "longer" in last["error"]["message"]
    assert post(server, PATH, ASKED | long)[0] == 504
    until(lambda: idle(server))


def test_a_client_that_leaves(server, claude):
    with claude.messages.stream(**ASKED | dict(max_tokens=400)) as stream:
        next(iter(stream))
    until(lambda: idle(server))


VALUES = [
    *(
        None,
        True,
        -1,
        3,
        1.5,
        "",
        "a",
        "\ud800",
        [],
        [[]],
        [1],
        ["a"],
        {},
        {"a": 1},
        [{}],
        [{"type": []}],
        USE,
    ),
    *([USE], [RESULT], [said("user", [{"type": "text"}])], [said("assistant", [])], {"type": "tool"}),
]


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens", "/v1/responses"])
def test_malformed(server, path):
    """Values of wrong types anywhere: an answer, or a 4xx with one message."""
    rng, fine = random.Random(0), 0
    names = [*sorted(CONVERTED), "input", "include", "text", "reasoning", "instructions", "stop", "metadata"]
    for _ in range(150):
        body = (ASKED | dict(input="a")) | {name: rng.choice(VALUES) for name in rng.sample(names, 2)}
        if rng.random() < 0.5:
            body["messages"] = body["input"] = [
                *GREETING,
                rng.choice([*VALUES, said("user", rng.choice(VALUES))]),
            ]
        status, reply = post(server, path, body | dict(max_tokens=1, max_output_tokens=1))
        fine += status == 200
        assert status == 200 or 400 <= status < 500 and "\n" not in reply["error"]["message"], body
    assert 5 < fine < 145
