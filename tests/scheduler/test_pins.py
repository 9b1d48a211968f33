"""Pinned blocks: evicted last for their time, within a bound that owners share fairly, and never in anyone's way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.scheduler.block_pool import EVICTION_POLICIES, Lru
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.pins import Pins
from quire.scheduler.policy import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import Pin, Request, RequestStepOutput
from tests.hash_model import HashDevice, naive
from tests.lattice import check

SIZE = 4


class Pool:
    """An engine over the executor that hashes, with a clock of its own."""

    def __init__(self, pages: int, pins: int, *, eviction: str = "lru", caching: bool = True, **rest: object) -> None:
        self.clock = VirtualClock()
        index = make_prefix_cache(SIZE, caching)
        self.kv = KVCacheManager(pages, SIZE, index, EVICTION_POLICIES[eviction](), 4, pins)
        depth, drafts = int(rest.pop("lookahead", 0)), int(rest.pop("drafts", 0))  # type: ignore[call-overload]
        pressure = make_policy("fcfs", pressure=rest.pop("pressure", "preempt"))  # type: ignore[arg-type]
        self.sch = Scheduler(self.kv, rows=64, policy=pressure, speculation=FixedDrafts(drafts), **rest)  # type: ignore[arg-type]
        self.engine = Engine(
            self.sch, HashDevice(pages, SIZE, drafts=drafts), lookahead=depth, clock=self.clock, keep=0
        )
        self.engine.description = self.engine.description.__class__(
            num_blocks=pages, block_size=SIZE, num_rows=64, max_model_len=1 << 20, vocab_size=1 << 20
        )
        self.names = 0

    def add(
        self, prompt: list[int], seconds: float = 0.0, owner: str = "", new: int = 2, length: int | None = None
    ) -> str:
        """Queue a request that pins the first `length` tokens of its prompt, all of them by default."""
        self.names += 1
        pins = (Pin(len(prompt) if length is None else length, seconds),) if seconds else ()
        tokens = tuple(100 + token for token in prompt)
        self.engine.add(Request(id=str(self.names), prompt=tokens, max_new_tokens=new, pins=pins, owner=owner))
        return str(self.names)

    def run(self) -> list[RequestStepOutput]:
        outputs = []
        while self.engine.has_pending_work:
            outputs += self.engine.step()
            check(self.sch, self.engine.executor)  # type: ignore[arg-type]
        return outputs

    def ask(self, prompt: list[int], seconds: float = 0.0, owner: str = "", **rest: int) -> tuple[int, int]:
        """The tokens of the prompt that were cached, and those that are pinned now."""
        self.add(prompt, seconds, owner, **rest)
        first = next(output for output in self.run() if output.report is not None)
        assert first.report is not None
        return first.num_cached, max(first.report.pinned, default=0)

    def flood(self, requests: int = 40) -> None:
        """Prompts that nobody asks again, more than the cache holds."""
        for _ in range(requests):
            self.names += 1
            self.ask([10_000 + 50 * self.names + i for i in range(17)])


PROMPT = list(range(21))


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_pinned_prefix_outlives_a_flood_until_its_time_is_over(eviction: str, lookahead: int) -> None:
    pool = Pool(32, 8, eviction=eviction, lookahead=lookahead)
    assert pool.ask(PROMPT, 300) == (0, 20)
    pool.flood()
    pool.clock.time = 299
    assert pool.ask([*PROMPT, 1]) == (20, 0), "a request without marks finds it, and extends nothing"
    pool.clock.time = 301
    pool.flood()
    assert pool.kv.pins.ended["expired"] == 5 and not pool.kv.pins.pinned
    assert pool.ask(PROMPT) == (0, 0)
    unpinned = Pool(32, 0, eviction=eviction, lookahead=lookahead)
    assert unpinned.ask(PROMPT, 300) == (0, 0) and unpinned.kv.pins.num_refused == 5
    unpinned.flood()
    assert unpinned.ask(PROMPT) == (0, 0)


def test_each_use_extends_a_pin_and_never_shortens_it() -> None:
    pool = Pool(32, 8)
    pool.ask(PROMPT, 3600)
    pool.clock.time = 3500
    assert pool.ask(PROMPT, 300) == (20, 20)
    pool.clock.time = 3700
    pool.flood()
    assert pool.ask(PROMPT, 3600) == (20, 20)
    pool.clock.time = 7200
    pool.flood()
    assert pool.ask(PROMPT) == (20, 0)


def test_only_whole_blocks_of_what_is_marked_are_pinned() -> None:
    pool = Pool(32, 8)
    assert pool.ask(PROMPT, 300, length=11) == (0, 8)
    pool.flood()
    assert pool.ask(PROMPT)[0] == 8
    assert Pool(32, 8).ask(PROMPT, 300, length=3) == (0, 0)
    assert Pool(32, 8, caching=False).ask(PROMPT, 300) == (0, 0)


def test_a_prompt_larger_than_the_bound_is_pinned_from_its_beginning() -> None:
    pool = Pool(32, 3)
    assert pool.ask(PROMPT, 300) == (0, 12) and pool.kv.pins.num_refused == 2
    pool.flood()
    assert pool.ask(PROMPT)[0] == 12


def test_a_newer_pin_of_the_same_owner_takes_the_place_of_the_one_that_ends_soonest() -> None:
    pool = Pool(64, 8)
    old, new = list(range(100, 121)), list(range(200, 221))
    pool.ask(old, 300)
    pool.clock.time = 10
    assert pool.ask(new, 300) == (0, 20)
    assert pool.kv.pins.ended["displaced"] == 2
    pool.flood()
    assert (pool.ask(old)[0], pool.ask(new)[0]) == (12, 20), "of the old one the beginning is left"
    pool.clock.time = 20
    assert pool.ask(list(range(300, 321)), 3600)[1] == 20
    assert pool.ask(list(range(400, 441)), 300)[1] == 12, "a longer pin makes no room for a shorter one"


def test_owners_share_the_bound_and_a_thousand_of_them_cannot_exceed_it() -> None:
    pool = Pool(64, 12)
    greedy = list(range(100, 181))
    assert pool.ask(greedy, 3600, "greedy") == (0, 48)
    for turn, owner in enumerate(("a", "b", "c")):
        assert pool.ask([1000 * (turn + 1) + i for i in range(81)], 300, owner)[1] >= 12
    assert max(pool.kv.pins.counts.values()) - min(pool.kv.pins.counts.values()) <= 1
    pool.flood()
    assert pool.ask(greedy)[0] == 4 * pool.kv.pins.counts["greedy"]
    for i in range(1000):
        pool.clock.time += 0.1
        pool.ask([5000 + 20 * i + j for j in range(9)], 300, f"owner {i}")
        assert len(pool.kv.pins.pinned) <= 12 and set(pool.kv.pins.counts.values()) <= {1, 2, 3}
    pool.clock.time += 7200
    pool.flood(1)
    assert not pool.kv.pins.pinned and not pool.kv.pins.counts and not pool.kv.pins._ends


def test_an_owner_that_pins_again_and_again_leaves_no_trail() -> None:
    pool = Pool(32, 8)
    for turn in range(2000):
        pool.clock.time = turn
        pool.ask(PROMPT, 300)
    assert len(pool.kv.pins._ends[""]) <= 64 + 4 * 8 + 1


@pytest.mark.parametrize("pressure", ["preempt", "foresee", "reserve"])
@pytest.mark.parametrize(("lookahead", "drafts"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_pins_delay_no_request_and_change_no_answer(pressure: str, lookahead: int, drafts: int) -> None:
    """All of the memory is pinned, and every request needs nearly all of it: under preemption, drafts, look-ahead."""
    pool = Pool(16, 16, pressure=pressure, lookahead=lookahead, drafts=drafts, max_num_batched_tokens=24)
    rng = random.Random(3)
    heads = [[rng.randrange(1000) for _ in range(24)] for _ in range(3)]
    asked = {}
    for i in range(40):
        prompt = [*heads[i % 3][: rng.randrange(25)], *(rng.randrange(1000) for _ in range(rng.randrange(1, 12)))]
        asked[pool.add(prompt, 3600, f"owner {i % 4}", new=rng.randrange(1, 26))] = prompt
    new = {id: pool.sch.sequences[id].request.max_new_tokens for id in asked}
    said = Counter[str](), dict[str, list[int]]()
    for output in pool.run():
        said[1].setdefault(output.id, []).extend(output.tokens)
        said[0][output.id] += output.report is not None
    for id, prompt in asked.items():
        tokens = [100 + token for token in prompt]
        assert said[1][id] == naive(tokens, new[id], frozenset(), (0, 0), None)[len(tokens) :]
    assert set(said[0].values()) == {1}, "one report a request, however often it was preempted"
    assert pool.kv.pins.ended["evicted"] > 0 and (pool.sch.num_preemptions > 0 or pressure == "reserve")
    assert pool.kv.block_pool.num_free == 16


def test_no_more_is_preempted_with_pins_than_without() -> None:
    counts = []
    for pins in (0, 16):
        pool, rng = Pool(16, pins), random.Random(3)
        for i in range(40):
            pool.add([rng.randrange(1000) for _ in range(rng.randrange(1, 24))], 3600, f"owner {i % 4}", new=20)
        pool.run()
        counts.append(pool.sch.num_preemptions)
    assert counts[0] == counts[1] > 0


def test_an_emptied_cache_keeps_no_pins() -> None:
    pool = Pool(32, 8)
    pool.ask(PROMPT, 300)
    pool.engine.reset_prefix_cache()
    assert not pool.kv.pins.pinned and pool.kv.block_pool.num_free == 32
    assert pool.ask(PROMPT, 300) == (0, 20)


def test_a_request_that_ends_before_its_first_token_pins_nothing() -> None:
    pool = Pool(32, 8, max_num_batched_tokens=8)
    id = pool.add(PROMPT, 300)
    pool.engine.step()
    pool.engine.abort(id)
    pool.run()
    assert not pool.kv.pins.pinned


def test_the_answers_to_one_prompt_pin_it_once() -> None:
    pool = Pool(32, 8)
    prompt = tuple(range(100, 121))
    for choice in range(3):
        pool.engine.add(
            Request(id=f"n{choice}", prompt=prompt, max_new_tokens=2, choice=choice, pins=(Pin(20, 300.0),))
        )
    pinned = [output.report.pinned for output in pool.run() if output.report is not None]
    assert sorted(pinned) == [(), (), (20,)]


def test_the_deepest_block_of_those_that_end_together_goes_first() -> None:
    pins = Pins(Lru(), 3)
    assert pins.pin([1, 2, 3], 10.0, "a") == 3
    pins.advance(1.0)
    assert pins.pin([7], 10.0, "a") == 1
    assert sorted(pins.pinned) == [1, 2, 7]
    pins.add(7, 0)
    pins.add(9, 0)
    assert (len(pins), pins.evict(), pins.evict(), len(pins)) == (2, 9, 7, 0)
    assert sorted(pins.pinned) == [1, 2] and pins.ended == {"expired": 0, "displaced": 1, "evicted": 1}
    pins.advance(11.0)
    assert not pins.pinned and pins.ended["expired"] == 2
