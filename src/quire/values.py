"""The old name of `quire.types`, until 0.3."""

from __future__ import annotations

from quire.deprecated import aliases

__getattr__ = aliases(__name__, "quire.types", {"StructuredOutputs": "StructuredOutputsParams"})
