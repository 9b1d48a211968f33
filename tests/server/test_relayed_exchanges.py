"""Requests through a relay: what the upstream is sent, byte by byte, what the client gets, and what is counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.server.limits import Limits
from tests.expected import check
from tests.frontend.stub import Stub, stub
from tests.server.relayed import Relayed, relaying

pytestmark = pytest.mark.anyio

HEADERS = {
    "authorization": "Bearer client",
    "x-api-key": "client",
    "x-auth-token": "secret of another",
    "cookie": "a=b",
    "x-request-id": "r-1",
    "x-request-timeout": "50",
    "traceparent": "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01",
    "x-kept": "1",
    "te": "trailers",
    "connection": "keep-alive, x-hop",
    "x-hop": "1",
    "accept": "*/*",
    "user-agent": "test",
    "accept-encoding": "gzip",
}
PROMPTS = ("fine", "error", "html", "busy", "no http", "mute", "bad chunk", "trailers", "continue", "until closed")
STREAMED = ("fine", "drip", "dies", "error", "busy", "mute", "bad chunk", "trailers", "until closed", "cut short")


def _hidden(text: str) -> str:
    text = re.sub(r"127\.0\.0\.1:\d+", "HOST", text)
    text = re.sub(r'"latency_ms":[\d.]+', '"latency_ms":0', text)
    return re.sub(r"\b[0-9a-f]{32}\b", "#", text)


async def _written(relayed: Relayed, server: Stub, name: str, method: str, path: str, body: Any = None) -> list[str]:
    before = len(server.asked)
    content = b"" if body is None else json.dumps(body).encode()
    more = {"content-type": "application/json"} if body is not None else {}
    response = await relayed.client.request(method, path, content=content, headers=HEADERS | more)
    fields = ", ".join(f"{k}: {v}" for k, v in response.headers.items() if k not in ("date", "content-length"))
    lines = ["", f"== {name}: {method} {path}", f"{response.status_code} {fields}"]
    lines += [line for line in response.text.split("\n") if line]
    for asked in server.asked[before:]:
        lines += ["  upstream gets", *(f"    {line}" for line in asked.head.strip().split("\r\n"))]
        lines += [f"    {asked.body.decode()}"]
    return [_hidden(line) for line in lines]


async def _counted(relayed: Relayed) -> list[str]:
    stats = {key: value for key, value in relayed.backend.stats().items() if key not in ("upstreams", "latency_ms")}
    [upstream] = relayed.backend.stats()["upstreams"]
    counts = relayed.backend.metrics().decode().splitlines()
    seconds = re.compile(r"_seconds|_created|_bucket|^#")
    seen = json.loads(await relayed.timeline.explain(""))["requests"]
    for request in seen:
        request["seconds"] = {name: seconds is not None for name, seconds in request["seconds"].items()}
    return [
        "",
        "== counted",
        _hidden(json.dumps(stats)),
        _hidden(json.dumps(upstream)),
        *(line for line in counts if not seconds.search(line) and not line.endswith(" 0.0")),
        f"open {len(relayed.backend._open)} under way {relayed.backend._under_way}",
        *map(json.dumps, seen),
    ]


@pytest.mark.parametrize("keyed", [False, True], ids=["without a key", "with a key"])
async def test_exchanges_with_an_upstream_are_as_written_down(keyed: bool) -> None:
    lines: list[str] = []
    key = "upstream" if keyed else None
    async with stub(key) as server, relaying(server, key=key, limits=Limits(max_body_bytes=4000)) as relayed:
        for name in PROMPTS:
            body = {"model": "stub", "prompt": name, "max_tokens": 4, "temperature": 0.5}
            lines += await _written(relayed, server, name, "POST", "/v1/completions?a=1&b=%20", body)
        for name in STREAMED:
            body = {"model": "stub", "prompt": name, "stream": True}
            lines += await _written(relayed, server, f"{name}, streamed", "POST", "/v1/completions", body)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            for name in ("fine", "dies"):
                body = {"prompt": name, "stream": True, "max_completion_tokens": 9, "top_p": 0.25, "seed": 3}
                lines += await _written(relayed, server, name, "POST", path, body)
        lines += await _written(
            relayed, server, "generate", "POST", "/v1/generate", {"prompt": "fine", "max_new_tokens": 5}
        )
        lines += await _written(relayed, server, "generate", "POST", "/v1/generate", {"prompt": "error", "model": "x"})
        lines += await _written(relayed, server, "generate", "POST", "/v1/generate", {"promt": "error"})
        lines += await _written(relayed, server, "models", "GET", "/v1/models")
        lines += await _written(relayed, server, "models", "HEAD", "/v1/models")
        lines += await _written(relayed, server, "no path", "GET", "/v1/nothing")
        lines += await _written(relayed, server, "dots", "GET", "/v1/%2e%2e/x")
        lines += await _written(relayed, server, "tokenize", "POST", "/tokenize", {"prompt": "fine"})
        lines += await _written(relayed, server, "tokenizer", "GET", "/tokenizer_info")
        lines += await _written(relayed, server, "not passed on", "POST", "/reset_prefix_cache")
        lines += await _written(relayed, server, "too large", "POST", "/v1/completions", {"prompt": "x" * 4000})
        lines += await _written(relayed, server, "metrics", "GET", "/metrics")
        lines = [line for line in lines if not re.search(r"^(# |.*(_seconds|_bucket|_created))", line)]
        await relayed.settled()
        lines += await _counted(relayed)
    check(Path(__file__).parent / "expected" / f"relayed{'-keyed' * keyed}.txt", "\n".join(lines))
