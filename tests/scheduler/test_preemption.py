"""Which sequence is preempted when blocks run out: the least urgent, then the one that loses least; and policies that
make it rare or impossible."""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import pytest

from quire.engine.events import Observer, StepRecord
from quire.engine.timing import VirtualClock
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.policy import Pressure, SchedulingPolicy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Decision, Sequence
from quire.sim.run import SimConfig
from quire.types import Request, SamplingParams, TokenLogprobs


class Watching(Observer):
    """Keeps every decision, and counts tokens fed."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.fed = 0

    def on_step(self, record: StepRecord) -> None:
        self.decisions += record.decisions
        self.fed += sum(span.num_tokens for span in record.plan.spans)


def first_victim(lengths: dict[str, int], pages: int, urgency: dict[str, int]) -> tuple[str, str]:
    """(the first sequence preempted, for which one) where these prompts are all computed and then grow."""
    seen = Watching()
    config = SimConfig(
        pages=pages, page_size=4, prefix_caching=False, scheduling_policy="priority", pressure_policy="preempt"
    )
    engine = config.build(VirtualClock(), [seen])
    for id, length in lengths.items():
        engine.submit([1] * length, 8, id=id, priority=urgency.get(id, 0))
    while engine.has_pending_work:
        engine.step()
    chosen = next(each for each in seen.decisions if each.kind == "preempted")
    assert all(len(one.tokens) == 8 for one in engine.completed_requests)
    return chosen.request_id, chosen.cause


@pytest.mark.parametrize("order", [("long", "short", "middle"), ("long", "middle", "short")])
def test_the_sequence_that_loses_least_is_preempted_in_any_order_of_arrival(order: tuple[str, ...]) -> None:
    lengths = {"long": 40, "short": 8, "middle": 20}
    assert first_victim({id: lengths[id] for id in order}, 17, {}) == ("short", "long")


def test_priority_decides_before_the_tokens_lost() -> None:
    assert first_victim({"long": 40, "short": 8, "middle": 20}, 17, {"middle": 1}) == ("middle", "long")


def pressed(policy: Pressure) -> tuple[int, float]:
    """(preemptions, tokens fed for each that had to be) where prompts take many chunks and pages hold few of them."""
    seen, rng = Watching(), random.Random(3)
    sizes = {"pages": 100, "page_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 16, "chunk": 16}
    config = SimConfig(**sizes, prefix_caching=False, pressure_policy=policy)  # type: ignore[arg-type]
    engine = config.build(VirtualClock(), [seen])
    least = 0
    for _ in range(30):
        prompt, new = rng.randint(6, 190), rng.randint(6, 190)
        engine.submit([1] * prompt, new)
        least += prompt + new - 1
    while engine.has_pending_work:
        engine.step()
    assert [one.finish for one in engine.completed_requests] == ["length"] * 30
    return engine.gauges().preemptions, seen.fed / least


def test_the_foresee_policy_recomputes_little() -> None:
    preempting, foreseeing = pressed("preempt"), pressed("foresee")
    assert 0 < foreseeing[0] < preempting[0] / 3
    assert foreseeing[1] - 1 < (preempting[1] - 1) / 3


def test_the_reserve_policy_preempts_nothing() -> None:
    assert pressed("reserve") == (0, 1.0)


def test_as_many_sequences_run_as_there_are_blocks_of_the_context_length() -> None:
    """Contiguous memory: as many run at once as there are pieces, whatever the policy."""
    for policy in get_args(Pressure):
        engine = SimConfig(pages=4, page_size=64, max_num_seqs=8, pressure_policy=policy).build(VirtualClock())
        for _ in range(8):
            engine.submit([1] * 8, 8)
        while engine.has_pending_work:
            engine.step()
        assert engine.metrics_snapshot()["max_batch_observed"] == 4, policy


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_preemption_is_reported_once(depth: int) -> None:
    """Also one after which no sequence could be fed, so that no plan carried it."""
    seen, rng = Watching(), random.Random(5)
    config = SimConfig(
        pages=8, page_size=4, max_num_seqs=3, depth=depth, prefix_caching=False, pressure_policy="preempt"
    )
    engine = config.build(VirtualClock(), [seen])
    for i in range(40):
        engine.submit([1] * rng.randint(1, 10), rng.randint(4, 20), id=f"r-{i}")
    while engine.has_pending_work:
        engine.step()
    reported = Counter(each.request_id for each in seen.decisions if each.kind == "preempted")
    assert reported == {one.id: one.preemptions for one in engine.completed_requests if one.preemptions}
    assert reported.total() == engine.gauges().preemptions > 0


def test_scores_of_a_prompt_are_taken_once_each_and_no_others() -> None:
    """After a preemption the executor scores again what was sent; what follows the prompt is the answer's."""
    request = Request(id="a", prompt=tuple(range(10)), max_new_tokens=4, sampling=SamplingParams(prompt_logprobs=0))
    seq = Sequence(request, 0, list(request.prompt), 14)
    rows = [TokenLogprobs(position, 0.0, 1) for position in range(1, 14)]
    sent = []
    for computed, fed in ((0, 4), (4, 4), (0, 6), (6, 7)):
        seq.num_computed = computed
        sent.append([row.token for row in seq.take_prompt_logprobs(rows[computed : computed + fed])])
        assert seq.needs_prompt_logits is (sent[-1] != [9])
    assert sent == [[1, 2, 3, 4], [5, 6, 7, 8], [], [9]]


@pytest.mark.parametrize(
    ("pressure", "blocks", "opened"),
    [
        *(("reserve", 11, ["a"]), ("reserve", 12, ["a", "b"]), ("reserve", 17, ["a", "b"])),
        *(("foresee", 3, ["a"]), ("foresee", 4, ["a", "b"]), ("foresee", 5, ["a", "b"])),
        *(("preempt", 2, ["a", "b"]), ("preempt", 3, ["a", "b", "c"])),
    ],
)
def test_requests_of_one_step_leave_each_other_what_is_set_aside(
    pressure: Pressure, blocks: int, opened: list[str]
) -> None:
    """Each has one block of prompt, and six at its end."""
    scheduler = Scheduler(KVCacheManager(max(blocks, 6), 4), rows=8, policy=SchedulingPolicy(pressure=pressure))
    for _ in range(scheduler.kv.block_pool.num_blocks - blocks):
        scheduler.kv.block_pool.allocate()
    for id in "abc":
        scheduler.add(Request(id=id, prompt=(1, 2, 3, 4), max_new_tokens=20))
    assert scheduler.plan() is not None
    assert [seq.request.id for seq in scheduler.running] == opened


@pytest.mark.parametrize("pressure", get_args(Pressure))
def test_admitting_a_sequence_does_not_look_at_all_that_run(pressure: Pressure) -> None:
    """What is set aside is added up once in a step, not for each sequence that is admitted to it."""
    asked = [0]

    class Counted(SchedulingPolicy):
        def reserve(self, seq: Sequence, block_size: int) -> int:
            asked[0] += 1
            return super().reserve(seq, block_size)

    def plans(count: int) -> int:
        scheduler = Scheduler(KVCacheManager(512, 4), rows=count, policy=Counted(pressure=pressure))
        for i in range(count):
            scheduler.add(Request(id=f"{i}", prompt=(i,) * 9, max_new_tokens=8))
        asked[0] = 0
        plan = scheduler.plan()
        assert plan is not None and len(plan.spans) == count
        return asked[0]

    assert plans(64) == 4 * plans(16)
