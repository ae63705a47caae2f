"""/tokenize and /detokenize, as vLLM's server has them: the token ids of a prompt, and their text.

Source: vllm/entrypoints/serve/tokenize/protocol.py.
"""

from typing import Any

from conversation.messages import has_surrogate
from conversation.text import tokenize as tokenize_text
from conversation.tools import TOOL_FIELDS
from server.api_requests import (
    TEMPLATE,
    BadRequest,
    RequestFields,
    ServedModel,
    check_tokens,
    drop_nulls,
    parse_body,
    unsupported,
)

COMMON = {"model", "add_special_tokens", "return_token_strs"}
OF_TEXT = COMMON | {"prompt"}
OF_CHAT = COMMON | TEMPLATE | TOOL_FIELDS | {"messages"}
DETOKENIZE = {"model", "tokens"}


def tokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """The tokens of a text, or of a chat as its answer would see it. Raises BadRequest."""
    checked = read_fields(body, served, OF_TEXT, OF_CHAT)
    with_texts = checked.read("return_token_strs", False)
    if "messages" in checked.fields:
        if checked.read("add_special_tokens", False):
            what = "'add_special_tokens': the chat template has those of a chat already"
            raise BadRequest(what, "add_special_tokens")
        tokens = checked.messages(served, checked.tool_use(served), reasons=True)
    else:
        prompt, special = checked.read("prompt", ""), checked.read("add_special_tokens", True)
        if "prompt" not in checked.fields or has_surrogate(prompt):
            raise checked.wrong("prompt", "a text")
        tokens = tokenize_text(served.tokenizer.backend_tokenizer, prompt, add_special_tokens=special)
    texts = served.tokenizer.convert_ids_to_tokens(tokens) if with_texts else None
    return dict(count=len(tokens), max_model_len=served.max_len, tokens=tokens, token_strs=texts)


def detokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """The text of tokens, with that of special tokens. Raises BadRequest."""
    checked = read_fields(body, served, DETOKENIZE, DETOKENIZE)
    tokens = checked.fields.get("tokens")
    check_tokens(tokens, served.vocabulary, "tokens")
    return dict(prompt=served.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False))


def read_fields(body: bytes, served: ServedModel, of_text: set[str], of_chat: set[str]) -> RequestFields:
    """The fields of a JSON body that are not null. Raises BadRequest.

    of_text, of_chat: the fields that it may have without messages, and with them.
    """
    fields = parse_body(body)
    drop_nulls(fields)
    if unknown := sorted(fields.keys() - (of_chat if "messages" in fields else of_text)):
        raise unsupported(unknown[0])
    checked = RequestFields(fields)
    checked.check_model(served)
    return checked
