"""OpenAI's Responses, without state: requests as chat requests, and answers in their format, whole and as events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import InvalidRequest, QuireError
from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.calls import Job
from quire.server.fields import check, require_text
from quire.server.outputs import ChoiceBuilder, TokenText, Usage, chat_logprobs
from quire.server.schemas import ChatRequest, JsonSchema, ResponseFormat, Sampling
from quire.server.stream import Chunks
from quire.types import TokenLogprobs

_json = msgspec.json.Encoder().encode
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(Sampling, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The same as a chat request. Raises InvalidRequest naming the field."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for i, item in enumerate(items):
        _item(item, f"input[{i}]", messages)
    for name in set(request.include or ()) - {_LOGPROBS}:
        raise InvalidRequest(f"include: {name[:64]!r} is not kept here", param="include")
    logprobs = _LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    rest = {name: getattr(request, name) for name in Sampling.__struct_fields__ if name != "response_format"}
    return ChatRequest(
        **rest,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        stream=request.stream,
        tools=None if request.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request),
        logprobs=logprobs or None,
        top_logprobs=request.top_logprobs,
        include_reasoning=request.include_reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _item(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Append one item of the input to `messages`. Calls and thoughts go into the assistant's message around them."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant" and messages and messages[-1].get("reasoning_content") and not messages[-1]["content"]:
            messages[-1]["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": require_text(item, "name", where), "arguments": require_text(item, "arguments", where)}
        call = {"id": require_text(item, "call_id", where), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": require_text(item, "call_id", where), "content": output})
    elif kind == "reasoning":
        thoughts = item.get("content") or []
        if not isinstance(thoughts, list):
            raise InvalidRequest(f"{where}.content must be a list of parts", param="input")
        texts = [part.get("text") for part in thoughts if isinstance(part, dict)]
        _assistant(messages)["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    else:
        raise InvalidRequest(f"{where}.type {str(kind)[:40]!r} is not supported here", param="input")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, which is appended if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Content of the input as that of a chat message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of parts", param="input")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            raise InvalidRequest(
                f"{where}[{i}]: a part of type {str(kind)[:40]!r} is not supported: this server reads text only",
                param="input",
            )
        parts.append({"type": "text", "text": require_text(part, "text", f"{where}[{i}]")})
    return parts


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise InvalidRequest(f"{where}.type {kind!r} is not supported: use function", param="tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    """The format in `text`, or vLLM's response_format."""
    text = check(request.text or {}, ("format",), where="text.")
    given = text.get("format")
    if given is None:
        return request.response_format
    if request.response_format is not None:
        raise InvalidRequest("text.format and response_format exclude each other", param="text")
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise InvalidRequest("text.format must be an object with a type", param="text")
    kept = check(given, ("type", "name", "description", "schema", "strict"), where="text.format.")
    if not isinstance(schema := kept.get("schema"), dict | None):
        raise InvalidRequest("text.format.schema must be a JSON schema", param="text")
    if kept["type"] != "json_schema":
        return ResponseFormat(type=kept["type"])
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))


# ---------------------------------------------------------------- answers


class ResponseBuilder:
    """The response object of one answer, put together from its parts."""

    def __init__(self, request: ResponsesRequest, job: Job, token_text: TokenText) -> None:
        self._asked = request
        self._job = job
        self._text = token_text
        self.usage = Usage(job, token_text)
        self.output: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprobs] = []
        self._repeated_size = len(_json((request.instructions, request.tools, request.text, request.tool_choice)))

    @property
    def size(self) -> int:
        """About how many bytes the object has: the fields it repeats of the request, and the answer so far."""
        return self._repeated_size + PER_TOKEN * self.usage.completion + self.logprobs_size

    @property
    def logprobs_size(self) -> int:
        """About how many bytes the log-probabilities have that the current item will get."""
        return PER_SCORE * (1 + (self._job.top or 0)) * len(self._logprobs)

    def add(self, part: TextPart) -> dict[str, Any] | None:
        """Append a part to the newest item, or to a new one. Returns the item if it is new."""
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

    def count(self, delta: Delta) -> None:
        """Add a delta's tokens to the usage, and keep its log-probabilities for the current item."""
        self.usage.add(delta)
        self._logprobs += delta.logprobs

    def end(self, item: dict[str, Any], status: str) -> None:
        """Complete the newest item. status: completed or incomplete."""
        if "status" in item:
            item["status"] = status
        if item["type"] == "message" and self._job.top is not None:
            made = chat_logprobs(self._logprobs, self._job.top, self._text, as_ids=self._job.as_ids)
            item["content"][0]["logprobs"], self._logprobs = made["content"], []

    def response(self, finish: str | None, error: Exception | None = None) -> dict[str, Any]:
        """The object. finish: the finish reason; None while the answer goes on."""
        request, params = self._asked, self._job.calls[0].sampling
        status = _status(finish)
        incomplete = None
        if status == "incomplete":
            incomplete = {"reason": "max_output_tokens" if finish == "length" else finish}
        failure = None
        if error is not None:
            status = "failed"
            message = str(error) if isinstance(error, QuireError) else error_responses.INTERNAL
            failure = {"code": "server_error", "message": message}
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": False,
            "error": failure,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "model": self._job.model,
            "output": self.output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
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


def _status(finish: str | None) -> str:
    return "in_progress" if finish is None else "completed" if finish == "stop" else "incomplete"


def response(
    request: ResponsesRequest, job: Job, made: ChoiceBuilder, usage: Usage, token_text: TokenText
) -> dict[str, Any]:
    """The response object of an answer that is not streamed."""
    builder = ResponseBuilder(request, job, token_text)
    builder.usage = usage
    builder.count(Delta(0, "", (), tuple(made.logprobs)))
    for part in made.parts:
        if part.kind != "reasoning" or job.reasons:
            builder.add(part)
    for item in builder.output:
        builder.end(item, "completed" if item is not builder.output[-1] else _status(made.finish_reason))
    return builder.response(made.finish_reason)


class ResponseChunks(Chunks[Delta]):
    """Numbered events: items, their parts, and their deltas."""

    def __init__(self, request: ResponsesRequest, job: Job, token_text: TokenText) -> None:
        self._job = job
        self._builder = ResponseBuilder(request, job, token_text)
        self._splitter = job.splitter()
        self._number = 0
        self._finish: str | None = None
        self._current: dict[str, Any] | None = None

    @property
    def edge_cost(self) -> int:
        """The cost of the whole object, with which a stream begins and ends."""
        return self._builder.size

    def cost(self, ready: Sequence[Delta]) -> int:
        """The cost of these deltas, and of the end of an item, which repeats the item."""
        return PER_TOKEN * len(ready) + (self._builder.logprobs_size if self._number else self._builder.size)

    def _event(self, kind: str, **data: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _json(body) + b"\n\n"

    def _begin(self) -> bytes:
        """The first events. Not in `opening`, which may be called after the first delta is encoded and numbered."""
        if self._number:
            return b""
        response = self._builder.response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def encode(self, delta: Delta) -> bytes:
        """The events of a delta's parts."""
        events = self._begin()
        self._builder.count(delta)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return events + b"".join(map(self._part, self._job.shown_parts(self._splitter, delta)))

    def _part(self, part: TextPart) -> bytes:
        before = self._current
        begun = self._builder.add(part)
        events = b""
        if begun is not None:
            events = self._close(before, "completed") + self._added(begun)
        where = self._where(self._builder.output[-1])
        if part.kind == "arguments":
            return events + self._event("response.function_call_arguments.delta", **where, delta=part.text)
        if part.kind == "reasoning":
            return events + self._event("response.reasoning_text.delta", **where, content_index=0, delta=part.text)
        if part.kind == "content":
            return events + self._event(
                "response.output_text.delta", **where, content_index=0, delta=part.text, logprobs=[]
            )
        return events

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._builder.output) - 1}

    def _added(self, item: dict[str, Any]) -> bytes:
        """An item without its first text, which comes as a delta."""
        self._current = item
        empty = {**item, "content": []} if "content" in item else item
        events = self._event("response.output_item.added", output_index=len(self._builder.output) - 1, item=empty)
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            events += self._event("response.content_part.added", **self._where(item), content_index=0, part=part)
        return events

    def _close(self, item: dict[str, Any] | None, status: str) -> bytes:
        if item is None:
            return b""
        self._builder.end(item, status)
        index = self._builder.output.index(item)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **where, **done)
        else:
            kind, part = ("output_text" if item["type"] == "message" else "reasoning_text"), item["content"][0]
            extra = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            events = self._event(f"response.{kind}.done", **where, content_index=0, text=part["text"], **extra)
            events += self._event("response.content_part.done", **where, content_index=0, part=part)
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def closing(self) -> bytes:
        """The end of the last item, and of the response."""
        events = self._begin() + self._close(self._current, _status(self._finish))
        response = self._builder.response(self._finish)
        return events + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Exception) -> bytes:
        """response.failed."""
        return self._event("response.failed", response=self._builder.response(None, error))
