"""The fields of a chat that offer tools: tools, tool_choice and parallel_tool_calls.

Source: https://platform.openai.com/docs/api-reference/chat/create.
"""

import dataclasses
from typing import Any

from llguidance import LLTokenizer

from conversation.grammar import Grammar, make_grammar
from conversation.streams import ends_within_reasoning
from conversation.tool_definitions import read_definitions
from conversation.tool_grammar import json_rule, tool_grammar
from conversation.tools import ToolUse
from families.tool_formats import MessageToolFormat, ToolFormat
from feedback.errors import UserError, located

TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
CHOICES = "none", "auto", "required"
CHOICE = ", ".join(CHOICES) + ' or {"type": "function", "function": {"name": NAME}}'


@dataclasses.dataclass(frozen=True)
class ToolRequest:
    """What a chat asks of tools. given: the field `tools`, for the chat template. use: None if the answer may
    not call any.
    """

    given: list[dict]
    use: ToolUse | None


def read_tools(fields: dict[str, Any], shape: ToolFormat | MessageToolFormat) -> ToolRequest:
    """The tools of a request with these fields, for a model that writes calls in this format.

    Raises UserError that begins with the name of the wrong field.
    """
    given = fields.get("tools", [])
    tools = read_definitions(given)
    names = [tool.name for tool in tools]
    several = fields.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise UserError(f"'parallel_tool_calls' must be true or false, not {repr(several)[:40]}")
    choice = fields.get("tool_choice", "auto")
    if choice == "none" or (choice == "auto" and not tools):
        return ToolRequest([], None)
    if choice in CHOICES[1:]:
        if not tools:
            raise UserError(f"'tool_choice' is {choice!r}, but 'tools' is empty")
        return ToolRequest(given, ToolUse(tuple(tools), shape, choice == "required", several))
    name = named(choice)
    if name not in names:
        raise UserError(f"'tool_choice' names the function {name[:64]!r}, which is not in 'tools'")
    return ToolRequest(given, ToolUse((tools[names.index(name)],), shape, forced=True, several=False))


def named(choice: Any) -> str:
    """The name of the function in a tool_choice that is an object. Raises UserError."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise UserError(f"'tool_choice' must be {CHOICE}, not {repr(choice)[:60]}")
    return name


def make_tool_grammar(
    use: ToolUse, tokenizer, grammar_tokenizer: LLTokenizer, prompt: list[int], form: Grammar | None
) -> Grammar:
    """The grammar of an answer that may call tools. prompt: token ids. form: of an answer that calls none.

    Raises UserError that begins with the name of the wrong field.
    """
    if form and form.kind != "json_schema" and not use.forced:
        raise UserError("'response_format' beside 'tools' must be text, json_object or json_schema")
    schema = form.source if form else None
    thinking = ends_within_reasoning(tokenizer, prompt)
    try:
        source = tool_grammar(use, tokenizer, grammar_tokenizer, thinking, schema)
        return make_grammar(grammar_tokenizer, "lark", source)
    except UserError as e:
        for tool in use.tools:
            with located(f"'tools': the parameters of {tool.name!r}"):
                make_grammar(grammar_tokenizer, "lark", f"start: {json_rule(tool.parameters)}")
        raise UserError(f"'tools': {e}") from None
