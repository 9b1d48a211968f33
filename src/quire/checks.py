"""Checks of arguments from Python, where no JSON schema has checked them. Each raises InvalidRequest naming the
field."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequest


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
