"""Images by the official clients of every API: several a request, with tools and structures, whole and streamed.

A prompt is the same in every API, and so is its answer: that of the library.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import jsonschema  # type: ignore[import-untyped]
import ollama
import pytest
from anthropic import Anthropic
from PIL import Image
from tokenizers import decoders
from tokenizers.pre_tokenizers import ByteLevel

from quire import LLM, SamplingParams
from quire.types import StructuredOutputsParams
from tests.live import Live, serving
from tests.pairs import pairwise
from tests.vision import make, picture, place_of, png

FEW = 24
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FUNCTION = {"name": "paint", "description": "Paints.", "parameters": SCHEMA}
TEXT = "What is to be seen?"
PICTURES = [png(picture(40, 30)), png(picture(26, 50, 1), "JPEG"), png(picture(30, 24, 2), "WEBP")]
TYPES = ["image/png", "image/jpeg", "image/webp"]


class Ask(NamedTuple):
    """The images of a request, by number, and what else it has."""

    images: Sequence[int]
    tools: bool = False
    structure: bool = False

    @property
    def most(self) -> int:
        """Tokens: what has a form has to come to its end."""
        return 96 if self.tools or self.structure else FEW


class Said(NamedTuple):
    """An answer: its text, or the arguments of its only call, and the tokens of the prompt."""

    text: str
    arguments: Any
    prompt_tokens: int | None


def encoded(number: int) -> str:
    return base64.b64encode(PICTURES[number]).decode()


def url(number: int) -> str:
    return f"data:{TYPES[number]};base64,{encoded(number)}"


def by_chat(live: Live, ask: Ask, stream: bool) -> Said:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url(number)}} for number in ask.images]
    fields: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": ask.most, "stream": stream}
    fields["messages"] = [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]
    if ask.tools:
        fields |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
        fields["parallel_tool_calls"] = False
    if ask.structure:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    made = live.openai.chat.completions.create(
        **fields, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    if not stream:
        message = made.choices[0].message
        called = [call.function.arguments for call in message.tool_calls or ()]
        return Said(message.content or "", "".join(called), made.usage.prompt_tokens)
    text, arguments, usage = "", "", None
    for chunk in made:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or ())
    return Said(text, arguments, usage.prompt_tokens)


def by_responses(live: Live, ask: Ask, stream: bool) -> Said:
    parts: list[Any] = [{"type": "input_image", "image_url": url(n), "detail": "auto"} for n in ask.images]
    fields: dict[str, Any] = {"model": "m", "temperature": 0, "max_output_tokens": ask.most}
    fields["input"] = [{"role": "user", "content": [*parts, {"type": "input_text", "text": TEXT}]}]
    if ask.tools:
        fields |= {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False}
    if ask.structure:
        fields["text"] = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    if stream:
        with live.openai.responses.stream(**fields) as events:
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            made = events.get_final_response()
        assert said == made.output_text
    else:
        made = live.openai.responses.create(**fields)
    called = [item.arguments for item in made.output if item.type == "function_call"]
    return Said(made.output_text, "".join(called), made.usage.input_tokens)


def by_messages(live: Live, ask: Ask, stream: bool) -> Said:
    sources = [{"type": "base64", "media_type": TYPES[n], "data": encoded(n)} for n in ask.images]
    blocks = [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": TEXT}]
    fields: dict[str, Any] = {"model": "m", "max_tokens": ask.most, "messages": [{"role": "user", "content": blocks}]}
    fields["extra_body"] = {"temperature": 0}
    if ask.tools:
        fields["tools"] = [{"name": "paint", "description": "Paints.", "input_schema": SCHEMA}]
        fields["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    if ask.structure:
        fields["extra_body"]["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with Anthropic(api_key="none", base_url=live.url, http_client=httpx2.Client(trust_env=False)) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                made = events.get_final_message()
        else:
            made = client.messages.create(**fields)
    text = "".join(block.text for block in made.content if block.type == "text")
    called = [json.dumps(block.input) for block in made.content if block.type == "tool_use"]
    tokens = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    return Said(text, "".join(called), tokens + (made.usage.cache_creation_input_tokens or 0))


def options(ask: Ask) -> dict[str, int]:
    return {"temperature": 0, "num_predict": ask.most}


@contextmanager
def llama(live: Live) -> Iterator[ollama.Client]:
    client = ollama.Client(live.url, trust_env=False)
    yield client
    client._client.close()


def by_ollama_chat(live: Live, ask: Ask, stream: bool) -> Said:
    message = {"role": "user", "content": TEXT, "images": [PICTURES[n] for n in ask.images]}
    fields: dict[str, Any] = {"model": "m", "messages": [message], "options": options(ask), "stream": stream}
    if ask.structure:
        fields["format"] = SCHEMA
    with llama(live) as client:
        made = client.chat(**fields)
        chunks = list(made) if stream else [made]
    return Said("".join(each.message.content or "" for each in chunks), "", chunks[-1].prompt_eval_count)


def by_ollama_generate(live: Live, ask: Ask, stream: bool) -> Said:
    fields: dict[str, Any] = {"model": "m", "prompt": TEXT, "images": [PICTURES[n] for n in ask.images]}
    if ask.structure:
        fields["format"] = SCHEMA
    with llama(live) as client:
        made = client.generate(**fields, options=options(ask), stream=stream)
        chunks = list(made) if stream else [made]
    return Said("".join(each.response or "" for each in chunks), "", chunks[-1].prompt_eval_count)


APIS: dict[str, Callable[[Live, Ask, bool], Said]] = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
    "ollama-chat": by_ollama_chat,
    "ollama-generate": by_ollama_generate,
}


class Served(NamedTuple):
    live: Live
    folder: Path
    family: str


@pytest.fixture(scope="module", params=["gemma4", "qwen3-vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param)
    flags = ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"]
    flags += ["--batch-dir", str(tmp_path_factory.mktemp("batches"))]
    with serving(tmp_path_factory.mktemp("log"), str(folder), *flags) as live:
        yield Served(live, folder, request.param)


AXES: dict[str, Sequence[Any]] = {
    "api": [*APIS],
    "images": [(0,), (2, 0, 1), (1, 1)],
    "tools": [False, True],
    "structure": [False, True],
    "stream": [False, True],
}


@pytest.mark.parametrize(
    "served", ["gemma4", pytest.param("qwen3-vl", marks=pytest.mark.nightly)], indirect=True, scope="module"
)
def test_every_api_says_what_the_library_says(served: Served) -> None:
    asked = dict[Ask, list[Said]]()
    for each in pairwise(AXES):
        tools = each["tools"] and not each["api"].startswith("ollama")  # its API cannot insist on a call
        ask = Ask(each["images"], tools, each["structure"] and not tools)
        asked.setdefault(ask, []).append(APIS[each["api"]](served.live, ask, each["stream"]))
    with LLM(str(served.folder), dtype="float32", max_model_len=1024) as llm:
        for ask, answers in asked.items():
            check(llm, ask, answers)


CALL = {"name": "look", "arguments": "{}"}


def written(ids: Sequence[int]) -> str:
    """Text of tokens, without special ones."""
    letters = dict(enumerate(sorted(ByteLevel.alphabet())))
    return decoders.ByteLevel().decode([letters[token] for token in ids if token in letters])


def test_results_of_tools_may_be_images(served: Served) -> None:
    """The template of these checkpoints knows no tools, so that results become a user's message, in which the image
    stands where the result does."""
    called: Any = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
    parts: Any = [{"type": "text", "text": "Here:"}, {"type": "image_url", "image_url": {"url": url(0)}}]
    talk: Any = [{"role": "user", "content": TEXT}, called, {"role": "tool", "tool_call_id": "c", "content": parts}]
    fields: Any = {"model": "m", "temperature": 0, "max_tokens": FEW}
    made = served.live.openai.chat.completions.create(messages=talk, **fields, extra_body={"return_token_ids": True})
    answer, ids = made.choices[0].message.content, made.prompt_token_ids
    assert ids.count(place_of(served.family)) > 4
    begin, end = ids.index(place_of(served.family)), len(ids) - ids[::-1].index(place_of(served.family))
    assert written(ids[:begin]).endswith("<tool_response>\nHere:") and written(ids[end:]).startswith("\n</tool_resp")
    items: Any = [
        {"role": "user", "content": TEXT},
        {"type": "function_call", "call_id": "c", **CALL},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "Here:"}, {"type": "input_image", "image_url": url(0)}],
        },
    ]
    response = served.live.openai.responses.create(model="m", temperature=0, max_output_tokens=FEW, input=items)
    assert response.output_text == answer and response.usage.input_tokens == len(ids)
    source = {"type": "base64", "media_type": TYPES[0], "data": encoded(0)}
    blocks: Any = [{"type": "text", "text": "Here:"}, {"type": "image", "source": source}]
    talk = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": blocks}]},
    ]
    asked = {"model": "m", "max_tokens": FEW, "messages": talk, "temperature": 0}
    message = served.live.http.post("/v1/messages", json=asked).json()
    assert message["content"][0]["text"] == answer
    bad = {"type": "image", "source": {**source, "data": "AAAA"}}
    talk[2]["content"][0]["content"] = [bad]
    refused = served.live.http.post("/v1/messages", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages[2].content[0].content[0]: this is no image")


def test_lines_of_a_batch_have_images(served: Served) -> None:
    client, ask = served.live.openai, Ask((2, 0, 1))
    wanted = by_chat(served.live, ask, False)
    parts = [{"type": "image_url", "image_url": {"url": url(number)}} for number in ask.images]
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    lines = []
    for name, content in (("good", [*parts, {"type": "text", "text": TEXT}]), ("bad", [bad])):
        body = {"model": "m", "temperature": 0, "max_tokens": FEW, "messages": [{"role": "user", "content": content}]}
        lines.append({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id and batch.error_file_id
    [good] = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    assert good["response"]["body"]["choices"][0]["message"]["content"] == wanted.text
    [refused] = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert refused["custom_id"] == "bad" and "this is no image" in json.dumps(refused)


def test_embeddings_are_made_of_text(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": url(0)}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    for path in ("/v1/embeddings", "/pooling"):
        refused = served.live.http.post(path, json=body)
        assert refused.status_code == 400 and "embeddings and classes are made of text" in refused.text


def check(llm: LLM, ask: Ask, answers: Sequence[Said]) -> None:
    """Answers of one request, by several APIs. A call's arguments may be spaced in any way."""
    images = [Image.open(io.BytesIO(PICTURES[n])) for n in ask.images]
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": TEXT}]
    structure = StructuredOutputsParams(json=SCHEMA) if ask.structure else None
    params = SamplingParams(temperature=0.0, max_tokens=ask.most, structured_outputs=structure)
    tools = [{"type": "function", "function": FUNCTION}] if ask.tools else None
    [out] = llm.chat([{"role": "user", "content": parts}], params, tools=tools)
    for said in answers:
        assert said.prompt_tokens == len(out.prompt_token_ids)
        if ask.tools:
            assert json.loads(said.arguments) == json.loads(answers[0].arguments)
            jsonschema.validate(json.loads(said.arguments), SCHEMA)
        else:
            assert said.text == out.outputs[0].text
