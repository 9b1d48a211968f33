"""A prefill/decode split: the same bits as one engine, for every kind of K/V, whatever happens to the other side."""

from __future__ import annotations

import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.events import Observer, StepRecord
from quire.engine.executor import Executor
from quire.executors.block_store import (
    DeviceCopies,
    HostCopies,
    TieredBlockStore,
    TorchMover,
    block_bytes,
    host_lines,
    pool_tensors,
)
from quire.executors.kv_transfer import Address, TcpPrefillClient, TcpPrefillServer
from quire.executors.local import LocalExecutor
from quire.model_runner.lookahead_runner import LookaheadRunner
from quire.observability.explain import explain
from quire.observability.history import History
from quire.observability.recorder import recorded
from quire.observability.recording_format import RecordingReader
from quire.scheduler.kv_offload import KVOffload, Offload
from quire.scheduler.kv_transfer import PrefillOffload
from quire.sim.replay import replay
from quire.types import Request
from tests.test_deterministic import Ahead, Situation
from tests.test_kv_offload import Float8, Tiered, model

SIZE = 8
ABOUT = {"weights": "of a test"}
ANYWHERE = Address("127.0.0.1", 0)
SECRET = b"a secret of both sides"
DECODE, PREFILL = Situation(pages=48, size=SIZE), Situation(pages=40, size=SIZE, budget=24, chunk=16)


def store_of(executor: Executor, slots: int) -> TieredBlockStore:
    assert isinstance(executor, LocalExecutor)
    runner = executor.runner
    lines = host_lines(slots, block_bytes(runner.kv), pinned=False)
    if isinstance(runner, LookaheadRunner):
        return TieredBlockStore(
            DeviceCopies(lines, TorchMover(pool_tensors(runner.kv)), runner.queue, torch.device("cpu")), lines
        )
    return TieredBlockStore(HostCopies(runner.kv, lines), lines)


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Split(Tiered):
    """A subject whose answers by one engine count. `make`: the tiers of the engine that is built next."""

    make: Callable[[Executor], Offload] | None = None

    def tiers(self, executor: Executor) -> Offload | None:
        return None if self.make is None else self.make(executor)

    def built(self, situation: Situation, make: Callable[[Executor], Offload]) -> Engine:
        self.make = make
        try:
            return self.engine(situation)
        finally:
            self.make = None

    def prefill(self, address: Address = ANYWHERE, slots: int = 12) -> Prefiller:
        listener = socket.create_server(address)

        def make(executor: Executor) -> Offload:
            store = store_of(executor, slots)
            made = TcpPrefillServer(*(listener, SECRET, ABOUT, store.memory, store.report, store.wake), SIZE, 5.0)
            return PrefillOffload(store, SIZE, made)

        return Prefiller(self.built(PREFILL, make), Address(*listener.getsockname()))

    def decode(
        self,
        *addresses: Address,
        timeout: float = 10.0,
        situation: Situation = DECODE,
        slowdown: float = math.inf,
    ) -> Engine:
        def make(executor: Executor) -> Offload:
            store = store_of(executor, 64)
            return KVOffload(
                store,
                SIZE,
                TcpPrefillClient(
                    *(addresses, SECRET, ABOUT, store.memory, store.report), min_tokens=SIZE, timeout=timeout
                ),
                slowdown,
            )

        return self.built(situation, make)


class SplitAhead(Split, Ahead):
    """The same, on the runner of a device."""


class SplitFloat8(Split, Float8):
    """K/V in float8."""


class Prefiller:
    """A prefill engine, run by a thread."""

    def __init__(self, engine: Engine, address: Address) -> None:
        self.engine, self.address = engine, address
        offload = engine.scheduler.kv.offload
        assert isinstance(offload, PrefillOffload)
        self.offload = offload
        self._stop = threading.Event()
        self.paused = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.paused.is_set():
                time.sleep(0.005)
                continue
            self.engine.wait(0.02)
            assert self.engine.step() == [], "others' requests have no outputs here"

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.engine.close()


@contextmanager
def ended(*engines: Engine | Prefiller) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            engine.close()


def connected(engine: Engine, reason: str = "") -> Engine:
    """The engine, once its client has a connection, or has none for this reason."""
    offload = engine.scheduler.kv.offload
    assert isinstance(offload, KVOffload)
    client = offload.prefill
    eventually(lambda: client.unavailable() == reason)
    return engine


def converse(subject: Split, engine: Engine, count: int, seed: int = 1, cancel: bool = False) -> None:
    """`count` requests, some at a time, each answered as by one engine; of some the client goes away meanwhile."""
    rng = random.Random(seed)
    while count > 0:
        asked = rng.sample(subject.requests, rng.randrange(1, 6))
        count -= len(asked)
        if cancel and rng.random() < 0.5:
            for request in asked:
                engine.add(request)
            for _ in range(rng.randrange(4)):
                engine.step()
            for request in asked:
                engine.abort(request.id)
            while engine.has_pending_work:
                engine.step()
            continue
        assert subject.ask(engine, asked) == {request.id: subject.alone[request.id] for request in asked}
        if rng.random() < 0.3:
            engine.reset_prefix_cache()


def check_nothing_is_held(*engines: Engine) -> None:
    """No request, no copy, and no block or slot in use."""
    for engine in engines:
        kv = engine.scheduler.kv
        offload = kv.offload
        assert isinstance(offload, KVOffload)

        def idle(engine: Engine = engine, offload: KVOffload = offload) -> bool:
            engine.step()
            return not offload.pending and not engine.scheduler.sequences

        eventually(idle)
        assert not any(kv.block_pool.ref_counts) and not offload.held_blocks()
        assert all(not entry.users for entry in offload.host.values())
        assert len(offload.free_slots) + len(offload.host) == offload.store.num_slots


KINDS = [
    (Split, "llama-gqa-tied", "float32"),
    (SplitFloat8, "llama-gqa-tied", "float32"),
    (SplitAhead, "llama-gqa-tied", "bfloat16"),
    (Split, "deepseek_v2-groups-yarn", "float32"),
    (SplitAhead, "deepseek_v3-plain-queries", "bfloat16"),
    (Split, "gemma2-gqa", "float32"),
    (SplitAhead, "gpt2-odd-heads", "bfloat16"),
    (Split, "qwen3_moe-gqa", "float32"),
    (Split, "deepseek_v32-groups-yarn", "float32"),
]
NAMES = ("kind", "shape", "dtype")
EVERY = pytest.mark.parametrize(NAMES, KINDS, ids=lambda each: getattr(each, "__name__", each))
SOME = pytest.mark.parametrize(NAMES, [KINDS[0], KINDS[4], KINDS[5]], ids=lambda each: getattr(each, "__name__", each))


@cache
def subject(kind: type[Split], shape: str, dtype: str, base: Path) -> Split:
    return kind(model(shape, dtype, base))


@SOME
def test_answers_have_the_bits_that_one_engine_gives(
    kind: type[Split], shape: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject(kind, shape, dtype, tmp_path_factory.getbasetemp())
    prefiller = it.prefill()
    engine = connected(it.decode(prefiller.address))
    with ended(engine, prefiller):
        converse(it, engine, 12, cancel=True)
        stats = engine.scheduler.kv.offload.stats
        assert stats.prefills["done"] > 3 and stats.num_hit["remote"] > 50
        assert stats.prefills.keys() <= {"done", "cancelled", "no_room"}
        prefiller.paused.set()
        check_nothing_is_held(engine, prefiller.engine)


def test_a_prefill_engine_that_took_long_is_not_asked_and_the_explanation_says_what_was_predicted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    it = subject(*KINDS[0], tmp_path_factory.getbasetemp())
    prefiller = it.prefill()
    engine = connected(it.decode(prefiller.address, slowdown=4.0))
    history = History()
    history.attach(engine.scheduler.kv)
    engine.observers = (*engine.observers, history)
    offload = engine.scheduler.kv.offload
    assert isinstance(offload, KVOffload)
    # Steps of some sizes, and a prefill engine that took hours for two prompts.
    step_times = engine.scheduler.step_times
    for tokens, seconds in ((1, 1e-4), (50, 5e-3), (100, 1e-2)):
        step_times.add(tokens, seconds)
    for blocks in (1, 2):
        offload.times["receive"].add(blocks, 3600.0 * blocks)
    with ended(engine, prefiller):
        asked = it.requests[:4]
        assert it.ask(engine, asked) == {request.id: it.alone[request.id] for request in asked}
        assert offload.stats.prefills.keys() == {"slower"} and not offload.stats.copied["receive"]
        explained = explain(history, asked[0].id, engine.clock.now())
    assert explained is not None
    prefix = explained["prefix"]
    assert prefix["transfer"]["failed"] == "slower" and prefix["transfer"]["seconds"] == 0
    assert prefix["transfer"]["predicted_seconds"] >= 3600 > 100 * prefix["transfer"]["computing_seconds"]
    assert "a prefill engine was predicted to take" in prefix["why"] and "computed here" in prefix["why"]


@pytest.mark.nightly
@EVERY
def test_hundreds_of_answers_have_the_bits_that_one_engine_gives(
    kind: type[Split], shape: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject(kind, shape, dtype, tmp_path_factory.getbasetemp())
    prefillers = [it.prefill(), it.prefill(slots=40)]
    engine = connected(it.decode(*(each.address for each in prefillers)))
    with ended(engine, *prefillers):
        converse(it, engine, 400, seed=2, cancel=True)
        for prefiller in prefillers:
            assert prefiller.offload.stats.copied["send"] > 100
            prefiller.paused.set()
        check_nothing_is_held(engine, *(each.engine for each in prefillers))


def test_both_sides_of_a_split_are_recorded_and_made_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = subject(Split, "llama-gqa-tied", "float32", tmp_path_factory.getbasetemp())
    monkeypatch.setattr("tests.test_deterministic.Engine", recorded(tmp_path / "prefill"))
    prefiller = it.prefill()
    monkeypatch.setattr("tests.test_deterministic.Engine", recorded(tmp_path / "decode"))
    engine = connected(it.decode(prefiller.address))
    with ended(engine, prefiller):
        converse(it, engine, 16, cancel=True)
        assert engine.scheduler.kv.offload.stats.prefills["done"] > 3
        prefiller.paused.set()
        check_nothing_is_held(engine, prefiller.engine)
    for side, other in (("prefill", prefiller.engine), ("decode", engine)):
        again = replay(RecordingReader([tmp_path / side]))
        assert again.divergence is None, (side, again.divergence)
        assert again.engine.stats.num_steps == other.stats.num_steps
        now, was = again.engine.scheduler.kv.offload.stats, other.scheduler.kv.offload.stats
        assert (now.prefills, now.copied, now.num_hit) == (was.prefills, was.copied, was.num_hit)


# -------------------------------------------------------------------- what a split is for


def plain(factory: pytest.TempPathFactory) -> Split:
    return subject(Split, "llama-gqa-tied", "float32", factory.getbasetemp())


class PromptTokens(Observer):
    """The most prompt tokens that a step fed."""

    def __init__(self) -> None:
        self.most = 0

    def on_step(self, record: StepRecord) -> None:
        fed = [
            span.num_tokens
            for span, seq in zip(record.plan.spans, record.seqs, strict=True)
            if seq.num_computed < seq.prompt_length or span.num_tokens > 1
        ]
        self.most = max(self.most, sum(fed))


def most_prompt_tokens(it: Split, engine: Engine) -> int:
    """Of a step, while long prompts arrive one after another beside a running stream."""
    watch = PromptTokens()
    stream = it.requests[1]
    engine.add(Request(id="stream", prompt=stream.prompt[:6], max_new_tokens=200))
    while not any(output.id == "stream" for output in engine.step()):
        pass
    engine.observers = (watch,)
    rng = random.Random(4)
    for number in range(4):
        prompt = tuple(rng.randrange(it.model.spec.vocab) for _ in range(200 - number))
        engine.add(Request(id=f"long {number}", prompt=prompt, max_new_tokens=2))
        while f"long {number}" in engine.scheduler.sequences:
            engine.step()
    assert "stream" in engine.scheduler.sequences, "the stream ran all the time"
    engine.abort("stream")
    return watch.most


def test_a_long_prompt_adds_less_than_a_block_to_the_steps_of_running_streams(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    it, roomy = plain(tmp_path_factory), Situation(size=SIZE)
    prefiller = it.prefill()
    engine, mixed = connected(it.decode(prefiller.address, situation=roomy)), it.engine(roomy)
    with ended(engine, prefiller, mixed):
        assert most_prompt_tokens(it, mixed) == 200
        assert most_prompt_tokens(it, engine) <= SIZE
        assert engine.scheduler.kv.offload.stats.prefills == {"done": 4}


# -------------------------------------------------------------------- several engines


def test_prompts_go_to_several_prefill_engines_and_come_from_several_decode_engines(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    it = plain(tmp_path_factory)
    prefillers = [it.prefill(), it.prefill()]
    addresses = [each.address for each in prefillers]
    engines = [connected(it.decode(*addresses)) for _ in range(2)]
    with ended(*engines, *prefillers):
        eventually(lambda: all(len(each.offload.server._callers) == 2 for each in prefillers))  # type: ignore[attr-defined]
        for seed, engine in enumerate(engines):
            converse(it, engine, 20, seed)
        assert all(each.offload.stats.copied["send"] > 10 for each in prefillers)


def test_salts_keep_prefixes_apart_on_the_prefill_engine_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    it = plain(tmp_path_factory)
    prefiller = it.prefill()
    engine, prompt = connected(it.decode(prefiller.address)), tuple(range(60))
    with ended(engine, prefiller):
        for number, salt in enumerate(("a", "b", "a")):
            it.ask(engine, [Request(id=str(number), prompt=prompt, max_new_tokens=1, cache_salt=salt)])
            engine.reset_prefix_cache()
        assert prefiller.engine.stats.num_cached_tokens == len(prompt) // SIZE * SIZE
        assert engine.scheduler.kv.offload.stats.prefills == {"done": 3}


# -------------------------------------------------------------------- the other side fails


def prefills(engine: Engine) -> dict[str, int]:
    return engine.scheduler.kv.offload.stats.prefills


def test_a_prefill_engine_that_is_gone_is_done_without_and_used_again_when_it_is_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    it = plain(tmp_path_factory)
    prefiller = it.prefill()
    engine = connected(it.decode(prefiller.address))
    with ended(engine):
        converse(it, engine, 5)
        engine.reset_prefix_cache()
        prefiller.paused.set()
        for request in it.requests:
            engine.add(request)
        answers: dict[str, list[int]] = {request.id: [] for request in it.requests}

        def step() -> None:
            for output in engine.step():
                answers[output.id] += output.tokens

        step()
        prefiller.paused.clear()
        prefiller.close()
        while engine.has_pending_work:
            engine.wait(0.02)
            step()
        assert answers == {id: list(tokens) for id, (tokens, *_) in it.alone.items()}
        connected(engine, "down")
        engine.reset_prefix_cache()
        converse(it, engine, 5)
        assert prefills(engine)["closed"] and prefills(engine)["down"]
        again = it.prefill(prefiller.address)
        with ended(again):
            connected(engine)
            engine.reset_prefix_cache()
            before = prefills(engine)["done"]
            converse(it, engine, 10)
            assert prefills(engine)["done"] > before
        check_nothing_is_held(engine)


def test_a_prefill_engine_that_hangs_costs_its_timeout_and_never_an_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    it = plain(tmp_path_factory)
    prefiller = it.prefill()
    engine = connected(it.decode(prefiller.address, timeout=0.2))
    with ended(engine, prefiller):
        prefiller.paused.set()
        request = it.requests[0]
        assert it.ask(engine, [request]) == {request.id: it.alone[request.id]}
        assert prefills(engine) == {"timeout": 1}
        prefiller.paused.clear()
        connected(engine)
        engine.reset_prefix_cache()
        converse(it, engine, 10)
        assert prefills(engine)["done"]
        prefiller.paused.set()
        check_nothing_is_held(engine, prefiller.engine)


def test_a_step_that_fails_on_the_prefill_engine_has_the_prompt_computed_here(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = plain(tmp_path_factory)
    prefiller = it.prefill()
    engine = connected(it.decode(prefiller.address))
    with ended(engine, prefiller):
        launch, failures = prefiller.engine.executor.launch, iter([True])

        def fail_once(plan: object) -> object:
            if next(failures, False):
                raise RuntimeError("a kernel")
            return launch(plan)  # type: ignore[arg-type]

        monkeypatch.setattr(prefiller.engine.executor, "launch", fail_once)
        converse(it, engine, 12)
        assert prefills(engine)["failed"] >= 1 and prefills(engine)["done"]
