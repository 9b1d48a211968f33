"""How many file descriptors this process may have open, and how many connections that allows."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import NamedTuple

_SPARE = 64
"""Descriptors kept for what is not a connection: the engine's socket, logs, recordings, kept upstream connections."""

_SPARE_SHARE = 8
"""Of a large limit one in so many is kept, so that connections too many can be accepted and told."""

_BACKLOG = 2048
"""Connections that may wait to be accepted, at most."""

_USUAL = (1 << 20, 1 << 16, 10240)
"""Limits to try where a process may not have its hard limit: macOS calls it infinite, and grants OPEN_MAX."""


class ConnectionLimits(NamedTuple):
    """connections: that may be open at once. backlog: that may wait to be accepted: the server takes all of them at
    once, so as many descriptors have to be free."""

    connections: int
    backlog: int


if sys.platform == "win32":

    def raise_limit() -> int | None:
        """Windows bounds no process's descriptors."""
        return None

else:
    import resource

    def raise_limit() -> int | None:
        """Let this process have as many descriptors as it may (RLIMIT_NOFILE), and those it starts.

        How many these are; None: any number.
        """
        soft, hard = map(_count, resource.getrlimit(resource.RLIMIT_NOFILE))
        for wanted in (hard, *_USUAL):
            if soft < wanted <= hard:
                with suppress(ValueError, OSError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (_limit(wanted), _limit(hard)))
                    soft = wanted
        return None if soft == math.inf else int(soft)

    def _count(limit: int) -> float:
        return math.inf if limit == resource.RLIM_INFINITY else limit

    def _limit(count: float) -> int:
        return resource.RLIM_INFINITY if count == math.inf else int(count)


def connection_limits(asked: int, limit: int | None, each: int) -> ConnectionLimits:
    """What `limit` descriptors allow of `asked` connections that take up to `each` of them, at least one connection."""
    if limit is None:
        return ConnectionLimits(asked, _BACKLOG)
    spare = max(_SPARE, limit // _SPARE_SHARE)
    connections = min(asked, max(1, (limit - spare) // each))
    return ConnectionLimits(connections, max(1, min(_BACKLOG, (limit - connections * each) // 2)))
