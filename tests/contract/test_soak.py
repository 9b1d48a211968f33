"""Hours of everything at once leave memory, descriptors, threads and pages as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.soak import OPTIONS, soak, table
from tests.live import serving


@pytest.mark.parametrize(
    ("seconds", "share"), [(3, 0.2), pytest.param(3600, 0.05, marks=pytest.mark.nightly)], ids=["short", "an hour"]
)
def test_memory_and_descriptors_do_not_grow_during_a_soak(tmp_path: Path, seconds: float, share: float) -> None:
    with serving(tmp_path, *OPTIONS) as live:
        figures = soak(live, seconds)
    assert all(sample.pages == 0 for sample in figures.samples)
    for name in ("front", "engine", "descriptors", "threads"):
        assert figures.drift(name) < share, table(figures)
