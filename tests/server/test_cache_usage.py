"""What usage says of the prefix cache on every API: tokens found there and tokens put into it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.doubles import served
from tests.server.engine_port import EnginePort

pytestmark = pytest.mark.anyio

TEXT = "read the file and tell me what it says " * 4
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def asked(path: str, text: str, **more: Any) -> dict[str, Any]:
    """A request with one new token, of which nothing is cached."""
    prompt = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}
    few = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
    return prompt.get(path, {"messages": [{"role": "user", "content": text}]}) | few | more


def counted(path: str, usage: dict[str, Any]) -> tuple[int, int, int]:
    """Of the prompt: all tokens, those found in the cache, those put into it."""
    if path == "/v1/messages":
        found, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return usage["input_tokens"] + found + written, found, written
    whole, details = ("input_tokens", "input_tokens_details"), ("prompt_tokens", "prompt_tokens_details")
    total, within = whole if path == "/v1/responses" else details
    assert usage[within]["created_cache_tokens"] == usage[within]["cache_write_tokens"]
    return usage[total], usage[within]["cached_tokens"], usage[within]["cache_write_tokens"]


async def usage_of(server: Any, path: str, body: dict[str, Any]) -> tuple[int, int, int]:
    """The last usage of an answer, streamed or not."""
    answer = await server.post(path, **body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return counted(path, answer.json()["usage"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    usages = [event.get("response", event).get("usage") for event in events]
    return counted(path, [usage for usage in usages if usage][-1])


def streamed(path: str) -> dict[str, Any]:
    return {"stream": True} | ({"stream_options": {"include_usage": True}} if "completions" in path else {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompts_whole_blocks_are_written_once_and_then_found(path: str, stream: bool) -> None:
    port = EnginePort()
    async with served(port=port, room=2000) as server:
        more = streamed(path) if stream else {}
        total, found, written = await usage_of(server, path, asked(path, TEXT, **more))
        assert (found, written) == (0, total // 16 * 16)
        assert len(port.kv.prefix_cache.edges) == written // 16  # type: ignore[attr-defined]
        again = await usage_of(server, path, asked(path, TEXT, **more))
        assert again == (total, (total - 1) // 16 * 16, 0)
        longer = await usage_of(server, path, asked(path, TEXT * 2, **more))
        assert longer[1] and longer[2] and longer[1] + longer[2] == longer[0] // 16 * 16


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_prefix_cache_nothing_is_written(path: str) -> None:
    async with served(port=EnginePort(caching=False), room=2000) as server:
        for _ in range(2):
            assert (await usage_of(server, path, asked(path, TEXT)))[1:] == (0, 0)


@pytest.mark.parametrize("more", [{"n": 3}, {"prompt_logprobs": 0}, {"return_cache_details": True}])
@pytest.mark.parametrize("path", PATHS[:2])
async def test_choices_and_prompts_computed_again_count_each_block_once(path: str, more: dict[str, Any]) -> None:
    async with served(port=EnginePort(), room=2000) as server:
        total, found, written = await usage_of(server, path, asked(path, TEXT, **more))
        assert (found, written) == (0, total // 16 * 16)
        total, found, written = await usage_of(server, path, asked(path, TEXT, **more))
        assert written == 0 and bool(found) == ("prompt_logprobs" not in more)


@pytest.mark.parametrize("chunk", [7, 64])
async def test_requests_at_once_count_every_block_of_the_cache_once(chunk: int) -> None:
    port = EnginePort(max_chunk_tokens=chunk)
    texts = [TEXT[: 20 + 9 * i] + "x" * (i % 3) for i in range(16)]
    async with served(port=port, room=2000) as server:
        made = await asyncio.gather(*(usage_of(server, "/v1/completions", asked("/v1/completions", t)) for t in texts))
    assert sum(written for _, _, written in made) == 16 * len(port.kv.prefix_cache.edges)  # type: ignore[attr-defined]
    assert all(found + written <= total for total, found, written in made)


async def test_prompts_of_one_request_add_up() -> None:
    port = EnginePort()
    async with served(port=port, room=2000) as server:
        one = await usage_of(
            server, "/v1/completions", asked("/v1/completions", "") | {"prompt": [TEXT, "now " + TEXT]}
        )
    assert one[2] == 16 * len(port.kv.prefix_cache.edges)  # type: ignore[attr-defined]


async def test_a_preempted_request_counts_from_its_last_start() -> None:
    port = EnginePort(pages=24, max_chunk_tokens=16)
    async with served(port=port, room=2000) as server:
        bodies = [asked("/v1/completions", f"{i} " + TEXT, max_tokens=60, ignore_eos=True) for i in range(6)]
        made = await asyncio.gather(*(usage_of(server, "/v1/completions", body) for body in bodies))
    assert port.engine.scheduler.num_preemptions > 0
    assert all(found + written <= total and (found + written) % 16 == 0 for total, found, written in made)
