"""OpenAI's Responses: requests as chat requests, and answers in their format, whole and as events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from quire.errors import InvalidRequest, QuireError
from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.multimodal.inputs import ImagePart
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.calls import Job
from quire.server.documents import file_text, refusal_text
from quire.server.fields import check, require_text
from quire.server.item_references import is_reference, output_id
from quire.server.nested import check_nested
from quire.server.outputs import ChoiceBuilder, Usage, chat_logprobs_of, timings
from quire.server.response_store import as_items
from quire.server.schemas import (
    ChatRequest,
    ResponseFormat,
    Sampling,
    StreamOptions,
    response_format,
    shared_fields,
)
from quire.server.stream import Chunks
from quire.server.tools import hosted_kind, joined_name
from quire.types import TokenLogprobs

_json = msgspec.json.Encoder().encode
_LOGPROBS = "message.output_text.logprobs"

# What else `include` may ask for: parts of items that answers here never have.
_NOTHING_TO_INCLUDE = (
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)

# The argument of a custom tool, whose input is text.
_INPUT = "input"

# Fields that need stored responses, and what to do without.
_NEEDS_STATE = (
    ("previous_response_id", "send the whole conversation as input"),
    ("background", "answers come on the connection that asked"),
)

# The type of an event, and its other fields.
_Event = tuple[str, dict[str, Any]]

_CALLS = ("function_call", "custom_tool_call")

# The items that a part may belong to.
_ITEMS: Mapping[str, tuple[str, ...]] = {
    "content": ("message",),
    "reasoning": ("reasoning",),
    "call": _CALLS,
    "arguments": _CALLS,
}


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
    thinking: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None


def as_chat(request: ResponsesRequest, earlier: Sequence[Mapping[str, Any]] | None = None) -> ChatRequest:
    """The same as a chat request. Raises InvalidRequest naming the field.

    earlier: items of the conversation before the input; None where no response is stored, and what needs that is
    refused.
    """
    if earlier is None:
        _refuse_state(request)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    for item in earlier or ():
        _item(item, "previous_response_id", messages)
    for i, item in enumerate(as_items(request.input)):
        _item(item, f"input[{i}]", messages)
    for name in set(request.include or ()) - {_LOGPROBS, *_NOTHING_TO_INCLUDE}:
        raise InvalidRequest(f"include: {name[:64]!r} is not available from this server", param="include")
    logprobs = _LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    changed: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": request.tools and [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        "tool_choice": _choice(request.tool_choice),
        "response_format": _format(request),
        "logprobs": logprobs or None,
        "stream_options": None,
    }
    return ChatRequest(**shared_fields(request) | changed)


def _refuse_state(request: ResponsesRequest) -> None:
    for name, why in _NEEDS_STATE:
        if getattr(request, name):
            raise InvalidRequest(
                f"{name}: this server stores no responses: {why}", param=name, code="unsupported_field"
            )


def _item(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Append one item of the input to `messages`. Calls and thoughts go into the assistant's message around them."""
    kind = item.get("type", "message")
    if kind == "message":
        check_nested(item, "item.message", where)
        role = item.get("role")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant" and messages and messages[-1].get("reasoning_content") and not messages[-1]["content"]:
            messages[-1]["content"] = message["content"]
        else:
            messages.append(message)
    elif kind in ("function_call", "custom_tool_call"):
        check_nested(item, "item.call", where)
        if kind == "function_call":
            arguments = require_text(item, "arguments", where)
        else:
            arguments = _json({_INPUT: require_text(item, "input", where)}).decode()
        function = {"name": _shown_name(item, require_text(item, "name", where)), "arguments": arguments}
        call = {"id": require_text(item, "call_id", where), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        check_nested(item, "item.result", where)
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": require_text(item, "call_id", where), "content": output})
    elif kind == "reasoning":
        check_nested(item, "item.reasoning", where)
        thoughts = item.get("content") or []
        if not isinstance(thoughts, list):
            raise InvalidRequest(f"{where}.content must be a list of parts", param="input")
        for i, part in enumerate(thoughts):
            if isinstance(part, dict):
                check_nested(part, "item.reasoning.part", f"{where}.content[{i}]")
        texts = [part.get("text") for part in thoughts if isinstance(part, dict)]
        if said := "".join(text for text in texts if isinstance(text, str)):
            message = _assistant(messages)
            before = message.get("reasoning_content")
            message["reasoning_content"] = f"{before}\n{said}" if before else said
    elif is_reference(item):
        raise InvalidRequest(
            f"{where}: an item by reference (item_reference) needs stored responses, and there are none here: send the "
            "item itself",
            param="input",
        )
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
    parts = list[dict[str, Any]]()
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            check_nested(part, "input_image", f"{where}[{i}]")
            if part.get("file_id"):
                what = f"{where}[{i}].file_id: files are not images here: send an image_url"
                raise InvalidRequest(what, param="input")
            kept = {name: part[name] for name in ("detail", "cache_control") if part.get(name) is not None}
            parts.append(ImagePart(part.get("image_url"), f"{where}[{i}]", **kept))
            continue
        if kind == "refusal":
            text = refusal_text(part, f"{where}[{i}]")
        elif kind == "input_file":
            text = file_text(part, "input_file", f"{where}[{i}]")
        elif kind in ("input_text", "output_text", "text"):
            check_nested(part, "text", f"{where}[{i}]")
            text = require_text(part, "text", f"{where}[{i}]")
        else:
            raise InvalidRequest(
                f"{where}[{i}]: a part of type {str(kind)[:40]!r} is not supported: text and images are", param="input"
            )
        marks = {name: part[name] for name in ("cache_control",) if part.get(name) is not None}
        parts.append({"type": "text", "text": text, **marks})
    return parts


def _shown_name(given: Mapping[str, Any], name: str) -> str:
    """The name by which the model sees the function `name`, which may be that of a namespace."""
    return joined_name(given["namespace"], name) if isinstance(given.get("namespace"), str) else name


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool as chat requests have it."""
    kind = tool.get("type")
    if hosted_kind(tool) is not None:
        return dict(tool)
    if kind == "namespace":
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise InvalidRequest(f"{where}.tools must be a list of functions", param="tools")
        return {**tool, "tools": [_tool(one, f"{where}.tools[{i}]") for i, one in enumerate(inner)]}
    if kind == "custom":
        return {"type": "function", "function": _custom(tool, where)}
    if kind != "function":
        raise InvalidRequest(
            f"{where}.type {str(kind)[:40]!r} is not supported: use function, custom or namespace", param="tools"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _custom(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function whose only argument is the tool's input.

    A grammar of the input is described to the model. It is not enforced: within JSON, other tokens write the same text.
    """
    kept = check({k: v for k, v in tool.items() if k != "type"}, ("name", "description", "format"), where=f"{where}.")
    about = kept.get("description", "")
    form = kept.get("format", {"type": "text"})
    if not isinstance(about, str) or not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        raise InvalidRequest(
            f"{where} needs a description in text, and a format of type text or grammar", param="tools"
        )
    check_nested(form, "grammar", f"{where}.format")
    if form["type"] == "grammar":
        definition, syntax = require_text(form, "definition", f"{where}.format"), form.get("syntax")
        about = f"{about}\n\nThe input must match this grammar ({syntax}):\n{definition}".lstrip()
    properties = {_INPUT: {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [_INPUT], "additionalProperties": False}
    return {"name": kept.get("name"), "description": about, "parameters": schema}


def _custom_names(tools: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The names by which the model sees custom tools. tools: of a request that was taken."""
    for tool in tools:
        if tool["type"] == "custom":
            yield tool["name"]
        elif tool["type"] == "namespace":
            yield from (joined_name(tool["name"], name) for name in _custom_names(tool["tools"]))


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        check_nested(choice, "item.choice", "tool_choice")
        name = choice.get("name")
        return {"type": "function", "function": {"name": _shown_name(choice, name) if isinstance(name, str) else name}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode", "auto"), "tools": [_choice(tool) for tool in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    """The format in `text`, or vLLM's response_format."""
    given = check(request.text or {}, ("format",), where="text.").get("format")
    if given is None:
        return request.response_format
    if request.response_format is not None:
        raise InvalidRequest("text.format and response_format cannot be used together", param="text")
    return response_format(given, "text.format")


def _call_input(arguments: str) -> str:
    """The input of a call of a custom tool. Arguments that were cut short, or are no object, stay as they are."""
    with suppress(msgspec.DecodeError, RecursionError):
        given = msgspec.json.decode(arguments)
        if isinstance(given, dict) and isinstance(given.get(_INPUT), str):
            return str(given[_INPUT])
    return arguments


# ---------------------------------------------------------------- answers


class ResponseChunks(Chunks[Delta]):
    """The response object of one answer, put together from its parts, and the numbered events of its stream.

    keep: stores the complete object, and says whether that succeeded; None: it is not to be stored. keep_cost: of that.
    """

    def __init__(self, job: Job, keep: Callable[[dict[str, Any]], bool] | None = None, keep_cost: int = 0) -> None:
        self._request: ResponsesRequest = job.request
        self._job = job
        self._keep = keep
        self._keep_cost = keep_cost
        self.usage = Usage(job)
        self._splitter = job.splitter()
        self._output: list[dict[str, Any]] = []
        # Those that the current item will get.
        self._logprobs: list[TokenLogprobs] = []
        self._custom = frozenset(_custom_names(job.request.tools or ()))
        # The arguments of the current call of a custom tool, whose input is sent when they are complete.
        self._arguments = ""
        self._number = 0
        self.last: dict[str, Any] = {}
        self.finish: str | None = None
        asked: ResponsesRequest = job.request
        repeated = (asked.instructions, asked.tools, asked.text, asked.tool_choice, asked.metadata)
        self._repeated_size = len(_json(repeated))

    @property
    def edge_cost(self) -> int:
        """The cost of the whole object, with which a stream begins and ends."""
        return self._keep_cost + self._repeated_size + PER_TOKEN * self.usage.completion + self._logprobs_size

    @property
    def _logprobs_size(self) -> int:
        return PER_SCORE * (1 + (self._job.top or 0)) * len(self._logprobs)

    def cost(self, ready: Sequence[Delta]) -> int:
        """The cost of these deltas, and of the end of an item, which repeats the item."""
        return PER_TOKEN * len(ready) + (self._logprobs_size if self._number else self.edge_cost)

    # ---------------------------------------------------------------- events

    def _numbered(self, events: Iterable[_Event]) -> bytes:
        encoded = b""
        for kind, data in events:
            body = {"type": kind, "sequence_number": self._number, **data}
            self._number += 1
            encoded += b"event: " + kind.encode() + b"\ndata: " + _json(body) + b"\n\n"
        return encoded

    def _begin(self) -> bytes:
        """The first events. Not in `opening`, which may be called after the first delta is encoded and numbered."""
        if self._number:
            return b""
        data = {"response": self._response(None)}
        return self._numbered([("response.created", data), ("response.in_progress", data)])

    def encode(self, delta: Delta) -> bytes:
        """The events of a delta's parts."""
        events = self._begin()
        self.usage.add(delta)
        self._logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason
        parts = self._job.shown_parts(self._splitter, delta)
        return events + b"".join(self._numbered(self._add(part)) for part in parts)

    def closing(self) -> bytes:
        """The end of the last item, and of the response."""
        events = self._begin() + self._numbered(self._end_item(_status(self.finish)))
        return events + self._end(self._complete())

    def failed(self, error: Exception) -> bytes:
        """response.failed."""
        return self._end(self._response(None, error))

    def cancelled(self) -> bytes:
        """The end of the last item, and response.cancelled."""
        events = self._begin() + self._numbered(self._end_item("incomplete"))
        return events + self._end({**self._response(None), "status": "cancelled"})

    def _end(self, response: dict[str, Any]) -> bytes:
        """The last event. Afterwards `last` is its response."""
        self.last = response
        return self._numbered([(f"response.{response['status']}", {"response": response})])

    # ---------------------------------------------------------------- the object

    def whole(self, made: ChoiceBuilder) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        self._logprobs += made.logprobs
        for part in made.parts:
            deque(self._add(part), maxlen=0)
        self.finish = made.finish_reason
        deque(self._end_item(_status(self.finish)), maxlen=0)
        return self._complete()

    def shown(self) -> dict[str, Any]:
        """The object of an answer that goes on."""
        return self._response(None) | ({} if self._number else {"status": "queued"})

    def _complete(self) -> dict[str, Any]:
        response = self._response(self.finish)
        if self._keep is not None:
            response["store"] = self._keep(response)
        return response

    def _add(self, part: TextPart) -> Iterator[_Event]:
        """Append a part to the current item, or to a new one. Each event is to be encoded before the next is made."""
        if part.kind == "call" or not self._output or self._output[-1]["type"] not in _ITEMS[part.kind]:
            yield from self._end_item("completed")
            yield from self._begin_item(part)
        item, where = self._output[-1], self._where()
        if part.kind == "arguments" and item["type"] == "custom_tool_call":
            self._arguments += part.text
        elif part.kind == "arguments":
            item["arguments"] += part.text
            yield "response.function_call_arguments.delta", {**where, "delta": part.text}
        elif part.kind != "call":
            item["content"][0]["text"] += part.text
            data = {**where, "content_index": 0, "delta": part.text}
            if part.kind == "content":
                data["logprobs"] = []
            yield f"response.{item['content'][0]['type']}.delta", data

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _begin_item(self, part: TextPart) -> Iterator[_Event]:
        """A new item without the text of its first part, which comes as a delta."""
        status, id = "in_progress", output_id(self._job.id, len(self._output))
        content: dict[str, Any] = {}
        item: dict[str, Any]
        if part.kind == "call":
            namespace, name = self._job.tools.grouped.get(part.text, (None, part.text))
            called = {"name": name, "call_id": self._job.tools.call_id(part.text, part.call)}
            called |= {} if namespace is None else {"namespace": namespace}
            if part.text in self._custom:
                item = {"type": "custom_tool_call", "id": f"ctc_{id}", "status": status, **called, "input": ""}
            else:
                item = {"type": "function_call", "id": f"fc_{id}", "status": status, **called, "arguments": ""}
        elif part.kind == "reasoning":
            content = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": [content]}
        else:
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{id}", "status": status, "role": "assistant", "content": [content]}
        self._output.append(item)
        where = self._where()
        empty = {**item, "content": []} if content else item
        yield "response.output_item.added", {"output_index": where["output_index"], "item": empty}
        if content:
            yield "response.content_part.added", {**where, "content_index": 0, "part": content}

    def _end_item(self, status: str) -> Iterator[_Event]:
        """Complete the current item, if there is one. status: completed or incomplete."""
        if not self._output:
            return
        item, where = self._output[-1], self._where()
        if "status" in item:
            item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"], self._arguments = _call_input(self._arguments), ""
            yield "response.custom_tool_call_input.delta", {**where, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**where, "input": item["input"]}
        elif item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**where, **done}
        else:
            part = item["content"][0]
            data = {**where, "content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                if (made := chat_logprobs_of(self._job, self._logprobs)) is not None:
                    part["logprobs"], self._logprobs = made["content"], []
                data["logprobs"] = part["logprobs"]
            yield f"response.{part['type']}.done", data
            yield "response.content_part.done", {**where, "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": where["output_index"], "item": item}

    def _cut_short(self) -> None:
        if self._output and self._output[-1].get("status") == "in_progress":
            self._output[-1]["status"] = "incomplete"

    def _response(self, finish: str | None, error: Exception | None = None) -> dict[str, Any]:
        """The object. finish: the finish reason; None while the answer goes on."""
        request, params = self._request, self._job.calls[0].sampling
        status = _status(finish)
        incomplete = None
        if status == "incomplete":
            incomplete = {"reason": "max_output_tokens" if finish == "length" else finish}
        failure = None
        if error is not None:
            status = "failed"
            self._cut_short()
            message = str(error) if isinstance(error, QuireError) else error_responses.INTERNAL
            failure = {"code": "server_error", "message": message}
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": bool(request.background),
            "error": failure,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "model": self._job.model,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (request.reasoning or {}),
            "store": self._keep is not None,
            "temperature": params.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else _usage(self.usage),
            "user": None,
            "metadata": request.metadata or {},
            **({} if status == "in_progress" else timings(self._job, self.usage.timings)),
        }


def _status(finish: str | None) -> str:
    return "in_progress" if finish is None else "completed" if finish == "stop" else "incomplete"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": usage.prompt_details(1),
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def response(
    job: Job, choices: Sequence[ChoiceBuilder], usage: Usage, keep: Callable[[dict[str, Any]], bool] | None = None
) -> dict[str, Any]:
    """The response object of an answer that is not streamed. keep: as of ResponseChunks."""
    chunks = ResponseChunks(job, keep)
    chunks.usage = usage
    return chunks.whole(choices[0])
