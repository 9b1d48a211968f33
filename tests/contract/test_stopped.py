"""An engine that stands still is unhealthy after the time that --step-timeout says, and is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.contract.streams import hear_all
from tests.contract.wire import ask
from tests.live import serving


@pytest.mark.nightly
def test_health_says_503_for_a_stopped_engine_after_the_step_timeout(tmp_path: Path) -> None:
    """Under 64 streams. What is asked is the order of events, since a busy machine is slow: the server says 503 while
    the engine is still there, and how long it had waited is in the log."""

    async def story(port: int) -> None:
        long = {"prompt": "Long ago", "max_tokens": 1800, "ignore_eos": True, "stream": True}
        streams = [asyncio.ensure_future(ask(port, "POST", "/v1/completions", long, seconds=300)) for _ in range(64)]
        async with asyncio.timeout(300):
            while live.stats()["active_requests"] < 64:
                await asyncio.sleep(0.05)
            stopped = live.engine_pid()
            os.kill(stopped, signal.SIGSTOP)
            while (await ask(port, "GET", "/health", seconds=100)).status == 200:
                await asyncio.sleep(0.05)
            assert live.engine_pid() == stopped
            heard = await asyncio.gather(*streams)
            assert all(b"the engine stopped while this request was running" in answer.body for answer in heard)
            while (await ask(port, "GET", "/health/ready", seconds=100)).status != 200:
                await asyncio.sleep(0.05)
        assert live.engine_pid() != stopped
        await hear_all(port, 1, 4)

    with serving(tmp_path, "--step-timeout", "1") as live:
        asyncio.run(story(live.port))
        said = [line for line in live.log.splitlines() if "no step for" in line]
        assert len(said) == 2 and "is killed" in said[1]
