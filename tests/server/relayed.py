"""A relay on a socket, in front of stubs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from quire.frontend.http_client import Origin
from quire.frontend.upstream import UpstreamBackend
from quire.observability.frontend_metrics import FrontendMetrics
from quire.observability.live_view import Broadcaster, RequestTimeline
from quire.scheduler.routing import RoutingPolicy
from quire.server.access import Keys, Rates
from quire.server.limits import Limits
from quire.server.proxy import create_relay_app
from quire.server.serve import listen, serve, url
from tests.frontend.stub import Stub


@dataclass
class Relayed:
    backend: UpstreamBackend
    timeline: RequestTimeline
    client: httpx.AsyncClient

    async def complete(self, prompt: str, **rest: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "stub", "prompt": prompt, **rest})

    async def text(self, prompt: str, **rest: Any) -> str:
        """A stream's bytes as they came."""
        response = await self.complete(prompt, stream=True, **rest)
        assert response.status_code == 200, response.text
        return response.text

    async def settled(self) -> dict[str, Any]:
        async with asyncio.timeout(100):
            while (stats := (await self.client.get("/stats")).json())["active_requests"]:
                await asyncio.sleep(0.01)
        return dict(stats)


def backend_of(
    *stubs: Stub | str, key: str | None = None, timeline: RequestTimeline | None = None, **rest: Any
) -> UpstreamBackend:
    settings: dict[str, Any] = {"max_outstanding": 100, "start_timeout": 0.3, **rest}
    settings.setdefault("routing", RoutingPolicy())
    return UpstreamBackend(
        [Origin.parse(one if isinstance(one, str) else one.url) for one in stubs],
        supervisor=None,
        observer=FrontendMetrics("stub"),
        request_observer=timeline or RequestTimeline("stubs"),
        kind="openai",
        headers=[(b"authorization", b"Bearer " + key.encode())] if key else [],
        **settings,
    )


@asynccontextmanager
async def relaying(
    *stubs: Stub,
    key: str | None = None,
    api_keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    limits: Limits | None = None,
    root_path: str = "",
    rates: Rates | None = None,
    **rest: Any,
) -> AsyncIterator[Relayed]:
    timeline = RequestTimeline("stubs")
    backend = backend_of(*stubs, key=key, timeline=timeline, **rest)
    app = create_relay_app(
        backend,
        limits=limits or Limits(),
        keys=Keys(api_keys, admin_keys),
        rates=rates or Rates(),
        version="test",
        view=Broadcaster(timeline),
    )
    sock, up = listen("127.0.0.1", 0), asyncio.Event()
    where = url(sock)
    task = asyncio.ensure_future(
        serve(app, backend, sock, log_level="error", root_path=root_path, on_ready=lambda address: up.set())
    )
    waiting = asyncio.ensure_future(up.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=100)
    waiting.cancel()
    if task.done():
        task.result()
    try:
        async with httpx.AsyncClient(base_url=where, trust_env=False, timeout=100, verify=False) as client:
            yield Relayed(backend, timeline, client)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
