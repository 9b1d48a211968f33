"""Causes, not only times: why a request waited, was chunked, was preempted, and where its prefix ended."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quire.observability.explain import explain
from quire.observability.history import History, Wait
from quire.observability.live_view import MAX_EXPLAINED
from quire.types import Request, SamplingParams, answer_id, call_id
from tests.observability.watched import Watched


def says(watched: Watched, id: str, what: str) -> list[str]:
    return [event["says"] for event in watched.story(id)["events"] if event["what"] == what]


def test_a_request_that_waited_hears_behind_whom_and_for_what() -> None:
    watched = Watched(max_num_seqs=1)
    first, second, third = (watched.submit([i, 1, 2], new=10) for i in range(3))
    watched.run()
    assert watched.story(first)["waits"] == []
    at_head, behind = watched.story(second)["waits"], watched.story(third)["waits"]
    assert [(wait["for"], wait["behind"]) for wait in at_head] == [("seats", None)]
    assert {(wait["for"], wait["behind"]) for wait in behind} == {("seats", second), ("seats", None)}
    waited = sum(wait["seconds"] for wait in behind)
    assert (
        waited == watched.story(third)["seconds"]["queued"]
        or abs(waited - watched.story(third)["seconds"]["queued"]) < 0.02
    )
    assert "behind req-1" in " ".join(says(watched, third, "waited"))
    assert "in the queue" in watched.story(third)["summary"]


def test_a_request_is_explained_with_all_its_prompts_or_one() -> None:
    watched = Watched(pages=64, max_num_seqs=8, keep=8)
    calls = [call_id("cmpl-a", prompt) for prompt in range(12)]
    ids = [answer_id(call, choice) for call in calls for choice in range(2)]
    others = ["cmpl-ab-0", "cmpl-a0-0", "cmpl-a.x-0", "cmpl-a.-0", "cmpl-a"]
    for i, id in enumerate([*ids, *others[:-1]]):
        watched.submit([i, 1, 2], new=2, id=id)
    whole = watched.explain("cmpl-a")
    found = [(one["prompt"], one["choice"], one["id"]) for one in whole["answers"]]
    assert [id for *_, id in found] == ids and whole["answers_left_out"] == 0
    assert [prompt for prompt, *_ in found] == [prompt for prompt in range(12) for _ in range(2)]
    assert [one["id"] for one in watched.explain("cmpl-a.1")["answers"]] == ["cmpl-a.1-0", "cmpl-a.1-1"]
    assert [one["id"] for one in watched.explain("cmpl-a.11-1")["answers"]] == ["cmpl-a.11-1"]
    assert watched.explain("cmpl-a.12") is None and watched.explain("cmpl") is None
    watched.run()  # the first ones are forgotten
    assert {one["id"] for one in watched.explain("cmpl-a")["answers"]} < set(ids)


def test_a_request_with_very_many_prompts_is_explained_in_part() -> None:
    watched = Watched()
    for prompt in range(MAX_EXPLAINED + 9):
        watched.submit([prompt % 9], new=1, id=answer_id(call_id("embd-a", prompt), 0))
    found = watched.explain("embd-a")
    assert len(found["answers"]) == MAX_EXPLAINED and found["answers_left_out"] == 9
    assert watched.explain(f"embd-a.{MAX_EXPLAINED + 8}")["answers"][0]["state"] == "waiting"


def test_a_searchs_steps_are_found_by_the_answers_id() -> None:
    watched = Watched()
    for step in range(3):
        watched.submit([step], new=1, id=answer_id(f"cmpl-b-{step}", 0))
    assert len(watched.explain("cmpl-b")["answers"]) == 3


def test_waiting_for_blocks_is_explained_as_that() -> None:
    watched = Watched(pages=8, max_num_seqs=4)
    watched.submit([1] * 12, new=16)
    watched.step(2)
    late = watched.submit([2] * 24, new=4)
    watched.run()
    assert [wait["for"] for wait in watched.story(late)["waits"]] == ["pages"]
    assert "free KV blocks" in says(watched, late, "waited")[0]


def test_chunks_are_counted_and_explained() -> None:
    watched = Watched(chunk=4)
    id = watched.submit(list(range(1, 13)), new=2)
    watched.run()
    assert watched.story(id)["chunks"] == 2
    assert (
        says(watched, id, "chunk")
        == ["4 of its prompt's tokens were fed, the rest later: that is the limit of a step"] * 2
    )


def test_a_victim_hears_who_took_its_blocks() -> None:
    watched = Watched(pages=8, max_num_seqs=3)
    ids = [watched.submit([i, i, i, i], new=16) for i in range(3)]
    watched.run()
    victims = [id for id in ids if watched.story(id)["preemptions"]]
    assert victims
    event = next(e for e in watched.story(victims[0])["events"] if e["what"] == "preempted")
    assert event["by"] in ids
    assert "preempted" in watched.story(victims[0])["summary"]


def test_what_a_victim_finds_of_its_own_answer_is_not_counted_as_of_its_prompt() -> None:
    watched = Watched(pages=10, max_num_seqs=3, pressure_policy="preempt")
    ids = [watched.submit([i, i, i, i, i], new=20) for i in range(3)]
    watched.run()
    stories = [watched.story(id) for id in ids]
    found = [e["says"] for s in stories for e in s["events"] if e["what"] == "opened" and "of its answer" in e["says"]]
    assert found and all("4 of 5" in says or "5 of 5" in says for says in found)
    assert [story["prefix"]["hit_tokens"] for story in stories] == [0, 0, 0]
    listed = watched.explain("")["requests"]
    assert [one["cached_tokens"] for one in listed] == [0, 0, 0] and all(one["preemptions"] for one in listed[:1])


def test_a_prefix_hit_says_where_it_diverged_and_from_whom() -> None:
    watched = Watched()
    one = watched.submit([*range(1, 9), 50, 51, 52, 53, 54], new=2)
    watched.run()
    two = watched.submit([*range(1, 9), 50, 99, 98, 97, 96], new=2)
    watched.run()
    prefix = watched.story(two)["prefix"]
    assert (prefix["hit_tokens"], prefix["diverged_at"], prefix["from"]) == (8, 9, one)
    assert "differs from token 9 on" in prefix["why"]
    assert watched.story(one)["prefix"]["why"] == "no request still remembered began with the same tokens"


def test_a_prefix_that_was_evicted_says_who_was_given_its_block() -> None:
    watched = Watched(pages=8, max_num_seqs=1)
    one = watched.submit(list(range(1, 18)), new=2)
    watched.run()
    two = watched.submit([99] * 24, new=4)
    watched.run()
    again = watched.submit(list(range(1, 18)), new=2)
    watched.run()
    prefix = watched.story(again)["prefix"]
    assert (prefix["from"], prefix["evicted_by"]) == (one, two)
    assert f"{two} was given the block" in prefix["why"]


def test_a_prefix_that_was_forgotten_in_a_reset_says_so() -> None:
    watched = Watched()
    first = watched.submit(range(1, 18))
    watched.run()
    watched.engine.reset_prefix_cache()
    second = watched.submit(range(1, 18))
    watched.run()
    story = watched.story(second)
    assert story["prefix"]["hit_tokens"] == 0
    assert story["prefix"]["why"] == f"{first} had the same first 17 tokens, but the prefix cache was emptied since"
    third = watched.submit(range(1, 18))
    watched.run()
    assert watched.story(third)["prefix"]["hit_tokens"] == 16


def test_a_request_of_another_salt_is_never_named_as_where_a_prefix_came_from() -> None:
    watched = Watched()
    prompt = [*range(1, 9), 50, 51, 52, 53, 54]

    def explained(id: str, tokens: list[int], salt: str) -> dict[str, Any]:
        watched.engine.add(Request(id=id, prompt=tuple(tokens), max_new_tokens=2, cache_salt=salt))
        watched.run()
        return watched.story(id)

    explained("theirs-unsalted", prompt, "")
    explained("theirs-salted", prompt, "theirs")
    near, same = explained("near", [*prompt[:9], 99, 98, 97, 96], "mine"), explained("same", prompt, "mine")
    assert (near["prefix"]["hit_tokens"], near["prefix"]["from"], near["prefix"]["diverged_at"]) == (0, None, None)
    assert near["prefix"]["why"] == "no request still remembered began with the same tokens"
    assert (same["prefix"]["hit_tokens"], same["prefix"]["from"]) == (8, "near")
    assert "theirs" not in json.dumps([near, same])


def test_other_salts_are_not_compared_and_wanted_prompt_logprobs_explain_themselves() -> None:
    watched = Watched()
    watched.submit([1, 2, 3, 4, 5, 6], new=2)
    watched.run()
    scored = watched.submit([1, 2, 3, 4, 5, 6], new=2, sampling=SamplingParams(prompt_logprobs=0))
    watched.run()
    assert "log-probabilities of the prompt" in watched.story(scored)["prefix"]["why"]


def test_each_token_has_its_time_and_the_parts_add_up() -> None:
    watched = Watched()
    id = watched.submit([1, 2, 3], new=7)
    watched.run()
    story = watched.story(id)
    assert len(story["token_times"]) == story["generated_tokens"] == 7
    assert story["token_times"] == sorted(story["token_times"])
    seconds = story["seconds"]
    assert abs(seconds["queued"] + seconds["prefill"] + seconds["decode"] - seconds["total"]) < 1e-5
    assert seconds["first_token"] == story["token_times"][0]


def test_a_call_answers_with_all_its_choices_and_a_list_with_a_line_each() -> None:
    watched = Watched()
    for choice in range(3):
        watched.submit([1, 2, 3], new=2, id=f"call-{choice}")
    watched.submit([9], new=2, id="other")
    watched.run()
    assert [answer["id"] for answer in watched.explain("call")["answers"]] == ["call-0", "call-1", "call-2"]
    assert watched.explain("unknown") is None
    listed = watched.explain("")["requests"]
    assert [line["id"] for line in listed] == ["other", "call-2", "call-1", "call-0"]
    assert listed[0]["generated_tokens"] == 2 and listed[0]["state"] == "finished"


def test_explaining_among_many_long_alike_prompts_does_not_hold_the_engine_up() -> None:
    watched = Watched(watch=False, pages=40_000, max_num_seqs=64, max_num_batched_tokens=1 << 20, chunk=1 << 20)
    common = list(range(5000))
    for i in range(100):
        watched.submit([*common, i], new=1)
    watched.run()
    began = time.thread_time()
    for i in range(20):
        watched.window.explain(f"req-{i}", watched.clock.now())
    assert time.thread_time() - began < 1.0


def test_a_grammar_delays_the_request_that_has_it_and_no_other() -> None:
    history = History()
    for id in ("own", "other"):
        history.on_submit(Request(id=id, prompt=(1, 2), max_new_tokens=4), 1.0)
    history.waits += [Wait(1.0, 3.0, "own", "grammar"), Wait(3.0, 4.0, "own", "pages")]
    waits = {id: (explain(history, id, 5.0) or {})["waits"] for id in ("own", "other")}
    assert {id: [(w["for"], w["behind"], w["seconds"]) for w in found] for id, found in waits.items()} == {
        "own": [("grammar", None, 2.0), ("pages", None, 1.0)],
        "other": [("pages", "own", 1.0)],
    }


@pytest.mark.parametrize(
    ("length", "hits", "why"),
    [
        (4, 0, "a prompt this short fills no block of 4 tokens"),
        (5, 4, "all that could be reused was"),
        (8, 4, "all that could be reused was"),
        (9, 8, "all that could be reused was"),
    ],
)
def test_the_last_token_of_a_prompt_is_computed_again_and_its_block_is_not_missed(
    length: int, hits: int, why: str
) -> None:
    watched = Watched()
    for _ in range(2):
        id = watched.submit(range(length))
        watched.run()
    assert watched.story(id)["prefix"] == {
        "hit_tokens": hits,
        "prompt_tokens": length,
        "diverged_at": None,
        "from": None,
        "why": why,
    }
