"""Logits against float32: zero where both are the same, and above it where one is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import shapes
from benchmarks.logits import apart, command

TINY = shapes.qwen(3, 32, 2, (4, 2, 8), 48, 60000, tied=True)


def test_a_row_for_each_dtype_and_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {"qwen3-0.6b": TINY})
    stored = tmp_path / "logits.json"
    asked = ["qwen3-0.6b", "--dtype", "float32", "--dtype", "bfloat16", "--tokens", "24"]
    result = CliRunner().invoke(command, [*asked, "--json", str(stored)])
    assert result.exit_code == 0, result.output
    rows = {(row["dtype"], row["by"]): row for row in json.loads(stored.read_text())["rows"]}
    assert rows["float32", "PyTorch"]["largest"] == 0 and rows["float32", "Quire"]["same_top"] == 1
    for by in ("PyTorch", "Quire"):
        row = rows["bfloat16", by]
        assert 0 < row["mean"] < row["largest"] < 0.3 * row["deviation"]


def test_how_far_apart() -> None:
    exact = torch.tensor([[0.0, 1.0], [3.0, 2.0]])
    found = apart(torch.tensor([[0.5, 1.0], [1.0, 2.0]]), exact)
    assert found["largest"] == 2.0 and found["mean"] == 0.625 and found["same_top"] == 0.5
