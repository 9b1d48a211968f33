"""What measures a card says at once that there is none."""

from __future__ import annotations

import importlib

import pytest
import torch
from click.testing import CliRunner


@pytest.mark.parametrize("name", ["gpu", "speculate", "http", "kernels"])
def test_without_a_card_it_is_one_line_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(importlib.import_module(f"benchmarks.{name}").command, [])
    assert done.exit_code == 1
    assert done.output.startswith("Error: torch sees no CUDA device here") and done.output.count("\n") == 1
