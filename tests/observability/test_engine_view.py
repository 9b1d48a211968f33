"""A viewer who follows the frames has the truth: of pages, of requests, of steps."""

from __future__ import annotations

import json

from quire.observability import live_view
from tests.observability.watched import Watched, pages


def truth(watched: Watched) -> dict[int, list[int]]:
    """The map as the pool has it."""
    pool, writers = watched.engine.scheduler.kv.block_pool, watched.history.writers
    found = {}
    for page in range(1, pool.num_blocks + 1):
        if pool.ref_counts[page] or pool.prefix_cache.contains(page):
            story, index = writers[page]
            found[page] = [pool.ref_counts[page], story.number, index]
    return found


def test_the_map_a_viewer_has_is_the_pool() -> None:
    watched = Watched()
    for i in range(12):
        watched.submit([7, 7, 7, 7, *range(i, i + 6)], new=3 + i % 5)
        watched.step(2)
        if watched.frames:
            assert len(pages(watched.frames)) <= 32
    watched.run()
    assert pages(watched.frames) == truth(watched)
    assert {about[0] for about in pages(watched.frames).values()} == {0}, "all that is left is cached"


def test_pages_fill_and_free_and_shared_ones_have_more_holders() -> None:
    watched = Watched(prefix_caching=True)
    watched.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], new=30)
    watched.step(8)
    watched.submit([1, 2, 3, 4, 5, 6, 7, 8, 1], new=20)
    watched.step(18)
    shared = [about for about in pages(watched.frames).values() if about[0] == 2]
    assert [(number, index) for _, number, index in shared] == [(1, 0), (1, 1)]
    used = watched.frames[-1]["now"]["used"]
    assert used > 5
    watched.run()
    assert watched.frames[-1]["now"]["used"] == 0


def test_a_viewer_sees_at_once_that_the_prefix_cache_was_emptied_also_while_nothing_runs() -> None:
    watched = Watched()
    watched.submit(range(1, 18))
    watched.run()
    assert pages(watched.frames)
    watched.engine.reset_prefix_cache()
    watched.step()
    assert pages(watched.frames) == truth(watched) == {}


def test_events_of_a_request_range_from_its_arrival_to_its_end() -> None:
    watched = Watched(max_num_seqs=1)
    one, two = watched.submit([1, 2, 3], new=2), watched.submit([4, 5], new=3)
    watched.run()
    assert [event[2:4] for event in watched.events("new")] == [[1, one], [2, two]]
    assert [event[2] for event in watched.events("first")] == [1, 2]
    assert [event[2:] for event in watched.events("end")] == [[1, "length", 2], [2, "length", 3]]
    assert [event[2:] for event in watched.events("wait")] == [[2, "seats"]] * 2, "once, and again after a whole frame"
    times = [event[1] for event in watched.events("new", "wait", "open", "first", "end") if event[2] == 2]
    assert times == sorted(times)


def test_steps_tell_their_spans_once_and_how_many_tokens_they_made() -> None:
    watched = Watched(chunk=4)
    watched.submit(list(range(1, 11)), new=5)
    watched.run()
    steps = [step for frame in watched.frames for step in frame["steps"]]
    spans = [step[4] for step in steps]
    assert spans[:3] == [[[1, 4, 0]], [[1, 4, 0]], [[1, 2, 1]]]
    assert spans.count(0) >= 2, "a step whose spans equal the last step's does not tell them again"
    assert [step[5] for step in steps] == [0, 0, 1, 1, 1, 1, 1]
    assert all(step[1] <= step[2] < step[3] for step in steps)


def test_a_preemption_names_the_request_that_took_the_blocks() -> None:
    watched = Watched(pages=8, max_num_seqs=3)
    for i in range(3):
        watched.submit([i, i, i, i], new=16)
    watched.run()
    outs = watched.events("out")
    assert outs
    assert all(event[3] != 0 for event in outs)
    assert pages(watched.frames) == truth(watched)


def test_waiting_for_a_prefix_being_computed_names_the_request_that_computes_it() -> None:
    watched = Watched(chunk=16, pages=128)
    watched.submit(list(range(1, 120)), new=2)
    watched.step()
    watched.submit(list(range(1, 120)), new=2)
    watched.run()
    assert [event[2:4] for event in watched.events("hold")] == [[2, 1]]


def test_a_viewer_who_comes_later_gets_everything_at_once() -> None:
    watched = Watched(watch=False)
    for i in range(6):
        watched.submit([i, 1, 2, 3, 4], new=4 + 3 * i)
    watched.step(10)
    assert watched.frames == []
    watched.window.watch(True)
    watched.step()
    whole = watched.frames[0]["whole"]
    states = {request["new"][2]: request["state"] for request in whole["requests"]}
    assert states[1] == "finished"
    assert states[4] == "decode"
    assert whole["complete"] is True
    assert whole["facts"]["pages"] == 32 and whole["facts"]["seats"] == 4
    assert pages(watched.frames) == truth(watched)


def test_nothing_is_kept_without_a_viewer() -> None:
    watched = Watched()
    watched.submit([1, 2, 3], new=6)
    watched.step(3)
    watched.window.watch(False)
    watched.frames.clear()
    watched.run()
    assert watched.frames == []
    assert not watched.window._steps and not watched.window._events and not watched.window._touched


def test_frames_are_bounded_and_say_what_they_left_out() -> None:
    watched = Watched(max_num_seqs=2)
    watched.window.watch(True)
    for i in range(live_view.MAX_EVENTS + 300):
        watched.engine.submit([1, 2], 1, id=f"r{i}")
    for _ in range(live_view.MAX_STEPS + 20):
        watched.engine.step()
    seen = watched.window.frame(watched.engine, watched.clock.now(), last=False)
    assert seen is not None
    frame = json.loads(seen[0])
    assert len(frame["steps"]) == live_view.MAX_STEPS and frame["skipped"] == 20
    assert len(frame["events"]) == live_view.MAX_EVENTS and frame["omitted"] >= 300
    assert len(frame["whole"]["requests"]) == live_view.MAX_EVENTS and frame["whole"]["complete"] is False


def test_a_request_forgotten_as_it_ends_does_no_harm() -> None:
    watched = Watched(tokens=8, max_num_seqs=4)
    for i in range(4):
        watched.submit([i, 1, 2, 3, 4, 5], new=3)
    watched.run()
    assert len(watched.history.ended) == 1
    assert watched.explain("req-0") is None
    assert watched.story("req-3")["state"] == "finished"


def test_a_failed_step_has_its_reason() -> None:
    watched = Watched()
    watched.submit([1, 2, 3], new=6)
    watched.step(2)
    watched.window.on_failure("the card fell off", ["req-0"], watched.clock.now())
    watched.run()
    assert [event[2:] for event in watched.events("failed")] == [[[1], "the card fell off"]]
