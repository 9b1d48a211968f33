"""The engine in a process of its own: requests in, tokens out, deaths noticed and mended."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client import EngineProcess
from quire.errors import InvalidModel, QuireError, Unavailable
from quire.values import Request, SamplingParams, Tokens

CHILD = str(Path(__file__).with_name("synthetic_child.py"))


class Rig:
    """An engine process and what it said."""

    def __init__(self, **settings: Any) -> None:
        self.port = EngineProcess([sys.executable, CHILD], settings, lambda m: repr(m).encode(), backoff=0.01)
        self.events: list[Tokens] = []
        self.deaths: list[str] = []

        def hear(events: Sequence[Tokens]) -> None:
            self.events.extend(events)

        self.port.subscribe(hear, self.deaths.append)

    async def __aenter__(self) -> Rig:
        await self.port.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.port.close()

    async def until(self, what: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.005)

    def made(self, id: str) -> list[int]:
        return [t for e in self.events if e.id == id for t in e.tokens]

    def finish(self, id: str) -> str | None:
        return next((e.finish for e in self.events if e.id == id and e.finish), None)


def ask(id: str, new: int = 5, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    return Request(id=id, prompt=tuple(prompt), max_new=new, sampling=SamplingParams(logit_bias={3: 1.5}, seed=4))


def test_tokens_come_back_and_the_counters_settle() -> None:
    async def story() -> None:
        async with Rig() as rig:
            assert rig.port.ready() and rig.port.alive()
            rig.port.submit([ask("a"), ask("b", 7)])
            await rig.until(lambda: rig.finish("a") is not None and rig.finish("b") is not None)
            assert len(rig.made("a")) == 5 and len(rig.made("b")) == 7
            await rig.until(lambda: rig.port.snapshot()["completed_requests"] == 2)
            assert rig.port.snapshot()["cache"]["used_pages"] == 0
            assert b"vllm:generation_tokens" in rig.port.prometheus()

    asyncio.run(story())


def test_an_impossible_request_comes_back_as_an_error_and_hurts_nobody() -> None:
    async def story() -> None:
        async with Rig() as rig:
            rig.port.submit([ask("huge", 10_000), ask("fine")])
            await rig.until(lambda: rig.finish("fine") is not None and rig.finish("huge") is not None)
            assert rig.finish("huge") == "error" and rig.finish("fine") == "length"
            assert any("KV blocks" in (e.error or "") for e in rig.events)

    asyncio.run(story())


def test_an_abort_ends_the_request() -> None:
    async def story() -> None:
        async with Rig(step=0.01) as rig:
            rig.port.submit([ask("long", 200)])
            await rig.until(lambda: len(rig.made("long")) > 2)
            rig.port.abort(["long", "unknown"])
            await rig.until(lambda: rig.finish("long") == "abort")
            await rig.until(lambda: rig.port.snapshot()["cache"]["used_pages"] == 0)

    asyncio.run(story())


def test_a_killed_engine_is_noticed_and_comes_back() -> None:
    async def story() -> None:
        async with Rig(step=0.01) as rig:
            rig.port.submit([ask("lost", 200)])
            await rig.until(lambda: len(rig.made("lost")) > 2)
            assert rig.port.process is not None
            first = rig.port.process.pid
            rig.port.process.kill()
            await rig.until(lambda: bool(rig.deaths), 2.0)
            assert not rig.port.ready() and not rig.port.alive()
            with pytest.raises(Unavailable):
                rig.port.submit([ask("too-soon")])
            await rig.until(rig.port.ready)
            assert rig.port.process.pid != first and rig.port.restarts == 1
            rig.port.submit([ask("again")])
            await rig.until(lambda: rig.finish("again") == "length")

    asyncio.run(story())


def test_what_cannot_be_built_is_said_in_its_own_words() -> None:
    async def story() -> None:
        with pytest.raises(InvalidModel, match="try 'embedded'"):
            await Rig(bad=True).port.start()
        with pytest.raises(QuireError, match="before it was ready"):
            await Rig(dies=True).port.start()

    asyncio.run(story())


def test_the_engine_ends_when_its_front_does_and_leaves_nothing_behind() -> None:
    async def story() -> int:
        rig = Rig()
        await rig.port.start()
        assert rig.port.process is not None
        pid = rig.port.process.pid
        await rig.port.close()
        assert rig.port.process.returncode == 0
        return pid

    pid = asyncio.run(story())
    assert not Path(f"/proc/{pid}").exists()


def test_an_idle_engine_uses_no_processor_time() -> None:
    async def story() -> None:
        async with Rig() as rig:
            rig.port.submit([ask("warm")])
            await rig.until(lambda: rig.finish("warm") is not None)
            assert rig.port.process is not None
            stat = Path(f"/proc/{rig.port.process.pid}/stat")

            def ticks() -> int:
                fields = stat.read_text().rsplit(")", 1)[1].split()
                return int(fields[11]) + int(fields[12])

            before, own = ticks(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
            await asyncio.sleep(1.5)
            assert (ticks() - before) / os.sysconf("SC_CLK_TCK") <= 0.015
            assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - own < 0.1

    asyncio.run(story())


def test_liveness_is_progress_not_existence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with Rig(step=0.05) as rig:
            rig.port.submit([ask("slow", 60)])
            await rig.until(lambda: len(rig.made("slow")) > 1)
            assert rig.port.alive()
            monkeypatch.setattr("quire.engine.client._PATIENCE", -10.0)
            assert not rig.port.alive()

    asyncio.run(story())
