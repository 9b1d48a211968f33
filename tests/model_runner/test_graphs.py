"""What of device work is done before an engine is ready, and what is only recorded."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from quire.model_runner import graphs
from quire.model_runner.graphs import OFTEN, CudaQueue, GraphKey, bucket_seqs, bucket_tokens, padding, stand_ins
from quire.model_runner.sampling.features import RANDOM
from quire.ops import gemm as products
from quire.ops.capture import NotCapturable, captured
from quire.ops.gemm import TORCH_GEMM, GemmAutotuner, GemmShape, autotuning


class Tape(CudaQueue):
    """A queue without a card: remembers in which order keys are done and recorded."""

    def __init__(self, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest, self.pool = largest, None
        self.graphs, self.started = {}, set()
        self.postponed, self.larger, self.served = {}, {}, Counter()
        self.agree = bool
        self.seen: list[tuple[str, GraphKey]] = []
        self.known: set[GraphKey] = set()
        self.recording = False
        monkeypatch.setattr(graphs, "captured", self.captured)

    def captured(self, work: Callable[[], object], pool: object = None) -> object:
        self.recording = True
        try:
            work()
        finally:
            self.recording = False
        return self

    def work(self, key: GraphKey) -> Callable[[], object]:
        def do() -> None:
            if self.recording and key not in self.known and key.spans == 3:
                self.seen.append(("tried", key))
                raise NotCapturable("it has not been timed")
            self.known.add(key)
            self.seen.append(("recorded" if self.recording else "done", key))

        return do

    def ready(self, *keys: GraphKey) -> list[tuple[str, GraphKey]]:
        for key in keys:
            self.prepare(key, self.work(key))
        return self.seen


def test_the_first_of_a_kind_is_run_and_the_others_are_only_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, head, hot = GraphKey(16, 16, 1), GraphKey(8, 8, 1), GraphKey.head(16, 0), GraphKey.head(16, RANDOM)
    tape = Tape(16, monkeypatch)
    assert tape.ready(one, two, head, hot) == [
        *(("done", one), ("recorded", one)),
        ("recorded", two),
        *(("done", head), ("recorded", head)),
        *(("done", hot), ("recorded", hot)),
    ]
    assert set(tape.graphs) == {one, two, head, hot}


def test_work_too_large_to_be_captured_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    large, one = GraphKey(32, 16, 32), GraphKey(16, 16, 16)
    tape = Tape(16, monkeypatch)
    assert tape.ready(large, large, one) == [("done", large), ("done", large), ("recorded", one)]
    assert set(tape.graphs) == {one}


def test_work_that_cannot_be_captured_yet_is_run_and_then_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    first, three = GraphKey(16, 16, 1), GraphKey(3, 3, 1)
    tape = Tape(16, monkeypatch)
    assert tape.ready(first, three)[2:] == [("tried", three), ("done", three), ("recorded", three)]
    assert three in tape.graphs


def forwards(seqs: int, tokens: int) -> list[GraphKey]:
    """As `assembly.cuda.graph_keys`."""
    decode = {padding(n) for n in range(1, seqs + 1)}
    mixed = {bucket_tokens(n) for n in range(1, tokens + 1)}
    spans = {bucket_seqs(n) for n in range(1, seqs + 1)}
    return [*(GraphKey(t, s, t) for t in mixed for s in spans), *(GraphKey(n, n, 1) for n in decode)]


@pytest.mark.parametrize(("seqs", "tokens"), [(256, 2048), (100, 2048), (300, 512), (17, 64), (4, 64), (1, 16)])
def test_a_step_whose_graph_is_postponed_has_room_in_a_larger_one(seqs: int, tokens: int) -> None:
    keys = forwards(seqs, tokens)
    larger = stand_ins([*keys, GraphKey.head(24, 0)])
    assert larger.keys() < set(keys) and not larger.keys() & set(larger.values())
    for key, other in larger.items():
        assert (key.max_query == 1) == (other.max_query == 1)
        assert other.tokens >= key.tokens and other.spans >= key.spans and other.max_query >= key.max_query
        assert other.tokens < 4 * key.tokens
    sizes = [key.tokens for key in keys if key not in larger and key.max_query > 1]
    assert all(4 * a <= b < 5 * a for a, b in zip(sorted(sizes), sorted(sizes)[1:], strict=False))


def test_what_is_postponed_is_captured_the_most_used_first_and_serves_itself_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, some, few = GraphKey(64, 64, 1), GraphKey(40, 40, 1), GraphKey(48, 48, 1)
    tape = Tape(64, monkeypatch)
    tape.ready(large)
    tape.postpone([(key, tape.work(key)) for key in (few, some)], {few: large, some: large})
    assert [tape.serving(key) for key in (large, some, few, some)] == [large] * 4
    assert tape.prepare_next() and tape.seen[2:] == [("recorded", some)]
    assert [tape.serving(key) for key in (some, few)] == [some, large]
    assert not tape.prepare_next() and tape.serving(few) == few
    assert tape.seen[2:] == [("recorded", some), ("recorded", few)] and not tape.prepare_next()


def test_a_size_that_is_used_often_is_captured_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    large, some = GraphKey(64, 64, 1), GraphKey(40, 40, 1)
    tape = Tape(64, monkeypatch)
    tape.ready(large)
    tape.postpone([(some, tape.work(some))], {some: large})
    assert [tape.serving(some) for _ in range(OFTEN + 1)] == [large] * (OFTEN - 1) + [some] * 2


def test_what_cannot_be_captured_later_is_never_run_and_the_larger_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Running it would feed the rows that the last step fed."""
    large, three = GraphKey(4, 4, 1), GraphKey(3, 3, 1)
    tape = Tape(4, monkeypatch)
    tape.ready(large)
    tape.postpone([(three, tape.work(three))], {three: large})
    with caplog.at_level(logging.WARNING):
        assert not tape.prepare_next()
    assert tape.seen[2:] == [("tried", three)] and tape.serving(three) == large and "of 3 tokens" in caplog.text


def test_what_another_rank_cannot_capture_runs_as_the_larger_one_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    large, some = GraphKey(64, 64, 1), GraphKey(40, 40, 1)
    tape = Tape(64, monkeypatch)
    tape.ready(large)
    tape.postpone([(some, tape.work(some))], {some: large})
    asked = []
    monkeypatch.setattr(tape, "agree", asked.append)
    assert not tape.prepare_next() and asked == [True]
    assert tape.serving(some) == large and some not in tape.graphs


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_work_is_captured(
    enabled: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory freed meanwhile would leave an event that no later copy can ask for."""
    seen = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            seen.append(("begin", gc.isenabled()))

        def capture_end(self) -> None:
            seen.append(("end", gc.isenabled()))
            if fails:
                # As torch does, where nothing was recorded; here warnings are errors.
                warnings.warn("The CUDA Graph is empty. This usually means something else.", UserWarning, stacklevel=1)

    def work() -> None:
        seen.append(("work", gc.isenabled()))
        if fails:
            raise NotCapturable("it has not been timed")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(NotCapturable) if fails else nullcontext():
            captured(work)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [("begin", False), ("work", False), ("end", False)]


class Proposing:
    """A library with one way, which is torch's."""

    version = "one"

    def supports(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return True

    def algorithms(self, shape: GemmShape) -> list[products.GemmAlgorithm]:
        return []

    def algorithm(self, shape: GemmShape, name: str) -> products.GemmAlgorithm:
        return TORCH_GEMM


def test_products_are_timed_before_they_are_captured_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, book = torch.ones(3, 4), torch.ones(2, 4), tmp_path / "book.json"
    monkeypatch.setattr(products, "capturing", lambda x: True)
    new = GemmAutotuner(Proposing(), lambda works: [1.0])
    with (
        autotuning(book),
        pytest.raises(NotCapturable, match=r"algorithm for 3,2,4,0,float32 is not known"),
    ):
        new.linear(x, weight)
    assert torch.equal(new.linear(x, weight), torch.full((3, 2), 4.0)), "nothing is learnt any more"
    monkeypatch.undo()
    with autotuning(book):
        new.linear(x, weight)
    monkeypatch.setattr(products, "capturing", lambda x: True)
    again = GemmAutotuner(Proposing(), lambda works: pytest.fail("timed again"))
    with autotuning(book):
        assert torch.equal(again.linear(x, weight), torch.full((3, 2), 4.0))
