"""/tokenize and /detokenize, as vLLM's server has them: the token ids of a prompt, and their text.

Source: vllm/entrypoints/serve/tokenize/protocol.py.
"""

from typing import Any

from conversation.messages import has_surrogate
from conversation.text import tokenize as tokenize_text
from conversation.tools import TOOL_FIELDS
from server.api_requests import (
    TEMPLATE,
    RequestFields,
    ServedModel,
    check_tokens,
    parse_body,
)

COMMON = {"model", "add_special_tokens", "return_token_strs"}
OF_TEXT = COMMON | {"prompt"}
OF_CHAT = COMMON | TEMPLATE | TOOL_FIELDS | {"messages"}
DETOKENIZE = {"model", "tokens"}


def tokenize(body: bytes, served: ServedModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tokens of a text, or of a chat as its answer would see it; and the names of the ignored fields.

    Raises BadRequest.
    """
    checked = read_fields(body, served, OF_TEXT, OF_CHAT)
    with_texts = checked.read("return_token_strs", False)
    if "messages" in checked.fields:
        tokens = checked.messages(served, checked.tool_use(served), reasons=True)
    else:
        prompt, special = checked.read("prompt", ""), checked.read("add_special_tokens", True)
        if "prompt" not in checked.fields or has_surrogate(prompt):
            raise checked.wrong("prompt", "a text")
        tokens = tokenize_text(served.tokenizer.backend_tokenizer, prompt, add_special_tokens=special)
    texts = served.tokenizer.convert_ids_to_tokens(tokens) if with_texts else None
    found = dict(count=len(tokens), max_model_len=served.max_len, tokens=tokens, token_strs=texts)
    return found, checked.all_ignored(served)


def detokenize(body: bytes, served: ServedModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text of tokens, with that of special tokens; and the names of the ignored fields.

    Raises BadRequest.
    """
    checked = read_fields(body, served, DETOKENIZE, DETOKENIZE)
    tokens = checked.fields.get("tokens")
    check_tokens(tokens, served.vocabulary, "tokens")
    text = served.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return dict(prompt=text), checked.all_ignored(served)


def read_fields(body: bytes, served: ServedModel, of_text: set[str], of_chat: set[str]) -> RequestFields:
    """The fields of a JSON body that are not null. Raises BadRequest.

    of_text, of_chat: the fields that are known without messages, and with them.
    """
    checked = RequestFields(parse_body(body))
    checked.check_names(of_chat if "messages" in checked.fields else of_text)
    checked.check_model(served)
    return checked
