"""What is remembered of requests: how much, until when, and whose it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.observability.history import MOST_NOTES, History, Note, RequestHistory
from quire.types import Request
from tests.observability.watched import Watched


def lasting(watched: Watched) -> int:
    """Tokens of those that ended and are remembered."""
    return sum(len(story.tokens) for story in watched.history.ended)


def test_tokens_that_are_remembered_are_bounded_and_the_oldest_are_forgotten_first() -> None:
    watched = Watched(tokens=60)
    ids = []
    for n in range(6):
        ids.append(watched.submit([n] * 16, new=4))
        watched.run()
        assert lasting(watched) == watched.history._kept <= 60
    assert list(watched.history.requests) == ids[-3:] == [story.request.id for story in watched.history.ended]


def test_no_more_requests_are_remembered_than_are_to_be() -> None:
    watched = Watched(keep=3)
    ids = [watched.submit([n, 1, 2], new=2) for n in range(8)]
    watched.run()
    assert list(watched.history.requests) == [story.request.id for story in watched.history.ended]
    assert len(watched.history.ended) == 3 and set(watched.history.requests) <= set(ids)
    assert lasting(watched) == watched.history._kept


def test_one_request_larger_than_all_that_may_be_remembered_is_remembered_alone() -> None:
    watched = Watched(tokens=10)
    watched.submit([1] * 5, new=4)
    watched.run()
    large = watched.submit([2] * 40, new=4)
    watched.run()
    assert [story.request.id for story in watched.history.ended] == [large] == list(watched.history.requests)


def test_an_id_that_came_again_is_not_forgotten_with_the_one_before() -> None:
    watched = Watched(keep=2)
    watched.submit([1, 2, 3], new=2, id="same")
    watched.run()
    watched.submit([9, 9, 9], new=50, id="same")
    watched.step(2)
    for n in range(3):  # the first "same" is forgotten among these
        watched.submit([5, n], new=1)
        watched.step(3)
    assert watched.history.requests["same"].request.prompt == (9, 9, 9)
    assert watched.history.requests["same"].ended is None
    watched.run()
    assert len(watched.story("same")["events"]) > 1


def test_notes_of_one_request_are_bounded_and_the_rest_is_counted() -> None:
    story = RequestHistory(1, Request(id="a", prompt=(1,), max_new_tokens=2), 0.0)
    for step in range(MOST_NOTES + 5):
        story.note(Note(0.0, step, "chunk"))
    assert [note.step for note in story.notes] == list(range(MOST_NOTES)) and story.unnoted == 5


def test_waiting_for_the_same_is_one_wait_and_for_something_else_another() -> None:
    watched = Watched(max_num_seqs=1)
    for n in range(3):
        watched.submit([n, 1, 2], new=6)
    watched.run()
    waits = list(watched.history.waits)
    assert [(wait.id, wait.missing) for wait in waits] == [("req-1", "seats"), ("req-2", "seats")]
    assert all(wait.end - wait.begin > 0.03 for wait in waits) and waits[0].end <= waits[1].begin + 0.02


def test_each_token_has_its_time_also_where_a_step_brings_none() -> None:
    watched = Watched(chunk=4)
    ids = [watched.submit(list(range(1, 20)), new=3), watched.submit([1], new=5)]
    watched.run()
    for id, count in zip(ids, (3, 5), strict=True):
        story = watched.history.requests[id]
        assert len(story.times) == count and sorted(story.times) == list(story.times)
        assert story.first == story.times[0] and story.ended == story.times[-1]


def test_pages_given_to_another_are_lost_to_who_wrote_them_and_shared_ones_stay_its_own() -> None:
    watched = Watched(pages=8)
    first = watched.submit(list(range(100, 117)), new=2)
    watched.run()
    second = watched.submit([*range(100, 109), 1, 2, 3], new=2)
    watched.run()
    writers = watched.history.writers
    assert {story.request.id for story, _ in writers.values()} == {first, second}
    held = watched.history.requests[second].held
    assert watched.history.requests[second].hits == 8
    assert [writers[page][0].request.id for page in held] == [first, first, second, second][: len(held)]
    third = watched.submit(list(range(200, 228)), new=2)
    watched.run()
    lost = watched.history.requests[first].lost
    assert lost[4][1] == second and {by for index, (_, by) in lost.items() if index != 4} == {third}
    assert all(watched.history.requests[first].submitted < at for at, _ in lost.values())


def test_a_failed_step_forgets_who_wrote_which_page_and_who_held_what() -> None:
    watched = Watched()
    id = watched.submit([1, 2, 3, 4, 5], new=9)
    watched.step(2)
    story = watched.history.requests[id]
    assert story.held and watched.history.writers and not story.waiting
    watched.history.on_failure("it broke", [id], watched.clock.now())
    assert story.held == [] and watched.history.writers == {} and story.waiting
    assert (story.notes[-1].what, story.notes[-1].by) == ("failed", "it broke")


def test_by_default_512_requests_of_4_mi_tokens_in_all_and_4096_waits_are_remembered() -> None:
    history, most = History(), (0,) * ((1 << 21) - 1)
    for n in range(514):
        history.on_submit(Request(id=str(n), prompt=(1,), max_new_tokens=1), 0.0)
        ended: Any = SimpleNamespace(id=str(n), finished=1.0, finish="stop", tokens=most if n > 512 else ())
        history.on_end(ended)
        assert len(history.ended) == min(n + 1, 512)
    history.on_submit(Request(id="last", prompt=(1,), max_new_tokens=1), 0.0)
    history.on_end(SimpleNamespace(id="last", finished=1.0, finish="stop", tokens=most))  # type: ignore[arg-type]
    assert [story.request.id for story in history.ended] == ["513", "last"], "all that 4 Mi tokens leave room for"
    assert history.waits.maxlen == 4096
