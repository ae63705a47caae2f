"""The format of an answer: OpenAI's response_format, and vLLM's fields that ask for the same."""

import json
from typing import Any

from checkpoints.tensor_files import parse_json
from conversation.messages import has_surrogate
from feedback.errors import UserError

TYPES = "text", "json_object", "json_schema", "regex", "grammar"  # of response_format
STRUCTURED = "json", "regex", "choice", "json_object", "grammar"  # keys of structured_outputs
GUIDED = "json", "regex", "choice", "json_object"  # guided_json and so on are older names of these
FORMAT_FIELDS = {"response_format", "structured_outputs", *(f"guided_{name}" for name in GUIDED)}


def read_format(field: str, value: Any) -> tuple[str, Any] | None:
    """What a field of FORMAT_FIELDS asks for: arguments of conversation.grammar.make_grammar; None for text.

    Raises UserError if the field's value is wrong.
    """
    if field == "response_format":
        return _response_format(value)
    asked = value if field == "structured_outputs" else {field.removeprefix("guided_"): value}
    if not isinstance(asked, dict) or len(asked) != 1 or not asked.keys() <= set(STRUCTURED):
        raise UserError(f"it must be an object of one of {', '.join(STRUCTURED)}, not {repr(asked)[:60]}")
    ((kind, source),) = asked.items()
    if kind == "json_object":
        return ("json_schema", {"type": "object"}) if source else None
    if kind == "choice":
        if not isinstance(source, list) or not source or not all(isinstance(x, str) and x for x in source):
            raise UserError("a choice must be a list of texts that are not empty")
        return "lark", "start: " + " | ".join(json.dumps(x, ensure_ascii=False) for x in source)
    if kind == "json":
        return _schema(parse_json(source, "the schema") if isinstance(source, str) else source)
    return _expression(kind, source)


def _response_format(asked: Any) -> tuple[str, Any] | None:
    """Some clients give the schema beside the type, or with the type json_object: every answer matches it."""
    if not isinstance(asked, dict):
        raise UserError(f"it must be an object, not {repr(asked)[:60]}")
    kind = asked.get("type", None if asked else "text")
    if kind not in TYPES:
        raise UserError(f"its type must be one of {', '.join(TYPES)}, not {repr(kind)[:40]}")
    if kind == "text":
        return None
    if kind in ("regex", "grammar"):
        return _expression(kind, asked.get(kind))
    described = asked.get("json_schema", asked)
    if not isinstance(described, dict):
        raise UserError("its json_schema must be an object of a name and a schema")
    return _schema(described.get("schema", {"type": "object"} if kind == "json_object" else None))


def _schema(source: Any) -> tuple[str, Any]:
    if not isinstance(source, dict):
        raise UserError(f"it needs a schema, which must be an object, not {repr(source)[:60]}")
    return "json_schema", source


def _expression(kind: str, source: Any) -> tuple[str, Any]:
    if not isinstance(source, str) or has_surrogate(source):
        raise UserError("its regex or grammar must be a text")
    return "lark" if kind == "grammar" else kind, source
