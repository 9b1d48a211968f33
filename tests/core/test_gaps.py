"""Whoever runs in the gaps takes short steps, so that nobody who comes waits long."""

from __future__ import annotations

from quire.core.kv import KV, prefix_index
from quire.core.scheduler import Scheduler
from quire.values import IDLE, Request


def ask(id: str, priority: int = 0) -> Request:
    return Request(id=id, prompt=tuple(range(30)), max_new=4, priority=priority)


def test_steps_are_short_only_while_those_in_the_gaps_run() -> None:
    scheduler = Scheduler(KV(64, 4, prefix_index(4, False)), rows=8, budget=100, gap=7)
    scheduler.add(ask("a", IDLE))
    scheduler.add(ask("b", IDLE))
    plan = scheduler.plan()
    assert plan is not None and [span.n for span in plan.spans] == [7]
    scheduler.add(ask("person"))
    plan = scheduler.plan()
    assert plan is not None and [(span.n, span.rows) for span in plan.spans] == [(30, 1)]
