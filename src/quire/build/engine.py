"""The old name of `quire.assembly.engine`, until 0.3."""

from __future__ import annotations

from quire.deprecated import aliases

__getattr__ = aliases(__name__, "quire.assembly.engine", {})
