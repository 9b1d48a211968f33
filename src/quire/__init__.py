"""Quire: an LLM inference engine and OpenAI-compatible server that is small enough to be read.

`import quire` loads nothing: a name is imported when it is first asked for, and those of `quire.LLM` and
`quire.AsyncLLM` alone take torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # not typing's, whose import takes a few milliseconds in which no command can handle Ctrl-C yet
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from quire.async_llm import AsyncLLM
    from quire.config.vllm import EngineArgs
    from quire.errors import QuireError
    from quire.frontend.beam_search import BeamSearchParams
    from quire.llm import LLM
    from quire.types import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

    AsyncEngineArgs = EngineArgs
    AsyncLLMEngine = AsyncLLM

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


_LOADED: Mapping[str, tuple[str, str]] = {
    "LLM": ("quire.llm", "LLM"),
    "AsyncLLM": ("quire.async_llm", "AsyncLLM"),
    "AsyncLLMEngine": ("quire.async_llm", "AsyncLLM"),
    "BeamSearchParams": ("quire.frontend.beam_search", "BeamSearchParams"),
    "EngineArgs": ("quire.config.vllm", "EngineArgs"),
    "AsyncEngineArgs": ("quire.config.vllm", "EngineArgs"),
    "QuireError": ("quire.errors", "QuireError"),
    **{
        name: ("quire.types", name)
        for name in (
            *("ClassificationRequestOutput", "CompletionOutput", "EmbeddingRequestOutput", "PoolingRequestOutput"),
            *("RequestOutput", "RequestOutputKind", "SamplingParams", "ScoringRequestOutput"),
            *("StructuredOutputsParams", "TextPrompt", "TokensPrompt"),
        )
    },
}
"""Module and name of what is loaded when it is first asked for; two of them under vLLM's other name as well."""
_MODULES = ("errors", "types")
"""Modules that `import quire` is enough for."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"quire.{name}")
    if name not in _LOADED:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    module, attribute = _LOADED[name]
    importlib.import_module("quire.spinning").limit_spinning()
    with importlib.import_module("quire.heap").uncollected():
        return getattr(importlib.import_module(module), attribute)
