"""A server whose model is divided: a rank is killed, stopped, or out of memory under streams, and what
clients are told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.starved_rank_child import SECRET, SEED
from tests.live import Live, serving

pytestmark = pytest.mark.nightly

LOSSES = [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "has not answered for")]
"""What a rank is sent, and what the error says of it."""

STARVING = "tests.contract.starved"
STARVE = {"prompt": "One more", "seed": SEED, "max_tokens": 1500, "ignore_eos": True}
OUT_OF_MEMORY = "could not run a step (OutOfMemoryError)"


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


def lose_a_rank(
    lose: Callable[[Live, int], object], said: str, folder: Path, *args: str, streams: int = 16, module: str = "quire"
) -> tuple[float, float]:
    """Rank 1 of a server is lost under streams: each is refused with its name, the server answers as before with new
    ranks, and nothing is left. Seconds from the loss to the last refusal, and to the first answer.

    lose: is given the server and the rank's process.
    """
    with serving(folder, *args, module=module) as live:
        refused, answered, pids = lose_from(live, lose, said, streams)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return refused, answered


def lose_from(
    live: Live, lose: Callable[[Live, int], object], said: str, streams: int
) -> tuple[float, float, list[int]]:
    """See `lose_a_rank`, of a server that goes on. Also the ranks' processes, before and after."""
    wanted = ask(live, 8).json()["choices"][0]["text"]
    before = ranks(live)
    assert len(before) == 2
    with ThreadPoolExecutor(streams) as pool:
        asked = [pool.submit(ask, live, 1500) for _ in range(streams)]
        while live.stats()["active_requests"] < streams:
            assert not any(each.done() for each in asked)
        sent = time.monotonic()
        lose(live, before[1])
        answers = [each.result() for each in asked]
    refused = time.monotonic() - sent
    assert {answer.status_code for answer in answers} == {503}
    assert all(f"rank 1 of 2 (process {before[1]})" in answer.text and said in answer.text for answer in answers)
    ready(live)
    answered = time.monotonic() - sent
    assert ask(live, 8).json()["choices"][0]["text"] == wanted
    after = ranks(live)
    assert len(after) == 2 and not set(after) & set(before)
    return refused, answered, before + after


def signalled(number: signal.Signals) -> Callable[[Live, int], None]:
    """A rank gets a signal."""
    return lambda live, rank: os.kill(rank, number)


def starve(live: Live, rank: int) -> None:
    """A rank of `starved` runs out of memory; the request with which it does is refused as the others are."""
    answer = live.http.post("/v1/completions", json=STARVE)
    assert answer.status_code == 503 and f"(process {rank}) {OUT_OF_MEMORY}" in answer.text
    assert SECRET not in answer.text and "allocate" not in answer.text
    assert "llocate" in live.log, "why is in the log"


@pytest.mark.parametrize("divided", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize(("number", "said"), LOSSES)
def test_a_lost_rank_is_named_and_the_server_answers_again(
    number: signal.Signals, said: str, divided: str, tmp_path: Path
) -> None:
    lose_a_rank(signalled(number), said, tmp_path, divided, "2")


def test_a_rank_without_memory_is_named_and_the_server_answers_again(tmp_path: Path) -> None:
    lose_a_rank(starve, OUT_OF_MEMORY, tmp_path, "--tensor-parallel-size", "2", module=STARVING)


def test_a_stage_without_memory_for_one_request_answers_the_others(tmp_path: Path) -> None:
    """All ranks of that stage fail the step: the engine finds the request, and no rank is started again."""
    with serving(tmp_path, "--pipeline-parallel-size", "2", module=STARVING) as live, ThreadPoolExecutor(9) as pool:
        wanted, before = ask(live, 48).json()["choices"][0]["text"], ranks(live)
        beside = [pool.submit(ask, live, 48) for _ in range(8)]
        culprit = live.http.post("/v1/completions", json=STARVE)
        assert culprit.status_code == 500 and SECRET not in culprit.text and SECRET in live.log
        assert {each.result().json()["choices"][0]["text"] for each in beside} == {wanted}
        assert ranks(live) == before
