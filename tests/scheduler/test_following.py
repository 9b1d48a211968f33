"""Requests with a common prefix: the others wait until the first one has computed what they share, and no longer."""

from __future__ import annotations

import pytest

from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Plan, Result
from quire.scheduler.scheduler import Scheduler
from quire.types import Request

SIZE, CHUNK = 4, 8


class Steps:
    """A scheduler whose steps feed chunks of 8 tokens; `opened` has the (request, cached tokens) of each."""

    def __init__(self) -> None:
        kv = KVCacheManager(64, SIZE, make_prefix_cache(SIZE, True), min_shared_tokens=SIZE)
        self.scheduler = Scheduler(kv, rows=8, max_num_batched_tokens=64, max_chunk_tokens=CHUNK)

    def ask(self, id: str, shared: int, length: int = 32) -> None:
        """A request of `length` tokens, of which the first `shared` are those of all others."""
        own = range(1000 * ord(id), 1000 * ord(id) + length - shared)
        self.scheduler.add(Request(id=id, prompt=(*range(shared), *own), max_new_tokens=2))

    def step(self) -> list[tuple[str, int]]:
        plan = self.scheduler.plan()
        assert isinstance(plan, Plan)
        opened = [(why.request_id, why.n) for why in self.scheduler.inflight[-1].decisions if why.kind == "opened"]
        self.scheduler.commit(Result([[7] * span.num_samples for span in plan.spans], []))
        return opened


def test_each_waits_for_what_it_shares_and_not_for_what_another_does() -> None:
    steps = Steps()
    steps.ask("a", 32)
    steps.ask("b", 24)
    steps.ask("c", 8)
    assert steps.step() == [("a", 0)]
    assert steps.step() == [("c", 8)], "its eight tokens are computed; b would compute what a does now"
    assert steps.step() == []
    assert steps.step() == [("b", 24)]


@pytest.mark.parametrize("fed", [1, 2])
def test_who_comes_in_the_middle_of_a_prompt_waits_for_the_rest_of_it(fed: int) -> None:
    steps = Steps()
    steps.ask("a", 32)
    for _ in range(fed):
        steps.step()
    steps.ask("b", 24)
    rest = [steps.step() for _ in range(4 - fed)]
    assert rest == [[], [], [("b", 24)]][fed - 1 :]
