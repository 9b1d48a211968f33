"""Calls written down as lines, for texts that tests expect: what one part asks of the parts that it is put together
from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch

from quire.types import LazySequence

_PLAIN = (bool, int, float, str, bytes, type(None), PurePath, torch.dtype, torch.device)


def shown(value: Any) -> str:
    """Values as Python writes them, dataclasses without their defaults; of other objects their class, and of functions
    their name."""
    if isinstance(value, _PLAIN):
        return str(value) if isinstance(value, torch.dtype | torch.device | PurePath) else repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr)
        given = (f"{field.name}={shown(each)}" for field, each in fields if each is not field.default)
        return f"{type(value).__name__}({', '.join(given)})"
    names = getattr(value, "_fields", None) or getattr(value, "__struct_fields__", None)
    if names and not isinstance(value, type):
        given = ", ".join(f"{name}={shown(getattr(value, name))}" for name in names)
        return f"{type(value).__name__}({given})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(key)}: {shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(shown, value))) + "}"
    if isinstance(value, list | tuple | LazySequence):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, functools.partial):
        return f"partial({', '.join(map(shown, (value.func, *value.args)))}, {shown(value.keywords)})"
    return getattr(value, "__qualname__", "") or f"<{type(value).__name__}>"


class Calls:
    """What was called, in order, with what."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def to(self, name: str, returns: Any = None, *, raises: Exception | None = None) -> Callable[..., Any]:
        """A function of this name that writes down its calls."""

        def called(*args: Any, **named: Any) -> Any:
            given = [*map(shown, args), *(f"{key}={shown(value)}" for key, value in named.items())]
            self.lines.append(f"{name}({', '.join(given)})")
            if raises is not None:
                raise raises
            return returns

        return called

    def say(self, name: str, value: Any) -> None:
        """A line of its own."""
        self.lines.append(f"{name}: {shown(value)}")

    def members(self, name: str, value: Any, *, without: tuple[str, ...] = ()) -> None:
        """A line for each attribute of an object."""
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
        else:
            names = [*vars(value)]
        self.lines += [f"{name}.{key}: {shown(getattr(value, key))}" for key in names if key not in without]
