"""The server of fixed speed, here too."""

from __future__ import annotations

from tests.bench.conftest import upstream

__all__ = ["upstream"]
