"""GGUF files of the gguf package's making: the same tokens as the model they were made of, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quire.errors import InvalidModel
from quire.weights.gguf import KINDS, Gguf, GgufTensorInfo, read_gguf
from quire.weights.gguf_model import block_entry
from quire.weights.load import load_model
from tests.checkpoints import greedy, make
from tests.gguf_files import stored, write
from tests.models.feeding import Feeder
from tests.weights.test_load import answer

SHAPES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {},
    "llama-mha-llama3-rope": {},
    "llama-linear-rope": {},
    "mistral-window": {},
    "mixtral-three-of-six": {},
    "qwen2-gqa": {},
    "qwen3-gqa": {},
    "qwen3-mha-biased": {"attention_bias": False},
    "qwen3_moe-gqa": {},
    "gemma2-gqa": {"query_pre_attn_scalar": 10},
    "gemma3_text-untied-pattern-of-six": {
        "query_pre_attn_scalar": 16,
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt2-narrow-mlp-untied": {},
    "gpt2-odd-heads": {},
}
PROMPTS = [[7 * i % 199 for i in range(45)], [3, 5, 8]]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_converted_model_says_the_same(tmp_path: Path, shape: str) -> None:
    model = make(tmp_path / "source", shape, **SHAPES[shape])
    write(tmp_path / "model.gguf", model)
    ours = load_model(tmp_path / "model.gguf", dtype="float32")
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0]
    assert (Feeder(ours, page_size=4).step([(0, PROMPTS[0])])[0] - wanted).abs().max() < 1e-4
    found = Feeder(ours, page_size=16).greedy(PROMPTS, 24)
    assert found == [greedy(model, prompt, 24) for prompt in PROMPTS]


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


@pytest.mark.parametrize(
    ("kind", "near"),
    [("F32", 0), ("F16", 0.003), ("BF16", 0.03), ("Q8_0", 0.1), ("Q6_K", 0.3), ("Q4_K", 0.9), ("Q4_0", 0.9)],
)
def test_every_type_means_what_the_gguf_package_says_it_does(tmp_path: Path, kind: str, near: float) -> None:
    """Logits are those of the numbers the package reads back; `near` states how far those are from the source's,
    in deviations: random networks lose by a few bits what trained ones do not."""
    model = make(tmp_path / "source", "llama-gqa-tied", **WIDE)
    with torch.no_grad():
        source = model(torch.tensor([PROMPTS[0]])).logits[0]
        meant = write(tmp_path / "model.gguf", model, kind)
        assert read_gguf(tmp_path / "model.gguf").tensors["blk.0.ffn_down.weight"].kind.name == kind
        model.load_state_dict({**meant, "lm_head.weight": meant["model.embed_tokens.weight"]})
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0]
    ours = load_model(tmp_path / "model.gguf", dtype="float32")
    found = Feeder(ours, page_size=16).step([(0, PROMPTS[0])])[0]
    assert (found - wanted).abs().max() < 1e-4
    error = float((found - source).std() / source.std())
    assert near / 10 <= error <= max(near, 1e-5)
    if kind in ("F32", "F16", "BF16"):
        assert Feeder(ours, page_size=16).greedy(PROMPTS, 24) == [greedy(model, p, 24) for p in PROMPTS]


def test_a_folder_with_one_file_is_that_file_and_with_several_must_be_named(tmp_path: Path) -> None:
    model = make(tmp_path / "source", "llama-gqa-tied")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a.gguf", model)
    expected = answer(load_model(tmp_path / "source", dtype="float32"))
    torch.testing.assert_close(answer(load_model(tmp_path / "folder", dtype="float32")), expected)
    write(tmp_path / "folder" / "b.gguf", model)
    with pytest.raises(InvalidModel, match=r"holds 2 GGUF files: name the one to load, such as a\.gguf"):
        load_model(tmp_path / "folder")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data[: len(data) // 2], "is truncated"),
        (lambda data: data[:300], "ends within its header"),
        (lambda data: b"GGML" + data[4:], "is not a GGUF file"),
        (lambda data: data[:4] + b"\x01" + data[5:], "version 1: only 2 and 3"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "its header makes no sense"),
        (lambda data: data.replace(b"llama", b"mamba"), "architecture 'mamba', which is not supported"),
        (lambda data: b"", "is not a GGUF file"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, edit: Callable[[bytes], bytes], said: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, make(tmp_path / "source", "llama-gqa-tied"))
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(InvalidModel, match=said) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x.weight", np.zeros((2, 22), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match=r"x\.weight is stored as Q5_0: not supported"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K", "Q4_0"])
def test_a_part_of_a_quantised_matrix_is_that_part_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Ranks read their rows, and experts that one tensor holds are read one by one."""
    numbers = np.random.default_rng(1).standard_normal((6, 4, 512), dtype=np.float32)
    bytes_, _ = stored(numbers.reshape(24, 512), kind)
    path = tmp_path / "one"
    path.write_bytes(bytes(40) + bytes_.tobytes())
    number = next(number for number, each in KINDS.items() if each.name == kind)
    entry = block_entry(Gguf(path, {}, {}), GgufTensorInfo(KINDS[number], (6, 4, 512), 40))
    whole = entry.read(())
    assert whole.shape == (6, 4, 512) and (whole - torch.from_numpy(numbers)).std() < 0.3
    for cut in ((slice(2, 5),), (slice(5, 6), slice(1, 3)), (slice(0, 2), slice(None), slice(256, 512))):
        assert torch.equal(entry.read(cut), whole[cut])
    for expert in range(6):
        assert torch.equal(entry.part(expert).read(()), whole[expert])
