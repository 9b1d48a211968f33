"""The spellings of structured output over HTTP: one meaning, conflicts named, errors in the client's own words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.server.limits import Limits
from quire.types import RequestStepOutput, StructuredOutputsParams
from tests.frontend.ports import FakePort
from tests.server.doubles import HI, check_error, served

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))

SPELLINGS: list[tuple[dict[str, Any], StructuredOutputsParams]] = [
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        StructuredOutputsParams(json=SCHEMA),
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputsParams(json=SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputsParams(json_object=True)),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=("a", "b"))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputsParams(grammar='start: "a"')),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "\n?", "disable_fallback": True}},
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern="\n?"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        StructuredOutputsParams(json=SCHEMA, disable_additional_properties=False),
    ),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, StructuredOutputsParams(json=SCHEMA)),
    (
        {"guided_json": TEXT, "guided_whitespace_pattern": " ?"},
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
    ),
    ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, StructuredOutputsParams(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=("a", "b"))),
    ({"guided_grammar": 'start: "a"'}, StructuredOutputsParams(grammar='start: "a"')),
]


async def test_all_fields_for_a_structure_mean_the_same_on_every_endpoint() -> None:
    async with served() as server:
        for body, want in SPELLINGS:
            for path, rest in (
                ("/v1/chat/completions", {"messages": HI}),
                ("/v1/completions", {"prompt": "the"}),
                ("/v1/generate", {"prompt": "the"}),
            ):
                response = await server.post(path, **rest, **body)
                assert response.status_code == 200, response.text
                got = server.port.submitted[-1].sampling.structured_outputs
                assert got == want, (path, body)
                assert got is not None and got.param in body


async def test_schemas_are_open_where_the_server_says_so_unless_the_request_says_otherwise() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    async with served(limits=Limits(closed_schemas=False), room=1024) as server:
        for body in ({"guided_json": SCHEMA}, {"response_format": {"type": "json_schema", "schema": SCHEMA}}):
            await server.chat(**body)
            assert server.port.submitted[-1].sampling.structured_outputs.disable_additional_properties is False
        await server.chat(structured_outputs={"json": SCHEMA, "disable_additional_properties": True})
        assert server.port.submitted[-1].sampling.structured_outputs.disable_additional_properties is True
        await server.chat(tools=[tool], tool_choice="required")
        assert "additionalProperties" not in server.port.submitted[-1].sampling.structured_outputs.grammar
    async with served(room=1024) as server:
        await server.chat(tools=[tool], tool_choice="required")
        assert '"additionalProperties": false' in server.port.submitted[-1].sampling.structured_outputs.grammar


async def test_text_asks_for_nothing() -> None:
    async with served() as server:
        await server.chat(response_format={"type": "text"}, structured_outputs=None, guided_json=None)
        assert server.port.submitted[-1].sampling.structured_outputs is None


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json"}}, "response_format.type", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
        "response_format",
        "twice",
    ),
    ({"response_format": {"type": "json_schema", "json_shema": {}}}, "response_format.json_shema", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
        "response_format.json_schema.shema",
        "schema",
    ),
    ({"response_format": {}}, "type", "required"),
    ({"response_format": "json"}, "response_format", "expected object"),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "response_format and guided_regex",
    ),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json", "cannot be used together"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "json_object and regex"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "Did you mean 'regex'?"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "list of texts"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "none of them empty"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "expected array"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "use grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs", "is an object"),
    ({"structured_outputs": {"json": "[" * 90000}}, "structured_outputs", "nested too deeply"),
    ({"guided_json": '{"a": NaN}'}, "guided_json", "not JSON"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "at most 262144"),
    ({"guided_choice": ["a" * 200_000, "b" * 200_000]}, "guided_choice", "at most 262144"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "cannot be used together"),
]


async def test_what_cannot_be_meant_is_a_400_that_names_it_and_reaches_no_engine() -> None:
    async with served() as server:
        for body, param, words in BAD:
            for path, rest in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "the"})):
                check_error(await server.post(path, **rest, **body), 400, param, words)
        assert server.port.submitted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_the_engine_refuses_is_a_400_before_any_token_streaming_or_not(stream: bool) -> None:
    class Refusing(FakePort):
        def submit(self, requests: Any) -> None:
            super().submit(requests)
            for request in requests:
                structure = request.sampling.structured_outputs
                why = f"{structure.param}: the JSON schema cannot be used: Invalid type: strng"
                event = RequestStepOutput(request.id, (), "error", error=why, param=structure.param, status=400)
                asyncio.get_running_loop().call_soon(self.on_tokens, [event])

    async with served(None, port=Refusing()) as server:
        for body in ({"response_format": {"type": "json_schema", "schema": {"type": "strng"}}}, {"guided_json": {}}):
            for path, rest in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": ["a", "b"]})):
                response = await server.post(path, **rest, **body, stream=stream, n=2)
                check_error(response, 400, next(iter(body)), "Invalid type: strng")
