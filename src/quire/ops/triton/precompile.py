"""Kernels compiled in parallel before they are needed: the work that will launch them is done once without launching.

Triton compiles a kernel when it is first launched, and that launch waits: with an empty cache, steps get ready one
compilation after another. Most of the time is spent in LLVM and in the assembler, without the GIL, so that threads
compile several at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.capture import PRECOMPILING

log = logging.getLogger(__name__)

ReportProgress = Callable[[int, int], None]

PROBES = 8
"""Pieces of work that show whether the cache lacks any kernel: a start that lacks none does little more."""


class DeferredCompiler(Executor):
    """Keeps what is submitted until `run`: threads that compile would slow down the thread that records."""

    def __init__(self, then: Callable[[Any], object]) -> None:
        """then: what is done with each result, in the same thread."""
        self.then = then
        self.futures: dict[Future[Any], Callable[[], Any]] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keep a call for `run`."""
        future: Future[Any] = Future()
        self.futures[future] = partial(fn, *args, **kwargs)
        return future

    def run(self, workers: int, report: ReportProgress) -> None:
        """Run all calls, `workers` at a time. report: called with (done, total)."""
        pool = ThreadPoolExecutor(workers)
        try:
            running = [pool.submit(self._fulfil, *one) for one in self.futures.items()]
            for done, _ in enumerate(as_completed(running), 1):
                report(done, len(running))
        finally:
            pool.shutdown(cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what has not run."""
        for future in self.futures:
            if not future.done():
                future.set_exception(CancelledError())

    def _fulfil(self, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            made = work()
            self.then(made)
        except Exception as failure:
            # The launch that needs the kernel meets it again.
            future.set_exception(failure)
        else:
            future.set_result(made)


def with_launcher(kernel: Any) -> None:
    """Build a kernel's launcher: Triton 3.6 compiles it with a C compiler for each signature, and caches it, too."""
    driver.active.launcher_cls(kernel.src, kernel.metadata)


class Precompiler:
    """Compiles what pieces of work launch. workers: compilations at once. watch: a context whose value is called with
    (done, total).

    What torch computes meanwhile is meaningless: its own operations do run, on memory that kernels would have filled.
    Launches that are not recorded are compiled when they are launched.
    """

    def __init__(self, workers: int, watch: Callable[[], AbstractContextManager[ReportProgress]]) -> None:
        self.workers, self.watch = workers, watch
        self.seen: set[tuple[object, ...]] = set()

    def __call__(self, works: Sequence[Callable[[], object]]) -> None:
        """Compile what some of them launch; what all launch, if any kernel of those was in no cache."""
        apart = -(-len(works) // PROBES) or 1
        try:
            if self._precompile(works[apart // 2 :: apart]):
                self._precompile(works)
        except Exception as failure:
            # Of any kind: steps are compiled as they are launched, and may meet it again.
            log.warning("kernels are compiled one by one, because compiling in parallel failed (%r)", failure)

    def _precompile(self, works: Sequence[Callable[[], object]]) -> int:
        """Returns how many kernels were in no cache."""
        held = DeferredCompiler(with_launcher)
        with _missed() as missed, AsyncCompileMode(held, ignore_errors=True), held:
            token = PRECOMPILING.set(self._record)
            try:
                for work in works:
                    work()
            finally:
                PRECOMPILING.reset(token)
            with self.watch() as report:
                held.run(self.workers, report)
        return len(missed)

    def _record(self, made: Any, grid: object, *args: Any, **options: Any) -> None:
        """Compile a launch's kernel, once: Triton is slow to notice that it is being compiled, and a model has the same
        layer many times."""
        signature = (made, *map(_kind, args), *sorted(options.items()))
        if signature not in self.seen:
            self.seen.add(signature)
            made.warmup(*args, grid=grid, **options)


def _kind(value: Any) -> object:
    """What identifies an argument: at least everything that a kernel is compiled for."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else (type(value), value)


@contextmanager
def _missed() -> Iterator[list[str]]:
    """The names of kernels that are compiled inside the block, and not read from the cache."""
    names: list[str] = []

    def on_compile(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    with knobs.compilation.scope():
        knobs.compilation.listener = on_compile
        yield names
