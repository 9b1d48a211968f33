"""What an engine does with whole workloads, step by step: plans, decisions, outputs, times, metrics, explanations, what
the live page is sent, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runs import RUNS
from tests.expected import check


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_step_by_step_as_written_down(name: str) -> None:
    check(Path(__file__).parent / "expected" / f"{name}.txt", RUNS[name]())
