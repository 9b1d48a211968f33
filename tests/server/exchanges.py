"""Requests over HTTP, and everything that follows from them, as text: see `test_exchanges`.

The model answers with what the last user says, so that a request decides what is parsed; a completion's prompt `say X`
is answered with X.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from quire.server.limits import Limits
from quire.types import Request, SamplingParams
from tests.server.doubles import ANSWER, TOKENIZER, Served, says, served
from tests.tokenization.vocabulary import CHATML

TEMPLATE = (
    CHATML.replace("{% for", "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for", 1)
    .replace(
        "{{ message['content'] }}",
        "{{ message['content'] or '' }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
        "{{ message.reasoning_content or '' }}",
    )
    .replace("{% if add_generation_prompt", "{{ extra or '' }}{% if add_generation_prompt")
)
"""Shows tools, calls and thoughts."""

LIMITS = Limits(
    max_n=4,
    max_answers=6,
    max_prompts=5,
    max_logprobs=5,
    max_stop_strings=3,
    max_stop_chars=20,
    max_token_ids=4,
    max_bad_words=2,
    max_bad_chars=12,
    max_depth=12,
    max_containers=300,
    max_body_bytes=20_000,
)


def model(request: Request) -> Sequence[int]:
    """What the last user says, or what a prompt asks to say."""
    text = TOKENIZER.decode(request.prompt)
    users = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    said = users[-1] if users else text.removeprefix("say ") if text.startswith("say ") else ANSWER
    return says(said + (f" {request.choice}" if request.choice else ""))


class Exchange(NamedTuple):
    """One request. body: as JSON, or as it is sent."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] = {}


async def written(exchanges: Mapping[str, Exchange], **settings: Any) -> str:
    """Every exchange with a server of these settings: the answer, and what reached the engine."""
    lines = []
    settings = {"script": model, "template": TEMPLATE, "limits": LIMITS, "room": 1024} | settings
    async with served(**settings) as server:
        for name, exchange in exchanges.items():
            lines += ["", f"== {name}", *await _exchanged(server, exchange)]
        lines += ["", "== afterwards", *_afterwards(server)]
        metrics = server.backend.metrics().decode().splitlines()
        seconds = re.compile(r"_seconds|_created|_bucket|^#")
        lines += [line for line in metrics if not seconds.search(line) and not line.endswith(" 0.0")]
    return "\n".join(lines)


def _afterwards(server: Served) -> list[str]:
    """What the backend still holds."""
    return [f"active {len(server.backend._active)}", f"aborted {len(server.port.aborted)}"]


async def _exchanged(server: Served, exchange: Exchange) -> list[str]:
    before = len(server.port.submitted)
    body = exchange.body
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-request-id": "r", **exchange.headers}
    response = await server.client.request(exchange.method, exchange.path, content=content, headers=headers)
    names = _Names()
    asked = content.decode("utf-8", "replace")
    lines = [f"{exchange.method} {exchange.path} {asked if len(asked) < 400 else asked[:400] + '...'}"]
    lines += [
        f"{response.status_code} "
        + ", ".join(f"{k}: {names.hidden(v)}" for k, v in response.headers.items() if k != "content-length")
    ]
    if response.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson")):
        lines += [names.hidden(line) for line in response.text.split("\n") if line]
    else:
        lines += [names.hidden(response.text)]
    return lines + [f"  engine: {_request(request)}" for request in server.port.submitted[before:]]


class _Names:
    """Ids and times are not the same twice: the same id is the same number within an answer."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def hidden(self, text: str) -> str:
        def number(found: re.Match[str]) -> str:
            return f"{found[1]}#{self.known.setdefault(found[0], len(self.known))}"

        text = re.sub(r"\b((?:[a-z]+[-_])?)(?:[0-9a-f]{32}(?:1[0-9a-f]{4})?|[0-9a-f]{24})\b", number, text)
        text = re.sub(r'(?<=")()[0-9a-f]{9}(?=")', number, text)
        text = re.sub(r'"(p50|p99)":[\d.]+', r'"\1":0.0', text)
        text = re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)
        text = re.sub(r'"created_at":"[\dTZ:-]+"', '"created_at":"then"', text)
        text = re.sub(r'_duration":[1-9]\d*', '_duration":1', text)
        return re.sub(r'"latency_ms":[\d.]+', '"latency_ms":0', text)


def _request(request: Request) -> str:
    """The fields of a request that are not defaults, and its prompt as text."""
    plain = SamplingParams()
    sampling = {
        each.name: value
        for each in fields(SamplingParams)
        if (value := getattr(request.sampling, each.name)) != getattr(plain, each.name)
    }
    rest = {
        each.name: value
        for each in fields(Request)
        if each.name not in ("id", "prompt", "sampling", "seed")
        and (value := getattr(request, each.name)) != each.default
    }
    rest["stop"] = sorted(request.stop)
    if sampling.get("seed") is not None:
        rest["seed"] = request.seed
    if request.deadline != float("inf"):
        rest["deadline"] = "set"
    return f"{len(request.prompt)} tokens {TOKENIZER.decode(request.prompt)!r} {rest} {sampling}"
