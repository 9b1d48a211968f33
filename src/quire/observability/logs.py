"""Log lines: their format, one for each answer, and statistics now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from quire.errors import escape_control, escape_control_lines
from quire.observability.observer import FrontendObserver
from quire.types import FinishedRequest


class TextLines(logging.Formatter):
    """`INFO:     message`; further lines, such as a traceback, are indented. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        line = f"{record.levelname + ':':<9} {escape_control(record.getMessage())}"
        trace = _trace(self, record)
        return f"{line}\n{escape_control_lines(trace)}" if trace else line


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, trace if there is one, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_control(record.getMessage()),
        }
        if trace := _trace(self, record):
            line["trace"] = "\n".join(map(escape_control, trace.split("\n")))
        given: Mapping[str, Any] = getattr(record, "fields", {})
        fields = {name: escape_control(value) if isinstance(value, str) else value for name, value in given.items()}
        return msgspec.json.encode({**line, **fields, **line}).decode()


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


FORMATS: Mapping[str, type[logging.Formatter]] = MappingProxyType({"text": TextLines, "json": JsonLines})


def log_config(kind: str) -> dict[str, Any]:
    """A configuration for `logging.config.dictConfig`: everything to stderr, as text or json."""
    handler = {"class": "logging.StreamHandler", "formatter": "lines", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": FORMATS[kind]}},
        "handlers": {"all": handler},
        "root": {"handlers": ["all"], "level": "WARNING"},
        "loggers": {"uvicorn": {"handlers": ["all"], "level": "INFO", "propagate": False}},
    }


EVERY = 10.0
"""Seconds between two lines of statistics."""


class RequestLogger(FrontendObserver):
    """Logs how each answer ended: ids, counts and times, never its text.

    The record also has them as fields, for JSON logs.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def on_end(self, ended: FinishedRequest) -> None:
        """Log an answer that ended."""
        fields = {
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
        answer = f"{ended.id} (request {ended.origin.request_id or '-'}): answer {ended.choice + 1}"
        counts = f"{ended.prompt} prompt tokens ({ended.cached} cached), {ended.tokens} of at most {ended.max_tokens}"
        first = "-" if ended.first is None else f"{ended.first:.3f} s"
        times = f"first after {first}, all after {ended.seconds:.3f} s"
        message = f"{answer} of {ended.sampling.n} ended ({ended.reason}): {counts} new ones, {times}"
        self._log.info(message, extra={"fields": fields})

    def on_refused(self, reason: str) -> None:
        """Log a refused request."""
        self._log.info("a request was refused: %s", reason, extra={"fields": {"refused": reason}})


class ToolLogger(FrontendObserver):
    """Logs each kind of tool that is left out of requests, once: agents send the same tools with every request."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: set[str] = set()

    def on_omitted_tool(self, kind: str) -> None:
        """Log a kind that was not logged before."""
        if kind not in self._known:
            self._known.add(kind)
            self._log.warning(
                "requests declare the tool %s, which this server does not have: it is left out "
                "(--strict-tools refuses it)",
                kind,
            )


async def log_stats(stats: Callable[[], Mapping[str, Any]], log: logging.Logger, every: float = EVERY) -> None:
    """Log throughput and load every `every` seconds in which tokens were generated; runs until cancelled."""
    made = stats().get("generated_tokens", 0)
    while True:
        await asyncio.sleep(every)
        now = stats()
        fresh, made = now.get("generated_tokens", 0) - made, now.get("generated_tokens", 0)
        if fresh > 0:
            running, waiting, cache = now.get("active_requests", 0), now.get("waiting_requests", 0), now.get("cache")
            blocks = f", {100 * cache['utilization']:.1f} % of KV blocks used" if cache else ""
            log.info("%.1f tokens/s, %d running, %d waiting%s", fresh / every, running, waiting, blocks)


async def run_with_stats(
    running: Coroutine[Any, Any, None], stats: Callable[[], Mapping[str, Any]], log: logging.Logger
) -> None:
    """Run a coroutine, and log statistics meanwhile."""
    logging_task = asyncio.ensure_future(log_stats(stats, log))
    try:
        await running
    finally:
        logging_task.cancel()
