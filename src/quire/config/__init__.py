"""Settings: every option spelled once, as a field; flags, environment, file and docs all follow from it."""

from __future__ import annotations

from quire.config.option import Option
from quire.config.settings import OPTIONS, SchedulerConfig, ServerConfig, Settings
from quire.config.sources import load
from quire.config.unknown import refuse

__all__ = ["OPTIONS", "Option", "SchedulerConfig", "ServerConfig", "Settings", "load", "refuse"]
