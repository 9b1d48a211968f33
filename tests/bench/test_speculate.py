"""The ceiling that speculation is shown beside is what arithmetic says."""

from __future__ import annotations

import pytest

from quire.bench.speculate import ceiling


def test_free_drafts_bring_what_acceptance_allows_and_dear_ones_nothing() -> None:
    same = ceiling("llama-3.2-3b", "llama-3.2-3b", 1, 512, 0.7, 4)
    assert same == pytest.approx(1.0)
    assert ceiling("llama-3.1-8b", "qwen3-0.6b", 1, 1, 1.0, 4) == pytest.approx(5 / (1 + 4 * 0.596 / 7.505), rel=0.02)


def test_a_draft_of_two_fifths_cannot_bring_more_than_a_quarter() -> None:
    assert 1.2 < ceiling("llama-3.2-3b", "llama-3.2-1b", 1, 640, 0.7, 4) < 1.25
