"""Agents finish a loop of two tool calls, with the prompts they really send: Codex CLI and Claude Code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent import CALLS, CONTEXT, SAYS
from tests.clients import agents
from tests.live import Live, serving

RECORDED = Path(__file__).parent / "server/recorded"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("agents"), module="tests.agent") as live:
        yield live


def test_the_context_holds_what_agents_send(live: Live) -> None:
    assert live.http.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT >= 65536


def test_codex_requests_end_after_two_tools(live: Live) -> None:
    body: Any = json.loads((RECORDED / "codex-0.169.0.json").read_text()) | {"model": "embedded", "stream": False}
    made = []
    while True:
        response = live.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-quire-omitted-tools"] == "web_search"
        [item] = response.json()["output"]
        if item["type"] == "message":
            break
        made.append((item["name"], json.loads(item["arguments"])))
        body["input"] += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]
    assert made == [("exec_command", arguments) for arguments in CALLS["exec_command"]]
    assert item["content"][0]["text"] == SAYS
    assert "requests declare the tool web_search, which this server does not have" in live.log


def test_claude_code_requests_end_after_two_tools(live: Live) -> None:
    body: Any = json.loads((RECORDED / "claude-code-2.1.197.json").read_text()) | {"model": "embedded", "stream": False}
    made = []
    while True:
        response = live.http.post("/v1/messages?beta=true", json=body)
        assert response.status_code == 200, response.text
        message = response.json()
        [block] = message["content"]
        if message["stop_reason"] == "end_turn":
            break
        made.append((block["name"], block["input"]))
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        body["messages"] += [
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
        ]
    assert made == [("Bash", arguments) for arguments in CALLS["Bash"]]
    assert block["text"] == SAYS


@pytest.mark.nightly
@pytest.mark.parametrize("agent", agents.AGENTS[:2], ids=lambda agent: agent.name)
def test_the_agent_itself_ends_after_two_tools(agent: agents.Agent, live: Live, tmp_path: Path) -> None:
    agents.tools(agent, live.url, tmp_path)
