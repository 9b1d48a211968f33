"""PyTorch's own files: the same model, and nothing but tensors is ever made of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.weights.files import PICKLE, PICKLE_INDEX, SINGLE
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.weights.test_load import SHAPE, answer, refused


@pytest.fixture
def held(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose safetensors are gone."""
    make(tmp_path, SHAPE)
    tensors = load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    return tensors


class Bomb:
    """Its pickle creates a file where it is opened without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("new", [True, False])
def test_one_file_of_either_age_is_the_same_model(
    tmp_path: Path, held: dict[str, torch.Tensor], new: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.save(held, tmp_path / PICKLE, _use_new_zipfile_serialization=new)
    other = tmp_path_factory.mktemp("safetensors")
    make(other, SHAPE)
    assert torch.equal(answer(load_model(tmp_path)), answer(load_model(other)))


def test_shards_are_found_by_their_index(tmp_path: Path, held: dict[str, torch.Tensor]) -> None:
    torch.save(held, tmp_path / PICKLE)
    wanted = answer(load_model(tmp_path))
    (tmp_path / PICKLE).unlink()
    names = sorted(held)
    shards = {"one.bin": names[::2], "two.bin": names[1::2]}
    for file, own in shards.items():
        torch.save({name: held[name] for name in own}, tmp_path / file)
    (tmp_path / PICKLE_INDEX).write_text(json.dumps({"weight_map": {n: f for f, own in shards.items() for n in own}}))
    assert torch.equal(answer(load_model(tmp_path)), wanted)
    (tmp_path / "two.bin").unlink()
    assert (
        refused(tmp_path) == "pytorch_model.bin.index.json names two.bin, which is not in the folder: download it again"
    )


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, held: dict[str, torch.Tensor], new: bool) -> None:
    mark = tmp_path / "mark"
    torch.save({**held, "x": Bomb(mark)}, tmp_path / PICKLE, _use_new_zipfile_serialization=new)
    assert "holds more than tensors, code perhaps, which is never run" in refused(tmp_path)
    assert not mark.exists()


def test_broken_files_are_named(tmp_path: Path, held: dict[str, torch.Tensor]) -> None:
    torch.save(held, tmp_path / PICKLE)
    data = (tmp_path / PICKLE).read_bytes()
    for broken in (data[: len(data) // 2], b"", b"nonsense", data[:4]):
        (tmp_path / PICKLE).write_bytes(broken)
        assert refused(tmp_path).startswith("pytorch_model.bin ")
    torch.save([1, 2], tmp_path / PICKLE)
    assert refused(tmp_path) == "pytorch_model.bin is not a dictionary of tensors"
