"""What steps launch is compiled before they are done, several kernels at once; a full cache is soon seen to be full."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
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
from quire.layers.linear import ONE_RANK
from quire.model_runner.graphs import no_precompile
from quire.models.llama import Llama
from quire.ops.capture import PRECOMPILING
from quire.ops.triton import precompile
from quire.ops.triton.launch import Kernel
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.precompile import PROBES, DeferredCompiler, Precompiler, ReportProgress, has_kernels
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
    assert works == steps, "with an empty cache, once"
    assert compiled >= 15
    assert launchers == compiled
    assert late == []
    steps, works, compiled, _, _ = precompiled(tmp_path, *drafts)
    assert works <= PROBES < steps
    assert compiled > 0


def test_tritons_hash_of_itself_is_computed_once_beside_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, hashed = threading.Event(), list[str]()

    def slow() -> str:
        begun.wait()
        hashed.append(threading.current_thread().name)
        return "key"

    monkeypatch.setattr(precompile, "triton_key", slow)
    precompile.compiler_key.cache_clear()
    try:
        beside = precompile.compiler_key()
        assert beside.is_alive() and not hashed and precompile.compiler_key() is beside
        begun.set()
        Precompiler(1, unwatched)([])
        assert hashed == [beside.name]
    finally:
        begun.set()
        precompile.compiler_key.cache_clear()


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

    def note(kernel: Any, grid: object, *arguments: Any, **options: Any) -> None:
        kinds = (x.dtype if isinstance(x, Tensor) else repr(x) for x in arguments)
        launched.append((kernel, *kinds, *sorted(options.items())))

    def launches() -> set[Any]:
        """What tells launches apart. Addresses do not: of layers that are left out, none is known."""
        launched.clear()
        recording = PRECOMPILING.set(note)
        try:
            with torch.inference_mode():
                for begin, end in ((0, 18), (18, 19), (19, 20)):
                    batch = feed(range(20), begin, end, torch.device("cpu"))
                    model.logits(model.forward(batch, kv))
        finally:
            PRECOMPILING.reset(recording)
        return set(launched)

    some = launches()
    assert len(launched) > 10
    fewer = len(launched)
    monkeypatch.setattr(Llama, "distinct", property(lambda self: range(len(self.blocks))))
    assert launches() == some, "layers that are left out launch what others do"
    assert fewer <= len(launched)


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


def test_a_cache_of_launchers_alone_has_no_kernels(tmp_path: Path) -> None:
    assert not has_kernels(tmp_path / "none")
    for name, file in (("DRIVER", "cuda_utils.so"), ("KERNEL", "__grp__norm_kernel.json")):
        assert not has_kernels(tmp_path)
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert has_kernels(tmp_path)


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


class Neighbours:
    """One of two ranks in threads of one process. met: their values, of which the least is wanted."""

    size = 2

    def __init__(self, rank: int, met: list[int], barrier: threading.Barrier) -> None:
        self.rank, self.met, self.barrier = rank, met, barrier

    def smallest(self, value: int) -> int:
        self.barrier.wait(300)
        self.met.append(value)
        self.barrier.wait(300)
        least = min(self.met)
        if self.barrier.wait(300) == 0:
            self.met.clear()
        self.barrier.wait(300)
        return least


def test_ranks_compile_a_share_each_and_then_what_is_missing() -> None:
    compiled: list[tuple[int, int]] = []
    cache: set[int] = set()
    ranks: list[list[int]] = [[], []]
    met, barrier = list[int](), threading.Barrier(2)

    def compile_one(rank: int, n: int) -> None:
        ranks[rank].append(n)
        if n not in cache:
            compiled.append((rank, n))
            cache.add(n)

    def run(rank: int) -> None:
        here = Neighbours(rank, met, barrier)
        with DeferredCompiler(lambda made: None) as held:
            for n in range(7):
                held.submit(compile_one, rank, n)
            told = list[tuple[int, int]]()
            held.run(1, lambda *each: told.append(each), slice(rank, None, 2))
            here.smallest(0)
            held.run(1, lambda *each: told.append(each))
            assert told == [(n + 1, 7) for n in range(7)]

    together(run)
    assert sorted(n for _, n in compiled) == [*range(7)] and all(n % 2 == rank for rank, n in compiled)
    assert ranks == [[0, 2, 4, 6, 1, 3, 5], [1, 3, 5, 0, 2, 4, 6]]


def together(run: Callable[[int], object]) -> None:
    """In two threads."""
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(run, rank) for rank in range(2)]:
            each.result(300)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_precompile_everything_if_one_lacked_a_kernel_even_if_another_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, barrier = list[int](), threading.Barrier(2)
    lacked, done = threading.local(), [[], []]  # type: ignore[var-annotated]

    @contextmanager
    def missed() -> Iterator[list[str]]:
        yield lacked.names

    monkeypatch.setattr(precompile, "_missed", missed)

    def run(rank: int) -> None:
        lacked.names = ["kernel"] if rank == 0 else []

        def work(n: int) -> None:
            done[rank].append(n)
            if fails and rank == 1:
                raise ValueError("no such shape")

        Precompiler(1, unwatched, Neighbours(rank, met, barrier))([partial(work, n) for n in range(3 * PROBES)])

    together(run)
    assert len(done[0]) == PROBES + 3 * PROBES
    assert len(done[1]) == (2 if fails else 4 * PROBES)


def test_results_of_work_that_was_never_run_are_cancelled() -> None:
    with DeferredCompiler(print) as held:
        left = held.submit(lambda: 1)
    assert isinstance(left.exception(timeout=100), CancelledError)


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert make_precompiler(ONE_RANK) is no_precompile
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert isinstance(make_precompiler(ONE_RANK), Precompiler)
