"""Errors for unknown options: of other servers, with a replacement or the reason; misspelled, with the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from quire.config.option import PREFIX
from quire.config.other_servers import ELSEWHERE, UNSUPPORTED, VARIABLES
from quire.errors import InvalidConfig
from quire.types import NUMERIC_PARAMETERS

_IN_REQUESTS = frozenset(each.name for each in NUMERIC_PARAMETERS if each.in_requests)
_SAID_IN_REQUESTS = "send it in the request, or set it for all with --override-generation-config"


def refuse(name: str, source: str, known: Iterable[str]) -> InvalidConfig:
    """The error for an unknown option. name, known: both flags, variables or keys."""
    plain = re.sub(r"^-(\w)\d+$", r"\1", name).removeprefix(PREFIX).lstrip("-").replace("-", "_")
    plain = plain.lower() if name.startswith(PREFIX) else plain
    # A switch of another server may be negated: --no-mmproj.
    positive = next(
        (one for one in (plain, plain.removeprefix("no_")) if one in ELSEWHERE or one in UNSUPPORTED), plain
    )
    if positive in ELSEWHERE:
        return InvalidConfig(f"{source}: there is no option {name}: here it is {ELSEWHERE[positive]}", param=plain)
    if plain in _IN_REQUESTS:
        return InvalidConfig(f"{source}: {name} is not supported: {_SAID_IN_REQUESTS}", param=plain)
    if positive in UNSUPPORTED:
        return InvalidConfig(f"{source}: {name} is not supported: {UNSUPPORTED[positive]}", param=plain)
    # Without what all names begin with, which would make any two of them alike.
    bare = {re.sub(r"^(--|QUIRE_)", "", one): one for one in known}
    close = difflib.get_close_matches(re.sub(r"^(--|QUIRE_)", "", name), bare, n=1, cutoff=0.6)
    hint = f" Did you mean {bare[close[0]]!r}?" if close else ""
    return InvalidConfig(f"{source}: there is no option {name}.{hint}", param=plain)


def unread(environ: Mapping[str, str], known: Collection[str], *, reach_vllm: bool = False) -> list[str]:
    """A line for each variable of `environ` that sets an option of another server, and has no effect here.

    known: names of options. reach_vllm: vLLM's are for one that is started. Those that clients read are left out.
    """
    lines, others = [], []
    for name in sorted(environ):
        if name.startswith(_OF_CLIENTS) or (reach_vllm and name.startswith("VLLM_")):
            continue
        instead = VARIABLES.get(name) or _in_place_of(name, environ[name], known)
        if instead is not None:
            lines.append(f"{name} is not read: {instead}")
        elif name.startswith(_PREFIXES) and name != "OLLAMA_HOST":
            others.append(name)
    return [*lines, *([f"not read: {', '.join(others)}; options are QUIRE_*"] if others else [])]


_LLAMA = "LLAMA_ARG_"
_PREFIXES = (_LLAMA, "VLLM_", "SGLANG_", "OLLAMA_")
_OF_CLIENTS = ("OLLAMA_API_KEY", "OLLAMA_MODELS", "OLLAMA_EDITOR", "OLLAMA_NOHISTORY")
_EVERY_ADDRESS = re.compile(r"(https?://)?(0\.0\.0\.0|\[::\])")


def _in_place_of(name: str, value: str, known: Collection[str]) -> str | None:
    """What there is for OLLAMA_HOST where it is no client's, and for options of llama.cpp's; None for others."""
    if name == "OLLAMA_HOST" and _EVERY_ADDRESS.match(value):
        return "here it is QUIRE_HOST and QUIRE_PORT"
    if not name.startswith(_LLAMA):
        return None
    plain = name.removeprefix(_LLAMA).lower().removeprefix("endpoint_")
    if plain in _IN_REQUESTS:
        return _SAID_IN_REQUESTS
    flag = ELSEWHERE.get(plain, plain if plain in known else None)
    if flag is None:
        return UNSUPPORTED.get(plain)
    return f"here it is {PREFIX}{flag.partition(' ')[0].strip('-').replace('-', '_').upper()}"
