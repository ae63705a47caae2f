"""The messages of a chat: checked, and converted to the form that Hugging Face's chat templates read.

Source of the messages that are accepted: https://platform.openai.com/docs/api-reference/chat/create; of the
form that templates read: https://huggingface.co/docs/transformers/chat_extras.
"""

from typing import Any

from checkpoints.tensor_files import parse_json
from feedback.errors import UserError, located

ROLES = ("system", "developer", "user", "assistant", "tool")
NEEDED = 'it must be an object with a "role" and a "content"'
# Fields that the client libraries put into messages and that do not change a message's text.
INERT_FIELDS = {
    "annotations", "cache_control", "id", "provider_specific_fields", "reasoning_details", "thinking_blocks",
}  # fmt: skip
FIELDS = {"role", "content", "name"} | INERT_FIELDS
FIELDS_OF_ROLE = {  # further fields of the messages of a role
    "assistant": {"tool_calls", "refusal", "reasoning_content", "reasoning"},
    "tool": {"tool_call_id"},
}


def read_messages(value: Any, where: str = "messages", ignored: list[str] | None = None) -> list[dict]:
    """The messages of a chat, in the form that chat templates read.

    value: messages as OpenAI's API and its client libraries write them; null means that a field is absent.
    Each message of the result has a `role` and a `content`, which is a text. It may also have `name`,
    `tool_call_id`, `reasoning_content`, and `tool_calls`, whose `arguments` are objects. A message of role
    tool that has no name gets the name of the function whose call has the same id. ignored: a list to which
    the names of unknown fields are added; None: a message with an unknown field is refused.

    Raises UserError that begins with `where`, or with `where[i]` for message i.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f'{where} must be a list of one or more objects with a "role" and a "content"')
    messages, functions = [], {}
    for i, given in enumerate(value):
        with located(f"{where}[{i}]"):
            message = read_message(given, ignored)
        for call in message.get("tool_calls", ()):
            functions[call.get("id")] = call["function"]["name"]
        if (name := functions.get(message.get("tool_call_id", ""))) is not None:
            message.setdefault("name", name)
        messages.append(message)
    return messages


def read_message(given: Any, ignored: list[str] | None = None) -> dict:
    """A message in the form that chat templates read, see `read_messages`. Raises UserError."""
    if not isinstance(given, dict):
        raise UserError(NEEDED)
    fields = {name: value for name, value in given.items() if value is not None}
    role = fields.get("role")
    if role not in ROLES:
        raise UserError(f"the role must be one of {', '.join(ROLES)}, not {repr(role)[:40]}")
    if unknown := sorted(fields.keys() - FIELDS - FIELDS_OF_ROLE.get(role, set())):
        if ignored is None:
            raise UserError(f"{unknown[0][:40]!r} is not supported in a message of role {role}")
        ignored += [f"messages.{name}" for name in unknown]
    message = {"role": role, "content": message_text(fields.get("content", ""), role)}
    message |= {name: check_text(fields[name], name) for name in ("name", "tool_call_id") if name in fields}
    if calls := fields.get("tool_calls"):
        message["tool_calls"] = read_tool_calls(calls)
    refusal = check_text(fields.get("refusal", ""), "refusal")  # a text in place of the content
    message["content"] = message["content"] or refusal
    # vLLM and OpenRouter have renamed reasoning_content to reasoning.
    reasoning = fields.get("reasoning_content") or fields.get("reasoning") or ""
    if check_text(reasoning, "reasoning_content"):
        message["reasoning_content"] = reasoning
    if "content" not in fields and not (calls or refusal or reasoning):
        raise UserError(NEEDED)
    return message


def message_text(content: Any, role: str = "user") -> str:
    """The content of a message as one text: it is a text, or a list of parts {"type": "text", "text": TEXT}.

    Other fields of a part do not change its text and are left out. A message of the assistant may also have
    parts {"type": "refusal", "refusal": TEXT}. Raises UserError if the content is anything else; images,
    sound and video are refused by their type.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise UserError("its content must be a text")
    types = ("text", "refusal") if role == "assistant" else ("text",)
    for part in parts:
        if part.get("type") not in types:
            raise UserError(f"content of type {repr(part.get('type'))[:40]} is not supported, only text is")
    return "".join(check_text(part.get(part["type"]), "content") for part in parts)


def read_tool_calls(calls: Any) -> list[dict]:
    """An assistant's tool_calls in the form that chat templates read: `arguments` is an object.

    calls: as OpenAI's API has them, `arguments` is the text of a JSON object, or empty for no arguments. Some
    clients send the object itself. Raises UserError.
    """
    if not isinstance(calls, list):
        raise UserError("tool_calls must be a list")
    found = []
    for i, call in enumerate(calls):
        where = f"tool_calls[{i}]"
        if not isinstance(call, dict) or (call.get("type") or "function") != "function":
            raise UserError(f'{where} must be an object of the type "function", no other tools are supported')
        function = call.get("function")
        if not isinstance(function, dict) or not function.get("name"):
            raise UserError(f"{where}.function must be an object of a name and arguments")
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, dict):
            arguments = parse_json(check_text(arguments, f"{where}: arguments"), f"{where}: arguments")
        read = {"type": "function", "function": {"name": check_text(function["name"], f"{where}: name")}}
        read["function"]["arguments"] = arguments
        found.append(read | ({"id": check_text(call["id"], f"{where}: id")} if call.get("id") else {}))
    return found


def check_text(value: Any, name: str) -> str:
    """The value, if it is a text without surrogates. Raises UserError that names the field."""
    if not isinstance(value, str) or has_surrogate(value):
        raise UserError(f"its {name} must be a text")
    return value


def has_surrogate(text: str) -> bool:
    """Whether a text has a surrogate code point, which no encoding can represent.

    Python decodes invalid bytes of the command line to surrogates, and JSON can escape a lone one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
