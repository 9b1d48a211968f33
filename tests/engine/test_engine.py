"""The library surface: submit, step, has_pending_work, completed_requests, metrics_snapshot."""

from __future__ import annotations

import math

import pytest

from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.errors import InvalidRequest
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig
from quire.types import Request, SamplingParams


def config(**settings: object) -> SimConfig:
    return SimConfig(**{"pages": 32, "page_size": 4, "max_num_seqs": 4, "cost": StepCost(0.01, 0.001), **settings})  # type: ignore[arg-type]


def run(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_pending_work:
            return
        engine.step()
    pytest.fail("the engine never came to rest")


def test_the_simplest_loop_works() -> None:
    engine = config().build(VirtualClock())
    first = engine.submit([1, 2, 3], max_new_tokens=5)
    second = engine.submit([4, 5, 6, 7, 8], max_new_tokens=2)
    run(engine)
    done = {c.id: c for c in engine.completed_requests}
    assert len(done[first].tokens) == 5 and len(done[second].tokens) == 2
    assert done[first].finish == "length" and done[first].prompt_tokens == 3
    snapshot = engine.metrics_snapshot()
    assert snapshot["completed_requests"] == 2 and snapshot["generated_tokens"] == 7
    assert snapshot["cache"]["used_pages"] == 0 and snapshot["active_requests"] == 0


class Breaking:
    """An observer that cannot take anything."""

    def _break(self, *_: object) -> None:
        raise ZeroDivisionError("cannot look")

    on_submit = on_step = on_end = on_failure = _break


def test_an_observer_that_raises_does_not_affect_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    engine = config().build(VirtualClock(), observers=[Breaking()])
    engine.submit([1, 2, 3], 5)
    engine.submit([4, 5], 50, id="gone")
    engine.step()
    engine.abort("gone")
    run(engine)
    assert [done.finish for done in engine.completed_requests] == ["abort", "length"]
    assert engine.metrics_snapshot()["cache"]["used_pages"] == 0
    assert "cannot look" in capfd.readouterr().err


def test_an_idle_engine_steps_without_blocking() -> None:
    engine = config().build(VirtualClock())
    assert engine.step() == [] and not engine.has_pending_work


def test_times_add_up_on_a_virtual_clock() -> None:
    engine = config(max_num_seqs=1).build(VirtualClock())
    engine.submit([1, 2, 3], 4)
    engine.submit([1, 2, 3], 4)
    run(engine)
    one, two = engine.completed_requests
    assert one.opened == 0.0 and one.first_token == pytest.approx(0.013)
    assert one.finished == pytest.approx(0.013 + 3 * 0.011)
    assert two.opened == pytest.approx(one.finished)


def test_a_preempted_request_was_opened_when_it_was_first() -> None:
    engine = config(pages=8, page_size=4, max_num_seqs=2).build(VirtualClock())
    for start in (1, 5):
        engine.submit([start, 2, 3], 24)
    run(engine)
    assert sum(done.preemptions for done in engine.completed_requests) > 0
    assert [done.opened for done in engine.completed_requests] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "new", "param", "says"),
    [
        ([], 4, "prompt", "empty"),
        ([1], 0, "max_tokens", "at least 1"),
        ([1] * 200, 8, "prompt", "KV blocks"),
        ([40_000], 4, "prompt", "token ids"),
        ([-1], 4, "prompt", "token ids"),
        ([1] * (1 << 20), 1, "prompt", "context"),
    ],
)
def test_what_can_never_run_is_refused_at_submit(tokens: list[int], new: int, param: str, says: str) -> None:
    engine = config().build(VirtualClock())
    with pytest.raises(InvalidRequest, match=says) as caught:
        engine.submit(tokens, new)
    assert caught.value.param == param
    assert not engine.has_pending_work


def test_an_id_can_be_used_again_only_when_its_request_has_ended() -> None:
    engine = config().build(VirtualClock())
    engine.submit([1], 2, id="a")
    with pytest.raises(InvalidRequest, match="already"):
        engine.submit([1], 2, id="a")
    engine.abort("a")
    engine.submit([1], 3, id="a")
    run(engine)
    assert [(c.id, c.finish, len(c.tokens)) for c in engine.completed_requests] == [
        ("a", "abort", 0),
        ("a", "length", 3),
    ]


def test_aborting_frees_the_pages_within_a_step() -> None:
    for depth in (0, 1, 2):
        engine = config(depth=depth).build(VirtualClock())
        engine.submit([1] * 20, 50, id="long")
        for _ in range(5):
            engine.step()
        assert engine.gauges().used_blocks > 0
        engine.abort("long")
        events = engine.step()
        assert [(e.id, e.finish) for e in events if e.finish] == [("long", "abort")]
        for _ in range(depth):
            engine.step()
        assert engine.gauges().used_blocks == 0
        engine.abort("long")  # again, and unknown ones: nothing happens
        engine.abort("never-seen")
        run(engine)


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    engine = config().build(VirtualClock())
    engine.submit([1, 2], 100, id="late", timeout=0.05)
    engine.submit([1, 2], 3, id="fine", timeout=10.0)
    run(engine)
    done = {c.id: c for c in engine.completed_requests}
    assert done["late"].finish == "timeout" and 0 < len(done["late"].tokens) < 100
    assert done["fine"].finish == "length"


def test_a_lower_priority_value_is_served_sooner() -> None:
    engine = config(max_num_seqs=1, scheduling_policy="priority").build(VirtualClock())
    for name, priority in (("a", 5), ("b", 5), ("c", -1)):
        engine.submit([1, 2], 3, id=name, priority=priority)
    run(engine)
    assert [c.id for c in engine.completed_requests] == ["c", "a", "b"]


def test_static_batching_waits_for_the_whole_batch() -> None:
    def finished(batching: str) -> float:
        engine = config(batching=batching, max_num_seqs=2).build(VirtualClock())
        for new in (2, 20, 2, 2):
            engine.submit([1, 2], new)
        run(engine)
        return [c.finished for c in engine.completed_requests if len(c.tokens) == 2][-1]

    assert finished("static") > finished("continuous")


def cached(engine: Engine, requests: list[Request]) -> dict[str, int]:
    """Tokens found in the prefix cache by each of `requests`, all asked at once."""
    found: dict[str, int] = {}
    for request in requests:
        engine.add(request)
    while engine.has_pending_work:
        for event in engine.step():
            found[event.id] = max(found.get(event.id, 0), event.num_cached)
    return found


def test_a_request_waits_for_a_prefix_that_another_is_computing() -> None:
    head = tuple(range(200))
    asked = [Request(id=f"n-{i}", prompt=(*head, 300 + i), max_new_tokens=3) for i in range(4)]
    engine = config(pages=400).build(VirtualClock())
    assert cached(engine, asked) == {"n-0": 0, "n-1": 200, "n-2": 200, "n-3": 200}
    engine = config(pages=400, chunk=20).build(VirtualClock())
    assert cached(engine, [*asked, Request(id="late", prompt=(*head[:100], 7), max_new_tokens=3)])["late"] == 100


def test_no_request_waits_for_a_short_prefix_another_salt_or_one_it_needs_logits_of() -> None:
    head = tuple(range(100))
    asks = SamplingParams(prompt_logprobs=1)
    for first, other in (
        (Request(id="a", prompt=head[:60], max_new_tokens=3), Request(id="b", prompt=head[:60], max_new_tokens=3)),
        (
            Request(id="a", prompt=head, max_new_tokens=3),
            Request(id="b", prompt=head, max_new_tokens=3, cache_salt="x"),
        ),
        (Request(id="a", prompt=head, max_new_tokens=3), Request(id="b", prompt=head, max_new_tokens=3, sampling=asks)),
    ):
        assert cached(config(pages=400).build(VirtualClock()), [first, other]) == {"a": 0, "b": 0}


def test_a_request_that_waited_for_a_prefix_continues_when_the_other_is_aborted() -> None:
    engine = config(pages=400, chunk=20).build(VirtualClock())
    head = tuple(range(200))
    for i in range(3):
        engine.add(Request(id=f"n-{i}", prompt=(*head, 300 + i), max_new_tokens=3))
    engine.step()
    assert engine.gauges().running == 1 and engine.gauges().waiting == 2
    engine.abort("n-0")
    run(engine)
    assert [len(c.tokens) for c in engine.completed_requests if c.finish == "length"] == [3, 3]


def test_a_salt_keeps_prefixes_apart() -> None:
    engine = config().build(VirtualClock())
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x")):
        engine.add(Request(id=name, prompt=tuple(range(17)), max_new_tokens=2, cache_salt=salt))
        run(engine)
    assert engine.stats.num_cached_tokens == 16  # d found b's blocks, and no other request found any


def test_preemption_resumes_and_is_counted() -> None:
    engine = config(pages=8, max_num_seqs=4, prefix_caching=False, pressure_policy="preempt").build(VirtualClock())
    for _ in range(4):
        engine.submit([1, 2, 3], 20)
    run(engine)
    assert engine.gauges().preemptions > 0
    assert [len(c.tokens) for c in engine.completed_requests] == [20] * 4
    assert sum(c.preemptions for c in engine.completed_requests) == engine.gauges().preemptions


def test_the_memory_of_completed_requests_is_bounded() -> None:
    engine = Engine(config().build().scheduler, config().build().executor, keep=2)
    for _ in range(5):
        engine.submit([1], 1)
    run(engine)
    assert len(engine.completed_requests) == 2 and engine.metrics_snapshot()["completed_requests"] == 5


def test_sampling_params_refuse_nan_and_name_the_field() -> None:
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        with pytest.raises(InvalidRequest, match=name) as caught:
            SamplingParams(**{name: math.nan})
        assert caught.value.param == name


def test_the_snapshot_says_which_share_of_the_blocks_is_used() -> None:
    engine = SimConfig(pages=8, page_size=4, cost=StepCost(0.01)).build(VirtualClock())
    seen = [engine.metrics_snapshot()["cache"]]
    engine.submit(range(10), 3)
    engine.step()
    seen.append(engine.metrics_snapshot()["cache"])
    assert [(cache["used_pages"], cache["free_pages"], cache["utilization"]) for cache in seen] == [
        (0, 8, 0.0),
        (3, 5, 0.375),
    ]


@pytest.mark.parametrize("chunk", [4, 64])
def test_tokens_of_prompts_and_of_answers_are_counted_apart(chunk: int) -> None:
    engine = config(chunk=chunk, pressure_policy="preempt", pages=8).build(VirtualClock())
    for id in range(4):
        engine.submit([id, 1, 2, 3, 4, 5], 9)
    while engine.has_pending_work:
        engine.step()
    assert engine.gauges().preemptions > 0, "what is computed again is not counted again"
    assert (engine.stats.num_prompt_tokens, engine.stats.num_generated_tokens) == (24, 36)
