"""Modules of kernels that are imported when something of them is asked for."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any


class Later:
    """A module of this folder by its name. What is asked of it is asked of the module."""

    def __init__(self, name: str) -> None:
        self._module = f"{__package__}.{name}"

    @cached_property
    def _imported(self) -> ModuleType:
        return import_module(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._imported, name)
