from __future__ import annotations

from cells import ASK, BOAT, IMAGE, IMAGE_URL, MODEL, ON_AND_ON, check_image, check_loop, main, weather
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from people import PROMPTS, SAMPLING, Person


def model(url: str, **more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, **more)


def chat(url: str) -> None:
    assert model(url, max_tokens=30).invoke(BOAT).text


def stream(url: str) -> None:
    pieces = [piece.text for piece in model(url, max_tokens=30).stream(BOAT)]
    assert len(pieces) > 3
    assert "".join(pieces)


def tools(url: str) -> None:
    agent = create_agent(model(url), [weather])
    check_loop(agent.invoke({"messages": [("user", ASK)]})["messages"][-1].text)


def structured(url: str) -> str:
    """By calls of functions for each of the prompts, and by a schema for one."""
    asked = model(url, **SAMPLING).with_structured_output(Person, method="function_calling", include_raw=True)
    made = [asked.invoke(prompt) for prompt in PROMPTS]
    wrong = [each for each in made if not isinstance(each["parsed"], Person)]
    assert not wrong, f"{len(made) - len(wrong)} of {len(made)}; {wrong[0]}"
    by_schema = model(url, **SAMPLING).with_structured_output(Person, method="json_schema")
    assert isinstance(by_schema.invoke(PROMPTS[0]), Person)
    return f"{len(made)} of {len(made)}"


def images(url: str) -> None:
    """As OpenAI writes them, and as LangChain does."""
    text = {"type": "text", "text": BOAT}
    forms = (
        {"type": "image_url", "image_url": {"url": IMAGE_URL}},
        {"type": "image", "base64": IMAGE, "mime_type": "image/png"},
    )
    asked = model(url, max_tokens=30)
    plain, *shown = (
        asked.invoke([HumanMessage(content)]).usage_metadata["input_tokens"]
        for content in ([text], *([text, form] for form in forms))
    )
    for each in shown:
        check_image(each, plain)


def cancel(url: str) -> None:
    pieces = model(url).stream(ON_AND_ON)
    for _ in zip(range(5), pieces, strict=False):
        pass
    pieces.close()


main(chat, stream, tools, structured, images, cancel)
