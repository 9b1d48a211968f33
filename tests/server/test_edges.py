"""Each limit on what a request may bring, at its edge: as much as the limit is fine, one more is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.parsers.tools.styles import STYLES
from quire.server.limits import Limits
from quire.server.tools import MAX_TOOLS
from quire.types import MAX_STRUCTURE_CHARS
from tests.server.doubles import HI, answers, check_error, served

pytestmark = pytest.mark.anyio

LIMITS = Limits()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def nested(depth: int) -> Any:
    """metadata that makes a body nested so deep."""
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return value


def schema(size: int) -> str:
    """A JSON schema of so many characters."""
    bare = json.dumps({"type": "string", "description": ""}, separators=(",", ":"))
    return json.dumps({"type": "string", "description": "d" * (size - len(bare))}, separators=(",", ":"))


Edge = tuple[str, int, Callable[[int], dict[str, Any]], str | None]
EDGES: dict[str, Edge] = {
    "n": (COMPLETIONS, LIMITS.max_n, lambda most: {"n": most}, "n"),
    "n of a chat": (CHAT, LIMITS.max_n, lambda most: {"n": most}, "n"),
    "prompts": (COMPLETIONS, LIMITS.max_prompts, lambda most: {"prompt": ["a"] * most}, "prompt"),
    "answers": (COMPLETIONS, 8, lambda most: {"prompt": ["a"] * most, "n": LIMITS.max_answers // 8}, "n"),
    "depth": (COMPLETIONS, LIMITS.max_depth, lambda most: {"metadata": nested(most)}, "metadata"),
    "lists": (COMPLETIONS, LIMITS.max_containers - 2, lambda most: {"metadata": [[]] * most}, None),
    "stops": (COMPLETIONS, LIMITS.max_stop_strings, lambda most: {"stop": ["zz"] * most}, "stop"),
    "characters of stops": (CHAT, LIMITS.max_stop_chars, lambda most: {"stop": ["z" * (most - 5), "z" * 5]}, "stop"),
    "bad words": (COMPLETIONS, LIMITS.max_bad_words, lambda most: {"bad_words": ["zz"] * most}, "bad_words"),
    "characters of bad words": (CHAT, LIMITS.max_bad_chars, lambda most: {"bad_words": ["z" * most]}, "bad_words"),
    "stop tokens": (CHAT, LIMITS.max_token_ids, lambda most: {"stop_token_ids": [9] * most}, "stop_token_ids"),
    "allowed tokens": (CHAT, 512, lambda most: {"allowed_token_ids": [9] * most}, "allowed_token_ids"),
    "logprobs": (COMPLETIONS, LIMITS.max_logprobs, lambda most: {"logprobs": most}, "logprobs"),
    "tools": (
        CHAT,
        MAX_TOOLS,
        lambda most: {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(most)]},
        "tools",
    ),
    "a schema": (COMPLETIONS, MAX_STRUCTURE_CHARS, lambda most: {"guided_json": schema(most)}, "guided_json"),
}


@pytest.mark.parametrize("name", EDGES)
async def test_as_much_as_the_limit_is_fine_and_one_more_is_refused(name: str) -> None:
    path, most, body, param = EDGES[name]
    base: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "the"}
    async with served(answers, room=1 << 16) as server:
        fine = await server.post(path, **{**base, "max_tokens": 4, **body(most)})
        assert fine.status_code == 200, fine.text
        before = len(server.port.submitted)
        check_error(await server.post(path, **{**base, "max_tokens": 4, **body(most + 1)}), 400, param)
        assert len(server.port.submitted) == before


def objects(depth: int) -> Any:
    value: Any = {"x": 1}
    for _ in range(depth - 1):
        value = {"x": value}
    return value


def deep(depth: int) -> list[tuple[str, dict[str, Any], str]]:
    """Bodies nested so deep in a call's arguments, a tool's schema or a structure, and the field."""
    schema: Any = {"type": "string"}
    for _ in range((depth - 7) // 2):
        schema = {"type": "object", "properties": {"x": schema}}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": objects(depth - 5)}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    called = {"function": {"name": "f", "arguments": objects(depth - 6)}}
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    talk = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    return [
        ("/v1/messages", {"messages": talk, "max_tokens": 4}, "messages"),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [called]}, *HI]}, "messages"),
        (CHAT, {"messages": HI, "tools": tools, "tool_choice": "required", "max_tokens": 4}, "tools"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}, "tools"),
        (COMPLETIONS, {"prompt": "the", "guided_json": schema, "max_tokens": 4}, "guided_json"),
    ]


@pytest.mark.parametrize("parser", STYLES)
async def test_calls_and_schemas_may_be_nested_as_deep_as_the_limit(parser: str) -> None:
    async with served(answers, room=1 << 16, about={"tool_parser": parser}) as server:
        for path, body, _ in deep(LIMITS.max_depth):
            fine = await server.post(path, **body)
            assert fine.status_code == 200, (path, fine.text)


async def test_what_is_deeper_is_refused_by_the_name_of_its_field() -> None:
    async with served(answers, room=1 << 16) as server:
        for path, body, field in deep(LIMITS.max_depth + 10):
            refused = await server.post(path, **body)
            assert refused.status_code == 400 and f"{field}: the JSON is nested more than 64 deep" in refused.text
        assert not server.port.submitted


async def test_bodies_may_be_as_large_as_the_limit() -> None:
    async with served(limits=Limits(max_body_bytes=1000)) as server:
        for size, status in ((1000, 200), (1001, 413)):
            body = b'{"prompt": "the", "max_tokens": 4, "user": "'
            body += b"u" * (size - len(body) - 2) + b'"}'
            headers = {"content-type": "application/json"}
            assert (await server.client.post(COMPLETIONS, content=body, headers=headers)).status_code == status


async def test_the_queue_may_be_as_long_as_the_limit() -> None:
    async with served(max_queued=5) as server:
        assert (await server.post(COMPLETIONS, prompt="the", n=5, max_tokens=4)).status_code == 200
        check_error(await server.post(COMPLETIONS, prompt="the", n=6, max_tokens=4), 400, "n")
