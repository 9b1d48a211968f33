"""Fields of objects within requests: parts of messages, items, calls and choices. One table for code, tests and docs.

What is neither honoured nor a hint is refused by name, so that nothing is lost on the way into a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.server.cache_control import seconds_of
from quire.server.fields import NO_OPS, check

_SENT_BACK = "a note about an answer, which clients send back with it"
_PREFIX = "prefixes are found by their tokens"

HINTS: Mapping[str, str] = {
    "prompt_cache_breakpoint": _PREFIX,
    "citations": "sources of an earlier answer: its text stays as it is",
    "annotations": "sources of an earlier answer: its text stays as it is",
    "logprobs": _SENT_BACK,
    "parsed": _SENT_BACK,
    "parsed_arguments": _SENT_BACK,
    "parsed_output": _SENT_BACK,
    "created_by": _SENT_BACK,
    "id": "items of Responses are known by their place and by call_id",
    "phase": _SENT_BACK,
    "status": _SENT_BACK,
    "index": _SENT_BACK,
    "caller": "only the model calls tools here",
    "toolset_name": "tools are known by their own names",
    "async": "results of tools are awaited in any order",
    "is_error": "templates have no place for it: the result says what went wrong",
    "signature": "thoughts are not signed here",
    "encrypted_content": "thoughts are sent as they are",
    "detail": "files are read as text, whole",
    "display": "thoughts are shown whole",
    "summary": "thoughts are not summed up here",
    "generate_summary": "thoughts are not summed up here",
    "description": "a format's description is not shown to the model: put it into the schema or the prompt",
    "strict": "every schema of an answer is obeyed strictly",
}
"""Fields of such objects that have no effect, and why. Which object takes which says `KINDS`."""


EVERYWHERE = ("cache_control", "provider_specific_fields")
"""Hints that an object of any kind may have."""


class Kind(NamedTuple):
    """An object of one kind. honoured: fields with an effect. hints: names in `HINTS`."""

    honoured: tuple[str, ...]
    hints: tuple[str, ...] = ()


_TEXT_NOTES = ("prompt_cache_breakpoint", "citations", "annotations", "logprobs", "parsed", "parsed_output")
_ITEM_NOTES = ("id", "status", "phase", "created_by", "caller", "async")

KINDS: Mapping[str, Kind] = {
    "text": Kind(("type", "text", "cache_control"), _TEXT_NOTES),
    "image_url": Kind(("type", "image_url", "detail", "cache_control"), ("prompt_cache_breakpoint",)),
    "input_image": Kind(("type", "image_url", "detail", "file_id", "cache_control"), ("prompt_cache_breakpoint",)),
    "refusal": Kind(("type", "refusal")),
    "file": Kind(("type", "file", "cache_control"), ("prompt_cache_breakpoint",)),
    "file.file": Kind(("filename", "file_data", "file_id")),
    "input_file": Kind(
        ("type", "filename", "file_data", "file_id", "file_url", "cache_control"), ("prompt_cache_breakpoint", "detail")
    ),
    "messages.document": Kind(("type", "source", "title", "context", "citations", "cache_control")),
    "messages.document.source": Kind(("type", "media_type", "data", "content")),
    "messages.search_result": Kind(("type", "source", "title", "content", "citations", "cache_control")),
    "messages.tool_reference": Kind(("type", "tool_name", "cache_control")),
    "messages.image": Kind(("type", "source", "cache_control")),
    "messages.image.source": Kind(("type", "media_type", "data", "url")),
    "call": Kind(("id", "type", "function"), ("index",)),
    "call.function": Kind(("name", "arguments"), ("parsed_arguments",)),
    "choice": Kind(("type", "function")),
    "choice.function": Kind(("name",)),
    "messages.thinking": Kind(("type", "thinking", "cache_control"), ("signature",)),
    "messages.redacted_thinking": Kind(("type", "data", "cache_control")),
    "messages.tool_use": Kind(("type", "id", "name", "input", "cache_control"), ("caller", "toolset_name", "index")),
    "messages.tool_result": Kind(
        ("type", "tool_use_id", "content", "cache_control"), ("is_error", "toolset_name", "caller")
    ),
    "messages.choice": Kind(("type", "name", "disable_parallel_tool_use")),
    "thinking": Kind(("type", "budget_tokens"), ("display",)),
    "reasoning": Kind(("effort", "max_tokens", "enabled", "exclude"), ("summary", "generate_summary")),
    "item.message": Kind(("type", "role", "content"), _ITEM_NOTES),
    "item.call": Kind(
        ("type", "call_id", "name", "namespace", "arguments", "input"), (*_ITEM_NOTES, "parsed_arguments")
    ),
    "item.result": Kind(("type", "call_id", "output"), _ITEM_NOTES),
    "item.reasoning": Kind(("type", "content"), (*_ITEM_NOTES, "summary", "encrypted_content")),
    "item.reasoning.part": Kind(("type", "text")),
    "item.choice": Kind(("type", "name", "namespace")),
    "grammar": Kind(("type", "definition", "syntax")),
}


def check_nested(given: Mapping[str, Any], kind: str, where: str) -> None:
    """Raises InvalidRequest naming a field of `given` that this kind of object does not have, or a `cache_control` that
    is wrong. where: it stands."""
    honoured, hints = KINDS[kind]
    no_ops = {name: NO_OPS[name] for name in EVERYWHERE} | {name: HINTS[name] for name in hints}
    check(given, honoured, where=f"{where}.", no_ops=no_ops, refused={})
    if "cache_control" in honoured and given.get("cache_control") is not None:
        seconds_of(given["cache_control"], f"{where}.cache_control")
