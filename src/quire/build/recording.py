"""Whether an engine is recorded, from settings."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.settings import ExecutionConfig
from quire.engine.engine import Engine
from quire.observe.recorded import recorded


def build_recording(execution: ExecutionConfig) -> Callable[..., Engine]:
    """What makes the engine. Raises InvalidConfig for a folder that cannot be written to."""
    folder = execution.recording_dir
    return Engine if folder is None else recorded(folder, execution.recording_max_bytes)
