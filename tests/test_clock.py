"""No test is decided by the clock of a busy machine: guards against hangs wait long, and nothing has to be quick."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
LEAST, POLL = 50.0, 0.1
"""Seconds: ten times what anything waited for by a test takes on a machine at rest; and below, it only looks again."""

CLOCKS = frozenset({"monotonic", "perf_counter", "time"})
WAITS = {
    "wait": 1,
    "join": 1,
    "result": 1,
    "exception": 1,
    "timeout": 1,
    "settled": 1,
    "wait_for": 2,
    "until": 2,
    "run": 0,
}
"""Calls that wait, and which of their arguments says how long; 0: only one by name."""


def name(call: ast.expr) -> str:
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def number(node: ast.expr | None) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


def guards(call: ast.Call) -> Iterator[float]:
    """Seconds that a call waits at most, where they are written there."""
    place = WAITS.get(name(call))
    if place is not None:
        given = [keyword.value for keyword in call.keywords if keyword.arg in ("timeout", "seconds")]
        given += call.args[-1:] if len(call.args) == place else []
        yield from (seconds for node in given if (seconds := number(node)) is not None)


def hasty(tree: ast.Module) -> Iterator[int]:
    """Lines with a guard that is soon over, or with a bound on the time that something took."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(POLL <= seconds < LEAST for seconds in guards(node)):
            yield node.lineno
        if isinstance(node, ast.Assert):
            for part in (each for each in ast.walk(node.test) if isinstance(each, ast.Compare)):
                timed = any(name(each) in CLOCKS for each in ast.walk(part) if isinstance(each, ast.Call))
                below = zip(part.ops, part.comparators, strict=True)
                if timed and any(
                    isinstance(op, ast.Lt | ast.LtE) and (number(to) or LEAST) < LEAST for op, to in below
                ):
                    yield node.lineno


def test_no_test_is_decided_by_the_clock_of_a_busy_machine() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in hasty(ast.parse(path.read_text("utf-8")))
    }
    assert found == set()


def test_what_is_hasty_is_seen() -> None:
    bad = (
        "subprocess.run(it, timeout=30)",
        "process.wait(5)",
        "assert time.monotonic() - began < 2",
        "assert 1 <= time.perf_counter() - began <= 3.0",
        "asyncio.wait_for(it, 1)",
        "asyncio.timeout(20)",
        "live.settled(2.0)",
    )
    good = (
        "subprocess.run(it, timeout=600)",
        "assert time.monotonic() - began >= 0.5",
        "assert time.monotonic() < end",
    )
    assert [len(list(hasty(ast.parse(line)))) for line in (*bad, *good)] == [1] * len(bad) + [0] * len(good)
