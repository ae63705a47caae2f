"""The fields of requests: honored, refused by their names, or ignored and named in a header."""

import dataclasses
import json
import queue
import re
import urllib.error
import urllib.request
from functools import partial
from types import SimpleNamespace

import openai
import pytest
from test_server import GREETING, MAX_LEN, complete, post, server_with, shallow, started

from server.api_requests import RequestFields
from server.known_fields import NO_EFFECT, UNSUPPORTED
from sharding.sampling import Sampling

ASK = dict(messages=GREETING, temperature=0, max_tokens=16)
TEXT = dict(prompt="What is 3 + 4?", temperature=0, max_tokens=8)
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


server = server_with("--rows", "2")


def chat(server, **fields) -> dict:
    """The choice of a response."""
    status, reply = post(server, CHAT_PATH, ASK | fields)
    assert status == 200, reply
    return reply["choices"][0] | dict(usage=reply["usage"])


def text_of(choice: dict) -> str:
    return choice["message"]["content"]


OF_TEXT = {"add_special_tokens", "echo"}  # for which chats have other values
VALUES = [None, 0, "", "x", [], {"a": None}]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_fields_that_change_nothing(server, path):
    """The same greedy answer with all of them, none of which is named."""
    body = ASK if path == CHAT_PATH else TEXT
    known = {name: values for name, values in UNSUPPORTED.items() if values and name not in OF_TEXT}
    plain = post(server, path, body)[1]["choices"]
    for i, value in enumerate(VALUES):
        fields = {name: values[i % len(values)] for name, values in known.items()}
        status, reply, headers = post_whole(server, path, body | fields | dict.fromkeys(NO_EFFECT, value))
        assert status == 200 and reply["choices"] == plain, reply
        assert "x-ignored-fields" not in headers


UNKNOWN = {  # what clients send that the server does not know: {the name in the header: fields of a request}
    "cache_prompt": dict(cache_prompt=True),
    "cache_salt": dict(cache_salt="s"),
    "session_id": dict(session_id="s"),
    "reasoning": dict(reasoning=dict(enabled=True)),
    "thinking": dict(thinking=dict(type="disabled")),
    "enable_thinking": dict(enable_thinking=False),
    "provider": dict(provider=dict(order=["a"])),
    "usage": dict(usage=dict(include=True)),
    "timings_per_token": dict(timings_per_token=True),
    "verbosity": dict(verbosity="low"),
    "chat_template_kwargs.enable_thinking": dict(chat_template_kwargs=dict(enable_thinking=False)),
    "stream_options.other": dict(stream_options=dict(other=3)),
    "messages.prefix": dict(messages=[GREETING[0] | dict(prefix=True)]),
    "caf?_?": {"caf\u00e9_\n": 1},
    "?": {"\ud800": 1},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields_are_ignored_and_named(server, name):
    """The greedy answer is the same, whole and streamed, and the header names the field."""
    plain, fields = chat(server)["message"], ASK | UNKNOWN[name]
    status, reply, headers = post_whole(server, CHAT_PATH, fields)
    assert status == 200 and reply["choices"][0]["message"] == plain, reply
    assert headers["x-ignored-fields"] == name
    request = begin(server, CHAT_PATH, fields | dict(stream=True))
    with urllib.request.urlopen(request) as response:
        assert response.headers["x-ignored-fields"] == name and b"[DONE]" in response.read()


def begin(server, path: str, body: dict) -> urllib.request.Request:
    head = {"content-type": "application/json"}
    return urllib.request.Request(server.url + path, json.dumps(body).encode(), head)


def post_whole(server, path: str, body: dict) -> tuple[int, dict, dict]:
    """-> (status, the reply's object, its headers)."""
    try:
        with urllib.request.urlopen(begin(server, path, body)) as response:
            return response.status, json.load(response), response.headers
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.load(e), e.headers


def test_unknown_fields_of_other_paths(server):
    for path, body in (("/tokenize", dict(prompt="a")), ("/detokenize", dict(tokens=[7])), (TEXT_PATH, TEXT)):
        status, _, headers = post_whole(server, path, body | dict(unheard_of=1, b=2))
        assert status == 200 and headers["x-ignored-fields"] == "b, unheard_of"
        assert "x-ignored-fields" not in post_whole(server, path, body)[2]


def test_unknown_fields_are_logged_once(server, monkeypatch):
    found: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(server.writer, "write", lambda line: found.put(line.decode()))
    for fields in (dict(first=1), dict(first=2, second=3), dict(second=3)):
        chat(server, **fields, metadata={"line": "mine"})
    lines = [found.get(timeout=20).split() for _ in range(3)]
    ignored = [[x for x in line if x.startswith("ignored=")] for line in lines]
    assert ignored == [["ignored=first"], ["ignored=second"], []]
    long = {f"{'x' * 300}{i}": 1 for i in range(50)}
    header = post_whole(server, CHAT_PATH, ASK | long)[2]["x-ignored-fields"]
    assert len(header) == 1000 and header.startswith("x" * 200 + ", ")


def test_strict_fields(server, request):
    """Refused by its name, as the client has spelled it."""
    default = server.app.state.served
    request.addfinalizer(lambda: setattr(server.app.state, "served", default))
    server.app.state.served = dataclasses.replace(default, strict_fields=True)
    for name, fields in UNKNOWN.items():
        status, reply = post(server, CHAT_PATH, ASK | fields)
        assert status == 400 and reply["error"]["code"] == "unsupported_parameter", reply
        assert (
            "--strict-fields" in reply["error"]["message"]
            and name[:3].strip("?") in reply["error"]["message"]
        )
    assert post(server, "/tokenize", dict(prompt="a", unheard_of=1))[0] == 400
    assert chat(server, metadata={}, min_tokens=0) and complete(server, **TEXT)


def test_an_empty_stop_text_is_none(server):
    plain = text_of(chat(server))
    for stop in ("", [""], ["", "never in it"]):
        assert text_of(chat(server, stop=stop)) == plain
    assert len(text_of(chat(server, stop=["", plain[3]]))) <= 3


INERT = {  # values of supported fields that ask for what is done anyway
    "top_k": -1, "min_p": 0, "top_p": 1, "n": 1, "best_of": 1, "logit_bias": {}, "logprobs": False,
    "top_logprobs": 0, "stop": [], "stop_token_ids": [], "chat_template_kwargs": {}, "response_format": {},
    "add_generation_prompt": True, "continue_final_message": False, "reasoning_effort": "low",
    "max_completion_tokens": 16, "stream": False, "stream_options": {"include_usage": True},
    "presence_penalty": 0.0, "guided_json": None, "structured_outputs": None,
}  # fmt: skip


def test_values_of_supported_fields_that_change_nothing(server):
    plain = text_of(chat(server))
    assert text_of(chat(server, **INERT)) == plain
    for name, value in INERT.items():
        assert text_of(chat(server, **{name: value})) == plain, name


def test_top_k_of_all_tokens():
    """-1 lifts the server's own top_k and asks for no samples; any other value asks for them."""
    served = SimpleNamespace(sampling=Sampling(temperature=0.0, top_k=5), vocabulary=512)
    for top_k, expected in {-1: (0.0, None), 3: (1.0, 3)}.items():
        found = RequestFields({"top_k": top_k}).sampling(served, None)
        assert (found.temperature, found.top_k) == expected


def test_null_is_absent_at_any_depth(server):
    schema = dict(
        type="object", properties=dict(a=dict(enum=[None, 1]), b=dict(const=None)), required=["a", "b"]
    )
    form = dict(
        type="json_schema", json_schema=dict(name=None, schema=schema | dict(additionalProperties=False))
    )
    streamed = dict(
        stream=None, stream_options=dict(include_usage=None), response_format=form | dict(strict=None)
    )
    found = json.loads(text_of(chat(server, **streamed, max_tokens=40)))
    assert found["b"] is None  # within a schema it is a value
    parts = [dict(type="text", text=GREETING[0]["content"], cache_control=None)]
    message = dict(role="user", content=parts, name=None, tool_calls=None)
    assert text_of(chat(server, messages=[message])) == text_of(chat(server))


REFUSED = [
    dict(min_tokens=3), dict(include_stop_str_in_output=True), dict(skip_special_tokens=False),
    dict(suffix="x"), dict(modalities=["text", "audio"]), dict(audio=dict(voice="a")), dict(best_of=3),
    dict(add_special_tokens=True), dict(grammar="root ::= a"), dict(stop=3), dict(stop=[3]),
    dict(use_beam_search=True), dict(length_penalty=0.5), dict(functions=[dict(name="f")]),
    dict(guided_grammar="root ::= a"), dict(repeat_penalty=1.1), dict(typical_p=0.5),
    dict(reasoning_effort=3), dict(json_schema=dict(type="object")),
    dict(chat_template_kwargs=dict(messages=[])), dict(chat_template_kwargs=3), dict(documents=[{}]),
    dict(top_k=-2), dict(top_logprobs=2), dict(stream_options=dict(include_usage=1)), dict(echo=True),
    dict(continue_final_message=True), dict(continue_final_message=1), dict(add_generation_prompt="x"),
    dict(max_completion_tokens=3), dict(guided_json=3), dict(guided_json="{"), dict(guided_choice=[]),
    dict(guided_choice=["a", 3]), dict(guided_regex=["a"]), dict(structured_outputs={}),
    dict(structured_outputs=dict(regex="a", json={})), dict(structured_outputs=dict(structural_tag="a")),
    dict(guided_regex="a", response_format=dict(type="text")),
    dict(response_format=3),
    dict(response_format=dict(a=1)), dict(response_format=dict(type="json_schema")),
    dict(response_format=dict(type="json_schema", json_schema=3)), dict(response_format=dict(type="regex")),
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED, ids=range(len(REFUSED)))
def test_fields_that_are_refused(server, fields):
    """400; the message names the field, and so does `param`."""
    status, reply = post(server, CHAT_PATH, ASK | fields)
    name, message = next(iter(fields)), reply["error"]["message"]
    assert status == 400 and f"'{name}'" in message and reply["error"]["param"] == name, reply
    assert "\n" not in message


def test_unsupported_fields_with_other_values(server):
    for name, values in UNSUPPORTED.items():
        if name != "echo":
            status, reply = post(server, TEXT_PATH, TEXT | {name: "other"})
            only = f": only {values[0]!r} is" if values else ""
            assert status == 400 and f"'{name}' is not supported{only}" in reply["error"]["message"]


def test_max_tokens_beyond_the_row(server):
    """It is clipped; only a prompt that leaves no room for an answer is refused."""
    found = complete(server, prompt=[7] * (MAX_LEN - 12), max_tokens=10_000, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 12 and found["choices"][0]["finish_reason"] == "length"
    found = chat(server, max_tokens=2**31 - 1, ignore_eos=True)
    assert found["usage"]["total_tokens"] == MAX_LEN and found["finish_reason"] == "length"
    full = [7] * MAX_LEN
    assert complete(server, prompt=full[1:], max_tokens=5)["usage"]["completion_tokens"] == 1
    assert complete(server, prompt=full, max_tokens=0, echo=True)["usage"]["completion_tokens"] == 0
    status, reply = post(server, TEXT_PATH, dict(prompt=full, max_tokens=1))
    assert status == 400 and reply["error"]["code"] == "context_length_exceeded"


def test_prefill(server):
    """An answer that continues the assistant's message is that of the text itself."""
    begun = [*GREETING, dict(role="assistant", content="I am")]
    found = chat(server, messages=begun, continue_final_message=True, add_generation_prompt=False)
    rendered = server.tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    expected = complete(server, prompt=rendered, max_tokens=16, temperature=0)["choices"][0]["text"]
    assert text_of(found) == expected and found["usage"]["prompt_tokens"] == len(rendered)
    assert text_of(chat(server, messages=begun, continue_final_message=True)) == expected
    another = chat(server, messages=begun)  # by default a new message of the assistant
    assert another["usage"]["prompt_tokens"] > len(rendered)
    bare = chat(server, add_generation_prompt=False)["usage"]["prompt_tokens"]
    assert bare == len(server.tokenizer.apply_chat_template(GREETING, return_dict=False))
    for wrong in (GREETING, [*GREETING, dict(role="assistant", content="")]):
        status, reply = post(server, CHAT_PATH, ASK | dict(messages=wrong, continue_final_message=True))
        assert status == 400 and reply["error"]["param"] == "continue_final_message"
    both = dict(messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert "exclude each other" in post(server, CHAT_PATH, ASK | both)[1]["error"]["message"]


BOOLEAN = dict(
    type="object", properties=dict(a=dict(type="boolean")), required=["a"], additionalProperties=False
)
FORMATS = [
    dict(
        response_format=dict(
            type="json_schema", json_schema=dict(name="x", schema=BOOLEAN, strict=True, more=1)
        )
    ),
    dict(response_format=dict(type="json_schema", schema=BOOLEAN, name="x", strict=False)),
    dict(response_format=dict(type="json_object", schema=BOOLEAN)),
    dict(response_format=dict(type="json_object", json_schema=dict(schema=BOOLEAN))),
    dict(guided_json=BOOLEAN),
    dict(guided_json=json.dumps(BOOLEAN)),
    dict(structured_outputs=dict(json=BOOLEAN)),
]


@pytest.mark.parametrize("fields", FORMATS, ids=range(len(FORMATS)))
def test_spellings_of_a_schema(server, fields):
    found = json.loads(text_of(chat(server, **fields, temperature=1, seed=0)))
    assert list(found) == ["a"] and isinstance(found["a"], bool)


def test_other_formats(server):
    asked = dict(temperature=2, seed=1)
    choices = ['a "b"', "ü\n", "."]
    for form in (dict(guided_choice=choices), dict(structured_outputs=dict(choice=choices))):
        assert text_of(chat(server, **form, **asked)) in choices
    expressions = ("regex", "[ab]{3}", "[ab]{3}"), ("grammar", 'start: "ab" | "ba"', "ab|ba")
    for kind, expression, expected in expressions:
        form = {kind: expression}
        for fields in (dict(structured_outputs=form), dict(response_format=dict(type=kind) | form)):
            assert re.fullmatch(expected, text_of(chat(server, **fields, **asked)))
    assert re.fullmatch("[ab]{3}", text_of(chat(server, guided_regex="[ab]{3}", **asked)))
    for fields in (dict(guided_json_object=True), dict(response_format=dict(type="json_object"))):
        assert text_of(chat(server, **fields, **asked, max_tokens=200)).startswith("{")
    plain = text_of(chat(server))
    assert text_of(chat(server, guided_json_object=False)) == plain
    assert text_of(chat(server, response_format=dict(type="text"))) == plain


def test_messages_of_the_client_come_back(client):
    """`message.model_dump()` of an answer, which has many fields, is its role and content."""
    create = partial(client.chat.completions.create, model="tiny-llama3", temperature=0)
    message = create(messages=GREETING).choices[0].message
    plain = dict(role="assistant", content=message.content)
    answers = [create(messages=[*GREETING, turn, *GREETING]) for turn in (message.model_dump(), plain)]
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens


# --------------------------------------------------------------------------------- templates with reasoning

THINKING = """\
{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content.split("</think>")[-1] }}<|eot_id|>{% endfor %}{% if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% if tools %}{{ tools }}{% endif -%}
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A server whose template begins an answer with reasoning, which `enable_thinking` can leave out."""
    folder = tmp_path_factory.mktemp("template")
    file = folder / "thinking.jinja"
    file.write_text(THINKING)
    found = started("--checkpoint", str(shallow(folder)), "--chat-template", str(file), "--rows", "2")
    yield found
    found.end()


def test_reasoning(thinker):
    """It is no content; whole and streamed, with its tokens counted; options of the template end it."""
    found = chat(thinker)
    assert text_of(found) == "" and len(found["message"]["reasoning_content"]) > 5
    details = found["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == found["usage"]["completion_tokens"] > 5
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        options = dict(stream=True, stream_options=dict(include_usage=True))
        *parts, last = client.chat.completions.create(model="tiny-llama3", **ASK, **options)
        deltas = [x.choices[0].delta for x in parts]
        reasoning = "".join(getattr(x, "reasoning_content", None) or "" for x in deltas)
        assert reasoning == found["message"]["reasoning_content"]
        assert not any(x.content for x in deltas)
        assert last.usage.completion_tokens_details.reasoning_tokens == details["reasoning_tokens"]
    expected = rendered(thinker, enable_thinking=False)
    for fields in (dict(chat_template_kwargs=dict(enable_thinking=False)), dict(reasoning_effort="none")):
        found = chat(thinker, **fields)
        assert text_of(found) and "reasoning_content" not in found["message"]
        assert found["usage"]["prompt_tokens"] == len(expected)
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    status, _, headers = post_whole(thinker, CHAT_PATH, ASK | dict(reasoning_effort="high"))
    assert status == 200 and headers["x-ignored-fields"] == "reasoning_effort"


@pytest.mark.parametrize("path", [CHAT_PATH, "/tokenize"])
def test_tools_are_no_option_of_the_template(thinker, path):
    """They have a field of their own, which is checked, also where the template has the variable."""
    asked = dict(messages=GREETING, chat_template_kwargs=dict(tools=[dict(name="f")]))
    status, reply = post(thinker, path, asked)
    assert status == 400 and reply["error"]["param"] == "chat_template_kwargs"
    assert "'tools' is no variable" in reply["error"]["message"]


def rendered(server, **options) -> list[int]:
    template = server.tokenizer.apply_chat_template
    return template(GREETING, add_generation_prompt=True, return_dict=False, **options)


def test_grammars_leave_no_room_for_reasoning(thinker):
    """The answer follows an empty block of reasoning."""
    form = dict(response_format=dict(type="regex", regex="[a-c]{8}"))
    found = chat(thinker, **form)
    prompt = rendered(thinker, enable_thinking=False)
    expected = complete(thinker, prompt=prompt, temperature=0, max_tokens=16, **form)["choices"][0]["text"]
    assert text_of(found) == expected and "reasoning_content" not in found["message"]
    forced = chat(thinker, **form, chat_template_kwargs=dict(enable_thinking=True))
    assert re.fullmatch("[a-c]{8}", text_of(forced))
    assert forced["usage"]["prompt_tokens"] > len(rendered(thinker))
