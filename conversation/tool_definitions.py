"""The functions that a chat offers to the model, in the field `tools`: checked.

Source: https://platform.openai.com/docs/api-reference/chat/create.
"""

from typing import Any

from conversation.text import has_surrogate
from conversation.tools import TOOL_NAME, Tool
from feedback.errors import UserError, located

MAX_TOOLS = 128
FUNCTION = {"name", "description", "parameters", "strict"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def read_definitions(given: Any) -> list[Tool]:
    """The functions of a field `tools`. Raises UserError that begins with 'tools', or with 'tools[i]'."""
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise UserError(f"'tools' must be a list of at most {MAX_TOOLS} functions")
    tools = []
    for i, tool in enumerate(given):
        with located(f"'tools[{i}]'"):
            tools.append(read_tool(tool))
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"'tools': two functions have the name {twice[0]!r}")
    return tools


def read_tool(given: Any) -> Tool:
    """A function of `tools`. Raises UserError."""
    if not isinstance(given, dict) or given.get("type") != "function":
        kind = repr(given.get("type") if isinstance(given, dict) else given)[:40]
        raise UserError(f"it must be an object of the type 'function', not {kind}")
    function = given.get("function")
    if not isinstance(function, dict):
        raise UserError("it must have a 'function', an object of a name and parameters")
    if unknown := sorted(function.keys() - FUNCTION):
        raise UserError(f"{unknown[0][:40]!r} is not supported in a function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        what = "a 'name' of 1 to 64 letters, digits, '_', '-' and '.'"
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
    closed = {"additionalProperties": False} if silent and "properties" in parameters else {}
    return {"type": "object"} | parameters | closed
