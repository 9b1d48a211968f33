"""Products of many rows are a library's, each by whichever of its own proposals was fastest on this card.

What it proposes first is not always that: gate and up of Llama 3.1 8B take 266 microseconds at 448 rows by its first,
154 by its second (H200, docs/benchmarks). So before an engine is ready, each shape that its steps have is multiplied in
every way there is, matrices cold, and the fastest is kept: in a file beside compiled kernels, so that the next start
knows. Afterwards nothing is tried: what comes unknown is left to torch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

TORCH = ""
"""The name of the way that torch takes by itself."""


class Shape(NamedTuple):
    """x [rows, inputs] times weight [outputs, inputs], a bias added or none, of numbers of a kind ("bfloat16")."""

    rows: int
    outputs: int
    inputs: int
    bias: bool
    kind: str

    def __str__(self) -> str:
        return ",".join(map(str, (*self[:3], int(self.bias), self.kind)))


class Way(Protocol):
    """One way of multiplying."""

    @property
    def name(self) -> str:
        """Brings it back, see `Products.way`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The product of a shape into out. May be captured."""


class Products(Protocol):
    """A library. version: what its ways, and how long they take, are bound to."""

    version: str

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it multiplies these at all."""

    def ways(self, shape: Shape) -> Sequence[Way]: ...

    def way(self, shape: Shape, name: str) -> Way:
        """Raises ValueError for what is no name."""


Timed = Callable[[Sequence[Callable[[], None]]], Sequence[float]]
"""Seconds that each of some works takes, under like conditions."""


class ByTorch:
    """See `Way`."""

    name = TORCH

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


BY_TORCH: Way = ByTorch()


class Library:
    """products: None, or where there are none: torch multiplies. timed: tells ways apart."""

    def __init__(self, products: Products | None, timed: Timed) -> None:
        self.products, self.timed = products, timed
        self.known: dict[Shape, Way] = {}
        self.names: dict[str, str] = {}
        self.open = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]."""
        outputs, inputs = weight.shape
        shape = Shape(x.numel() // inputs, outputs, inputs, bias is not None, str(x.dtype).removeprefix("torch."))
        way = self.known.get(shape, BY_TORCH)
        if self.open and shape not in self.known and self._takes(x, weight):
            way = self.known[shape] = self._remembered(shape) or self._fastest(
                shape, x.reshape(-1, inputs), weight, bias
            )
        if way is BY_TORCH:
            return F.linear(x, weight, bias)
        out = x.new_empty(*x.shape[:-1], outputs)
        way(x.contiguous(), weight, bias, out)
        return out

    @contextmanager
    def learning(self, book: Path) -> Iterator[None]:
        """Meanwhile every new shape is learnt. book: where names of ways are, and will be."""
        if self.products is None:
            yield
            return
        kept = read(book)
        known = kept.get(self.products.version, {})
        self.names, began, self.open = dict(known), time.monotonic(), True
        try:
            yield
        finally:
            self.open = False
        if self.names != known:
            write(book, {**kept, self.products.version: self.names})
            log.info("products: %d shapes known, %.1f s", len(self.names), time.monotonic() - began)

    def _takes(self, x: Tensor, weight: Tensor) -> bool:
        return self.products is not None and self.products.takes(x, weight) and not capturing(x)

    def _remembered(self, shape: Shape) -> Way | None:
        name = self.names.get(str(shape))
        if name is None or self.products is None:
            return None
        try:
            return BY_TORCH if name == TORCH else self.products.way(shape, name)
        except ValueError:
            return None

    def _fastest(self, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Way:
        ways, out = [BY_TORCH, *(self.products.ways(shape) if self.products else ())], x.new_empty(shape[:2])
        took = self.timed([partial(way, x, weight, bias, out) for way in ways])
        best = ways[min(range(len(ways)), key=took.__getitem__)]
        self.names[str(shape)] = best.name
        return best


def capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def read(book: Path) -> dict[str, dict[str, str]]:
    """What a book says; nothing, if it is not there or cannot be read."""
    try:
        said = json.loads(book.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {version: names for version, names in said.items() if isinstance(names, dict)}


def write(book: Path, said: dict[str, dict[str, str]]) -> None:
    """Whole or not at all. Where it cannot be written, the next start times again."""
    new = book.with_suffix(f".{os.getpid()}")
    try:
        book.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(said))
        new.replace(book)
    except OSError as error:
        log.warning("which products are fastest could not be kept in %s: %s", book, error)


COLD = 64 << 20
"""Bytes read before each product: more than a card's L2 holds, so that matrices come from memory, as in a forward."""

TURNS, TIMES = 3, 2
"""Of each way, and how often it multiplies in one."""


def on_the_card(works: Sequence[Callable[[], None]]) -> list[float]:
    """See `Timed`: the least of a few turns in which each has its turn, captured, since launching takes longer."""
    cold = torch.zeros(COLD // 8, dtype=torch.int64, device="cuda")
    graphs, best = [graph_of(work, cold) for work in works], [float("inf")] * len(works)
    for _ in range(TURNS):
        marks = [around(graph) for graph in graphs]
        torch.cuda.current_stream().synchronize()
        best = [min(least, a.elapsed_time(b) / 1e3) for least, (a, b) in zip(best, marks, strict=True)]
    return best


def graph_of(work: Callable[[], None], cold: Tensor) -> torch.cuda.CUDAGraph:
    """A work that finds nothing in L2, a few times."""
    work()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(TIMES):
            cold.amax()
            work()
    finally:
        graph.capture_end()
    return graph


def around(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
    begun.record()
    graph.replay()
    ended.record()
    return begun, ended
