"""`python -m benchmarks.steps`: what kernels that overlap add."""

from __future__ import annotations

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks.steps import MARK, Added, added, command, last_steps, launches, lines


def event(
    name: str, begin: float, took: float, grid: tuple[int, ...] = (4, 2, 1), cat: str = "kernel"
) -> dict[str, object]:
    return {"name": name, "ts": begin, "dur": took, "cat": cat, "args": {"grid": list(grid)}}


def test_a_kernel_adds_what_it_ends_later_than_all_before_it() -> None:
    trace = [
        event("second", 4.0, 7.0),
        event("first", 0.0, 10.0),
        event("third", 5.0, 3.0, (8, 1, 1)),
        event("a call", 0.0, 99.0, cat="cuda_runtime"),
        event("second", 12.0, 1.0),
    ]
    order = launches(trace)
    assert [each.name for each in order] == ["first", "second", "third", "second"]
    assert added(order) == [
        Added("first", (2, 1), 1, 10.0, 10.0),
        Added("second", (2, 1), 2, (1.0 + 2.0) / 2, 4.0),
        Added("third", (1, 1), 1, 0.0, 3.0),
    ]
    title, *kernels = lines("a step", order, 1, 2)
    assert title == "a step: 0.013 ms in 4 kernels"
    assert len(kernels) == 2


def test_the_last_steps_are_those_between_marks() -> None:
    order = launches([event(name, float(at), 1.0) for at, name in enumerate(["a", MARK, "b", MARK, "c", MARK, "d"])])
    assert [each.name for each in last_steps(order, 1)] == ["c", MARK]
    with pytest.raises(click.ClickException, match="3 steps are too few to look at 3"):
        last_steps(order, 3)


def test_without_a_card_it_says_what_there_is_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(command, ["tpot-8b"])
    assert done.exit_code == 1
    assert "benchmarks.profile" in done.output
