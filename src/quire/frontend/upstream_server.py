"""One upstream server: its connections, and whether it is well."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from quire.frontend.http_client import ConnectionLost, Headers, Origin, Pool

log = logging.getLogger("uvicorn.error")

_CHECK_INTERVAL = 5.0
"""Seconds between two looks at a server that is well."""
_RETRY_INTERVAL = 0.5
"""Seconds between two looks at one that is not."""
_CHECK_TIMEOUT = 10.0
"""Seconds after which a look found nothing."""
_MAX_FAILURES = 2
"""Looks in a row that found nothing until a server counts as away."""


class UpstreamDown(Exception):
    """No answer, or not the right one; `str` says what."""


class Upstream:
    """One server. healthy: it answers. outstanding: requests it has."""

    def __init__(self, origin: Origin, headers: Headers) -> None:
        self.origin, self.pool, self.headers = origin, Pool(origin), headers
        self.healthy, self.outstanding, self.num_requests, self.num_failed, self.why = False, 0, 0, 0, "not asked yet"
        self._failures = 0
        self._changed = asyncio.Event()

    async def get(self, path: str, *, timeout: float = _CHECK_TIMEOUT) -> tuple[int, bytes]:
        """(status, body). Raises UpstreamDown."""
        try:
            async with asyncio.timeout(timeout):
                connection = await self.pool.exchange("GET", path, self.headers, b"")
                try:
                    parts = []
                    while data := await connection.read():
                        parts.append(data)
                finally:
                    self.pool.give_back(connection)
        except TimeoutError as error:
            raise UpstreamDown(f"no answer within {timeout:g} s") from error
        except ConnectionLost as error:
            raise UpstreamDown(str(error)) from error
        return connection.status, b"".join(parts)

    async def check(self) -> None:
        """Whether it is well. A server without /health is, if it says so."""
        try:
            status, _ = await self.get("/health")
        except UpstreamDown as error:
            self.record_failure(str(error))
            return
        if status >= 500:
            self.record_failure(f"its /health says {status}")
            return
        if not self.healthy:
            log.info("upstream %s answers", self.origin)
        self.healthy, self._failures, self.why = True, 0, ""

    def record_failure(self, why: str, *, surely: bool = False) -> None:
        self._failures += 1
        if self.healthy and (surely or self._failures >= _MAX_FAILURES):
            log.warning("upstream %s is away: %s", self.origin, why)
            self.healthy = False
            self._changed.set()
        self.why = why

    async def watch(self) -> None:
        """For ever."""
        while True:
            if self.healthy and not self._failures:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_INTERVAL):
                        await self._changed.wait()
            else:
                await asyncio.sleep(_RETRY_INTERVAL)
            self._changed.clear()
            await self.check()
