from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import ASK, BOAT, CALLED, MODEL, ON_AND_ON, check_loop, main, wait_until_answering, weather
from openai import AsyncOpenAI
from people import PROMPTS, Person

set_tracing_disabled(True)
FEW = ModelSettings(max_tokens=30)
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
"""The second takes an answer that ends at `max_tokens` for a failure."""


def agent(url: str, kind: type = KINDS[0], **more: object) -> Agent:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    return Agent(name="a", model=kind(model=MODEL, openai_client=client), **more)


def chat(url: str) -> None:
    assert Runner.run_sync(agent(url, model_settings=FEW), BOAT).final_output


def stream(url: str) -> None:
    async def run() -> int:
        made = Runner.run_streamed(agent(url, model_settings=FEW), BOAT)
        count = len([event async for event in made.stream_events()])
        assert made.final_output
        return count

    assert asyncio.run(run()) > 3


def tools(url: str) -> None:
    for kind in KINDS:
        CALLED.clear()
        check_loop(Runner.run_sync(agent(url, kind, tools=[function_tool(weather)]), ASK).final_output)


def structured(url: str) -> None:
    for kind in KINDS:
        asked = agent(url, kind, output_type=Person, model_settings=ModelSettings(temperature=0))
        assert isinstance(Runner.run_sync(asked, PROMPTS[0]).final_output, Person)


def cancel(url: str) -> None:
    async def run() -> None:
        asked = asyncio.create_task(Runner.run(agent(url), ON_AND_ON))
        await asyncio.to_thread(wait_until_answering, url)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(run())


main(chat, stream, tools, structured, cancel)
