"""Prompts and messages as token ids. Blocking: run in offloaded work (`frontend.offload`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.errors import InvalidRequest, UnknownModel
from quire.frontend.interface import Backend, ModelCard
from quire.multimodal.inputs import ImageInputs
from quire.server.documents import file_text, refusal_text
from quire.server.fields import check, require_text
from quire.server.limits import Limits
from quire.server.nested import check_nested
from quire.server.schemas import ChatRequest, Prompt, TokenizeRequest
from quire.types import UNLIMITED, PromptImage

LATEST = ":latest"
"""The tag of Ollama's names that have none."""

_KIND: Mapping[type, str] = {str: "text", list: "token ids"}

# A text with more characters per token of the context than this may be too long for it: only its beginning is encoded
# at first.
_LONG_TEXT = 16

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE = frozenset({"role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"})

# Other fields of answers of this API, which clients send back: accepted while they are empty.
_ANSWER_ONLY = frozenset({"annotations", "audio", "function_call"})


def model(name: str | None, backend: Backend) -> ModelCard:
    """The model served. name: what the request asks for, if anything. Raises UnknownModel for another model.

    `name:latest`, as tools made for Ollama write it, is `name`.
    """
    card = backend.model()
    if name is not None and name not in card.names and name.removesuffix(LATEST) not in card.names:
        raise UnknownModel(
            f"the model {name[:200]!r} is not served here: this server has {', '.join(map(repr, card.names))}",
            param="model",
            code="model_not_found",
        )
    return card


def prompts(given: Prompt, card: ModelCard, limits: Limits, suffix: str = "") -> list[str | tuple[int, ...]]:
    """The prompts in a `prompt` field: one or several, as text or as token ids. Raises InvalidRequest.

    suffix: what follows the answer; with one, a prompt is text, which may be empty.
    """
    if isinstance(given, str):
        several: list[Any] = [given]
    elif given and type(given[0]) is int:
        several = [given]
    else:
        several = given
    if not several:
        raise InvalidRequest("prompt is empty: give text or token ids", param="prompt")
    if len(several) > limits.max_prompts:
        raise InvalidRequest(
            f"prompt: {len(several)} prompts, and at most {limits.max_prompts} are allowed in one request",
            param="prompt",
        )
    for i, one in enumerate(several):
        if isinstance(one, str | list) and isinstance(several[0], str | list) and type(one) is not type(several[0]):
            raise InvalidRequest(
                f"prompt[{i}] is {_KIND[type(one)]}, and prompt[0] is {_KIND[type(several[0])]}: "
                "send all prompts as text, or all as token ids",
                param="prompt",
            )
    names = [f"prompt[{i}]" if several is given else "prompt" for i in range(len(several))]
    return [_prompt(one, where, card, suffix) for one, where in zip(several, names, strict=True)]


def _prompt(one: Any, where: str, card: ModelCard, suffix: str) -> str | tuple[int, ...]:
    """One prompt, checked. where: it stands in the request. suffix: as of `prompts`."""
    if suffix and not isinstance(one, str):
        raise InvalidRequest(f"{where}: with a suffix, a prompt must be text", param="prompt")
    if suffix:
        return str(one)
    if not isinstance(one, str | list):
        shown = msgspec.json.encode(one)[:40].decode(errors="replace")
        raise InvalidRequest(f"{where}: expected text or token ids, not {shown}", param="prompt")
    if not one:
        raise InvalidRequest(f"{where} is empty: give text or token ids", param="prompt")
    if isinstance(one, str):
        return one
    if {*map(type, one)} != {int}:
        raise InvalidRequest(f"{where}: token ids must all be integers", param="prompt")
    in_vocabulary(one, where, card)
    return tuple(one)


def in_vocabulary(tokens: Sequence[int], where: str, card: ModelCard) -> None:
    """Raises InvalidRequest for the first id that is not in the model's vocabulary. where: the ids stand."""
    most = card.vocab_size or 1 << 31
    if tokens and not 0 <= min(tokens) <= max(tokens) < most:
        bad = next(token for token in tokens if not 0 <= token < most)
        param = where.partition("[")[0]
        raise InvalidRequest(f"{where}: {bad} is not in the vocabulary, 0 to {most - 1}", param=param)


def check_length(texts: Iterable[Any], backend: Backend, context: int) -> None:
    """Raises InvalidRequest for a text whose beginning is far too long for the context, without encoding the rest."""
    for text in texts:
        if isinstance(text, str) and len(text) > _LONG_TEXT * context:
            beginning = len(backend.encode(text[: _LONG_TEXT // 2 * context]))
            if beginning > 2 * context:
                raise _too_long(f"more than {beginning}", context)


def _too_long(count: str, context: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {count} tokens, and this model's context holds {context}, at least one of them for the "
        "answer: shorten the prompt",
        param="prompt",
        code="context_length_exceeded",
    )


def encode(
    given: Sequence[str | tuple[int, ...]],
    special: bool,
    backend: Backend,
    context: int = UNLIMITED,
    suffix: str = "",
) -> list[tuple[str | None, tuple[int, ...]]]:
    """(text, token ids) of each prompt. No text where it is not the text of the ids.

    special: add the begin token. context: tokens of a prompt and its answer. suffix: a text to fill in before, which is
    encoded with each prompt. Raises InvalidRequest for the first prompt that leaves no token for an answer, before the
    others are encoded.
    """
    check_length([*given, suffix], backend, context)
    encoded: list[tuple[str | None, tuple[int, ...]]] = []
    for one in given:
        text = one if isinstance(one, str) and not suffix else None
        ids = one if isinstance(one, tuple) else backend.encode(one, add_special_tokens=special, suffix=suffix)
        if len(ids) >= context:
            raise _too_long(str(len(ids)), context)
        encoded.append((text, ids))
    return encoded


class Rendered(NamedTuple):
    """Messages as text and as token ids, with the images in them."""

    text: str
    ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


def render(
    messages: list[dict[str, Any]],
    request: ChatRequest | TokenizeRequest | Any,
    backend: Backend,
    images: ImageInputs,
    tools: list[dict[str, Any]] | None = None,
    context: int = UNLIMITED,
) -> Rendered:
    """The messages of a request, rendered by the model's template with `tools`. images: how those in them are read.

    Raises InvalidRequest for messages that are certain to have more tokens than the context, and what `images` raises.
    """
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    continues = bool(request.continue_final_message)
    begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and begins:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot be used together", param="continue_final_message"
        )
    check_length((message.get("content") for message in messages), backend, context)
    shown, found = images.read(messages)
    text = backend.render(
        list(map(dict, shown)),
        tools=tools,
        add_generation_prompt=begins,
        continue_final_message=continues,
        chat_template_kwargs=request.chat_template_kwargs or {},
    )
    # Checked again: the rendered text contains tool calls, lists of content and tools too.
    check_length([text], backend, context)
    # Not by default: most templates write the begin token themselves.
    special = bool(request.add_special_tokens)
    ids = backend.encode(images.marked(text, found), add_special_tokens=special)
    return Rendered(text, *images.place(ids, found))


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """One message, checked, as templates expect it. where: it stands in the request."""
    role, content = message.get("role"), message.get("content")
    if role == "function":
        raise InvalidRequest(f"{where}.role: send results of tools with the role tool", param="messages")
    if role is None:
        raise InvalidRequest(f"{where}.role is required", param="messages")
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"{where}.role must be one of {known}, not {str(role)[:40]!r}", param="messages")
    if content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param="messages")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not (content is None or isinstance(content, str) or parts):
        raise InvalidRequest(f"{where}.content must be text or a list of parts", param="messages")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if message.get("refusal") and role == "assistant":
        said = {"type": "text", "text": require_text(message, "refusal", where)}
        content = [*_as_parts(content), said]
    for name in _ANSWER_ONLY & message.keys():
        if message[name]:
            raise InvalidRequest(f"{where}.{name} is not supported", param="messages", code="unsupported_field")
    sent = {name: value for name, value in message.items() if name not in _ANSWER_ONLY} | {"content": content}
    if role == "assistant":
        sent.pop("refusal", None)
    for name in sent.keys() - {"content", "tool_calls"}:
        if name in _MESSAGE and not isinstance(sent[name], str | None):
            raise InvalidRequest(f"{where}.{name} must be text", param="messages")
    checked = check(sent, _MESSAGE, where=where + ".")
    calls = checked.pop("tool_calls", None)
    if calls:
        checked["tool_calls"] = _tool_calls(calls, role, where)
    thoughts = checked.pop("reasoning", None) or checked.get("reasoning_content")
    # Templates read one name or the other.
    return checked if thoughts is None else {**checked, "reasoning": thoughts, "reasoning_content": thoughts}


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """A part of a message's content, checked. Refusals and files of text become parts of text."""
    kind = part.get("type")
    if kind in ("text", "image_url"):
        check_nested(part, kind, where)
    if kind == "refusal":
        return {"type": "text", "text": refusal_text(part, where)}
    if kind != "file":
        return part
    check_nested(part, "file", where)
    given = part.get("file")
    text = file_text(given if isinstance(given, dict) else {}, "file.file", f"{where}.file")
    return {"type": "text", "text": text, "cache_control": part.get("cache_control")}


def _as_parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _tool_calls(calls: Any, role: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of an assistant, with arguments as objects, as templates expect them."""
    if role != "assistant" or not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls is a list, and belongs to assistants", param="messages")
    made = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}.tool_calls[{i}] needs a function with a name", param="messages")
        check_nested(call, "call", f"{where}.tool_calls[{i}]")
        check_nested(function, "call.function", f"{where}.tool_calls[{i}].function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            # Arguments that are not JSON stay the text that the model wrote.
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                arguments = msgspec.json.decode(arguments)
        shown = {"name": function["name"], "arguments": arguments}
        id = call.get("id")
        made.append({"id": id if isinstance(id, str) else "", "type": "function", "function": shown})
    return made
