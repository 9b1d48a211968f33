"""`GET /v1/recording`: what the flight recorder has written so far, as one file for `quire replay`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from quire.observability.recording_format import SUFFIX, written_bytes
from quire.server.batch_api.store import UnknownFile


class Recordings:
    """The segments in a folder, one behind the other, oldest first; None: nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def routes(self) -> list[Route]:
        return [Route("/v1/recording", self.send)]

    async def send(self, request: Request) -> Response:
        """Raises UnknownFile where there is none."""
        if self._folder is None:
            raise UnknownFile("nothing is recorded: start the server with --recording-dir")
        paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        name = {"Content-Disposition": f'attachment; filename="recording{SUFFIX}"'}
        return StreamingResponse(_pieces(paths), media_type="application/octet-stream", headers=name)


async def _pieces(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        try:
            yield await asyncio.to_thread(written_bytes, path)
        except FileNotFoundError:  # the oldest make room for the newest while they are sent
            continue
