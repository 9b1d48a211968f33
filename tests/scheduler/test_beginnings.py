"""Tokens with which every answer of a constraint begins are fed with the prompt and never sampled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.scheduler.constraint import FREE, PENDING, Constraint
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Mask
from quire.scheduler.scheduler import Scheduler
from quire.types import Request, RequestStepOutput, SamplingParams
from tests.hash_model import HashDevice
from tests.lattice import FORCED, Begun, Grammar


class Unforeseen(Begun):
    """The same, of which nothing is known beforehand."""

    def beginning(self) -> Sequence[int]:
        return ()


def engine(rows: int = 4) -> Engine:
    kv = KVCacheManager(60, 4, make_prefix_cache(4, True))
    return Engine(Scheduler(kv, rows=rows), HashDevice(60, 4), clock=VirtualClock(), lookahead=1)


def ask(new: int, *, stop: Sequence[int] = (), id: str = "a", **sampling: object) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(id=id, prompt=(9, 8, 7, 6, 5), max_new_tokens=new, stop=frozenset(stop), sampling=params)


def answered(request: Request, constraint: Constraint, *, late: bool = False) -> list[RequestStepOutput]:
    it = engine()
    it.add(request, PENDING if late else constraint)
    if late:
        assert not it.step()
        it.set_constraint(request.id, constraint)
    events = list[RequestStepOutput]()
    while it.has_pending_work:
        events += it.step()
    return events


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("new", [1, 3, 5, 6, 12])
def test_an_answer_is_the_same_and_takes_fewer_steps(new: int, late: bool) -> None:
    sampled = answered(ask(new), Unforeseen(), late=late)
    begun = answered(ask(new), Begun(), late=late)
    tokens = [[token for event in events for token in event.tokens] for events in (sampled, begun)]
    assert tokens[0] == tokens[1] and tokens[0][:5] == [*FORCED][:new] and len(tokens[0]) == new
    assert len(sampled) == new and len(begun) == new - min(5, new - 1)
    assert [events[-1].finish for events in (sampled, begun)] == ["length"] * 2
    assert begun[0].report is not None and begun[0].num_cached == 0


def test_what_ends_an_answer_is_sampled() -> None:
    request = ask(12, stop=[FORCED[2]])
    begun, sampled = answered(request, Begun()), answered(request, Unforeseen())
    assert [event.tokens for event in begun] == [FORCED[:3]] and len(sampled) == 3
    assert begun[-1][2:4] == sampled[-1][2:4] == ("stop", FORCED[2])


@pytest.mark.parametrize(
    "asked", [{"logprobs": 0}, {"allowed_token_ids": tuple(range(90))}, {"bad_words_token_ids": ((3, 4),)}]
)
def test_what_something_else_is_said_about_is_sampled(asked: dict[str, object]) -> None:
    assert len(answered(ask(8, **asked), Begun())) == 8


def test_an_answer_that_is_aborted_before_its_first_token_is_empty() -> None:
    it = engine()
    it.add(ask(9), Begun())
    it.step()
    it.abort("a")
    while it.has_pending_work:
        it.step()
    assert [done.tokens for done in it.completed_requests] == [()]


def test_no_more_tokens_are_cached_than_a_prompt_has() -> None:
    """Blocks of four: of the second request eight tokens are found, and its prompt has five."""
    it = engine()
    for id in "ab":
        it.add(ask(9, id=id), Begun())
        events = list[RequestStepOutput]()
        while it.has_pending_work:
            events += it.step()
        assert events[0].num_cached == (0 if id == "a" else 5)


def test_a_preempted_answer_goes_on_behind_its_beginning() -> None:
    """Too few blocks for both: one is computed again, before or after its first token."""
    kv = KVCacheManager(6, 4, make_prefix_cache(4, False))
    it = Engine(Scheduler(kv, rows=4), HashDevice(6, 4), clock=VirtualClock(), lookahead=1)
    for id in "ab":
        it.add(ask(12, id=id), Begun())
    while it.has_pending_work:
        it.step()
    wanted = [token for event in answered(ask(12), Begun()) for token in event.tokens]
    assert it.scheduler.num_preemptions and [[*done.tokens] for done in it.completed_requests] == [wanted] * 2


def test_constraints_that_know_nothing_say_so() -> None:
    assert [*map(len, (FREE.beginning(), PENDING.beginning(), Grammar().beginning()))] == [0, 0, 0]
    masks: list[Mask] = [*Begun().masks((), FORCED[:1])]
    assert masks == [*Unforeseen().masks((), FORCED[:1])]
