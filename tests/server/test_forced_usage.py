"""`--enable-force-include-usage`: streams have their usage whether or not requests ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.assembly.server import build_limits
from quire.config import Settings
from quire.server.limits import Limits
from tests.server.doubles import served

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "the dog"}), ("/v1/chat/completions", {"messages": HI})]
)
async def test_a_stream_that_did_not_ask_has_what_one_that_did_has(path: str, body: dict[str, Any]) -> None:
    asks = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    asked, forced, plain = [
        [chunk.get("usage") for chunk in await stream(limits, path, **body, **more)]
        for limits, more in ((Limits(), asks), (Limits(force_usage=True), {}), (Limits(), {}))
    ]
    assert asked == forced and all(asked) and asked[-1]["completion_tokens"] == 3
    assert plain == [None] * (len(forced) - 1), "and no chunk of its own"


async def stream(limits: Limits, path: str, **body: Any) -> list[dict[str, Any]]:
    async with served(limits=limits) as server:
        return await server.stream(path, **body, max_tokens=3)


def test_the_option_forces_it() -> None:
    on, off = (build_limits(Settings.of(enable_force_include_usage=value)).force_usage for value in (True, False))
    assert (on, off) == (True, False)
