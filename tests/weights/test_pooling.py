"""What a checkpoint is served for: text, or vectors and classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.errors import InvalidConfig
from quire.models.registry import ARCHITECTURES, DERIVED
from quire.weights.pooling import read_pooler

WITHOUT_HEAD = [
    name for name in ARCHITECTURES if name.startswith(("Bert", "Roberta", "XLM", "DistilBert", "Modern", "Nomic"))
]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *DERIVED])
def test_every_architecture_is_served_for_what_it_has_a_head_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    text = name in ARCHITECTURES and name not in WITHOUT_HEAD
    assert read_pooler(tmp_path).generates == text
    assert not read_pooler(tmp_path, runner="pooling").generates
    if text:
        assert read_pooler(tmp_path, runner="generate").generates
    else:
        with pytest.raises(InvalidConfig, match=f"{name} has no language model's head"):
            read_pooler(tmp_path, runner="generate")
