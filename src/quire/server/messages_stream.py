"""Anthropic's stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.interface import Delta
from quire.frontend.offload import PER_TOKEN
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.calls import Job
from quire.server.logprobs import TokenText
from quire.server.messages import head, stop_reason, usage_of
from quire.server.outputs import Usage

_json = msgspec.json.Encoder().encode


def named(kind: str, **data: Any) -> bytes:
    """One event, which says its type twice."""
    return b"event: " + kind.encode() + b"\ndata: " + _json({"type": kind, **data}) + b"\n\n"


class MessageChunks:
    """Blocks of text, thoughts and calls, one after another (see chunks.Chunks)."""

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._job, self._usage = job, Usage(job, token_text)
        self._splitter = job.splitter()
        self._index = -1
        self._kind = ""
        self._called = False
        self._end: tuple[str | None, str | None] = (None, None)

    edges = 0

    def cost(self, ready: Sequence[Delta]) -> int:
        return PER_TOKEN * len(ready)

    def opening(self) -> bytes:
        return named("message_start", message=head(self._job, self._usage) | {"usage": self._first_usage()})

    def _first_usage(self) -> dict[str, int]:
        return usage_of(self._usage) | {"output_tokens": 0}

    def of(self, delta: Delta) -> bytes:
        self._usage.add(delta)
        parts = self._splitter.feed(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *self._splitter.flush()]
        said = b"".join([self._part(part) for part in parts if part.kind != "reasoning" or self._job.reasons])
        if delta.finish_reason is not None:
            self._end = stop_reason(delta.finish_reason, delta.stop_reason, self._called)
        return said

    def _part(self, part: TextPart) -> bytes:
        if part.kind == "arguments":
            return self._delta({"type": "input_json_delta", "partial_json": part.text})
        said = b""
        if part.kind == "call" or part.kind != self._kind:
            said = self._stop() + self._start(part)
        if part.kind == "content":
            return said + self._delta({"type": "text_delta", "text": part.text})
        if part.kind == "reasoning":
            return said + self._delta({"type": "thinking_delta", "thinking": part.text})
        self._called = True
        return said

    def _start(self, part: TextPart) -> bytes:
        self._index, self._kind = self._index + 1, part.kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif part.kind == "call":
            block = {"type": "tool_use", "id": self._job.tools.call_id(), "name": part.text, "input": {}}
        return named("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return named("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        return named("content_block_stop", index=self._index) if self._index >= 0 else b""

    def closing(self) -> bytes:
        reason, sequence = self._end
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return self._stop() + named("message_delta", delta=delta, usage=usage_of(self._usage)) + named("message_stop")

    def failed(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + error_responses.anthropic(error) + b"\n\n"
