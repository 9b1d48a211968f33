"""Every object that the official clients' TypedDicts allow in a request, each in an otherwise ordinary one."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NotRequired, Required

import typing_extensions

Body = dict[str, Any]
NAME = "f"
"""The only text in examples: of names, ids and texts, so that what one field names another has."""

TEXT_FILE = "data:text/plain;base64,YQ=="
TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": NAME}

MORE: Mapping[str, Body] = {
    "JSONSchema": {"schema": {"type": "object", "properties": {}}},
    "FunctionCallOutput": {"call_id": NAME},
    "FileFile": {"file_data": TEXT_FILE},
    "ResponseInputFileParam": {"file_data": TEXT_FILE},
    "ResponseInputFileContentParam": {"file_data": TEXT_FILE},
    "DocumentBlockParam": {"source": TEXT_SOURCE},
    "BetaRequestDocumentBlockParam": {"source": TEXT_SOURCE},
}
"""What servers need of an object though its TypedDict does not say so."""

_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


class Place(NamedTuple):
    """Where an object of `kind` may stand: at `path`, in the request that `body` makes of it."""

    kind: Any
    path: str
    body: Callable[[Body], Body]

    def fields(self) -> dict[str, Any]:
        """The types of its fields."""
        return typing.get_type_hints(self.kind)


def places(
    kind: Any, body: Callable[[Any], Body], path: str = "", within: frozenset[Any] = frozenset()
) -> Iterator[Place]:
    """All objects at or below a value of type `kind`, outer ones first. body: the request of the value."""
    if typing_extensions.is_typeddict(kind):
        if kind in within:
            return
        yield Place(kind, path, body)
        least = example(kind)
        for name, inner in typing.get_type_hints(kind).items():
            wrap = lambda value, name=name: body({**least, name: value})  # noqa: E731
            yield from places(inner, wrap, f"{path}.{name}", within | {kind})
    elif typing.get_origin(kind) in _LISTS:
        yield from places(typing.get_args(kind)[0], lambda value: body([value]), path, within)
    elif _is_union(kind):
        for one in typing.get_args(kind):
            yield from places(one, body, path, within)


def example(kind: Any) -> Any:
    """The least value of a type."""
    return next(examples(kind))


def examples(kind: Any) -> Iterator[Any]:
    """A value of each kind that a type allows, objects with the fields that they need."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if typing_extensions.is_typeddict(kind):
        hints, marked = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
        marks = {name: typing.get_origin(one) for name, one in marked.items()}
        needed = [
            name for name, mark in marks.items() if mark is Required or (kind.__total__ and mark is not NotRequired)
        ]
        yield {name: example(hints[name]) for name in needed} | MORE.get(kind.__name__, {})
    elif origin is typing.Literal:
        yield from args
    elif _is_union(kind):
        for one in args:
            yield from examples(one) if one is not type(None) else ()
    elif origin in _LISTS:
        yield from ([one] for one in examples(args[0]))
    elif origin in (dict, collections.abc.Mapping) or kind in (object, Any):
        yield {"type": "object", "properties": {NAME: {"type": "string"}}}
    else:
        yield from {str: (NAME,), bool: (True, False), int: (1,), float: (0.5,)}.get(kind, (NAME,))


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
