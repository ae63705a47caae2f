"""The tools that a chat offers: functions, in its fields tools, tool_choice and parallel_tool_calls; and the
format in which the model has learned to call them.

Source: https://platform.openai.com/docs/api-reference/chat/create.
"""

import dataclasses
import re
from typing import Any

from conversation.messages import has_surrogate
from conversation.templates import mentions, template_text
from families.tool_formats import LLAMA_JSON, SIGNS, MessageToolFormat, ToolFormat
from feedback.errors import UserError, located

TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
CHOICES = "none", "auto", "required"
CHOICE = ", ".join(CHOICES) + ', {"type": "function", "function": {"name": NAME}} or the type allowed_tools'
MAX_TOOLS = 512
FUNCTION = {"name", "description", "parameters", "strict"}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, an object."""

    name: str
    parameters: dict


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call, and how.

    forced: the answer consists of calls. several: whether it may have more than one.
    """

    tools: tuple[Tool, ...]
    format: ToolFormat | MessageToolFormat
    forced: bool
    several: bool


def read_tool_use(
    fields: dict[str, Any], shape: ToolFormat | MessageToolFormat, ignored: list[str] | None = None
) -> ToolUse | None:
    """The tools of a chat with these fields, for a model that writes calls in this format.

    None: the answer may not call any, and the model is offered none. ignored: as in `read_definitions`.
    Raises UserError that begins with the name of the wrong field.
    """
    tools = read_definitions(fields.get("tools", []), ignored)
    several = fields.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise UserError(f"'parallel_tool_calls' must be true or false, not {repr(several)[:40]}")
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, tools = read_allowed_tools(choice, tools)
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if choice in CHOICES:
        if not tools:
            raise UserError(f"'tool_choice' is {choice!r}, but 'tools' is empty")
        return ToolUse(tuple(tools), shape, choice == "required", several)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise UserError(f"'tool_choice' must be {CHOICE}, not {repr(choice)[:60]}")
    return ToolUse((find_tool(tools, name),), shape, forced=True, several=False)


def read_allowed_tools(choice: dict, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """A tool_choice of the type allowed_tools: -> ("auto" or "required", the tools that it allows).

    The prompt shows all tools, so that requests which allow different ones share a prefix of their prompts.
    """
    allowed = choice.get("allowed_tools")
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    functions = [x.get("function") if isinstance(x, dict) else None for x in named or ()]
    names = [x.get("name") if isinstance(x, dict) else None for x in functions]
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        what = 'needs the mode "auto" or "required", and tools: a list of functions by their names'
        raise UserError(f"'tool_choice' of the type allowed_tools {what}")
    return mode, [find_tool(tools, name) for name in dict.fromkeys(names)]


def find_tool(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise UserError(f"'tool_choice' names the function {name[:64]!r}, which is not in 'tools'")


def read_definitions(given: Any, ignored: list[str] | None = None) -> list[Tool]:
    """The functions of a field `tools`. Raises UserError that begins with 'tools', or with 'tools[i]'.

    ignored: a list to which the names of unknown fields are added, which are removed from the functions, as
    chat templates show all that is there; None: a function with an unknown field is refused.
    """
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise UserError(f"'tools' must be a list of at most {MAX_TOOLS} functions")
    tools = []
    for i, tool in enumerate(given):
        with located(f"'tools[{i}]'"):
            tools.append(read_tool(tool, ignored))
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"'tools': two functions have the name {twice[0]!r}")
    return tools


def read_tool(given: Any, ignored: list[str] | None = None) -> Tool:
    """A function of `tools`. Raises UserError."""
    if not isinstance(given, dict) or given.get("type") != "function":
        kind = repr(given.get("type") if isinstance(given, dict) else given)[:40]
        raise UserError(f"it must be an object of the type 'function', not {kind}")
    function = given.get("function")
    if not isinstance(function, dict):
        raise UserError("it must have a 'function', an object of a name and parameters")
    if unknown := sorted(function.keys() - FUNCTION):
        if ignored is None:
            raise UserError(f"{unknown[0][:40]!r} is not supported in a function")
        ignored += [f"tools.{name}" for name in unknown]
        for name in unknown:
            del function[name]
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        what = "a 'name' of 1 to 256 letters, digits, '_', '-', '.' and ':'"
        raise UserError(f"its function must have {what}, not {repr(name)[:40]}")
    description = function.get("description", "")
    if not isinstance(description, str) or has_surrogate(description):
        raise UserError("the 'description' of its function must be a text")
    if not isinstance(function.get("strict", False), bool | None):
        raise UserError("'strict' of its function must be true or false")
    if parameters is not None and not isinstance(parameters, dict):
        raise UserError("the 'parameters' of its function must be a JSON schema, an object")
    if (parameters or {}).get("type", "object") != "object":
        raise UserError("the 'parameters' of its function must be a JSON schema of the type 'object'")
    return Tool(name, arguments_schema(parameters))


def arguments_schema(parameters: dict | None) -> dict:
    """The JSON schema that the arguments of a call must match. Without `parameters` a call has none.

    A schema that names properties and is silent about others admits them; a model that is told to write valid
    JSON would invent some, so they are excluded.
    """
    if not parameters:
        return NO_ARGUMENTS
    composed = {"patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
    silent = "additionalProperties" not in parameters and not composed & parameters.keys()
    names, required = parameters.get("properties"), parameters.get("required") or []
    named = isinstance(names, dict) and isinstance(required, list) and all(str(x) in names for x in required)
    return {"type": "object"} | parameters | ({"additionalProperties": False} if silent and named else {})


def renders_tools(tokenizer) -> bool:
    """Whether the chat template reads `tools`."""
    return mentions(template_text(tokenizer), "tools")


def choose_tool_format(
    tokenizer, family: ToolFormat | MessageToolFormat | None
) -> ToolFormat | MessageToolFormat:
    """The format that the checkpoint's chat template shows, else its family's, else Llama's JSON.

    A family's MessageToolFormat is used only if the chat template renders tools.
    """
    template = template_text(tokenizer)
    shown = [found for texts, found in SIGNS if all(text in template for text in texts)]
    if shown:
        return shown[0]
    if isinstance(family, MessageToolFormat) and not renders_tools(tokenizer):
        family = None
    return family or LLAMA_JSON
