"""JSON schemas of any client: a grammar holds what it can express, and the rest is named, not refused."""

import copy
import json
import random

import jsonschema
import numpy as np
import pytest
from conftest import CHECKPOINTS
from test_server import GREETING, post, server_with
from test_server_fields import post_whole

from conversation.grammar import Grammar, grammar_tokenizer, make_grammar
from conversation.schemas import keep_expressible
from conversation.text import load_tokenizer
from feedback.errors import UserError

STRING, INTEGER = {"type": "string", "maxLength": 4}, {"type": "integer", "minimum": -20, "maximum": 300}


def thing(**more) -> dict:
    return {"type": "object"} | more


def props(**properties) -> dict:
    return thing(properties=properties, additionalProperties=False)


A_INTEGER = {"^a": INTEGER}
# {what it has: (a schema, the keywords that are left out)}
SCHEMAS: dict[str, tuple[dict, str]] = {
    "a record of zod": (thing(propertyNames={"type": "string"}, additionalProperties=INTEGER), ""),
    "propertyNames that are listed": (
        thing(propertyNames={"enum": ["a", "b"]}, additionalProperties=INTEGER, required=["a"]), "",
    ),
    "propertyNames": (thing(propertyNames={"maxLength": 2}, additionalProperties=INTEGER), "propertyNames"),
    "propertyNames and properties": (
        thing(propertyNames={"enum": ["a"]}, properties={"a": INTEGER}), "propertyNames",
    ),
    "not": (STRING | {"not": {"const": "a"}}, "not"),
    "not within": (props(a={"type": "array", "items": INTEGER | {"not": {"const": 1}}}), "not"),
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
    "uniqueItems false": ({"type": "array", "items": INTEGER, "uniqueItems": False}, ""),
    "dependentRequired": (
        props(a=STRING, b=STRING) | {"dependentRequired": {"a": ["b"]}}, "dependentRequired",
    ),
    "dependentSchemas": (
        props(a=STRING) | {"dependentSchemas": {"a": {"minProperties": 2}}}, "dependentSchemas",
    ),
    "dependencies": (props(a=STRING, b=STRING) | {"dependencies": {"a": ["b"]}}, "dependencies"),
    "if, then, else": (
        INTEGER | {"if": {"minimum": 3}, "then": {"multipleOf": 2}, "else": {"maximum": 1}}, "else if then",
    ),
    "contains": ({"type": "array", "items": INTEGER, "contains": {"const": 1}, "minContains": 1},
                 "contains minContains"),
    "unevaluatedProperties": (thing(properties={"a": INTEGER}, unevaluatedProperties=False), ""),
    "unevaluatedProperties and allOf": (
        thing(allOf=[thing(properties={"a": INTEGER})], unevaluatedProperties=False), "unevaluatedProperties",
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, "unevaluatedItems",
    ),
    "oneOf": ({"oneOf": [STRING, INTEGER]}, ""),
    "oneOf with a tag": (
        {"oneOf": [props(kind={"const": x}) | {"required": ["kind"]} for x in ("a", "b")]}, "",
    ),
    "oneOf that overlaps": ({"oneOf": [STRING, {"type": "string", "minLength": 2}]}, "oneOf"),
    "oneOf beside anyOf": (
        {"anyOf": [STRING], "oneOf": [{"minLength": 1}, {"maxLength": 2}], "type": "string"}, "oneOf",
    ),
    "oneOf of required": (
        props(a=INTEGER, b=INTEGER) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf",
    ),
    "anyOf of required": (
        props(a=INTEGER, b=INTEGER) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "",
    ),
    "an unknown format": (STRING | {"format": "color"}, "format"),
    "a format of OpenAPI": (INTEGER | {"format": "int64"}, "format"),
    "formats": (
        props(a={"type": "string", "format": "uuid"}, b={"format": "ipv4", "type": "string"}), "",
    ),
    "a look-ahead": ({"type": "string", "pattern": "^(?!a)[ab]$"}, "pattern"),
    "a look-behind": ({"type": "string", "pattern": "a(?<!b)c"}, "pattern"),
    "a word boundary": ({"type": "string", "pattern": "^a\\b"}, "pattern"),
    "a back-reference": ({"type": "string", "pattern": "^(a|b)\\1$"}, "pattern"),
    "a pattern": ({"type": "string", "pattern": "^[ab]{2}-[0-9]$"}, ""),
    "patternProperties": (thing(patternProperties=A_INTEGER, additionalProperties=False), ""),
    "patternProperties that overlap": (
        thing(patternProperties=A_INTEGER | {"^ab": STRING}, additionalProperties=False), "patternProperties",
    ),
    "patternProperties with a schema": (
        thing(patternProperties={"^a": INTEGER | {"not": {"const": 1}}}, additionalProperties=False), "not",
    ),
    "patternProperties beside properties": (
        props(a=INTEGER | {"multipleOf": 5}) | {"required": ["a"], "patternProperties": {"^a$": INTEGER}},
        "patternProperties",
    ),
    "a required name of patternProperties": (
        thing(required=["a"], patternProperties={"^a$": INTEGER}, additionalProperties=False),
        "patternProperties",
    ),
    "patternProperties in allOf": (
        {"allOf": [props(a=INTEGER) | {"required": ["a"]}, thing(patternProperties=A_INTEGER)]},
        "patternProperties",
    ),
    "minProperties": (thing(additionalProperties=INTEGER, minProperties=3), "minProperties"),
    "minProperties 1": (props(a=INTEGER, b=INTEGER) | {"minProperties": 1}, ""),
    "minProperties of optional ones": (props(a=INTEGER, b=INTEGER) | {"minProperties": 2}, "minProperties"),
    "maxProperties": (thing(additionalProperties=INTEGER, maxProperties=1), ""),
    "bounds beyond 64 bits": ({"type": "integer", "minimum": -1e30, "maximum": 9}, "minimum"),
    "bounds and multiples": ({"type": "integer", "minimum": 3, "maximum": 22, "multipleOf": 5}, ""),
    "allOf": ({"allOf": [thing(properties={"a": INTEGER}, required=["a"]), thing(maxProperties=2)]}, ""),
    "a reference": (
        props(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": INTEGER | {"not": {"const": 1}}}}, "not",
    ),
    "a reference to itself": (props(a=INTEGER, b={"$ref": "#"}), ""),
    "a reference elsewhere": (props(a={"$ref": "https://example.org/a.json"}), "$ref"),
    "a reference to nothing": (props(a={"$ref": "#/$defs/none"}), "$ref"),
    "a tuple": ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2}, ""),
    "enum and const": (props(a={"enum": [None, 1, {"not": 1}]}, b={"const": {"if": 1}}), ""),
    "names that are keywords": (props(**{"not": INTEGER, "if": STRING}) | {"required": ["not"]}, ""),
    "annotations": (STRING | {"title": "x", "examples": ["a"], "nullable": True, "x-order": 1}, ""),
}  # fmt: skip
assert len(SCHEMAS) > 40
CONTRADICTIONS = [
    {"enum": []}, {"anyOf": []}, {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "no"}, {"type": 3},
    {"type": "string", "minLength": 3, "maxLength": 1}, {"type": "array", "minItems": 2, "maxItems": 1},
    props(a=INTEGER) | {"required": ["b"]}, props(a={"enum": []}) | {"required": ["a"]},
    {"allOf": [STRING, INTEGER]}, {"type": "integer", "const": "a"}, {"properties": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    loaded = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    return grammar_tokenizer(loaded, len(loaded), frozenset([loaded.eos_token_id]))


def draw(grammar: Grammar, tokenizer, rng, most: int = 400) -> str | None:
    """A random text of the grammar, whose strings and lists end soon; None if it has more tokens."""
    bits, ids, state = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32), [], grammar.start()
    while len(ids) < most:
        state.fill_bitmask(bits)
        some = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        ending = [i for i in some if tokenizer.decode_bytes([i])[:1] in (b'"', b"}", b"]", b",")]
        token = int(rng.choice(ending if ending and rng.random() < 0.5 else some))
        if token == tokenizer.eos_token or state.accept_token(token):
            return tokenizer.decode_bytes([x for x in [*ids, token] if x != tokenizer.eos_token]).decode()
        ids.append(token)
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_kept_is_kept_rightly(name, tokenizer):
    """Random answers match the schema, without the keywords that are named; most of them are whole."""
    schema, lost = SCHEMAS[name]
    before = copy.deepcopy(schema)
    kept, named = keep_expressible(schema)
    assert named == tuple(lost.split()) and schema == before
    validators = [jsonschema.Draft202012Validator(kept)]
    if not lost:
        formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validators.append(jsonschema.Draft202012Validator(schema, format_checker=formats))
    grammar, rng, whole = make_grammar(tokenizer, "json_schema", kept), np.random.default_rng(0), 0
    for _ in range(30):
        if (text := draw(grammar, tokenizer, rng)) is not None:
            whole += 1
            for validator in validators:
                validator.validate(json.loads(text))
    assert whole > 15


def test_why_pattern_properties_are_left_out(tokenizer):
    """Beside properties llguidance allows a comma that nothing can follow, with which the answer ends."""
    schema, _ = SCHEMAS["patternProperties beside properties"]
    grammar, rng = make_grammar(tokenizer, "json_schema", schema), np.random.default_rng(0)
    texts = [draw(grammar, tokenizer, rng) or "" for _ in range(30)]
    assert any(text.endswith(", ") for text in texts)


def test_different_names_are_not_counted():
    schema, _ = SCHEMAS["minProperties"]
    assert keep_expressible(schema)[0]["minProperties"] == 1
    closed = thing(properties={"a": INTEGER, "b": INTEGER}, required=["a", "b"], additionalProperties=False)
    assert keep_expressible(closed | {"minProperties": 2}) == (closed | {"minProperties": 2}, ())


def test_annotations_are_no_part_of_the_grammar():
    """Except where a property has the name of one."""
    told = {"title": "a", "description": "b", "default": 1, "examples": [2], "$comment": "c"}
    schema = props(description=INTEGER | told) | told
    assert keep_expressible(schema) == (props(description=INTEGER), ())


@pytest.mark.parametrize("schema", CONTRADICTIONS, ids=json.dumps)
def test_contradictions(schema):
    with pytest.raises(UserError) as e:
        keep_expressible(schema)
    assert "\n" not in str(e.value)


def test_schemas_of_any_shape():
    """Values of wrong types anywhere: a grammar, or one line."""
    rng, fine = random.Random(0), 0
    wrong = [None, True, 3, -1, 1e400, "a", "(", [], [3], [{}], {}, {"a": 3}, {"a": {"not": 3}}]
    words = sorted({word for schema, _ in SCHEMAS.values() for word in schema})
    for _ in range(400):
        schema = copy.deepcopy(rng.choice(list(SCHEMAS.values()))[0])
        parts = [schema, *(x for x in schema.values() if isinstance(x, dict))]
        for _ in range(rng.randint(1, 3)):
            rng.choice(parts)[rng.choice(words)] = copy.deepcopy(rng.choice(wrong))
        try:
            keep_expressible(schema)
            fine += 1
        except UserError as e:
            assert "\n" not in str(e)
    assert 20 < fine < 380
    deep: dict = {}
    for _ in range(3000):
        deep = {"anyOf": [deep]}
    with pytest.raises(UserError, match="nested too deeply"):
        keep_expressible(deep)


server = server_with("--rows", "2", "--max-len", "512")
ASK = dict(messages=GREETING, max_tokens=1)


def test_answers(server):
    """A response names the keywords that its grammar lacks; none is refused but what nothing can match."""
    for name, (schema, lost) in SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        for field, value in (("response_format", form), ("guided_json", schema)):
            status, reply, headers = post_whole(server, "/v1/chat/completions", ASK | {field: value})
            assert status == 200, (name, reply)
            named = ", ".join(f"{field}.{word}" for word in lost.split())
            assert headers.get("x-ignored-fields", "") == named
    for schema in CONTRADICTIONS:
        status, reply = post(server, "/v1/chat/completions", ASK | dict(guided_json=schema))
        assert status == 400 and reply["error"]["param"] == "guided_json", schema


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools(server, choice):
    """As for answers; a tool with a contradiction is refused by its name."""
    for name, (schema, lost) in SCHEMAS.items():
        parameters = schema if schema.get("type") == "object" else props(x=schema) | {"required": ["x"]}
        if "a reference" in name:
            parameters = schema
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        asked = ASK | dict(tools=[tool], tool_choice=choice)
        status, reply, headers = post_whole(server, "/v1/chat/completions", asked)
        assert status == 200, (name, reply)
        assert headers.get("x-ignored-fields", "") == ", ".join(f"tools.{word}" for word in lost.split()), (
            name
        )
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": props(a={"enum": []}) | {"required": ["a"]}},
    }
    status, reply = post(server, "/v1/chat/completions", ASK | dict(tools=[tool], tool_choice=choice))
    assert status == 400 and "'tools': the parameters of 'f': " in reply["error"]["message"]
