"""Whatever stands anywhere inside of a request, it is answered or refused: never is it the server's own error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.doubles import served

pytestmark = pytest.mark.anyio

ODD: tuple[Any, ...] = (None, 5, -1.5, True, "x", "", [], [5], ["x"], [None], {}, {"a": 1}, {"type": ["x"]})

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "strict": True, "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TEXT = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}

REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": ["q"], "logit_bias": {"3": 1.0}, "stop_token_ids": [1]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [TEXT], "name": "n"},
                {"role": "assistant", "content": "c", "reasoning": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "r"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"x": 1},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"type": "reasoning_text", "text": "h"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "include": ["message.output_text.logprobs"],
        },
    ),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    (
        "/v1/messages",
        {
            "max_tokens": 1,
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [TEXT]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "h", "signature": "s"},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT]}, TEXT]},
            ],
            "tools": [{"name": "f", "type": "custom", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["q"],
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "none"}}),
    ("/v1/generate", {"prompt": "x", "max_new_tokens": 1, "stop": ["q"]}),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    ("/detokenize", {"tokens": [1, 2]}),
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path to everything inside of it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (key,)
        yield from ((key, *rest) for rest in places(one))


def mangled(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The request with each odd value in each place, one at a time."""
    for *path, last in places(request):
        for odd in ODD:
            made = around = copy.deepcopy(request)
            for key in path:
                around = around[key]
            around[last] = odd
            yield made


@pytest.mark.parametrize(("path", "request_"), REQUESTS, ids=[f"{i}{path}" for i, (path, _) in enumerate(REQUESTS)])
async def test_an_odd_value_in_any_place_is_answered_or_refused(path: str, request_: dict[str, Any]) -> None:
    async with served(room=1000) as server:
        assert (await server.client.post(path, json=request_)).status_code == 200
        for body in mangled(request_):
            answer = await server.client.post(path, json=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            assert '"code":500' not in answer.text, body
