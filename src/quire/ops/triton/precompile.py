"""Kernels compiled in parallel before they are needed: the work that will launch them is done once without launching.

Triton compiles a kernel when it is first launched, and that launch waits: with an empty cache, steps get ready one
compilation after another. Most of the time is spent in LLVM and in the assembler, without the GIL, so that threads
compile several at a time. Ranks need the same kernels: each compiles a share, and finds the others' in the cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.capture import PRECOMPILING

log = logging.getLogger(__name__)

ReportProgress = Callable[[int, int], None]

PROBES = 8
"""Pieces of work that show whether the cache lacks any kernel: a start that lacks none does little more."""


class Sharing(Protocol):
    """The processes of a host that need the same kernels at the same time, or this one alone: a `ParallelGroup`."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def size(self) -> int:
        """How many there are."""

    def smallest(self, value: int) -> int:
        """The least of every process's value, once all have called it."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def smallest(self, value: int) -> int:
        """See `Sharing`."""
        return value


ALONE = Alone()


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

    def run(self, workers: int, report: ReportProgress, share: slice = slice(None)) -> None:
        """Run a share of the calls, unless they have run, `workers` at a time. report: called with (done, total)."""
        pool = ThreadPoolExecutor(workers)
        due = [one for one in [*self.futures.items()][share] if not one[0].done()]
        before = sum(future.done() for future in self.futures)
        try:
            running = [pool.submit(self._fulfil, *one) for one in due]
            for done, _ in enumerate(as_completed(running), before + 1):
                report(done, len(self.futures))
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


@cache
def compiler_key() -> threading.Thread:
    """A thread that computes what is part of every kernel's key, Triton's hash of itself, of which Triton keeps the
    result: reading 400 MB of compiler takes half a second, which other stages of a start hide."""
    thread = threading.Thread(target=triton_key, name="compiler-key", daemon=True)
    thread.start()
    return thread


def has_kernels(cache: Path) -> bool:
    """Whether a folder of Triton's has a kernel, each of which has a folder, as what launches kernels has, too."""
    return any(cache.glob("*/__grp__*"))


def with_launcher(kernel: Any) -> None:
    """Build a kernel's launcher: Triton 3.6 compiles it with a C compiler for each signature, and caches it, too."""
    driver.active.launcher_cls(kernel.src, kernel.metadata)


class Precompiler:
    """Compiles what pieces of work launch. workers: compilations at once. watch: a context whose value is called with
    (done, total). ranks: that all call this with the same work.

    What torch computes meanwhile is meaningless: its own operations do run, on memory that kernels would have filled.
    Launches that are not recorded are compiled when they are launched.
    """

    def __init__(
        self, workers: int, watch: Callable[[], AbstractContextManager[ReportProgress]], ranks: Sharing = ALONE
    ) -> None:
        self.workers, self.watch, self.ranks = workers, watch, ranks
        self.seen: set[tuple[object, ...]] = set()

    def __call__(self, works: Sequence[Callable[[], object]]) -> None:
        """Compile what some of them launch; what all launch, if any kernel of those was in no cache. With an empty
        cache, what all launch at once."""
        compiler_key().join()
        if not self.ranks.smallest(has_kernels(Path(knobs.cache.dir))):
            self._precompile(works)
            return
        apart = -(-len(works) // PROBES) or 1
        missed = self._precompile(works[apart // 2 :: apart])
        # A rank that lacked none may have found what another has just compiled.
        if self.ranks.smallest(-missed):
            self._precompile(works)

    def _precompile(self, works: Sequence[Callable[[], object]]) -> int:
        """Returns how many kernels were in no cache. All ranks meet once, also those that fail."""
        held = DeferredCompiler(with_launcher)
        with _missed() as missed, self.watch() as report:
            try:
                with AsyncCompileMode(held, ignore_errors=True), held:
                    with self._meeting():
                        self._record_all(works)
                        held.run(self.workers, report, slice(self.ranks.rank, None, self.ranks.size))
                    held.run(self.workers, report)
            except Exception as failure:
                # Of any kind: steps are compiled as they are launched, and may meet it again.
                log.warning("kernels are compiled one by one, because compiling in parallel failed (%r)", failure)
        return len(missed)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Wait at the end for what the other ranks do inside."""
        try:
            yield
        finally:
            self.ranks.smallest(0)

    def _record_all(self, works: Sequence[Callable[[], object]]) -> None:
        token = PRECOMPILING.set(self._record)
        try:
            for work in works:
                work()
        finally:
            PRECOMPILING.reset(token)

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
    if hasattr(value, "layout") and hasattr(value, "block_shape"):  # Gluon's, which is imported where it is used
        return value.base.dtype, tuple(value.block_shape), value.layout
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
