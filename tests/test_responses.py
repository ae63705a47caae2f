"""OpenAI's Responses API: the client's own parser reads it, and it answers as the chat API does."""

import json
import typing

import openai
import openai.types.responses
import pydantic
import pytest
from processes import until
from test_server import GREETING, idle, post, post_text, server_with

from server.responses_input import chat_fields, offered_tools

QUESTION = GREETING[0]["content"]
ASKED = dict(model="tiny-llama3", input=QUESTION, temperature=0)
EVENT = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)


server = server_with("--max-len", "512", "--rows", "2")


def without_ids(output: list) -> list[dict]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in output]


def checked_events(client, **asked) -> list:
    """The events of a stream, numbered from 0, each of which OpenAI's own types accept as it was sent."""
    events = list(client.responses.create(**ASKED | asked, stream=True))
    for i, event in enumerate(events):
        assert event.sequence_number == i
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    return events


def test_text(server, client):
    """The same text and usage as by the chat API, with which its requests share the prefixes."""
    chat = client.chat.completions.create(model="tiny-llama3", messages=GREETING, temperature=0)
    found = client.responses.create(**ASKED)
    assert found.output_text == chat.choices[0].message.content and len(found.output_text) > 10
    assert found.status == "completed" and found.error is None and found.incomplete_details is None
    (message,) = found.output
    assert message.type == "message" and message.status == "completed" and message.role == "assistant"
    usage, theirs = found.usage, chat.usage
    assert (usage.input_tokens, usage.output_tokens) == (theirs.prompt_tokens, theirs.completion_tokens)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    openai.types.responses.Response.model_validate(found.model_dump(by_alias=True))
    assert found.model == "tiny-llama3" and found.temperature == 0 and found.store is False
    again = client.responses.create(**ASKED)
    assert {found.id, message.id}.isdisjoint({again.id, again.output[0].id})
    long = [client.responses.create(**ASKED | dict(input=f"{QUESTION} now, {QUESTION}")).usage for _ in "12"]
    assert long[1].input_tokens_details.cached_tokens == long[1].input_tokens - 1 > 20


def test_stream(server, client):
    """The events that the client's accumulator expects, in order; together they are the whole response."""
    whole = client.responses.create(**ASKED)
    events = checked_events(client)
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 5 and kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * deltas, "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    first, last = events[0].response, events[-1].response
    assert first.status == "in_progress" and not first.output and first.usage is None
    assert "".join(x.delta for x in events if x.type == "response.output_text.delta") == whole.output_text
    assert without_ids(last.output) == without_ids(whole.output) and last.id == first.id
    assert last.usage == whole.usage
    with client.responses.stream(**ASKED) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_cut_by_the_limit(client):
    """Also without any text: the first token ends an answer that is a stop text."""
    found = client.responses.create(**ASKED, max_output_tokens=3)
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete" and found.usage.output_tokens == 3
    assert found.max_output_tokens == 3
    events = checked_events(client, max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    assert without_ids(events[-1].response.output) == without_ids(found.output)
    stop = client.responses.create(**ASKED).output_text[:2]
    empty = client.responses.create(**ASKED, extra_body=dict(stop=stop))
    assert empty.status == "completed" and empty.output_text == "" and len(empty.output) == 1


class Sum(pydantic.BaseModel):
    a: typing.Literal[1, 2, 3]
    kind: typing.Literal["sum", "difference"]


def test_structured_output(client):
    """text.format: a schema, in the client's two ways; a JSON object."""
    found = client.responses.parse(**ASKED, text_format=Sum)
    assert isinstance(found.output_parsed, Sum)
    with client.responses.stream(**ASKED, text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed
    schema = dict(type="json_schema", name="x", schema=dict(const="a b"), strict=True, description=None)
    assert client.responses.create(**ASKED, text=dict(format=schema)).output_text == '"a b"'
    sent = found.text.format.schema_
    assert sent == pydantic.TypeAdapter(Sum).json_schema() | dict(additionalProperties=False)


TOOL = dict(type="function", name="add", description="Add two digits.", strict=True, parameters=dict(
    type="object", properties=dict(a=dict(enum=[1, 2, 3]), b=dict(enum=[4, 5])), required=["a", "b"],
    additionalProperties=False,
))  # fmt: skip


@pytest.mark.parametrize("choice", ["required", dict(type="function", name="add")], ids=["required", "named"])
def test_function_call(client, choice):
    """Whole and streamed; the call and its result go back as they are, as in the chat API."""
    asked = dict(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    whole = client.responses.create(**ASKED, **asked)
    (call,) = whole.output
    assert (call.type, call.name, call.status, whole.status) == ("function_call", "add", *["completed"] * 2)
    arguments = json.loads(call.arguments)
    assert arguments["a"] in (1, 2, 3) and arguments["b"] in (4, 5) and len(arguments) == 2
    events = checked_events(client, **asked)
    kinds = [event.type for event in events]
    deltas = kinds.count("response.function_call_arguments.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        *["response.function_call_arguments.delta"] * deltas, "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    streamed = [x.delta for x in events if x.type == "response.function_call_arguments.delta"]
    assert "".join(streamed) == call.arguments == events[-3].arguments and deltas > 1
    assert without_ids(events[-1].response.output) == without_ids(whole.output)
    with client.responses.stream(**ASKED, **asked) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments
    items = [dict(role="user", content=QUESTION), call.model_dump(exclude_unset=True)]
    items.append(dict(type="function_call_output", call_id=call.call_id, output="7"))
    answer = client.responses.create(**ASKED | dict(input=items, max_output_tokens=5), tools=[TOOL])
    function = dict(name="add", arguments=call.arguments)
    calls = [dict(id=call.call_id, type="function", function=function)]
    turns = [*GREETING, dict(role="assistant", tool_calls=calls)]
    turns.append(dict(role="tool", tool_call_id=call.call_id, content="7"))
    nested = dict(type="function", function={name: x for name, x in TOOL.items() if name != "type"})
    chat = client.chat.completions.create(
        model="", messages=turns, tools=[nested], temperature=0, max_tokens=5
    )
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    cut = client.responses.create(**ASKED, **asked, max_output_tokens=4)
    assert cut.status == "incomplete" and all(item.status == "incomplete" for item in cut.output)


ADD = dict(type="function", name="add", parameters=dict(type="object", properties=dict(a=dict(enum=[1, 2]))))
CALC = dict(type="namespace", name="calc", description="Sums.", tools=[ADD, dict(type="custom", name="c")])


def test_namespaces(server, client):
    """The model knows a function of a namespace by both names; calls have them apart, in requests too."""
    ask = dict(tools=[ADD, CALC], tool_choice=dict(type="function", name="add", namespace="calc"))
    whole = client.responses.create(**ASKED, **ask)
    (call,) = whole.output
    assert (call.name, call.namespace) == ("add", "calc") and json.loads(call.arguments).keys() <= {"a"}
    events = checked_events(client, **ask)
    assert without_ids(events[-1].response.output) == without_ids(whole.output)
    assert events[2].item.namespace == "calc" and events[-3].name == "add"
    plain = client.responses.create(**ASKED, tools=[CALC, ADD], tool_choice=dict(type="function", name="add"))
    assert plain.output[0].namespace is None
    result = dict(type="function_call_output", call_id=call.call_id, output="7")
    items = [dict(role="user", content=QUESTION), call.model_dump(exclude_unset=True), result]
    found = fields_of(input=items, tools=[CALC, ADD])
    assert found["messages"][1]["tool_calls"][0]["function"]["name"] == "calc__add"
    assert [x["function"]["name"] for x in found["tools"]] == ["calc__add", "add"]
    mcp = dict(type="namespace", name="mcp__calc__", description="", tools=[ADD])
    assert fields_of(input="a", tools=[mcp])["tools"][0]["function"]["name"] == "mcp__calc__add"
    allowed = dict(type="allowed_tools", mode="required", tools=[CALC | dict(tools=[ADD])])
    (call,) = client.responses.create(
        **ASKED | ask | dict(tool_choice=allowed), parallel_tool_calls=False
    ).output
    assert call.namespace == "calc"


def test_tools_that_the_server_cannot_run(client):
    """They are left out of the response's tools, and named in the header."""
    others = [dict(type="web_search", external_web_access=False), dict(type="local_shell")]
    reply = client.responses.with_raw_response.create(**ASKED, tools=[*others, CALC], max_output_tokens=2)
    assert reply.headers["x-ignored-fields"] == "tools.web_search, tools.local_shell, tools.custom"
    (namespace,) = reply.parse().tools
    assert [tool.name for tool in namespace.tools] == ["add"]
    asked = dict(tools=others, tool_choice="auto", parallel_tool_calls=True)
    assert (
        client.responses.create(**ASKED, **asked).output_text == client.responses.create(**ASKED).output_text
    )


def test_what_codex_sends(server):
    """The fields and items of Codex 0.171.0, with short texts."""
    function = dict(type="function", strict=False, description="d")
    command = dict(type="object", properties=dict(cmd=dict(type="string", maxLength=3)), required=["cmd"])
    say = dict(type="message", id="msg_1")
    items = [
        say | dict(role="developer", content=[part("You are an agent.")]),
        say | dict(role="developer", content=[part("Skills: none.")]),
        say | dict(role="user", content=[part("<environment_context>")]),
        say | dict(role="user", content=[part("say hi")]),
        dict(type="reasoning", id="rs_1", summary=[], content=None, encrypted_content=None),
        dict(
            type="function_call",
            id="fc_1",
            name="run",
            namespace="agents",
            arguments='{"cmd": "a"}',
            call_id="c",
        ),
        dict(type="function_call_output", call_id="c", output=[part("done")]),
    ]
    body = dict(
        model="", input=items, tool_choice="auto", parallel_tool_calls=True, store=False, stream=True,
        reasoning=dict(summary="auto"), include=["reasoning.encrypted_content"], prompt_cache_key="k",
        client_metadata={"x-codex-window-id": "w"}, max_output_tokens=3,
        tools=[
            function | dict(name="exec_command", parameters=command),
            dict(type="namespace", name="agents", description="d", tools=[function | dict(name="run")]),
            dict(type="web_search", external_web_access=False),
        ],
    )  # fmt: skip
    status, text = post_text(server, "/v1/responses", body)
    events = [json.loads(x.removeprefix("data: ")) for x in text.splitlines() if x.startswith("data: ")]
    assert status == 200 and events[-1]["type"] in ("response.completed", "response.incomplete"), text
    messages = fields_of(**body)["messages"]
    assert [x["role"] for x in messages] == ["developer", "user", "user", "assistant", "tool"]
    assert messages[0]["content"] == "You are an agent.\n\nSkills: none."
    assert messages[3]["tool_calls"][0]["function"]["name"] == "agents__run"


def test_log_probabilities(client):
    """As those of the chat API, whole and streamed."""
    chat = client.chat.completions.create(
        model="tiny-llama3", messages=GREETING, temperature=0, logprobs=True, top_logprobs=2
    )
    expected = chat.choices[0].logprobs.content
    asked = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = client.responses.create(**ASKED, **asked).output[0].content
    events = checked_events(client, **asked)
    streamed = [x for event in events if event.type == "response.output_text.delta" for x in event.logprobs]
    for found in (part.logprobs, streamed):
        assert len(found) >= len(expected) - 1  # the last token ends the answer, without text
        for x, y in zip(found, expected, strict=False):
            assert x.token == y.token and x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert len(x.top_logprobs) == 2
    assert len(part.logprobs) == len(streamed)
    (plain,) = client.responses.create(**ASKED).output[0].content
    assert plain.logprobs == []


def test_failure(server, client, monkeypatch):
    """A stream that fails ends with response.failed; a whole response is an HTTP error."""
    monkeypatch.setattr(server.loop, "seconds", 0.05)
    asked = dict(input="a", max_output_tokens=100, extra_body=dict(ignore_eos=True))
    monkeypatch.setattr(server.loop, "pace", 1)
    *_, last = checked_events(client, **asked)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and "longer" in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="longer"):
        client.responses.create(**ASKED | asked)
    until(lambda: idle(server))


def test_what_clients_send(client):
    """Fields that change nothing here are accepted."""
    first = client.responses.create(
        **ASKED, instructions="", store=True, metadata={"a": "b"}, truncation="disabled", user="u",
        include=["reasoning.encrypted_content"], parallel_tool_calls=True, tool_choice="auto", tools=[],
        reasoning=dict(summary="auto"), service_tier="auto", prompt_cache_key="k", safety_identifier="s",
        stream=False, background=False, max_tool_calls=None, text=dict(format=dict(type="text")),
    )  # fmt: skip
    assert first.store is False and first.metadata == {"a": "b"} and first.output_text


def call(number: int, name: str = "f") -> dict:
    return dict(id=f"c{number}", type="function", function=dict(name=name, arguments="{}"))


def call_item(number: int, name: str = "f") -> dict:
    return dict(
        type="function_call", call_id=f"c{number}", name=name, arguments="{}", id="fc", status="completed"
    )


def part(text: str, kind: str = "input_text") -> dict:
    return dict(type=kind, text=text)


def assistant(**fields) -> dict:
    return dict(role="assistant", **fields)


USER, RESULT = dict(role="user", content="a"), dict(type="function_call_output", call_id="c1", output="3")
TOLD = dict(role="tool", tool_call_id="c1", content="3")
THOUGHT = dict(type="reasoning", id="rs", summary=[], encrypted_content=None,
               content=[part("hm", "reasoning_text")])  # fmt: skip
SAID = dict(type="message", id="msg", role="assistant", status="completed",
            content=[part("b", "output_text") | dict(annotations=[], logprobs=[])])  # fmt: skip
INPUTS = {
    "text": ("a", [USER]),
    "parts": ([dict(role="user", content=[part("a"), part("b")])], [dict(role="user", content="ab")]),
    "one-message": (
        [USER, THOUGHT, SAID, call_item(1), call_item(2), RESULT],
        [USER, assistant(reasoning_content="hm", content="b", tool_calls=[call(1), call(2)]), TOLD],
    ),
    "call": (
        [USER, call_item(1), RESULT, SAID],
        [USER, assistant(tool_calls=[call(1)]), TOLD, assistant(content="b")],
    ),
    "several-messages": (
        [USER, SAID, SAID, THOUGHT, call_item(1)],
        [USER, assistant(content="b"), assistant(content="b"),
         assistant(reasoning_content="hm", tool_calls=[call(1)])],
    ),
    "parts-of-output": (
        [USER, call_item(1), RESULT | dict(output=[part("3")])],
        [USER, assistant(tool_calls=[call(1)]), TOLD],
    ),
}  # fmt: skip


def fields_of(**asked) -> dict:
    """Of the chat that asks for the same."""
    return chat_fields(asked | dict(tools=offered_tools(asked.get("tools", []), [])), [])


@pytest.mark.parametrize("name", INPUTS)
def test_input(name):
    """Items that follow one another in an answer are one message of the assistant."""
    value, expected = INPUTS[name]
    assert fields_of(input=value)["messages"] == expected
    before = [dict(role="developer", content="d"), USER]
    told = fields_of(input=before, instructions="i")["messages"]
    assert told == [dict(role="system", content="i\n\nd"), USER]


def test_tools_are_nested():
    tool = dict(type="function", name="f", description=None, parameters={"type": "object"}, strict=True)
    inner = dict(name="f", parameters={"type": "object"}, strict=True)
    found = fields_of(input="a", tools=[tool], tool_choice=dict(type="function", name="f"))
    assert found["tools"] == [dict(type="function", function=inner)]
    assert found["tool_choice"] == dict(type="function", function=dict(name="f"))
    assert fields_of(input="a", tools=[tool])["tool_choice"] == "auto"
    assert not {"tools", "tool_choice"} & fields_of(input="a", tools=[]).keys()
    assert fields_of(input="a", reasoning=dict(effort="low"))["reasoning_effort"] == "low"
    named = dict(type="function", name="f")
    found = fields_of(
        input="a", tools=[tool], tool_choice=dict(type="allowed_tools", mode="auto", tools=[named])
    )
    allowed = dict(mode="auto", tools=[dict(type="function", function=dict(name="f"))])
    assert found["tool_choice"] == dict(type="allowed_tools", allowed_tools=allowed)


def test_unknown_fields(client):
    """They are ignored, and named as the client has spelled them."""
    reply = client.responses.with_raw_response.create(
        input=[dict(USER, other=1)], model="", max_output_tokens=2, include=["x"], text=dict(verbosity="low"),
        reasoning=dict(context="all", effort="low"),
        tools=[dict(type="function", name="f", parameters={}, defer_loading=True)],
        extra_body=dict(unknown=1, n=2, chat_template_kwargs=dict(enable_thinking=True)),
    )  # fmt: skip
    assert set(reply.headers["x-ignored-fields"].split(", ")) == {
        "unknown", "n", "include.x", "text.verbosity", "reasoning.context", "tools.defer_loading",
        "input.other", "chat_template_kwargs.enable_thinking",
    }  # fmt: skip


IMAGE = dict(role="user", content=[dict(type="input_image", image_url="x")])
REFUSED = [
    (dict(previous_response_id="r"), "'previous_response_id' is not supported: the server stores nothing"),
    (dict(conversation="c"), "'conversation' is not supported"),
    (dict(background=True), "'background' is not supported"),
    (dict(tools=[dict(type="namespace", name="n", tools=3)]), "'tools' must be a list of objects"),
    (dict(tools=[dict(type="function", name=3)]), "its function must have a 'name'"),
    (dict(tools=[dict(type="web_search")], tool_choice="required"), "'tools' is empty"),
    (dict(tools={}), "'tools' must be"),
    (dict(tool_choice=dict(type="web_search")), "'tool_choice' must be"),
    (dict(include="x"), "'include' must be"),
    (dict(text=dict(format=dict(type="xml"))), "'text.format': its type must be"),
    (dict(text=3), "'text' must be an object"),
    (dict(reasoning=3), "'reasoning' must be an object"),
    (dict(max_output_tokens=0), "'max_output_tokens' must be"),
    (dict(temperature=-1), "'temperature' -1 is not"),
    (dict(instructions=3), "'instructions' must be a text"),
    (dict(input=None), "'input' must be a text"),
    (dict(input=[]), "'input' must be a text"),
    (dict(input=[3]), "'input[0]' must be an object"),
    (dict(input=[dict(type="item_reference", id="x")]), "'item_reference' is not supported: the server"),
    (dict(input=[dict(type=[])]), "'input[0]': the type [] is not supported"),
    (dict(input=[USER, IMAGE]), "input[1]: content of type 'input_image'"),
    (dict(input=[dict(role="nobody", content="a")]), "input[0]: the role must be"),
    (dict(input=[dict(type="function_call", name="f")]), "'input[0]': call_id must be a text"),
    (dict(input=[dict(type="function_call_output", output="f")]), "'input[0]': call_id must be a text"),
    (dict(input=[dict(type="reasoning", content=[3])]), "'input[0]': content must be a list of texts"),
    (dict(model="other"), "'other' is not served here"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[x[1] for x in REFUSED])
def test_refused(server, fields, message):
    """One line, in the terms of this API."""
    status, reply = post(server, "/v1/responses", dict(input="a") | fields)
    assert status == (404 if "model" in fields else 400)
    assert message in reply["error"]["message"] and "\n" not in reply["error"]["message"]
