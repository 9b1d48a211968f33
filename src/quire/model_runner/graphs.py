"""The order of device work: one stream, on which each kind of step is captured as a CUDA graph when it is first needed.

Graph and eager execution are the same call: `run(key, work)` does `work`, and may replay next time what it did. So
`work` that a key's graph captures must depend on the key alone and read whatever else it needs from device memory at
fixed addresses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from quire.model_runner.row_state import StepShape
from quire.ops.capture import NotCapturable, captured

log = logging.getLogger(__name__)

SMALL = (1, 4, 8)
"""Two rows take a third longer than four on an H200: see docs/benchmarks/speculation-h200-2026-11-21.md."""


class GraphKey(NamedTuple):
    """Which graph: its kind, tokens T and spans S, both padded, and the most tokens that a span may have.

    "feed": a forward. "hidden": one that keeps the hidden states of every token. "sample": sampling `tokens` rows that
    may have the sampling `features`. "scatter": so many changes from slot `spans` of the ring. "masks": copying so many
    lines of masks. "follow": a draft model's forward over tokens that it has missed. "draft": up to `max_query` drafts
    for each of `spans` rows. near: of a forward whose sequences are all so short that an indexer would choose every
    token.
    """

    tokens: int
    spans: int
    max_query: int
    features: int = 0
    kind: str = "feed"
    near: bool = False

    @staticmethod
    def of(shape: StepShape) -> GraphKey:
        """The forward of a step: decode or verification alone, or any mix."""
        tokens, spans, most = int(shape.query_start[-1]), len(shape.spans), shape.max_query
        if most == int(shape.num_samples.max(initial=0)) and 4 * tokens >= 3 * spans * most:
            return GraphKey(padding(padding(spans) * most), padding(spans), most)
        return GraphKey(bucket_tokens(tokens), bucket_seqs(spans), bucket_tokens(tokens))

    @staticmethod
    def head(samples: int, features: int) -> GraphKey:
        """Sampling of so many rows."""
        return GraphKey(padding(samples), 0, 0, features, "sample")


def padding(count: int) -> int:
    """`count` rounded up for decode and sampling: by at most an eighth above 16, and by less the smaller it is."""
    if count <= SMALL[-1]:
        return next(size for size in SMALL if count <= size)
    return round_up(count, 8, 16)


def bucket_tokens(count: int) -> int:
    """Tokens of a mixed step, rounded up by at most a quarter: more kinds exist, and padding costs them less."""
    return round_up(max(count, 16), 16, 8)


def round_up(count: int, step: int, parts: int) -> int:
    """Up to a multiple of `step`, or of a larger one (at most 128) that divides the next power of two in `parts`."""
    step = max(step, min(128, (1 << (count - 1).bit_length()) // parts))
    return -(-count // step) * step


def bucket_seqs(spans: int) -> int:
    """Spans of a mixed step, rounded up: to 16, to 256, or as for decode."""
    return next((size for size in (16, 256) if spans <= size), padding(spans))


NONE = GraphKey(0, 0, 0)


def stand_ins(keys: Iterable[GraphKey]) -> dict[GraphKey, GraphKey]:
    """Which forwards among `keys` need no graph at first, and whose graph does their steps meanwhile: those of few
    spans, and those with more than a quarter of the tokens of the next larger one."""
    out, forwards = dict[GraphKey, GraphKey](), sorted((key for key in keys if key.kind == "feed"), reverse=True)
    for decode in (True, False):
        alike = [key for key in forwards if (key.max_query == 1) == decode]
        widest, larger = max((key.spans for key in alike), default=0), NONE
        for key in alike:
            narrow = not decode and key.spans < widest
            if larger is not NONE and (narrow or 4 * key.tokens > larger.tokens):
                out[key] = larger
            else:
                larger = key
    return out


def power_of_two(count: int) -> int:
    """The least power of two from `count` on."""
    return 1 << max(0, count - 1).bit_length()


OFTEN = 64
"""Steps of a size after which it gets its graph, though the engine is never idle."""


Works = Sequence[Callable[[], object]]
"""Pieces of device work."""


def no_precompile(works: Works) -> None:
    """Compile nothing ahead: kernels are compiled when they are first launched, or there are none."""


ReportProgress = Callable[[int, int], None]
"""Called with how many steps are prepared, and how many there are."""


@contextmanager
def unwatched() -> Iterator[ReportProgress]:
    """Show nothing."""
    yield lambda done, total: None


class WorkQueue:
    """The order of device work; here it is done as it is submitted, as on a CPU.

    A context manager: work submitted inside the block belongs to the queue. watch: shows how far `prepare_all` is.
    """

    watch: Callable[[], AbstractContextManager[ReportProgress]] = staticmethod(unwatched)

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def precompile(self, works: Works) -> None:
        """Compile what all of these launch, while nothing is in flight. What they compute meanwhile is meaningless."""

    def captures(self, key: GraphKey) -> bool:
        """Whether work of this key is replayed later, and so may depend on the key alone."""
        return False

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Do `work`, the same for the same key."""
        work()

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Have everything ready for `run`, before there are rows: `work` may be done or not."""
        self.run(key, work)

    def prepare_all(self, works: Sequence[tuple[GraphKey, Callable[[], object]]]) -> None:
        """`prepare` each in order, and report how far it is."""
        with self.watch() as report:
            for done, (key, work) in enumerate(works, 1):
                self.prepare(key, work)
                report(done, len(works))

    def postpone(
        self, works: Sequence[tuple[GraphKey, Callable[[], object]]], larger: Mapping[GraphKey, GraphKey]
    ) -> None:
        """`prepare` these later, one with each `prepare_next`; meanwhile steps of `larger` do theirs."""
        self.prepare_all(works)

    def prepare_next(self) -> bool:
        """`prepare` one of those that were postponed; False: none is left."""
        return False

    def serving(self, key: GraphKey) -> GraphKey:
        """The key whose work does the step of this one."""
        return key

    def agreed(self, done: bool) -> bool:
        """Whether all ranks, which do the same work in the same order, have `done` something."""
        return done

    def record(self) -> torch.cuda.Event | None:
        """An event that is reached when the work submitted so far is done; None if it is done already."""
        return None

    def synchronize(self) -> None:
        """Wait until nothing is in flight."""

    def close(self) -> None:
        """Release captured graphs and their memory."""


class CudaQueue(WorkQueue):
    """A stream of one GPU.

    largest: tokens (or rows) up to which work is captured, 0 for never (eager). precompile: compiles what work
    launches. agree: see `WorkQueue.agreed`. Graphs share one memory pool: they never run at the same time, and leave
    their results in tensors that were made outside.
    """

    def __init__(
        self,
        device: torch.device,
        largest: int,
        precompile: Callable[[Works], None] = no_precompile,
        watch: Callable[[], AbstractContextManager[ReportProgress]] = unwatched,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.watch = watch
        self.agree = agree
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.before: list[tuple[int, int, int]] = []
        self.largest = largest
        self._precompile = precompile
        self.graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self.started: set[tuple[str, int]] = set()
        self.postponed: dict[GraphKey, Callable[[], object]] = {}
        self.larger: dict[GraphKey, GraphKey] = {}
        self.served = Counter[GraphKey]()
        self.pool = torch.cuda.graph_pool_handle() if largest else None

    def __enter__(self) -> CudaQueue:
        # As `torch.cuda.stream` does, which takes 13 us, three times in each step.
        stream = self.stream
        self.before.append(torch._C._cuda_getCurrentStream(stream.device_index))
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._cuda_setStream(*self.before.pop())

    def precompile(self, works: Works) -> None:
        """Compile what all of these launch."""
        self._precompile(works)

    def captures(self, key: GraphKey) -> bool:
        """Whether the key's step is small enough for a graph."""
        return key.tokens <= self.largest

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Replay the key's graph, or do the work and capture it: capturing itself computes nothing."""
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self.started.add((key.kind, key.features))
        if self.captures(key):
            self.graphs[key] = captured(work, self.pool)

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Capture the work. The first of each kind is done too, since it allocates what the others use."""
        if not self.captures(key) or (key.kind, key.features) not in self.started:
            return self.run(key, work)
        try:
            self.graphs[key] = captured(work, self.pool)
        except NotCapturable:
            # The failed capture lives until this block ends: torch drops a memory pool that no graph uses.
            self.run(key, work)

    def postpone(
        self, works: Sequence[tuple[GraphKey, Callable[[], object]]], larger: Mapping[GraphKey, GraphKey]
    ) -> None:
        """See `WorkQueue`."""
        self.postponed, self.larger = dict(works), dict(larger)

    def prepare_next(self) -> bool:
        """Capture what was asked for most."""
        if self.postponed:
            self._capture_postponed(max(self.postponed, key=self.served.__getitem__))
        return bool(self.postponed)

    def serving(self, key: GraphKey) -> GraphKey:
        """The key itself, or while it has no graph of its own that of a larger one."""
        larger = self.larger.get(key)
        if larger is None:
            return key
        self.served[key] += 1
        if self.served[key] == OFTEN and key in self.postponed:
            self._capture_postponed(key)
        return larger if key in self.larger else key

    def _capture_postponed(self, key: GraphKey) -> None:
        """Capture it, after which it serves itself; where a rank cannot, the larger one goes on to serve it on all."""
        work, graph = self.postponed.pop(key), None
        try:
            graph = captured(work, self.pool)
        except Exception as failure:
            # Of any kind, such as too little memory: no request needs this graph.
            log.warning("steps of %d tokens run as those of %d: %r", key.tokens, self.larger[key].tokens, failure)
        if self.agreed(graph is not None) and graph is not None:
            self.graphs[key] = graph
            del self.larger[key]

    def agreed(self, done: bool) -> bool:
        """See `WorkQueue`."""
        return self.agree(done)

    def record(self) -> torch.cuda.Event:
        """An event after the work submitted so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        self.stream.synchronize()

    def close(self) -> None:
        """Release the graphs. The caching allocator is emptied too: the next engine asks the GPU what is free."""
        self.postponed.clear()
        self.graphs.clear()
        torch.cuda.empty_cache()
