"""Files and batches, put together over one folder; or a word on how to have them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.batch_api.batches import Batches
from quire.server.batch_api.files import Files
from quire.server.batch_api.runner import Answer, BatchRunner
from quire.server.batch_api.store import Lock, Store, UnknownFile
from quire.server.limits import Limits

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BatchService(Protocol):
    """Who does work beside the answers: has routes, and a life."""

    def routes(self) -> list[Route]: ...

    async def start(self) -> None:
        """Once the backend is ready."""

    async def stop(self) -> None:
        """Before the backend drains. May be called again."""


class FolderBatchService:
    """Batches in a folder that is this server's alone. width: lines that are asked at once."""

    def __init__(self, folder: Path, answer: Answer, limits: Limits, *, width: int) -> None:
        """Raises InvalidConfig if the folder cannot be had, or another server has it."""
        with ExitStack() as undo:
            self._lock = Lock(folder)
            undo.callback(self._lock.close)
            files = Store(folder / "files", "file")
            self._batches = Batches(Store(folder / "batches", "batch"), files, limits, ENDPOINTS)
            undo.pop_all()
        self._files = Files(files, self._batches.reading)
        self._runner = BatchRunner(self._batches, answer, width=width)

    def routes(self) -> list[Route]:
        return [*self._files.routes(), *self._batches.routes()]

    async def start(self) -> None:
        await self._runner.start()

    async def stop(self) -> None:
        await self._runner.stop()
        self._lock.close()


class NoBatchService:
    """Where no folder was named."""

    def routes(self) -> list[Route]:
        paths = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
        return [Route(path, _closed, methods=["GET", "POST", "DELETE"]) for path in paths]

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""


async def _closed(request: Request) -> Response:
    raise UnknownFile("files and batches need a folder: start the server with --batch-dir", code="no_batch_dir")
