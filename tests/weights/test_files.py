"""Checkpoint files: other names of tensors, adapters, and PyTorch's own files, of which only tensors are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import InvalidModel
from quire.weights.files import PICKLE, PICKLE_INDEX, SINGLE, Checkpoint
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.weights.test_load import SHAPE, answer, edit, refused


def openai_name(name: str) -> str:
    """'transformer.h.0.attn.c_attn.weight' -> 'model/h0/attn/c_attn/w'."""
    parts = name.removeprefix("transformer.").split(".")
    if parts[0] in ("wte", "wpe"):
        return f"model/{parts[0]}"
    kind = "b" if parts[-1] == "bias" else "g" if parts[-2].startswith("ln") else "w"
    body = parts[:-1]
    return "/".join(["model", *([f"h{body[1]}", *body[2:]] if body[0] == "h" else body), kind])


def as_openai(folder: Path) -> None:
    """Rewrite a GPT-2 checkpoint as its authors' own: names, shapes, and hparams.json."""
    held = load_file(folder / SINGLE)
    named = {openai_name(name): tensor for name, tensor in held.items()}
    save_file({n: t[None].contiguous() if n.endswith("/w") else t for n, t in named.items()}, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    sizes = {"n_vocab": config["vocab_size"], "n_ctx": config["n_positions"]}
    sizes |= {name: config[name] for name in ("n_embd", "n_head", "n_layer")}
    (folder / "hparams.json").write_text(json.dumps(sizes))


@pytest.mark.parametrize("shape", ["gpt2-odd-heads", "gpt2-one-head"])
def test_gpt2_under_its_authors_names_is_the_same_model(tmp_path: Path, shape: str) -> None:
    make(tmp_path, shape)
    before = answer(load_model(tmp_path))
    as_openai(tmp_path)
    assert "model/h0/attn/c_attn/w" in load_file(tmp_path / SINGLE)
    assert torch.equal(answer(load_model(tmp_path)), before)


def test_gpt2_under_its_authors_names_has_its_shapes_checked(tmp_path: Path) -> None:
    make(tmp_path, "gpt2-odd-heads")
    as_openai(tmp_path)
    edit(tmp_path, **{"model/h1/mlp/c_fc/w": torch.ones(1, 60, 239)})
    said = "transformer.h.1.mlp.c_fc.weight has shape [60, 239], but config.json makes it [60, 240]"
    assert refused(tmp_path) == said
    edit(tmp_path, **{"model/h1/mlp/c_fc/w": None, "model/h1/mlp/nonsense/w": torch.ones(1, 60, 240)})
    assert "lacks 1 tensors of the model: transformer.h.1.mlp.c_fc.weight" in refused(tmp_path)


def test_a_gemma_that_also_sees_is_loaded_without_its_eyes(tmp_path: Path) -> None:
    make(tmp_path, "gemma3_text-gqa")
    before = answer(load_model(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    held = load_file(tmp_path / SINGLE)
    for prefix in ("language_model.", "model.language_model."):
        named = {prefix + (n if prefix == "language_model." else n.removeprefix("model.")): t for n, t in held.items()}
        save_file(
            {**named, "vision_tower.x": torch.ones(1), "multi_modal_projector.y": torch.ones(1)}, tmp_path / SINGLE
        )
        assert torch.equal(answer(load_model(tmp_path)), before)


def test_adapters_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "is a LoRA adapter: adapters are not applied" in refused(tmp_path)
    make(tmp_path, "llama-gqa-tied")
    edit(tmp_path, **{"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 72)})
    with pytest.raises(InvalidModel, match="is a LoRA adapter, or a model with one inside"):
        load_model(tmp_path)


# ---------------------------------------------------------------- PyTorch's files


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


def test_a_folder_without_known_weights_is_refused_with_what_it_has(tmp_path: Path) -> None:
    wanted = "has neither model.safetensors nor model.safetensors.index.json"
    for names, told in (
        (("config.json", "notes.txt"), ""),
        (("b.bin", "config.json"), " (it has b.bin)"),
        (("b.bin", "a.pt", "d.pth", "c.safetensors"), " (it has a.pt, b.bin, c.safetensors)"),
    ):
        folder = tmp_path / f"of-{len(names)}-{names[0]}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        with pytest.raises(InvalidModel) as no:
            Checkpoint(folder)
        assert str(no.value) == f"{folder.name} {wanted}{told}"
