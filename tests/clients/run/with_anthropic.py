from __future__ import annotations

from typing import Any

from anthropic import Anthropic, beta_tool
from cells import ASK, BOAT, CALLED, IMAGE, MODEL, ON_AND_ON, check_image, check_loop, main, weather
from people import PROMPTS, Person

TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none")


def said(text: Any, most: int = 30) -> Any:
    return {"model": MODEL, "max_tokens": most, "messages": [{"role": "user", "content": text}]}


def chat(url: str) -> None:
    made = client(url).messages.create(**said(BOAT), system="Be brief.")
    assert made.content[0].text
    assert client(url).messages.count_tokens(model=MODEL, messages=said(BOAT)["messages"]).input_tokens


def stream(url: str) -> None:
    with client(url).messages.stream(**said(BOAT)) as pieces:
        text = "".join(pieces.text_stream)
        assert text == pieces.get_final_message().content[0].text != ""


def tools(url: str) -> None:
    asked = said(ASK, 4000)
    for _ in range(3):
        made = client(url).messages.create(**asked, tools=[TOOL])
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in made.content
            if block.type == "tool_use"
        ]
        asked["messages"] += [{"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
    check_loop(made.content[0].text)
    CALLED.clear()
    asked = {**said(ASK, 4000), "tools": [beta_tool(weather)]}
    check_loop(client(url).beta.messages.tool_runner(**asked).until_done().content[0].text)


def structured(url: str) -> None:
    made = client(url).messages.parse(**said(PROMPTS[0], 1000), output_format=Person)
    assert isinstance(made.parsed_output, Person)


def images(url: str) -> None:
    """One in a question, and one that a tool returned."""
    plain = client(url).messages.create(**said(BOAT)).usage.input_tokens
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    asked = said([{"type": "text", "text": BOAT}, image])
    check_image(client(url).messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens, plain)
    assert client(url).messages.create(**asked).content[0].type == "text"
    asked = said(BOAT)
    asked["messages"] += [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
    ]
    assert client(url).messages.create(**asked).content[0].type == "text"


def cancel(url: str) -> None:
    with client(url).messages.stream(**said(ON_AND_ON, 100_000)) as pieces:
        for _ in zip(range(5), pieces.text_stream, strict=False):
            pass


main(chat, stream, tools, structured, images, cancel)
