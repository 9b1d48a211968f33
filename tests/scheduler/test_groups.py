"""Rows that share the stages of a pipeline: as many in each step in flight, and none in two of them."""

from __future__ import annotations

import pytest

from quire.engine.engine import Engine
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Plan
from quire.scheduler.scheduler import Scheduler
from tests.hash_model import HashDevice, HashHandle, naive


class Noted(HashDevice):
    """Keeps the rows of each step that decodes alone, and how many steps were in flight with it."""

    def __init__(self, groups: int) -> None:
        super().__init__(200, 4, groups=groups)
        self.decoded: list[set[int]] = []
        self.flying: list[int] = []

    def launch(self, plan: Plan) -> HashHandle:
        if all(span.num_tokens == 1 for span in plan.spans):
            self.decoded.append({span.row for span in plan.spans})
            self.flying.append(len(self.unread))
        return super().launch(plan)


@pytest.mark.parametrize(("groups", "count", "sizes"), [(1, 7, {7}), (2, 8, {4}), (2, 7, {3, 4}), (3, 7, {1, 3})])
def test_each_step_in_flight_decodes_an_even_share_at_most(groups: int, count: int, sizes: set[int]) -> None:
    device = Noted(groups)
    kv = KVCacheManager(200, 4, make_prefix_cache(4, False))
    it = Engine(Scheduler(kv, groups=groups), device, lookahead=groups - 1)
    prompts = [(3, 1, 4, 1, 5, i) for i in range(count)]
    for i, prompt in enumerate(prompts):
        it.submit(prompt, 20, id=str(i))
    said: dict[str, list[int]] = {str(i): [] for i in range(count)}
    while it.has_pending_work:
        for event in it.step():
            said[event.id] += event.tokens
    wanted = [naive(prompt, 20, frozenset(), (0, 0), None)[len(prompt) :] for prompt in prompts]
    assert list(said.values()) == wanted
    steady = device.decoded[3 * groups : 15 * groups]
    assert {len(rows) for rows in steady} == sizes
    assert set(device.flying[3 * groups : 15 * groups]) == {groups - 1}, "every stage has a step"
    for at in range(len(steady) - groups + 1):
        rows = [row for step in steady[at : at + groups] for row in step]
        assert len(rows) == len(set(rows)) == count, "every row once in as many steps as there are groups"
