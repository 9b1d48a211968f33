"""What `quire bench cpu` measures: shapes of models, formats of their weights, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smollm2-135m": dict(zip(_FIELDS, (576, 30, 9, 3, 1536, 49152, 2048), strict=True)),
        "llama-3.2-1b": dict(zip(_FIELDS, (2048, 16, 32, 8, 8192, 128256, 8192), strict=True)),
    }
)
"""Public shapes, all Llama, tied heads."""

DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "f32": "float32"})
"""Formats that are a folder with config.json; others are GGUF files."""

CLOCKS: Mapping[str, Callable[[], float]] = MappingProxyType({"wall": time.perf_counter, "cpu": time.process_time})
"""What seconds are."""
