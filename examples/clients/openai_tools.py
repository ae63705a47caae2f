"""The openai client: a tool that must be called, whole and in a stream, and an answer from its result.

python3 examples/clients/openai_tools.py http://127.0.0.1:8000/v1
"""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
city = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
tool = {
    "name": "get_weather",
    "description": "The weather in a city, today.",
    "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]},
}
tools = [{"type": "function", "function": tool}]
messages = [{"role": "user", "content": "What is the weather like in Rome?"}]

request = dict(model=model, messages=messages, tools=tools, temperature=0, max_tokens=60)
response = client.chat.completions.create(**request, tool_choice="required")
message = response.choices[0].message
call = message.tool_calls[0]
print(call.function.name, json.loads(call.function.arguments)["city"], response.choices[0].finish_reason)

stream = client.chat.completions.create(**request, tool_choice="required", stream=True)
pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
arguments = "".join(piece.function.arguments or "" for piece in pieces)
assert json.loads(arguments) == json.loads(call.function.arguments)

messages.append(message.model_dump())  # as the client gives it, with its null fields
messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."})
print(client.chat.completions.create(**request).choices[0].message.content)
