"""How a log record becomes a line, or a few: nothing in a record can look like another record, or move the cursor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from quire.tokenization.escape import escape_control, escape_control_lines


class TextLines(logging.Formatter):
    """`INFO:     message`; what follows it, a traceback say, is indented, line by line."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname + ':':<9} {escape_control(record.getMessage())}"
        trace = _trace(self, record)
        return f"{line}\n{escape_control_lines(trace)}" if trace else line


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, trace if there is one, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_control(record.getMessage()),
        }
        if trace := _trace(self, record):
            told["trace"] = "\n".join(map(escape_control, trace.split("\n")))
        given: Mapping[str, Any] = getattr(record, "fields", {})
        fields = {name: escape_control(value) if isinstance(value, str) else value for name, value in given.items()}
        return msgspec.json.encode(told | {name: value for name, value in fields.items() if name not in told}).decode()


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    said = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return "\n".join([*said, *([formatter.formatStack(record.stack_info)] if record.stack_info else [])])


FORMATS: Mapping[str, type[logging.Formatter]] = MappingProxyType({"text": TextLines, "json": JsonLines})


def log_config(kind: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`, as uvicorn takes it: everything to stderr, as text or json."""
    handler = {"class": "logging.StreamHandler", "formatter": "lines", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": FORMATS[kind]}},
        "handlers": {"all": handler},
        "root": {"handlers": ["all"], "level": "WARNING"},
        "loggers": {"uvicorn": {"handlers": ["all"], "level": "INFO", "propagate": False}},
    }
