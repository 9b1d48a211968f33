"""What a checkpoint says of itself, read from headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.weights.details import ModelDetails, read_details
from quire.weights.locate import embedded

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "torch_dtype": "bfloat16"}


def folder(path: Path, config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    for i in range(2):
        save_file({f"w{i}": torch.zeros(3, 4)}, path / f"model-{i}.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("config", "precision", "parameters"),
    [
        (CONFIG, "BF16", 24),
        ({**CONFIG, "dtype": "float16"}, "F16", 24),
        ({"model_type": "llama", "text_config": {"hidden_size": 8, "dtype": "float32"}}, "F32", 24),
        ({**CONFIG, "quantization_config": {"quant_method": "awq"}}, "awq", 0),
    ],
)
def test_a_folder_says_its_family_precision_and_size(
    tmp_path: Path, config: Any, precision: str, parameters: int
) -> None:
    found = read_details(folder(tmp_path, config))
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert found == ModelDetails("llama", "safetensors", precision, size, parameters, 8)


def test_the_embedded_model_says_what_it_is() -> None:
    found = read_details(embedded())
    assert (found.family, found.format) == ("llama", "safetensors") and found.num_parameters > 1_000_000


def test_a_gguf_file_says_it_too(tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_embedding_length(8)
    writer.add_tensor("a", np.zeros((4, 32), np.float16))
    writer.add_tensor("b", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_details(file) == ModelDetails("llama", "gguf", "F16", file.stat().st_size, 136, 8)


@pytest.mark.parametrize("config", [None, [], {}])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, config: Any) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert read_details(tmp_path) == ModelDetails()
    (tmp_path / "model.safetensors").unlink()
    assert read_details(tmp_path) == ModelDetails()
