"""Quire: an LLM inference engine and OpenAI-compatible server that is small enough to be read.

`import quire` is light and needs no torch; `quire.LLM` and `quire.AsyncLLM` load what it takes to run
a model when first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError
from quire.types import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config.vllm import EngineArgs
    from quire.frontend.beam_search import BeamSearchParams
    from quire.llm import LLM

    AsyncEngineArgs = EngineArgs
    AsyncLLMEngine = AsyncLLM

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


_LOADED: Mapping[str, tuple[str, str]] = {
    "LLM": ("quire.llm", "LLM"),
    "AsyncLLM": ("quire.async_llm", "AsyncLLM"),
    "AsyncLLMEngine": ("quire.async_llm", "AsyncLLM"),
    "BeamSearchParams": ("quire.frontend.beam_search", "BeamSearchParams"),
    "EngineArgs": ("quire.config.vllm", "EngineArgs"),
    "AsyncEngineArgs": ("quire.config.vllm", "EngineArgs"),
}
"""Module and name of what is loaded when it is first asked for; two of them under vLLM's other name as well."""


def __getattr__(name: str) -> Any:
    if name not in _LOADED:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    module, attribute = _LOADED[name]
    return getattr(importlib.import_module(module), attribute)
