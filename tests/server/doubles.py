"""The whole server over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import httpx

from quire.frontend.interface import ModelCard
from quire.frontend.native import NativeBackend
from quire.observability.frontend_metrics import FrontendMetrics
from quire.server.access import Keys, Rates
from quire.server.app import create_app
from quire.server.limits import Limits
from quire.server.live_page import LiveSource
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request
from quire.weights.details import ModelDetails
from tests.frontend.ports import FakePort, Script
from tests.tokenization.vocabulary import CHATML, byte_level

TOKENIZER = Tokenizer(byte_level(), {"eos_token": "<|end|>"})
ANSWER = "a dog and a boat €5 😀"
EOS = 1


def says(text: str) -> list[int]:
    return [*TOKENIZER.encode(text), EOS]


def answers(request: Request) -> list[int]:
    """What the fake engine says: each choice something of its own."""
    return says(ANSWER + (f" {request.choice}" if request.choice else ""))


@dataclass
class Served:
    """A server, its engine, and a client."""

    port: FakePort
    backend: NativeBackend
    client: httpx.AsyncClient
    app: Any
    seen: list[Any] = field(default_factory=list)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", **{"prompt": "the", "max_tokens": 64, **body})
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def chat(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/chat/completions", **{"messages": HI, **body})
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, [DONE] checked and left out."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events(response.text)


HI = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@asynccontextmanager
async def served(
    script: Script | None = answers,
    *,
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    rates: Rates | None = None,
    defaults: dict[str, Any] | None = None,
    template: str | None = CHATML,
    port: FakePort | None = None,
    headers: dict[str, str] | None = None,
    room: int = 128,
    view: LiveSource | None = None,
    about: dict[str, Any] | None = None,
    details: Callable[[], ModelDetails] = ModelDetails,
    tokenizer_info: dict[str, Any] | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    **rest: Any,
) -> AsyncIterator[Served]:
    port = FakePort(script, max_model_len=room) if port is None else port
    card = ModelCard(id="tiny", created=1700000000, max_model_len=room, defaults=defaults or {}, **(about or {}))
    backend = NativeBackend(
        engine=port,
        tokenizer=tokenizer,
        card=card,
        chat=None if template is None else ChatTemplate(template),
        observer=FrontendMetrics("tiny"),
        **rest,
    )
    await backend.start()
    shown = {"details": details, "tokenizer_info": tokenizer_info}
    keys = Keys(api_keys, admin_keys)
    app = create_app(backend, limits=limits, keys=keys, rates=rates, version="9.9", view=view, **shown)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
        yield Served(port, backend, client, app)
    await backend.close()


def check_error(response: httpx.Response, status: int, param: str | None = None, words: str = "") -> dict[str, Any]:
    """An OpenAI error object, whole, that names the field."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    if param is not None:
        assert error["param"] == param, error
    assert words in error["message"], error
    return dict(error)


async def status(app: Any, method: str, target: str, *, root_path: str = "") -> int:
    """As a server would ask it of the application."""
    path, _, query = target.partition("?")
    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": method, "headers": []}
    scope |= {"root_path": root_path}
    scope |= {"path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "server": ("x", 80)}
    seen: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    await app(scope, receive, send)
    return seen[0]
