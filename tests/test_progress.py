"""Whoever waits for a model sees how far it is."""

from __future__ import annotations

import itertools
import sys

import pytest

from quire import LLM, SamplingParams
from quire.assembly.progress import compiling, loading, preparing
from quire.model_runner.graphs import GraphKey, WorkQueue

GB = 10**9


def run(total: int, begin: int = 0) -> None:
    seconds = itertools.count(begin, 3)
    with loading("name", clock=lambda: float(next(seconds))) as tell:
        for done in range(5):
            tell(done * total // 4, total)


def test_a_bar_is_drawn_where_somebody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    run(8 * GB)
    said = capsys.readouterr().err
    assert "loading name" in said
    assert "8.0/8.0 GB" in said
    run(GB // 8)
    assert "loading" not in capsys.readouterr().err


def test_a_notebook_which_forces_colors_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(8 * GB)
    with LLM(dtype="float32") as llm:
        llm.generate("a", SamplingParams(max_tokens=2))
    assert "\x1b[?25l" not in capsys.readouterr().err


def test_where_nobody_does_there_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    run(8 * GB)
    assert capsys.readouterr().err.splitlines() == [
        "loading name: 2.0 of 8.0 GB, 0.33 GB/s",
        "loading name: 6.0 of 8.0 GB, 0.50 GB/s",
    ]
    run(GB // 8)
    assert capsys.readouterr().err == ""
    run(8 * GB, begin=10**6)
    assert len(capsys.readouterr().err.splitlines()) == 2, "whatever the clock says at the beginning"


def compile_in(seconds: float, kernels: int) -> None:
    clock = itertools.count(0.0, seconds / kernels / 2)  # read twice for each
    with compiling(clock=lambda: next(clock)) as tell:
        for done in range(kernels):
            tell(done + 1, kernels)


def test_compiling_is_shown_once_it_takes_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    compile_in(0.9, 80)
    assert capsys.readouterr().err == ""
    compile_in(11.5, 80)
    assert capsys.readouterr().err.splitlines() == ["compiling kernels: 35 of 80", "compiling kernels: 70 of 80"]


def test_a_bar_counts_kernels_where_somebody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    compile_in(9, 80)
    assert "80/80" in capsys.readouterr().err


def test_preparing_steps_is_shown_once_it_takes_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(0.0, 1.5)  # read twice for each
    done: list[GraphKey] = []
    queue = WorkQueue()
    queue.watch = lambda: preparing(clock=lambda: next(clock))  # type: ignore[method-assign]
    keys = [GraphKey.head(rows, 0) for rows in (1, 4, 8, 16)]
    queue.prepare_all([(key, lambda key=key: done.append(key)) for key in keys])  # type: ignore[misc]
    assert done == keys
    assert capsys.readouterr().err.splitlines() == ["preparing steps: 2 of 4", "preparing steps: 4 of 4"]
    WorkQueue().prepare_all([(keys[0], lambda: done.append(keys[0]))])
    assert len(done) == 5
    assert capsys.readouterr().err == ""
