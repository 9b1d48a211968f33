"""The replicas as one engine, with a handle that stands for Ray Serve's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.engine.executor import Description
from quire.observability import prometheus
from quire.observability.engine_metrics import METRICS
from quire.observability.live_view import RequestTimeline
from quire.replicas import client
from quire.replicas.client import ReplicaEngines, add_up
from quire.replicas.messages import Prompt, Report, asked, encode
from quire.types import FinishReason, Request, RequestStepOutput

ABOUT = Description(num_blocks=64, block_size=4, num_rows=4, max_model_len=64, vocab_size=100)


class Stream:
    """A call: what a test puts into it comes; an exception ends it."""

    def __init__(self, prompt: Prompt, message: bytes) -> None:
        self.prompt, self.requests = prompt, list(asked(message))
        self.parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self.parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    def say(self, *outputs: RequestStepOutput) -> None:
        self.parts.put_nowait(encode(list(outputs)))


class Handle:
    """reports: of the replicas that are there. streams: calls, in order. aborted: calls of `abort`."""

    def __init__(self) -> None:
        self.reports: list[Report] = [report(0), report(1)]
        self.streams: list[Stream] = []
        self.aborted: list[tuple[str, list[str], FinishReason]] = []
        self.broadcasts: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {}

    def options(self, **options: Any) -> Any:
        async def describe() -> bytes:
            return encode(ABOUT)

        async def abort(to: Any, ids: list[str], why: FinishReason) -> None:
            self.aborted.append((to.replica, ids, why))

        def generate(prompt: Prompt, message: bytes) -> Stream:
            self.streams.append(Stream(prompt, message))
            return self.streams[-1]

        calls = {"describe": describe, "abort": abort, "generate": generate}
        return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

    def broadcast(self, method_name: str, *args: Any) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            self.broadcasts.append((method_name, *args))
            if method_name == "report":
                return [encode(each) for each in self.reports] + [RuntimeError("it has just gone")]
            return self.answers.get(method_name, [])

        return SimpleNamespace(results_async=results_async)


def report(rank: int, **stats: Any) -> Report:
    stats = {
        "generated_tokens": 10,
        "completed_requests": 1,
        "waiting_requests": rank,
        "cache": {"used_pages": 2},
    } | stats
    metrics = {"quire:queue_tokens": float(rank)}
    return Report(f"r{rank}", rank, "here", 100 + rank, 200 + rank, True, 7 * rank, stats, metrics)


class Bench:
    """Engines that are started, and what came of their requests."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.timeline = RequestTimeline("")
        render = lambda engines: prometheus.text_of(METRICS, engines, "m")  # noqa: E731
        self.engines = ReplicaEngines(self.handle, render, self.timeline, 2)
        self.outputs: list[RequestStepOutput] = []
        self.engines.subscribe(self.outputs.extend, lambda reason: pytest.fail(reason))

    def submit(self, *ids: str) -> Stream:
        self.engines.submit([Request(id=id, prompt=tuple(range(10)), max_new_tokens=4) for id in ids])
        return self.handle.streams[-1]


def run(work: Any) -> None:
    async def main() -> None:
        bench = Bench()
        assert await bench.engines.start() == ABOUT
        try:
            await work(bench)
        finally:
            await bench.engines.close()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def finished(id: str, *tokens: int, finish: FinishReason = "length") -> RequestStepOutput:
    """As it is read from a message."""
    return RequestStepOutput(id, tokens, finish, prompt_logprobs=[])


def test_a_call_is_one_stream_with_its_prompts_blocks() -> None:
    async def work(bench: Bench) -> None:
        stream = bench.submit("a-0", "a-1")
        assert [request.id for request in stream.requests] == ["a-0", "a-1"]
        assert stream.prompt.num_blocks == 64 and len(stream.prompt.chunks) == 2
        stream.parts.put_nowait(b"r1")
        stream.say(RequestStepOutput("a-0", (5,)), finished("a-1", 6))
        stream.say(finished("a-0", 7, finish="stop"))
        stream.parts.put_nowait(None)
        await settle()
        assert [(each.id, each.tokens, each.finish) for each in bench.outputs] == [
            ("a-0", (5,), None),
            ("a-1", (6,), "length"),
            ("a-0", (7,), "stop"),
        ]
        assert bench.engines.snapshot()["replicas"][1]["outstanding"] == 0
        assert not stream.cancelled

    run(work)


@pytest.mark.parametrize("end", [RuntimeError("ActorDiedError: gone"), None], ids=["raises", "ends"])
@pytest.mark.parametrize("began", [False, True])
def test_what_a_lost_replica_did_not_end_fails_by_name(end: Exception | None, began: bool) -> None:
    async def work(bench: Bench) -> None:
        other = bench.submit("b-0")
        stream = bench.submit("a-0", "a-1")
        if began:
            stream.parts.put_nowait(b"r1")
            stream.say(finished("a-1", 6))
        stream.parts.put_nowait(end)
        await settle()
        lost = [each for each in bench.outputs if each.finish == "error"]
        assert [each.id for each in lost] == (["a-0"] if began else ["a-0", "a-1"])
        where = r"replica 1 (r1)" if began else "the replica"
        assert {each.error for each in lost} == {f"{where} was lost while this request ran: send it again"}
        assert {each.status for each in lost} == {503}
        other.parts.put_nowait(b"r0")
        other.say(finished("b-0", 1))
        await settle()
        assert bench.outputs[-1] == finished("b-0", 1)

    run(work)


@pytest.mark.parametrize("why", ["abort", "stop", "timeout"])
def test_an_abort_reaches_the_replica_with_its_reason(why: FinishReason) -> None:
    async def work(bench: Bench) -> None:
        stream = bench.submit("a-0")
        stream.parts.put_nowait(b"r1")
        await settle()
        bench.engines.abort(["a-0", "unknown"], why)
        stream.say(RequestStepOutput("a-0", (1,)))  # it was on its way
        await settle()
        assert stream.cancelled and bench.outputs == []
        assert bench.handle.aborted == ([] if why == "abort" else [("r1", ["a-0"], why)])

    run(work)


def test_one_of_several_answers_is_aborted_alone() -> None:
    async def work(bench: Bench) -> None:
        stream = bench.submit("a-0", "a-1")
        stream.parts.put_nowait(b"r0")
        await settle()
        bench.engines.abort(["a-0"])
        stream.say(finished("a-1", 3))
        stream.parts.put_nowait(None)
        await settle()
        assert bench.handle.aborted == [("r0", ["a-0"], "abort")] and not stream.cancelled
        assert bench.outputs == [finished("a-1", 3)]

    run(work)


def test_statistics_are_sums_and_what_only_grows_keeps_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REPORT_INTERVAL", 0.0)

    async def work(bench: Bench) -> None:
        engines = bench.engines
        stats = engines.snapshot()
        assert stats["generated_tokens"] == 20 and stats["waiting_requests"] == 1 and stats["cache"]["used_pages"] == 4
        assert [each["rank"] for each in stats["replicas"]] == [0, 1]
        assert [each["queued_tokens"] for each in stats["replicas"]] == [0, 7]
        text = engines.prometheus().decode()
        assert text.count("# TYPE quire:queue_tokens gauge") == 1
        assert 'quire:queue_tokens{engine="1",model_name="m"} 1.0' in text
        bench.handle.reports = [report(0)]
        await settle()
        assert engines.snapshot()["generated_tokens"] == 20 and len(engines.reports) == 1
        bench.handle.reports = [report(0), report(1)]
        await settle()
        assert engines.snapshot()["generated_tokens"] == 20, "its report was only late"
        bench.handle.reports = []
        await settle()
        assert engines.ready() and not engines.alive()
        assert engines.prometheus() == b""

    run(work)


def test_a_replica_whose_answer_is_late_does_not_take_the_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives up all answers where one is late: the server would say that it is dead, and be restarted."""

    async def work(bench: Bench) -> None:
        engines, there = bench.engines, bench.handle.broadcast

        async def late(**_: Any) -> list[Any]:
            raise TimeoutError

        for times in range(1, 3):
            bench.handle.broadcast = lambda *args: SimpleNamespace(results_async=late)  # type: ignore[method-assign]
            for _ in range(times):
                await engines._look()
                assert engines.alive() and len(engines.reports) == 2
            bench.handle.broadcast = there  # type: ignore[method-assign]
            await engines._look()
        bench.handle.broadcast = lambda *args: SimpleNamespace(results_async=late)  # type: ignore[method-assign]
        for _ in range(3):
            await engines._look()
        assert not engines.alive() and not engines.reports

    run(work)


def test_a_call_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async def work(bench: Bench) -> None:
        def fails(*args: Any) -> None:
            raise RuntimeError("Ray Serve is gone")

        bench.engines._streams = SimpleNamespace(generate=SimpleNamespace(remote=fails))
        with pytest.raises(RuntimeError):
            bench.submit("a-0")
        assert not bench.engines._open and not bench.timeline._running

    run(work)


def test_explanations_come_from_the_replica_that_knows_and_lists_are_joined() -> None:
    async def work(bench: Bench) -> None:
        known = [
            {"id": "a", "answers": [{"prompt": i, "choice": 0} for i in prompts], "answers_left_out": left}
            for prompts, left in (((0, 3), 0), ((1, 2), 4))
        ]
        said = [msgspec.json.encode(one) for one in known]
        bench.handle.answers["explain"] = [b"null", said[1], RuntimeError("gone")]
        assert msgspec.json.decode(await bench.engines.explain("a")) == known[1]
        status, body = await bench.engines.views[0].explanation("a")
        assert status == 200 and msgspec.json.decode(body) == known[1]
        bench.handle.answers["explain"] = said
        joined = msgspec.json.decode(await bench.engines.explain("a"))
        assert [one["prompt"] for one in joined["answers"]] == [0, 1, 2, 3] and joined["answers_left_out"] == 4
        bench.handle.answers["explain"] = [b"null", b"null"]
        assert await bench.engines.explain("b") == b"null"
        status, body = await bench.engines.views[0].explanation("b")
        assert status == 404 and "'b'" in msgspec.json.decode(body)["error"]["message"]
        bench.handle.answers["explain"] = [b'{"requests":[1]}', b'{"requests":[2,3]}']
        assert json.loads(await bench.engines.explain("")) == {"requests": [1, 2, 3]}
        bench.engines.reset_prefix_cache()
        await settle()
        assert ("reset_prefix_cache",) in bench.handle.broadcasts

    run(work)


@pytest.mark.parametrize(
    ("stats", "total"),
    [
        ([], {}),
        ([{"a": 1, "policy": "lru", "page_size": 16}] * 2, {"a": 2, "policy": "lru", "page_size": 16}),
        ([{"max_batch_observed": 3}, {"max_batch_observed": 5}], {"max_batch_observed": 5}),
        (
            [{"average_batch_size": 2.0, "decode_steps": 30}, {"average_batch_size": 6.0, "decode_steps": 10}],
            {"average_batch_size": 3.0, "decode_steps": 40},
        ),
        ([{"average_batch_size": 0.0, "decode_steps": 0}], {"average_batch_size": 0.0, "decode_steps": 0}),
        ([{"cache": {"utilization": 0.5, "max_pages": 8}}, {}], {"cache": {"utilization": 0.5, "max_pages": 16}}),
    ],
)
def test_several_engines_statistics_are_one_engines(stats: Sequence[dict[str, Any]], total: dict[str, Any]) -> None:
    assert add_up(stats) == total
