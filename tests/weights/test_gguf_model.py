"""Facts of a GGUF file in the words of a config.json, where the file itself does not say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.weights.gguf import Gguf, read_gguf
from quire.weights.gguf_model import gguf_config

GEMMAS: list[tuple[str, int, int, int, int, int]] = [
    # architecture, layers, hidden, heads, width of a head, query_pre_attn_scalar in the model's own config.json
    ("gemma2", 26, 2304, 8, 256, 256),  # 2B
    ("gemma2", 42, 3584, 16, 256, 256),  # 9B
    ("gemma2", 46, 4608, 32, 128, 144),  # 27B
    ("gemma3", 26, 1152, 4, 256, 256),  # 1B
    ("gemma3", 34, 2560, 8, 256, 256),  # 4B
    ("gemma3", 48, 3840, 16, 256, 256),  # 12B
    ("gemma3", 62, 5376, 32, 128, 168),  # 27B
]


@pytest.mark.parametrize(("name", "layers", "hidden", "heads", "width", "scalar"), GEMMAS)
def test_each_gemma_scales_its_scores_as_its_own_config_says(
    name: str, layers: int, hidden: int, heads: int, width: int, scalar: int
) -> None:
    facts: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": heads // 2,
        "attention.key_length": width,
        "vocab_size": 256,
    }
    named = {"general.architecture": name, **{f"{name}.{key}": value for key, value in facts.items()}}
    config = gguf_config(Gguf(Path("x.gguf"), named, {}))
    assert (config["query_pre_attn_scalar"], config["head_dim"]) == (scalar, width)


@pytest.mark.parametrize("padding", range(0, 64, 8))
@pytest.mark.parametrize("align", [32, 64, 256])
def test_numbers_begin_where_the_files_own_alignment_says(tmp_path: Path, align: int, padding: int) -> None:
    """Headers of every length, for most end where several alignments agree."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if align != 32:  # what holds where a file does not say
        writer.add_custom_alignment(align)
    writer.add_string("general.name", "x" * padding)
    numbers = {"a": np.arange(5, dtype=np.float32), "b": np.arange(7, 17, dtype=np.float32).reshape(2, 5)}
    for name, data in numbers.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    held = read_gguf(path).tensors
    for name, data in numbers.items():
        found = np.fromfile(path, np.float32, data.size, offset=held[name].start).reshape(held[name].shape)
        assert np.array_equal(found, data)
