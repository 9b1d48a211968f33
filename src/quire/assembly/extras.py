"""Modules that need a package of an extra, asked for by name: the package may not be there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quire.errors import InvalidConfig


def extra(module: str, name: str) -> Any:
    """`module`, which needs the extra called `name`. Raises InvalidConfig where a package is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"this needs a package that is not installed ({error.name}): pip install 'quire-llm[{name}]'"
        ) from error
