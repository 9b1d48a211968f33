"""What Ray reads from the environment when it is imported."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

LOCAL: Mapping[str, str] = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Its name is of other systems, but on Linux, too, it is what makes Ray listen on loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
)
"""For a Ray of this machine alone: no statistics are sent, and only processes of this user can use it."""


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set what is not set already, before Ray is imported."""
    for name, value in LOCAL.items():
        environ.setdefault(name, value)
