"""What both ends of a connection to an executor send and do, message by message, as written down; without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire.engine.executor import Description
from quire.engine.timing import VirtualClock
from quire.errors import QuireError, StepFailed
from quire.executors import grpc_client, grpc_server
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract.translate import VERSION, send_description, send_masks, send_plan, send_result
from quire.executors.grpc_client import RemoteExecutor, TlsConfig
from quire.executors.grpc_server import Credentials, ExecutorServer, Refusal, Session
from quire.executors.synthetic import SyntheticExecutor
from quire.scheduler.plan import NewSequence, Plan, Result, Span
from quire.scheduler.step_time import StepCost
from quire.types import SamplingParams
from tests.calls import Calls, shown
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"
ABOUT = Description(40, 8, 4, 64, 100, lookahead=1)


def opening(row: int, *, masked: bool = False) -> Plan:
    span = Span(row, 2, 1, 1)
    return Plan((NewSequence(row, (5, 6), 0, 2),), ((row, (row + 1,)),), (span,), (0,) if masked else ())


def said(message: Any) -> str:
    return " ".join(str(message).split())


class Inner:
    """An executor whose steps do as they are asked: the first token of a plan's first opened row says what."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.fail: str = ""

    def describe(self) -> Description:
        return ABOUT

    def launch(self, plan: Plan) -> Any:
        self.calls.lines.append(f"    launch {shown(plan.spans)} {self.fail}")
        if self.fail == "launch":
            raise ValueError("no\n launch")
        fail = self.fail

        def sample(masks: Any) -> None:
            self.calls.lines.append(f"    sample {masks}")
            if fail == "sample":
                raise StepFailed("no sample")

        def result() -> Result:
            self.calls.lines.append("    result")
            if fail == "result":
                raise StepFailed("no\nresult")
            return Result([[7]], [])

        return SimpleNamespace(sample=sample, result=result)

    def reset(self) -> None:
        self.calls.lines.append("    reset")

    def close(self) -> None:
        self.calls.lines.append("    close")


def begin(epoch: int, version: int = VERSION) -> pb.Command:
    return pb.Command(epoch=epoch, begin=pb.Begin(version=version))


def step(epoch: int, number: int, plan: Plan, before: tuple[Span, ...] = ()) -> pb.Command:
    return pb.Command(epoch=epoch, step=number, plan=send_plan(plan, before))


def masks(epoch: int, number: int) -> pb.Command:
    return pb.Command(epoch=epoch, step=number, masks=send_masks([[b"\x05", None]]))


FEED = Plan((), (), (Span(0, 1, 1, 1),))
BROKEN = pb.Command(epoch=1, step=0, plan=pb.Plan(spans=[1, 2, 3]))
SESSIONS: dict[str, list[Any]] = {
    "three steps": [begin(1), step(1, 0, opening(0)), step(1, 1, FEED), step(1, 2, FEED, FEED.spans)],
    "the same spans": [
        begin(1),
        step(1, 0, opening(0)),
        pb.Command(epoch=1, step=1, plan=pb.Plan(same_spans=True)),
    ],
    "masks": [begin(1), step(1, 0, opening(0, masked=True)), step(1, 1, opening(1)), masks(1, 0), masks(1, 1)],
    "masks that fail": [begin(1), "sample", step(1, 0, opening(0, masked=True)), masks(1, 0), "", step(1, 1, FEED)],
    "a launch that fails": [begin(1), "launch", step(1, 0, opening(0)), "", step(1, 1, FEED), begin(2)],
    "a result that fails": [begin(1), "result", step(1, 0, opening(0)), None, "", step(1, 1, FEED)],
    "a new epoch after a failure": [begin(1), "launch", step(1, 0, opening(0)), "", begin(2), step(2, 0, opening(0))],
    "a row that is not open": [begin(1), step(1, 0, opening(0)), step(1, 1, FEED._replace(new_blocks=((3, (1,)),)))],
    "rows of the epoch before": [begin(1), step(1, 0, opening(0)), begin(2), step(2, 0, FEED)],
    "nothing begun": [step(1, 0, FEED)],
    "another epoch": [begin(3), step(2, 0, FEED)],
    "another version": [begin(1, VERSION + 1)],
    "a step left out": [begin(1), step(1, 1, opening(0))],
    "a step twice": [begin(1), step(1, 0, opening(0)), step(1, 0, FEED)],
    "no kind": [begin(1), pb.Command(epoch=1)],
    "a broken plan": [begin(1), BROKEN],
}


def test_an_executors_side_does_as_written_down() -> None:
    calls = Calls()
    for name, commands in SESSIONS.items():
        calls.lines += ["", name]
        inner = Inner(calls)
        session = Session(inner)  # type: ignore[arg-type]
        calls.lines.append(f"  room for {session.inbox.maxsize}")
        try:
            for command in commands:
                if isinstance(command, str):
                    inner.fail = command
                    continue
                if command is not None:
                    calls.lines.append(f"  <- {said(command)[:150]}")
                    session._handle(command)
                calls.lines.append(
                    f"    in flight {[(each.step, shown(each.handle)) for each in session.inflight]} "
                    f"without masks {session.skipping} open {session.open} next {session.next} {session.failure}"
                )
                while command is None and session.inflight:
                    calls.lines.append(f"  -> {said(session._answer())}")
            session.skipping.clear()
            while session.inflight:
                calls.lines.append(f"  -> {said(session._answer())}")
        except Refusal as refusal:
            calls.lines.append(f"  refused: {refusal.code.name} {refusal}")
    check(EXPECTED / "session.txt", "\n".join(calls.lines))


class Wire:
    """A connection whose answers are given."""

    calls = Calls()
    answers: list[Any] = []  # noqa: RUF012 - each test sets its own
    description = ABOUT
    instance = 0
    refuses: Exception | None = None

    def __init__(self, address: str, trust: Any, connect_timeout: float) -> None:
        self.calls.lines.append(f"  connects to {address} {shown(trust)} {connect_timeout}")
        self.broken: QuireError | None = None
        self.description = Wire.description
        if Wire.refuses is not None:
            raise Wire.refuses

    def send(self, command: pb.Command) -> None:
        self.calls.lines.append(f"  -> {said(command)[:150]}")

    def take(self, timeout: float) -> pb.Answer:
        self.calls.lines.append(f"  waits {timeout}")
        found = self.answers.pop(0)
        if isinstance(found, QuireError):
            self.broken = found
            raise found
        return found  # type: ignore[no-any-return]

    def queued(self) -> bool:
        return bool(self.answers)

    def close(self) -> None:
        self.calls.lines.append("  closes")


def test_an_engines_side_does_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Wire.calls = Calls()
    monkeypatch.setattr(Wire, "answers", [])
    monkeypatch.setattr(Wire, "refuses", None)
    monkeypatch.setattr(grpc_client, "Wire", Wire)

    def tried(title: str, work: Callable[[], Any]) -> Any:
        calls.lines.append(title)
        try:
            found = work()
        except QuireError as error:
            calls.lines.append(f"  {type(error).__name__} ({getattr(error, 'param', None)}): {error}")
            return None
        calls.lines.append(f"  {shown(found)}")
        return found

    def answer(epoch: int, number: int, **kind: Any) -> pb.Answer:
        kind = kind or {"result": send_result(Result([[number]], []))}
        return pb.Answer(epoch=epoch, step=number, **kind)

    remote = tried("connect", lambda: RemoteExecutor("h:1", trust=TlsConfig(b"a"), connect_timeout=3.0, deadline=4.0))
    tried("describe", remote.describe)
    first = tried("launch", lambda: remote.launch(opening(0)))
    second = tried("launch again", lambda: remote.launch(FEED))
    third = tried("the same spans", lambda: remote.launch(FEED))
    tried("done?", first.is_done)
    Wire.answers += [answer(0, 5), answer(1, 0), answer(1, 1, failure="it broke"), answer(1, 9)]
    tried("done now?", first.is_done)
    tried("masks", lambda: first.sample([[b"\x01"]]))
    tried("result", first.result)
    tried("failure", second.result)
    tried("out of order", third.result)
    tried("reset", remote.reset)
    later = tried("launch in a new epoch", lambda: remote.launch(FEED))
    Wire.answers += [answer(1, 0), answer(2, 0)]
    tried("skips what is old", later.result)
    Wire.answers += [grpc_client.executor_lost("h:1", "gone")]
    tried("lost", tried("launch", lambda: remote.launch(FEED)).result)
    tried("reset of what is lost", remote.reset)
    tried("send to nowhere", lambda: remote.send(begin(1)))
    tried("result of nowhere", later.result)
    tried("done of nowhere", later.is_done)
    tried("launch connects again", lambda: remote.launch(FEED))
    tried("close", remote.close)
    tried("close again", remote.close)
    monkeypatch.setattr(Wire, "description", Description(41, 8, 4, 64, 100, lookahead=1))
    tried("another executor there", lambda: remote.launch(FEED))
    monkeypatch.setattr(Wire, "refuses", grpc_client.executor_lost("h:1", "away"))
    tried("no executor there", lambda: remote.launch(FEED))
    tried("none at first", lambda: RemoteExecutor("h:1"))
    check(EXPECTED / "remote.txt", "\n".join(calls.lines))


class Broken(grpc.RpcError):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "too\n  slow"


def test_connections_are_opened_and_served_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()

    def method(kind: str, returns: Callable[[], Any]) -> Callable[..., Any]:
        def made(path: str, **named: Any) -> Any:
            calls.lines.append(f"  {kind} {path} {sorted(named)}")
            return lambda *given, **rest: calls.lines.append(f"    called {rest}") or returns()

        return made

    def channel(describe: Callable[[], Any]) -> Any:
        stream = SimpleNamespace(cancel=calls.to("  cancel"), __iter__=None)
        return SimpleNamespace(
            unary_unary=method("unary", describe),
            stream_stream=method("stream", lambda: stream),
            close=calls.to("  channel.close"),
        )

    def broken() -> Any:
        raise Broken

    wrong = send_description(ABOUT, 3)
    wrong.version = VERSION + 1
    threads = SimpleNamespace(Thread=lambda **named: SimpleNamespace(start=lambda: calls.say("  thread", named)))
    monkeypatch.setattr(grpc_client, "threading", threads)
    for describe in (lambda: send_description(ABOUT, 3), lambda: wrong, broken):
        for name in ("insecure_channel", "secure_channel"):
            monkeypatch.setattr(grpc, name, calls.to(name, channel(describe)))
        monkeypatch.setattr(grpc, "ssl_channel_credentials", calls.to("ssl", "credentials"))
        for trust in (None, TlsConfig(b"a", b"c", b"k")):
            for timeout in (0.0, 2.5):
                try:
                    wire = grpc_client.Wire("h:1", trust, timeout)
                    calls.say("  describes", wire.description == ABOUT)
                    wire.close()
                except QuireError as error:
                    calls.lines.append(f"  {type(error).__name__}: {error}")
    server = SimpleNamespace(
        add_generic_rpc_handlers=calls.to("handlers"),
        add_insecure_port=calls.to("insecure", 5),
        add_secure_port=calls.to("secure", 6),
        start=calls.to("start"),
        wait_for_termination=calls.to("wait"),
        stop=lambda grace: calls.lines.append(f"stop {grace}") or SimpleNamespace(wait=calls.to("stopped")),
    )
    monkeypatch.setattr(grpc, "server", lambda pool, options: calls.say("server", [pool, *options]) or server)
    monkeypatch.setattr(grpc, "ssl_server_credentials", calls.to("ssl_server", "credentials"))
    for credentials in (None, Credentials(b"c", b"k"), Credentials(b"c", b"k", b"ca")):
        it = ExecutorServer(Inner(calls), "h:1", credentials)  # type: ignore[arg-type]
        calls.say("port", it.port)
        it.wait()
        it.stop()
        it.stop(1.5)

    def aborted(code: grpc.StatusCode, why: str) -> None:
        raise Refusal(code, why)

    context: Any = SimpleNamespace(abort=aborted)
    for work in (
        lambda: said(it._describe(pb.Hello(version=VERSION), context))[:10],
        lambda: it._describe(pb.Hello(version=0), context),
        lambda: [said(each) for each in it._run(iter([begin(1)]), context)],
        lambda: [said(each) for each in it._run(iter([step(1, 0, opening(0))]), context)],
    ):
        try:
            calls.say("answered", work())
        except Refusal as refusal:
            calls.lines.append(f"aborted {refusal.code.name}: {refusal}")
    monkeypatch.setattr(grpc_server, "TAKEOVER_TIMEOUT", 0.0)
    it._held.acquire()
    with pytest.raises(Refusal) as refused:
        list(it._run(iter([]), context))
    calls.lines.append(f"aborted {refused.value.code.name}: {refused.value}")
    check(EXPECTED / "connections.txt", "\n".join(calls.lines))


def test_an_executor_without_weights_steps_as_written_down() -> None:
    clock = VirtualClock()
    lines = []
    for cost in (StepCost(0.5, 0.125, 0.25), None):
        it = SyntheticExecutor(rows=3, vocab_size=97, clock=clock, depth=1, **({} if cost is None else {"cost": cost}))
        lines.append(shown(it.describe()))
        sampling = SamplingParams(logprobs=2)
        opened = Plan(
            (NewSequence(0, (1, 2, 3), 1, 3, sampling, 5, 1), NewSequence(2, (4, 5), 0, 1)),
            (),
            (Span(0, 2, 1, 1), Span(2, 1, 0, 0)),
        )
        plans = [opened, FEED, Plan((), (), (Span(2, 1, 1, 1), Span(0, 1, 1, 1))), FEED]
        handles = [it.launch(plan) for plan in plans[:2]]
        for i in range(len(plans)):
            handle = handles[i]
            lines.append(f"{clock.now()} done {handle.done} {handle.is_done()}")
            lines.append(f"  {shown(handle.result())} at {clock.now()} {handle.is_done()}")
            if i + 2 < len(plans):
                handles.append(it.launch(plans[i + 2]))
        it.close()
        lines.append(f"{it.state} {it.lengths} {it.num_logprobs} {it.busy_until}")
    check(EXPECTED / "synthetic.txt", "\n".join(lines))
