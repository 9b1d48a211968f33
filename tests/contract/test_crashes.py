"""Whatever kind of client there is, and however often the engine is killed: every stream ends in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.crashes import crashes, table
from tests.live import serving


@pytest.mark.parametrize(
    ("minutes", "streams", "connections", "every"),
    [(0.05, 12, 60, 3.0), pytest.param(30.0, 256, 1500, 120.0, marks=pytest.mark.nightly)],
    ids=["short", "half an hour"],
)
def test_every_stream_ends_with_an_event_however_often_the_engine_is_killed(
    tmp_path: Path, minutes: float, streams: int, connections: int, every: float
) -> None:
    """How soon there are answers again depends on the machine: `python -m tests.contract.crashes 30` measures it."""
    with serving(tmp_path) as live:
        figures = crashes(live, minutes * 60, streams=streams, connections=connections, every=every)
    share = 0.05 if len(figures.kills) > 5 else 0.5
    assert figures.kills and figures.ends["streaming: answer"] and figures.ends["streaming: error event"]
    assert not figures.failures(share=share, within=float("inf")), table(figures)
