"""What a server says about its work in the log: a line for each answer, and now and then one for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from quire.types import FinishedRequest

EVERY = 10.0
"""Seconds between two lines of statistics; none while nothing is made."""


class RequestLogger:
    """A `RimObserver` that logs how each answer ended: ids, counts and times, never its text.

    What a line says in words, its record also has as fields, for logs that programs read.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def on_first(self, seconds: float) -> None: ...

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None: ...

    def on_surplus(self, tokens: int) -> None: ...

    def on_end(self, ended: FinishedRequest) -> None:
        self._log.info(
            "%s (request %s): answer %d of %d ended (%s): %d prompt tokens (%d cached), %d of at most %d new ones, "
            "first after %s, all after %.3f s",
            ended.id,
            ended.origin.request_id or "-",
            ended.choice + 1,
            ended.sampling.n,
            ended.reason,
            ended.prompt,
            ended.cached,
            ended.tokens,
            ended.max_tokens,
            "-" if ended.first is None else f"{ended.first:.3f} s",
            ended.seconds,
            extra={"fields": _fields(ended)},
        )

    def on_refused(self, reason: str) -> None:
        self._log.info("a request was refused: %s", reason, extra={"fields": {"refused": reason}})

    def text(self) -> bytes:
        return b""


def _fields(ended: FinishedRequest) -> dict[str, Any]:
    return {
        "id": ended.id,
        "request_id": ended.origin.request_id or None,
        "choice": ended.choice,
        "finish_reason": ended.reason,
        "prompt_tokens": ended.prompt,
        "cached_tokens": ended.cached,
        "completion_tokens": ended.tokens,
        "first_token_seconds": ended.first,
        "seconds": ended.seconds,
    }


async def log_stats(stats: Callable[[], Mapping[str, Any]], log: logging.Logger, every: float = EVERY) -> None:
    """Log throughput and load each `every` seconds while tokens are made; for ever."""
    made = stats().get("generated_tokens", 0)
    while True:
        await asyncio.sleep(every)
        now = stats()
        fresh, made = now.get("generated_tokens", 0) - made, now.get("generated_tokens", 0)
        if fresh > 0:
            running, waiting, cache = now.get("active_requests", 0), now.get("waiting_requests", 0), now.get("cache")
            blocks = f", {100 * cache['utilization']:.1f} % of KV blocks used" if cache else ""
            log.info("%.1f tokens/s, %d running, %d waiting%s", fresh / every, running, waiting, blocks)


async def telling(
    running: Coroutine[Any, Any, None], stats: Callable[[], Mapping[str, Any]], log: logging.Logger
) -> None:
    """Run, and log statistics beside."""
    beside = asyncio.ensure_future(log_stats(stats, log))
    try:
        await running
    finally:
        beside.cancel()
