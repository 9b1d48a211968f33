"""Options: described by dataclass fields, and parsed from flags, variables and files."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType, UnionType
from typing import Any, Literal

from quire.errors import InvalidConfig, nearest
from quire.types import UNLIMITED

PREFIX = "QUIRE_"

Kind = Literal["text", "texts", "whole", "number", "switch"]

_WORDS = MappingProxyType(
    {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
)
_UNITS = MappingProxyType(
    {
        "": 1,
        **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
        **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
        **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
        **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    }
)
_WHOLE = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]{0,3})")


def option(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    secret: bool = False,
    unset: str = "auto",
    metavar: str = "",
    verbatim: bool = False,
    mapping: bool = False,
    registry: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is an option. `unset` is the word for None; `low` and `high` are included.

    A `secret` is never printed, not even in a repr. verbatim: a list's texts are taken as they are; in others commas
    part, space around is dropped, and none may be empty. mapping: the text is a JSON object, which Python and files may
    also give as what it stands for. registry: names of registered classes, the choices; any
    other class is given as module:Class.
    """
    notes = {"help": help, "low": low, "high": high, "secret": secret, "unset": unset, "metavar": metavar}
    notes |= {"verbatim": verbatim, "mapping": mapping, "registry": registry}
    return field(default=default, repr=not secret, metadata=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option, from a dataclass field. `choices` come from a Literal type, `optional` from `| None`."""

    name: str
    section: str
    kind: Kind
    default: Any
    help: str
    low: float
    high: float
    optional: bool
    choices: tuple[str, ...]
    secret: bool
    unset: str
    metavar: str
    verbatim: bool
    mapping: bool
    registry: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The command line's flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    def show(self, value: Any) -> str:
        """The value as a user writes it; never a secret."""
        if value is None:
            return self.unset
        if self.kind == "texts":
            return ("(set)" if self.secret else ", ".join(value)) if value else "none"
        if self.secret:
            return "(set)"
        return str(value).lower() if self.kind == "switch" else str(value)

    def read(self, value: object, where: str) -> Any:
        """Parse and validate `value`.

        Raises InvalidConfig; its message begins with `where` (the flag, the variable, the file).
        """
        if self.optional and (value is None or value == self.unset or (value in (-1, "-1") and self.low >= 0)):
            return None
        parsed = _object(value) if self.mapping else _READERS[self.kind](value)
        if parsed is None:
            raise InvalidConfig(f"{where}: {self.wants()}, not {self._quote(value)}", param=self.name)
        if self.kind == "texts" and not self.verbatim:
            parsed = tuple(piece.strip() for text in parsed for piece in text.split(","))
        self.check(parsed, where)
        return parsed

    def check(self, value: Any, where: str) -> None:
        """Raises InvalidConfig if the value is of the wrong type, not one of the choices, or out of range."""
        if value is None and self.optional:
            return
        right = _TYPES[self.kind]
        if not isinstance(value, right) or (isinstance(value, bool) and self.kind != "switch"):
            raise InvalidConfig(f"{where}: {self.wants()}, not {self._quote(value)}", param=self.name)
        if self.kind == "texts" and not self.verbatim and not all(value):
            raise InvalidConfig(f"{where}: {self.wants()}: leave it out where there is none", param=self.name)
        if self.choices and value not in self.choices and not (self.registry and ":" in value):
            hint = nearest(value, self.choices)
            raise InvalidConfig(f"{where}: {self.wants()}, not {value!r}.{hint}", param=self.name)
        if self.kind in ("whole", "number") and not self.low <= value <= self.high:
            raise InvalidConfig(f"{where}: {self.wants()}, not {value}", param=self.name)

    def wants(self) -> str:
        """What a value must be, for messages."""
        if self.choices:
            return "must be one of " + ", ".join(self.choices) + (", or module:Class" if self.registry else "")
        words = {
            "text": "must be a JSON object" if self.mapping else "must be text",
            "texts": "must be text, or a list of texts" + ("" if self.verbatim else ", none of them empty"),
            "whole": "must be a whole number",
            "number": "must be a number",
            "switch": "must be true or false",
        }[self.kind]
        low, high = (f"{bound:g}" if abs(bound) < 1e6 else str(bound) for bound in (self.low, self.high))
        if math.isfinite(self.low) and self.high < UNLIMITED:
            words += f" from {low} to {high}"
        elif math.isfinite(self.low):
            words += f" of at least {low}"
        return words + (f", or {self.unset!r}" if self.optional and self.kind != "text" else "")

    def _quote(self, value: object) -> str:
        return "that" if self.secret else repr(value)


def options(section: str, config: type) -> Iterator[Option]:
    """The options of a dataclass, in order."""
    types = typing.get_type_hints(config)
    for entry in fields(config):
        yield _describe(section, entry, types[entry.name])


def _describe(section: str, entry: Field[Any], annotation: Any) -> Option:
    optional = isinstance(annotation, UnionType) or typing.get_origin(annotation) is typing.Union
    inner = next((a for a in typing.get_args(annotation) if a is not type(None)), str) if optional else annotation
    literal = typing.get_args(inner) if typing.get_origin(inner) is Literal else ()
    choices = literal or entry.metadata["registry"]
    kinds: dict[Any, Kind] = {
        str: "text",
        tuple[str, ...]: "texts",
        int: "whole",
        float: "number",
        bool: "switch",
    }
    if entry.default is MISSING:
        raise TypeError(f"option {entry.name} has no default")
    return Option(
        name=entry.name,
        section=section,
        kind="text" if choices else kinds[inner],
        default=entry.default,
        optional=optional,
        choices=choices,
        **entry.metadata,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _object(value: object) -> str | None:
    if not isinstance(value, Mapping):
        return _text(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return None


def _texts(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
    if isinstance(value, list | tuple) and all(isinstance(piece, str) for piece in value):
        return tuple(value)
    return None


def _whole(value: object) -> int | None:
    """`32k` is 32,000 and `32K` 32,768, as in vLLM; `4GB` is decimal and `4GiB` binary."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    match = _WHOLE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        return None
    digits, _, decimals = match[1].partition(".")
    scaled = int(digits + decimals) * _UNITS[match[2]]
    return scaled // 10 ** len(decimals) if scaled % 10 ** len(decimals) == 0 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value)
    except ValueError:
        return None
    return parsed if math.isfinite(parsed) else None


def _switch(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    return _WORDS.get(value.strip().lower()) if isinstance(value, str) else None


_READERS: Mapping[Kind, Callable[[object], Any]] = MappingProxyType(
    {"text": _text, "texts": _texts, "whole": _whole, "number": _number, "switch": _switch}
)
_TYPES: Mapping[Kind, Any] = MappingProxyType(
    {"text": str, "texts": tuple, "whole": int, "number": int | float, "switch": bool}
)
