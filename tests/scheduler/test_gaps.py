"""Background requests take short steps, so that a request that arrives does not wait long."""

from __future__ import annotations

from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.types import BACKGROUND, Request


def ask(id: str, priority: int = 0) -> Request:
    return Request(id=id, prompt=tuple(range(30)), max_new_tokens=4, priority=priority)


def test_steps_are_short_only_while_background_requests_run() -> None:
    scheduler = Scheduler(
        KVCacheManager(64, 4, make_prefix_cache(4, False)), rows=8, max_num_batched_tokens=100, max_background_tokens=7
    )
    scheduler.add(ask("a", BACKGROUND))
    scheduler.add(ask("b", BACKGROUND))
    plan = scheduler.plan()
    assert plan is not None and [span.num_tokens for span in plan.spans] == [7]
    scheduler.add(ask("person"))
    plan = scheduler.plan()
    assert plan is not None and [(span.num_tokens, span.num_samples) for span in plan.spans] == [(30, 1)]


def test_the_context_of_the_next_prompt_is_known_once_it_is_begun() -> None:
    scheduler = Scheduler(KVCacheManager(64, 4, make_prefix_cache(4, False)), rows=8, max_num_batched_tokens=100)
    assert scheduler.prompt_context == 0
    scheduler.add(ask("a"))
    assert scheduler.prompt_context == 30, "how many of a waiting one's tokens are cached is not known"
    for fed in (7, 19):
        scheduler.plan(fed - scheduler.prompt_context % 30)
        assert scheduler.prompt_context == fed
    scheduler.plan()
    assert scheduler.prompt_context == 0
