"""Clients people point at an OpenAI server, each in an environment of its own, against real servers: `make nightly`.

`UPDATE_EXPECTED=1` writes what they gave to results.json, which the table of docs/clients.md is made of, and the
requests that they sent, which `test_recorded` repeats where no client is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from tests.clients.recorder import recording
from tests.clients.zoo import CELLS, RECORDED, RESULTS, SCRIPTED, Client, pinned, results
from tests.live import Live, serving
from tools import clients_page


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Live]]:
    with ExitStack() as stack:
        scripted = stack.enter_context(serving(tmp_path_factory.mktemp("scripted"), module="tests.agent"))
        embedded = stack.enter_context(serving(tmp_path_factory.mktemp("embedded"), "--dtype", "float32"))
        yield {cell: scripted if cell in SCRIPTED else embedded for cell in CELLS}


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
    assert {client.name: client.version for client in pinned()}.items() <= versions.items()
    assert all(cells.keys() <= set(CELLS) for cells in (found["cells"] for found in results().values()))
    assert clients_page.PAGE.read_text("utf-8") == clients_page.markdown(), "run `make docs`"
