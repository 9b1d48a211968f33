"""Which replica a request goes to, by each routing policy."""

from __future__ import annotations

import random
from typing import get_args, get_type_hints

import pytest

from quire.config.settings import UpstreamConfig
from quire.errors import InvalidConfig
from quire.scheduler.routing import ROUTING_POLICIES, LongestPrefix, RoutingPolicy, make_routing_policy

NAMES = [f"replica-{i}" for i in range(4)]


def routed(policy: str, **options: int) -> RoutingPolicy:
    made = make_routing_policy(policy, **options)
    for name in NAMES:
        made.add(name)
    return made


def send(policy: RoutingPolicy, prompt: tuple[object, ...] = ()) -> str:
    name = policy.choose(prompt)
    assert name is not None
    policy.sent(name, prompt)
    return name


def test_the_options_of_a_proxy_name_all_policies() -> None:
    assert get_args(get_type_hints(UpstreamConfig)["upstream_policy"]) == tuple(ROUTING_POLICIES)


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidConfig, match=r"not 'longest_prefx'.*longest_prefix"):
        make_routing_policy("longest_prefx")


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy = routed("round_robin")
    assert [send(policy) for _ in range(8)] == NAMES * 2


def test_the_least_loaded_replica_is_the_one_that_a_search_through_all_finds() -> None:
    policy, rng, running = routed("least_loaded"), random.Random(1), list[str]()
    turns = dict.fromkeys(NAMES, 0)
    for turn in range(1, 2000):
        if running and rng.random() < 0.48:
            policy.finished(running.pop(rng.randrange(len(running))))
            continue
        expected = min(NAMES, key=lambda name: (running.count(name), turns[name], name))
        assert send(policy) == expected
        running.append(expected)
        turns[expected] = turn


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_a_replica_that_left_gets_nothing_and_its_requests_still_end(name: str) -> None:
    policy = routed(name)
    sent = [send(policy, (i,)) for i in range(40)]
    gone = sent[0]
    policy.remove(gone)
    assert gone not in {send(policy, (i,)) for i in range(40)}
    for _ in range(sent.count(gone)):
        policy.finished(gone)
    assert gone not in policy.outstanding
    policy.add(gone)
    for other in NAMES:
        while other != gone and policy.outstanding[other]:
            policy.finished(other)
    assert gone in {send(policy, (i,)) for i in range(400)}


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_without_replicas_there_is_no_choice(name: str) -> None:
    policy = routed(name)
    assert policy.choose(("a",), without=NAMES) is None
    for each in NAMES:
        policy.remove(each)
    assert policy.choose(("a",)) is None


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_those_that_were_tried_are_not_chosen_again(name: str) -> None:
    policy = routed(name)
    tried = list[str]()
    for _ in NAMES:
        chosen = policy.choose(("a", "b"), tried)
        assert chosen is not None
        tried.append(chosen)
    assert sorted(tried) == NAMES


def test_a_hash_moves_only_the_prompts_of_a_replica_that_left() -> None:
    policy = routed("prefix_hash", max_imbalance=1 << 20)
    before = {i: policy.choose((i,)) for i in range(500)}
    assert set(before.values()) == set(NAMES)
    policy.remove(NAMES[0])
    moved = [i for i in before if policy.choose((i,)) != before[i]]
    assert moved == [i for i in before if before[i] == NAMES[0]]


def test_the_longest_beginning_wins_and_equal_ones_go_to_the_less_loaded() -> None:
    policy = routed("longest_prefix", max_imbalance=3)
    assert isinstance(policy, LongestPrefix)
    policy.sent("replica-2", ("s", "a", "b"))
    policy.sent("replica-1", ("s", "c"))
    assert policy.matched(("s", "a", "x")) == {"replica-1": 1, "replica-2": 2}
    assert policy.choose(("s", "a", "x")) == "replica-2"
    policy.sent("replica-1")
    assert policy.choose(("s", "y")) == "replica-2"
    for _ in range(3):
        policy.sent("replica-2")
    assert policy.choose(("s", "a", "x")) == "replica-1", "replica-2 has four more than the least loaded"
    assert policy.choose(("z",)) == "replica-0"


def test_what_was_used_longest_ago_is_forgotten_and_beginnings_last() -> None:
    policy = LongestPrefix(max_chunks=4)
    policy.add("one")
    policy.sent("one", ("a", "b", "c"))
    policy.sent("one", ("d", "e"))
    assert policy.matched(("a", "b", "c")) == {"one": 2}
    policy.sent("one", ("f",))
    assert policy.matched(("a", "b")) == {"one": 1}
    assert len(policy._known["one"]) == 4 == sum(map(len, policy._holders.values()))


def test_a_prefix_far_in_is_not_taken_for_one_at_the_beginning() -> None:
    policy = LongestPrefix()
    policy.add("one")
    policy.sent("one", ("a", "b"))
    assert policy.matched(("b",)) == {} and policy.matched(()) == {}
