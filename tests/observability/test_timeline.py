"""The live page of a server in front of others: what it counts is what the upstreams report."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.observability.live_view import RequestTimeline


def frames_of(*requests: tuple[tuple[int, ...], int, int]) -> list[dict[str, Any]]:
    """Frames after requests, each (tokens seen in events, prompt tokens and tokens that the upstream reports)."""
    frames: list[dict[str, Any]] = []

    async def story() -> None:
        timeline = RequestTimeline("upstreams", clock=lambda: 10.0)
        timeline.on_frames(lambda frame, whole: frames.append(json.loads(frame)))
        timeline.watch(True)
        for i, (seen, prompt, made) in enumerate(requests):
            number = timeline.on_ask(f"r{i}", 99, 1.0)
            timeline.on_sent(number, "http://a:1", 2.0)
            for tokens in seen:
                timeline.on_made(number, tokens, 3.0)
            timeline.on_end(number, "", "stop", prompt, made, 4.0)
        await asyncio.sleep(0.01)
        timeline.watch(False)

    asyncio.run(story())
    return frames


@pytest.mark.parametrize("seen", [(), (1,), (2, 3), (4, 4)])
def test_each_token_is_counted_once_whether_it_was_seen_or_only_reported(seen: tuple[int, ...]) -> None:
    [frame] = frames_of((seen, 7, 5), ((1,), 2, 1))
    assert (frame["now"]["generated"], frame["now"]["prompted"]) == (6, 9)
    assert [request["made"] for request in frame["whole"]["requests"]] == [5, 1]
    assert (frame["now"]["running"], frame["now"]["requests"]) == (0, 2)
