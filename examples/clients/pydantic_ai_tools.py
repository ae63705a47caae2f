"""Pydantic AI: an agent with a tool, and a typed answer, whole and in a stream.

python3 examples/clients/pydantic_ai_tools.py http://127.0.0.1:8000/v1
"""

import asyncio
import sys
from typing import Literal

import openai
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


async def main(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    name = (await client.models.list()).data[0].id
    model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
    settings = dict(temperature=0, max_tokens=60)

    typed = Agent(model, output_type=Person, model_settings=settings)  # Pydantic AI forces a tool call
    print((await typed.run("Ann is 31 years old. Who is it?")).output)

    agent = Agent(model, instructions="Answer in one sentence.", model_settings=settings)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
        """The weather in a city, today."""
        return f"In {city} it is sunny, 21 degrees."

    async with agent.run_stream("What is the capital of France?") as result:
        print("".join([piece async for piece in result.stream_text(delta=True)]))


asyncio.run(main(*sys.argv[1:]))
