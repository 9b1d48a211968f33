"""Kernels compiled side by side before they are needed: the work that will launch them is done once without launching.

Triton compiles a kernel when it is first launched, and that launch waits: with nothing in its cache, steps are made
ready one compilation after another. Most of one is spent in LLVM and in the assembler, without Python's lock, so that
threads do several at a time.
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

from quire.ops.triton.launch import PRECOMPILING

log = logging.getLogger(__name__)

ReportProgress = Callable[[int, int], None]

PROBES = 8
"""How many pieces of work show whether the cache lacks any kernel: a start that lacks none does little more."""


class DeferredCompiler(Executor):
    """Keeps what it is given until it is told to run: threads that compile would slow down the one that rehearses."""

    def __init__(self, then: Callable[[Any], object]) -> None:
        """then: what is made of each result, beside."""
        self.then = then
        self.futures: dict[Future[Any], Callable[[], Any]] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures[future] = partial(fn, *args, **kwargs)
        return future

    def run(self, workers: int, tell: ReportProgress) -> None:
        """All of it, so many at a time. tell: hears (done, in all)."""
        pool = ThreadPoolExecutor(workers)
        try:
            running = [pool.submit(self._fulfil, *one) for one in self.futures.items()]
            for done, _ in enumerate(as_completed(running), 1):
                tell(done, len(running))
        finally:
            pool.shutdown(cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What has not run will not: nobody is to wait for it."""
        for future in self.futures:
            if not future.done():
                future.set_exception(CancelledError())

    def _fulfil(self, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            made = work()
            self.then(made)
        except Exception as failure:  # whoever launches it for good meets it again
            future.set_exception(failure)
        else:
            future.set_result(made)


def with_launcher(kernel: Any) -> None:
    """Have made what launches a kernel: Triton 3.6 has a C compiler build it for each signature, and caches it, too."""
    driver.active.launcher_cls(kernel.src, kernel.metadata)


class Precompiler:
    """Compiles what pieces of work launch. workers: compilations at once. watch: is told (done, in all) of them.

    What torch computes meanwhile means nothing: its own operations do happen, on whatever the memory held that kernels
    would have filled. What a rehearsal misses is compiled when it is launched.
    """

    def __init__(self, workers: int, watch: Callable[[], AbstractContextManager[ReportProgress]]) -> None:
        self.workers, self.watch = workers, watch
        self.seen: set[tuple[object, ...]] = set()

    def __call__(self, works: Sequence[Callable[[], object]]) -> None:
        """A few of them; all, if any kernel of those was in no cache."""
        apart = -(-len(works) // PROBES) or 1
        try:
            if self._precompile(works[apart // 2 :: apart]):
                self._precompile(works)
        except Exception as failure:  # whatever it is, steps are made ready after it, and may meet it again
            log.warning("kernels are compiled one by one: they could not be together (%r)", failure)

    def _precompile(self, works: Sequence[Callable[[], object]]) -> int:
        """How many kernels were in no cache."""
        held = DeferredCompiler(with_launcher)
        with _missed() as missed, AsyncCompileMode(held, ignore_errors=True), held:
            heard = PRECOMPILING.set(self._heard)
            try:
                for work in works:
                    work()
            finally:
                PRECOMPILING.reset(heard)
            with self.watch() as tell:
                held.run(self.workers, tell)
        return len(missed)

    def _heard(self, made: Any, grid: object, *args: Any, **options: Any) -> None:
        """Triton is slow to find out that a kernel is being compiled; a model has the same layer many times."""
        told = (made, *map(_kind, args), *sorted(options.items()))
        if told not in self.seen:
            self.seen.add(told)
            made.warmup(*args, grid=grid, **options)


def _kind(value: Any) -> object:
    """Of an argument, at least all that a kernel is compiled for."""
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else (type(value), value)


@contextmanager
def _missed() -> Iterator[list[str]]:
    """The names of kernels that are compiled meanwhile, and not read from the cache."""
    names: list[str] = []

    def heard(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    with knobs.compilation.scope():
        knobs.compilation.listener = heard
        yield names
