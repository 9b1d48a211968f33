from __future__ import annotations

import json
from typing import Any

import litellm
from cells import ASK, BOAT, IMAGE_URL, MODEL, ON_AND_ON, check_image, check_loop, main, weather
from people import PROMPTS, Person

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(url: str, messages: Any, **more: Any) -> Any:
    talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    for provider in ("openai", "hosted_vllm"):
        made = litellm.completion(f"{provider}/{MODEL}", talk, api_base=f"{url}/v1", api_key="none", **more)
    return made


def chat(url: str) -> None:
    assert ask(url, BOAT, max_tokens=30).choices[0].message.content
    made = litellm.completion(
        f"anthropic/{MODEL}", [{"role": "user", "content": BOAT}], api_base=url, api_key="none", max_tokens=30
    )
    assert made.choices[0].message.content


def stream(url: str) -> None:
    pieces = [piece.choices[0].delta.content or "" for piece in ask(url, BOAT, max_tokens=30, stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces)


def tools(url: str) -> None:
    talk: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(3):
        message = ask(url, talk, tools=[TOOL]).choices[0].message
        talk.append(message.model_dump())
        for call in message.tool_calls or ():
            result = weather(**json.loads(call.function.arguments))
            talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
    check_loop(message.content)


def structured(url: str) -> None:
    made = ask(url, PROMPTS[0], response_format=Person, temperature=0)
    Person.model_validate_json(made.choices[0].message.content)


def images(url: str) -> None:
    plain = ask(url, BOAT, max_tokens=1).usage.prompt_tokens
    parts = [{"type": "text", "text": BOAT}, {"type": "image_url", "image_url": {"url": IMAGE_URL}}]
    talk = [{"role": "user", "content": parts}]
    check_image(ask(url, talk, max_tokens=30).usage.prompt_tokens, plain)
    made = litellm.completion(f"anthropic/{MODEL}", talk, api_base=url, api_key="none", max_tokens=30)
    check_image(made.usage.prompt_tokens, plain)


def cancel(url: str) -> None:
    talk = [{"role": "user", "content": ON_AND_ON}]
    pieces = litellm.completion(f"openai/{MODEL}", talk, api_base=f"{url}/v1", api_key="none", stream=True)
    for _ in zip(range(5), pieces, strict=False):
        pass
    pieces.completion_stream.close()


main(chat, stream, tools, structured, images, cancel)
