"""How device work is put in order: one stream, each kind of step captured as a CUDA graph when it is first needed.

Graph and eager are the same call: `run(key, work)` does `work`, and the next time may replay what it did. So `work`
must depend on its key alone and read whatever else it needs from device memory at fixed places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

from quire.ops.capture import Unready, captured
from quire.runner.rows import Shape

SMALL = (1, 4, 8)
"""Two rows take a third longer than four on an H200: see docs/benchmarks/speculation-h200-2026-11-21.md."""


class Key(NamedTuple):
    """Which graph: its kind, tokens T and spans S, both padded, and the most tokens that a span may have.

    "feed": a forward. "sample": of its rows, `tokens` being how many, asked the traits that they may have. "follow":
    a draft model's forward over what it has missed. "draft": up to `most` drafts for each of `spans` rows.
    """

    tokens: int
    spans: int
    most: int
    asked: int = 0
    kind: str = "feed"

    @staticmethod
    def of(shape: Shape) -> Key:
        """Decode or verification alone, or any mix."""
        fed, spans, most = int(shape.query_start[-1]), len(shape.spans), shape.max_query
        if most == int(shape.rows.max(initial=0)) and 4 * fed >= 3 * spans * most:
            return Key(padding(padding(spans) * most), padding(spans), most)
        return Key(coarse(fed), crowd(spans), coarse(fed))

    @staticmethod
    def head(picks: int, asked: int) -> Key:
        return Key(padding(picks), 0, 0, asked, "sample")


def padding(count: int) -> int:
    """`count` rounded up, by less the smaller it is: never more than an eighth above 16. For decode and for heads."""
    if count <= SMALL[-1]:
        return next(size for size in SMALL if count <= size)
    return rounded(count, 8, 16)


def coarse(count: int) -> int:
    """The same for mixed steps, of which more kinds exist and which mind padding less: by up to a quarter."""
    return rounded(max(count, 16), 16, 8)


def rounded(count: int, step: int, parts: int) -> int:
    """Up to a multiple of `step`, or of a larger one that cuts the next power of two into `parts`, 128 at most."""
    step = max(step, min(128, (1 << (count - 1).bit_length()) // parts))
    return -(-count // step) * step


def crowd(spans: int) -> int:
    """Spans of a mixed step, rounded up: a few, many, or as decode."""
    return next((size for size in (16, 256) if spans <= size), padding(spans))


Works = Sequence[Callable[[], object]]
"""Pieces of device work."""


def unrehearsed(works: Works) -> None:
    """Kernels are compiled when they are launched, or none is."""


class Mark(Protocol):
    """A point in the order of device work."""

    def synchronize(self) -> None:
        """Wait until all before it is done."""

    def query(self) -> bool:
        """Whether it is."""


class Queue(Protocol):
    """The order of device work. A context manager: work begun inside belongs to it."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def rehearse(self, works: Works) -> None:
        """Get ready what all of these need, nothing being under way: what they compute meanwhile means nothing."""

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Do `work`, the same for the same key."""

    def get_ready(self, key: Key, work: Callable[[], object]) -> None:
        """Have `run` find everything there. Before there are rows: whether `work` is done for it does not matter."""

    def mark(self) -> Mark: ...

    def wait(self) -> None:
        """Until nothing is under way."""

    def close(self) -> None:
        """Forget what was captured: its memory goes back."""


class Done:
    """The mark of what is done when it returns."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class AtOnce:
    """Work is done as it comes: a CPU."""

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def rehearse(self, works: Works) -> None:
        unrehearsed(works)

    def run(self, key: Key, work: Callable[[], object]) -> None:
        work()

    def get_ready(self, key: Key, work: Callable[[], object]) -> None:
        self.run(key, work)

    def mark(self) -> Done:
        return Done()

    def wait(self) -> None:
        return

    def close(self) -> None:
        return


class CudaQueue:
    """A stream of one GPU. largest: tokens (or rows) up to which work is captured, 0 for never (eager). rehearse:
    compiles what work launches.

    Graphs share one memory pool: they never run at the same time, and leave their results in tensors made outside.
    """

    def __init__(self, device: torch.device, largest: int, rehearse: Callable[[Works], None] = unrehearsed) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.entered = torch.cuda.stream(self.stream)
        self.largest, self.rehearse = largest, rehearse
        self.graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self.begun: set[tuple[str, int]] = set()
        self.pool = torch.cuda.graph_pool_handle() if largest else None

    def __enter__(self) -> CudaQueue:
        self.entered.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered.__exit__(kind, error, trace)

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Replay what this key's work was, or do it and remember it: capturing records and does nothing else."""
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self.begun.add((key.kind, key.asked))
        if key.tokens <= self.largest:
            self.graphs[key] = captured(work, self.pool)

    def get_ready(self, key: Key, work: Callable[[], object]) -> None:
        """Of each kind the first is done, since it makes what the others use too; the others are only recorded."""
        if key.tokens > self.largest or (key.kind, key.asked) not in self.begun:
            return self.run(key, work)
        try:
            self.graphs[key] = captured(work, self.pool)
        except Unready:  # what was begun lives until this block ends: a pool without a graph is gone for torch
            self.run(key, work)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self.graphs.clear()
        torch.cuda.empty_cache()  # the allocator keeps what was freed, and the next engine asks the card what is free
