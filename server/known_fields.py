"""Fields of requests that are known but not supported. A field that is neither supported nor here is ignored,
and the response names it.

Sources: OpenAI's API reference, vLLM's entrypoints/openai/protocol.py, llama.cpp's tools/server/README.md.
"""

from typing import Any

# Without effect on the answer: who asks, and what is stored, billed, cached, traced or routed.
NO_EFFECT = {
    "client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "request_id", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip

# Fields that ask for another answer, with the values for which the answer is the same.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),  # of completions
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),  # of chats
    "function_call": ("none", "auto"),  # without functions; the older names of tool_choice and tools
    "functions": ([],),
    "grammar": ("",),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "json_schema": ({},),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "repeat_penalty": (1,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
