"""Kernels compiled after the engine is ready are counted, by the hook that Triton calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from triton import knobs

from quire.assembly.cuda import count_compiles


def test_what_triton_compiles_later_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knobs.compilation, "listener", None)
    compiled = count_compiles()
    assert compiled() == 0
    for name in ("attention", "sample"):
        knobs.compilation.listener(  # as triton.compiler.compile calls it
            src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=False
        )
    assert compiled() == 2
    assert "compiled after the engine was ready: sample" in caplog.text
