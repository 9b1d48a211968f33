"""However an answer is cut into steps, its stream says what the whole answer says, at every endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.types import Request
from tests.server.doubles import EOS, HI, TOKENIZER, Served, served

TOOL = {"name": "now", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "€ \\n😀"}}\n</tool_call>'
TWO = {
    "hermes": f"{CALL}\n{CALL}",
    "llama3_json": '{"name": "now", "parameters": {"a": "€"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {"a": "😀"}}, {"name": "now", "arguments": {}}]',
    "gemma": '```tool_code\n[now(a="€"), now()]\n```',
}
"""Two calls, as each family writes them."""

PIECES = ("a dog", " ", "\n", "€5 😀", "e\u0301", "<think>", "</think>", CALL, "<tool_call>", "</tool_", "{", '"a": 1')

Parsed = dict[str, Any]


async def begun(server: Served, pending: asyncio.Future[httpx.Response]) -> Request:
    """What the engine is asked for."""
    before = len(server.port.submitted)
    while len(server.port.submitted) == before:
        await asyncio.sleep(0)
        assert not pending.done(), pending.result().text
    return server.port.submitted[-1]


async def streamed(server: Served, path: str, body: Parsed, steps: list[list[int]]) -> str:
    """The stream of an answer that is made in these steps."""
    pending = asyncio.ensure_future(server.post(path, **{**body, "stream": True}))
    request = await begun(server, pending)
    for i, step in enumerate(steps):
        last: Parsed = {"finish": "stop", "stop_token": EOS} if i == len(steps) - 1 else {}
        server.port.say(request, *step, **last)
        for _ in range(len(step) % 3):  # some steps are heard together
            await asyncio.sleep(0)
    response = await pending
    assert response.status_code == 200, response.text
    return response.text


def data(text: str) -> list[Parsed]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith(("data: ", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def completion(chunks: list[Parsed]) -> Parsed:
    choices = [chunk["choices"][0] for chunk in chunks]
    return {"text": "".join(c["text"] for c in choices), "finish": choices[-1]["finish_reason"]}


def completion_whole(answer: Parsed) -> Parsed:
    [choice] = answer["choices"]
    return {"text": choice["text"], "finish": choice["finish_reason"]}


def chat(chunks: list[Parsed]) -> Parsed:
    said: Parsed = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        said["content"] += delta.get("content") or ""
        said["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(said["calls"])
                said["calls"].append([call["function"]["name"], ""])
            said["calls"][call["index"]][1] += call["function"].get("arguments", "")
        assert delta or choice["finish_reason"], "a chunk says nothing"
    return {**said, "finish": chunks[-1]["choices"][0]["finish_reason"]}


def chat_whole(answer: Parsed) -> Parsed:
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
        "finish": choice["finish_reason"],
    }


def responses(events: list[Parsed]) -> Parsed:
    said: Parsed = {"text": "", "reasoning": "", "calls": {}}
    for event in events:
        kind = event["type"]
        if kind == "response.output_text.delta":
            said["text"] += event["delta"]
        elif kind.startswith("response.reasoning") and kind.endswith(".delta"):
            said["reasoning"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            said["calls"][event["output_index"]] = said["calls"].get(event["output_index"], "") + event["delta"]
    assert responses_whole(events[-1]["response"]) == {**said, "calls": list(said["calls"].values())}
    return {**said, "calls": list(said["calls"].values())}


def responses_whole(answer: Parsed) -> Parsed:
    said: Parsed = {"text": "", "reasoning": "", "calls": []}
    for item in answer["output"]:
        if item["type"] == "message":
            said["text"] += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            said["calls"].append(item["arguments"])
        else:
            said["reasoning"] += "".join(part["text"] for part in item.get("content") or item["summary"])
    return said


def messages(events: list[Parsed]) -> Parsed:
    said: Parsed = {"text": "", "thinking": "", "calls": {}}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                said["calls"][event["index"]] = said["calls"].get(event["index"], "") + delta["partial_json"]
            elif delta["type"] in ("text_delta", "thinking_delta"):
                kind = delta["type"].removesuffix("_delta")
                said[kind] += delta[kind]
    return {**said, "calls": [json.loads(call or "{}") for call in said["calls"].values()]}


def messages_whole(answer: Parsed) -> Parsed:
    said: Parsed = {"text": "", "thinking": "", "calls": []}
    for block in answer["content"]:
        if block["type"] == "tool_use":
            said["calls"].append(block["input"])
        else:
            said[block["type"]] += block[block["type"]]
    return said


def ollama(lines: list[Parsed]) -> Parsed:
    said: Parsed = {"text": "", "thinking": "", "calls": []}
    for line in lines:
        about = line.get("message", line)
        said["text"] += about["content"] if "message" in line else about["response"]
        said["thinking"] += about.get("thinking", "")
        said["calls"] += [call["function"] for call in about.get("tool_calls", ())]
    return {**said, "end": {name: line[name] for name in ("done", "done_reason", "eval_count")}}


def ollama_whole(answer: Parsed) -> Parsed:
    return ollama([answer])


FUNCTION = {"type": "function", "function": TOOL}
ENDPOINTS = (
    ("/api/chat", {"messages": HI, "tools": [FUNCTION], "stream": False}, ollama, ollama_whole),
    ("/api/generate", {"prompt": "hi", "stream": False}, ollama, ollama_whole),
    ("/v1/completions", {"prompt": "the"}, completion, completion_whole),
    ("/v1/chat/completions", {"messages": HI, "tools": [FUNCTION]}, chat, chat_whole),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **TOOL}]}, responses, responses_whole),
    (
        "/v1/messages",
        {
            "messages": HI,
            "model": "tiny",
            "max_tokens": 900,
            "tools": [{"name": "now", "input_schema": TOOL["parameters"]}],
        },
        messages,
        messages_whole,
    ),
)


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 7), max_size=60),
    thinks=st.booleans(),
    family=st.sampled_from(sorted(TWO)),
)
@example(pieces=[CALL, CALL], cuts=[], thinks=False, family="hermes")
@example(pieces=["<think>", "€5 😀", "</think>", "a dog", CALL], cuts=[3, 1, 2] * 9, thinks=True, family="hermes")
@settings(max_examples=40, deadline=None)
def test_however_an_answer_is_cut_its_stream_adds_up_to_the_whole(
    pieces: list[str], cuts: list[int], thinks: bool, family: str
) -> None:
    asyncio.run(cut(pieces, cuts, {"reasoning_parser": "qwen3" if thinks else "none", "tool_parser": family}))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("family", sorted(TWO))
def test_two_calls_of_every_family_come_as_two_at_every_endpoint(family: str, size: int) -> None:
    parsed = asyncio.run(cut([TWO[family]], [size] * 400, {"tool_parser": family}))
    for path, said in parsed.items():
        assert path in ("/v1/completions", "/api/generate") or len(said["calls"]) == 2, (path, said)


async def cut(pieces: list[str], cuts: list[int], about: Parsed) -> dict[str, Parsed]:
    """What each endpoint's stream says of an answer made in these steps: what its whole answer says."""
    tokens = [*TOKENIZER.encode("".join(pieces)), EOS]
    steps = []
    while tokens:
        size = cuts[len(steps)] if len(steps) < len(cuts) else 1
        steps.append(tokens[:size])
        tokens = tokens[size:]

    parsed = {}
    async with served(None, room=4000, about=about) as server:
        for path, body, parts, whole in ENDPOINTS:
            parsed[path] = stream = parts(data(await streamed(server, path, body, steps)))
            at_once = asyncio.ensure_future(server.post(path, **body))
            everything = [token for step in steps for token in step]
            server.port.say(await begun(server, at_once), *everything, finish="stop", stop_token=EOS)
            assert stream == whole((await at_once).json()), path
    return parsed
