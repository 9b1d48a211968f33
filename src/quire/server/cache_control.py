"""`cache_control`: which prefixes of a prompt are to be pinned in the prefix cache, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.server.fields import check
from quire.server.schemas import ChatRequest
from quire.types import Pin

LIFETIMES: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
"""Seconds by Anthropic's `ttl`; the first is the default."""

Render = Callable[[list[dict[str, Any]]], tuple[int, ...]]
"""The token ids of messages, without the beginning of an answer."""


def seconds_of(mark: Any, where: str) -> float:
    """How long a mark pins its prefix. where: it stands in the request. Raises InvalidRequest naming it."""
    param = where.partition("[")[0]
    if not isinstance(mark, dict):
        raise InvalidRequest(f"{where} must be an object with a type", param=param)
    kept = check(mark, ("type", "ttl"), where=f"{where}.")
    if kept.get("type") != "ephemeral":
        raise InvalidRequest(f"{where}.type must be ephemeral", param=param)
    ttl = kept.get("ttl", next(iter(LIFETIMES)))
    if not isinstance(ttl, str) or ttl not in LIFETIMES:
        raise InvalidRequest(f"{where}.ttl must be {' or '.join(LIFETIMES)}", param=param)
    return LIFETIMES[ttl]


def whole(mark: Any, tokens: int) -> tuple[Pin, ...]:
    """The pin of a whole prompt of so many tokens; none without a mark. Raises InvalidRequest."""
    return () if mark is None else (Pin(tokens, seconds_of(mark, "cache_control")),)


def chat_pins(request: ChatRequest, ids: tuple[int, ...], render: Render) -> tuple[Pin, ...]:
    """The pins that marks of a conversation ask for, the longest prefix first. ids: of its whole prompt.

    A mark counts to the end of its message, that of a tool to the end of the first message, and that of the request to
    the end of the prompt. A prefix within a longer one that is kept as long needs no pin of its own, so there are at
    most as many pins as lifetimes. Raises InvalidRequest naming a mark that is wrong.
    """
    last = len(request.messages) - 1
    ends: dict[float, int] = {}
    for place, seconds in _marks(request):
        ends[seconds] = max(ends.get(seconds, -1), place)
    pins: list[Pin] = []
    for seconds, place in sorted(ends.items(), key=lambda each: (-each[1], -each[0])):
        if all(seconds > pin.seconds for pin in pins):
            length = len(ids) if place >= last else _length(request.messages[: place + 1], ids, render)
            pins.append(Pin(length, seconds))
    return tuple(pins)


def _marks(request: ChatRequest) -> Iterator[tuple[int, float]]:
    """(index of a message, seconds) of each mark."""
    if request.cache_control is not None:
        yield len(request.messages) - 1, seconds_of(request.cache_control, "cache_control")
    for i, tool in enumerate(request.tools or ()):
        if (mark := _mark(tool)) is not None:
            yield 0, seconds_of(mark, f"tools[{i}].cache_control")
    for i, message in enumerate(request.messages):
        content = message.get("content")
        for marked in (message, *(content if isinstance(content, list) else ())):
            if (mark := _mark(marked)) is not None:
                yield i, seconds_of(mark, f"messages[{i}].cache_control")


def _mark(marked: Any) -> Any:
    return marked.get("cache_control") if isinstance(marked, dict) else None


def longest_mark(marked: Sequence[Any]) -> dict[str, Any]:
    """The mark of several blocks that become one message, as a field of it; none if no block has one."""
    marks = [mark for mark in map(_mark, marked) if mark is not None]
    return {"cache_control": max(marks, key=lambda mark: seconds_of(mark, "cache_control"))} if marks else {}


def _length(messages: list[dict[str, Any]], ids: tuple[int, ...], render: Render) -> int:
    """Tokens of the prompt's beginning that these messages make; all of it where the template refuses them alone."""
    try:
        return _common(render(messages), ids)
    except InvalidRequest:
        return len(ids)


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning. Compares slices, not items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
