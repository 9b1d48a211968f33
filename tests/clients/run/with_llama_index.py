from __future__ import annotations

import asyncio

from cells import ASK, BOAT, MODEL, ON_AND_ON, check_loop, main, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from people import PROMPTS, Person


def model(url: str, **more: object) -> OpenAILike:
    about: dict[str, object] = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", **{**about, **more})


def chat(url: str) -> None:
    assert model(url, max_tokens=30).chat([ChatMessage(BOAT)]).message.content
    assert model(url, max_tokens=30, is_chat_model=False).complete("Once upon a time").text


def stream(url: str) -> None:
    pieces = [piece.delta or "" for piece in model(url, max_tokens=30).stream_chat([ChatMessage(BOAT)])]
    assert len(pieces) > 3
    assert "".join(pieces)


def tools(url: str) -> None:
    async def run() -> str:
        return str(await FunctionAgent(tools=[weather], llm=model(url, max_tokens=500)).run(ASK))

    check_loop(asyncio.run(run()))


def structured(url: str) -> None:
    made = model(url, temperature=0).as_structured_llm(Person).complete(PROMPTS[0])
    assert isinstance(made.raw, Person)


def cancel(url: str) -> None:
    pieces = model(url, max_tokens=100_000).stream_chat([ChatMessage(ON_AND_ON)])
    for _ in zip(range(5), pieces, strict=False):
        pass
    pieces.close()


main(chat, stream, tools, structured, cancel)
