"""Settings: every option spelled once, as a field; flags, environment, file and docs all follow from it."""

from __future__ import annotations

from quire.config.access import AccessConfig
from quire.config.option import Option
from quire.config.server import ServerConfig
from quire.config.settings import (
    OPTIONS,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Settings,
)
from quire.config.sources import load
from quire.config.unknown import refuse
from quire.config.upstream import UpstreamConfig

__all__ = [
    "OPTIONS",
    "AccessConfig",
    "CacheConfig",
    "ExecutionConfig",
    "ModelConfig",
    "Option",
    "SchedulerConfig",
    "ServerConfig",
    "Settings",
    "UpstreamConfig",
    "load",
    "refuse",
]
