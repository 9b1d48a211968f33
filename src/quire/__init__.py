"""Quire: an LLM inference engine and OpenAI-compatible server that is small enough to be read.

`import quire` is light and needs no torch; `quire.LLM` and `quire.AsyncLLM` load what it takes to run
a model when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError
from quire.types import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.frontend.beam_search import BeamSearchParams
    from quire.llm import LLM

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return importlib.import_module("quire.llm").LLM
    if name == "AsyncLLM":
        return importlib.import_module("quire.async_llm").AsyncLLM
    if name == "BeamSearchParams":
        return importlib.import_module("quire.frontend.beam_search").BeamSearchParams
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
