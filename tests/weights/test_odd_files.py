"""Files that are not what they are called, as downloads leave them: the error says what they are instead."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config import load
from quire.errors import InvalidConfig, InvalidModel
from quire.models.registry import read_spec
from quire.tokenization.tokenizer import Tokenizer
from quire.weights.files import Checkpoint
from quire.weights.gguf import read_gguf
from quire.weights.locate import embedded

CONTENTS = {
    "is empty: download it again": b"",
    "is a pointer of Git LFS, not the file itself: run `git lfs pull`": b"version https://git-lfs.github.com/spec/v1\n",
    "is a web page, not ": b"\n<!DOCTYPE html><html><body>Not found",
}


def checkpoint(folder: Path) -> None:
    Checkpoint(folder)


def gguf(folder: Path) -> None:
    read_gguf(folder / "model.gguf")


def tokenizer(folder: Path) -> None:
    Tokenizer.from_folder(folder)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", checkpoint),
        ("pytorch_model.bin", checkpoint),
        ("model.gguf", gguf),
        ("tokenizer.json", tokenizer),
    ],
)
def test_what_a_file_is_instead_is_said(tmp_path: Path, name: str, read: Callable[[Path], None], content: str) -> None:
    shutil.copyfile(embedded() / "config.json", tmp_path / "config.json")
    (tmp_path / name).write_bytes(CONTENTS[content])
    with pytest.raises(InvalidModel) as refusal:
        read(tmp_path)
    assert str(refusal.value).startswith(f"{name} {content}")


def test_a_config_without_an_architecture_says_so() -> None:
    for fields in ({}, {"hidden_size": 64}, {"model_type": ""}):
        with pytest.raises(InvalidModel, match="names no architecture: it has neither `architectures` nor"):
            read_spec(fields)


def test_yaml_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("port: [1")
    with pytest.raises(InvalidConfig) as refusal:
        load(environ={}, file=tmp_path / "c.yaml")
    assert "<unicode string>" not in str(refusal.value) and "^" not in str(refusal.value)
    assert "line 1, column" in str(refusal.value)
