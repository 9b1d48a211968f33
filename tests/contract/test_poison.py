"""A thousand hostile requests against a live server that is at work: they affect no client but their senders."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.contract.poison import ENDPOINTS, Poison, poisons
from tests.contract.poison_batches import BATCHES, FILES, FORM, VECTORS, Errand, errands, file_poisons, form
from tests.contract.streams import hear_all
from tests.contract.wire import Answer, ask, request, send
from tests.live import ROOT, Live, serving, standing


@cache
def every_poison() -> list[Poison]:
    """Not made by importing, which every worker does: they are hundreds of megabytes."""
    return [*poisons(), *file_poisons()]


TIMEOUT = 100.0
"""Seconds within which everything is answered."""

REST = 4.0
"""Seconds of idleness after which the engine has given back what it had free, so that it is not counted as before."""

SHARE = 80
"""Of how many poisons one runs every time; all of them do at night."""


OPTIONS = ("--dtype", "float32", "--num-gpu-blocks-override", "512", "--scheduling-policy", "priority")
"""Few K/V blocks, so that all of them have been written to, and are in memory, before memory is measured.
What has to be switched on to be poisoned is."""


def poisoned(folder: Path) -> AbstractContextManager[Live]:
    return serving(folder, *OPTIONS, "--batch-dir", str(folder / "batches"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with poisoned(tmp_path_factory.mktemp("poison")) as live:
        yield live


INSIDE = (str(ROOT).encode(), sys.prefix.encode(), b"site-packages", b"Traceback", b".py", b" object at 0x", b"errno")
"""What an error that shows the server's internals contains."""


async def swallow(port: int, some: Sequence[Poison], at_once: int = 4) -> dict[str, list[Answer]]:
    """What each poison was answered; nothing for those that were not in time."""
    heard: dict[str, list[Answer]] = {}
    seats = asyncio.Semaphore(at_once)

    async def one(poison: Poison) -> None:
        async with seats:
            try:
                heard[poison.name] = await send(
                    port, *poison.sent(), pause=poison.pause, hang_up=poison.hang_up, seconds=TIMEOUT
                )
            except TimeoutError:
                heard[poison.name] = []

    await asyncio.gather(*map(one, some))
    return heard


def wronged(some: Sequence[Poison], heard: Mapping[str, list[Answer]], *also: int) -> list[tuple[str, Any]]:
    """Those that had no answer in time, or one that they may not have; `also` may be had by all."""
    return [
        (poison.name, [(answer.status, answer.body[:200]) for answer in heard[poison.name]])
        for poison in some
        if not heard[poison.name] or any(a.status not in (*poison.statuses, *also) for a in heard[poison.name])
    ]


async def send_off(port: int, some: Sequence[Errand]) -> dict[str, str]:
    """The batch of each errand."""
    begun = {}
    for errand in some:
        sent = request("POST", FILES, form(errand.data), {"Content-Type": FORM})
        [file] = await send(port, sent, seconds=TIMEOUT)
        assert file.status == 200, (errand.name, file)
        asked = {"input_file_id": file.json()["id"], "endpoint": errand.endpoint, "completion_window": "24h"}
        batch = await ask(port, "POST", BATCHES, asked, seconds=TIMEOUT)
        assert batch.status == 200, (errand.name, batch)
        begun[errand.name] = batch.json()["id"]
    return begun


def come_back(live: Live, errand: Errand, batch_id: str) -> None:
    """How it ended, and that none of its lines broke anything; nothing of it stays but the batch."""
    deadline = time.monotonic() + 600
    while (batch := live.openai.batches.retrieve(batch_id)).status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline, (errand.name, batch)
        time.sleep(0.1)
    assert batch.status == errand.ends, (errand.name, batch)
    assert (batch.errors is not None) == (errand.ends == "failed")
    shown = batch.model_dump_json()
    assert len(shown) < 100_000 and "/tmp" not in shown, shown[:1000]
    for file in filter(None, (batch.output_file_id, batch.error_file_id)):
        for line in map(json.loads, live.openai.files.content(file).text.splitlines()):
            assert line["response"]["status_code"] in (200, 400, 404, 422, 504), (errand.name, line)
    for file in filter(None, (batch.input_file_id, batch.output_file_id, batch.error_file_id)):
        live.openai.files.delete(file)


async def under_load(
    port: int, some: Sequence[Poison], errands: Sequence[Errand], pause: float = 0.0
) -> tuple[list[bytes], list[bytes], dict[str, list[Answer]], dict[str, str]]:
    """What 32 streams hear in quiet; what they hear again and again beside the poisons, so many seconds apart; the
    poisons' answers, and the errands' batches."""
    quiet = await hear_all(port)
    eating = asyncio.gather(swallow(port, some), send_off(port, errands))
    beside: list[bytes] = []
    while not eating.done() or not beside:
        beside = await hear_all(port)
        if beside != quiet:
            break
        await asyncio.wait((eating,), timeout=pause)
    return quiet, beside, *await eating


LARGE = (
    {"prompt": [5] * 2000, "max_tokens": 2, "prompt_logprobs": 20},
    {"prompt": [5] * 2000, "max_tokens": 2, "n": 64},
    {"prompt": "x", "max_tokens": 20, "guided_regex": "[ab]+"},
)
"""What brings in everything that stays in memory from its first use on."""


async def warm(port: int) -> None:
    await hear_all(port, 64, 120)  # of 9 blocks each, which is more than there are
    for body in LARGE:
        assert (await ask(port, "POST", "/v1/completions", body)).status == 200


def check(live: Live, some: Sequence[Poison], errands: Sequence[Errand], *, more: float, pause: float = 0.0) -> None:
    asyncio.run(warm(live.port))
    time.sleep(REST)
    before, process, engine = live.memory(), live.process.pid, live.engine_pid()
    quiet, beside, heard, begun = asyncio.run(under_load(live.port, some, errands, pause))
    assert beside == quiet
    wrong = wronged(some, heard)
    assert not wrong, wrong
    refused = [(name, answer.body) for name, answers in heard.items() for answer in answers if answer.status != 200]
    revealing = [(name, body[:300]) for name, body in refused if any(word in body for word in INSIDE)]
    assert not revealing, revealing
    for errand in errands:
        come_back(live, errand, begun[errand.name])
    assert live.process.poll() is None and (live.process.pid, live.engine_pid()) == (process, engine)
    live.settled()
    assert live.metric("vllm:kv_cache_usage_perc") == 0
    assert "Traceback" not in live.log, live.log
    deadline = time.monotonic() + 300
    while (after := live.memory()).total > before.total * (1 + more):
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.5)


def test_every_endpoint_gets_enough_hostile_requests() -> None:
    every = every_poison()
    assert len(every) >= 80 and len({poison.name for poison in every}) == len(every)
    for endpoint in ENDPOINTS:
        assert sum(endpoint.path in poison.name for poison in every) >= 80
    for path in (FILES, BATCHES, VECTORS):
        assert sum(path.encode() in poison.sent()[0][:80] for poison in file_poisons()) >= 25


def test_hostile_requests_affect_only_their_senders(live: Live) -> None:
    check(live, every_poison()[::SHARE], errands(), more=0.05, pause=2.0)


@pytest.mark.nightly
def test_all_hostile_requests_affect_only_their_senders(tmp_path: Path) -> None:
    """The second time: what the first one brought into memory to stay, such as compiled grammars, is there already."""
    with poisoned(tmp_path) as fresh:
        asyncio.run(under_load(fresh.port, every_poison(), errands()))
        check(fresh, every_poison(), errands(), more=0.05)


@pytest.mark.nightly
def test_all_hostile_requests_affect_only_their_senders_through_a_proxy(tmp_path: Path) -> None:
    """It takes JSON only, so uploads are a 415 there."""
    with standing("upstream", tmp_path, *OPTIONS, "--batch-dir", str(tmp_path / "batches")) as live:
        engine = live.engine_pid()
        wrong = wronged(every_poison(), asyncio.run(swallow(live.port, every_poison())), 415, 429)
        assert not wrong, wrong
        assert live.settled()["cache"]["used_pages"] == 0 and live.engine_pid() == engine
        assert "Traceback" not in live.log, live.log
