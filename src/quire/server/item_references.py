"""Items of stored responses that a request names by id alone (`item_reference`), as clients of OpenAI send what a
response gave them while responses are stored.

An item's id says which response it is of, so that no index of items is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Never

from quire.errors import InvalidRequest
from quire.server.error_responses import NotFound
from quire.server.response_store import as_items

Input = str | list[dict[str, Any]]
"""Of a request: a text, or items."""

RESPONSE = "resp_"

_ID = re.compile(r"[a-z]+_([0-9a-f]{32})([01])[0-9a-f]{4,12}")
_OF_INPUT, _OF_OUTPUT = "0", "1"


def input_id(response: str, number: int) -> str:
    """The part after the kind's prefix of the id of an item of a response's input."""
    return f"{response.removeprefix(RESPONSE)}{_OF_INPUT}{number:04x}"


def output_id(response: str, number: int) -> str:
    """The same of its output."""
    return f"{response.removeprefix(RESPONSE)}{_OF_OUTPUT}{number:04x}"


class Referred(NamedTuple):
    """Items of one response that an input refers to. first: the id of the first of them. inputs: whether some of them
    are of its input."""

    first: str
    inputs: bool


def is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item of an input is a reference to one. Its type may be left out."""
    return item.get("type") == "item_reference" or (
        item.get("type") is None and item.keys() <= {"id", "type"} and "id" in item
    )


def reference_of(item: Mapping[str, Any]) -> str | None:
    """The id that an item of an input refers to; None: it is an item itself. Raises InvalidRequest."""
    if not is_reference(item):
        return None
    if not isinstance(id := item.get("id"), str):
        raise InvalidRequest("input: an item_reference must have the id of an item", param="input")
    return id


def references(given: Input) -> dict[str | None, Referred]:
    """The responses that items of an input refer to, None for ids that no item has.

    Raises InvalidRequest for an id that comes twice: an input would grow without bound.
    """
    seen, found = set[str](), dict[str | None, Referred]()
    for i, item in enumerate(as_items(given)):
        if (id := reference_of(item)) is None:
            continue
        if id in seen:
            raise InvalidRequest(f"input[{i}]: item {id[:80]!r} is referred to twice: once is enough", param="input")
        seen.add(id)
        of = _ID.fullmatch(id)
        response = of and RESPONSE + of[1]
        before = found.get(response, Referred(id, False))
        found[response] = before._replace(inputs=before.inputs or bool(of and of[2] == _OF_INPUT))
    return found


def resolved(given: Input, known: Mapping[str, dict[str, Any]]) -> Input:
    """An input with the items in place of references to them. Raises NotFound."""
    if isinstance(given, str):
        return given
    ids = map(reference_of, given)
    return [
        item if id is None else known[id] if id in known else missing(id) for id, item in zip(ids, given, strict=True)
    ]


def missing(id: str) -> Never:
    """Raise NotFound. One message for all reasons: it must not say what other keys have."""
    raise NotFound(
        f"no item {id[:80]!r} is stored for this key: its response was evicted, deleted, not to be stored (store: "
        "false), is not complete, or never existed. Send the item itself",
        param="input",
        code="item_not_found",
    )
