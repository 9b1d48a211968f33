"""Whether an engine is recorded, and where, from settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quire.config.settings import ExecutionConfig
from quire.engine.engine import Engine
from quire.observability.recording_engine import recorded


def recording_folder(execution: ExecutionConfig) -> Path | None:
    """Where recordings go; None: nothing is recorded."""
    return None if execution.recording_dir is None else Path(execution.recording_dir).expanduser()


def build_recording(execution: ExecutionConfig) -> Callable[..., Engine]:
    """What makes the engine. Raises InvalidConfig for a folder that cannot be written to."""
    folder = recording_folder(execution)
    return Engine if folder is None else recorded(folder, execution.recording_max_bytes)
