"""Ray Serve's router with a routing policy, and its autoscaler with the simulator's."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.config import AutoscalingPolicy

from quire.replicas.autoscaler import QueuedTokensPolicy
from quire.replicas.messages import Addressed, Prompt, ask, asked, prompt_blocks
from quire.replicas.router import PolicyRouter
from quire.scheduler.autoscaling import FleetLoad, QueuedTokensAutoscaler
from quire.scheduler.routing import LongestPrefix, RoundRobin
from quire.types import PromptImage, Request


class Router(PolicyRouter):
    """Ray Serve's part left out: it needs a cluster."""

    def __init__(self, policy: str = "longest_prefix", max_imbalance: int = 4) -> None:
        self.initialize_state(policy=policy, max_imbalance=max_imbalance)
        self.calls = 0

    def call(self, about: object, there: str = "abc") -> tuple[str, str, asyncio.Future[Any]]:
        """The replica that a call is sent to, its internal id, and the future that Ray Serve assigns it by."""
        self.calls += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        metadata = SimpleNamespace(internal_request_id=str(self.calls))
        pending: Any = SimpleNamespace(args=[about], metadata=metadata, future=future)
        return self.choose(pending, there), str(self.calls), future

    def choose(self, pending: Any, there: str) -> str:
        candidates: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in there]
        coroutine = self.choose_replicas(candidates, pending)
        with pytest.raises(StopIteration) as done:  # it never waits
            coroutine.send(None)
        [[chosen, *others]] = done.value.value
        assert not others
        return str(chosen.replica_id.unique_id)

    def end(self, id: str) -> None:
        replica: Any = SimpleNamespace(unique_id="")
        self.on_request_completed(replica, id)


def test_it_chooses_as_the_policy_does() -> None:
    async def run() -> None:
        router, policy = Router(), LongestPrefix()
        for name in "abc":
            policy.add(name)
        for number in (0, 1, 2, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 0):
            chunks = [(number, part) for part in range(3)]
            wanted = policy.choose(chunks)
            assert wanted is not None
            policy.sent(wanted, chunks)
            assert router.call(Prompt(chunks, 100))[0] == wanted
        assert router.policy.outstanding == policy.outstanding

    asyncio.run(run())


def test_a_call_counts_until_it_ends_however_it_does() -> None:
    async def run() -> None:
        router = Router()
        first, one, _ = router.call(Prompt(["x"], 8))
        assert router.policy.outstanding[first] == 1
        router.end(one)
        router.end(one)
        assert router.policy.outstanding[first] == 0
        again, _, future = router.call(Prompt(["x"], 8))
        assert again == first
        future.cancel()  # its client has gone before it was sent
        await asyncio.sleep(0)
        assert sum(router.policy.outstanding.values()) == 0

    asyncio.run(run())


def test_a_call_that_was_refused_counts_where_it_goes_next() -> None:
    async def run() -> None:
        router = Router()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pending = SimpleNamespace(
            args=[Prompt(["x"], 8)], metadata=SimpleNamespace(internal_request_id="1"), future=future
        )
        refused = router.choose(pending, "ab")
        other = router.choose(pending, "ab".replace(refused, ""))
        assert {refused, other} == {"a", "b"}
        assert router.policy.outstanding[other] == 1 and not router.policy.outstanding.get(refused)

    asyncio.run(run())


def test_replicas_come_and_go_and_the_digest_is_as_large_as_a_cache() -> None:
    async def run() -> None:
        router = Router()
        chunks = [("p", part) for part in range(4)]
        first, id, _ = router.call(Prompt(chunks, 3))
        router.end(id)
        policy = router.policy
        assert isinstance(policy, LongestPrefix) and policy.max_chunks == 3
        assert policy.matched(chunks) == {first: 3}  # the longest beginning was forgotten
        rest = "abcd".replace(first, "")
        assert router.call(Prompt(chunks, 3), rest)[0] in rest
        assert set(policy.replicas) == set(rest) and first not in policy.outstanding

    asyncio.run(run())


def test_calls_to_one_replica_and_to_any_change_nothing_of_the_policy() -> None:
    async def run() -> None:
        router = Router("round_robin")
        assert isinstance(router.policy, RoundRobin)
        assert router.call(Addressed("b"))[0] == "b"
        assert router.call(Addressed("gone"))[0] == "a"
        assert router.policy.outstanding == {}

    asyncio.run(run())


def request(prompt: tuple[int, ...], *, id: str = "r", **more: Any) -> Request:
    return Request(id=id, prompt=prompt, max_new_tokens=4, **more)


def test_prompts_are_compared_as_the_prefix_cache_does() -> None:
    plain = request(tuple(range(50)))
    blocks = prompt_blocks(plain, 16)
    assert [tokens for _, tokens in blocks] == [tuple(range(i, i + 16)) for i in (0, 16, 32)]
    salted = prompt_blocks(request(tuple(range(50)), cache_salt="s"), 16)
    assert not set(blocks) & set(salted)
    seen = [prompt_blocks(request((7,) * 32, images=(_image(16, digest),)), 16) for digest in (b"1" * 16, b"2" * 16)]
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


def _image(start: int, digest: bytes) -> PromptImage:
    return PromptImage(start=start, length=4, height=1, width=1, pixels=b"", digest=digest)


def test_a_prompt_for_the_router_is_not_sent() -> None:
    prompt = Prompt([("s", tuple(range(1000)))], 7)
    sent = pickle.dumps(prompt)
    assert len(sent) < 100 and pickle.loads(sent).chunks == ()


def test_requests_arrive_with_their_deadlines_on_the_replicas_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("quire.replicas.messages.time.monotonic", lambda: clock.now)
    requests = [request((1, 2, 3), id=f"r-{i}", choice=i, deadline=130.0) for i in range(3)]
    message = ask(requests)
    clock.now = 5000.5  # another machine's
    read = list(asked(message))
    assert [(each.id, each.choice, each.prompt) for each in read] == [(f"r-{i}", i, (1, 2, 3)) for i in range(3)]
    assert {each.deadline for each in read} == {5030.5}


def test_the_autoscaler_decides_as_the_simulators_does() -> None:
    options = {"target": 100, "low": 1, "high": 3, "up_delay": 2.0, "down_delay": 4.0}
    policy: Any = _resolve_policy_callable(AutoscalingPolicy(policy_function=QueuedTokensPolicy, policy_kwargs=options))
    scaler = QueuedTokensAutoscaler(100, low=1, high=3, up_delay=2.0, down_delay=4.0)
    running, wanted, seen = 1, 1, []
    for now, queued in enumerate([0, 250, 250, 250, 90, 90, 90, 90, 90, 90, 0, 0, 0, 0, 0, 0]):
        series = [SimpleNamespace(value=10_000.0), SimpleNamespace(value=float(queued) / running)]
        context: Any = SimpleNamespace(
            current_num_replicas=running,
            target_num_replicas=wanted,
            current_time=float(now),
            raw_metrics={"queued_tokens": {f"replica {i}": series for i in range(running)}},
        )
        said, state = policy(context)
        each = int(queued / running)
        assert state == {} and said == scaler.desired(FleetLoad(now, each * running, running, wanted - running))
        running, wanted = wanted, said  # one that starts runs a second later
        seen.append(said)
    assert max(seen) == 3 and seen[0] == seen[-1] == 1


def test_without_reports_nothing_is_queued() -> None:
    policy = QueuedTokensPolicy(target=10, low=2, high=4, up_delay=0, down_delay=0)
    context: Any = SimpleNamespace(current_num_replicas=0, target_num_replicas=2, current_time=0.0, raw_metrics={})
    assert policy(context) == (2, {})
