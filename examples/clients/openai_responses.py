"""The openai client's Responses API: a text, a JSON schema, and a tool, whole and in a stream.

python3 examples/clients/openai_responses.py http://127.0.0.1:8000/v1
"""

import json
import sys

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id


class Person(BaseModel):
    name: str
    age: int


city = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
tool = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city, today.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
    "strict": False,
}
question = "What is the capital of France?"
common = dict(model=model, temperature=0, max_output_tokens=60)

whole = client.responses.create(input=question, instructions="Answer in one sentence.", **common)
with client.responses.stream(input=question, instructions="Answer in one sentence.", **common) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text == whole.output_text
print(text)

parsed = client.responses.parse(input="Ann is 31 years old. Who is it?", text_format=Person, **common)
print(parsed.output_parsed)

first = client.responses.create(input="The weather in Rome?", tools=[tool], tool_choice="required", **common)
call = next(item for item in first.output if item.type == "function_call")
print(call.name, json.loads(call.arguments)["city"])
result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
turns = [{"role": "user", "content": "The weather in Rome?"}, *first.output, result]
print(client.responses.create(input=turns, tools=[tool], tool_choice="none", **common).output_text)
