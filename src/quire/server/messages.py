"""Anthropic's Messages: requests as chat requests, and answers in their shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import InvalidRequest
from quire.server.calls import Job
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.schemas import ChatRequest, Sampling

Blocks = str | list[Any]


class CountRequest(Sampling, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def as_chat(asked: CountRequest, *, thinks: bool) -> ChatRequest:
    """The same as a chat request. thinks: the model has thoughts. Raises InvalidRequest naming the field."""
    messages = [{"role": "system", "content": _text(asked.system, "system")}] if asked.system else []
    for i, message in enumerate(asked.messages):
        messages += _messages(message, f"messages[{i}]")
    choice, parallel = _choice(asked.tool_choice)
    chat = ChatRequest(
        **{name: getattr(asked, name) for name in Sampling.__struct_fields__},
        messages=messages,
        tools=None if asked.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        chat_template_kwargs=_thinking(asked.thinking, thinks),
    )
    if isinstance(asked, MessagesRequest):
        if asked.stop is not None and asked.stop_sequences is not None:
            raise InvalidRequest("stop and stop_sequences are the same: send one", param="stop_sequences")
        chat.max_tokens, chat.stream = asked.max_tokens, asked.stream
        chat.stop = asked.stop_sequences if asked.stop is None else asked.stop
    return chat


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as one, or several where it has results of tools in it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user or assistant, not {str(role)[:40]!r}", param="messages")
    if unknown := message.keys() - {"role", "content"}:
        raise InvalidRequest(f"unknown field '{where}.{min(unknown)[:64]}'", param="messages", code="unknown_field")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where}.content must be text or a list of blocks", param="messages")
    made: dict[str, Any] = {"role": role, "content": []}
    results, thoughts, calls = [], [], []
    for i, block in enumerate(content):
        kind, at = block.get("type"), f"{where}.content[{i}]"
        if kind == "text":
            made["content"].append({"type": "text", "text": _string(block, "text", at)})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{at}.content")
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": text})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": _string(block, "name", at), "arguments": block.get("input") or {}}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_string(block, "thinking", at))
        elif kind != "redacted_thinking":
            raise InvalidRequest(f"{at}: a block of type {str(kind)[:40]!r} is not supported here", param="messages")
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [*results, made] if made["content"] or calls or not results else results


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", param=where.partition("[")[0])
    return value


def _text(blocks: Any, where: str) -> str:
    """Text, or the text of blocks, a line each."""
    if isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, list):
        raise InvalidRequest(f"{where} must be text or a list of blocks", param=where.partition("[")[0])
    texts = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise InvalidRequest(f"{where}[{i}]: only text blocks are supported here", param=where.partition("[")[0])
        texts.append(_string(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        kind = str(tool["type"])[:40]
        raise InvalidRequest(f"{where}.type {kind!r} is not supported: describe a tool of your own", param="tools")
    function = {name: tool[name] for name in tool if name not in ("type", "input_schema", "cache_control")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """tool_choice and parallel_tool_calls."""
    if choice is None:
        return None, None
    kind, parallel = choice.get("type"), False if choice.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return known[kind], parallel


def _thinking(asked: Mapping[str, Any] | None, thinks: bool) -> dict[str, Any] | None:
    """What templates call it. Thoughts and answer share max_tokens, whatever the budget."""
    if asked is None:
        return None
    kind = asked.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", param="thinking")
    if kind != "disabled" and not thinks:
        raise InvalidRequest("thinking: this model has no thoughts: send type disabled, or nothing", param="thinking")
    return {"enable_thinking": kind != "disabled"}


# -------------------------------------------------------------------- answers

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get


def stop_reason(finish: str | None, stop: int | str | None, called: bool) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence)."""
    if finish == "stop" and isinstance(stop, str):
        return "stop_sequence", stop
    if finish == "stop" and called:
        return "tool_use", None
    return (None if finish is None else _REASONS(finish, finish)), None


def usage_of(usage: Usage, n: int = 1) -> dict[str, int]:
    """Anthropic's input_tokens are those that were computed."""
    cached = usage.cached(n)
    return {
        "input_tokens": usage.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    }


def message(job: Job, made: ChoiceBuilder, usage: Usage) -> dict[str, Any]:
    """A message object."""
    blocks: list[dict[str, Any]] = []
    for part in made.parts:
        if part.kind == "arguments":
            blocks[-1]["input"] = _input(part.text)
        elif part.kind == "call":
            blocks.append({"type": "tool_use", "id": job.tools.call_id(), "name": part.text, "input": {}})
        elif part.kind == "content":
            blocks.append({"type": "text", "text": part.text})
        elif job.reasons:
            blocks.append({"type": "thinking", "thinking": part.text, "signature": ""})
    reason, sequence = stop_reason(made.finish_reason, made.stop_reason, bool(made.calls))
    return head(job, usage) | {"content": blocks, "stop_reason": reason, "stop_sequence": sequence}


def head(job: Job, usage: Usage) -> dict[str, Any]:
    """A message of which nothing is known yet but the prompt."""
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(usage),
    }


def _input(arguments: str) -> Any:
    """A call's arguments as an object; what is not JSON, as the text it is."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}
