"""Old names of what documentation once imported: they work until 0.3, and warn."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def aliases(module: str, new: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module`: what it had is in `new`, under the same name but for `names` (old: new)."""

    def look_up(name: str) -> Any:
        target = names.get(name, name)
        if target not in (found := vars(importlib.import_module(new))) or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {new}.{target}", DeprecationWarning, stacklevel=2)
        return found[target]

    return look_up
