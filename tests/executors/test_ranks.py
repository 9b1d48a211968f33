"""What holds ranks together: plans out, one result in, and what becomes of requests when a rank is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.engine import Engine
from quire.engine.protocol import FrameReader, encode_frame
from quire.errors import InvalidModel, RankLost
from quire.executors import ranks
from quire.executors.rank_loop import RankLink, RankLoop
from quire.executors.ranks import (
    Activity,
    ChildProcess,
    FromRank,
    HandMasks,
    Launch,
    LoadImage,
    Rank,
    RankedExecutor,
    RankPlace,
    Ranks,
    RankShape,
    Reset,
    StepDone,
    ToRank,
    child_processes,
)
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import EncodeSpan, ImageSpan, NewSequence, Plan, Result, Span
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import PromptImage, SamplingParams, TokenLogprobs
from tests.hash_model import POISON, naive
from tests.pairs import in_turn

ROOT = Path(__file__).parents[2]
PROMPT = (3, 1, 4, 1, 5)


class Started:
    """Starts ranks and remembers their processes. faults: settings of each start; the last one's are repeated."""

    def __init__(self, size: int | RankShape, *faults: dict[str, Any]) -> None:
        self.shape = size if isinstance(size, RankShape) else RankShape(size)
        self.faults, self.count = faults or ({},), 0
        self.pids: list[int] = []

    def __call__(self) -> Ranks:
        settings = self.faults[min(self.count, len(self.faults) - 1)]
        self.count += 1
        if self.count > 1:
            ranks.SILENCE = 60.0  # nobody is stopped any more: a busy machine must not look like it
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        start = child_processes([sys.executable, "-m", "tests.executors.rank_stub"], environment)
        made = Ranks(start, settings, self.shape)
        self.pids += [rank.process.process.pid for rank in made.ranks if isinstance(rank.process, ChildProcess)]
        return made

    def left(self) -> list[int]:
        """Processes that are still there."""
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Started` changes it."""
    monkeypatch.setattr(ranks, "SILENCE", ranks.SILENCE)


@pytest.fixture
def executor_of() -> Iterator[Callable[..., tuple[RankedExecutor, Started]]]:
    made: list[tuple[RankedExecutor, Started]] = []

    def start(size: int | RankShape, *faults: dict[str, Any]) -> tuple[RankedExecutor, Started]:
        started = Started(size, *faults)
        made.append((RankedExecutor(started), started))
        return made[-1]

    yield start
    for executor, started in made:
        executor.close()
        assert not started.left()


def engine(executor: RankedExecutor, lookahead: int = 0, drafts: int = 0) -> Engine:
    about = executor.describe()
    scheduler = Scheduler(
        KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, True)),
        rows=about.num_rows,
        max_num_seqs=4,
        speculation=FixedDrafts(drafts),
    )
    return Engine(scheduler, executor, lookahead=lookahead)


def finish(it: Engine) -> dict[str, Any]:
    """By id: (tokens, finish, error)."""
    out: dict[str, Any] = {}
    while it.has_pending_work:
        for event in it.step():
            tokens = out.get(event.id, ((),))[0]
            out[event.id] = (tokens + event.tokens, event.finish, event.error)
    return out


def expected(prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    return tuple(naive(prompt, new, frozenset(), (0, 0), None)[len(prompt) :])


@pytest.mark.parametrize(("size", "lookahead", "drafts"), [(1, 0, 0), (2, 1, 0), (2, 0, 2), (4, 2, 1)])
def test_ranks_answer_as_one_executor_does(
    size: int, lookahead: int, drafts: int, executor_of: Callable[..., tuple[RankedExecutor, Started]]
) -> None:
    executor, started = executor_of(size, {"drafts": drafts})
    assert len(started.left()) == size
    it = engine(executor, lookahead, drafts)
    for i in range(6):
        it.submit((*PROMPT, i), 9, id=str(i))
    assert finish(it) == {str(i): (expected((*PROMPT, i), 9), "length", None) for i in range(6)}


def test_a_request_that_fails_on_every_rank_fails_alone(
    executor_of: Callable[..., tuple[RankedExecutor, Started]],
) -> None:
    executor, started = executor_of(2)
    it = engine(executor)
    it.submit((*PROMPT, POISON), 5, id="poison")
    it.submit(PROMPT, 5, id="good")
    done = finish(it)
    assert done["good"] == (expected(PROMPT, 5), "length", None)
    assert done["poison"][1] == "error" and "could not run this request" in done["poison"][2]
    assert started.count == 1, "no rank was started again"


FAULTS = {
    "killed": "was ended by signal 9",
    "exit": "ended with exit code 9",
    "stopped": "has not answered for",
    "waits, and keeps Python's lock": "has not answered for",
    "memory": "could not run a step (MemoryError): send the request again",
}


@pytest.mark.parametrize(
    ("faulty", "fault", "said"),
    in_turn(((at + step) % 2, *each) for at, each in enumerate(FAULTS.items()) for step in (0, 1)),
)
def test_a_lost_rank_fails_the_requests_on_it_by_name_and_others_run_on_new_ranks(
    fault: str,
    said: str,
    faulty: int,
    executor_of: Callable[..., tuple[RankedExecutor, Started]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "SILENCE", 1.5)
    monkeypatch.setattr(ranks, "PING_INTERVAL", 0.2)
    executor, started = executor_of(2, {"fault": fault, "faulty": faulty}, {})
    it = engine(executor, lookahead=1)
    for i in range(6):
        it.submit((*PROMPT, i), 9, id=str(i))
    first = list(started.pids)
    done = finish(it)
    lost = {id: each for id, each in done.items() if each[1] == "error"}
    assert set(lost) == {"0", "1", "2", "3"}, "four run at once, and two wait"
    assert all(f"rank {faulty} of 2 (process {first[faulty]}) {said}" in each[2] for each in lost.values())
    assert isinstance(it.lost, RankLost)
    assert fault != "memory" or "there is no memory left on this rank" in str(it.lost), "which is for the log"
    assert all(done[id] == (expected((*PROMPT, int(id)), 9), "length", None) for id in ("4", "5"))
    assert started.count == 2 and not set(first) & set(started.left())


def test_a_stage_that_fails_for_want_of_a_lost_one_is_not_to_blame(
    executor_of: Callable[..., tuple[RankedExecutor, Started]],
) -> None:
    """The first stage's connection breaks before the engine sees that the second has ended."""
    executor, started = executor_of(RankShape(1, 2), {"fault": "exits after its neighbour has failed", "at": 1}, {})
    it = engine(executor)
    it.submit(PROMPT, 9)
    plan = it.scheduler.plan()
    assert plan is not None
    with pytest.raises(RankLost, match=rf"rank 1 of 2 \(process {started.pids[1]}\) ended with exit code 9"):
        executor.launch(plan).result()


def test_a_rank_that_ends_while_nothing_runs_is_found_by_its_descriptor(
    executor_of: Callable[..., tuple[RankedExecutor, Started]],
) -> None:
    executor, started = executor_of(2)
    waiting = executor.exit_fds()
    try:
        os.kill(started.pids[1], signal.SIGKILL)
        with ranks.selectors.DefaultSelector() as selector:
            for fd in waiting:
                selector.register(fd, ranks.selectors.EVENT_READ)
            assert [key.fd for key, _ in selector.select(30)] == [waiting[1]]
    finally:
        for fd in waiting:
            os.close(fd)


def test_ranks_prepare_together_until_none_has_anything_left(
    executor_of: Callable[..., tuple[RankedExecutor, Started]],
) -> None:
    executor, _ = executor_of(2, {"left": [1, 3]})
    assert [executor.prepare_next() for _ in range(4)] == [True, True, False, False]
    it = engine(executor)
    it.submit(PROMPT, 9)
    assert [*finish(it).values()] == [(expected(PROMPT, 9), "length", None)]


def test_a_rank_lost_while_preparing_fails_the_next_step_and_new_ranks_prepare(
    executor_of: Callable[..., tuple[RankedExecutor, Started]],
) -> None:
    executor, started = executor_of(2, {"left": [2, -1]}, {"left": [2, 2]})
    lost = rf"rank 1 of 2 \(process {started.pids[1]}\) was ended by signal 9"
    assert not executor.prepare_next()
    it = engine(executor)
    it.submit(PROMPT, 9)
    plan = it.scheduler.plan()
    assert plan is not None
    with pytest.raises(RankLost, match=lost):
        executor.launch(plan)
    executor.reset()
    assert not executor.prepare_next(), "there are no ranks"
    executor.launch(plan).result()
    assert executor.prepare_next()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("refused", InvalidModel, "the checkpoint is broken here"),
        ("stillborn", RankLost, "rank 1 of 2 .* ended with exit code 7"),
    ],
)
def test_ranks_that_cannot_start_leave_nothing(fault: str, error: type[Exception], said: str) -> None:
    started = Started(2, {"fault": fault, "faulty": 1})
    before = children()
    with pytest.raises(error, match=said):
        RankedExecutor(started)
    assert children() == before


def children() -> set[str]:
    """Processes that this one has started."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_ranks_end_with_the_process_that_started_them_even_while_stopped(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        from tests.executors.test_ranks import Started
        from quire.executors.ranks import RankedExecutor
        started = Started(2)
        executor = RankedExecutor(started)
        os.kill(started.pids[1], signal.SIGSTOP)
        print(*started.pids, flush=True)
        time.sleep(600)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 2
        process.kill()
    deadline = time.monotonic() + 60
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank was left behind"
        time.sleep(0.05)


def running(pid: str) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Silent:
    """A process that reads nothing."""

    name = "process 1"
    killed = False
    does = Activity()

    def activity(self) -> Activity:
        return self.does

    def exit_code(self) -> str:
        raise AssertionError("it has not ended")

    def exit_fd(self) -> int:
        raise AssertionError

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None: ...


@pytest.mark.parametrize(
    ("computes", "until", "stopped", "starting", "found"),
    [
        (0.0, 0, False, False, ranks.SILENCE),
        (ranks.COMPUTES / 10, 99, False, False, ranks.SILENCE),
        (ranks.COMPUTES, 99, False, False, ranks.STUCK),
        (ranks.COMPUTES, 9, False, False, 9 + ranks.SILENCE),
        (0.0, 0, False, True, ranks.STUCK),
        (0.0, 0, True, True, ranks.SILENCE),
    ],
    ids=[
        "idle",
        "looks whether it is needed",
        "computes",
        "is stopped later",
        "meets others",
        "is stopped at its start",
    ],
)
def test_a_silent_rank_counts_as_hung_once_it_does_nothing(
    computes: float, until: int, stopped: bool, starting: bool, found: float
) -> None:
    """computes: so many seconds of processor time in each second until that one."""
    process = Silent()
    rank: Any = Rank(process, Any)
    for second in range(100):
        process.does = Activity(1.01 * computes * min(second, until), stopped)
        if rank.hung(float(second), starting=starting):
            break
    assert second == found + 1


def test_a_rank_that_computes_and_keeps_pythons_lock_is_waited_for(
    executor_of: Callable[..., tuple[RankedExecutor, Started]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SILENCE", 0.8)
    monkeypatch.setattr(ranks, "COMPUTES", 0.02)
    monkeypatch.setattr(ranks, "PING_INTERVAL", 0.05)
    executor, started = executor_of(1, {"fault": "computes, and keeps Python's lock", "faulty": 0})
    it = engine(executor)
    it.submit(PROMPT, 9)
    assert [*finish(it).values()] == [(expected(PROMPT, 9), "length", None)]
    assert started.count == 1


def test_what_a_process_does_is_known_while_it_runs_and_while_it_is_stopped() -> None:
    code = "import os, signal; sum(range(10_000_000)); os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        child = ChildProcess(process)
        while not (found := child.activity()).stopped:
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert found.computed > 0.0 and child.activity() == Activity()


def test_a_rank_that_takes_no_message_does_not_hold_up_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    process, place = Silent(), RankPlace("127.0.0.1", 0, 1)
    here, there = socket.socketpair()
    monkeypatch.setattr(ranks, "SILENCE", 0.01)
    made = Ranks(lambda shape: iter([(Rank(process, here), place)]), {}, RankShape())
    with there, pytest.raises(RankLost, match=r"rank 0 of 1 \(process 1\) has taken no message"):
        made.broadcast(LoadImage(1, PromptImage(0, 2, 1, 1, bytes(32 << 20), b"digest")))
    made.kill()
    assert process.killed


def test_a_rank_that_cannot_read_a_message_says_so(caplog: pytest.LogCaptureFixture) -> None:
    here, there = socket.socketpair()
    over = threading.Event()
    with here, there:
        RankLink(there, over.set)
        here.sendall((3).to_bytes(4, "little") + b"\xc1" * 3)
        assert over.wait(60)
    assert "a message of the engine" in caplog.text


def test_messages_arrive_as_they_were_sent() -> None:
    opened = NewSequence(
        3,
        (5, 0, 9),
        1,
        2,
        SamplingParams(temperature=0.5, logit_bias={7: -100.0}, bad_words_token_ids=((1,), (2, 3)), logprobs=2),
        -(1 << 63),
        2,
        frozenset({1, 8}),
        40,
        0,
        (ImageSpan(0, 2, 1, 14, 28),),
    )
    spans = (Span(3, 5, 0, 0), Span(1, 1, 1, 1))
    plan = Plan((opened,), ((3, (7, 8)),), spans, (1,), (0, 4), ((0, 2, 1),), (4,), (EncodeSpan(1, 0, 2),))
    image = PromptImage(0, 2, 1, 1, b"abc", b"digest")
    down = (Launch(1, 2, plan, False, 1), HandMasks(1, 2, [[b"\1", None]]), LoadImage(1, image))
    scores = {0: [TokenLogprobs(5, -0.5, 1, ((5, -0.5), (4, -1.5)))]}
    up = (StepDone(1, 2, Result([[5], []], [[1]], scores, scores, {1: "no"}, {0: b"12"})),)
    for kind, messages in ((ToRank, down), (FromRank, up)):
        reader = FrameReader(kind)
        assert [read for message in messages for read in reader.feed(encode_frame(message))] == list(messages)


class Ended(Exception):
    """The loop is to end."""


class Device:
    """Whose steps run until the next one is launched. Sends the next plan once the loop has looked whether one is
    done."""

    def __init__(self, inbox: SimpleQueue[Any]) -> None:
        self.inbox, self.launched = inbox, 0

    def launch(self, plan: Plan) -> RunningStep:
        self.launched += 1
        return RunningStep(self, self.launched)

    def reset(self) -> None:
        raise Ended


class RunningStep:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number, self.asked = device, number, 0

    def is_done(self) -> bool:
        self.asked += 1
        if self.asked == 3:
            message = Launch(0, self.number, Plan((), (), ()), False, 0) if self.number < 3 else Reset(1)
            self.device.inbox.put(message)
        return self.device.launched > self.number

    def result(self) -> Result:
        return Result([], [])


def test_a_step_is_launched_while_the_one_before_runs_whose_result_is_due() -> None:
    """A rank that waited for the result first would begin to launch when its GPU has nothing left to do."""
    sent, inbox = list[Any](), SimpleQueue[Any]()
    link: Any = SimpleNamespace(inbox=inbox, send=sent.append)
    inbox.put(Launch(0, 0, Plan((), (), ()), False, 0))
    device: Any = Device(inbox)
    with pytest.raises(Ended):
        RankLoop(device, link, 0).run()
    assert device.launched == 3 and [done.step for done in sent] == [0, 1]
