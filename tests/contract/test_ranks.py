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

LOSSES = [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "has not answered for")]
"""What a rank is sent, and what the error says of it."""


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


def lose_a_rank(number: signal.Signals, said: str, folder: Path, *args: str, streams: int = 16) -> tuple[float, float]:
    """Rank 1 of a server is sent a signal under streams: each is refused with its name, the server answers as before
    with new ranks, and nothing is left. Seconds from the signal to the last refusal, and to the first answer."""
    with serving(folder, *args) as live:
        wanted = ask(live, 8).json()["choices"][0]["text"]
        before = ranks(live)
        assert len(before) == 2
        with ThreadPoolExecutor(streams) as pool:
            asked = [pool.submit(ask, live, 1500) for _ in range(streams)]
            while live.stats()["active_requests"] < streams:
                assert not any(each.done() for each in asked)
            os.kill(before[1], number)
            sent = time.monotonic()
            answers = [each.result() for each in asked]
        refused = time.monotonic() - sent
        assert {answer.status_code for answer in answers} == {503}
        assert all(f"rank 1 of 2 (process {before[1]})" in answer.text and said in answer.text for answer in answers)
        ready(live)
        answered = time.monotonic() - sent
        assert ask(live, 8).json()["choices"][0]["text"] == wanted
        after = ranks(live)
        assert len(after) == 2 and not set(after) & set(before)
    assert not [pid for pid in before + after if Path(f"/proc/{pid}").exists()]
    return refused, answered


@pytest.mark.parametrize("divided", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize(("number", "said"), LOSSES)
def test_a_lost_rank_is_named_and_the_server_answers_again(
    number: signal.Signals, said: str, divided: str, tmp_path: Path
) -> None:
    lose_a_rank(number, said, tmp_path, divided, "2")
