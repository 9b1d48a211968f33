"""Ctrl-C, other signals, several threads and `close` against one LLM: whatever comes, the next call is right."""

from __future__ import annotations

import gc
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quire import LLM, SamplingParams
from quire.cli.conversation import Conversation, Message, converse
from quire.engine.engine import Engine
from quire.errors import Closed, Interrupted, StepFailed
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Plan
from quire.scheduler.scheduler import Scheduler
from quire.tokenization.chat_template import ChatTemplate
from quire.weights.pooling import GENERATES
from tests.test_llm import Alphabet, Spelled, tokenizer

SHORT = SamplingParams(max_tokens=5)
GUARD = 60.0
"""Seconds after which what hangs is said to hang."""


class Gated(Alphabet):
    """Launches wait at the gate. `widest`: the most spans that one of them had."""

    def __init__(self, pages: int = 256) -> None:
        super().__init__(pages)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.widest = 0
        self.broken = False

    def launch(self, plan: Plan) -> Spelled:
        self.reached.set()
        assert self.gate.wait(GUARD)
        self.widest = max(self.widest, len(plan.spans))
        return super().launch(plan)

    def reset(self) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")
        super().reset()


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal, also where these tests run in the background, where a shell has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def executor() -> Gated:
    return Gated()


@pytest.fixture(params=[0, 1, 2], ids="lookahead {}".format)
def llm(request: pytest.FixtureRequest, executor: Gated, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    about = executor.describe()
    kv = KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, True))
    engine = Engine(Scheduler(kv, rows=about.num_rows), executor, lookahead=request.param)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = SimpleNamespace(
        tokenizer=tokenizer(), template=template, defaults={}, reasoning_parser="none", pooler=GENERATES
    )
    monkeypatch.setattr("quire.llm.build_engine", lambda settings: engine)
    monkeypatch.setattr("quire.llm.build_text", lambda settings: text)
    with LLM() as opened:
        yield opened
    assert kv.block_pool.num_free == about.num_blocks, "pages were not given back"


def right(llm: LLM) -> bool:
    """Whether it answers as if nothing had been, alone and together."""
    texts = [output.outputs[0].text for output in llm.generate(["a", "mm", "x"], SHORT, use_tqdm=False)]
    return texts == ["bcdef", "nopqr", "yz"] and "".join(llm.stream("c", SHORT)) == "defgh"


def begin(stream: Generator[str, None, None]) -> None:
    with closing(stream):
        next(stream)


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(["abc", "de"], SamplingParams(max_tokens=8, n=2), use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "abc"}], SHORT, use_tqdm=False),
    "stream": lambda llm: list(llm.stream("abc", SHORT)),
    "a stream that is left": lambda llm: begin(llm.stream("abc", SHORT)),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
}


class Stop(BaseException):
    """What a signal's handler raises, as KeyboardInterrupt is."""


class Nth:
    """Raises Stop in this thread before the n-th bytecode of what is called under it; counts them if n is never."""

    def __init__(self, n: int) -> None:
        self.left, self.count = n, 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Nth:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            self.left -= 1
            if self.left == 0:
                raise Stop
        return self

    def run(self, work: Callable[[], object]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except Stop:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.parametrize("call", CALLS)
def test_a_call_interrupted_at_any_bytecode_leaves_the_next_one_right(llm: LLM, call: str) -> None:
    def work() -> None:
        CALLS[call](llm)

    (whole := Nth(-1)).run(work)
    landed = sum(Nth(n).run(work) and right(llm) for n in range(1, whole.count, max(1, whole.count // 60)))
    assert landed > 20 and right(llm)


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS)
def test_a_call_interrupted_at_every_bytecode_leaves_the_next_one_right(llm: LLM, call: str) -> None:
    (whole := Nth(-1)).run(lambda: CALLS[call](llm))
    for n in range(1, whole.count):
        Nth(n).run(lambda: CALLS[call](llm))
        assert right(llm), f"after bytecode {n} of {whole.count}"


def hurried(work: Callable[[], object], after: float, again: float, times: int) -> int:
    """`work` under `times` signals, the first `after` seconds from now, the others each `again` seconds later. How many
    came."""
    came, open = 0, True

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if open and came < times:
            came += 1
            raise Stop

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after, again)
        work()
    except Stop:
        pass
    finally:
        open = False  # nothing that Python looks for signals at lies between
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    return came


@pytest.mark.parametrize("times", [1, 2, 3])
def test_signals_at_any_moment_leave_the_next_call_right(llm: LLM, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a second one, while the first is being dealt with."""
    monkeypatch.setattr(sys, "unraisablehook", lambda found: None)  # Python drops what is raised in a destructor
    chance, came = random.Random(times), 0
    for call in list(CALLS.values()) * 12:
        came += hurried(lambda call=call: call(llm), chance.uniform(1e-5, 2e-3), chance.uniform(1e-5, 3e-4), times)
        assert right(llm)
    assert came > 0


def enqueue_and_wait(llm: LLM, prompt: str, params: SamplingParams) -> None:
    llm.enqueue(prompt, params)
    llm.wait_for_completion(use_tqdm=False)


@pytest.mark.parametrize("call", [LLM.generate, enqueue_and_wait])
def test_an_interrupted_call_ends_what_it_asked_for(llm: LLM, executor: Gated, call: Callable[..., object]) -> None:
    """Ctrl-C while a step is under way that takes long: the call ends at once, its request with the step."""
    executor.gate.clear()
    executor.reached.clear()

    def interrupt() -> None:
        executor.reached.wait(GUARD)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        call(llm, "a", SamplingParams(max_tokens=30))
    helper.join()
    assert not executor.gate.is_set(), "the step was waited for"
    executor.gate.set()
    assert right(llm)
    assert executor.widest <= 3, "what was interrupted ran on beside"


# ---------------------------------------------------------------- threads


def together(count: int, work: Callable[[int], object]) -> list[object]:
    """What each thread's call returned or raised."""
    found: list[object] = [None] * count

    def one(number: int) -> None:
        try:
            found[number] = work(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    return found


def test_32_threads_get_32_right_answers(llm: LLM) -> None:
    letters = "abcdefghijklmnopqrst"

    def ask(number: int) -> tuple[str, ...]:
        start, params = letters[number % len(letters)], SamplingParams(max_tokens=4)
        return (
            *(output.outputs[0].text for output in llm.generate([start, start * 3], params, use_tqdm=False)),
            "".join(llm.stream(start, params)),
            llm.chat([{"role": "user", "content": start}], params, use_tqdm=False)[0].outputs[0].text,
        )

    every = letters + "uvwx"
    want = {number: every[at + 1 : at + 5] for number in range(32) for at in (number % len(letters),)}
    assert together(32, ask) == [(want[number],) * 4 for number in range(32)]


def test_requests_of_several_threads_run_in_the_same_steps(llm: LLM, executor: Gated) -> None:
    executor.gate.clear()
    executor.reached.clear()

    def ask(number: int) -> object:
        if number == 9:  # lets the others go once all of them have asked
            executor.reached.wait(GUARD)
            while llm._thread._calls.qsize() + len(llm._thread._listeners) < 9:  # some may be in the step already
                time.sleep(0.001)
            executor.gate.set()
            return None
        return llm.generate("a", SHORT, use_tqdm=False)[0].outputs[0].text

    assert together(10, ask)[:9] == ["bcdef"] * 9
    assert executor.widest == executor.describe().num_rows


# ---------------------------------------------------------------- close


@pytest.mark.parametrize("call", CALLS)
def test_what_is_asked_after_close_raises_closed(llm: LLM, call: str) -> None:
    llm.close()
    llm.close()
    with pytest.raises(Closed, match="has been closed"):
        CALLS[call](llm)
    with pytest.raises(Closed):
        llm.embed("a")


def test_close_ends_the_calls_of_other_threads_with_interrupted(llm: LLM, executor: Gated) -> None:
    executor.gate.clear()
    executor.reached.clear()

    def ask(number: int) -> object:
        if number < 2:
            return llm.generate("a", SHORT, use_tqdm=False) if number else list(llm.stream("a", SHORT))
        executor.reached.wait(GUARD)
        if number == 2:
            while llm._thread._closed is None:
                time.sleep(0.001)
            executor.gate.set()
        elif number == 3:
            while len(llm._thread._listeners) + llm._thread._calls.qsize() < 2:
                time.sleep(0.001)
            llm.close()
        return None

    found = together(4, ask)
    assert [type(each) in (Interrupted, Closed) for each in found[:2]] == [True, True]
    assert Interrupted in map(type, found)
    assert found[2:] == [None, None] and executor.closed


def test_a_stream_begun_before_close_ends_with_an_error(llm: LLM) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=30))
    assert next(stream) == "b"
    llm.close()
    with suppress(Interrupted):
        assert "".join(stream) == "cdefghijklmnopqrstuvwxyz"[: len("cdefghijklmnopqrstuvwxyz")]


def test_an_llm_that_nobody_holds_ends_its_thread(llm: LLM) -> None:
    other = LLM()
    thread = other._thread._thread
    assert thread.is_alive()
    del other
    gc.collect()
    thread.join(GUARD)
    assert not thread.is_alive()


def test_an_llm_made_before_a_fork_says_so_in_the_child(llm: LLM) -> None:
    child = os.fork()
    if not child:
        with suppress(BaseException):
            llm.generate("a", SHORT, use_tqdm=False)
        try:
            llm.generate("a", SHORT, use_tqdm=False)
        except Closed as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---------------------------------------------------------------- an engine that fails


def test_an_engine_that_fails_in_a_step_answers_the_next_call(
    llm: LLM, executor: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.scheduler, "commit", lambda result: {}["nothing"])
        with pytest.raises(StepFailed, match="KeyError"):
            llm.generate(["a", "b"], SHORT, use_tqdm=False)
    assert right(llm)


def test_an_engine_that_cannot_start_again_says_so_from_then_on(
    llm: LLM, executor: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.broken = True
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.scheduler, "commit", lambda result: {}["nothing"])
        with pytest.raises(StepFailed):
            llm.generate("a", SHORT, use_tqdm=False)
    with pytest.raises(Closed, match="could not be started again"):
        llm.generate("a", SHORT, use_tqdm=False)
    executor.broken = False


# ---------------------------------------------------------------- commands


def test_ctrl_c_ends_generate_and_not_with_a_traceback() -> None:
    argv = [sys.executable, "-m", "quire", "generate", "Once"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=GUARD)
    finally:
        process.kill()
    assert process.returncode in (0, 130) and b"Traceback" not in said and b"Aborted" not in said


COMMANDS = {
    "serve": ("serve", "--port", "0"),
    "generate": ("generate", "Once"),
    "chat": ("chat",),
    "bench": ("bench", "latency"),
}
AT_IMPORT = """
import signal, sys
wanted = sys.argv.pop(1)
class Finder:
    seen = 0
    def find_spec(self, name, path=None, target=None):
        Finder.seen += Finder.seen > 0 or name == "quire.cli"
        if name == wanted or str(Finder.seen) == wanted:
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from quire.__main__ import main
main()
"""


def interrupted_at(import_: str, command: str) -> tuple[int, str]:
    """The exit code and what is said when Ctrl-C comes as a module is imported, or the module of a number, of those
    that a command imports."""
    argv = [sys.executable, "-c", AT_IMPORT, import_, *COMMANDS[command]]
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=10 * GUARD)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *(("serve", module) for module in ("quire.cli", "click", "quire.types", "quire.cli.serve", "uvicorn")),
        *(("generate", module) for module in ("quire.cli.chat", "torch", "torch._C")),
        *(("chat", "quire.config.settings"), ("bench", "quire.bench.latency")),
    ],
)
def test_ctrl_c_during_an_import_ends_a_command_with_130_and_no_traceback(command: str, module: str) -> None:
    assert interrupted_at(module, command) == (130, "")


def test_nothing_is_imported_before_a_command_deals_with_ctrl_c() -> None:
    code = "import importlib, os, signal, sys; had = set(sys.modules); import quire.__main__; "
    argv = [sys.executable, "-c", code + "print(*sorted(set(sys.modules) - had - {'__future__'}))"]
    assert subprocess.run(argv, check=True, capture_output=True).stdout.split() == [b"quire", b"quire.__main__"]


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_during_any_import_ends_a_command_with_130_and_no_traceback(command: str) -> None:
    for number in range(1, 400, 13):
        assert interrupted_at(str(number), command) == (130, ""), number


@pytest.mark.parametrize("where", ["before the first piece", "between pieces", "while a piece is shown"])
def test_ctrl_c_stops_an_answer_of_chat_and_keeps_the_session(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if where == "while a piece is shown" and text == "one":
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    ended: list[bool] = []

    def answer(messages: list[Message]) -> Iterator[str]:
        first = messages[-1]["content"] == "first"
        try:
            if first and where == "before the first piece":
                signal.raise_signal(signal.SIGINT)
            yield "one" if first else "fine"
            if first and where == "between pieces":
                signal.raise_signal(signal.SIGINT)
            if first:
                yield " more"
        finally:
            ended.append(first)

    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    shown, talk = Screen(), list[Message]()
    converse(Conversation(Console(file=shown, soft_wrap=True), talk, answer))
    assert ended == [True, False], "the answer that was stopped is still being made, or the session has ended"
    said = [] if where == "before the first piece" else ["first", "one"]
    assert [message["content"] for message in talk] == [*said, "second", "fine"]
    assert shown.getvalue().endswith("\nfine\n")


def test_ctrl_c_at_the_prompt_ends_chat_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyboard(io.StringIO):
        def readline(self, size: int | None = -1) -> str:
            line = super().readline(-1)
            if line == "^C\n":
                signal.raise_signal(signal.SIGINT)
            return line

    monkeypatch.setattr("sys.stdin", Keyboard("hello\n^C\nnever\n"))
    talk: list[Message] = []
    converse(Conversation(Console(file=io.StringIO()), talk, lambda messages: iter(["fine"])))
    assert [message["content"] for message in talk] == ["hello", "fine"]


def test_chat_in_this_process_goes_on_after_ctrl_c(llm: LLM) -> None:
    """Ctrl-C while the first piece is shown; the second question is answered as if nothing had been."""

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if text == "b":
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    before, sys.stdin = sys.stdin, io.StringIO("a\nf\n")
    try:
        shown, talk = Screen(), list[Message]()
        made = Conversation(
            Console(file=shown, soft_wrap=True), talk, lambda messages: llm.stream_chat(messages[-1:], SHORT)
        )
        converse(made)
    finally:
        sys.stdin = before
    assert [message["content"] for message in talk] == ["a", "b", "f", "ghijk"]
    assert right(llm)
