"""Fields that client libraries send and that change nothing here, with the values for which that is so.

A field that is neither here nor supported is refused by its name: it may ask for another answer.
"""

from typing import Any

ANY = object()  # every value changes nothing

# {a field: the values that change nothing}. Sources: OpenAI's API reference, and vLLM's
# entrypoints/openai/protocol.py for fields that are not OpenAI's.
INERT_FIELDS: dict[str, Any] = {
    # Of a service with accounts: who asks, what is kept, billed or cached, and how it is routed.
    "metadata": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "request_id": ANY,
    "safety_identifier": ANY,
    "service_tier": ANY,
    "store": ANY,
    "user": ANY,
    # Values that ask for what is done anyway.
    "add_special_tokens": (True,),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),  # without functions; the older names of tool_choice and tools
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    # Without effect, because special tokens are left out of texts and grammars have one backend.
    "guided_decoding_backend": ANY,
    "spaces_between_special_tokens": ANY,
}
INERT_CHAT_FIELDS: dict[str, Any] = {
    "add_special_tokens": (False,),  # the chat template has written them
    "echo": (False,),
}


def refusal(name: str, value: Any, chat: bool) -> str | None:
    """Why a field that is not supported is refused; None if it changes nothing."""
    inert = INERT_FIELDS | (INERT_CHAT_FIELDS if chat else {})
    values = inert.get(name, ())
    if values is ANY or value in values:
        return None
    only = f", only {values[0]!r}, which changes nothing" if values else ""
    return f"{name[:60]!r} is not supported{only}"
