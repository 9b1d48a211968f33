"""OpenAI's Responses, as the official client sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.server.doubles import ANSWER, TOKENIZER, Served, check_error, served
from tests.server.test_tools import CALLS, KNOWS, QWEN, SCHEMA, THOUGHT, speaking

pytestmark = pytest.mark.anyio

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False},
]


@asynccontextmanager
async def speaking_with(*args: Any, **options: Any) -> AsyncIterator[tuple[Served, AsyncOpenAI]]:
    async with served(*args, **options) as server:
        http: Any = server.client
        yield server, AsyncOpenAI(api_key="k", base_url="http://server/v1", http_client=http, max_retries=0)


async def test_a_response_has_openais_shape() -> None:
    async with speaking_with() as (server, client):
        made = await client.responses.create(
            model="tiny", input="hi", instructions="Be kind.", max_output_tokens=64, store=True, metadata={"a": "b"}
        )
        assert (made.object, made.status, made.id[:5]) == ("response", "completed", "resp_")
        assert made.output_text == ANSWER
        assert [item.type for item in made.output] == ["message"]
        assert made.error is None and made.incomplete_details is None
        request = server.port.submitted[-1]
        assert TOKENIZER.decode(request.prompt).startswith("<|im_start|>system\nBe kind.")
        assert made.usage is not None and made.usage.input_tokens == len(request.prompt)
        assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


async def test_input_tokens_are_those_of_a_response_and_nothing_is_generated() -> None:
    async with speaking_with(template=KNOWS, room=1024) as (server, client):
        fields: Any = {"model": "tiny", "input": "hi", "instructions": "Be kind.", "tools": TOOLS}
        counted = await client.responses.input_tokens.count(**fields)
        assert not server.port.submitted
        usage = (await client.responses.create(**fields)).usage
        assert usage is not None and counted.input_tokens == usage.input_tokens > 2
        assert counted.object == "response.input_tokens"


async def test_an_answer_cut_short_says_so() -> None:
    async with speaking_with() as (_, client):
        made = await client.responses.create(model="tiny", input="hi", max_output_tokens=2)
        assert made.status == "incomplete" and made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        kinds = [e.type async for e in await client.responses.create(input="hi", max_output_tokens=2, stream=True)]
        assert kinds[-1] == "response.incomplete"


CASES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (ANSWER, {}, {}, ["message"]),
    (CALLS, {"tools": TOOLS}, {"template": KNOWS}, ["message", "function_call", "function_call"]),
    (THOUGHT, {}, {"about": QWEN}, ["reasoning", "message"]),
]


@pytest.mark.parametrize(("text", "rest", "options", "kinds"), CASES)
async def test_a_stream_builds_the_same_response(text: str, rest: Any, options: Any, kinds: list[str]) -> None:
    async with speaking_with(speaking(text), room=1024, **options) as (_, client):
        whole = await client.responses.create(model="tiny", input="hi", **rest)
        assert [item.type for item in whole.output] == kinds
        events = [e async for e in await client.responses.create(model="tiny", input="hi", stream=True, **rest)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        last: Any = events[-1]
        assert last.type == "response.completed"

        def shown(response: Any) -> list[dict[str, Any]]:
            return [{k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")} for item in response.output]

        assert shown(last.response) == shown(whole)
        pieces: Any = [e for e in events if e.type == "response.output_text.delta"]
        assert "".join(e.delta for e in pieces) == whole.output_text
        given: Any = [e for e in events if e.type == "response.function_call_arguments.delta"]
        called: Any = [item for item in whole.output if item.type == "function_call"]
        assert "".join(e.delta for e in given) == "".join(item.arguments for item in called)
        done: Any = [e for e in events if e.type == "response.output_item.done"]
        assert [e.item.to_dict() for e in done] == [item.to_dict() for item in last.response.output]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_log_probability_is_that_of_one_message(stream: bool) -> None:
    text = CALLS + "\nthe dog"
    async with speaking_with(speaking(text), template=KNOWS, room=1024) as (_, client):
        options: Any = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "stream": stream}
        made: Any = await client.responses.create(model="tiny", input="hi", **options)
        if stream:
            made = [event async for event in made][-1].response
    messages = [item for item in made.output if item.type == "message"]
    assert [message.content[0].text for message in messages] == ["Look:", "the dog"]
    shown = [[one.token for one in message.content[0].logprobs] for message in messages]
    assert "".join(shown[0] + shown[1]) == text + "<|end|>", "calls between two messages count to one of them"


async def test_the_clients_own_gathering_of_a_stream_agrees() -> None:
    async with speaking_with(speaking(CALLS), template=KNOWS, room=1024) as (_, client):
        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


async def test_calls_and_results_and_thoughts_go_back() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %};{% endfor %}"
        "{{ tools | length if tools }}"
    )
    async with speaking_with(template=template, room=1024) as (server, client):
        talk: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
            {"type": "message", "role": "assistant", "content": "Now:"},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": "warm"},
        ]
        await client.responses.create(model="tiny", input=talk, tools=TOOLS)
        said = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert said == "user:|hi;assistant:hm|Look:;assistant:|Now:weatherRome;tool:|warm;2"


async def test_a_schema_for_the_text_and_forced_calls_bind() -> None:
    async with speaking_with(template=KNOWS, room=1024) as (server, client):
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
        await client.responses.create(model="tiny", input="hi", text=form)
        one = server.port.submitted[-1].sampling.structured_outputs
        assert one is not None and '"city"' in one.kind[1] and one.kind[0] == "json"
        choice: Any = {"type": "function", "name": "now"}
        await client.responses.create(model="tiny", input="hi", tools=TOOLS, tool_choice=choice)
        one = server.port.submitted[-1].sampling.structured_outputs
        assert one is not None and "now" in one.kind[1] and "weather" not in one.kind[1]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"conversation": "x"}, "conversation", "previous_response_id"),
    ({"background": True, "store": False}, "background", "store: true"),
    ({"truncation": "auto"}, "truncation", "never cut"),
    ({"input": []}, "input", "input is empty"),
    ({"messages": []}, "messages", "unknown field"),
    ({"input": 3}, "input", "expected"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text only"),
    ({"include": ["everything"]}, "include", "is not available"),
    ({"tools": [{"type": "window"}]}, "tools", "window"),
    ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format", "JSON schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type must be"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type must be"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be between 1"),
    ({"max_output_token": 1}, "max_output_token", "max_output_tokens"),
]


async def test_what_cannot_be_had_is_refused_by_name() -> None:
    async with served() as server:
        for wrong, param, words in BAD:
            response = await server.post("/v1/responses", **{"model": "tiny", "input": "hi", **wrong})
            check_error(response, 400, param, words)
        assert server.port.submitted == []
