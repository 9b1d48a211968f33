"""Checkpoints of every kind under options of every kind answer as they do by default: see `tests.product`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.product import KINDS, Runner, draws, shown

SHARES, PER_SHARE = 8, 60


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def check(runner: Runner, seed: int, count: int, kinds: list[str]) -> int:
    """How many were refused."""
    refused = 0
    for kind, case in draws(seed, count, kinds):
        try:
            refused += runner.run(kind, case) is not None
        except Exception as error:
            raise AssertionError(f"{kind} {shown(case)}") from error
    return refused


def test_a_sample_of_the_product_answers_as_by_default(runner: Runner) -> None:
    kinds = ["llama-gqa-tied", "mixtral-gqa", "stored gptq", "mtp glm4_moe-groups", "gguf Q8_0 llama-gqa-tied"]
    assert check(runner, 3, 12, kinds) < 6


@pytest.mark.nightly
@pytest.mark.parametrize("share", range(SHARES))
def test_the_product_answers_as_by_default(runner: Runner, share: int) -> None:
    assert check(runner, 100 + share, PER_SHARE, list(KINDS)) < PER_SHARE // 2
