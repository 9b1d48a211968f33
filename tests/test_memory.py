"""An LLM without references is freed at once, with its weights, K/V and threads."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.types import StructuredOutputsParams

SHORT = SamplingParams(temperature=0.0, max_tokens=4)
IN_LETTERS = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-z ]+"))


def held() -> Counter[str]:
    """Tensors, and objects of ours that hold something."""
    ours = ("quire.layers", "quire.models", "quire.model_runner", "quire.executors", "quire.engine", "quire.llm")
    counted = Counter[str]()
    for kind, number in Counter(map(type, gc.get_objects())).items():  # each type once: objects are millions
        if kind is torch.Tensor or str(kind.__module__).startswith(ours):
            counted[kind.__qualname__] += number
    return counted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "lookahead": 2},
        {"dtype": "bfloat16", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"deterministic": True},
        {"quantization": "int8", "kv_cache_dtype": "fp8"},
        pytest.param({"kv_cache_dtype": "fp8_e5m2"}, marks=pytest.mark.nightly),
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_an_llm_without_references_is_freed(options: dict[str, Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        before, threads = held(), threading.active_count()
        llm = LLM(**options)
        llm.generate(["a", "b"], [SHORT, IN_LETTERS])
        assert held()["LLM"] == before["LLM"] + 1
        del llm
        assert held() - before == Counter()
        assert threading.active_count() <= threads + 1, "grammars are compiled in a thread of their own"
    finally:
        gc.enable()
