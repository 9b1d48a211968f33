"""Types of GGUF files that can be written."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NAMES: Mapping[str, str] = MappingProxyType({"q4_k": "q4_k_m", "q5_k": "q5_k_m"})
"""Short names of mixtures."""

FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "f32": 0,
        "f16": 1,
        "q4_0": 2,
        "q8_0": 7,
        "q4_k_s": 14,
        "q4_k_m": 15,
        "q5_k_s": 16,
        "q5_k_m": 17,
        "q6_k": 18,
        "bf16": 32,
    }
)
"""What can be written, and `general.file_type` of each, llama.cpp's number of a mixture."""
