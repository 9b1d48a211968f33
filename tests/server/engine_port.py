"""A real engine behind the server's port: scheduler, prefix cache and look-ahead, over the executor that hashes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.engine.engine import Engine
from quire.engine.executor import Description
from quire.engine.timing import VirtualClock
from quire.observability.engine_metrics import EngineMetrics
from quire.observability.explain import explain
from quire.observability.history import History
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Result
from quire.scheduler.scheduler import Scheduler
from quire.types import FinishReason, Request
from tests.frontend.ports import FakePort
from tests.hash_model import HashDevice, HashHandle

SHIFT = 200
"""Added to the tokens of prompts, since the executor keeps some low ones for faults."""


class _Timed(HashDevice):
    """An executor that takes a quarter of a second for each step."""

    clock: VirtualClock

    def read(self, handle: HashHandle) -> Result:
        """See HashDevice."""
        self.clock.time += 0.25
        return super().read(handle)


class EnginePort(FakePort):
    """The port of an engine in this event loop, whose time passes only while a step runs, or is set by a test."""

    def __init__(
        self, *, pages: int = 1000, size: int = 16, lookahead: int = 0, caching: bool = True, pins: int = 0, **rest: Any
    ) -> None:
        super().__init__(None, pages=pages, max_model_len=pages * size)
        self.kv = KVCacheManager(pages, size, make_prefix_cache(size, caching), max_pinned_blocks=pins)
        self.clock, self.history, self.metrics = VirtualClock(), History(), EngineMetrics()
        self.history.attach(self.kv)
        device = _Timed(pages, size)
        device.clock = self.clock
        scheduler = Scheduler(self.kv, rows=64, **rest)
        observers = (self.history, self.metrics)
        self.engine = Engine(scheduler, device, lookahead=lookahead, clock=self.clock, observers=observers, keep=0)
        self.engine.description = replace(self.engine.description, vocab_size=1000)

    async def start(self) -> Description:
        await super().start()
        return replace(self.engine.description, vocab_size=512, max_model_len=self.about.max_model_len)

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted += requests
        for request in requests:
            self.engine.add(replace(request, prompt=tuple(token + SHIFT for token in request.prompt)))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._go())

    def abort(self, ids: Sequence[str], why: FinishReason = "abort") -> None:
        super().abort(ids, why)
        for id in ids:
            self.engine.abort(id, why)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    async def _go(self) -> None:
        while self.engine.has_pending_work:
            await asyncio.sleep(0)
            self.on_tokens(self.engine.step())

    def explained(self, id: str) -> dict[str, Any]:
        """What `/v1/requests/{id}/explain` would answer for the first choice."""
        found = explain(self.history, f"{id}-0", self.clock.now())
        assert found is not None
        return found

    def counts(self) -> dict[str, Any]:
        """The engine's metrics, by name."""
        return self.metrics.snapshot(self.engine)
