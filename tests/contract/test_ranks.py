"""A server whose model is divided: a rank is killed and another stopped under streams, and what clients are told."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live import Live, serving

pytestmark = pytest.mark.nightly


def ranks(live: Live) -> list[int]:
    """Processes of ranks below the server, in order."""
    found, left = [], [live.process.pid]
    while left:
        pid = left.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            left += (int(child) for child in task.read_text().split())
        if b"rank_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return sorted(found)


def ready(live: Live) -> None:
    deadline = time.monotonic() + 120
    while live.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline, live.log
        time.sleep(0.1)


def ask(live: Live, tokens: int) -> Any:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return live.http.post("/v1/completions", json=body)


@pytest.mark.parametrize("divided", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "has not answered for")])
def test_a_lost_rank_is_named_and_the_server_answers_again(
    number: signal.Signals, said: str, divided: str, tmp_path: Path
) -> None:
    with serving(tmp_path, divided, "2") as live:
        wanted = ask(live, 8).json()["choices"][0]["text"]
        before = ranks(live)
        assert len(before) == 2
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, live, 1500) for _ in range(16)]
            time.sleep(1.0)
            os.kill(before[1], number)
            answers = [each.result() for each in asked]
        assert {answer.status_code for answer in answers} == {503}
        assert all(f"rank 1 of 2 (process {before[1]})" in answer.text and said in answer.text for answer in answers)
        ready(live)
        assert ask(live, 8).json()["choices"][0]["text"] == wanted
        after = ranks(live)
        assert len(after) == 2 and not set(after) & set(before)
    assert not [pid for pid in after if Path(f"/proc/{pid}").exists()]
