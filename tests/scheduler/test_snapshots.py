"""States of recurrent layers are kept where others go on, and are never found where they are not right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quire.engine.engine import Engine
from quire.observability.engine_metrics import EngineMetrics
from quire.observability.explain import explain
from quire.observability.history import History
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.snapshots import HybridPrefixCache
from quire.scheduler.speculation import FixedDrafts
from quire.types import UNLIMITED, Pin, Request
from tests.hash_model import HashDevice, naive

SIZE = 4


class Served:
    """An engine around the hash model with recurrent layers, which checks every answer."""

    def __init__(
        self, slots: int | None = 8, *, blocks: int = 200, interval: int = UNLIMITED, drafts: int = 0, **more: int
    ) -> None:
        cache = make_prefix_cache(SIZE, True, slots)
        kv = KVCacheManager(
            blocks, SIZE, cache, min_shared_tokens=SIZE, max_pinned_blocks=16, snapshot_interval=interval
        )
        self.cache, self.recurrent = cache, slots is not None
        self.history = History()
        self.history.attach(kv)
        self.device = HashDevice(blocks, SIZE, rows=16, snapshots=slots, seed="1")
        scheduler = Scheduler(kv, rows=16, speculation=FixedDrafts(drafts), **more)
        self.engine = Engine(scheduler, self.device, lookahead=1, observers=[self.history], keep=1000)
        self.asked: dict[str, Request] = {}
        self.cached: dict[str, int] = {}

    def add(self, *prompts: Sequence[int], new: int = 3, salt: str = "", pins: tuple[Pin, ...] = ()) -> list[str]:
        """The ids of the requests for these prompts."""
        ids = [str(len(self.asked) + i) for i in range(len(prompts))]
        for id, prompt in zip(ids, prompts, strict=True):
            self.asked[id] = Request(id=id, prompt=tuple(prompt), max_new_tokens=new, cache_salt=salt, pins=pins)
            self.engine.add(self.asked[id])
        return ids

    def run(self) -> None:
        """To the end of all requests."""
        while self.engine.has_pending_work:
            for event in self.engine.step():
                if event.tokens and event.id not in self.cached:
                    self.cached[event.id] = event.num_cached
        for done in self.engine.completed_requests:
            r = self.asked[done.id]
            want = naive(r.prompt, r.max_new_tokens, frozenset(), (0, 0), None, self.recurrent)[len(r.prompt) :]
            assert list(done.tokens) == want

    def ask(self, *prompts: Sequence[int], new: int = 3, salt: str = "", pins: tuple[Pin, ...] = ()) -> list[int]:
        """The cached tokens of each prompt, of requests that arrive together."""
        ids = self.add(*prompts, new=new, salt=salt, pins=pins)
        self.run()
        return [self.cached[id] for id in ids]


def text(begin: int, count: int) -> tuple[int, ...]:
    rng = random.Random(begin)
    return tuple(rng.randrange(90) for _ in range(count))


SHARED = text(0, 21)


def test_the_next_turn_of_a_conversation_goes_on_from_the_last_prompt() -> None:
    served = Served()
    first = SHARED
    assert served.ask(first) == [0]
    assert served.ask((*first, *text(1, 9))) == [20]


def test_the_end_of_a_shared_beginning_is_found_by_the_second_prompt_and_used_from_the_third_on() -> None:
    served = Served()
    assert [served.ask((*SHARED, *text(i, 30)))[0] for i in (1, 2, 3, 4)] == [0, 0, 20, 20]


def test_prompts_that_arrive_together_wait_for_the_state_where_they_part() -> None:
    served = Served()
    prompts = [(*SHARED, *text(i, 30)) for i in range(1, 6)]
    assert served.ask(*prompts) == [0, 20, 20, 20, 20]


def test_choices_of_a_prompt_share_it() -> None:
    served = Served()
    assert served.ask(*[SHARED] * 4) == [0, 20, 20, 20]


def test_long_texts_have_states_at_intervals_answers_too() -> None:
    served = Served(interval=16)
    assert served.ask(text(5, 90), new=30) == [0]
    assert served.ask((*text(5, 60), *text(6, 20))) == [48]
    answer = served.engine.completed_requests[0].tokens
    assert served.ask((*text(5, 90), *answer, *text(7, 5))) == [112]


def test_drafts_leave_no_states_of_tokens_that_may_be_dropped() -> None:
    served = Served(interval=SIZE, slots=100, drafts=3)
    served.ask(text(5, 18), new=40)
    answer = served.engine.completed_requests[0].tokens
    assert served.ask((*text(5, 18), *answer, *text(7, 5)))[0] >= 16


def test_without_slots_nothing_is_found() -> None:
    served = Served(slots=0)
    assert served.ask(SHARED, SHARED) == [0, 0]
    assert served.ask(SHARED) == [0]


def test_salts_share_nothing() -> None:
    served = Served()
    assert served.ask(SHARED, salt="a") == [0]
    assert served.ask(SHARED, salt="b") == [0]
    assert served.ask(SHARED, salt="a") == [20]


def test_the_least_recently_used_state_makes_room_and_goes_with_its_block() -> None:
    served = Served(slots=2)
    cache = served.engine.scheduler.kv.prefix_cache
    assert isinstance(cache, HybridPrefixCache)
    texts = [text(i, 21) for i in (1, 2, 3)]
    for each in texts[:2]:
        served.ask(each)
    assert served.ask(texts[0]) == [20]
    served.ask(texts[2])
    assert [served.ask(each)[0] for each in (texts[0], texts[2])] == [20, 20]
    assert cache.num_evicted == 1
    small = Served(blocks=10)
    small.ask(text(1, 30))
    small.ask(text(2, 30))
    assert small.ask(text(1, 30)) == [0]


def test_metrics_count_states_and_their_bytes() -> None:
    served = Served(slots=2)
    served.engine.description = replace(served.engine.description, state_bytes=100)
    for each in (text(1, 21), text(2, 21), text(1, 21), text(3, 21)):
        served.ask(each)
    found = EngineMetrics().snapshot(served.engine)
    kept = found["quire:state_snapshots"]
    assert 0 < kept <= 2 and found["quire:state_snapshot_bytes"] == 100 * kept
    assert found["quire:state_snapshot_hits"] == 1
    assert found["quire:state_snapshots_taken"] == found["quire:state_snapshot_evictions"] + kept == 3
    served.engine.scheduler.kv.reset()
    assert EngineMetrics().snapshot(served.engine)["quire:state_snapshots"] == 0


def test_states_of_pinned_prefixes_are_kept_where_they_end_and_go_last() -> None:
    served = Served(slots=2)
    pinned = text(1, 31)
    served.ask(pinned, pins=(Pin(14, 60.0),))
    for i in range(2, 6):
        served.ask(text(i, 21))
    assert served.ask((*pinned[:14], *text(9, 9))) == [12]
    assert len(served.engine.scheduler.kv.pins.pinned) == 3, "blocks past the state are of no use"


def test_a_state_from_before_the_cache_was_emptied_is_not_found_after_it() -> None:
    served = Served()
    served.add(SHARED, new=9)
    served.engine.step()
    served.engine.reset_prefix_cache()
    served.run()
    assert served.ask(SHARED) == [0]
    assert served.ask(SHARED) == [20]
    cache = served.engine.scheduler.kv.prefix_cache
    assert isinstance(cache, HybridPrefixCache)
    assert len(cache.free_slots) == 8 - len(cache.snapshots)


@pytest.mark.parametrize("slots", [None, 60])
def test_nine_in_ten_tokens_that_k_and_v_would_give_are_reused(slots: int | None) -> None:
    """Twelve documents of which each is asked about twenty times, in bursts and one by one, beside unique prompts."""
    rng, served = random.Random(3), Served(slots=slots, blocks=4000, interval=128, max_num_batched_tokens=256)
    documents = [text(1000 + i, 150 + 7 * i) for i in range(12)]
    asked = [(*documents[i % 12], *text(i, 20)) for i in range(240)] + [text(5000 + i, 120) for i in range(40)]
    rng.shuffle(asked)
    while asked:
        served.ask(*(asked.pop() for _ in range(min(len(asked), rng.choice((1, 1, 2, 8))))), new=1)
    possible = sum(20 * (len(document) // SIZE) * SIZE - len(document) for document in documents)
    reused = sum(served.cached.values())
    assert reused >= 0.9 * possible


def test_an_explanation_says_that_a_state_was_missing() -> None:
    served = Served()
    served.ask((*SHARED, *text(1, 30)))
    (id,) = served.add((*SHARED, *text(2, 30)))
    served.run()
    found = explain(served.history, id, 0.0)["prefix"]
    assert found["hit_tokens"] == 0 and "no state of the model's recurrent layers" in found["why"]
