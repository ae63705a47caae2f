"""Calls of tools: every format, read in any pieces and held by its grammar; and the server."""

import dataclasses
import functools
import json

import jsonschema
import numpy as np
import pytest
from conftest import CHECKPOINTS
from test_server import GREETING, post, server_with
from tokenizers import AddedToken

from conversation import grammar
from conversation.grammar import grammar_tokenizer, make_grammar
from conversation.streams import answer_stream
from conversation.text import load_tokenizer
from conversation.tool_calls import AtemParameters, ParameterTags, describe_tools, write_calls
from conversation.tool_grammar import tool_grammar
from conversation.tools import Tool, ToolUse, choose_tool_format
from families import tool_formats
from families.gpt_oss import HARMONY
from families.muse_glimmer import RECIPIENTS
from server.loop import Job, command_as_json, request_from_json
from serving.requests import Request

STOP = frozenset([1, 2, 6])
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": -9, "maximum": 99},
        "units": {"enum": ["C", "F"], "type": "string"},
        "fine": {"type": "boolean"},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "fine"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"enum": [1, 2.5, False]}, "minItems": 2, "maxItems": 2}},
}  # fmt: skip
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("weather", WEATHER), Tool("weather_now", NOTHING))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
CALLS = [
    ("weather", {"city": 'A "🦙}]', "days": -3, "fine": True, "at": [1, 2.5]}),
    ("weather_now", {}),
    ("weather", {"city": "12", "units": "F", "fine": False}),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A format. tokens: marks that the vocabulary has. special: whether they are special. channels, prompt:
    of answers in messages.
    """

    format: tool_formats.ToolFormat | tool_formats.MessageToolFormat
    tokens: tuple[str, ...] = ()
    special: bool = True
    channels: object = None
    prompt: str = "Hi"

    @functools.cached_property
    def tokenizer(self):
        tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
        tokenizer.add_tokens([AddedToken(x, special=self.special, normalized=False) for x in self.tokens])
        return tokenizer

    @functools.cached_property
    def grammar_tokenizer(self):
        return grammar_tokenizer(self.tokenizer, len(self.tokenizer), STOP)

    def use(self, **options) -> ToolUse:
        return ToolUse(**dict(tools=TOOLS, format=self.format, forced=False, several=True) | options)

    def grammar(self, thinking=False, schema=None, **options):
        source = tool_grammar(self.use(**options), self.tokenizer, self.grammar_tokenizer, thinking, schema)
        return make_grammar(self.grammar_tokenizer, "lark", source)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def write(self, text: str, calls: list) -> str:
        """An answer: a text, which may be empty, and calls."""
        shape = self.format
        if isinstance(shape, tool_formats.ToolFormat):
            return text + write_calls(shape, calls)
        messages = [shape.thoughts[-1] + text] if text else []
        for name, arguments in calls:
            plain = json.dumps(arguments, ensure_ascii=False)
            body = write_calls(shape.body, [(name, arguments)]) if shape.body else plain
            messages.append(shape.calls[0].replace("NAME", name) + body)
        return shape.between.join(messages)


MESSAGES = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
DEEPSEEK = tuple(
    f"<｜tool▁{x}｜>" for x in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)  # fmt: skip
PYTHON = dataclasses.replace(tool_formats.PYTHONIC, marks=tool_formats.PYTHONIC.marks[::-1])
LLAMA_TAG = dataclasses.replace(tool_formats.LLAMA_JSON, marks=tool_formats.LLAMA_JSON.marks[::-1])
CASES = {
    "llama": Case(tool_formats.LLAMA_JSON),
    "llama-tag": Case(LLAMA_TAG, ("<|python_tag|>",)),
    "pythonic": Case(tool_formats.PYTHONIC),
    "pythonic-tag": Case(PYTHON, ("<|python_start|>", "<|python_end|>")),
    "tags": Case(tool_formats.TAGS),
    "tags-qwen": Case(tool_formats.TAGS, ("<tool_call>", "</tool_call>"), special=False),
    "functions": Case(tool_formats.FUNCTION_TAGS),
    "functions-qwen": Case(tool_formats.FUNCTION_TAGS, ("<tool_call>", "</tool_call>"), special=False),
    "mistral": Case(tool_formats.MISTRAL_LIST, ("[TOOL_CALLS]",)),
    "mistral-args": Case(tool_formats.MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    "deepseek": Case(tool_formats.DEEPSEEK, DEEPSEEK, special=False),
    "deepseek-v3.1": Case(tool_formats.DEEPSEEK_V31, DEEPSEEK),
    "harmony": Case(tool_formats.HARMONY_TOOLS, MESSAGES, channels=HARMONY, prompt="<|start|>assistant"),
    "muse": Case(
        tool_formats.MUSE_TOOLS, ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"), channels=RECIPIENTS,
        prompt="<|start|>assistant",
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def read(case: Case, ids: list[int], step: int, **options) -> tuple[str, list, object]:
    """-> (the text, the calls as (name, arguments as text), the stream) of tokens read `step` at a time."""
    stream = answer_stream(
        case.tokenizer, np.array(case.ids(case.prompt)), STOP, (), case.channels, case.use(**options)
    )
    texts, pieces = [], []
    for i in range(0, len(ids), step):
        texts.append(stream.add(ids[i : i + step]))
        pieces += stream.take_calls()
    texts.append(stream.finish())
    pieces += stream.take_calls()
    calls = []
    for piece in pieces:  # as a client joins the deltas of a stream
        if piece.id:
            assert piece.index == len(calls)
            calls.append([piece.id, piece.name, ""])
        calls[piece.index][2] += piece.arguments
    assert calls == [[x.id, x.name, x.arguments] for x in stream.tool_calls]
    assert len({x.id for x in stream.tool_calls}) == len(calls) and stream.used == len(ids)
    assert "".join(texts) == stream.text
    return stream.text, [tuple(call[1:]) for call in calls], stream


def allowed(case: Case, grammar, ids: list[int]) -> tuple[int, bool]:
    """-> (how many of the tokens the grammar allows, whether the answer may end after them)."""
    state, bits = grammar.start(), np.zeros(-(-len(case.tokenizer) // 32), np.uint32)
    for i, token in enumerate(ids):
        state.fill_bitmask(bits)
        if not bits[token // 32] >> (token % 32) & 1:
            return i, False
        if state.accept_token(token):
            return i + 1, True
    state.fill_bitmask(bits)
    return len(ids), any(bits[i // 32] >> (i % 32) & 1 for i in STOP)


@every_case
def test_calls_of_a_format(case):
    """In pieces of any size: the text, then each call; and that is what the grammars allow."""
    some, before = [CALLS[:1], CALLS[1:2], CALLS], [""]
    if case.channels:
        some = [[call] for call in CALLS]
    elif case.format.marks[0][0]:
        before = ["", "Sure, a 🦙: "]
    for text in before:
        for calls in some:
            ids = case.ids(case.write(text, calls))
            for step in (1, 2, 7, len(ids)):
                found, called, stream = read(case, ids, step)
                assert found == text.rstrip()
                assert [(name, json.loads(x)) for name, x in called] == calls
                assert all(x.complete for x in stream.tool_calls)
            assert allowed(case, case.grammar(), ids) == (len(ids), True)
            if not text:
                assert allowed(case, case.grammar(forced=True), ids) == (len(ids), True)
                once = allowed(case, case.grammar(forced=True, several=False), ids)
                assert once == (len(ids), True) if len(calls) == 1 else once[0] < len(ids)


@every_case
def test_cut_calls(case):
    """After each token: what was complete stays, and no mark is in the text."""
    calls = CALLS[:1] if case.channels else CALLS[:2]
    ids = case.ids(case.write("", calls))
    whole = [(name, json.dumps(x, ensure_ascii=False)) for name, x in calls]
    for n in range(len(ids)):
        text, called, stream = read(case, ids[:n], 3)
        done = [(x.name, x.arguments) for x in stream.tool_calls if x.complete]
        assert [(name, json.loads(x)) for name, x in done] == calls[: len(done)]
        if called and not done:  # a character that is cut is U+FFFD
            assert whole[0][1].startswith(called[0][1].removesuffix("\ufffd"))
        assert not called or not text


NOT_CALLS = {
    "llama": [
        '{"name": "Bob"}', '{"name": "weather', ' {"n', "[weather()]", 'So: {"name": "weather"}', "{", "\n\n",
    ],
    "pythonic": ["[weather", "[1, 2]", "[weathers()]", "An [weather()]", '{"name": "weather"}'],
    "tags": ["<tool_call", "a <tool_calls> b", "</tool_call>", '{"name": "weather"}', "a \n b\n"],
    "tags-qwen": ["<tool_", "a </tool_ b"],
    "functions": ["<tool_call", "<function=weather>", "</tool_call>", "a \n<function"],
    "mistral": ['[{"name": "weather", "arguments": {}}]'],
    "harmony": ["of another format"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, x) for name, texts in NOT_CALLS.items() for x in texts])
@pytest.mark.parametrize("step", [1, 2, 100])
def test_texts_that_are_no_calls(name, text, step):
    case = CASES[name]
    found, called, _ = read(case, case.ids(text), step)
    assert (found, called) == (text, [])
    if not case.channels:
        assert allowed(case, case.grammar(), case.ids(text)) == (len(case.ids(text)), True)
    assert not allowed(case, case.grammar(forced=True), case.ids(text))[1]


@every_case
@pytest.mark.parametrize("forced", [True, False])
def test_any_tokens_of_the_grammar_are_valid_calls(case, forced):
    """Tokens drawn at random from those allowed: the arguments match the schemas, however they are read."""
    rng, grammar = np.random.default_rng(0), case.grammar(forced=forced)
    start = [] if forced else begin(case)
    found = 0
    for _ in range(9):
        ids = draw(case, grammar, start, rng, 250)
        text, called, stream = read(case, ids, int(rng.integers(1, 9)))
        assert read(case, ids, len(ids))[:2] == (text, called) and (not text or case.channels)
        for call in stream.tool_calls:
            if call.complete:
                found += 1
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert found > 4


def begin(case: Case) -> list[int]:
    """The tokens after which an answer is a call for certain."""
    shape = case.format
    if case.channels:
        return case.ids(shape.calls[0].replace("NAME", "weather"))
    return case.ids(shape.marks[0][0] + shape.opening + shape.before + "weather" + shape.between)


def draw(case: Case, grammar, start: list[int], rng, most: int) -> list[int]:
    """A random answer of the grammar that begins with `start`, of at most so many tokens."""
    state, bits, ids = grammar.start(), np.zeros(-(-len(case.tokenizer) // 32), np.uint32), []
    while len(ids) < most:
        state.fill_bitmask(bits)
        some = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        longest = [i for i in some if rng.random() < 0.5] or some
        token = start[len(ids)] if len(ids) < len(start) else int(rng.choice(longest))
        assert token in some
        if token in STOP or state.accept_token(token):
            return ids if token in STOP else [*ids, token]
        ids.append(token)
    return ids


def test_two_messages_of_muse_glimmer():
    """A text for the user, then a call: both are found, and reasoning is apart."""
    case = CASES["muse"]
    answer = (
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>I look.<|eom|><|start|>assistant"
        + case.write("", CALLS[:1])
    )
    for step in (1, 50):
        text, called, stream = read(case, case.ids(answer + "<|eot|>"), step)
        assert (text, stream.reasoning) == ("I look.", "Hm.")
        assert [(name, json.loads(x)) for name, x in called] == CALLS[:1]
    assert allowed(case, case.grammar(), case.ids(" to=nobody<|message|>"))[0] < 8


@pytest.mark.parametrize("notation", [AtemParameters, ParameterTags])
def test_a_property_that_may_be_anything(notation):
    """Its schema is `true`: a value that a model writes for it is JSON where it can be."""
    tool = Tool("f", {"properties": {"any": True, "text": {"type": "string"}}})
    written = notation.write({"any": 1, "text": "1"})
    read = notation(tool).add(written + "</end>")
    assert json.loads(read) == {"any": 1, "text": "1"}


def test_functions_of_qwen3_5():
    """As its chat template shows them: a text of several lines, and True as Python writes it."""
    case, tool = CASES["functions"], Tool("f", {"properties": {"a": {"type": "string"}, "b": {}}})
    begin, end = "<tool_call>\n<function={}>\n".format, "</function>\n</tool_call>"
    text, flag = "<parameter=a>\n1\n\n2\n</parameter>\n", "<parameter=b>\nTrue\n</parameter>\n"
    written = write_calls(case.format, [("f", {"a": "1\n\n2"}), ("g", {})])
    assert written == begin("f") + text + end + "\n" + begin("g") + end
    for step in (1, 9):
        ids = case.ids("So:\n\n" + begin("f") + text + flag + end)
        text_found, called, _ = read(case, ids, step, tools=(tool,))
        assert (text_found, called) == ("So:", [("f", '{"a": "1\\n\\n2", "b": true}')])


def test_harmony_headers():
    """The recipient may precede the channel; other messages are reasoning and text."""
    case = CASES["harmony"]
    header = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for form in case.format.calls:
        ids = case.ids(header + form.replace("NAME", "weather_now") + "{}")
        text, called, stream = read(case, ids, 1)
        assert (text, called, stream.reasoning) == ("", [("weather_now", "{}")], "Hm.")
        assert stream.reasoning_tokens == len(case.ids("Hm."))
        assert allowed(case, case.grammar(forced=True), ids) == (len(ids), True)
    ids = case.ids(header + "<|channel|>final<|message|>Hello")
    assert read(case, ids, 1)[:2] == ("Hello", []) and allowed(case, case.grammar(), ids)[1]
    assert allowed(case, case.grammar(forced=True), ids)[0] < len(ids)


def test_reasoning_before_calls():
    """A prompt that ends with <think>: the reasoning ends, then come the calls; both grammars hold it."""
    for added in ((), ("<think>", "</think>")):
        tokens = (*CASES["tags-qwen"].tokens, *added)
        case = Case(tool_formats.TAGS, tokens, special=False, prompt="<think>\n")
        case.tokenizer.chat_template = "</think> <tool_call> {{ tools }}"
        assert choose_tool_format(case.tokenizer, tool_formats.LLAMA_JSON) is tool_formats.TAGS
        ids = case.ids("Hm.</think>\n\n" + write_calls(case.format, CALLS))
        for forced in (True, False):
            assert allowed(case, case.grammar(thinking=True, forced=forced), ids) == (len(ids), True)
        text, called, stream = read(case, ids, 1)
        assert (text, stream.reasoning) == ("", "Hm.") and len(called) == 3


def test_text_that_is_json():
    """Beside tools, a schema for the text: an answer is such a text or a call."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
              "additionalProperties": False}  # fmt: skip
    for case in (CASES["llama"], CASES["tags"], CASES["mistral"], CASES["harmony"]):
        grammar = case.grammar(schema=schema)
        text = '{"name": "weather"}'
        text = case.format.answer + text if case.channels else text
        calls = case.write("", CALLS[:1])
        for answer, right in ((text, True), (calls, True), (text[:-2] + '", "b": 1}', False), ("No", False)):
            ids = case.ids(answer)
            assert (allowed(case, grammar, ids) == (len(ids), True)) == right


def test_grammars_in_other_processes():
    """Other processes make the grammar anew, of what the first one sends them as JSON."""
    for case in (CASES["llama"], CASES["deepseek"], CASES["harmony"]):
        job = Job(Request(np.array([5]), 9, grammar=case.grammar(forced=True)), None)
        _, _, sent = json.loads(json.dumps(command_as_json("add", job)))
        again = request_from_json(sent, functools.partial(make_grammar, case.grammar_tokenizer)).grammar
        ids = case.ids(case.write("", CALLS[:1]))
        assert allowed(case, again, ids) == (len(ids), True) and again.source == job.request.grammar.source


def test_the_format_of_a_template():
    """What the template shows counts, else the family's; messages of their own need a template of tools."""
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    for template, family, expected in (
        ("{{ tools }}", tool_formats.PYTHONIC, tool_formats.PYTHONIC),
        ("{{ tools }}", None, tool_formats.LLAMA_JSON),
        ("{{ tools }}<tool_call>", tool_formats.LLAMA_JSON, tool_formats.TAGS),
        ("{{ tools }}<tool_call>\n<function=", tool_formats.TAGS, tool_formats.FUNCTION_TAGS),
        ("{{ tools }}[TOOL_CALLS]", None, tool_formats.MISTRAL_LIST),
        ("{{ tools }}[TOOL_CALLS][ARGS]", None, tool_formats.MISTRAL_ARGS),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", None, tool_formats.DEEPSEEK),
        ("{{ tools }}<｜tool▁calls▁begin｜>", None, tool_formats.DEEPSEEK_V31),
        ("{{ tools }}", tool_formats.HARMONY_TOOLS, tool_formats.HARMONY_TOOLS),
        ("no such thing", tool_formats.HARMONY_TOOLS, tool_formats.LLAMA_JSON),
    ):
        tokenizer.chat_template = template
        assert choose_tool_format(tokenizer, family) is expected


# ------------------------------------------------------------------------------------------- the server

FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "units"],
}


def function(name: str, **more) -> dict:
    return dict(type="function", function=dict(name=name) | more)


OFFERED = [function("forecast", description="The weather.", parameters=FORECAST), function("now")]
CHAT = dict(messages=GREETING, tools=OFFERED, max_tokens=300)


server = server_with("--max-len", "512")


def check(calls: list) -> None:
    """Valid arguments, without properties that the schema does not name."""
    schemas = dict(forecast=FORECAST | dict(additionalProperties=False), now=NOTHING)
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_forced_calls(server, client):
    """required and named: every answer is calls, of valid arguments."""
    count, bias = 8, {str(server.tokenizer.convert_tokens_to_ids("f")): 3}  # else it calls `now` only
    asked = dict(model="tiny-llama3", **CHAT, temperature=1.5, n=count, logit_bias=bias)
    for choice, names in (
        ("required", {"forecast", "now"}),
        (dict(type="function", function=dict(name="forecast")), {"forecast"}),
    ):
        found = client.chat.completions.create(**asked, tool_choice=choice, seed=5).choices
        calls = [call for x in found for call in x.message.tool_calls]
        check(calls)
        assert {call.function.name for call in calls} == names
        assert len({call.function.arguments for call in calls}) > count / 4
        assert {x.finish_reason for x in found} == {"tool_calls"}
        assert not any(x.message.content for x in found)
        assert choice == "required" or all(len(x.message.tool_calls) == 1 for x in found)


def test_streamed_calls(client):
    """The pieces of a stream, joined, are the calls of the whole answer; the log-probabilities, too."""
    asked = dict(
        model="tiny-llama3", **CHAT, temperature=1, seed=9, n=4, tool_choice="required", logprobs=True
    )
    whole = client.chat.completions.create(**asked)
    joined, reasons, logprobs = [[] for _ in whole.choices], {}, [[] for _ in whole.choices]
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        assert not choice.delta.content
        for piece in choice.delta.tool_calls or ():
            calls = joined[choice.index]
            if piece.id:
                assert piece.type == "function" and piece.index == len(calls)
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    for choice, calls, tokens in zip(whole.choices, joined, logprobs, strict=True):
        assert [[x.function.name, x.function.arguments] for x in choice.message.tool_calls] == calls
        assert choice.logprobs.content == tokens and choice.finish_reason == reasons[choice.index]
        written = b"".join(bytes(x.bytes) for x in tokens)
        assert written.startswith(b'{"name": "') and calls[0][1].encode() in written


def test_parallel_calls(server, client):
    """Several calls in an answer, unless the request excludes them."""
    bias = {str(server.tokenizer.convert_tokens_to_ids(";")): 12}
    asked = dict(
        model="tiny-llama3", **CHAT, temperature=1, seed=1, n=8, tool_choice="required", logit_bias=bias
    )
    several = client.chat.completions.create(**asked).choices
    assert max(len(x.message.tool_calls) for x in several) > 1
    for choice in several:
        check(choice.message.tool_calls)
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    alone = client.chat.completions.create(**asked, parallel_tool_calls=False).choices
    assert all(len(x.message.tool_calls) == 1 and x.finish_reason == "tool_calls" for x in alone)


def test_calls_that_the_model_chooses(client):
    """auto: a text as ever, or calls. A bias towards { makes the answers begin like a call; then they are."""
    asked = dict(model="tiny-llama3", **CHAT)
    choice = client.chat.completions.create(**asked, temperature=0).choices[0]
    assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason == "stop"
    schema = dict(
        type="object", properties={"name": {"enum": ["x"]}}, required=["name"], additionalProperties=False
    )
    form = dict(type="json_schema", json_schema=dict(name="x", schema=schema))
    found = client.chat.completions.create(**asked, temperature=1, seed=3, n=24, response_format=form).choices
    texts = [x.message.content for x in found if x.finish_reason == "stop"]
    called = [x.message for x in found if x.finish_reason == "tool_calls"]
    assert texts and called and set(texts) == {'{"name": "x"}'} and not any(x.content for x in called)
    for message in called:
        check(message.tool_calls)


def test_grammars_of_tools_are_kept(server, monkeypatch):
    """Later requests with the same tools compile nothing, whatever their messages are."""
    compiled, compile = [], grammar.compiled_matcher
    monkeypatch.setattr(grammar, "compiled_matcher", lambda *key: compiled.append(key) or compile(*key))
    tools = [function("only_here", parameters={"type": "object", "properties": {"a": {"enum": [1, 2]}}})]
    for text, choice in (("one", "auto"), ("two", "auto"), ("two", "required"), ("three", "required")):
        body = dict(messages=[dict(role="user", content=text)], tools=tools, tool_choice=choice, max_tokens=4)
        assert post(server, "/v1/chat/completions", body)[0] == 200
    assert len(compiled) == 2


def test_cut_call(server, client):
    """A call that the limit cuts: the reason is length, and only whole calls are in the answer."""
    asked = dict(model="tiny-llama3", **CHAT, temperature=0, tool_choice=function("forecast"))
    for most in (3, 40):
        choice = client.chat.completions.create(**asked | dict(max_tokens=most)).choices[0]
        assert choice.finish_reason == "length"
        assert not choice.message.tool_calls and not choice.message.content
    *_, last = client.chat.completions.create(**asked | dict(max_tokens=40), stream=True)
    assert last.choices[0].finish_reason == "length"


def test_chats_for_templates_without_tools():
    """A system message describes the tools; calls are written as the model would, results are the user's."""
    arguments = {"city": "Bern", "units": "C"}
    call = dict(type="function", id="a", function=dict(name="forecast", arguments=arguments))
    chat = [
        dict(role="system", content="Be brief."),
        dict(role="user", content="Weather?"),
        dict(role="assistant", content="I look.", tool_calls=[call, call | dict(id="b")]),
        dict(role="tool", tool_call_id="a", content="12 C"),
        dict(role="tool", tool_call_id="b", content="13 C"),
    ]
    system, user, calls, results = describe_tools(chat, OFFERED, tool_formats.LLAMA_JSON)
    assert system["content"].startswith("Be brief.\n\n") and json.dumps(FORECAST) in system["content"]
    assert user == chat[1] and all(set(x) == {"role", "content"} for x in (system, calls, results))
    written = '{"name": "forecast", "parameters": {"city": "Bern", "units": "C"}}'
    assert calls == dict(role="assistant", content=f"I look.\n{written}; {written}")
    assert results == dict(role="user", content="Result of forecast: 12 C\nResult of forecast: 13 C")
    assert [x["role"] for x in describe_tools(chat[1:2], OFFERED, tool_formats.TAGS)] == ["system", "user"]
    assert describe_tools(chat[:2], [], tool_formats.TAGS) == chat[:2]


def allowed_tools(mode: str, *names: str) -> dict:
    return dict(type="allowed_tools", allowed_tools=dict(mode=mode, tools=[function(name) for name in names]))


def test_allowed_tools(server):
    """Only these are called, whereas the prompt shows all."""
    several = [*OFFERED, function("server:now")]
    asked = dict(messages=GREETING, tools=several, max_tokens=60)
    for name in ("now", "server:now"):
        status, reply = post(
            server, "/v1/chat/completions", asked | dict(tool_choice=allowed_tools("required", name))
        )
        assert status == 200, reply
        calls = reply["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {name}
        every = post(server, "/v1/chat/completions", asked | dict(tool_choice="required"))[1]["usage"]
        assert reply["usage"]["prompt_tokens"] == every["prompt_tokens"]
    status, reply = post(
        server, "/v1/chat/completions", asked | dict(tool_choice=allowed_tools("auto", "now"))
    )
    assert status == 200, reply


def test_unknown_fields_of_functions(server):
    """The prompt does not show them."""
    counts = []
    for tool in (function("a"), function("a", code="x")):
        counts.append(post(server, "/tokenize", dict(messages=GREETING, tools=[tool]))[1]["count"])
    assert counts[0] == counts[1]


WRONG = [
    (dict(tools={}), "'tools' must be a list"),
    (dict(tools=[dict(type="code")]), "'tools[0]': it must be an object of the type 'function', not 'code'"),
    (dict(tools=[dict(type="function")]), "'tools[0]': it must have a 'function'"),
    (dict(tools=[OFFERED[0], function("a b")]), "'tools[1]': its function must have a 'name'"),
    (dict(tools=[function("a"), function("a")]), "two functions have the name 'a'"),
    (dict(tools=[function("a", parameters=[])]), "'parameters' of its function must be"),
    (dict(tools=[function("a", parameters=dict(type="string"))]), "of the type 'object'"),
    (dict(tools=[function("a", description=3)]), "'description' of its function must be a text"),
    (dict(tools=[function("a", strict="yes")]), "'strict' of its function must be true or false"),
    (
        dict(tools=[function("b"), function("a", parameters=dict(properties=dict(x=dict(type="no"))))]),
        "'tools': the parameters of 'a': ",
    ),
    (dict(tools=OFFERED, tool_choice="some"), "'tool_choice' must be none, auto, required, {"),
    (dict(tools=OFFERED, tool_choice=dict(type="function")), "'tool_choice' must be"),
    (
        dict(tools=OFFERED, tool_choice=dict(type="allowed_tools")),
        "'tool_choice' of the type allowed_tools needs",
    ),
    (
        dict(tools=OFFERED, tool_choice=allowed_tools("none", "now")),
        "'tool_choice' of the type allowed_tools needs",
    ),
    (dict(tools=OFFERED, tool_choice=allowed_tools("auto")), "'tool_choice' of the type allowed_tools needs"),
    (
        dict(tools=OFFERED, tool_choice=allowed_tools("auto", "other")),
        "the function 'other', which is not in",
    ),
    (
        dict(tools=OFFERED, tool_choice=function("other")),
        "'tool_choice' names the function 'other', which is not",
    ),
    (dict(tool_choice="required"), "'tool_choice' is 'required', but 'tools' is empty"),
    (dict(tools=[], tool_choice=function("a")), "which is not in 'tools'"),
    (dict(tools=OFFERED, parallel_tool_calls="no"), "'parallel_tool_calls' must be true or false"),
    (
        dict(tools=OFFERED, response_format=dict(type="regex", regex="a")),
        "'response_format' beside 'tools' must be text, json_object or json_schema",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[x[1] for x in WRONG])
def test_wrong_tools(server, fields, message):
    """400, one line that names the field."""
    status, reply = post(server, "/v1/chat/completions", dict(messages=GREETING) | fields)
    assert status == 400 and message in reply["error"]["message"] and "\n" not in reply["error"]["message"]
    assert f"'{reply['error']['param']}" in reply["error"]["message"]


def test_no_tools(server):
    """An empty list is none; tool_choice none keeps the tools from the model: the prompt is as without."""
    asked = dict(messages=GREETING, temperature=0)
    plain = post(server, "/v1/chat/completions", asked)[1]
    offered = dict(tools=OFFERED, tool_choice="none")
    for fields in (dict(tools=[]), dict(tools=[], tool_choice="auto"), offered):
        status, found = post(server, "/v1/chat/completions", asked | fields | dict(parallel_tool_calls=False))
        assert status == 200 and found["choices"] == plain["choices"] and found["usage"] == plain["usage"]
    assert post(server, "/v1/completions", dict(prompt="a", tools=OFFERED))[0] == 200  # ignored there
