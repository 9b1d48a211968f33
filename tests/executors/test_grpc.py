"""An executor elsewhere: the contract, the connection, and what happens when either breaks."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire.engine.engine import Engine
from quire.engine.executor import Description
from quire.errors import ExecutorLost, InvalidConfig, StepFailed
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract.translate import (
    RUN,
    SERVICE,
    read_description,
    read_masks,
    read_plan,
    read_result,
    send_description,
    send_masks,
    send_plan,
    send_result,
)
from quire.executors.grpc_client import RemoteExecutor, TlsConfig
from quire.executors.grpc_server import Credentials, ExecutorServer, Session
from quire.executors.synthetic import SyntheticExecutor
from quire.frontend.supervisor import free_port
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import NewSequence, Plan, Result, Span
from quire.scheduler.scheduler import Scheduler
from quire.types import SamplingParams, TokenLogprobs
from tests.executors.wired import Killable, served
from tests.hash_model import HashDevice, naive

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"pages": 64, "page_size": 4, "rows": 8, "depth": 1}
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.1,
    top_k=-1,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
    min_tokens=3,
    max_tokens=None,
    logit_bias={7: -100.0, 0: 0.1},
    bad_words_token_ids=((1,), (2, 3)),
    allowed_token_ids=(4, 5),
    logprobs=0,
    prompt_logprobs=-1,
)


def engine(executor: Any, depth: int = 1) -> Engine:
    about = executor.describe()
    scheduler = Scheduler(
        KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, True)),
        rows=about.num_rows,
        max_num_seqs=4,
    )
    return Engine(scheduler, executor, lookahead=depth)


def finish(it: Engine) -> dict[str, Any]:
    """By id: (tokens, finish, error)."""
    out: dict[str, Any] = {}
    while it.has_pending_work:
        for event in it.step():
            tokens = out.get(event.id, ((),))[0]
            out[event.id] = (tokens + event.tokens, event.finish, event.error)
    return out


# ---------------------------------------------------------------- the contract


def test_the_committed_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", f"--python_out={tmp_path}"]
    subprocess.run([*argv, "proto/quire/executors/contract/executor.proto"], cwd=ROOT, check=True, timeout=600)
    written = (ROOT / "src/quire/executors/contract/executor_pb2.py", *tmp_path.rglob("executor_pb2.py"))
    ours, fresh = ([x for x in path.read_text().splitlines() if "AddSerializedFile" in x] for path in written)
    assert ours == fresh and len(ours) == 1, "run `make proto`"


def test_a_plan_arrives_as_it_was_sent() -> None:
    spans = (Span(3, 5, 0, 0), Span(1, 1, 1, 1))
    opened = (
        NewSequence(3, (5, 0, 9), 1, 2, EVERYTHING, -(1 << 63), 2, frozenset({1, 8}), 40),
        NewSequence(1, (1,), 0, 1, SamplingParams(temperature=0.0, max_tokens=None), 5),
    )
    plan = Plan(opened, ((3, (7, 8)), (1, ())), spans, (1,), (0, 4))
    arrived = read_plan(pb.Plan.FromString(send_plan(plan, ()).SerializeToString()), ())
    assert arrived == plan._replace(new_sequences=(opened[0]._replace(seed=1 << 63), opened[1]))


def test_equal_spans_are_sent_once_and_arrive_as_the_same_object() -> None:
    spans = (Span(0, 1, 1, 1),) * 3
    sent = send_plan(Plan((), (), spans), spans)
    assert sent.same_spans and not sent.spans and sent.ByteSize() == 2
    assert read_plan(sent, spans).spans is spans


def test_a_result_arrives_as_it_was_sent() -> None:
    score = TokenLogprobs(3, -0.1, 2, ((4, -0.05), (3, -0.1)))
    for result in (
        Result([[1], [2]], []),
        Result([], []),
        Result([[1, 2], [], [0]], [[5, 6], []], {0: [score, score]}, {1: [score]}, {1: "no"}),
    ):
        assert read_result(pb.Result.FromString(send_result(result).SerializeToString())) == result


def test_masks_and_descriptions_arrive_as_they_were_sent() -> None:
    masks = [[None, b"\x00\x01"], [b""]]
    assert read_masks(pb.Masks.FromString(send_masks(masks).SerializeToString())) == masks
    about = Description(
        num_blocks=9, block_size=16, num_rows=4, max_model_len=99, vocab_size=50, lookahead=2, max_step_tokens=77,
        num_drafts=3, supports_masks=False, block_bytes=1 << 40, device="cuda", dtype="bfloat16",
        step_times={(1, 0): 0.25}, draft_catch_up_seconds=0.5, draft_kv_share=0.1,
        static_gauges={"a": 1.5},
    )  # fmt: skip
    assert read_description(pb.Description.FromString(send_description(about, 1).SerializeToString())) == about


# ---------------------------------------------------------------- the connection


def test_a_remote_executor_answers_as_the_one_behind_it() -> None:
    device = HashDevice(64, 4)
    with served(device) as remote:
        it = engine(remote)
        prompts = {str(i): tuple(range(i + 1, 9)) for i in range(6)}
        for id, prompt in prompts.items():
            it.submit(prompt, 12, id=id)
        said = finish(it)
    for id, prompt in prompts.items():
        assert list(said[id][0]) == naive(prompt, 12, frozenset(), (0, 0), None)[len(prompt) :]


def test_an_executor_prepares_itself_while_it_has_nothing_to_do_and_a_step_is_waited_for() -> None:
    device, done = HashDevice(64, 4), list[int]()
    begun = threading.Event()

    def prepare() -> bool:
        assert not device.queue
        done.append(len(done))
        begun.set()
        return len(done) < 1000

    with served(device, prepare) as remote:
        it = engine(remote)
        it.submit((3, 1, 4), 5, id="0")
        assert finish(it)["0"][0] == tuple(naive((3, 1, 4), 5, frozenset(), (0, 0), None)[3:])
        assert begun.wait(60)


def test_a_step_that_fails_remotely_is_recovered_from_without_a_new_connection() -> None:
    device = HashDevice(64, 4)
    failing = iter([False] * 5 + [True])
    device.hiccup = lambda: next(failing, False)
    with served(device) as remote:
        it = engine(remote)
        wire = remote.wire
        it.submit((1, 2, 3), 12, id="a")
        said = finish(it)
        assert remote.wire is wire and it.failures == 1 and remote.epoch == 2
    assert list(said["a"][0]) == naive((1, 2, 3), 12, frozenset(), (0, 0), None)[3:]


def test_a_row_that_was_never_opened_is_named() -> None:
    with served(SyntheticExecutor(**SIZES)) as remote:
        handle = remote.launch(Plan((), (), (Span(5, 1, 1, 1),)))
        with pytest.raises(StepFailed, match="row 5 is not open in epoch 1: open it first"):
            handle.result()


def test_a_second_engine_is_refused_while_the_first_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executors.grpc_server.TAKEOVER_TIMEOUT", 0.05)
    with served(SyntheticExecutor(**SIZES)) as first:
        first.launch(Plan((NewSequence(0, (1,), 0, 1),), ((0, (1,)),), (Span(0, 1, 1, 1),))).result()
        second = RemoteExecutor(first.address)
        handle = second.launch(Plan((), (), ()))
        with pytest.raises(ExecutorLost, match="resource exhausted: another engine uses this executor"):
            handle.result()
        second.close()
        assert first.launch(Plan((), (), (Span(0, 1, 1, 1),))).result().tokens


def test_another_version_is_refused_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ExecutorServer(SyntheticExecutor(**SIZES), "127.0.0.1:0")
    with monkeypatch.context() as patch:
        patch.setattr("quire.executors.grpc_client.VERSION", 2)
        with pytest.raises(InvalidConfig, match="version 2 of the contract and this executor version 1"):
            RemoteExecutor(f"127.0.0.1:{host.port}")
    host.stop()


@pytest.mark.parametrize(
    ("commands", "complaint"),
    [
        ([pb.Command(epoch=1, plan=pb.Plan())], "epoch 1 has not begun"),
        ([pb.Command(epoch=1, begin=pb.Begin(version=9))], "version 9"),
        ([pb.Command(epoch=1, begin=pb.Begin(version=1, instance=1))], "was started again"),
        ([pb.Command(epoch=1, begin=pb.Begin(version=1)), pb.Command(epoch=2, plan=pb.Plan())], "epoch 2 has not"),
        ([pb.Command(epoch=1, begin=pb.Begin(version=1)), pb.Command(epoch=1, step=3, plan=pb.Plan())], "0 was due"),
        (
            [pb.Command(epoch=1, begin=pb.Begin(version=1)), pb.Command(epoch=1, plan=pb.Plan(spans=[1, 2, 3]))],
            "cannot be read",
        ),
        ([pb.Command(epoch=1, begin=pb.Begin(version=1)), pb.Command(epoch=1)], "of an unknown kind"),
    ],
)
def test_an_invalid_message_ends_the_stream_with_a_reason(commands: list[pb.Command], complaint: str) -> None:
    host = ExecutorServer(SyntheticExecutor(**SIZES), "127.0.0.1:0")
    with grpc.insecure_channel(f"127.0.0.1:{host.port}") as channel:
        run = channel.stream_stream(f"/{SERVICE}/{RUN}", pb.Command.SerializeToString, pb.Answer.FromString)
        with pytest.raises(grpc.RpcError) as caught:
            list(run(iter(commands), timeout=100))
    host.stop()
    assert complaint in (caught.value.details() or "")


def test_an_address_without_a_server_and_one_that_cannot_be_bound_are_errors() -> None:
    with pytest.raises(InvalidConfig, match=r"the executor at 127\.0\.0\.1:1 is lost"):
        RemoteExecutor("127.0.0.1:1", connect_timeout=0.2)
    with pytest.raises(InvalidConfig, match="cannot listen"):
        ExecutorServer(SyntheticExecutor(**SIZES), "203.0.113.7:1")


def test_a_proxy_for_the_web_is_not_asked_for_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with served(SyntheticExecutor(**SIZES)) as remote:
        assert remote.describe().num_rows


def test_an_executor_that_is_started_later_is_waited_for() -> None:
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(RemoteExecutor, address, connect_timeout=100.0)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        host = ExecutorServer(SyntheticExecutor(**SIZES), address)
        remote = waiting.result(timeout=100)
    assert remote.describe().num_rows == host.executor.describe().num_rows
    remote.close()
    host.stop()


class Stuck(SyntheticExecutor):
    """Never comes back from a step until it is released."""

    free = threading.Event()

    def launch(self, plan: Plan) -> Any:
        self.free.wait(200)
        return super().launch(plan)


def test_a_step_that_takes_longer_than_its_deadline_fails_its_requests() -> None:
    with served(Stuck(**SIZES), deadline=0.2) as remote:
        it = engine(remote)
        it.submit((1, 2), 4, id="a")
        [event] = (event for _ in range(3) for event in it.step())
        Stuck.free.set()
    assert (event.id, event.finish, event.status) == ("a", "error", 503)
    assert event.error == "the executor was lost while this request ran: it may be sent again"


def test_after_a_step_without_an_answer_the_next_one_goes_over_a_new_connection() -> None:
    executor = Stuck(**SIZES)
    executor.free = threading.Event()
    with served(executor, deadline=0.05) as remote:
        hung = remote.wire
        assert hung is not None
        with pytest.raises(ExecutorLost, match=r"no answer to a step within 0\.05 s"):
            remote.launch(Plan((), (), ())).result()
        with pytest.raises(ExecutorLost, match="no answer to a step"):
            hung.send(pb.Command())
        remote.reset()
        assert remote.wire is not hung
        executor.free.set()


def test_a_step_is_done_when_its_answer_has_arrived() -> None:
    executor = Stuck(**SIZES)
    executor.free = threading.Event()
    with served(executor) as remote:
        handle = remote.launch(Plan((), (), ()))
        assert not handle.is_done()
        executor.free.set()
        deadline = time.monotonic() + 100
        while not handle.is_done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert handle.result() == Result([], [])
        remote.close()
        assert handle.is_done(), "nothing is waited for where there is no connection"


def test_commands_that_are_not_read_wait_at_the_sender() -> None:
    """A client that sends and sends is not read further than a few steps ahead."""
    executor = Stuck(**SIZES)
    executor.free = threading.Event()
    host = ExecutorServer(executor, "127.0.0.1:0")
    sent = 0

    def flood() -> Iterator[pb.Command]:
        nonlocal sent
        yield pb.Command(epoch=1, begin=pb.Begin(version=1))
        for step in range(4000):
            sent += 1
            tokens = [7] * 20_000
            opened = [pb.Open(row=0, tokens=tokens, prompt=len(tokens))]
            yield pb.Command(epoch=1, step=step, plan=pb.Plan(opened=opened))

    with grpc.insecure_channel(f"127.0.0.1:{host.port}") as channel:
        run = channel.stream_stream(f"/{SERVICE}/{RUN}", pb.Command.SerializeToString, pb.Answer.FromString)
        call = run(flood())
        before = -1
        while before != sent:
            before = sent
            time.sleep(0.3)
        call.cancel()
    executor.free.set()
    host.stop()
    assert 0 < sent < 1000


# ---------------------------------------------------------------- when it breaks


class Gate:
    """A port that passes bytes on, and can be shut and opened: a connection that drops while both ends live."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.pipes: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self.pipes += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                b.sendall(data)
        except OSError:
            """Cut."""

    def cut(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.shutdown(socket.SHUT_RDWR)
            except OSError:
                """The other end was first."""
            pipe.close()
        self.pipes.clear()

    def close(self) -> None:
        self.cut()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def test_a_dropped_connection_fails_what_is_in_flight_and_reopens_the_rest() -> None:
    device = HashDevice(64, 4)
    host = ExecutorServer(device, "127.0.0.1:0")
    gate = Gate(host.port)
    remote = RemoteExecutor(f"127.0.0.1:{gate.port}")
    it = engine(remote)
    for i in range(6):  # four run, two wait
        it.submit((1, 2, i), 40, id=str(i))
    said: dict[str, list[int]] = {}
    ends: dict[str, Any] = {}
    steps = 0
    while it.has_pending_work:
        steps += 1
        if steps == 10:
            gate.cut()
        for event in it.step():
            said.setdefault(event.id, []).extend(event.tokens)
            ends[event.id] = event.finish
    assert [ends[str(i)] for i in range(6)] == ["error"] * 4 + ["length"] * 2
    for i in range(6):
        want = naive((1, 2, i), 40, frozenset(), (0, 0), None)[3:]
        assert said[str(i)] == (want if i > 3 else want[: len(said[str(i)])]) and said[str(i)]
    assert it.gauges().used_blocks == 0
    remote.close()
    gate.close()
    host.stop()


def test_a_stream_that_arrives_at_another_instance_is_refused_and_the_next_one_is_not() -> None:
    with served(SyntheticExecutor(**SIZES)) as remote:
        assert remote.wire is not None
        remote.wire.instance -= 1
        remote.reset()
        it = engine(remote)
        it.submit((1, 2), 4, id="a")
        assert finish(it)["a"][1:] == ("error", "the executor was lost while this request ran: it may be sent again")
        it.submit((1, 2), 4, id="b")
        assert finish(it)["b"][1] == "length"


def test_an_executor_that_comes_back_with_other_sizes_is_not_used() -> None:
    host = ExecutorServer(SyntheticExecutor(**SIZES), f"127.0.0.1:{free_port()}")
    remote = RemoteExecutor(f"127.0.0.1:{host.port}")
    host.stop()
    other = ExecutorServer(SyntheticExecutor(**SIZES | {"pages": 65}), f"127.0.0.1:{host.port}")
    it = engine(remote)
    for _ in range(2):
        it.submit((1, 2), 4, id="a")
        assert finish(it)["a"][1] == "error"
    with pytest.raises(ExecutorLost, match="another model or other sizes: restart this server"):
        remote.launch(Plan((), (), ()))
    other.stop()


def test_a_killed_executor_fails_its_requests_and_serves_new_ones_after_a_restart(tmp_path: Path) -> None:
    first = Killable(tmp_path, free_port())
    remote = RemoteExecutor(f"127.0.0.1:{first.port}")
    it = engine(remote)
    want = it.submit((300, 301, 302), 200, id="whole")
    whole = finish(it)[want][0]
    assert len(whole) == 200
    for i in range(3):
        it.submit((300, 301, 302), 200, id=str(i))
    for _ in range(20):
        it.step()
    first.end()
    said = finish(it)
    assert {said[str(i)][1] for i in range(3)} == {"error"}
    it.submit((300, 301, 302), 200, id="too soon")
    assert finish(it)["too soon"][1:] == (
        "error",
        "the executor was lost while this request ran: it may be sent again",
    )
    second = Killable(tmp_path, first.port)
    it.submit((300, 301, 302), 200, id="again")
    assert finish(it)["again"] == (whole, "length", None)
    remote.close()
    assert second.end(15) == 0


# ---------------------------------------------------------------- who may come in

TLS = Path(__file__).parent / "tls"


@pytest.mark.parametrize("mutual", [False, True], ids=["server", "both"])
def test_tls_admits_clients_that_trust_and_are_trusted(mutual: bool) -> None:
    authority, certificate, key = ((TLS / name).read_bytes() for name in ("ca.pem", "end.pem", "end.key"))
    credentials = Credentials(certificate, key, authority if mutual else None)
    host = ExecutorServer(SyntheticExecutor(**SIZES), "127.0.0.1:0", credentials)
    address = f"127.0.0.1:{host.port}"
    trust = TlsConfig(authority, certificate, key) if mutual else TlsConfig(authority)
    remote = RemoteExecutor(address, trust=trust)
    assert remote.launch(Plan((), (), ())).result() == Result([], [])
    remote.close()
    strangers = [None, *([TlsConfig(authority)] if mutual else [])]
    for stranger in strangers:
        with pytest.raises(InvalidConfig, match="is lost"):
            RemoteExecutor(address, trust=stranger, connect_timeout=0.3)
    host.stop()


class Failing(SyntheticExecutor):
    """Its first result is an error; counts launches."""

    launched = 0

    def launch(self, plan: Plan) -> Any:
        self.launched += 1
        handle = super().launch(plan)
        return SimpleNamespace(result=self.fail) if self.launched == 1 else handle

    def fail(self) -> Result:
        raise StepFailed("broken")


def test_after_a_failed_result_no_step_of_the_epoch_is_launched() -> None:
    """Steps that were sent ahead would run on rows whose state is not known."""
    executor, answers = Failing(**SIZES), list[pb.Answer]()
    first = Plan((NewSequence(0, (1, 2), 0, 2),), ((0, (1,)),), (Span(0, 2, 1, 1),))
    answered = threading.Semaphore(0)

    def commands() -> Iterator[pb.Command]:
        yield pb.Command(epoch=1, begin=pb.Begin(version=1))
        yield pb.Command(epoch=1, step=0, plan=send_plan(first, ()))
        answered.acquire(timeout=60)
        yield pb.Command(epoch=1, step=1, plan=send_plan(Plan((), (), (Span(0, 1, 1, 1),)), first.spans))
        answered.acquire(timeout=60)
        yield pb.Command(epoch=2, begin=pb.Begin(version=1))
        yield pb.Command(epoch=2, step=0, plan=send_plan(first, ()))
        answered.acquire(timeout=60)

    for answer in Session(executor).run(commands()):
        answers.append(answer)
        answered.release()
    assert [(answer.epoch, answer.step, answer.failure) for answer in answers] == [
        (1, 0, "broken"),
        (1, 1, "broken"),
        (2, 0, ""),
    ]
    assert executor.launched == 2
