"""What a step of the engine does on the host, counted: calls of functions and of the grammar library for each row.

Times differ between machines; a loop more for each row of a step does not.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner

from benchmarks import host as program
from benchmarks.host import Card, Host, text_of

MOST = {
    "plain": (3, 15),
    "logprobs": (3, 16),
    "allowed": (3, 15),
    "bias": (3, 15),
    "bad words": (3, 15),
    "min_tokens": (3, 15),
    "stop strings": (7, 20),
    "JSON schema": (6, 26),
    "regex": (6, 26),
    "tools": (8, 27),
}
"""Calls of Python's functions and of built-in ones for each row of a step, at most."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(text_of(tmp_path_factory.mktemp("text"), 4096), 24, Card((1.0, 0.01), (0.15, 0.003)), length=512)


def calls(host: Host, name: str, size: int) -> tuple[int, int]:
    """Calls of Python's functions and of built-in ones in a step in which `size` rows decode: medians."""
    counts: list[tuple[int, int]] = []

    def counted(step: Callable[[], int]) -> int:
        seen: Counter[str] = Counter()

        def note(frame: FrameType, event: str, what: object) -> None:
            seen[event] += 1

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            ended = step()
        finally:
            sys.setprofile(before)
        counts.append((seen["call"], seen["c_call"]))
        return ended

    host.steady = counted
    host.run(name, host.batch(size, 0, (20, 30), (60, 60)))
    assert len(counts) > 20
    return statistics.median_low(own for own, _ in counts), statistics.median_low(built_in for _, built_in in counts)


@pytest.mark.parametrize("name", MOST)
def test_a_row_costs_so_many_calls_in_each_step(host: Host, name: str) -> None:
    few, many = calls(host, name, 8), calls(host, name, 24)
    each = tuple((after - before) / 16 for before, after in zip(few, many, strict=True))
    assert each[0] <= MOST[name][0] and each[1] <= MOST[name][1], each


def test_the_double_clock_hides_the_hosts_work_behind_the_cards(host: Host) -> None:
    """A card that is slow is what all features wait for; beside one that takes no time, only the host is left."""
    card = host.card
    batch = host.batch(4, 1, (20, 30), (12, 12))
    host.steady = program.call
    card.forward = (50.0, 0.0)
    slow = {name: host.run(name, batch)["clock_s"] for name in ("plain", "regex")}
    assert all(12 * 0.05 <= seconds < 12 * 0.05 * 1.5 for seconds in slow.values()), slow
    card.forward = card.head = (0.0, 0.0)
    free = host.run("plain", batch)
    assert free["clock_s"] <= 2e-3 * free["all_ms"]


def test_the_command_prints_and_stores_a_row_for_each_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "VOCAB", 4096)
    monkeypatch.setattr(program.heap, "settled", lambda: None)
    given = ["--size", "2", "--repeat", "1", "--new", "6", "8", "--feature", "regex", "--feature", "prompt_logprobs"]
    done = CliRunner().invoke(program.command, [*given, "--json", str(tmp_path / "rows.json")])
    assert done.exit_code == 0, done.output
    for name in ("plain", "regex", "prompt_logprobs"):
        assert name in done.output
    assert (tmp_path / "rows.json").read_text().count('"feature"') == 4
