"""Anthropic's Messages, as the official client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from anthropic import APIStatusError, AsyncAnthropic, BadRequestError, beta_async_tool

from quire.types import RequestStepOutput
from tests.server.doubles import ANSWER, TOKENIZER, Served, served
from tests.server.test_tools import CALLS, KNOWS, QWEN, SCHEMA, THOUGHT, speaking

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"name": "weather", "description": "How it is", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {}},
]


@asynccontextmanager
async def speaking_with(*args: Any, **options: Any) -> AsyncIterator[tuple[Served, AsyncAnthropic]]:
    async with served(*args, **options) as server:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app))
        async with AsyncAnthropic(api_key="k", base_url="http://server", http_client=http, max_retries=0) as client:
            yield server, client


async def test_a_message_has_anthropics_shape() -> None:
    async with speaking_with() as (server, client):
        made = await client.messages.create(
            model="tiny", max_tokens=64, messages=HI, system="Be kind.", extra_body={"temperature": 0.5}
        )
        assert (made.type, made.role, made.model, made.id[:4]) == ("message", "assistant", "tiny", "msg_")
        assert [block.to_dict() for block in made.content] == [{"type": "text", "text": ANSWER}]
        assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
        request = server.port.submitted[-1]
        assert TOKENIZER.decode(request.prompt).startswith("<|im_start|>system\nBe kind.<|im_end|>")
        assert (request.max_new_tokens, request.sampling.temperature) == (64, 0.5)
        assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == len(request.prompt)
        assert made.usage.output_tokens == len(TOKENIZER.encode(ANSWER)) + 1


async def test_tool_runners_go_on_without_a_thread() -> None:
    """Anthropic's runner asks for a thread first, and sends the whole conversation where there is none."""

    @beta_async_tool
    async def now() -> str:
        """The time."""
        return "noon"

    ask: Any = {"model": "tiny", "max_tokens": 64, "messages": HI}
    async with speaking_with(speaking("It is noon."), room=1024) as (server, client):
        made = await client.beta.messages.tool_runner(**ask, tools=[now]).until_done()
        assert made.content[0].text == "It is noon." and len(server.port.submitted) == 1
        thread = client.beta.messages.thread(**ask)
        with pytest.raises(BadRequestError, match="send the whole conversation") as caught:
            await thread.send()
        assert caught.value.body["error"]["details"] == {  # type: ignore[index]
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }


async def test_the_stop_reason_is_anthropics() -> None:
    async with speaking_with() as (_, client):
        made = await client.messages.create(model="tiny", max_tokens=2, messages=HI)
        assert made.stop_reason == "max_tokens"
        made = await client.messages.create(model="tiny", max_tokens=64, messages=HI, stop_sequences=["boat"])
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "boat")


async def test_a_stream_builds_the_same_message() -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (ANSWER, {}, {}),
        (CALLS, {"tools": TOOLS}, {"template": KNOWS}),
        (THOUGHT, {}, {"about": QWEN}),
    ]
    for text, rest, options in cases:
        async with speaking_with(speaking(text), room=1024, **options) as (_, client):
            whole = await client.messages.create(model="tiny", max_tokens=200, messages=HI, **rest)
            async with client.messages.stream(model="tiny", max_tokens=200, messages=HI, **rest) as stream:
                kinds = [event.type async for event in stream]
                made = await stream.get_final_message()
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)

            def shown(message: Any) -> list[dict[str, Any]]:
                return [{k: v for k, v in block.to_dict().items() if k != "id"} for block in message.content]

            assert shown(made) == shown(whole)
            assert (made.stop_reason, made.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


async def test_tools_are_called_and_their_results_sent_back() -> None:
    async with speaking_with(speaking(CALLS), template=KNOWS, room=1024) as (server, client):
        made = await client.messages.create(model="tiny", max_tokens=200, messages=HI, tools=TOOLS)
        assert made.stop_reason == "tool_use"
        text, weather, now = (block.to_dict() for block in made.content)
        assert text == {"type": "text", "text": "Look:"}
        assert (weather["name"], weather["input"], now["input"]) == ("weather", {"city": "Paris"}, {})
        back: Any = [
            *HI,
            {"role": "assistant", "content": [text, weather]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": weather["id"],
                        "content": [{"type": "text", "text": "warm"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ]
        await client.messages.create(model="tiny", max_tokens=8, messages=back, tools=TOOLS)
        said = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert said.index("Look:") < said.index("tool\nwarm") < said.index("user\nand?")


async def test_thoughts_are_blocks_and_come_back_as_such() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }}{% endfor %}{{ enable_thinking }}"
    )
    about = QWEN | {"template_arguments": frozenset({"enable_thinking"})}
    async with speaking_with(speaking(THOUGHT), about=about, template=template, room=1024) as (server, client):
        made = await client.messages.create(
            model="tiny", max_tokens=200, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}
        )
        thinking, text = (block.to_dict() for block in made.content)
        assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "Let me see.", "Yes.")
        assert TOKENIZER.decode(server.port.submitted[-1].prompt).endswith("True")
        second: Any = {"type": "thinking", "thinking": "Well.", "signature": ""}
        more: Any = [*HI, {"role": "assistant", "content": [thinking, second, text]}, *HI]
        await client.messages.create(model="tiny", max_tokens=9, messages=more, thinking={"type": "disabled"})
        said = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert "assistant:Let me see.\nWell.|Yes." in said and said.endswith("False")


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "now"}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
async def test_tool_choice_is_understood(choice: Any, forced: bool) -> None:
    async with speaking_with(template=KNOWS, room=1024) as (server, client):
        await client.messages.create(model="tiny", max_tokens=9, messages=HI, tools=TOOLS, tool_choice=choice)
        assert (server.port.submitted[-1].sampling.structured_outputs is not None) == forced


async def test_an_assistants_last_message_is_gone_on_with() -> None:
    async with speaking_with() as (server, client):
        messages: Any = [*HI, {"role": "assistant", "content": "Well,"}]
        await client.messages.create(model="tiny", max_tokens=9, messages=messages)
        assert TOKENIZER.decode(server.port.submitted[-1].prompt).endswith("assistant\nWell,")


async def test_tokens_are_counted_without_an_answer() -> None:
    async with speaking_with() as (server, client):
        counted = await client.messages.count_tokens(model="tiny", messages=HI, system="Be kind.")
        assert server.port.submitted == []
        made = await client.messages.create(model="tiny", max_tokens=1, messages=HI, system="Be kind.")
        assert counted.input_tokens == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "nmae": 1}]}, "messages[0].nmae"),
    ({"messages": []}, "messages is empty"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "window_20250124", "name": "bash"}]}, "window_20250124"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "does not think"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"max_token": 3}, "max_tokens"),
    ({"stop_sequences": ["a"], "stop": ["b"]}, "stop_sequences are the same"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences: at most"),
    ({"stop": ["a"] * 65}, "stop: at most"),
]


async def test_errors_have_anthropics_shape() -> None:
    async with served(api_keys=("k",)) as server:
        ok: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
        for wrong, words in BAD:
            response = await server.client.post("/v1/messages", json={**ok, **wrong}, headers={"x-api-key": "k"})
            assert response.status_code == 400, response.text
            body = response.json()
            assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
            assert words in body["error"]["message"], body
        response = await server.client.post("/v1/messages", json=ok)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        response = await server.client.get("/v1/messages", headers={"x-api-key": "k"})
        assert (response.status_code, response.json()["type"]) == (405, "error")
        response = await server.client.post("/v1/messages", json={**ok, "model": "x"}, headers={"x-api-key": "k"})
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        assert server.port.submitted == []


async def test_the_client_raises_what_the_server_says_also_in_mid_stream() -> None:
    async with speaking_with() as (_, client):
        with pytest.raises(BadRequestError, match="max_tokens"):
            await client.messages.create(model="tiny", max_tokens=500, messages=HI)
    async with speaking_with(None) as (server, client):

        async def break_off() -> None:
            while not server.port.submitted:
                await asyncio.sleep(0)
            id = server.port.submitted[0].id
            server.port.on_tokens([RequestStepOutput(id, (TOKENIZER.encode("a")[0],))])
            await asyncio.sleep(0)
            server.port.on_tokens([RequestStepOutput(id, (), "error", error="the card is on fire")])

        breaking = asyncio.ensure_future(break_off())
        with pytest.raises(APIStatusError, match="on fire"):
            async for _ in await client.messages.create(model="tiny", max_tokens=9, messages=HI, stream=True):
                pass
        await breaking
