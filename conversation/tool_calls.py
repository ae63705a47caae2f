"""Calls of tools: written in prompts, and taken out of the text of an answer while it grows.

A call is written as the model has learned it, see families/tool_formats.py; its arguments become JSON.
"""

import ast
import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Iterable
from typing import ClassVar

from conversation.tools import Tool, ToolUse
from families.tool_formats import MessageToolFormat, ToolFormat

MARK_LIKE = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")  # texts within a format that may be tokens
CONSTANTS = {"true": "True", "false": "False", "null": "None"}  # of JSON: Python's
DESCRIPTION = """You can call these functions:
{tools}
To call one, answer only:
{example}
Else answer in words."""


@dataclasses.dataclass
class ToolCall:
    """A call in an answer. arguments: JSON, so far. complete: whether the arguments are whole."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class CallPiece:
    """An addition to the call of this index. id, name: in its first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


# ------------------------------------------------------------------------------------- writing prompts


def write_calls(shape: ToolFormat, calls: Iterable[tuple[str, dict]]) -> str:
    """The text of calls in this format. calls: (name, arguments) pairs."""
    write = NOTATIONS[shape.arguments].write
    texts = [f"{shape.before}{name}{shape.between}{write(given)}{shape.after}" for name, given in calls]
    mark, end = shape.marks[0]
    return mark + shape.opening + shape.separator.join(texts) + shape.closing + end


def describe_tools(messages: list[dict], tools: list[dict], shape: ToolFormat) -> list[dict]:
    """A chat for a template that does not render tools: a system message describes them, calls are texts, and
    results are messages of the user.

    tools: as in a request; may be empty, for a chat that had tools before.
    """
    found, names, role = [], {}, ""
    for message in messages:
        before, role = role, message.get("role")
        if calls := message.get("tool_calls"):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            text = write_calls(shape, [(x["function"]["name"], x["function"]["arguments"]) for x in calls])
            text = "\n".join(filter(None, [message.get("content"), text]))
            found.append(dict(role="assistant", content=text))
        elif role == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name"))
            text = f"Result of {name}: {message['content']}" if name else f"Result: {message['content']}"
            if before == "tool":  # the results of several calls are one message
                found[-1]["content"] += "\n" + text
            else:
                found.append(dict(role="user", content=text))
        else:
            found.append(message)
    if not tools:
        return found
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = write_calls(shape, [("NAME", {"PARAMETER": "VALUE"})])
    text = DESCRIPTION.format(tools=listed, example=example)
    if found[0]["role"] in ("system", "developer"):
        return [found[0] | dict(content=f"{found[0]['content']}\n\n{text}"), *found[1:]]
    return [dict(role="system", content=text), *found]


# ------------------------------------------------------------------------------ notations of arguments


class Nesting:
    """Follows brackets and quoted texts.

    depth: how many brackets are open. quote: the quotation mark of the text that has begun; "": none has.
    """

    def __init__(self, quotes: str):
        self.quotes, self.quote, self.depth, self.escaped = quotes, "", 0, False

    @property
    def outside(self) -> bool:
        return not (self.quote or self.depth)

    def follow(self, c: str) -> None:
        if self.escaped:
            self.escaped = False
        elif self.quote:
            self.escaped, self.quote = c == "\\", "" if c == self.quote else self.quote
        elif c in self.quotes:
            self.quote = c
        else:
            self.depth += (c in "([{") - (c in ")]}")


class Arguments:
    """Arguments of a call in some notation; they are read while they arrive, and become a JSON object.

    `add` takes text, and returns the new part of the JSON. When the arguments are `done`, `rest` has the text
    that follows them.
    """

    done, rest = False, ""
    begun = False  # whether `_fields` has been called

    def _fields(self, fields: dict) -> str:
        start, self.begun = ", " if self.begun else "{", True
        return start + json.dumps(fields, ensure_ascii=False)[1:-1]

    def _end(self, rest: str) -> str:
        self.done, self.rest = True, rest
        return "}" if self.begun else "{}"


class JsonArguments(Arguments):
    """Arguments as JSON: they are passed on as they are."""

    def __init__(self, tool: Tool | None):
        self.nesting = Nesting('"')

    def add(self, text: str) -> str:
        for i, c in enumerate(text):
            self.nesting.follow(c)
            if c in "]}" and self.nesting.outside:
                self.done, self.rest = True, text[i + 1 :]
                return text[: i + 1]
        return text

    @staticmethod
    def write(arguments: dict) -> str:
        return json.dumps(arguments, ensure_ascii=False)


class KeywordArguments(Arguments):
    """Arguments as in Python: a=1, b="x". Each is read when it is whole; values are literals, Python's or
    JSON's. `**{...}` has arguments whose names are no identifiers.
    """

    def __init__(self, tool: Tool | None):
        self.nesting, self.part = Nesting("\"'"), []

    def add(self, text: str) -> str:
        pieces = []
        for i, c in enumerate(text):
            if c in ",)" and self.nesting.outside:
                pieces.append(self._read_part())
                if c == ")":
                    pieces.append(self._end(text[i:]))
                    break
            else:
                self.nesting.follow(c)
                self.part.append(c)
        return "".join(pieces)

    def _read_part(self) -> str:
        part, self.part = "".join(self.part).strip(), []
        if not part:
            return ""
        name, _, value = part.partition("=")
        given = read_value(part[2:]) if part.startswith("**") else {name.strip(): read_value(value)}
        return self._fields(given)

    @staticmethod
    def write(arguments: dict) -> str:
        values = {name: json.dumps(x, ensure_ascii=False) for name, x in arguments.items()}
        return ", ".join(f"{name}={CONSTANTS.get(x, x)}" for name, x in values.items())


class ParameterArguments(Arguments):
    """Arguments as elements of a markup language, one after the other. If the schema says that a parameter is
    a string, its value is the text as it is; any other value is JSON.

    BEGIN, NAMED, END: the texts before the name, between it and the value, and after the value.
    """

    BEGIN: ClassVar[str]
    NAMED: ClassVar[str]
    END: ClassVar[str]

    def __init__(self, tool: Tool | None):
        properties = (tool.parameters.get("properties") if tool else None) or {}
        schemas = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
        self.texts = {name for name, schema in schemas.items() if schema.get("type") == "string"}
        self.held, self.searched = "", 0

    def add(self, text: str) -> str:
        self.held += text
        pieces = []
        while self.held.startswith(self.BEGIN):
            end = self.held.find(self.END, self.searched)
            if end < 0:  # the next search begins where a part of END may be
                self.searched = max(0, len(self.held) - len(self.END))
                return "".join(pieces)
            name, _, value = self.held[len(self.BEGIN) : end].partition(self.NAMED)
            self.held, self.searched = self.held[end + len(self.END) :], 0
            pieces.append(self._fields({name: value if name in self.texts else read_value(value)}))
        if not self.BEGIN.startswith(self.held):
            pieces.append(self._end(self.held))
        return "".join(pieces)

    @classmethod
    def write(cls, arguments: dict) -> str:
        values = {
            k: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for k, x in arguments.items()
        }
        return "".join(f"{cls.BEGIN}{name}{cls.NAMED}{value}{cls.END}" for name, value in values.items())


class AtemParameters(ParameterArguments):
    """Muse Glimmer's."""

    BEGIN, NAMED, END = '<atem:parameter name="', '">', "</atem:parameter>\n"


class ParameterTags(ParameterArguments):
    """Those of Qwen3-Coder and Qwen 3.5."""

    BEGIN, NAMED, END = "<parameter=", ">\n", "\n</parameter>\n"


NOTATIONS = dict(
    json=JsonArguments,
    keywords=KeywordArguments,
    atem_parameters=AtemParameters,
    parameter_tags=ParameterTags,
)


def read_value(text: str):
    """A literal of JSON or Python; a text that is neither is itself."""
    python = text.strip()
    mixed = re.sub(r"\b(true|false|null)\b", lambda m: CONSTANTS[m[0]], python)  # in one literal
    for read, written in (json.loads, text), (ast.literal_eval, python), (ast.literal_eval, mixed):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(written)
    return text


# ------------------------------------------------------------------------------------- reading answers


class CallReader:
    """Takes the calls out of the text of an answer while it grows; the rest is the text for the user.

    A text that only begins like a call is text. White space between the text and the first call is left out.

    calls: so far. inside: whether the calls have begun; then no more text comes.
    """

    def __init__(self, use: ToolUse, tokenizer):
        body = use.format.body or PLAIN if isinstance(use.format, MessageToolFormat) else use.format
        self.shape, self.tools = body, {tool.name: tool for tool in use.tools}
        self.tokens = tokens_among(marks_in(body), tokenizer)  # `add_token` reads them, never `add`
        self.calls, self.pieces = [], []
        texts = self.tokens.values()
        marks = [mark for mark, _ in body.usable_marks(lambda text: text in texts)]
        self.marks = [mark for mark in marks if mark and mark not in texts]
        head = self.shape.opening + self.shape.before
        self.heads = [head + name + self.shape.between[:1] for name in self.tools] if "" in marks else []
        # seen: the beginning of a call, which may turn out to be text
        self.state, self.rest, self.seen = "text", "", ""
        self.forced, self.has_text = use.forced, False

    @property
    def inside(self) -> bool:
        return self.state not in ("text", "broken")

    def take_pieces(self) -> tuple[CallPiece, ...]:
        """The pieces of calls that have come since this method was last called."""
        pieces, self.pieces = tuple(self.pieces), []
        return pieces

    def add(self, new: str, last: bool = False) -> str:
        """Add text: -> the new text for the user. last: the answer ends with it."""
        self.rest += new
        text = self._read_text(last) if self.state == "text" else ""
        while self.inside and self._advance():
            pass
        if self.state == "broken":
            text, self.rest = text + self.seen + self.rest, ""
            self.seen = ""
        return "" if self.forced else text  # the beginning of a call that is cut is no text

    def add_token(self, token: int) -> str:
        """Add one of the format's tokens: -> the new text for the user."""
        mark = self.tokens[token]
        if self.inside:
            return self.add(mark)
        if mark not in dict(self.shape.marks):
            return ""
        text = self.rest.rstrip() if self.state == "text" else ""
        self._begin(mark, "")
        return text

    def begin_message(self, name: str) -> None:
        """A message begins that calls the function of this name."""
        self.state, self.rest, self.seen = "open", "", ""
        if self.shape is PLAIN:
            self._begin_call(name)

    def _begin(self, mark: str, rest: str) -> None:
        self.state, self.rest, self.seen = "open", rest, mark

    def _read_text(self, last: bool) -> str:
        """The text that certainly precedes all calls."""
        if not self.has_text and self.heads:
            begun = self.rest.lstrip()
            if any(begun.startswith(head) for head in self.heads):
                self._begin("", begun)
                return ""
            if not last and any(head.startswith(begun) for head in self.heads):
                return ""
        found = [(self.rest.find(mark), mark) for mark in self.marks if mark in self.rest]
        if found:
            at, mark = min(found)
            text, rest = self.rest[:at].rstrip(), self.rest[at + len(mark) :]
            self._begin(mark, rest)
            return text
        keep = max((overlap(self.rest, mark) for mark in self.marks), default=0)
        text = self.rest if last else self.rest[: len(self.rest) - keep].rstrip()
        self.rest, self.has_text = self.rest[len(text) :], self.has_text or bool(text)
        return text

    def _advance(self) -> bool:
        """Read one part of a call: -> whether there was one."""
        shape = self.shape
        if self.state == "open":
            return self._expect(shape.opening + shape.before, "name")
        if self.state == "name":
            name, found, rest = self.rest.partition(shape.between)
            if found and name in self.tools:
                self.rest = rest
                self._begin_call(name)
                return True
            if found or not any(x.startswith(name[: len(x)]) for x in self.tools):
                self.state = "broken"
            return False
        if self.state == "arguments":
            if not self.rest:
                return False
            piece, self.rest = self.reader.add(self.rest), ""
            if piece:
                self.calls[-1].arguments += piece
                self.pieces.append(CallPiece(len(self.calls) - 1, piece))
            if self.reader.done:
                self.calls[-1].complete, self.rest, self.state = True, self.reader.rest, "after"
            return self.reader.done
        if self.state == "after":
            return self._expect(shape.after, "next")
        if self.state == "next":
            if self.rest and self._expect(shape.separator + shape.before, "name"):
                return True
            self.state = "next" if (shape.separator + shape.before).startswith(self.rest) else "end"
        return False

    def _expect(self, literal: str, then: str) -> bool:
        if self.rest.startswith(literal):
            if not self.calls:
                self.seen += literal
            self.rest, self.state = self.rest[len(literal) :], then
            return True
        if not literal.startswith(self.rest) and self.state != "next":
            self.state = "broken"
        return False

    def _begin_call(self, name: str) -> None:
        call = ToolCall(f"call_{secrets.token_hex(12)}", name)
        self.pieces.append(CallPiece(len(self.calls), "", call.id, name))
        self.calls.append(call)
        self.reader = NOTATIONS[self.shape.arguments](self.tools.get(name))
        self.state, self.seen = "arguments", ""


PLAIN = ToolFormat((), "", "", "")  # the body of a message that is the arguments alone


def overlap(text: str, literal: str) -> int:
    """The length of the longest suffix of the text that is a proper prefix of the literal."""
    return next((n for n in range(min(len(text), len(literal) - 1), 0, -1) if text.endswith(literal[:n])), 0)


def tokens_among(texts: Iterable[str], tokenizer) -> dict[int, str]:
    """{id: text} of those of the texts that are tokens."""
    ids = {tokenizer.backend_tokenizer.token_to_id(text): text for text in texts}
    return {i: text for i, text in ids.items() if i is not None}


def marks_in(shape: ToolFormat) -> set[str]:
    """The texts of a format that may be tokens."""
    texts = [x for x in vars(shape).values() if isinstance(x, str)]
    texts += [x for pair in shape.marks for x in pair]
    return {part for text in texts for part in MARK_LIKE.findall(text)}
