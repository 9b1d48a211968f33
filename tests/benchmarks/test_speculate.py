"""The ceiling that speculation is shown beside is what arithmetic says, and what it is compared with is fair."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import speculate
from benchmarks.speculate import ceiling, turns
from benchmarks.workloads import Workload


def test_free_drafts_bring_what_acceptance_allows_and_dear_ones_nothing() -> None:
    same = ceiling("llama-3.2-3b", "llama-3.2-3b", 1, 512, 0.7, 4)
    assert same == pytest.approx(1.0)
    assert ceiling("llama-3.1-8b", "qwen3-0.6b", 1, 1, 1.0, 4) == pytest.approx(5 / (1 + 4 * 0.596 / 7.505), rel=0.02)


def test_a_draft_of_two_fifths_cannot_bring_more_than_a_quarter() -> None:
    assert 1.2 < ceiling("llama-3.2-3b", "llama-3.2-1b", 1, 640, 0.7, 4) < 1.25


def test_medians_of_turns_are_compared_with_the_mean_of_the_engines_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(*turns: float) -> Any:
        return SimpleNamespace(turns=turns, _engine=SimpleNamespace(scheduler=SimpleNamespace()))

    monkeypatch.setattr(speculate, "decode", lambda llm, work, batch, turn: (llm.turns[turn], 0.0))
    engines = {
        "off": engine(2e-3, 9e-3, 1.9e-3),
        "measured": engine(1e-3, 1e-3, 5e-3),
        "off again": engine(*[3e-3] * 3),
    }
    (row,) = turns(engines, Workload(model="llama-3.2-3b", batches=(4,), prompt=(8, 8), new=(8, 8)), 3)
    assert row["ms_a_token"] == pytest.approx({"off": 2.0, "measured": 1.0, "off again": 3.0})
    assert row["faster"] == pytest.approx({"off": 1.25, "measured": 2.5, "off again": 2.5 / 3})
    assert row["batch"] == 4
