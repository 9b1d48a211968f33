"""What measures a card says at once that there is none."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.card import prepare_all
from quire.errors import InvalidRequest
from quire.structured_output.compiler import WARM_UP


@pytest.mark.parametrize("name", ["gpu", "speculate", "http", "kernels", "layers", "mixtures"])
def test_without_a_card_it_is_one_line_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(importlib.import_module(f"benchmarks.{name}").command, [])
    assert done.exit_code == 1
    assert done.output.startswith("Error: torch sees no CUDA device here") and done.output.count("\n") == 1


def test_an_engine_is_measured_once_it_is_prepared_and_has_read_its_vocabulary() -> None:
    left, said = [3], list[object]()

    def prepare() -> bool:
        left[0] -= 1
        return left[0] > 0

    def compile(structure: object) -> None:
        said.append((left[0], structure))
        raise InvalidRequest("no token of this vocabulary is text")

    llm: Any = SimpleNamespace(
        _engine=SimpleNamespace(prepare=prepare),
        _thread=SimpleNamespace(_call=lambda work: work()),
        _grammars=SimpleNamespace(_compile=compile),
    )
    prepare_all(llm)
    assert said == [(0, WARM_UP)]
