"""LiteLLM: a tool that must be called, whole and in a stream.

The server is started with --served-model-name local:
python3 examples/clients/litellm_tools.py http://127.0.0.1:8000/v1
"""

import json
import sys

import litellm

litellm.suppress_debug_info = True

city = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
tool = {
    "name": "get_weather",
    "description": "The weather in a city, today.",
    "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]},
}
request = dict(
    model="openai/local",
    api_base=sys.argv[1],
    api_key="none",
    messages=[{"role": "user", "content": "What is the weather like in Rome?"}],
    tools=[{"type": "function", "function": tool}],
    tool_choice="required",
    temperature=0,
    max_tokens=60,
)
call = litellm.completion(**request).choices[0].message.tool_calls[0]
print(call.function.name, json.loads(call.function.arguments)["city"])
whole = litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True)))
assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
