"""What a checkpoint says of itself: family, format, size and precision, from headers. Needs no torch."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import InvalidModel
from quire.weights.gguf import find_gguf, read_gguf

_PRECISIONS: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

_LARGEST_HEADER = 100 << 20
"""Bytes: the limit of safetensors."""


class ModelDetails(NamedTuple):
    """family: `model_type` of config.json, or a GGUF file's architecture. format: safetensors or gguf. precision: how
    most weights are stored, in GGUF's names. num_bytes: of the files with weights. num_parameters: 0 where headers do
    not say, as for packed weights. embedding_length: of hidden states. Empty, or 0, where unknown."""

    family: str = ""
    format: str = ""
    precision: str = ""
    num_bytes: int = 0
    num_parameters: int = 0
    embedding_length: int = 0


def read_details(place: Path) -> ModelDetails:
    """The details of a folder or a GGUF file; what cannot be read is left out, as the model is loaded elsewhere."""
    with suppress(InvalidModel, OSError, ValueError, RecursionError):
        file = find_gguf(place)
        return _of_folder(place) if file is None else _of_gguf(file)
    return ModelDetails()


def _of_gguf(path: Path) -> ModelDetails:
    file = read_gguf(path)
    kinds: Counter[str] = Counter()
    for tensor in file.tensors.values():
        kinds[tensor.kind.name] += math.prod(tensor.shape)
    return ModelDetails(
        file.architecture,
        "gguf",
        max(kinds, key=kinds.__getitem__, default=""),
        path.stat().st_size,
        kinds.total(),
        _number(file.get("embedding_length")),
    )


def _of_folder(folder: Path) -> ModelDetails:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if not isinstance(config, dict):
        return ModelDetails()
    text = config.get("text_config")
    nested = {**config, **text} if isinstance(text, dict) else config
    files = sorted(folder.glob("*.safetensors"))
    quantization = nested.get("quantization_config")
    packed = isinstance(quantization, dict)
    precision = quantization.get("quant_method") if isinstance(quantization, dict) else _dtype(nested)
    return ModelDetails(
        str(config.get("model_type", "")),
        "safetensors" if files else "",
        str(precision or ""),
        sum(file.stat().st_size for file in files),
        0 if packed else sum(map(_num_parameters, files)),
        _number(nested.get("hidden_size")),
    )


def _dtype(config: Mapping[str, Any]) -> str:
    written = str(config.get("dtype") or config.get("torch_dtype") or "")
    return _PRECISIONS.get(written, written)


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _num_parameters(path: Path) -> int:
    """Numbers in a safetensors file. Raises OSError or ValueError for another file."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= _LARGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
