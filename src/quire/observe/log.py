"""What a server says about its work in the log: a line for each answer, and now and then one for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from quire.observe.rim_metrics import RimMetrics

EVERY = 10.0
"""Seconds between two lines of statistics; none while nothing is made."""


class LoggedRim(RimMetrics):
    """Rim metrics that also log how each answer ended: counts and times, never its text."""

    def __init__(self, model: str, log: logging.Logger) -> None:
        super().__init__(model)
        self._log = log

    def on_end(
        self,
        reason: str,
        *,
        choice: int,
        n: int,
        prompt: int,
        cached: int,
        tokens: int,
        max_tokens: int,
        first: float | None,
        seconds: float,
    ) -> None:
        super().on_end(
            reason,
            choice=choice,
            n=n,
            prompt=prompt,
            cached=cached,
            tokens=tokens,
            max_tokens=max_tokens,
            first=first,
            seconds=seconds,
        )
        self._log.info(
            "answer %d of %d ended (%s): %d prompt tokens (%d cached), %d of at most %d new ones, "
            "first after %s, all after %.3f s",
            choice + 1,
            n,
            reason,
            prompt,
            cached,
            tokens,
            max_tokens,
            "-" if first is None else f"{first:.3f} s",
            seconds,
        )

    def on_refused(self, reason: str) -> None:
        super().on_refused(reason)
        self._log.info("a request was refused: %s", reason)


async def log_stats(stats: Callable[[], Mapping[str, Any]], log: logging.Logger, every: float = EVERY) -> None:
    """Log throughput and load each `every` seconds while tokens are made; for ever."""
    made = stats().get("generated_tokens", 0)
    while True:
        await asyncio.sleep(every)
        now = stats()
        fresh, made = now.get("generated_tokens", 0) - made, now.get("generated_tokens", 0)
        if fresh > 0:
            log.info(
                "%.1f tokens/s, %d running, %d waiting, %.1f %% of KV blocks used",
                fresh / every,
                now.get("active_requests", 0),
                now.get("waiting_requests", 0),
                100 * now.get("cache", {}).get("utilization", 0.0),
            )


async def telling(
    running: Coroutine[Any, Any, None], stats: Callable[[], Mapping[str, Any]], log: logging.Logger
) -> None:
    """Run, and log statistics beside."""
    beside = asyncio.ensure_future(log_stats(stats, log))
    try:
        await running
    finally:
        beside.cancel()
