"""Requests of OpenAI's Responses API, converted to requests of the chat API, which checks and answers them.

The server stores nothing: each request brings the whole conversation as its input.
Source: https://platform.openai.com/docs/api-reference/responses/create.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from server.api_requests import (
    SHARED,
    ApiRequest,
    BadRequest,
    ServedModel,
    check_translated,
    parse_body,
    unsupported,
)
from server.known_fields import NO_EFFECT

SAME = SHARED | {"stop"}  # fields with the same name and meaning in the chat API
CONVERTED = {
    "background", "include", "input", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning",
    "text", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
OF_OPENAI = {"max_tool_calls", "stream_options", "truncation"}  # without effect here
NEEDS_STORE = {"previous_response_id", "conversation", "prompt"}
INCLUDABLE = {  # only the log-probabilities have an effect: answers have none of the rest
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
}  # fmt: skip
# What errors of the chat API call a field, and what the client has called it.
CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
SYSTEM = "system", "developer"
JOIN = "__"  # between the name of a namespace and that of its function


@dataclasses.dataclass(frozen=True)
class ResponsesRequest(ApiRequest):
    """A request of the Responses API.

    asked: its own fields, which the response repeats, without the tools that the server cannot offer.
    """

    asked: dict[str, Any] = dataclasses.field(default_factory=dict)


def parse_responses_request(body: bytes, served: ServedModel) -> ResponsesRequest:
    """The request in a JSON body. Raises BadRequest."""
    asked = {name: value for name, value in parse_body(body).items() if value is not None}
    ignored: list[str] = []
    asked["tools"] = offered_tools(asked.get("tools", []), ignored)
    chat = chat_fields(asked, ignored)
    parsed = check_translated(chat, served, CHAT_NAMES, ignored)
    return ResponsesRequest(**vars(parsed), asked=asked)


def chat_fields(asked: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """The fields of the chat request that asks for the same. ignored: gets the names of what is ignored.

    Raises BadRequest.
    """
    if stored := sorted(NEEDS_STORE & asked.keys()):
        raise unsupported(stored[0], "the server stores nothing, so send the whole conversation as 'input'")
    if asked.get("background") not in (None, False):
        raise unsupported("background", "the server stores no response that could be fetched later")
    ignored += sorted(asked.keys() - SAME - CONVERTED - OF_OPENAI - NO_EFFECT)
    chat = {name: asked[name] for name in SAME & asked.keys()}
    if not isinstance(instructions := asked.get("instructions", ""), str):
        raise BadRequest("'instructions' must be a text", "instructions")
    chat["messages"] = convert_input(asked.get("input"), instructions)
    if "max_output_tokens" in asked:
        chat["max_completion_tokens"] = asked["max_output_tokens"]
    chat |= convert_logprobs(asked, ignored) | convert_tools(asked)
    chat |= convert_text(read_object(asked, "text", ignored, "format"))
    reasoning = read_object(asked, "reasoning", ignored, "effort", "summary", "generate_summary")
    if "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def read_object(asked: dict, name: str, ignored: list[str], *known: str) -> dict:
    """A field that is an object without nulls. known: the names in it that are; others are ignored."""
    value = asked.get(name, {})
    if not isinstance(value, dict):
        raise BadRequest(f"{name!r} must be an object", name)
    ignored += [f"{name}.{key}" for key in sorted(value.keys() - set(known)) if value[key] is not None]
    return {key: value[key] for key in known if value.get(key) is not None}


def convert_logprobs(asked: dict, ignored: list[str]) -> dict:
    """The fields that ask for log-probabilities, for `include` and `top_logprobs`."""
    include = asked.get("include", [])
    if not isinstance(include, list) or not all(isinstance(x, str) for x in include):
        raise BadRequest("'include' must be a list of texts", "include")
    ignored += [f"include.{x}" for x in sorted(set(include) - INCLUDABLE)]
    found = {"top_logprobs": asked["top_logprobs"]} if "top_logprobs" in asked else {}
    wanted = "message.output_text.logprobs" in include or found
    return found | ({"logprobs": True} if wanted else {})


def convert_text(text: dict) -> dict:
    """The response_format for the field `text`."""
    form = text.get("format")
    if form is None:
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        fields = {name: x for name, x in form.items() if name != "type" and x is not None}
        return {"response_format": {"type": "json_schema", "json_schema": fields}}
    return {"response_format": form}


def offered_tools(tools: Any, ignored: list[str]) -> list[dict]:
    """The tools that the model is offered: functions, and namespaces of them.

    Tools of other types run at OpenAI, such as web_search: they are left out. ignored: gets their types.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("'tools' must be a list of objects", "tools")
    found = []
    for tool in tools:
        if tool.get("type") == "namespace":
            found.append(tool | {"tools": offered_tools(tool.get("tools", []), ignored)})
        elif tool.get("type") == "function":
            found.append(tool)
        else:
            ignored.append(f"tools.{tool.get('type')}")
    return found


def name_functions(tools: list[dict], namespace: Any = None) -> Iterator[tuple[str, Any, dict]]:
    """Of each function: its name for the model, its namespace or None, and the function."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from name_functions(tool["tools"], tool.get("name"))
        else:
            yield full_name(tool.get("name"), namespace), namespace, tool


def full_name(name: Any, namespace: Any) -> Any:
    """The name by which the model knows a function of a namespace: functions of several may have one name."""
    named = isinstance(name, str) and isinstance(namespace, str)
    return f"{namespace.removesuffix(JOIN)}{JOIN}{name}" if named else name


def convert_tools(asked: dict) -> dict:
    """The fields that concern tools: in the chat API, a function's fields are in an object of their own.

    A request without tools has none of these fields, although clients send `tool_choice` and others always.
    """
    choice = asked.get("tool_choice", "auto")
    found = [nest(tool | {"name": name}) for name, _, tool in name_functions(asked.get("tools", []))]
    if isinstance(choice, dict):
        choice = convert_choice(choice)
    if not found and choice in ("none", "auto"):
        return {}
    parallel = {name: asked[name] for name in {"parallel_tool_calls"} & asked.keys()}
    return {"tools": found, "tool_choice": choice} | parallel


def convert_choice(choice: dict) -> dict:
    """The chat API's form of a tool_choice that names one function, or those that are allowed."""
    if choice.get("type") == "function":
        return nest({"name": full_name(choice.get("name"), choice.get("namespace"))})
    if choice.get("type") == "allowed_tools":
        allowed = [
            nest({"name": name}) for name, _, _ in name_functions(offered_tools(choice.get("tools"), []))
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    what = "must be none, auto, required, a function by its name, or allowed_tools"
    raise BadRequest(f"'tool_choice' {what}", "tool_choice")


def nest(tool: dict) -> dict:
    """A function in the form of the chat API, where its fields are in an object of their own."""
    return {"type": "function", "function": {k: x for k, x in tool.items() if k != "type" and x is not None}}


def convert_input(value: Any, instructions: str) -> list[dict]:
    """The messages of a chat for `input`, which is a text or a list of items, and `instructions`.

    Reasoning, text and calls that follow one another are one message of the assistant, as chat templates
    expect. Instructions come first; messages of the roles system and developer at the beginning of the input
    are added to them, because most templates allow one such message.
    """
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise BadRequest("'input' must be a text, or a list of one or more items", "input")
    messages: list[dict] = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"'input[{i}]' must be an object", "input")
        item = {name: x for name, x in item.items() if x is not None}
        kind = item.get("type", "message")
        convert = CONVERTERS.get(kind) if isinstance(kind, str) else None
        if convert is None:
            what = (
                "the server stores nothing" if kind == "item_reference" else "nothing here makes such items"
            )
            raise BadRequest(f"'input[{i}]': the type {repr(kind)[:40]} is not supported: {what}", "input")
        try:
            if (message := convert(item)) is not None:
                add_message(messages, message)
        except BadRequest as e:
            raise BadRequest(f"'input[{i}]': {e}", "input") from None
    texts, role = [instructions] if instructions else [], "system"
    while messages and messages[0].get("role") in SYSTEM and isinstance(messages[0].get("content"), str):
        role = role if texts else messages[0]["role"]
        texts.append(messages.pop(0)["content"])
    return [{"role": role, "content": "\n\n".join(texts)}, *messages] if texts else messages


def add_message(messages: list[dict], new: dict) -> None:
    """Append a message, or add its parts to the assistant's message before it, if they come later in one.

    The order within a message is reasoning, content, calls.
    """
    order = "reasoning_content", "content", "tool_calls"
    last = messages[-1] if messages else {}
    if new.get("role") == last.get("role") == "assistant":
        old, added = ([i for i, part in enumerate(order) if part in x] for x in (last, new))
        if old and added and max(old) < min(added):
            last.update(new)
            return
        if added == old[-1:] == [2]:
            last["tool_calls"] += new["tool_calls"]
            return
    messages.append(new)


def convert_message(item: dict) -> dict:
    fields = {name: x for name, x in item.items() if name not in ("type", "id", "status", "phase")}
    if isinstance(content := item.get("content"), list):
        fields["content"] = join_parts(content)
    return fields


def join_parts(parts: list) -> str | list:
    """Parts of a content as the one text that they are; if any is no text, in the form of the chat API."""
    texts = ("input_text", "output_text", "text")
    if all(isinstance(x, dict) and x.get("type") in texts and isinstance(x.get("text"), str) for x in parts):
        return "".join(part["text"] for part in parts)
    return [
        part | {"type": "text"} if isinstance(part, dict) and part.get("type") in texts else part
        for part in parts
    ]


def convert_call(item: dict) -> dict:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise BadRequest(f"{name} must be a text")
    function = {"name": full_name(item["name"], item.get("namespace")), "arguments": item["arguments"]}
    return {
        "role": "assistant",
        "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}],
    }


def convert_call_output(item: dict) -> dict:
    if not isinstance(item.get("call_id"), str):
        raise BadRequest("call_id must be a text")
    output = item.get("output")
    content = join_parts(output) if isinstance(output, list) else output
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def convert_reasoning(item: dict) -> dict | None:
    """The text of the reasoning itself; a summary or an encrypted text is not what the model has written.

    None if there is no text.
    """
    parts = item.get("content", [])
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        raise BadRequest("content must be a list of texts")
    text = "".join(part["text"] for part in parts)
    return {"role": "assistant", "reasoning_content": text} if text else None


CONVERTERS = {
    "message": convert_message,
    "function_call": convert_call,
    "function_call_output": convert_call_output,
    "reasoning": convert_reasoning,
}
