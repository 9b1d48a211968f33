"""Checks of arguments from Python, where no JSON schema has checked them. Each raises InvalidRequest naming the
field."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quire.errors import InvalidRequest, nearest

ANY: tuple[Any, ...] = ()
"""Every value: what the argument sets is not there to be set, and answers are the same."""

_Class = TypeVar("_Class")


class Unneeded(NamedTuple):
    """An argument of vLLM that is none here. values: those that change nothing. instead: what to do with another."""

    values: tuple[Any, ...]
    instead: str


def changes_nothing(value: object, values: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `values`; True is not 1."""
    return values is ANY or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def refusal(name: str, value: object, values: tuple[Any, ...]) -> str:
    """That an argument has none of the values that are taken."""
    return f"{name}={value!r:.80} is not supported, only {' or '.join(map(repr, values))}"


def check_unneeded(
    owner: str, given: Mapping[str, Any], known: Collection[str], others: Mapping[str, Unneeded]
) -> None:
    """Raise InvalidRequest for an argument of `owner` that is not known, or whose value would change something.

    known: names that are arguments, for the hint. others: those of vLLM that are none.
    """
    for name, value in given.items():
        if name not in others:
            raise InvalidRequest(f"{owner} has no parameter {name}.{nearest(name, [*known, *others])}", param=name)
        if not changes_nothing(value, others[name].values):
            raise InvalidRequest(f"{refusal(name, value, others[name].values)}: {others[name].instead}", param=name)


def with_unneeded(others: Mapping[str, Unneeded]) -> Callable[[type[_Class]], type[_Class]]:
    """A decorator of dataclasses whose constructor also takes the arguments of `others`, where they change nothing.

    What it raises for an argument that is not known is InvalidRequest, not TypeError.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        made: Callable[..., None] = cls.__init__
        known = frozenset(cls.__dataclass_fields__)  # type: ignore[attr-defined]

        @wraps(made)
        def make(self: Any, *positional: Any, **given: Any) -> None:
            if not given.keys() <= known:
                rest = {name: given.pop(name) for name in given.keys() - known}
                check_unneeded(cls.__name__, rest, known, others)
            made(self, *positional, **given)

        cls.__init__ = make  # type: ignore[method-assign]
        return cls

    return decorate


def number(name: str, value: object, low: float, high: float, *, whole: bool = False, param: str | None = None) -> None:
    """Raises InvalidRequest for what is no number from `low` to `high`. NaN is none: it compares as nothing does."""
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "a whole number" if whole and isinstance(value, float) else "a number"
        shown = value if isinstance(value, float) else type(value).__name__
        raise InvalidRequest(f"{name} must be {kind}, not {shown}", param=param or name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=param or name)


def flag(name: str, value: object) -> None:
    """Raises InvalidRequest for what is neither true nor false."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, not {value!r}", param=name)


def texts(name: str, value: object) -> tuple[str, ...]:
    """A lone text is one, and None is none, as in vLLM. Raises InvalidRequest for anything but texts."""
    several = (value,) if isinstance(value, str) else () if value is None else value
    made = tuple(several) if isinstance(several, Iterable) else (value,)
    for one in made:
        if not isinstance(one, str):
            raise InvalidRequest(f"{name} must be text, or a list of texts, not {one!r}"[:200], param=name)
    return made


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """None is none. Raises InvalidRequest for anything but whole numbers, of any library."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        made = tuple(value)
        try:
            return tuple(map(operator.index, made))
        except TypeError:
            value = next(one for one in made if not isinstance(one, int))
    raise InvalidRequest(f"{name} must be a list of token ids, not {value!r}"[:200], param=name)


def biases(name: str, value: Any, most: float) -> Mapping[int, float]:
    """Numbers from -most to most by token id; None is none. Raises InvalidRequest for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(token, int) for token in value):
        raise InvalidRequest(f"{name} must map token ids to numbers, not {value!r}"[:200], param=name)
    for token, bias in value.items():
        number(f"{name}[{token}]", bias, -most, most, param=name)
    return value


def instead(path: Path, kind: str) -> str:
    """Why a file is not `kind` ("a GGUF file"): it is empty, a pointer of Git LFS, a web page, or something else."""
    with path.open("rb") as file:
        begin = file.read(64).lstrip().lower()
    if not begin:
        return f"{path.name} is empty: download it again"
    if begin.startswith(b"version https://git-lfs"):
        return f"{path.name} is a pointer of Git LFS, not the file itself: run `git lfs pull`, or download it again"
    if begin.startswith((b"<!doctype", b"<html")):
        return f"{path.name} is a web page, not {kind}: download the file itself"
    return f"{path.name} is not {kind}"
