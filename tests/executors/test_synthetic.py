"""The executor without weights: tokens are a function of the request alone."""

from __future__ import annotations

from quire.sim.run import SimConfig
from quire.types import SamplingParams


def answers(pages: int, **settings: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """The tokens of four requests by id, and how many preemptions there were."""
    engine = SimConfig(pages=pages, page_size=4, pressure_policy="preempt", **settings).build()  # type: ignore[arg-type]
    for i in range(4):
        engine.submit((7, 8, i), 20, id=str(i))
    made: dict[str, tuple[int, ...]] = {}
    while engine.has_pending_work:
        for event in engine.step():
            made[event.id] = made.get(event.id, ()) + event.tokens
    return made, engine.scheduler.num_preemptions


def test_a_preempted_request_continues_with_the_tokens_it_would_have_had() -> None:
    undisturbed, none = answers(pages=100)
    preempted, some = answers(pages=10)
    assert none == 0 < some
    assert preempted == undisturbed


def test_tokens_are_the_same_whatever_is_in_the_batch_and_however_prompts_are_cut() -> None:
    together, _ = answers(pages=100)
    apart, _ = answers(pages=100, max_num_seqs=1, chunk=2)
    assert apart == together and len(set(together.values())) == 4


def test_rows_that_ask_for_log_probabilities_get_as_many_as_they_ask_for() -> None:
    engine = SimConfig(pages=100, page_size=4).build()
    for wanted in (None, 0, 3):
        engine.submit((7, 8), 5, id=str(wanted), sampling=SamplingParams(logprobs=wanted))
    found: dict[str, list[tuple[int, int]]] = {}
    while engine.has_pending_work:
        for event in engine.step():
            assert [each.token for each in event.logprobs] in ([], [*event.tokens])
            found.setdefault(event.id, []).extend((each.rank, len(each.top)) for each in event.logprobs)
    assert found == {"None": [], "0": [(1, 0)] * 5, "3": [(1, 3)] * 5}
