"""What agents send: hints, tools of other kinds, groups of tools, and formats by their several names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.observability.logs import ToolLogger
from quire.observability.observer import ObserverGroup
from quire.server.limits import Limits
from quire.server.tools import HOSTED
from tests.server.doubles import HI, TOKENIZER, check_error, served
from tests.server.test_tools import KNOWS, QWEN, SCHEMA, speaking

pytestmark = pytest.mark.anyio

RECORDED = Path(__file__).parent / "recorded"
CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 40}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 40},
    "/v1/messages": CHAT,
}
SPOKEN = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'

HINTS: list[tuple[str, dict[str, Any]]] = [
    *((path, {"metadata": {"user_id": "x"}, "service_tier": "auto", "store": False}) for path in PATHS),
    *((path, {"safety_identifier": "x", "prompt_cache_key": "x", "user": "x"}) for path in PATHS),
    *((path, {"client_metadata": {"a": "b"}, "verbosity": "high"}) for path in PATHS),
    *((path, {"reasoning_effort": effort}) for path in PATHS for effort in ("none", "low", "xhigh")),
    *((path, {"tools": [], "parallel_tool_calls": value}) for path in list(PATHS)[:2] for value in (True, False)),
    ("/v1/chat/completions", {"prediction": {"type": "content", "content": "x"}}),
    ("/v1/chat/completions", {"stream_options": {"include_obfuscation": False}, "stream": True}),
    ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto", "generate_summary": "concise"}}),
    ("/v1/responses", {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}),
    ("/v1/responses", {"text": {"verbosity": "low"}, "truncation": "disabled", "max_tool_calls": 3}),
    ("/v1/responses", {"stream": True, "stream_options": {"include_obfuscation": True}, "background": False}),
    ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}, "mcp_servers": []}),
    ("/v1/messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
]


@pytest.mark.parametrize(("path", "fields"), HINTS)
async def test_what_changes_nothing_is_taken(path: str, fields: dict[str, Any]) -> None:
    async with served() as server:
        plain = await server.post(path, **PATHS[path])
        hinted = await server.post(path, **PATHS[path], **fields)
        assert (plain.status_code, hinted.status_code) == (200, 200), hinted.text
        first, second = server.port.submitted
        assert first.prompt == second.prompt and first.max_new_tokens == second.max_new_tokens


async def test_an_answer_comes_back_with_what_libraries_note_on_it() -> None:
    async with served() as server:
        for noted in ({}, {"provider_specific_fields": {"refusal": None}, "refusal": None, "function_call": None}):
            talk = [*HI, {"role": "assistant", "content": "Yes?", **noted}, *HI]
            await server.chat(messages=talk, max_tokens=4)
        first, second = server.port.submitted
        assert first.prompt == second.prompt


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_tells_its_usage_in_the_way_of_openrouter_too(path: str) -> None:
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HI}
    async with served() as server:
        for include in (True, False):
            chunks = await server.stream(path, **body, max_tokens=4, usage={"include": include})
            assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [4] * include
        assert (await server.post(path, **body, max_tokens=4, usage={"include": False})).json()["usage"]
        check_error(await server.post(path, **body, usage={"includes": True}), 400, "usage.includes", "'include'")


CHANGES: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/responses", {"include": ["everything"]}, "include", "is not available"),
    ("/v1/responses", {"reasoning": {"effort": 3}}, "reasoning.effort", "must be text"),
    ("/v1/responses", {"reasoning": {"effort": "hihg"}}, "reasoning.effort", "Did you mean 'high'?"),
    ("/v1/responses", {"reasoning": {"depth": 3}}, "reasoning.depth", "unknown field"),
    ("/v1/chat/completions", {"reasoning_effort": "hihg"}, "reasoning_effort", "Did you mean 'high'?"),
    ("/v1/completions", {"prompt": "hi", "reasoning_effort": "high"}, "reasoning_effort", "/v1/chat/completions"),
    (
        "/v1/completions",
        {"prompt": "hi", "disable_additional_properties": True},
        "disable_additional_properties",
        "in ",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), CHANGES)
async def test_what_would_change_an_answer_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    async with served() as server:
        check_error(await server.post(path, **PATHS.get(path, {}), **fields), 400, param, words)
        assert server.port.submitted == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "never edited"),
        ({"output_config": {"effort": 3}}, "output_config.effort must be text"),
        ({"output_config": {"effort": "hihg"}}, "output_config.effort must be one of"),
        ({"output_config": {"style": "x"}}, "output_config.style"),
        ({"output_config": {"format": "json"}}, "output_config.format must be an object"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be text"),
        ({"output_config": {"format": {"type": "text"}}, "output_format": {"type": "text"}}, "are the same"),
        ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.schema must be"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "does not think"),
    ],
)
async def test_what_would_change_a_message_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    async with served() as server:
        response = await server.post("/v1/messages", **CHAT, **fields)
        assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


async def test_the_effort_reaches_the_template_and_none_turns_thinking_off() -> None:
    template = "{{ reasoning_effort }}{{ enable_thinking }}" + KNOWS
    spelled: list[tuple[str, Any]] = [
        ("/v1/chat/completions", lambda effort: {"reasoning_effort": effort}),
        ("/v1/responses", lambda effort: {"reasoning": {"effort": effort}}),
        ("/v1/responses", lambda effort: {"reasoning_effort": effort}),
        ("/v1/messages", lambda effort: {"output_config": {"effort": effort}}),
        ("/v1/messages", lambda effort: {"reasoning_effort": effort}),
    ]
    about = QWEN | {"template_arguments": frozenset({"reasoning_effort", "enable_thinking"})}
    async with served(template=template, about=about) as server:
        for path, fields in spelled:
            for effort, shown in (("high", "highTrue"), ("none", "False")):
                assert (await server.post(path, **PATHS[path], **fields(effort))).status_code == 200
                assert TOKENIZER.decode(server.port.submitted[-1].prompt).startswith(shown + "<|im_start|>")
        await server.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "mine"})
        assert TOKENIZER.decode(server.port.submitted[-1].prompt).startswith("mineTrue<")


async def test_the_format_of_an_answer_is_one_thing_under_each_of_its_names() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    named: list[tuple[str, dict[str, Any]]] = [
        *((path, {"response_format": form}) for path in PATHS),
        ("/v1/responses", {"text": {"format": form}}),
        ("/v1/messages", {"output_config": {"format": form}}),
        ("/v1/messages", {"output_format": form}),
    ]
    async with served() as server:
        for path, fields in named:
            assert (await server.post(path, **PATHS[path], **fields)).status_code == 200
        assert len({request.sampling.structured_outputs for request in server.port.submitted}) == 1
        assert server.port.submitted[0].sampling.structured_outputs is not None


# ---------------------------------------------------------------- hosted tools


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_tools_that_only_others_have_are_left_out_and_named(path: str, stream: bool) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "mcp"}, {"type": "web_search"}]
    async with served(template=KNOWS) as server:
        plain = await server.post(path, **PATHS[path], stream=stream)
        made = await server.post(path, **PATHS[path], stream=stream, tools=tools)
        assert "x-quire-omitted-tools" not in plain.headers
        assert made.headers["x-quire-omitted-tools"] == "web_search, mcp"
        first, second = server.port.submitted
        assert first.prompt == second.prompt
        metrics = (await server.client.get("/metrics")).text
        assert 'quire:omitted_tools_total{engine="0",kind="mcp",model_name="tiny"} 1.0' in metrics


async def test_tools_that_only_others_have_are_refused_where_something_insists_on_them() -> None:
    for kind in HOSTED:
        async with served() as server:
            for choice, words in (
                ("required", f"tool_choice required needs tools: this server has no {kind}"),
                ({"type": kind}, f"this server has no {kind}: choose a function"),
                ({"type": "function", "function": {"name": "x"}}, f"among tools: this server has no {kind}"),
            ):
                response = await server.post("/v1/chat/completions", **CHAT, tools=[{"type": kind}], tool_choice=choice)
                check_error(response, 400, "tool_choice", words)
    async with served(limits=Limits(strict_tools=True)) as server:
        response = await server.post("/v1/responses", input="hi", tools=[{"type": "web_search"}])
        check_error(response, 400, "tools", "tools[0]: this server has no web_search: leave it out")
        check_error(
            await server.post("/v1/chat/completions", **CHAT, web_search_options={}), 400, "tools", "web_search"
        )


async def test_a_search_asked_for_by_options_is_left_out_and_named() -> None:
    async with served() as server:
        made = await server.post("/v1/chat/completions", **CHAT, web_search_options={})
        assert made.headers["x-quire-omitted-tools"] == "web_search"


def test_the_log_names_each_kind_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = ObserverGroup(ToolLogger(logging.getLogger("test")))
    with caplog.at_level("WARNING"):
        for kind in ("web_search", "mcp", "web_search"):
            observer.on_omitted_tool(kind)
    assert [record.args for record in caplog.records] == [("web_search",), ("mcp",)]


# ---------------------------------------------------------------- groups, and tools whose input is text

FUNCTION = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}
GROUP = {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [FUNCTION]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called_by_it_and_go_back(stream: bool) -> None:
    script = speaking(SPOKEN % ("mcp__files__read", '{"city": "a"}'))
    async with served(script, template=KNOWS, room=2048) as server:
        response = await server.post("/v1/responses", input="hi", tools=[GROUP], stream=stream)
        shown = TOKENIZER.decode(server.port.submitted[-1].prompt)
        assert '"mcp__files__read"' in shown and "Files.\\n\\nReads." in shown
        item = _last(response.text)["output"][0] if stream else response.json()["output"][0]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files__", "read")
        talk = [{"role": "user", "content": "hi"}, item, {**item, "type": "function_call_output", "output": "done"}]
        await server.post("/v1/responses", input=talk, tools=[GROUP])
        choice = {"type": "function", "namespace": "mcp__files__", "name": "read"}
        await server.post("/v1/responses", input="hi", tools=[GROUP], tool_choice=choice)
        structure = server.port.submitted[-1].sampling.structured_outputs
        assert structure is not None and "mcp__files__read" in structure.kind[1]


async def test_chat_sees_functions_of_a_namespace_by_their_joined_name() -> None:
    inner = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    async with served(speaking(SPOKEN % ("files__read", "{}")), template=KNOWS, room=2048) as server:
        whole = await server.chat(tools=[{"type": "namespace", "name": "files", "tools": [inner]}])
        assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "files__read"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "a b"}, "tools[0].name must be 1 to 64"),
        ({"description": 3}, "tools[0].description must be text"),
        ({"tools": 3}, "tools[0].tools must be a list"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].tools[0].type 'web_search' is not supported"),
        ({"tools": [{"type": "other"}]}, "tools[0].tools[0].type 'other' is not supported"),
        ({"tools": [FUNCTION, FUNCTION]}, "two have the name 'mcp__files__read'"),
        ({"more": 1}, "tools[0].more"),
    ],
)
async def test_what_is_wrong_in_a_namespace_is_named(wrong: dict[str, Any], words: str) -> None:
    async with served() as server:
        response = await server.post("/v1/responses", input="hi", tools=[{**GROUP, **wrong}])
        assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"input": "*** Begin\\n\\"a\\""}', '*** Begin\n"a"'), ('{"x": 1}', '{"x": 1}')]
)
async def test_the_input_of_a_custom_tool_is_text_and_goes_back(stream: bool, arguments: str, expected: str) -> None:
    tools = [PATCH, {**GROUP, "tools": [{"type": "custom", "name": "run"}]}]
    for name in ("apply_patch", "mcp__files__run"):
        async with served(speaking(SPOKEN % (name, arguments)), template=KNOWS, room=2048) as server:
            response = await server.post("/v1/responses", input="hi", tools=tools, stream=stream)
            assert "must match this grammar (lark)" in TOKENIZER.decode(server.port.submitted[-1].prompt)
            item = _last(response.text)["output"][0] if stream else response.json()["output"][0]
            assert (item["type"], item["name"]) == ("custom_tool_call", name.removeprefix("mcp__files__"))
            assert item["input"] == expected
            if stream:
                assert '"type":"response.custom_tool_call_input.done"' in response.text
            out = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
            again = await server.post(
                "/v1/responses", input=[{"role": "user", "content": "hi"}, item, out], tools=tools
            )
            assert again.status_code == 200
            forced = await server.post(
                "/v1/responses", input="hi", tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"}
            )
            assert forced.status_code == 200


@pytest.mark.parametrize("wrong", [{"format": {"type": "x"}}, {"format": 3}, {"description": 3}])
async def test_what_is_wrong_in_a_custom_tool_is_named(wrong: dict[str, Any]) -> None:
    async with served() as server:
        response = await server.post("/v1/responses", input="hi", tools=[{**PATCH, **wrong}])
        check_error(response, 400, "tools", "tools[0] needs a description in text, and a format")


def _last(text: str) -> dict[str, Any]:
    """The response of the last event of a stream."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    response: dict[str, Any] = json.loads(data[-1])["response"]
    return response


# ---------------------------------------------------------------- recorded requests


@pytest.mark.parametrize(
    ("name", "path"), [("codex-0.169.0", "/v1/responses"), ("claude-code-2.1.197", "/v1/messages")]
)
async def test_the_first_request_of_an_agent_is_taken(name: str, path: str) -> None:
    """Recorded from the real clients; texts are shortened."""
    body = json.loads((RECORDED / f"{name}.json").read_text())
    body |= {"max_tokens": 1000} if "max_tokens" in body else {}
    async with served(template=KNOWS, room=65536) as server:
        response = await server.post(path, **body)
        assert response.status_code == 200, response.text
        [request] = server.port.submitted
        names = (
            [tool.get("name") for tool in body["tools"] if tool["type"] == "function"] if "codex" in name else ["Bash"]
        )
        assert all(f'"{name}"' in TOKENIZER.decode(request.prompt) for name in names)
