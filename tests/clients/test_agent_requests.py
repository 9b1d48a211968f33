"""What Codex CLI and Claude Code send, whose prompts are too long to be recorded: each kind of tool, item and block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.clients.test_recorded import WHOLE, check_stream
from tests.live import Live

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
SHELL = {"type": "function", "name": "exec_command", "description": "Runs it", "strict": False, "parameters": SCHEMA}
LARK = 'start: "*** Begin Patch" LF "*** End Patch"\n%import common.LF\n'
PATCH = {"type": "grammar", "syntax": "lark", "definition": LARK}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[item(kind, text=text)])


ASKED = [message("developer", "Be brief."), message("user", "hi")]
CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "input": ASKED,
    "tools": [SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
}
CODEXES: dict[str, dict[str, Any]] = {
    "first": {},
    "tools": {
        "tools": [
            SHELL,
            item("web_search", external_web_access=False),
            item("custom", name="apply_patch", description="Patches", format=PATCH),
            item("namespace", name="mcp__x", description="Of x", tools=[SHELL]),
            item("local_shell"),
        ]
    },
    "forced": {"tools": [item("custom", name="apply_patch", description="Patches")], "tool_choice": "required"},
    "turns": {
        "input": [
            *ASKED,
            item("reasoning", id="r", summary=[], content=None, encrypted_content=None),
            item("reasoning", summary=[item("summary_text", text="t")], encrypted_content="x"),
            item("function_call", name="exec_command", arguments='{"cmd": "ls"}', call_id="1"),
            item("function_call_output", call_id="1", output="a.txt"),
            item("custom_tool_call", status="completed", name="apply_patch", input="*** Begin Patch", call_id="2"),
            item("custom_tool_call_output", call_id="2", output="ok"),
            item("function_call", name="exec_command", arguments="{not JSON", call_id="3"),
            item("function_call_output", call_id="3", output=[item("input_text", text="failed")]),
            message("assistant", "Done.") | {"phase": "commentary"},
            message("user", "go on"),
        ]
    },
}

TOOL = {"name": "Bash", "description": "Runs it", "input_schema": {"$schema": "http://json-schema.org/x#", **SCHEMA}}
MARK = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "max_tokens": 12,
    "system": [item("text", text="x-anthropic-billing-header: a;"), item("text", text="You are Claude Code.", **MARK)],
    "messages": [{"role": "user", "content": "hi"}],
    "metadata": {"user_id": "u"},
}
CLAUDES: dict[str, dict[str, Any]] = {
    "quota": {"max_tokens": 1},
    "thinking": {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
    "tools": {"tools": [TOOL, {**TOOL, "name": "Read", **MARK}, item("web_search_20250305", name="web_search")]},
    "title": {"output_config": {"format": item("json_schema", schema={**SCHEMA, "additionalProperties": False})}},
    "turns": {
        "tools": [TOOL],
        "messages": [
            {
                "role": "user",
                "content": [item("text", text="<system-reminder>x</system-reminder>"), item("text", text="hi")],
            },
            {
                "role": "assistant",
                "content": [
                    item("thinking", thinking="Hm.", signature=""),
                    item("redacted_thinking", data="x"),
                    item("text", text="I look."),
                    item("tool_use", id="1", name="Bash", input={"cmd": "ls"}),
                    item("tool_use", id="2", name="Bash", input={}),
                ],
            },
            {
                "role": "user",
                "content": [
                    item("tool_result", tool_use_id="1", content="a.txt", **MARK),
                    item("tool_result", tool_use_id="2", is_error=True, content=[item("text", text="failed")]),
                    item("text", text="go on"),
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("name", CODEXES)
def test_what_codex_sends_is_answered_in_its_shape(name: str, servers: Mapping[str, Live]) -> None:
    ask = {"model": "embedded", "max_output_tokens": 12, **CODEX, **CODEXES[name]}
    answer = servers["chat"].http.post("/v1/responses", json=ask)
    assert answer.status_code == 200, answer.text
    WHOLE["/v1/responses"].model_validate(answer.json())
    check_stream(servers["chat"], "/v1/responses", {**ask, "stream": True}, whole=True)


@pytest.mark.parametrize("name", CLAUDES)
def test_what_claude_code_sends_is_answered_in_its_shape_and_counted(name: str, servers: Mapping[str, Live]) -> None:
    ask = {"model": "embedded", **CLAUDE, **CLAUDES[name]}
    answer = servers["chat"].http.post("/v1/messages?beta=true", json=ask)
    assert answer.status_code == 200, answer.text
    usage = WHOLE["/v1/messages"].model_validate(answer.json()).usage
    check_stream(servers["chat"], "/v1/messages", {**ask, "stream": True}, whole=True)
    counted = {key: value for key, value in ask.items() if key not in ("max_tokens", "metadata")}
    count = servers["chat"].http.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"]
    assert count == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
