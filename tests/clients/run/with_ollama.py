from __future__ import annotations

from base64 import b64decode
from typing import Any

from cells import ASK, BOAT, IMAGE, MODEL, ON_AND_ON, check_image, check_loop, main, weather
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


def images(url: str) -> None:
    """As a file's bytes, and in base64."""
    plain = Client(url).chat(MODEL, said(BOAT), options=FEW).prompt_eval_count
    talk = [{"role": "user", "content": BOAT, "images": [b64decode(IMAGE)]}]
    check_image(Client(url).chat(MODEL, talk, options=FEW).prompt_eval_count, plain)
    check_image(Client(url).generate(MODEL, BOAT, images=[IMAGE], options=FEW).prompt_eval_count, plain)


def cancel(url: str) -> None:
    client = Client(url)
    pieces = client.chat(MODEL, said(ON_AND_ON), stream=True)
    for _ in zip(range(5), pieces, strict=False):
        pass
    pieces.close()


main(chat, stream, tools, structured, images, cancel)
