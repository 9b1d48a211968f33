"""OpenAI's Responses: the object, whole, and the stream of events that builds it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.calls import Job
from quire.server.logprobs import TokenText, chat_logprobs
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.responses import ResponsesRequest
from quire.types import TokenLogprobs

_json = msgspec.json.Encoder().encode


class ResponseBuilder:
    """The response object of one answer, in the making."""

    def __init__(self, asked: ResponsesRequest, job: Job, token_text: TokenText) -> None:
        self._asked, self._job, self._text = asked, job, token_text
        self.usage = Usage(job, token_text)
        self.output: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprobs] = []
        self._repeated = len(_json((asked.instructions, asked.tools, asked.text, asked.tool_choice)))

    @property
    def size(self) -> int:
        """Bytes of the object, about: what it repeats of the request, and the answer so far."""
        return self._repeated + PER_TOKEN * self.usage.completion + self.unsaid

    @property
    def unsaid(self) -> int:
        """The same, of the log-probabilities that the item's end will tell."""
        return PER_SCORE * (1 + (self._job.top or 0)) * len(self._logprobs)

    def add(self, part: TextPart) -> dict[str, Any] | None:
        """The item that `part` begins, if it does; its text is added to the newest item."""
        begun = None
        if part.kind == "call" or not self.output or (part.kind != "arguments" and self._kind != part.kind):
            begun = self._begin(part)
            self.output.append(begun)
        item = self.output[-1]
        if part.kind == "arguments":
            item["arguments"] += part.text
        elif part.kind != "call":
            item["content"][0]["text"] += part.text
        return begun

    @property
    def _kind(self) -> str:
        return {"message": "content", "reasoning": "reasoning"}.get(self.output[-1]["type"], "")

    def _begin(self, part: TextPart) -> dict[str, Any]:
        status = "in_progress"
        if part.kind == "call":
            about: dict[str, Any] = {"name": part.text, "call_id": self._job.tools.call_id(), "arguments": ""}
            return {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "status": status, **about}
        if part.kind == "reasoning":
            content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            return {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [content]}
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        about = {"role": "assistant", "content": [content]}
        return {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": status, **about}

    def heard(self, delta: Delta) -> None:
        self.usage.add(delta)
        self._logprobs += delta.logprobs

    def ended(self, item: dict[str, Any], status: str) -> dict[str, Any]:
        """The newest item is complete, or cut short."""
        if "status" in item:
            item["status"] = status
        if item["type"] == "message" and self._job.top is not None:
            made = chat_logprobs(self._logprobs, self._job.top, self._text, as_ids=self._job.as_ids)
            item["content"][0]["logprobs"], self._logprobs = made["content"], []
        return item

    def response(self, finish: str | None, error: Exception | None = None) -> dict[str, Any]:
        """The object. finish: why it ended; None while it goes on."""
        asked, params = self._asked, self._job.calls[0].sampling
        status, why = status_of(finish), None
        if status == "incomplete":
            why = {"reason": "max_output_tokens" if finish == "length" else finish}
        failure = None
        if error is not None:
            status = "failed"
            told = str(error) if isinstance(error, QuireError) else error_responses.INTERNAL
            failure = {"code": "server_error", "message": told}
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": False,
            "error": failure,
            "incomplete_details": why,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "model": self._job.model,
            "output": self.output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._used(),
            "user": None,
            "metadata": {},
        }

    def _used(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached(1)},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }


def status_of(finish: str | None) -> str:
    return "in_progress" if finish is None else "completed" if finish == "stop" else "incomplete"


def whole(builder: ResponseBuilder, job: Job, made: ChoiceBuilder, usage: Usage) -> dict[str, Any]:
    """The response of an answer that was not streamed."""
    builder.usage = usage
    builder.heard(Delta(0, "", (), tuple(made.logprobs)))
    for part in made.parts:
        if part.kind != "reasoning" or job.reasons:
            builder.add(part)
    status = status_of(made.finish_reason)
    for item in builder.output:
        builder.ended(item, "completed" if item is not builder.output[-1] else status)
    return builder.response(made.finish_reason)


class ResponseChunks:
    """Events, numbered: items, their parts, their pieces (see chunks.Chunks)."""

    def __init__(self, asked: ResponsesRequest, job: Job, token_text: TokenText) -> None:
        self._job = job
        self._builder = ResponseBuilder(asked, job, token_text)
        self._splitter = job.splitter()
        self._number = 0
        self._finish: str | None = None
        self._open: dict[str, Any] | None = None

    @property
    def edges(self) -> int:
        return self._builder.size

    def cost(self, ready: Sequence[Delta]) -> int:
        """An item's end repeats the item."""
        return PER_TOKEN * len(ready) + (self._builder.unsaid if self._number else self._builder.size)

    def _event(self, kind: str, **data: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _json(body) + b"\n\n"

    def opening(self) -> bytes:
        """Nothing: events are numbered as they are made, and the first delta's may be already."""
        return b""

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = self._builder.response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def of(self, delta: Delta) -> bytes:
        said = self._begin()
        self._builder.heard(delta)
        parts = self._splitter.feed(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *self._splitter.flush()]
            self._finish = delta.finish_reason
        return said + b"".join([self._part(part) for part in parts if part.kind != "reasoning" or self._job.reasons])

    def _part(self, part: TextPart) -> bytes:
        before = self._open
        begun = self._builder.add(part)
        said = b""
        if begun is not None:
            said = self._close(before, "completed") + self._added(begun)
        item = self._builder.output[-1]
        where = self._where(item)
        if part.kind == "arguments":
            return said + self._event("response.function_call_arguments.delta", **where, delta=part.text)
        if part.kind == "reasoning":
            return said + self._event("response.reasoning_text.delta", **where, content_index=0, delta=part.text)
        if part.kind == "content":
            return said + self._event(
                "response.output_text.delta", **where, content_index=0, delta=part.text, logprobs=[]
            )
        return said

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._builder.output) - 1}

    def _added(self, item: dict[str, Any]) -> bytes:
        """The item without its first text, which comes as a delta."""
        self._open = item
        empty = {**item, "content": []} if "content" in item else item
        said = self._event("response.output_item.added", output_index=len(self._builder.output) - 1, item=empty)
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            said += self._event("response.content_part.added", **self._where(item), content_index=0, part=part)
        return said

    def _close(self, item: dict[str, Any] | None, status: str) -> bytes:
        if item is None:
            return b""
        self._builder.ended(item, status)
        index = self._builder.output.index(item)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            said = self._event("response.function_call_arguments.done", **where, **done)
        else:
            kind, part = ("output_text" if item["type"] == "message" else "reasoning_text"), item["content"][0]
            extra = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            said = self._event(f"response.{kind}.done", **where, content_index=0, text=part["text"], **extra)
            said += self._event("response.content_part.done", **where, content_index=0, part=part)
        return said + self._event("response.output_item.done", output_index=index, item=item)

    def closing(self) -> bytes:
        said = self._begin() + self._close(self._open, status_of(self._finish))
        response = self._builder.response(self._finish)
        return said + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception) -> bytes:
        return self._event("response.failed", response=self._builder.response(None, error))
