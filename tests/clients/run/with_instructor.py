from __future__ import annotations

from typing import Any

import instructor
from cells import BOAT, MODEL, ON_AND_ON, main
from openai import OpenAI
from people import PROMPTS, SAMPLING, Person


def client(url: str, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)


def said(text: str) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **SAMPLING}


def chat(url: str) -> None:
    assert client(url).chat.completions.create(response_model=None, max_tokens=30, **said(BOAT)).choices


def stream(url: str) -> None:
    made = list(client(url).chat.completions.create_partial(response_model=Person, **said(PROMPTS[0])))
    assert len(made) > 3
    Person.model_validate(made[-1].model_dump())


def structured(url: str) -> str:
    """By calls of functions for each of the prompts, without a second try, and by a schema for one."""
    for prompt in PROMPTS:
        made = client(url).chat.completions.create(response_model=Person, max_retries=0, **said(prompt))
        assert isinstance(made, Person), prompt
    by_schema = client(url, instructor.Mode.JSON_SCHEMA)
    assert isinstance(by_schema.chat.completions.create(response_model=Person, **said(PROMPTS[0])), Person)
    return f"{len(PROMPTS)} of {len(PROMPTS)}"


def cancel(url: str) -> None:
    with client(url).chat.completions.create(response_model=None, stream=True, **said(ON_AND_ON)) as pieces:
        for _ in zip(range(5), pieces, strict=False):
            pass


main(chat, stream, structured, cancel)
