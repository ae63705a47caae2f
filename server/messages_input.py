"""Requests of Anthropic's Messages API, converted to requests of the chat API, which checks and answers them.

Source: https://docs.claude.com/en/api/messages, and the types of the package anthropic.
"""

from typing import Any

from conversation.messages import has_surrogate
from conversation.templates import mentions, mentions_reasoning, template_text
from server.api_requests import (
    SHARED,
    ApiRequest,
    BadRequest,
    RequestFields,
    ServedModel,
    check_translated,
    errors_in_words_of,
    parse_body,
)
from server.known_fields import NO_EFFECT

CONVERTED = {
    "max_tokens", "messages", "output_config", "stop_sequences", "system", "thinking", "tool_choice", "tools",
}  # fmt: skip
CACHED = {"cache_control"}  # without effect: prefixes are always cached
# What errors of the chat API call a field, and what the client has called it.
CHAT_NAMES = {
    "max_completion_tokens": "max_tokens", "stop": "stop_sequences",
    "response_format": "output_config.format", "reasoning_effort": "output_config.effort",
}  # fmt: skip
EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates know low, medium and high
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SEPARATOR = "\n\n"  # between the texts of one message


def parse_messages_request(body: bytes, served: ServedModel) -> ApiRequest:
    """The request in a JSON body. Raises BadRequest."""
    ignored: list[str] = []
    chat = chat_fields(parse_body(body), served, ignored)
    try:
        return check_translated(chat, served, CHAT_NAMES, ignored)
    except BadRequest as e:
        if e.code != "context_length_exceeded":
            raise
        # By Anthropic's words clients know that they must make the conversation shorter.
        raise BadRequest(f"prompt is too long: {e}", e.param, e.status, e.code) from None


def count_tokens(body: bytes, served: ServedModel) -> tuple[dict[str, int], tuple[str, ...]]:
    """The number of tokens of a request's prompt; and the names of the ignored fields. Raises BadRequest."""
    ignored: list[str] = []
    checked = RequestFields(chat_fields(parse_body(body), served, ignored), ignored)
    with errors_in_words_of(CHAT_NAMES):
        checked.check_model(served)
        tools = checked.tool_use(served)
        reasons = tools is not None or "response_format" not in checked.fields
        tokens = checked.messages(served, tools, reasons)
        return dict(input_tokens=len(tokens)), checked.all_ignored(served)


def chat_fields(asked: dict[str, Any], served: ServedModel, ignored: list[str]) -> dict[str, Any]:
    """The fields of the chat request that asks for the same. ignored: gets the names of what is ignored.

    Raises BadRequest.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    ignored += sorted(asked.keys() - SHARED - CONVERTED - NO_EFFECT - CACHED)
    chat = {name: asked[name] for name in SHARED & asked.keys()}
    for own, name in (("max_tokens", "max_completion_tokens"), ("stop_sequences", "stop")):
        if own in asked:
            chat[name] = asked[own]
    chat["messages"] = convert_messages(asked.get("messages"), asked.get("system", ""))
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
        chat["continue_final_message"] = True
    return chat | convert_tools(asked, ignored) | convert_output(asked, served, ignored)


def convert_output(asked: dict, served: ServedModel, ignored: list[str]) -> dict:
    """The fields for `output_config` and `thinking`."""
    config, thinking = asked.get("output_config", {}), asked.get("thinking", {})
    for name, value in (("output_config", config), ("thinking", thinking)):
        if not isinstance(value, dict):
            raise BadRequest(f"{name!r} must be an object", name)
    ignored += [f"output_config.{name}" for name in sorted(config.keys() - {"effort", "format"})]
    found: dict[str, Any] = {}
    if (effort := config.get("effort")) is not None:
        found["reasoning_effort"] = EFFORTS.get(effort, effort) if isinstance(effort, str) else effort
    if (form := config.get("format")) is not None:
        found["response_format"] = form
    template, kind = template_text(served.tokenizer), thinking.get("type")
    own = asked.get("chat_template_kwargs", {})
    if kind in ("enabled", "disabled") and mentions(template, "enable_thinking") and isinstance(own, dict):
        found["chat_template_kwargs"] = {"enable_thinking": kind == "enabled"} | own
    elif kind == "disabled" and (served.channels or mentions_reasoning(template)):
        ignored.append("thinking")
    return found


def convert_tools(asked: dict, ignored: list[str]) -> dict:
    """The fields that concern tools.

    Tools without a type, or of the type custom, are functions of the client. The others are known to
    Anthropic's models or run at Anthropic, such as web_search: they are left out.
    """
    tools, choice = asked.get("tools", []), asked.get("tool_choice", {"type": "auto"})
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("'tools' must be a list of objects", "tools")
    kind, found = choice.get("type") if isinstance(choice, dict) else None, []
    for tool in tools:
        if tool.get("type") in (None, "custom"):
            others = {name: x for name, x in tool.items() if name not in ("type", "input_schema", *CACHED)}
            found.append({"type": "function", "function": others | {"parameters": tool.get("input_schema")}})
        else:
            ignored.append(f"tools.{tool['type']}")
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        wanted = CHOICES[kind]
    else:
        raise BadRequest("'tool_choice' must be an object of the type auto, any, tool or none", "tool_choice")
    if not found and wanted in ("none", "auto"):
        return {}
    single = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tools": found, "tool_choice": wanted} | single


def convert_messages(value: Any, system: Any) -> list[dict]:
    """The messages of a chat for `messages` and `system`.

    The system message comes first. One that comes later is a part of the user's message beside it, because
    few chat templates allow a second one; so are messages of the user that follow one another.
    """
    if not isinstance(value, list) or not value:
        raise BadRequest("'messages' must be a list of one or more objects", "messages")
    text = read_text(system, "system")
    found: list[dict] = [{"role": "system", "content": text}] if text else []
    for i, given in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(given, dict) or given.get("role") not in ("user", "assistant", "system"):
            raise wrong(where, "it must be an object of the role user, assistant or system")
        if given["role"] == "assistant":
            found.append(convert_answer(read_blocks(given.get("content"), where), where))
            continue
        begins = given["role"] == "system" and all(message["role"] == "system" for message in found)
        for message in convert_turn(read_blocks(given.get("content"), where), where):
            message["role"] = "system" if begins else message["role"]
            if found and found[-1]["role"] == message["role"] != "tool":
                found[-1]["content"] += SEPARATOR + message["content"]
            else:
                found.append(message)
    return found


def convert_turn(blocks: list[dict], where: str) -> list[dict]:
    """The messages for the blocks of a user's message: results of tools, and texts."""
    found: list[dict] = []
    for block in blocks:
        if block["type"] == "tool_result":
            # Chats have no field for an error, so the model is told in the text.
            result = "Error: " * (block.get("is_error") is True) + read_text(block.get("content"), where)
            call = read_field(block, "tool_use_id", where)
            found.append({"role": "tool", "tool_call_id": call, "content": result})
        elif block["type"] == "text":
            text = read_field(block, "text", where)
            if found and found[-1]["role"] == "user":
                found[-1]["content"] += SEPARATOR + text
            else:
                found.append({"role": "user", "content": text})
        else:
            raise not_supported(block, where)
    return found or [{"role": "user", "content": ""}]


def convert_answer(blocks: list[dict], where: str) -> dict:
    """The message for the blocks of an answer: its thinking, texts and calls."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block["type"] == "text":
            texts.append(read_field(block, "text", where))
        elif block["type"] == "thinking":
            thoughts.append(read_field(block, "thinking", where))
        elif block["type"] == "tool_use":
            if not isinstance(given := block.get("input", {}), dict):
                raise wrong(where, "the 'input' of a tool_use must be an object")
            function = {"name": read_field(block, "name", where), "arguments": given}
            calls.append({"id": read_field(block, "id", where), "type": "function", "function": function})
        elif block["type"] != "redacted_thinking":
            raise not_supported(block, where)
    found: dict[str, Any] = {"role": "assistant", "content": SEPARATOR.join(texts)}
    found |= {"reasoning_content": SEPARATOR.join(thoughts)} if any(thoughts) else {}
    return found | ({"tool_calls": calls} if calls else {})


def read_blocks(content: Any, where: str) -> list[dict]:
    """The blocks of a content, which may be a text. where: for errors, as in all functions here."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(x, dict) and "type" in x for x in blocks):
        raise wrong(where, "its content must be a text, or a list of blocks")
    return blocks


def read_text(content: Any, where: str) -> str:
    """The text of a content that has only texts."""
    blocks = read_blocks("" if content is None else content, where)
    for block in blocks:
        if block["type"] != "text":
            raise not_supported(block, where)
    return SEPARATOR.join(read_field(block, "text", where) for block in blocks)


def read_field(block: dict, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or has_surrogate(value):
        raise wrong(where, f"the {name!r} of a block of the type {repr(block['type'])[:40]} must be a text")
    return value


def not_supported(block: dict, where: str) -> BadRequest:
    return wrong(where, f"content of type {repr(block['type'])[:40]} is not supported, only text is")


def wrong(where: str, what: str) -> BadRequest:
    return BadRequest(f"'{where}': {what}", where.partition("[")[0])
