from __future__ import annotations

import asyncio

from cells import ASK, BOAT, MODEL, ON_AND_ON, check_loop, main, wait_until_answering, weather
from people import PROMPTS, Person
from pydantic_ai import Agent, ModelSettings
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

FEW = ModelSettings(max_tokens=30)


def model(url: str, kind: type = OpenAIChatModel) -> OpenAIChatModel:
    return kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def chat(url: str) -> None:
    assert Agent(model(url)).run_sync(BOAT, model_settings=FEW).output
    assert Agent(model(url, OpenAIResponsesModel)).run_sync(BOAT, model_settings=FEW).output


def stream(url: str) -> None:
    async def run() -> list[str]:
        async with Agent(model(url)).run_stream(BOAT, model_settings=FEW) as made:
            return [piece async for piece in made.stream_text(delta=True, debounce_by=None)]

    assert len(asyncio.run(run())) > 3


def tools(url: str) -> None:
    check_loop(Agent(model(url), tools=[weather]).run_sync(ASK).output)


def structured(url: str) -> None:
    made = Agent(model(url), output_type=Person, retries=0).run_sync(PROMPTS[0], model_settings={"temperature": 0})
    assert isinstance(made.output, Person)


def cancel(url: str) -> None:
    async def run() -> None:
        asked = asyncio.create_task(Agent(model(url)).run(ON_AND_ON))
        await asyncio.to_thread(wait_until_answering, url)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(run())


main(chat, stream, tools, structured, cancel)
