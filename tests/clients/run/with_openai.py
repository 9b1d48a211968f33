from __future__ import annotations

import json
from typing import Any

from cells import ASK, BOAT, IMAGE_URL, MODEL, ON_AND_ON, check_image, check_loop, main, weather
from openai import OpenAI
from people import PROMPTS, Person

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none")


def said(text: Any) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(url: str) -> None:
    made = client(url).chat.completions.create(model=MODEL, messages=said(BOAT), max_tokens=30)
    assert made.choices[0].message.content
    answer = client(url).responses.create(model=MODEL, input=BOAT, max_output_tokens=30)
    assert answer.output_text


def stream(url: str) -> None:
    pieces = [
        piece.choices[0].delta.content or ""
        for piece in client(url).chat.completions.create(
            model=MODEL, messages=said(BOAT), max_tokens=30, temperature=0, stream=True
        )
    ]
    whole = client(url).chat.completions.create(model=MODEL, messages=said(BOAT), max_tokens=30, temperature=0)
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    with client(url).responses.stream(model=MODEL, input=BOAT, max_output_tokens=30) as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta")


def tools(url: str) -> None:
    talk = said(ASK)
    for _ in range(3):
        message = client(url).chat.completions.create(model=MODEL, messages=talk, tools=[TOOL]).choices[0].message
        talk.append(message)
        for call in message.tool_calls or ():
            result = weather(**json.loads(call.function.arguments))
            talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
    check_loop(message.content)


def structured(url: str) -> None:
    asked: Any = {"model": MODEL, "temperature": 0}
    made = client(url).chat.completions.parse(messages=said(PROMPTS[0]), response_format=Person, **asked)
    assert isinstance(made.choices[0].message.parsed, Person)
    answer = client(url).responses.parse(input=PROMPTS[0], text_format=Person, **asked)
    assert isinstance(answer.output_parsed, Person)


def images(url: str) -> None:
    talk: Any = said(BOAT)
    plain = client(url).chat.completions.create(model=MODEL, messages=talk, max_tokens=1).usage.prompt_tokens
    parts = [{"type": "text", "text": BOAT}, {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "auto"}}]
    made = client(url).chat.completions.create(model=MODEL, messages=said(parts), max_tokens=30)
    check_image(made.usage.prompt_tokens, plain)
    parts = [{"type": "input_text", "text": BOAT}, {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"}]
    answer = client(url).responses.create(model=MODEL, input=said(parts), max_output_tokens=30)
    check_image(answer.usage.input_tokens, plain)


def cancel(url: str) -> None:
    with client(url).chat.completions.create(model=MODEL, messages=said(ON_AND_ON), stream=True) as pieces:
        for _ in zip(range(5), pieces, strict=False):
            pass


main(chat, stream, tools, structured, images, cancel)
