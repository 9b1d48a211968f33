"""What time that was not used buys."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.access import Rates
from tests.server.doubles import served
from tests.server.test_access import Clock

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("idle", [60.0, 600.0, 86400.0])
async def test_idle_minutes_buy_no_more_requests_than_one_minute_has(idle: float) -> None:
    clock = Clock()
    async with served(rates=Rates(requests=6, clock=clock)) as server:

        async def burst() -> list[int]:
            return [(await server.post("/v1/completions", prompt="the")).status_code for _ in range(10)]

        assert await burst() == [200] * 6 + [429] * 4
        clock.now += idle
        assert await burst() == [200] * 6 + [429] * 4
        clock.now += idle
        assert await burst() == [200] * 6 + [429] * 4, "nor does a second pause"


async def test_idle_minutes_buy_no_more_tokens_than_one_minute_has() -> None:
    clock = Clock()
    async with served(rates=Rates(tokens=60, clock=clock), room=400) as server:

        async def burst() -> tuple[int, int]:
            """(answers, tokens) until one is refused."""
            answers = tokens = 0
            while answers < 100:
                response: Any = await server.post("/v1/completions", prompt="the " * 4, max_tokens=4)
                if response.status_code == 429:
                    break
                answers, tokens = answers + 1, tokens + response.json()["usage"]["total_tokens"]
            return answers, tokens

        first = await burst()
        assert 0 < first[0] < 100
        for idle in (600.0, 86400.0):
            clock.now += idle
            assert await burst() == first


async def test_a_client_refused_for_part_of_a_second_is_asked_to_wait_a_whole_one() -> None:
    clock = Clock()
    async with served(rates=Rates(requests=60, clock=clock)) as server:
        for _ in range(60):
            assert (await server.post("/v1/completions", prompt="the")).status_code == 200
        clock.now += 0.7
        refused = await server.post("/v1/completions", prompt="the")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        clock.now += int(refused.headers["retry-after"])
        assert (await server.post("/v1/completions", prompt="the")).status_code == 200
