"""Clients people point at an OpenAI server, each in an environment of its own, against real servers: `make nightly`.

`UPDATE_EXPECTED=1` writes what they gave to results.json, which the table of docs/clients.md is made of, and the
requests that they sent, which `test_recorded` repeats where no client is installed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients import agents
from tests.clients.recorder import recording
from tests.clients.zoo import CELLS, RECORDED, RESULTS, Client, pinned, results
from tests.live import Live
from tools import clients_page


def aborted(live: Live) -> float:
    return live.metric("vllm:request_success_total", finished_reason="abort")


@pytest.mark.nightly
@pytest.mark.parametrize("client", pinned(), ids=lambda client: client.name)
def test_a_client_works(client: Client, servers: Mapping[str, Live]) -> None:
    cells: dict[str, str] = {}
    before = aborted(servers["cancel"])
    with recording({cell: live.url for cell, live in servers.items()}) as recorder:
        for cell, outcome in client.run(recorder.url):
            cells[cell] = outcome
            if cell == "cancel":
                servers[cell].settled()
                assert aborted(servers[cell]) > before, "a client that left was not noticed"
    keep(client.name, {"version": client.version, "cells": cells}, recorder.sent)


@pytest.mark.nightly
@pytest.mark.parametrize("agent", agents.AGENTS, ids=lambda agent: agent.name)
def test_an_agent_works(agent: agents.Agent, servers: Mapping[str, Live], tmp_path: Path) -> None:
    live = servers["tools"]
    before = aborted(live)

    def answering() -> None:
        while not live.stats()["active_requests"]:
            time.sleep(0.1)
        time.sleep(1)

    with recording(dict.fromkeys(CELLS, live.url)) as recorder:
        for cell in (agents.chat, agents.tools, agents.structured):
            if cell.__name__ in agent.cells:
                cell(agent, f"{recorder.url}/{cell.__name__}", tmp_path)
        if "cancel" in agent.cells:
            agents.cancel(agent, f"{recorder.url}/cancel", tmp_path, answering)
            live.settled()
            assert aborted(live) > before, "a client that left was not noticed"
    assert all(each["body"]["stream"] for each in recorder.sent["chat"] if "stream" in each["body"])
    # Of long prompts, the last of a loop in outline: every field, and the beginnings of texts.
    cell = "tools" if "tools" in agent.cells else "chat"
    last = {cell: [outline(recorder.sent[cell][-1], str(tmp_path))]}
    keep(agent.name, {"version": agent.version, "cells": dict.fromkeys(agent.cells, "passed")}, last)


def outline(value: Any, work: str) -> Any:
    """What was sent with texts cut short and without the path of the work folder. A tool's arguments stay whole."""
    if isinstance(value, dict):
        return {key: one if key == "arguments" else outline(one, work) for key, one in value.items()}
    if isinstance(value, list):
        return [outline(one, work) for one in value]
    return value.replace(work, "/work")[:60] if isinstance(value, str) else value


def keep(name: str, found: Any, sent: Mapping[str, Any]) -> None:
    """Compare with what is written down, or write it down."""
    if os.environ.get("UPDATE_EXPECTED"):
        known = results() if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(known | {name: found}, indent=1) + "\n")
        if sent:
            (RECORDED / f"{name}.json").write_text(json.dumps(sent, indent=1, ensure_ascii=False) + "\n")
    assert not [outcome for outcome in found["cells"].values() if outcome.startswith("failed")], found
    assert found == results()[name]


def test_the_table_has_each_client_in_the_version_that_is_pinned() -> None:
    versions = {name: found["version"] for name, found in results().items()}
    pins = {client.name: client.version for client in pinned()}
    pins |= {agent.name: agent.version for agent in agents.AGENTS}
    assert pins.items() == versions.items()
    assert all(cells.keys() <= set(CELLS) for cells in (found["cells"] for found in results().values()))
    assert clients_page.PAGE.read_text("utf-8") == clients_page.markdown(), "run `make docs`"
