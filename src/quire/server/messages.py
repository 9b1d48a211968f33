"""Anthropic's Messages: requests as chat requests, and answers in their format, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import InvalidRequest
from quire.frontend.interface import Delta
from quire.frontend.offload import PER_TOKEN
from quire.multimodal.inputs import ImagePart
from quire.parsers.parts import TextPart
from quire.server import error_responses
from quire.server.cache_control import LIFETIMES, longest_mark
from quire.server.calls import Job
from quire.server.documents import BLOCKS, block_text, with_inner
from quire.server.fields import check, require_text
from quire.server.nested import check_nested
from quire.server.outputs import ChoiceBuilder, Usage, timings
from quire.server.schemas import ChatRequest, Sampling, response_format, shared_fields
from quire.server.stream import Chunks
from quire.server.tools import hosted_kind

Blocks = str | list[Any]


class CountRequest(Sampling, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def as_chat(request: CountRequest) -> ChatRequest:
    """The same as a chat request. Raises InvalidRequest naming the field."""
    messages: list[dict[str, Any]] = []
    if request.system:
        system = _text(request.system, "system")
        marks = longest_mark(request.system if isinstance(request.system, list) else ())
        messages.append({"role": "system", "content": system, **marks})
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{i}]")
    choice, parallel = _choice(request.tool_choice)
    changed: dict[str, Any] = {
        "messages": messages,
        "tools": request.tools and [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        **_output(request),
    }
    if isinstance(request, MessagesRequest) and request.stop_sequences is not None:
        if request.stop is not None:
            raise InvalidRequest("stop and stop_sequences are the same: send one", param="stop_sequences")
        changed["stop"] = request.stop_sequences
    return ChatRequest(**shared_fields(request) | changed)


def _output(request: CountRequest) -> dict[str, Any]:
    """The fields of a chat request for the format and the effort of the answer."""
    config = check(request.output_config or {}, ("format", "effort"), where="output_config.")
    given = {"response_format": request.response_format}
    for name, one in (("output_config.format", config.get("format")), ("output_format", request.output_format)):
        if one is not None:
            given[name] = response_format(one, name)
    sent = [name for name, one in given.items() if one is not None]
    if len(sent) > 1:
        raise InvalidRequest(f"{sent[0]} and {sent[1]} are the same: send one", param=sent[1])
    if not isinstance(effort := config.get("effort"), str | None):
        raise InvalidRequest("output_config.effort must be text", param="output_config.effort")
    return {"response_format": given[sent[0]] if sent else None, "reasoning_effort": effort or request.reasoning_effort}


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as chat messages: several where it contains tool results."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user or assistant, not {str(role)[:40]!r}", param="messages")
    if unknown := message.keys() - {"role", "content"}:
        raise InvalidRequest(f"unknown field '{where}.{min(unknown)[:64]}'", param="messages", code="unknown_field")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where}.content must be text or a list of blocks", param="messages")
    chat: dict[str, Any] = {"role": role, "content": []}
    results = []
    thoughts = []
    calls = []
    for i, block in enumerate(content):
        kind, at = block.get("type"), f"{where}.content[{i}]"
        if kind == "text":
            check_nested(block, "text", at)
            chat["content"].append({"type": "text", "text": require_text(block, "text", at)})
        elif kind in BLOCKS and role == "user":
            chat["content"].append({"type": "text", "text": block_text(block, at)})
        elif kind == "image" and role == "user":
            chat["content"].append(ImagePart(_image_url(block, at), at))
        elif kind == "tool_result" and role == "user":
            check_nested(block, "messages.tool_result", at)
            inner = block.get("content") or ""
            shown = _result(inner, f"{at}.content")
            made = {"role": "tool", "tool_call_id": require_text(block, "tool_use_id", at), "content": shown}
            results.append(made | longest_mark([*with_inner([block])]))
        elif kind == "tool_use" and role == "assistant":
            check_nested(block, "messages.tool_use", at)
            function = {"name": require_text(block, "name", at), "arguments": block.get("input") or {}}
            calls.append({"id": require_text(block, "id", at), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            check_nested(block, "messages.thinking", at)
            thoughts.append(require_text(block, "thinking", at))
        elif kind == "redacted_thinking":
            check_nested(block, "messages.redacted_thinking", at)
        else:
            raise InvalidRequest(f"{at}: a block of type {str(kind)[:40]!r} is not supported here", param="messages")
    chat |= longest_mark([*with_inner(block for block in content if block.get("type") != "tool_result")])
    if thoughts:
        chat["reasoning_content"] = "\n".join(thoughts)
    if calls:
        chat["tool_calls"] = calls
    return [*results, chat] if chat["content"] or calls or not results else results


def _image_url(block: Mapping[str, Any], where: str) -> str:
    """An image's source as an address."""
    check_nested(block, "messages.image", where)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind in ("base64", "url"):
        check_nested(source, "messages.image.source", f"{where}.source")
    if isinstance(source, dict) and kind == "base64":
        media = require_text(source, "media_type", f"{where}.source")
        return f"data:{media};base64,{require_text(source, 'data', f'{where}.source')}"
    if isinstance(source, dict) and kind == "url":
        return require_text(source, "url", f"{where}.source")
    raise InvalidRequest(f"{where}.source must be of type base64 or url", param="messages")


def _result(blocks: Any, where: str) -> str | list[dict[str, Any]]:
    """What a tool returned: its text, or where there are images, parts of a message."""
    if not isinstance(blocks, list) or not any(map(_is_image, blocks)):
        return _text(blocks, where)
    parts = list[dict[str, Any]]()
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if _is_image(block):
            parts.append(ImagePart(_image_url(block, at), at))
        else:
            parts.append({"type": "text", "text": _block_text(block, at)})
    return parts


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _text(blocks: Any, where: str) -> str:
    """Text, or the text of blocks, a line each."""
    if isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, list):
        raise InvalidRequest(f"{where} must be text or a list of blocks", param=where.partition("[")[0])
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(blocks))


def _block_text(block: Any, where: str) -> str:
    if isinstance(block, dict) and block.get("type") in BLOCKS:
        return block_text(block, where)
    if not isinstance(block, dict) or block.get("type") != "text":
        raise InvalidRequest(f"{where}: only text blocks are supported here", param=where.partition("[")[0])
    check_nested(block, "text", where)
    return require_text(block, "text", where)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if hosted_kind(tool) is not None:
        return dict(tool)
    if tool.get("type", "custom") != "custom":
        kind = str(tool["type"])[:40]
        raise InvalidRequest(
            f"{where}.type {kind!r} is not supported: define it as a tool of type custom with an input_schema",
            param="tools",
        )
    function = {name: tool[name] for name in tool if name not in ("type", "input_schema", "cache_control")}
    function["parameters"] = tool.get("input_schema")
    return {"type": "function", "function": function, "cache_control": tool.get("cache_control")}


def _choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """OpenAI's tool_choice and parallel_tool_calls."""
    if choice is None:
        return None, None
    check_nested(choice, "messages.choice", "tool_choice")
    kind, parallel = choice.get("type"), False if choice.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return known[kind], parallel


# ---------------------------------------------------------------- answers


def message(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    """A message object."""
    [made] = choices
    blocks: list[dict[str, Any]] = []
    for part in made.parts:
        if part.kind == "arguments":
            blocks[-1]["input"] = _input(part.text)
        else:
            blocks.append(_block(part, job, part.text))
    reason, sequence = _stop_reason(made.finish_reason, made.stop_reason, bool(made.calls))
    ended = {"content": blocks, "stop_reason": reason, "stop_sequence": sequence}
    return _head(job, usage) | ended | timings(job, usage.timings)


def _stop_reason(finish: str | None, stop: int | str | None, called: bool) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence). stop: the stop string or token that ended the answer. called: it calls tools."""
    if finish == "stop" and isinstance(stop, str):
        return "stop_sequence", stop
    if finish == "stop":
        return "tool_use" if called else "end_turn", None
    return "max_tokens" if finish == "length" else finish, None


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage object: input_tokens are those that were neither found in the cache nor put into it."""
    details, created = usage.prompt_details(1), usage.created()
    cached, written, _ = (details.pop(f"{name}_tokens") for name in ("cached", "cache_write", "created_cache"))
    by_time = {f"ephemeral_{ttl}_input_tokens": created.get(seconds, 0) for ttl, seconds in LIFETIMES.items()}
    return {
        "input_tokens": usage.prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
        **({"cache_creation": by_time} if "pinned_tokens" in details else {}),
        **details,
    }


def _head(job: Job, usage: Usage) -> dict[str, Any]:
    """A message before anything of it is generated."""
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _block(part: TextPart, job: Job, text: str) -> dict[str, Any]:
    """The content block that `part` begins. text: its content so far."""
    if part.kind == "call":
        return {"type": "tool_use", "id": job.tools.call_id(part.text, part.call), "name": part.text, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> Any:
    """A call's arguments as an object; if they are not JSON, the text within one."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


# ---------------------------------------------------------------- streams

# The type of the delta of a part, and its field with the text.
_DELTAS: Mapping[str, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


def _event(kind: str, **data: Any) -> bytes:
    """One event; its data repeats its type."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **data}) + b"\n\n"


class MessageChunks(Chunks[Delta]):
    """Blocks of text, thoughts and tool calls, one after another."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._usage = Usage(job)
        self._splitter = job.splitter()
        self._index = -1
        self._kind = ""
        self._called = False
        self._end: tuple[str | None, str | None] = (None, None)

    def cost(self, ready: Sequence[Delta]) -> int:
        """The cost of these deltas."""
        return PER_TOKEN * len(ready)

    def opening(self) -> bytes:
        """message_start."""
        head = _head(self._job, self._usage)
        head["usage"]["output_tokens"] = 0
        return _event("message_start", message=head)

    def encode(self, delta: Delta) -> bytes:
        """The content_block events of a delta."""
        self._usage.add(delta)
        events = b"".join(map(self._part, self._job.shown_parts(self._splitter, delta)))
        if delta.finish_reason is not None:
            self._end = _stop_reason(delta.finish_reason, delta.stop_reason, self._called)
        return events

    def _part(self, part: TextPart) -> bytes:
        events = b""
        if part.kind != "arguments" and (part.kind == "call" or part.kind != self._kind):
            events = self._stop()
            self._index += 1
            self._kind = part.kind
            block = _block(part, self._job, "")
            events += _event("content_block_start", index=self._index, content_block=block)
        if part.kind == "call":
            self._called = True
            return events
        kind, name = _DELTAS[part.kind]
        return events + _event("content_block_delta", index=self._index, delta={"type": kind, name: part.text})

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._index) if self._index >= 0 else b""

    def closing(self) -> bytes:
        """The end of the last block, message_delta and message_stop."""
        reason, sequence = self._end
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        ended = _event(
            "message_delta", delta=delta, usage=_usage(self._usage), **timings(self._job, self._usage.timings)
        )
        return self._stop() + ended + _event("message_stop")

    def failed(self, error: Exception) -> bytes:
        """An error event."""
        return b"event: error\ndata: " + error_responses.of(error, "/v1/messages") + b"\n\n"
