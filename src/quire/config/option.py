"""Options: described by dataclass fields, and parsed from flags, variables and files."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
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


def option(default: Any, help: str, *, secret: bool = False, **attributes: Any) -> Any:
    """A dataclass field that is an option. attributes: fields of Option that do not follow from the field's type."""
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret, **attributes})


OTHER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": MappingProxyType(
            {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
        ),
        "kv_cache_dtype": MappingProxyType({"fp8_e4m3": "fp8"}),
        "distributed_executor_backend": MappingProxyType({"uni": "mp", "external_launcher": "mp"}),
    }
)
"""Values that other servers' commands have for the same, by option."""

SHORT: Mapping[str, str] = MappingProxyType(
    {"quantization": "-q", "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "speculative_config": "-sc"}
)
"""Short forms of flags, which are vLLM's, by option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option, from a dataclass field. `choices` come from a Literal type or are given, `optional` from `| None`.

    `unset` is the word for None, by default none for text and auto otherwise; `low` and `high` are included. A `secret`
    is never printed, not even in a repr. verbatim: a list's texts are taken as they are; in others commas part, space
    around is dropped, and none may be empty. mapping: the text is a JSON object, which Python and files may also give
    as what it stands for. registered: choices are names of classes; any other is given as module:Class.
    """

    name: str
    section: str
    kind: Kind
    default: Any
    help: str
    optional: bool
    choices: tuple[str, ...]
    unset: str
    low: float = -math.inf
    high: float = math.inf
    secret: bool = False
    metavar: str = ""
    verbatim: bool = False
    mapping: bool = False
    registered: bool = False

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
        if self.optional and (value in (None, self.unset, (self.unset,)) or (value in (-1, "-1") and self.low >= 0)):
            return None
        parsed = _object(value) if self.mapping else _READERS[self.kind](value)
        if parsed is None:
            raise InvalidConfig(f"{where}: {self.wants()}, not {self._quote(value)}", param=self.name)
        if self.choices and isinstance(parsed, str):
            parsed = OTHER_NAMES.get(self.name, {}).get(parsed, parsed)
        if self.kind == "texts" and not self.verbatim:
            parsed = tuple(piece.strip() for text in parsed for piece in text.split(","))
        self.check(parsed, where)
        return parsed

    def check(self, value: Any, where: str) -> None:
        """Raises InvalidConfig if the value is of the wrong type, not one of the choices, or out of range."""
        if value is None and self.optional:
            return
        if not isinstance(value, _TYPES[self.kind]) or (isinstance(value, bool) and self.kind != "switch"):
            wrong = f", not {self._quote(value)}"
        elif self.kind == "texts" and not self.verbatim and not all(value):
            wrong = ": leave it out where there is none"
        elif self.choices and value not in self.choices and not (self.registered and ":" in value):
            wrong = f", not {value!r}.{nearest(value, self.choices)}"
        elif not is_encodable(value):
            wrong = f", in UTF-8 and without zero bytes, not {self._quote(value)}"
        elif self.kind in ("whole", "number") and not self.low <= value <= self.high:
            wrong = f", not {value}"
        else:
            return
        too_large = self.kind in ("whole", "number") and isinstance(value, int | float) and value > self.high
        raise InvalidConfig(f"{where}: {self.wants(most=too_large)}{wrong}", param=self.name)

    def wants(self, *, most: bool = False) -> str:
        """What a value must be, for messages. most: with an upper bound that no useful value comes near, too."""
        if self.choices:
            return "must be one of " + ", ".join(self.choices) + (", or module:Class" if self.registered else "")
        words = {
            "text": "must be a JSON object" if self.mapping else "must be text",
            "texts": "must be text, or a list of texts" + ("" if self.verbatim else ", none of them empty"),
            "whole": "must be a whole number",
            "number": "must be a number",
            "switch": "must be true or false",
        }[self.kind]
        low, high = (f"{bound:g}" if abs(bound) < 1e6 else str(bound) for bound in (self.low, self.high))
        if math.isfinite(self.low) and (most or self.high < UNLIMITED):
            words += f" from {low} to {high}"
        elif math.isfinite(self.low):
            words += f" of at least {low}"
        return words + (f", or {self.unset!r}" if self.optional and self.kind != "text" else "")

    def _quote(self, value: object) -> str:
        return "that" if self.secret else repr(value)


def is_encodable(value: object) -> bool:
    """False for text that Python made of bytes that are no UTF-8, or that no path may hold: neither can be sent on."""
    texts = value if isinstance(value, tuple) else (value,)
    return not any(re.search("[\x00\ud800-\udfff]", text) for text in texts if isinstance(text, str))


def options(section: str, config: type) -> Iterator[Option]:
    """The options of a dataclass, in order. Raises TypeError for a field without a default."""
    types = typing.get_type_hints(config)
    for entry in fields(config):
        if entry.default is MISSING:
            raise TypeError(f"option {entry.name} has no default")
        inner, alternatives = types[entry.name], typing.get_args(types[entry.name])
        optional = type(None) in alternatives
        if optional:
            inner = next(each for each in alternatives if each is not type(None))
        literal = typing.get_args(inner) if typing.get_origin(inner) is Literal else ()
        kind: Kind = "text" if literal else _KINDS[inner]
        yield Option(
            name=entry.name,
            section=section,
            kind=kind,
            default=entry.default,
            optional=optional,
            **{"choices": literal, "unset": "none" if kind == "text" else "auto", **entry.metadata},
        )


_KINDS: Mapping[Any, Kind] = MappingProxyType(
    {str: "text", tuple[str, ...]: "texts", int: "whole", float: "number", bool: "switch"}
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
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(piece, str) for piece in value):
        return tuple(value)
    return None


def _whole(value: object) -> int | None:
    """`32k` is 32,000 and `32K` 32,768, as in vLLM; `4GB` is decimal and `4GiB` binary."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
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


def amount(size: float) -> str:
    """Bytes with a unit: 1.50 GiB."""
    for unit, each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= each:
            return f"{size / each:.2f} {unit}"
    return f"{size:.0f} bytes"
