"""Cost of a layer in a decode step: microseconds, and calls of torch operations and of native kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.engine import Engine
from quire.executors.local import LocalExecutor
from quire.model_runner.step_io import Model
from quire.ops.native.ops import NativeOps
from quire.ops.ragged import LayerKV, RaggedBatch

NEW = 10
"""Tokens of each answer. Each but the first is a timed step."""


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class WatchedModel:
    """A wrapper of a model: times its forwards of `tokens` tokens by the clock `now`, or counts their calls."""

    def __init__(self, model: Model, tokens: int, now: Callable[[], float], counts: bool) -> None:
        self.model, self.tokens, self.now, self.counts = model, tokens, now, counts
        self.seconds, self.calls = list[float](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `Model.forward`."""
        if len(batch.tokens) != self.tokens:
            return self.model.forward(batch, kv)
        before, began = self.library_calls, self.now()
        if not self.counts:
            made = self.model.forward(batch, kv)
            self.seconds.append(self.now() - began)
            return made
        with TorchCalls() as torch_calls:  # type: ignore[no-untyped-call]
            made = self.model.forward(batch, kv)
        self.calls = torch_calls.count + self.library_calls - before
        return made

    @property
    def library_calls(self) -> int:
        """Calls of native kernels since the model was loaded, 0 with other operations."""
        ops = getattr(self.model, "ops", None)
        return ops.calls if isinstance(ops, NativeOps) else 0


def layer_cost(
    engine: Engine, executor: LocalExecutor, prompts: Sequence[Sequence[int]], layers: int, now: Callable[[], float]
) -> dict[str, float]:
    """Cost of a layer where a step decodes one token of each prompt: `us`, the median microseconds of the model's
    forward over `layers`, and `calls`, likewise. Embedding and final norm are included, the head is not."""
    model, found = executor.runner.model, dict[bool, WatchedModel]()
    answer(engine, prompts, 1)  # fills the prefix cache, so that all sequences decode together
    try:
        for counts in (False, True):  # separately: counting takes time
            found[counts] = executor.runner.model = WatchedModel(model, len(prompts), now, counts)
            answer(engine, prompts, NEW)
    finally:
        executor.runner.model = model
    return {"us": 1e6 * statistics.median(found[False].seconds) / layers, "calls": found[True].calls / layers}


def answer(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> None:
    """Generate `new` tokens for each prompt."""
    for prompt in prompts:
        engine.submit(prompt, new)
    while engine.has_pending_work:
        engine.step()
