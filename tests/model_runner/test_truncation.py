"""Truncation of whole rows against the plain meaning of its settings, where what is kept is wide."""

from __future__ import annotations

import numpy as np
import pytest

from quire.model_runner.sampling.features import COLUMNS
from quire.model_runner.sampling.sampler import Truncation, truncate
from quire.types import SamplingParams
from tests.model_runner.oracle import kept

VOCAB = 500


def cut(rows: np.ndarray, params: list[SamplingParams]) -> list[set[int]]:
    """Tokens kept, row by row, all rows in one call."""
    logits = rows.astype(np.float32)
    columns = {name: np.array([each.read(p) for p in params], each.dtype) for name, each in COLUMNS.items()}
    truncate(logits, Truncation.of(columns, np.arange(len(params)), VOCAB))
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in logits]


def meant(rows: np.ndarray, params: list[SamplingParams]) -> list[set[int]]:
    return [
        {t for t, v in enumerate(kept(row.astype(np.float32).tolist(), p)) if v > -np.inf}
        for row, p in zip(rows, params, strict=True)
    ]


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9])
def test_top_p_is_a_share_of_what_a_wide_min_p_leaves(top_p: float, spread: float) -> None:
    """More tokens pass min_p than are looked at first, and those that do not are much of the whole mass."""
    rows = np.random.default_rng(5).normal(0.0, spread, (4, VOCAB))
    params = [SamplingParams(temperature=1.0, top_p=top_p, min_p=min_p) for min_p in (0.5, 0.1, 0.02, 0.0)]
    wide = [len(one) for one in meant(rows, [SamplingParams(temperature=1.0, min_p=p.min_p) for p in params])]
    assert max(wide) == VOCAB and (spread > 1 or any(64 < n < VOCAB for n in wide))
    assert cut(rows, params) == meant(rows, params)


def test_top_p_is_a_share_of_what_a_wide_top_k_leaves_whatever_others_ask() -> None:
    rows = np.random.default_rng(6).normal(0.0, 0.5, (5, VOCAB))
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=200),
        SamplingParams(temperature=1.3, top_p=0.5, top_k=70, min_p=0.2),
        SamplingParams(temperature=1.0, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0),
    ]
    assert cut(rows, params) == meant(rows, params)
    for i, one in enumerate(params):
        assert cut(rows[i : i + 1], [one]) == meant(rows[i : i + 1], [one])
