"""LangChain: bind_tools, and structured output by both of its methods.

python3 examples/clients/langchain_tools.py http://127.0.0.1:8000/v1
"""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

chat = ChatOpenAI(base_url=sys.argv[1], api_key="none", model="", temperature=0, max_tokens=60)


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """The weather in a city, today."""
    return f"In {city} it is sunny, 21 degrees."


class Person(BaseModel):
    """A person of whom a text speaks."""

    name: str
    age: int


messages = [HumanMessage("What is the weather like in Rome?")]
with_tools = chat.bind_tools([get_weather], tool_choice="any")
answer = with_tools.invoke(messages)
streamed = None
for piece in with_tools.stream(messages):
    streamed = piece if streamed is None else streamed + piece
assert [x["args"] for x in streamed.tool_calls] == [x["args"] for x in answer.tool_calls]
print(answer.tool_calls[0]["name"], answer.tool_calls[0]["args"])
messages += [
    answer,
    *(ToolMessage(get_weather.invoke(x["args"]), tool_call_id=x["id"]) for x in answer.tool_calls),
]
print(chat.bind_tools([get_weather]).invoke(messages).content)

for method in ("function_calling", "json_schema"):
    print(chat.with_structured_output(Person, method=method).invoke("Ann is 31 years old. Who is it?"))
