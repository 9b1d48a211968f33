"""Products of many rows are a library's, each by whichever of its own proposals was fastest on this card.

What it proposes first is not always that: gate and up of Llama 3.1 8B take 266 microseconds at 448 rows by its first,
154 by its second (H200, docs/benchmarks). So before an engine is ready, each shape that its steps have is multiplied in
every way there is, matrices cold, and the fastest is kept: in a file beside compiled kernels, so that the next start
knows. Afterwards nothing is tried: what comes unknown is left to torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.json_files import read_object, replace_object
from quire.ops.capture import PRECOMPILING, NotCapturable, captured
from quire.ops.stages import inside_stage

log = logging.getLogger(__name__)

TORCH = ""
"""The name of the way that torch takes by itself."""


class GemmShape(NamedTuple):
    """x [rows, inputs] times weight [outputs, inputs], a bias added or none, all of one kind of numbers."""

    rows: int
    outputs: int
    inputs: int
    bias: bool
    kind: torch.dtype

    def __str__(self) -> str:
        return ",".join(map(str, (*self[:3], int(self.bias), str(self.kind).removeprefix("torch."))))


class GemmAlgorithm(Protocol):
    """One way of multiplying."""

    @property
    def name(self) -> str:
        """Identifies it, see `GemmLibrary.algorithm`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The product of a shape into `out`. May be captured."""


class GemmLibrary(Protocol):
    """A GEMM library. version: what its algorithms and their times depend on."""

    version: str

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it multiplies these at all."""

    def algorithms(self, shape: GemmShape) -> Sequence[GemmAlgorithm]:
        """Its proposals for a shape."""

    def algorithm(self, shape: GemmShape, name: str) -> GemmAlgorithm:
        """Raises ValueError if the name is not one."""


Timed = Callable[[Sequence[Callable[[], None]]], Sequence[float]]
"""Seconds that each of some works takes, under like conditions."""


class TorchGemm:
    """The algorithm that torch chooses."""

    name = TORCH

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ weight.T + bias. x: (m, k); weight: (n, k); out: (m, n)."""
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


TORCH_GEMM: GemmAlgorithm = TorchGemm()


class AlgorithmCache:
    """Names of the fastest ways, by the version of the library that has them and by shape. path: the file it is kept
    in, which several engines may write."""

    def __init__(self, path: Path) -> None:
        self.path, self.names, self.new = path, read(path), 0

    def find(self, version: str, shape: GemmShape) -> str | None:
        """The name of the fastest algorithm, if it is known."""
        return self.names.get(version, {}).get(str(shape))

    def note(self, version: str, shape: GemmShape, name: str) -> None:
        """Store the fastest algorithm of a shape."""
        self.names.setdefault(version, {})[str(shape)] = name
        self.new += 1

    def keep(self) -> None:
        """What is new, with what others have kept meanwhile. A file of another format is left alone."""
        if other_format(read_object(self.path)) is not None:
            return
        others = read(self.path)
        write(self.path, {**others, **{version: {**others.get(version, {}), **n} for version, n in self.names.items()}})


AUTOTUNING: ContextVar[AlgorithmCache | None] = ContextVar("quire_learning", default=None)
"""Where this thread notes what it learns of products; None: it learns nothing."""


def num_tuned() -> int:
    """How many shapes have been timed so far, by this start."""
    cache = AUTOTUNING.get()
    return 0 if cache is None else cache.new


@contextmanager
def autotuning(path: Path) -> Iterator[None]:
    """Inside the block every new shape is timed. path: of the file that keeps the results."""
    cache, began = AlgorithmCache(path), time.monotonic()
    before = AUTOTUNING.set(cache)
    try:
        yield
    finally:
        AUTOTUNING.reset(before)
    if cache.new:
        cache.keep()
        log.info("matrix products: chose algorithms for %d shapes in %.1f s", cache.new, time.monotonic() - began)


class GemmAutotuner:
    """Of one engine. products: the library, None if there is none and `usual` multiplies. timed: measures algorithms.
    usual: the algorithm beside the library's, of name TORCH."""

    def __init__(self, products: GemmLibrary | None, timed: Timed, usual: GemmAlgorithm = TORCH_GEMM) -> None:
        self.products, self.timed, self.usual = products, timed, usual
        self.known: dict[GemmShape, GemmAlgorithm] = {}
        self.cache: AlgorithmCache | None = None

    def untuned(self) -> GemmAutotuner:
        """One with the usual algorithm alone."""
        return GemmAutotuner(None, self.timed, self.usual)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]."""
        return multiplied(self.algorithm(x, weight, bias), x, weight, bias)

    def algorithm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> GemmAlgorithm:
        """The fastest algorithm for a shape, from now on; the usual one where nothing is tuned. Raises NotCapturable if
        it would have to be timed while a graph is captured."""
        outputs, inputs = weight.shape
        shape = GemmShape(x.numel() // inputs, outputs, inputs, bias is not None, x.dtype)
        return self.known.get(shape) or self._autotune(shape, x, weight, bias)

    def _autotune(self, shape: GemmShape, x: Tensor, weight: Tensor, bias: Tensor | None) -> GemmAlgorithm:
        products, learns = self.products, AUTOTUNING.get()
        # What is captured after the start finds what is known, too.
        cache = self.cache = learns or self.cache
        if products is None or cache is None or not products.supports(x, weight):
            return self.usual
        way, name = None, cache.find(products.version, shape)
        try:
            way = self.usual if name == TORCH else None if name is None else products.algorithm(shape, name)
        except ValueError as error:
            log.warning("%s: %s is timed again: %s", cache.path, shape, error)
        if way is None:
            if learns is None:
                return self.usual
            if capturing(x):
                raise NotCapturable(f"the fastest algorithm for {shape} is not known yet")
            ways, out = [self.usual, *products.algorithms(shape)], x.new_empty(shape.rows, shape.outputs)
            with inside_stage("tuning"):
                took = self.timed([partial(each, x.reshape(-1, shape.inputs), weight, bias, out) for each in ways])
            way = ways[min(range(len(ways)), key=took.__getitem__)]
            cache.note(products.version, shape, way.name)
        self.known[shape] = way
        return way


def multiplied(way: GemmAlgorithm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out], by one algorithm."""
    if way is TORCH_GEMM:
        return F.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], len(weight))
    way(x.contiguous(), weight, bias, out)
    return out


class SameBits:
    """A `GemmLibrary` of another one's algorithms that add up the products of an output in the order of `usual`.

    Whether one does is found out by comparing all bits of what both make of random numbers: which products are added
    up after which depends on the algorithm and the shape, not on the numbers.
    """

    def __init__(self, library: GemmLibrary, usual: GemmAlgorithm, least: int, device: torch.device) -> None:
        """least: rows below which nothing is looked for."""
        self.library, self.usual, self.least, self.device = library, usual, least, device
        self.version = f"{library.version}, in order"

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """See `GemmLibrary`. Nothing is compared while kernels are compiled beforehand, since they are not run; those
        that comparing will launch are compiled, too."""
        if x.numel() < self.least * x.shape[-1] or not self.library.supports(x, weight):
            return False
        if PRECOMPILING.get() is None:
            return True
        self.usual(x.reshape(-1, x.shape[-1]), weight, None, x.new_empty(x.numel() // x.shape[-1], len(weight)))
        return False

    def algorithms(self, shape: GemmShape) -> list[GemmAlgorithm]:
        """Those of the library that have the same bits; none where memory does not suffice to compare them."""
        return self._same(shape, self.library.algorithms(shape))

    def algorithm(self, shape: GemmShape, name: str) -> GemmAlgorithm:
        """See `GemmLibrary`. It is compared again. Raises NotCapturable while a graph is captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotCapturable(f"whether an algorithm for {shape} has the usual one's bits is not known yet")
        for found in self._same(shape, [self.library.algorithm(shape, name)]):
            return found
        raise ValueError("its results differ from the usual algorithm's")

    def _same(self, shape: GemmShape, ways: Sequence[GemmAlgorithm]) -> list[GemmAlgorithm]:
        try:
            return self._compared(shape, ways)
        except torch.OutOfMemoryError:
            log.warning("%s: not enough memory to compare algorithms of the library with the usual one", shape)
            return []

    def _compared(self, shape: GemmShape, ways: Sequence[GemmAlgorithm]) -> list[GemmAlgorithm]:
        drawn = torch.Generator(self.device).manual_seed(shape.rows)

        def noise(*size: int) -> Tensor:
            return torch.empty(size, dtype=shape.kind, device=self.device).normal_(generator=drawn)

        x, weight = noise(shape.rows, shape.inputs), noise(shape.outputs, shape.inputs)
        bias = noise(shape.outputs) if shape.bias else None
        want, out = (torch.empty(shape.rows, shape.outputs, dtype=shape.kind, device=self.device) for _ in range(2))
        self.usual(x, weight, bias, want)

        def made(way: GemmAlgorithm) -> Tensor:
            way(x, weight, bias, out.fill_(math.nan))
            return out

        return [way for way in ways if torch.equal(made(way), want)]


def capturing(x: Tensor) -> bool:
    """Whether the current stream is captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


FORMAT = 1
"""Version of the file's format, its field `format`; a file without that field is of version 1."""


def other_format(kept: Mapping[str, Any]) -> object | None:
    """The version of the format that a file has, where it is not `FORMAT`."""
    found = kept.get("format", FORMAT)
    return None if found == FORMAT else found


def read(path: Path) -> dict[str, dict[str, str]]:
    """The names in a file; none if it is not there, cannot be read, or is of another format, which is logged."""
    kept = read_object(path)
    if (found := other_format(kept)) is not None:
        log.warning(
            "%s is of format %s, and this version of Quire reads format %d: the fastest products are timed again and "
            "not kept; delete the file to have them kept",
            path,
            found,
            FORMAT,
        )
        return {}
    return {
        version: {shape: name for shape, name in names.items() if isinstance(name, str)}
        for version, names in kept.items()
        if isinstance(names, dict)
    }


def write(path: Path, kept: dict[str, dict[str, str]]) -> None:
    """Whole or not at all. Where it cannot be written, the next start times again."""
    try:
        replace_object(path, {"format": FORMAT, **kept})
    except OSError as error:
        log.warning("the choice of matrix product algorithms could not be written to %s: %s", path, error)


COLD = 64 << 20
"""Bytes read before each product: more than a card's L2 holds, so that matrices come from memory, as in a forward."""

TURNS, TIMES = 3, 2
"""Of each way, and how often it multiplies in one."""


def on_the_card(works: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each work (see `Timed`), the least of a few turns, captured, since launching takes longer."""
    cold = torch.zeros(COLD // 8, dtype=torch.int64, device="cuda")
    graphs, best = [graph_of(work, cold) for work in works], [float("inf")] * len(works)
    for _ in range(TURNS):
        marks = [around(graph) for graph in graphs]
        torch.cuda.current_stream().synchronize()
        best = [min(least, a.elapsed_time(b) / 1e3) for least, (a, b) in zip(best, marks, strict=True)]
    return best


def graph_of(work: Callable[[], None], cold: Tensor) -> torch.cuda.CUDAGraph:
    """A graph of the work, a few times, with nothing of it in L2."""
    work()

    def times() -> None:
        for _ in range(TIMES):
            cold.amax()
            work()

    return captured(times)


def around(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events before and after a replay."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
    begun.record()
    graph.replay()
    ended.record()
    return begun, ended
