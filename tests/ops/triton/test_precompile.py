"""What steps launch is compiled before they are done, several kernels at once; a full cache is soon seen to be full."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

import quire.ops.triton
from quire.assembly.cuda import make_precompiler
from quire.model_runner.graphs import no_precompile
from quire.ops.capture import PRECOMPILING
from quire.ops.triton.launch import Kernel
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.precompile import PROBES, DeferredCompiler, Precompiler, ReportProgress
from quire.weights import load
from quire.weights.canary import feed, pages
from tests.checkpoints import FIRST, SHAPES, make
from tests.ops.triton.programs import said


def precompiled(cache: Path, *drafts: str) -> tuple[int, int, int, int, list[str]]:
    steps, works, compiled, launchers, late = said("precompiling", "90", str(227 << 10), *drafts, cache=cache)
    return steps, works, compiled, launchers, late


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", [(), ("drafts",)], ids=["alone", "drafts"])
def test_nothing_is_left_to_compile_and_with_a_full_cache_little_is_precompiled(
    drafts: tuple[str, ...], tmp_path: Path
) -> None:
    steps, works, compiled, launchers, late = precompiled(tmp_path, *drafts)
    assert works > steps
    assert compiled >= 15
    assert launchers == compiled
    assert late == []
    steps, works, compiled, _, _ = precompiled(tmp_path, *drafts)
    assert works <= PROBES < steps
    assert compiled > 0


def test_what_the_host_launches_can_be_precompiled() -> None:
    folder = quire.ops.triton.__path__
    modules = [importlib.import_module(f"quire.ops.triton.{one.name}") for one in pkgutil.iter_modules(folder)]
    kernels = {name: value for one in modules for name, value in vars(one).items() if name.endswith("_kernel")}
    assert len(kernels) > 20
    assert {name for name, value in kernels.items() if not isinstance(value, Kernel)} == set()


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if s in FIRST else pytest.mark.nightly) for s in SHAPES])
def test_launches_of_a_model_are_recorded_whatever_memory_holds(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels would have written is not there: an index that is read of it may be any number."""
    make(tmp_path, shape)
    monkeypatch.setattr(load, "can_pack", lambda *asked: False)  # as on a GPU
    model = load.load_model(tmp_path, dtype="bfloat16", ops=TritonOps("cpu"))
    kv, launched, plain = pages(model, 20, torch.device("cpu")), list[Any](), Tensor.new_empty

    def unwritten(like: Tensor, *sizes: Any, **options: Any) -> Tensor:
        made = plain(like, *sizes, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 1 << 30)

    monkeypatch.setattr(Tensor, "new_empty", unwritten)
    recording = PRECOMPILING.set(lambda kernel, grid, *arguments, **options: launched.append(kernel))
    try:
        with torch.inference_mode():
            for begin, end in ((0, 18), (18, 19), (19, 20)):
                batch = feed(range(20), begin, end, torch.device("cpu"))
                model.logits(model.forward(batch, kv))
    finally:
        PRECOMPILING.reset(recording)
    assert len(launched) > 10


class Made:
    """A kernel as Triton makes it."""

    def __init__(self) -> None:
        self.launched: list[object] = []
        self.warmed: list[object] = []

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: self.launched.append(args)

    def warmup(self, *args: object, grid: object, **options: object) -> None:
        self.warmed.append(args)


@contextmanager
def unwatched() -> Iterator[ReportProgress]:
    yield lambda done, total: None


def test_launches_are_recorded_once_each_and_do_not_run() -> None:
    made = Made()
    kernel = Kernel(made)

    def work(n: int) -> None:
        for _ in "layers":
            kernel[(1,)](n, SIZE=16)

    Precompiler(1, unwatched)([partial(work, n) for n in (3, 3, 4)])
    assert made.warmed == [(3,), (4,)]
    assert made.launched == []
    kernel[(1,)](5, SIZE=16)
    assert made.launched == [(5,)]


def test_other_threads_launch_meanwhile() -> None:
    made = Made()
    other = threading.Thread(target=lambda: Kernel(made)[(1,)](7))

    def work() -> None:
        other.start()
        other.join()

    Precompiler(1, unwatched)([work])
    assert made.launched == [(7,)]


def test_a_precompilation_that_fails_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise ValueError("no such shape")

    listener = knobs.compilation.listener
    Precompiler(1, unwatched)([work])
    assert "no such shape" in caplog.text
    assert PRECOMPILING.get() is None
    assert knobs.compilation.listener is listener


def test_as_many_are_compiled_at_once_as_there_are_workers() -> None:
    both, reported = threading.Barrier(2, timeout=300), list[tuple[int, int]]()
    with DeferredCompiler(lambda made: both.wait()) as held:
        futures = [held.submit(both.wait) for _ in range(2)]
        assert not any(future.done() for future in futures)
        held.run(2, lambda done, total: reported.append((done, total)))
    assert sorted(future.result() for future in futures) == [0, 1]
    assert reported == [(1, 2), (2, 2)]


def test_a_compilation_that_fails_stops_no_other() -> None:
    finished: list[int] = []
    with DeferredCompiler(finished.append) as held:
        wrong, right = held.submit(lambda: 1 // 0), held.submit(lambda: 1)
        held.run(1, lambda done, total: None)
    assert isinstance(wrong.exception(), ZeroDivisionError)
    assert right.result() == 1
    assert finished == [1]


def test_results_of_work_that_was_never_run_are_cancelled() -> None:
    with DeferredCompiler(print) as held:
        left = held.submit(lambda: 1)
    assert isinstance(left.exception(timeout=100), CancelledError)


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert make_precompiler() is no_precompile
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert isinstance(make_precompiler(), Precompiler)
