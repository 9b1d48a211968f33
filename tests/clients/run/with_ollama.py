from __future__ import annotations

from typing import Any

from cells import ASK, BOAT, MODEL, ON_AND_ON, check_loop, main, weather
from ollama import Client
from people import PROMPTS, Person

FEW: Any = {"num_predict": 30, "temperature": 0}


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(url: str) -> None:
    assert Client(url).chat(MODEL, said(BOAT), options=FEW).message.content
    assert Client(url).generate(MODEL, "Once upon a time", options=FEW).response


def stream(url: str) -> None:
    pieces = [piece.message.content or "" for piece in Client(url).chat(MODEL, said(BOAT), options=FEW, stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces) == Client(url).chat(MODEL, said(BOAT), options=FEW).message.content


def tools(url: str) -> None:
    talk = said(ASK)
    for _ in range(3):
        message = Client(url).chat(MODEL, talk, tools=[weather]).message
        talk.append(message)
        for call in message.tool_calls or ():
            result = weather(**call.function.arguments)
            talk.append({"role": "tool", "tool_name": call.function.name, "content": result})
    check_loop(message.content or "")


def structured(url: str) -> None:
    made = Client(url).chat(MODEL, said(PROMPTS[0]), format=Person.model_json_schema(), options={"temperature": 0})
    Person.model_validate_json(made.message.content or "")


def cancel(url: str) -> None:
    client = Client(url)
    pieces = client.chat(MODEL, said(ON_AND_ON), stream=True)
    for _ in zip(range(5), pieces, strict=False):
        pass
    pieces.close()


main(chat, stream, tools, structured, cancel)
