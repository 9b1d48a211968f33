"""How device work is put in order: one stream, each kind of step captured as a CUDA graph when it is first needed.

Graph and eager are the same call: `run(key, work)` does `work`, and the next time may replay what it did. So `work`
must depend on its key alone and read whatever else it needs from device memory at fixed places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

from quire.model_runner.row_state import StepShape
from quire.ops.capture import NotCapturable, captured

SMALL = (1, 4, 8)
"""Two rows take a third longer than four on an H200: see docs/benchmarks/speculation-h200-2026-11-21.md."""


class GraphKey(NamedTuple):
    """Which graph: its kind, tokens T and spans S, both padded, and the most tokens that a span may have.

    "feed": a forward. "sample": of its rows, `tokens` being how many, asked the traits that they may have. "follow":
    a draft model's forward over what it has missed. "draft": up to `most` drafts for each of `spans` rows.
    """

    tokens: int
    spans: int
    max_query: int
    features: int = 0
    kind: str = "feed"

    @staticmethod
    def of(shape: StepShape) -> GraphKey:
        """Decode or verification alone, or any mix."""
        fed, spans, most = int(shape.query_start[-1]), len(shape.spans), shape.max_query
        if most == int(shape.num_samples.max(initial=0)) and 4 * fed >= 3 * spans * most:
            return GraphKey(padding(padding(spans) * most), padding(spans), most)
        return GraphKey(bucket_tokens(fed), bucket_seqs(spans), bucket_tokens(fed))

    @staticmethod
    def head(picks: int, asked: int) -> GraphKey:
        return GraphKey(padding(picks), 0, 0, asked, "sample")


def padding(count: int) -> int:
    """`count` rounded up, by less the smaller it is: never more than an eighth above 16. For decode and for heads."""
    if count <= SMALL[-1]:
        return next(size for size in SMALL if count <= size)
    return round_up(count, 8, 16)


def bucket_tokens(count: int) -> int:
    """The same for mixed steps, of which more kinds exist and which mind padding less: by up to a quarter."""
    return round_up(max(count, 16), 16, 8)


def round_up(count: int, step: int, parts: int) -> int:
    """Up to a multiple of `step`, or of a larger one that cuts the next power of two into `parts`, 128 at most."""
    step = max(step, min(128, (1 << (count - 1).bit_length()) // parts))
    return -(-count // step) * step


def bucket_seqs(spans: int) -> int:
    """Spans of a mixed step, rounded up: a few, many, or as decode."""
    return next((size for size in (16, 256) if spans <= size), padding(spans))


Works = Sequence[Callable[[], object]]
"""Pieces of device work."""


def no_precompile(works: Works) -> None:
    """Kernels are compiled when they are launched, or none is."""


class Event(Protocol):
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

    def precompile(self, works: Works) -> None:
        """Get ready what all of these need, nothing being under way: what they compute meanwhile means nothing."""

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Do `work`, the same for the same key."""

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Have `run` find everything there. Before there are rows: whether `work` is done for it does not matter."""

    def record(self) -> Event: ...

    def synchronize(self) -> None:
        """Until nothing is under way."""

    def close(self) -> None:
        """Forget what was captured: its memory goes back."""


class Completed:
    """The mark of what is done when it returns."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class EagerQueue:
    """Work is done as it comes: a CPU."""

    def __enter__(self) -> EagerQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def precompile(self, works: Works) -> None:
        no_precompile(works)

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        work()

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        self.run(key, work)

    def record(self) -> Completed:
        return Completed()

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        return


class CudaQueue:
    """A stream of one GPU. largest: tokens (or rows) up to which work is captured, 0 for never (eager). rehearse:
    compiles what work launches.

    Graphs share one memory pool: they never run at the same time, and leave their results in tensors made outside.
    """

    def __init__(self, device: torch.device, largest: int, rehearse: Callable[[Works], None] = no_precompile) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.entered = torch.cuda.stream(self.stream)
        self.largest, self.precompile = largest, rehearse
        self.graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.begun: set[tuple[str, int]] = set()
        self.pool = torch.cuda.graph_pool_handle() if largest else None

    def __enter__(self) -> CudaQueue:
        self.entered.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered.__exit__(kind, error, trace)

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Replay what this key's work was, or do it and remember it: capturing records and does nothing else."""
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self.begun.add((key.kind, key.features))
        if key.tokens <= self.largest:
            self.graphs[key] = captured(work, self.pool)

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Of each kind the first is done, since it makes what the others use too; the others are only recorded."""
        if key.tokens > self.largest or (key.kind, key.features) not in self.begun:
            return self.run(key, work)
        try:
            self.graphs[key] = captured(work, self.pool)
        except NotCapturable:  # what was begun lives until this block ends: a pool without a graph is gone for torch
            self.run(key, work)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self.graphs.clear()
        torch.cuda.empty_cache()  # the allocator keeps what was freed, and the next engine asks the card what is free
