"""Documents within requests, as text that a model reads: text files, search results, refusals of earlier answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quire.errors import InvalidRequest
from quire.server.fields import require_text
from quire.server.nested import check_nested

BLOCKS = ("document", "search_result", "tool_reference")
"""Types of Anthropic's blocks that `block_text` reads."""

_TEXT_MEDIA = ("text/", "application/json", "application/xml", "application/yaml", "application/x-ndjson")
_SEND_TEXT = "only text is read from files: send the text itself"


def refusal_text(part: Mapping[str, Any], where: str) -> str:
    """What an earlier answer said instead of an answer. Raises InvalidRequest."""
    check_nested(part, "refusal", where)
    return require_text(part, "refusal", where)


def file_text(part: Mapping[str, Any], kind: str, where: str) -> str:
    """OpenAI's file: its name, and its text. kind: in `KINDS`. Raises InvalidRequest for a file that is no text."""
    check_nested(part, kind, where)
    param = where.partition("[")[0]
    for name in ("file_id", "file_url"):
        if part.get(name):
            raise InvalidRequest(f"{where}.{name}: {_SEND_TEXT} as file_data", param=param)
    head, comma, data = require_text(part, "file_data", where).partition(",")
    media = head.removeprefix("data:").lower()
    if not comma or not head.startswith("data:") or not media.startswith(_TEXT_MEDIA):
        raise InvalidRequest(f"{where}.file_data: {_SEND_TEXT}, or data:text/plain;base64,... with it", param=param)
    if not media.endswith(";base64"):
        raise InvalidRequest(f"{where}.file_data must be base64", param=param)
    try:
        text = base64.b64decode(data, validate=True).decode("utf-8-sig")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where}.file_data is no UTF-8 text in base64: {error}", param=param) from None
    return _titled([part.get("filename")], text, where)


def block_text(block: Mapping[str, Any], where: str) -> str:
    """A block of one of `BLOCKS`: what its title and context say, and its text. Raises InvalidRequest."""
    kind = block["type"]
    check_nested(block, f"messages.{kind}", where)
    if kind == "tool_reference":
        return require_text(block, "tool_name", where)
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise InvalidRequest(f"{where}.citations: answers here cite no sources: leave it out", param="messages")
    if kind == "search_result":
        return _titled(
            [block.get("title"), block.get("source")], _texts(block.get("content"), f"{where}.content"), where
        )
    return _titled([block.get("title"), block.get("context")], _source(block.get("source"), f"{where}.source"), where)


def with_inner(blocks: Iterable[Any]) -> Iterator[Any]:
    """The blocks, and those within them."""
    for block in blocks:
        yield block
        if isinstance(block, dict):
            source = block.get("source")
            for inner in (block.get("content"), source.get("content") if isinstance(source, dict) else None):
                yield from with_inner(inner if isinstance(inner, list) else ())


def _source(source: Any, where: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind not in ("text", "content"):
        raise InvalidRequest(
            f"{where}: only documents of text are read: send a source of type text or content", param="messages"
        )
    check_nested(source, "messages.document.source", where)
    return require_text(source, "data", where) if kind == "text" else _texts(source.get("content"), f"{where}.content")


def _texts(content: Any, where: str) -> str:
    """Text, or that of blocks, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(one, dict) and one.get("type") == "text" for one in content):
        raise InvalidRequest(f"{where} must be text or a list of text blocks", param="messages")
    for i, one in enumerate(content):
        check_nested(one, "text", f"{where}[{i}]")
    return "\n".join(require_text(one, "text", f"{where}[{i}]") for i, one in enumerate(content))


def _titled(about: list[Any], text: str, where: str) -> str:
    """The text below what is said about it, a line each."""
    if not all(isinstance(line, str | None) for line in about):
        raise InvalidRequest(f"{where}: names, titles, sources and contexts are text", param=where.partition("[")[0])
    head = "\n".join(filter(None, about))
    return f"{head}\n\n{text}" if head else text
