"""The program that runs `quire verify` over many checkpoints and options."""

from __future__ import annotations

from itertools import islice

import pytest

from tests import verified
from tests.product import KINDS


def test_every_kind_comes_first_with_the_defaults_and_then_with_drawn_options() -> None:
    kinds = ["llama-gqa-tied", "qwen3-gqa"]
    drawn = list(verified.draws(1, 6, kinds))
    assert [(i, kind) for i, kind, _ in drawn] == [(i, kinds[i % 2]) for i in range(6)]
    plain = {name: values[0] for name, values in verified.AXES.items()}
    assert all((options == plain) == (i < 2) for i, _, options in drawn)
    assert list(islice(verified.draws(1, 6, kinds), 6)) == drawn
    assert set(kinds) <= set(KINDS)


def test_a_combination_is_equal_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {name: values[0] for name, values in verified.AXES.items()} | {"dtype": "float32"}
    what, seen, why = verified.tried("llama-gqa-tied", options, "cpu", 2, 3)
    assert (what, why) == ("equal", "") and seen["tokens"] > 0 and seen["warm prefix cache"] == 1
    assert verified.tried("llama-gqa-tied", options | {"quantization": "awq"}, "cpu", 1, 1)[0] == "refused"
    monkeypatch.setitem(verified.FIXED, "max_model_len", "x")
    assert verified.tried("llama-gqa-tied", options, "cpu", 1, 1)[0] == "refused"


def test_what_has_ended_is_counted_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert verified.main(["--count", "3", "--device", "cpu", "--seconds", "0"]) == 0
    assert capsys.readouterr().out.startswith("{} of 3 in ")
