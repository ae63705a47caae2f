"""JSON schemas, as far as a grammar can express them.

A keyword of a schema only restricts: without it the schema still admits every value that it should, and some
more. So keywords that llguidance does not know, or gets wrong, are left out and named.
Source of the keywords: https://json-schema.org/draft/2020-12 and earlier drafts.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from conversation.grammar import JSON_STYLE, one_line
from feedback.errors import UserError

# Keywords that llguidance refuses, with the values that restrict nothing.
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": (True, {}),
    "if": (True, {}),
    "maxContains": (),
    "minContains": (),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "then": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# Keywords that restrict nothing, and may be most of a grammar's text.
ANNOTATIONS = {"$comment", "default", "description", "examples", "title"}
# Where the schemas within a schema stand: in an object by their names, in a list, or alone.
BY_NAME = "properties", "patternProperties", "$defs", "definitions"
LISTED = "anyOf", "oneOf", "allOf", "prefixItems", "items"
ALONE = "items", "additionalProperties", "additionalItems"
COMPOSING = {"$ref", "allOf", "anyOf", "oneOf"}
# Keywords whose value may be more than llguidance can express, whatever stands beside them.
CHECKED_ALONE = {
    "exclusiveMaximum", "exclusiveMinimum", "format", "maximum", "minimum", "multipleOf", "pattern",
    "patternProperties",
}  # fmt: skip
MAX_REMEMBERED = 16 << 10  # characters of a schema whose result is kept
# Left out everywhere, one after another, if llguidance still cannot express the schema.
LAST_RESORT = "minProperties", "maxProperties", "patternProperties", "pattern", "format", "allOf", "$ref"


def keep_expressible(schema: dict) -> tuple[dict, tuple[str, ...]]:
    """-> (the schema as far as a grammar can express it, the keywords that it lacks, each once).

    Raises UserError if nothing can match the schema, or if it is no schema.
    """
    try:
        given = json.dumps(schema)
        keep = _keep_expressible if len(given) <= MAX_REMEMBERED else _keep_expressible.__wrapped__
        text, lost = keep(given)
        return json.loads(text), lost
    except RecursionError:
        raise UserError("the schema is nested too deeply") from None


@functools.lru_cache(maxsize=1024)  # agents send the same tools with every request
def _keep_expressible(text: str) -> tuple[str, tuple[str, ...]]:
    lost: list[str] = []
    schema = _simplified(json.loads(text), lost)
    error = why_not(schema)
    for keyword in ("oneOf", *LAST_RESORT):
        if not error or error.startswith("Unsatisfiable"):  # llguidance's word for a contradiction
            break
        leave_out = _any_of if keyword == "oneOf" else functools.partial(_without, keyword)
        if (simpler := _everywhere(schema, leave_out)) != schema:
            lost.append(keyword)
            schema, error = simpler, why_not(simpler)
    if error:
        raise UserError(error)
    return json.dumps(schema), tuple(sorted(set(lost)))


def why_not(schema: Any) -> str:
    """Why llguidance has no grammar for the schema; "" if it has one."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_STYLE)
    except ValueError as e:
        return one_line(str(e))
    return one_line(LLMatcher.validate_grammar(grammar, None) or "")


def _everywhere(schema: Any, change: Callable[[dict], dict]) -> Any:
    """The schema after this change of it and of every schema within it."""
    if not isinstance(schema, dict):
        return schema
    again, found = functools.partial(_everywhere, change=change), change(schema)
    for name in found.keys() & set(BY_NAME):
        if isinstance(found[name], dict):
            found = found | {name: {key: again(x) for key, x in found[name].items()}}
    for name in found.keys() & {*LISTED, *ALONE}:
        value = found[name]
        found = found | {name: [again(x) for x in value] if isinstance(value, list) else again(value)}
    return found


def _without(keyword: str, schema: dict) -> dict:
    return {name: x for name, x in schema.items() if name != keyword}


def _any_of(schema: dict) -> dict:
    """The schema with anyOf in the place of oneOf: the same, unless a value matches two of those schemas."""
    if not isinstance(listed := schema.get("oneOf"), list):
        return schema
    rest, one = _without("oneOf", schema), {"anyOf": listed}
    others = rest.get("allOf", [])
    return rest | ({"allOf": [*others, one]} if "anyOf" in rest and isinstance(others, list) else one)


def _simplified(schema: Any, lost: list[str]) -> Any:
    """The schema without what llguidance cannot express or gets wrong. lost: gets the names of keywords."""
    parts: list[dict] = []
    _everywhere(schema, lambda part: parts.append(part) or part)
    merging = any(COMPOSING & part.keys() and {"properties", "allOf"} & part.keys() for part in parts)

    def change(part: dict) -> dict:
        part = _without_unknown(part, lost)
        for name in part.keys() & CHECKED_ALONE:
            value = part[name]
            alone = dict.fromkeys(value, True) if isinstance(value, dict) else value
            if why_not({name: alone}):
                part = _leave_out(part, name, lost)
        # Where no name is left that a pattern admits, the grammar allows a comma that nothing can follow
        # (llguidance's issue 265). Schemas that are merged may meet the properties of others later.
        if "patternProperties" in part and (merging or {"properties", "required"} & part.keys()):
            part = _leave_out(part, "patternProperties", lost)
        # A grammar does not remember the names of an object, and so cannot count different ones.
        closed, least = part.get("additionalProperties") is False, part.get("minProperties")
        if not closed and isinstance(least, int) and least > 1:
            lost.append("minProperties")
            part = part | {"minProperties": 1}
        return part

    return _everywhere(schema, change)


def _leave_out(schema: dict, keyword: str, lost: list[str]) -> dict:
    lost.append(keyword)
    rest = _without(keyword, schema)
    missing = names_in(schema, "required") - names_in(schema, "properties")  # that only a pattern may admit
    return _without("additionalProperties", rest) if missing and keyword == "patternProperties" else rest


def names_in(schema: dict, keyword: str) -> set[str]:
    """The names of properties that a keyword has, in a list or as an object."""
    found = schema.get(keyword)
    return {name for name in found if isinstance(name, str)} if isinstance(found, (dict, list)) else set()


def _without_unknown(schema: dict, lost: list[str]) -> dict:
    """The schema without annotations and the keywords of UNKNOWN, two of which may become other keywords."""
    found = {name: x for name, x in schema.items() if name not in UNKNOWN and name not in ANNOTATIONS}
    other = found.get("additionalProperties", True)
    for name in schema:
        if name not in UNKNOWN or (value := schema[name]) in UNKNOWN[name]:
            continue
        if name == "propertyNames" and (names := _listed_names(value, found)):
            found |= {"properties": dict.fromkeys(names, other), "additionalProperties": False}
        elif name == "unevaluatedProperties" and not schema.keys() & {*COMPOSING, "if", "dependentSchemas"}:
            found.setdefault("additionalProperties", value)
        else:
            lost.append(name)
    return found


def _listed_names(names: Any, schema: dict) -> list[str]:
    """The names that a propertyNames lists, as that of a record of zod with an enum for its keys.

    [] if there is no list, or the schema says more of single properties than which are required.
    """
    listed = names.get("enum") if isinstance(names, dict) else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return []
    more = schema.keys() & {"properties", "patternProperties", *COMPOSING}
    return [] if more or not names_in(schema, "required") <= set(listed) else listed
