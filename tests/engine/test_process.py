"""The engine in a process of its own: requests in, tokens out, deaths noticed and mended."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import heap
from quire.engine import client
from quire.engine.client import EngineProcess, StallDetector, _EngineConnection
from quire.engine.engine import Engine
from quire.engine.executor import Description
from quire.engine.process import EngineLoop
from quire.engine.protocol import (
    REPORT_SIGNAL,
    Abort,
    BuildFailed,
    Configure,
    Explanation,
    Ready,
    Submit,
    ToEngine,
    Update,
    encode_frame,
)
from quire.engine.spawn import Spawned, spawn
from quire.engine.step_watch import StepWatch
from quire.engine.timing import PlanDelay, RestartBackoff, VirtualClock
from quire.errors import InvalidModel, QuireError, Unavailable
from quire.scheduler.block_pool import RadixPrefixCache
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.kv_offload import CopyDone, KVOffload
from quire.scheduler.policy import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_time import StepCost, StepTimeModel
from quire.sim.run import SimConfig
from quire.types import Request, RequestStepOutput, SamplingParams
from tests.hash_model import HashDevice
from tests.hash_store import HashStore

CHILD = str(Path(__file__).with_name("synthetic_child.py"))


class Rig:
    """An engine process and what it said."""

    def __init__(self, *, standby_after: float | None = None, begun: Spawned | None = None, **settings: Any) -> None:
        self.port = EngineProcess(
            [sys.executable, CHILD],
            settings,
            lambda m: repr(m).encode(),
            backoff=0.01,
            standby_after=standby_after,
            begun=begun,
        )
        self.events: list[RequestStepOutput] = []
        self.deaths: list[str] = []

        def hear(events: Sequence[RequestStepOutput]) -> None:
            self.events.extend(events)

        self.port.subscribe(hear, self.deaths.append)

    async def __aenter__(self) -> Rig:
        await self.port.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.port.close()

    async def until(self, what: Callable[[], bool], seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.005)

    def made(self, id: str) -> list[int]:
        return [t for e in self.events if e.id == id for t in e.tokens]

    def finish(self, id: str) -> str | None:
        return next((e.finish for e in self.events if e.id == id and e.finish), None)


def ask(id: str, new: int = 5, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    return Request(
        id=id, prompt=tuple(prompt), max_new_tokens=new, sampling=SamplingParams(logit_bias={3: 1.5}, seed=4)
    )


def test_an_engine_that_is_being_built_is_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a model was loaded took five seconds: the process heard nothing of its closed socket."""
    monkeypatch.setattr(client, "_EXIT_TIMEOUT", 3600.0)

    async def story() -> None:
        port = EngineProcess([sys.executable, "-c", "import time; time.sleep(3600)"], {}, lambda m: b"")
        starting = asyncio.create_task(port.start())
        while port.process is None:
            await asyncio.sleep(0)
        await asyncio.wait_for(port.close(), 60)
        assert port.process.returncode == -signal.SIGKILL
        starting.cancel()

    asyncio.run(story())


def test_tokens_come_back_and_the_counters_settle() -> None:
    async def story() -> None:
        async with Rig() as rig:
            assert rig.port.ready() and rig.port.alive()
            rig.port.submit([ask("a"), ask("b", 7)])
            await rig.until(lambda: rig.finish("a") is not None and rig.finish("b") is not None)
            assert len(rig.made("a")) == 5 and len(rig.made("b")) == 7
            await rig.until(lambda: rig.port.snapshot()["completed_requests"] == 2)
            assert rig.port.snapshot()["cache"]["used_pages"] == 0
            assert b"vllm:generation_tokens" in rig.port.prometheus()

    asyncio.run(story())


def test_an_impossible_request_fails_with_an_error_and_no_other_does() -> None:
    async def story() -> None:
        async with Rig() as rig:
            rig.port.submit([ask("huge", 10_000), ask("fine")])
            await rig.until(lambda: rig.finish("fine") is not None and rig.finish("huge") is not None)
            assert rig.finish("huge") == "error" and rig.finish("fine") == "length"
            assert any("KV blocks" in (e.error or "") and e.status == 400 for e in rig.events)

    asyncio.run(story())


def test_after_a_reset_the_prefix_cache_is_empty_and_running_requests_continue() -> None:
    async def story() -> None:
        async with Rig() as rig:

            async def cached(id: str, *, reset: bool) -> int:
                rig.port.submit([ask(id, 40, prompt=range(1, 100))])
                await rig.until(lambda: bool(rig.made(id)))
                if reset:
                    rig.port.reset_prefix_cache()
                await rig.until(lambda: rig.finish(id) is not None)
                assert len(rig.made(id)) == 40
                return max(event.num_cached for event in rig.events if event.id == id)

            assert [await cached("a", reset=True), await cached("b", reset=True)] == [0, 0]
            assert await cached("c", reset=False) == 0
            assert await cached("d", reset=False) > 0

    asyncio.run(story())


def test_an_abort_ends_the_request() -> None:
    async def story() -> None:
        async with Rig(step=0.01) as rig:
            rig.port.submit([ask("long", 200)])
            await rig.until(lambda: len(rig.made("long")) > 2)
            rig.port.abort(["long", "unknown"])
            await rig.until(lambda: rig.finish("long") == "abort")
            rig.port.submit([ask("found", 200)])
            rig.port.abort(["found"], "stop")
            await rig.until(lambda: rig.finish("found") == "stop")
            await rig.until(lambda: rig.port.snapshot()["cache"]["used_pages"] == 0)

    asyncio.run(story())


def test_a_killed_engine_is_noticed_and_comes_back() -> None:
    async def story() -> None:
        async with Rig(step=0.01) as rig:
            rig.port.submit([ask("lost", 200)])
            await rig.until(lambda: len(rig.made("lost")) > 2)
            assert rig.port.process is not None
            first = rig.port.process.pid
            rig.port.process.kill()
            await rig.until(lambda: bool(rig.deaths))
            assert not rig.port.ready() and not rig.port.alive()
            with pytest.raises(Unavailable):
                rig.port.submit([ask("too-soon")])
            await rig.until(rig.port.ready)
            assert rig.port.process.pid != first and rig.port.restarts == 1
            rig.port.submit([ask("again")])
            await rig.until(lambda: rig.finish("again") == "length")

    asyncio.run(story())


def test_an_engine_restarts_and_answers_while_the_server_holds_more_than_1024_descriptors() -> None:
    """The child's inherited socket then has a number that select(2) refuses."""

    async def story() -> None:
        async with Rig() as rig:
            assert rig.port.process is not None
            rig.port.process.kill()
            await rig.until(lambda: bool(rig.deaths))
            await rig.until(rig.port.ready)
            rig.port.submit([ask("again")])
            await rig.until(lambda: rig.finish("again") == "length")
            assert rig.port.restarts == 1
            inherited = [os.readlink(one) for one in Path(f"/proc/{rig.port.process.pid}/fd").iterdir()]
            assert sum(one.startswith("socket:") for one in inherited) == 1, "the front's own stay with the front"

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    held = [os.open(os.devnull, os.O_RDONLY)]
    front = socket.socket()  # one that a careless child would keep
    try:
        os.set_inheritable(front.fileno(), True)
        while held[-1] < 1024:
            held.append(os.dup(held[0]))
        asyncio.run(story())
    finally:
        for descriptor in held:
            os.close(descriptor)
        front.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_an_engine_that_cannot_be_built_gives_the_reason() -> None:
    async def story() -> None:
        with pytest.raises(InvalidModel, match="try 'embedded'"):
            await Rig(bad=True).port.start()
        with pytest.raises(QuireError, match="before it was ready"):
            await Rig(dies=True).port.start()

    asyncio.run(story())


def test_the_engine_ends_when_its_server_does_and_leaves_nothing_behind() -> None:
    async def story() -> int:
        rig = Rig()
        await rig.port.start()
        assert rig.port.process is not None
        pid = rig.port.process.pid
        await rig.port.close()
        assert rig.port.process.returncode == 0
        return pid

    pid = asyncio.run(story())
    assert not Path(f"/proc/{pid}").exists()


def test_an_idle_engine_uses_no_processor_time() -> None:
    async def story() -> None:
        async with Rig() as rig:
            rig.port.submit([ask("warm")])
            await rig.until(lambda: rig.finish("warm") is not None)
            assert rig.port.process is not None
            stat = Path(f"/proc/{rig.port.process.pid}/stat")

            def ticks() -> int:
                fields = stat.read_text().rsplit(")", 1)[1].split()
                return int(fields[11]) + int(fields[12])

            async def is_idle() -> bool:
                before, own = ticks(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
                await asyncio.sleep(1.5)
                used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - own
                return (ticks() - before) / os.sysconf("SC_CLK_TCK") <= 0.015 and used < 0.1

            assert await is_idle() or await is_idle(), "what a request left to do is done once"

    asyncio.run(story())


def test_a_stuck_engine_is_not_alive_logs_its_stack_and_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with Rig(timeout=0.3, sticks=True) as rig:
            rig.port.submit([ask("fine")])
            await rig.until(lambda: rig.finish("fine") == "length")
            await asyncio.sleep(0.7)
            assert rig.port.alive(), "idle for longer than a step may take"
            rig.port.submit([stuck("stuck"), ask("beside")])
            await rig.until(lambda: not rig.port.alive())
            assert rig.port.ready() and not rig.deaths
            await rig.until(lambda: bool(rig.deaths))
            await rig.until(rig.port.alive)
            rig.port.submit([ask("again")])
            await rig.until(lambda: rig.finish("again") == "length")

    asyncio.run(story())
    said = capfd.readouterr().err
    assert "in launch" in said and "step 5" in said and "stuck" in said and "2 running" in said


def test_a_stopped_engine_is_not_alive_after_the_step_timeout_and_is_replaced() -> None:
    """SIGSTOP: it can neither answer nor be asked to end."""

    async def story() -> None:
        async with Rig(timeout=0.3, step=0.01, budget=8) as rig:  # a step of 512 tokens might take 17 seconds
            rig.port.submit([ask("a", 200)])
            await rig.until(lambda: len(rig.made("a")) > 20)
            assert rig.port.process is not None
            rig.port.process.send_signal(signal.SIGSTOP)
            await rig.until(lambda: not rig.port.alive())
            assert rig.port.ready() and not rig.deaths
            await rig.until(lambda: bool(rig.deaths))
            await rig.until(rig.port.alive)
            assert rig.port.restarts == 1

    asyncio.run(story())


def stuck(id: str) -> Request:
    return Request(id=id, prompt=(1, 2, 3), max_new_tokens=5, sampling=SamplingParams(seed=666), seed=666)


def test_a_long_prefill_is_progress() -> None:
    """Ten times what any step may take by itself, but what such a prompt costs by the steps before."""

    async def story() -> None:
        async with Rig(timeout=0.1, token=0.005) as rig:
            rig.port.submit([ask("short", 2, range(20))])
            await rig.until(lambda: rig.finish("short") is not None)
            began = time.monotonic()
            rig.port.submit([ask("long", 2, range(200))])
            while rig.finish("long") is None:
                assert rig.port.alive()
                await asyncio.sleep(0.01)
            assert time.monotonic() - began > 0.9

    asyncio.run(story())


def test_an_engine_that_reports_idle_before_it_read_a_request_is_not_idle() -> None:
    progress = StallDetector(0.0)
    progress.on_update(Update(0, [], True, 0, 2.0), 0.0)
    progress.on_submit(10.0)
    progress.on_update(Update(7, [], True, 0, 2.0), 10.5)  # of what came before; it had not read on yet
    assert not progress.idle
    assert progress.is_stalled(12.0) < 0 < progress.is_stalled(12.6)
    progress.on_update(Update(8, [], True, 1, 2.0), 12.7)
    assert progress.idle and progress.is_stalled(99.0) <= 0


def test_updates_without_a_step_are_no_progress() -> None:
    progress = StallDetector(0.0)
    progress.on_submit(0.0)
    for second in range(5):
        progress.on_update(Update(1, [], False, 1, 2.0), float(second))
    assert progress.is_stalled(5.0) == 3.0


def test_an_engine_that_gets_stuck_a_second_time_logs_its_stack_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[object]()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def story() -> None:
        port = EngineProcess([], {}, lambda metrics: b"")
        port._link = SimpleNamespace(was_ready=True)  # type: ignore[assignment]
        port.process = SimpleNamespace(send_signal=said.append, kill=lambda: said.append("kill"))  # type: ignore[assignment]

        def check(at: float) -> list[object]:
            now[0] = at
            port._check_progress()
            if port._timer is not None:
                port._timer.cancel()
            return said

        port._stall_detector.on_submit(0.0)
        port._stall_detector.on_update(Update(1, [], False, 1, 2.0), 0.0)
        assert check(1.9) == []
        assert check(2.1) == check(3.9) == [REPORT_SIGNAL], "once for one step"
        port._stall_detector.on_update(Update(2, [], False, 1, 2.0), 4.0)
        assert check(5.9) == [REPORT_SIGNAL]
        assert check(6.1) == check(7.9) == [REPORT_SIGNAL] * 2
        assert check(8.1) == [REPORT_SIGNAL, REPORT_SIGNAL, "kill"]

    asyncio.run(story())


def test_a_cancelled_explanation_leaves_nothing_behind() -> None:
    async def story() -> None:
        port = EngineProcess([], {}, lambda metrics: b"")
        sent: list[Any] = []
        port._link = SimpleNamespace(was_ready=True, send=sent.append)  # type: ignore[assignment]
        tasks = [asyncio.ensure_future(port.explain(id)) for id in "abc"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        port.on_live_message(Explanation(sent[1].call_id, b"{}"))
        port._cancel_explanations()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, bytes, Unavailable]
        assert port._pending_explanations == {}

    asyncio.run(story())


def test_a_pending_explanation_fails_when_the_engine_ends() -> None:
    async def story() -> None:
        port = EngineProcess([], {}, lambda metrics: b"")
        port._link = link = SimpleNamespace(was_ready=True, send=lambda message: None)  # type: ignore[assignment]
        waiting = asyncio.ensure_future(port.explain("a"))
        await asyncio.sleep(0)
        link.was_ready = False  # none is started again
        port.on_connection_lost(link)  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="its record of requests is lost"):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(story())


def test_a_pending_explanation_fails_when_the_engine_is_closed() -> None:
    """Or the traces of a server's last requests would delay its end."""

    async def story() -> None:
        port = EngineProcess([], {}, lambda metrics: b"")
        port._link = SimpleNamespace(  # type: ignore[assignment]
            was_ready=True, send=lambda message: None, close=lambda: None
        )
        waiting = asyncio.ensure_future(port.explain("a"))
        await asyncio.sleep(0)
        await port.close()
        with pytest.raises(Unavailable, match="its record of requests is lost"):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(story())


class Pauses:
    """asyncio as the client sees it, but that pauses are noted and not made."""

    def __init__(self, made: list[float]) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self._made.append(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize("life", [{"lives": 0.001}, {"dies": True}])
def test_engines_that_end_soon_after_their_start_are_restarted_with_a_growing_delay(
    monkeypatch: pytest.MonkeyPatch, life: dict[str, Any]
) -> None:
    """At once, then after pauses that double up to a bound; whether they die before they are ready or after."""
    pauses: list[float] = []

    async def story() -> None:
        async with Rig() as rig:
            rig.port._backoff.first = 5.0
            rig.port.settings = life
            assert rig.port.process is not None
            rig.port.process.kill()
            await rig.until(lambda: len(pauses) >= 6, 600.0)

    monkeypatch.setattr(client, "asyncio", Pauses(pauses))
    asyncio.run(story())
    assert pauses[:6] == [0.0, 5.0, 10.0, 20.0, 30.0, 30.0]


def test_an_engine_that_ends_after_a_long_time_is_restarted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def story() -> None:
        async with Rig() as rig:
            for restarts in range(1, 4):
                assert rig.port.process is not None
                rig.port.process.kill()
                await rig.until(lambda restarts=restarts: rig.port.restarts == restarts and rig.port.ready(), 600.0)

    monkeypatch.setattr(client, "asyncio", Pauses(pauses))
    monkeypatch.setattr(RestartBackoff, "STABLE_AFTER", -1.0)  # any life is a long one
    asyncio.run(story())
    assert pauses == [0.0, 0.0, 0.0]


def test_a_listener_gets_frames_of_the_next_engine_until_it_stops() -> None:
    async def story() -> None:
        async with Rig(window=True) as rig:
            frames: list[bytes] = []
            rig.port.on_frames(lambda frame, whole: frames.append(frame))

            async def of_a_new_engine(id: str) -> list[bytes]:
                """Frames seen of an engine that takes the place of the last."""
                assert rig.port.process is not None
                deaths = len(rig.deaths)
                rig.port.process.kill()
                await rig.until(lambda: len(rig.deaths) > deaths)
                await rig.until(rig.port.ready)
                frames.clear()
                rig.port.submit([ask(id)])
                await rig.until(lambda: rig.finish(id) is not None)
                return list(frames)

            rig.port.submit([ask("first")])
            await rig.until(lambda: rig.finish("first") is not None)
            assert frames == []
            rig.port.watch(True)
            assert await of_a_new_engine("second") and await of_a_new_engine("third")
            rig.port.watch(False)
            assert await of_a_new_engine("fourth") == []

    asyncio.run(story())


def test_several_requests_in_one_message_and_then_idleness_are_no_stall() -> None:
    """The client counts what it sent as the engine does, or an engine that is done seems to owe something."""

    async def story() -> None:
        async with Rig() as rig:
            for names in (["a", "b", "c"], ["d"], ["e", "f"]):
                rig.port.submit([ask(name) for name in names])
                await rig.until(lambda names=names: all(rig.finish(name) for name in names))
                await rig.until(lambda: rig.port._stall_detector.idle)
            rig.port.submit([ask("g"), ask("h")])
            rig.port.submit([ask("i", 10_000), ask("j")])
            await rig.until(lambda: all(rig.finish(name) for name in "ghij"))
            await rig.until(lambda: rig.port._stall_detector.idle)
            assert rig.port.restarts == 0

    asyncio.run(story())


def test_what_is_sent_in_one_turn_of_the_event_loop_is_written_in_one_piece() -> None:
    """Requests that a server reads together reach an idle engine together, whichever process runs next."""
    written: list[bytes] = []
    transport: Any = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))

    async def story() -> None:
        link = _EngineConnection(object.__new__(EngineProcess), asyncio.get_running_loop().create_future())
        link.connection_made(transport)
        said: list[ToEngine] = [Submit([ask("a")]), Submit([ask("b")]), Abort(["a"])]
        for message in said:
            link.send(message)
        assert written == []
        await asyncio.sleep(0)
        assert written == [b"".join(map(encode_frame, said))]
        link.send(Abort(["b"]))
        link.close()
        await asyncio.sleep(0)
        assert written[1:] == [encode_frame(Abort(["b"])), b"closed"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "message",
    [
        Ready(Description(num_blocks=1, block_size=1, num_rows=1, max_model_len=1, vocab_size=1)),
        BuildFailed("InvalidModel", "no"),
    ],
)
def test_an_engine_that_is_ready_after_its_start_was_cancelled_is_no_error(message: Ready | BuildFailed) -> None:
    async def story() -> None:
        link = _EngineConnection(EngineProcess([], {}, lambda metrics: b""), asyncio.get_running_loop().create_future())
        link.ready.cancel()
        link.data_received(encode_frame(message))
        assert not link.was_ready

    asyncio.run(story())


def test_after_work_and_a_rest_memory_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(heap, "trim", lambda: given.append(time.monotonic()))
    monkeypatch.setattr("quire.engine.process._TRIM_AFTER", 0.01)
    front, back = socket.socketpair()
    with front, back:
        engine = SimConfig(pages=64, page_size=4, max_num_seqs=4, cost=StepCost(0.01, 0.001)).build(VirtualClock())
        loop = EngineLoop(engine, back, dict, StepWatch())
        assert loop._receive() and len(given) == 1 and loop._idle_timeout() is None
        front.sendall(encode_frame(Submit([ask("a")])))
        assert loop._receive() and not loop.trimmed and len(given) == 1
        while engine.can_step:
            engine.step()
        assert loop._receive() and len(given) == 2


def test_an_idle_engine_prepares_until_it_is_asked_for_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.process._TRIM_AFTER", 0.01)
    front, back = socket.socketpair()
    prepared = list[int]()

    def prepare() -> bool:
        prepared.append(len(engine.scheduler.sequences))
        if len(prepared) == 2:
            front.sendall(encode_frame(Submit([ask("a")])))
        return len(prepared) < 5

    with front, back:
        plain = SimConfig(pages=64, page_size=4, max_num_seqs=4, cost=StepCost(0.01, 0.001)).build(VirtualClock())
        engine = Engine(plain.scheduler, plain.executor, clock=plain.clock, prepare=prepare)
        engine.prepare_last(lambda: prepared.append(-1))
        loop = EngineLoop(engine, back, dict, StepWatch())
        assert loop._receive() and prepared == [0, 0] and engine.can_step
        assert not engine.prepare() and loop._receive() and prepared == [0, 0]
        while engine.can_step:
            engine.step()
        assert loop._receive() and prepared == [0] * 5 + [-1], "what is last is done once, when nothing else is left"
        assert not engine.prepare() and prepared == [0] * 5 + [-1, 0]


@pytest.mark.parametrize(("closing", "own", "told"), [(False, True, 1), (False, False, 0), (True, True, 0)])
def test_only_the_loss_of_the_present_engine_is_reported_and_not_while_closing(
    closing: bool, own: bool, told: int
) -> None:
    """own: the lost connection is that of the engine that runs now, not of one that has been replaced."""
    reasons: list[str] = []
    process, link = object.__new__(EngineProcess), SimpleNamespace(was_ready=False)
    present: Any = link if own else SimpleNamespace()
    process._closing, process._link, process.process, process._pending_explanations = closing, present, None, {}
    process._on_death = reasons.append
    process.on_connection_lost(link)  # type: ignore[arg-type]
    assert reasons == ["the engine process ended"] * told
    assert process._link is (None if told else present)


@pytest.mark.parametrize(
    ("due", "before", "after"), [(None, 3.0, None), (0.5, 0.5, 0.5), (9.0, 3.0, 9.0)], ids=["nothing", "soon", "late"]
)
def test_an_idle_engine_wakes_for_what_is_due_and_for_memory(
    due: float | None, before: float, after: float | None
) -> None:
    """due: seconds until a grammar's compilation has taken too long; before, after: memory is given back."""
    front, back = socket.socketpair()
    with front, back:
        constraints: Any = SimpleNamespace(timeout=lambda: due)
        loop = EngineLoop(SimConfig().build(VirtualClock()), back, dict, StepWatch(), constraints)
        assert loop._idle_timeout() == before
        loop.trimmed = True
        assert loop._idle_timeout() == after


class Due(PlanDelay):
    """Plans are due at a moment of the machine's clock."""

    at = 0.0

    def remaining(self, num_tokens: int, begun: float, step_times: StepTimeModel) -> float:
        return max(0.0, self.at - time.monotonic())


def test_the_loop_reads_messages_until_the_next_plan_is_due() -> None:
    due, front, back = Due(), *socket.socketpair()
    with front, back:
        plain = SimConfig(pages=64, page_size=4, depth=1).build()
        engine = Engine(plain.scheduler, plain.executor, lookahead=1, plan_delay=due)
        loop = EngineLoop(engine, back, dict, StepWatch())
        engine.add(ask("first", 50))
        engine.step()
        due.at = time.monotonic() + 2.0
        said = [
            encode_frame(Submit([ask("second")])),
            encode_frame(Submit([ask("third")])),
            encode_frame(Abort(["second"])),
        ]
        timers = [threading.Timer(0.05 * i, front.sendall, [message]) for i, message in enumerate(said, 1)]
        for timer in timers:
            timer.start()
        assert loop._receive() and time.monotonic() >= due.at - 1e-3
        assert set(engine.scheduler.sequences) == {"first", "third"}
        assert loop._receive(), "what is due is not put off"
        for timer in timers:
            timer.join()


class HeldStore(HashStore):
    """Copies end while `ends`; `descriptor` says that there is something to poll."""

    ends, descriptor = True, -1

    def poll(self) -> Sequence[CopyDone]:
        return super().poll() if self.ends else ()

    def fileno(self) -> int:
        return self.descriptor


def test_the_loop_sleeps_while_all_that_waits_needs_blocks_that_copies_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """`again` waits for its blocks to come back, and `other` for blocks that are being written for that."""
    front, back = socket.socketpair()
    read, write = os.pipe()
    device = HashDevice(8, 4, eager=True, seed="held")
    store = HeldStore(device, 16, 0, random.Random(1), faulty=False)
    store.descriptor = read
    offload = KVOffload(store, 4)
    kv = KVCacheManager(8, 4, RadixPrefixCache(4), offload=offload)
    scheduler = Scheduler(kv, rows=4, max_num_seqs=4, max_num_batched_tokens=64, policy=make_policy("fcfs"))
    engine = Engine(scheduler, device, clock=VirtualClock())
    with front, back, open(read, "rb"), open(write, "wb", buffering=0) as waker:
        loop, steps, sleeps = EngineLoop(engine, back, dict, StepWatch()), list[int](), list[float | None]()

        def step(run: Callable[[], list[RequestStepOutput]] = engine.step) -> list[RequestStepOutput]:
            steps.append(len(scheduler.waiting))
            assert len(steps) < 100, "the loop does not sleep"
            return run()

        def select(seconds: float | None, wait: Callable[[float | None], set[int]] = loop._select) -> set[int]:
            if len(scheduler.waiting) and seconds != 0.0:
                sleeps.append(seconds)
                store.ends = True
                waker.write(b"x")
            return wait(seconds)

        def run(*requests: Request) -> int:
            begun = len(steps)
            front.sendall(encode_frame(Submit(list(requests))))
            while loop._receive() and engine.step() is not None and engine.has_pending_work:
                pass
            return len(steps) - begun

        monkeypatch.setattr(engine, "step", step)
        run(ask("first", 2, prompt=range(20)))
        run(ask("evicts", 2, prompt=range(30, 56)))
        while offload.pending:
            scheduler.poll_offload(0.0)
        store.ends = False
        monkeypatch.setattr(loop, "_select", select)
        again, other = ask("again", 2, prompt=range(20)), ask("other", 2, prompt=range(60, 84))
        assert run(again, other) < 30 and sleeps == [1.0]
        assert engine.stats.completed[-1].id == "other" and offload.stats.num_hit["host"] == 12


def test_an_engine_that_dies_is_replaced_by_the_process_that_stands_by() -> None:
    async def story() -> None:
        async with Rig(standby_after=0.0) as rig:
            for restarts in (1, 2):  # the second one stands by for the engine that the first became
                await rig.until(lambda: rig.port._standby is not None)
                standby, dead = rig.port._standby, rig.port.process
                assert standby is not None and dead is not None and standby.process is not dead
                dead.kill()
                await rig.until(lambda: rig.port.restarts == restarts and rig.port.ready())  # noqa: B023
                assert rig.port.process is standby.process
                rig.port.submit([ask(f"after {restarts}")])
                await rig.until(lambda: rig.finish(f"after {restarts}") == "length")  # noqa: B023
            standby = rig.port._standby
        assert standby is None or standby.process.poll() is not None, "nothing is left behind"

    asyncio.run(story())


@pytest.mark.parametrize("configured", [False, True])
def test_the_first_engine_may_be_a_process_that_has_been_begun(
    configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have its settings, too, and is sent none then."""
    sent, send = list[ToEngine](), _EngineConnection.send

    def spied(link: _EngineConnection, message: ToEngine) -> None:
        sent.append(message)
        send(link, message)

    monkeypatch.setattr(_EngineConnection, "send", spied)

    async def story() -> None:
        begun = spawn([sys.executable, CHILD], {})
        if configured:
            begun.sock.sendall(encode_frame(Configure({})))
            begun = begun._replace(configured=True)
        async with Rig(begun=begun) as rig:
            assert rig.port.process is begun.process and rig.port.ready()
        assert begun.process.poll() == 0
        assert [isinstance(message, Configure) for message in sent] == [True] * (not configured)

    asyncio.run(story())


def test_a_standby_process_that_has_died_itself_costs_only_the_time_it_would_have_saved() -> None:
    async def story() -> None:
        async with Rig(standby_after=0.0) as rig:
            await rig.until(lambda: rig.port._standby is not None)
            standby, dead = rig.port._standby, rig.port.process
            assert standby is not None and dead is not None
            standby.process.kill()
            standby.process.wait()
            dead.kill()
            await rig.until(lambda: rig.port.restarts == 1 and rig.port.ready())
            assert rig.port.process is not standby.process
            rig.port.submit([ask("after")])
            await rig.until(lambda: rig.finish("after") == "length")

    asyncio.run(story())


def test_no_process_stands_by_unless_it_is_asked_for() -> None:
    async def story() -> None:
        async with Rig() as rig:
            assert rig.port._standby_timer is None and rig.port._standby is None

    asyncio.run(story())
