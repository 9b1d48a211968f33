"""One upstream server: its connections, and whether it is well."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from quire.backends.http1 import Broken, Headers, Origin, Pool

log = logging.getLogger("uvicorn.error")

_LOOK_EVERY = 5.0
"""Seconds between two looks at a server that is well."""
_LOOK_SOON = 0.5
"""Seconds between two looks at one that is not."""
_LOOK_TIMEOUT = 10.0
"""Seconds after which a look found nothing."""
_MISSES = 2
"""Looks in a row that found nothing until a server counts as away."""


class Away(Exception):
    """No answer, or not the right one; `str` says what."""


class Upstream:
    """One server. well: it answers. outstanding: requests it has."""

    def __init__(self, origin: Origin, headers: Headers) -> None:
        self.origin, self.pool, self.headers = origin, Pool(origin), headers
        self.well, self.outstanding, self.asked, self.failed, self.why = False, 0, 0, 0, "not asked yet"
        self._misses = 0
        self._trouble = asyncio.Event()

    async def get(self, path: str, *, timeout: float = _LOOK_TIMEOUT) -> tuple[int, bytes]:
        """(status, body). Raises Away."""
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
            raise Away(f"no answer within {timeout:g} s") from error
        except Broken as error:
            raise Away(str(error)) from error
        return connection.status, b"".join(parts)

    async def look(self) -> None:
        """Whether it is well. A server without /health is, if it says so."""
        try:
            status, _ = await self.get("/health")
        except Away as error:
            self.missed(str(error))
            return
        if status >= 500:
            self.missed(f"its /health says {status}")
            return
        if not self.well:
            log.info("upstream %s answers", self.origin)
        self.well, self._misses, self.why = True, 0, ""

    def missed(self, why: str, *, surely: bool = False) -> None:
        self._misses += 1
        if self.well and (surely or self._misses >= _MISSES):
            log.warning("upstream %s is away: %s", self.origin, why)
            self.well = False
            self._trouble.set()
        self.why = why

    async def watch(self) -> None:
        """For ever."""
        while True:
            if self.well and not self._misses:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY):
                        await self._trouble.wait()
            else:
                await asyncio.sleep(_LOOK_SOON)
            self._trouble.clear()
            await self.look()
