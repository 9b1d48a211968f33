"""Modules of kernels that are imported when something of them is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """A module of this folder by its name. What is asked of it is asked of the module."""

    def __init__(self, name: str) -> None:
        self._module = f"{__package__}.{name}"

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)
