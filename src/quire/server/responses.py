"""OpenAI's Responses, without state: requests as chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidRequest
from quire.server.fields import check
from quire.server.schemas import ChatRequest, JsonSchema, ResponseFormat, Sampling

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


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """The same as a chat request. Raises InvalidRequest naming the field."""
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    for i, item in enumerate(items):
        _item(item, f"input[{i}]", messages)
    for name in set(asked.include or ()) - {_LOGPROBS}:
        raise InvalidRequest(f"include: {name[:64]!r} is not kept here", param="include")
    told = _LOGPROBS in (asked.include or ()) or asked.top_logprobs is not None
    rest = {name: getattr(asked, name) for name in Sampling.__struct_fields__ if name != "response_format"}
    return ChatRequest(
        **rest,
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        stream=asked.stream,
        tools=None if asked.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)],
        tool_choice=_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_format(asked),
        logprobs=told or None,
        top_logprobs=asked.top_logprobs,
        include_reasoning=asked.include_reasoning,
        chat_template_kwargs=asked.chat_template_kwargs,
    )


def _item(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Adds one item of the input. Calls and thoughts belong to the assistant's message around them."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant" and messages and messages[-1].get("reasoning_content") and not messages[-1]["content"]:
            messages[-1]["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
    elif kind == "reasoning":
        thoughts = item.get("content") or []
        if not isinstance(thoughts, list):
            raise InvalidRequest(f"{where}.content must be a list of parts", param="input")
        texts = [part.get("text") for part in thoughts if isinstance(part, dict)]
        _assistant(messages)["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    else:
        raise InvalidRequest(f"{where}.type {str(kind)[:40]!r} is not supported here", param="input")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, begun if need be."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
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
        parts.append({"type": "text", "text": _string(part, "text", f"{where}[{i}]")})
    return parts


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be text", param="input")
    return value


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise InvalidRequest(f"{where}.type {kind!r} is not supported: use function", param="tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(asked: ResponsesRequest) -> ResponseFormat | None:
    """The format of `text`, or vLLM's response_format."""
    text = check(asked.text or {}, ("format",), where="text.")
    given = text.get("format")
    if given is None:
        return asked.response_format
    if asked.response_format is not None:
        raise InvalidRequest("text.format and response_format exclude each other", param="text")
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise InvalidRequest("text.format must be an object with a type", param="text")
    kept = check(given, ("type", "name", "description", "schema", "strict"), where="text.format.")
    if not isinstance(schema := kept.get("schema"), dict | None):
        raise InvalidRequest("text.format.schema must be a JSON schema", param="text")
    if kept["type"] != "json_schema":
        return ResponseFormat(type=kept["type"])
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))
