"""The requests that clients were seen to send (`test_zoo` records them) are answered in the shape of their API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ollama
import pytest
from anthropic import types as anthropic
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.server.fields import NO_THREADS
from tests.clients.zoo import CELLS, RECORDED, pinned, results
from tests.live import Live

FEW, CALLS = 12, 40
"""Tokens of an answer, and of one with tools, whose calls come in pieces only when they have begun."""
LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
WHOLE: Mapping[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/embeddings": CreateEmbeddingResponse,
    "/v1/responses": Response,
    "/v1/messages": anthropic.Message,
    "/v1/messages/count_tokens": anthropic.MessageTokensCount,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
}
PIECES: Mapping[str, Any] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Completion,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
}
"""Of streams whose pieces have one shape."""

EVENTS: Mapping[str, TypeAdapter[Any]] = {
    "/v1/responses": TypeAdapter(ResponseStreamEvent),
    "/v1/messages": TypeAdapter(anthropic.RawMessageStreamEvent),
}
"""Of streams whose pieces have names."""


def known(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text("utf-8"))


def short(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for a short answer, by the field that it has for that or by the usual one."""
    few = CALLS if body.get("tools") else FEW
    if path.startswith("/api/"):
        return {**body, "options": {**(body.get("options") or {}), "num_predict": few}}
    usual = {"/v1/responses": {"max_output_tokens"}, "/v1/messages/count_tokens": set[str]()}
    limits = LIMITS & body.keys() or usual.get(path, {"max_tokens"})
    return {**body, **{limit: min(body.get(limit) or few, few) for limit in limits}}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", [path.stem for path in sorted(RECORDED.glob("*.json"))])
def test_what_a_client_sends_is_answered_in_its_shape(name: str, cell: str, servers: Mapping[str, Live]) -> None:
    for asked in known(name).get(cell, ())[:4]:
        path, body = asked["path"].partition("?")[0], asked["body"]
        if body.get("stream", path.startswith("/api/") and cell == "cancel"):
            check_stream(servers[cell], path, short(path, body), whole=cell != "cancel")
        else:
            answer = servers[cell].http.post(path, json=short(path, body))
            if "thread" in body:
                assert answer.json()["error"]["details"]["error_code"] == NO_THREADS
                continue
            assert answer.status_code == 200, answer.text
            WHOLE[path].model_validate(answer.json())


def check_stream(live: Live, path: str, body: Any, *, whole: bool) -> None:
    lines = []
    with live.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            lines += [line.removeprefix("data: ")] if line and not line.startswith("event:") else []
            if len(lines) > 3 and not whole:
                return
    done = lines.pop() if path in ("/v1/chat/completions", "/v1/completions") else "[DONE]"
    assert done == "[DONE]"
    pieces = [json.loads(line) for line in lines]
    for piece in pieces:
        assert "error" not in piece or piece["error"] is None
        if path in PIECES:
            PIECES[path].model_validate(piece)
        else:
            EVENTS[path].validate_python(piece)
    assert len(pieces) > 2


def test_every_cell_that_a_client_has_was_recorded() -> None:
    for client in pinned():
        assert known(client.name).keys() == results()[client.name]["cells"].keys()
