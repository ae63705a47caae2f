"""The OpenAI Agents SDK: an agent with two tools, over five turns of a conversation.

python3 examples/clients/openai_agents.py http://127.0.0.1:8000/v1 responses
python3 examples/clients/openai_agents.py http://127.0.0.1:8000/v1 chat
"""

import asyncio
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)
calls = []


@function_tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """The weather in a city, today."""
    calls.append(f"get_weather({city!r})")
    return f"In {city} it is sunny, 21 degrees."


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    calls.append(f"add({a}, {b})")
    return a + b


async def main(url: str, api: str) -> None:
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    name = (await client.models.list()).data[0].id
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="Helper",
        instructions="You help with the weather and with sums. Use the tools.",
        model=kind(model=name, openai_client=client),
        tools=[get_weather, add],
        # The answer is what the tool returned. Without this line the model puts it in its own words. A model
        # of 135M parameters may not end them before max_tokens, and over /v1/responses the SDK then raises.
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(temperature=0, max_tokens=80, tool_choice="required"),
    )
    turns = []
    questions = ("The weather in Rome?", "What is 2 + 3?", "And in Oslo?", "What is 4 + 5?", "And in Paris?")
    for number, question in enumerate(questions):
        turns.append({"role": "user", "content": question})
        if number % 2:  # every other turn as a stream
            result = Runner.run_streamed(agent, turns, max_turns=4)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, turns, max_turns=4)
        turns = result.to_input_list()
        print(f"{question} -> {result.final_output!r}")
    print(calls)


asyncio.run(main(*sys.argv[1:]))
