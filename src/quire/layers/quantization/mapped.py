"""GGUF's blocks that are multiplied by as they lie in the file, until they have been packed.

Packing takes a model's memory, which a virtual machine may hand out at half a gigabyte a second. So a model can be
ready before: a product packs some rows at a time in memory that is used again and again, and has the same bits. That
takes longer than reading packed rows, and ends when another thread has packed the matrix.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from threading import Barrier, Event, Lock, Thread

import torch
from torch import Tensor

from quire.errors import ModelLost
from quire.layers.quantization.base import Packable
from quire.ops.base import Ops
from quire.ops.operands import BlockPanels, Gate
from quire.ops.panels import PANEL_ROWS, PanelMatrix

log = logging.getLogger(__name__)

STRIP = 8 << 20
"""Bytes of the file that are packed at a time: few enough to stay in a cache, and much more than a call costs."""

PACKERS = 4
"""Most threads that pack: their matrices are in memory twice for a while."""

IDLE = 0.05
"""Seconds since the last step from which an engine counts as idle: steps that follow each other are much closer."""

FUSED: frozenset[Gate] = frozenset(("silu", "gelu"))
"""Gates that kernels apply to what they have summed; others are applied to a whole product."""


class Scratch:
    """Memory for one matrix after the other, each of which is gone when the next one is made. For one thread."""

    def __init__(self) -> None:
        self.memory, self.used = torch.empty(0, dtype=torch.uint8), 0

    def begin(self) -> None:
        """Another matrix: there is room for one as large as the last one."""
        if self.used > len(self.memory):
            self.memory = torch.empty(self.used, dtype=torch.uint8)
        self.used = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that holds anything."""
        size = math.prod(shape) * dtype.itemsize
        first, self.used = self.used, self.used + -(-size // 64) * 64
        if self.used > len(self.memory):
            return torch.empty(shape, dtype=dtype)
        return self.memory[first : first + size].view(dtype).view(shape)


class MappedBlocks:
    """A matrix in blocks of the type `kind`. raw: its rows, uint8 [rows, bytes of a row], in one or several parts one
    below the other, each but the last of whole panels. panels: where to pack it."""

    def __init__(self, kind: str, raw: Sequence[Tensor], panels: BlockPanels, ops: Ops, scratch: Scratch) -> None:
        self.kind, self.raw, self.panels, self.ops, self.scratch = kind, raw, panels, ops, scratch
        self.outputs, self.inputs = panels.matrix.outputs, panels.matrix.inputs
        self.firsts = [0, *accumulate(len(part) for part in raw)]

    @property
    def nbytes(self) -> int:
        """See `Unpacked`."""
        return self.panels.matrix.nbytes

    def pack(self) -> None:
        """Fill the panels."""
        for first, part in zip(self.firsts, self.raw, strict=False):
            self.panels.write(first, part)

    def apply(self, x: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """As `WeightStorage.apply`."""
        fused = gate in FUSED and self.outputs % (2 * PANEL_ROWS) == 0
        made = [
            self.ops.quantized_linear(
                x,
                self._packed([piece for cut in cuts for piece in self._pieces(cut)]),
                None if bias is None else torch.cat([bias[cut] for cut in cuts]),
                gate if fused else "",
            )
            for cuts in self._strips(2 if fused else 1)
        ]
        y = made[0] if len(made) == 1 else torch.cat(made, -1)
        return self.ops.apply_gate(y, gate) if gate and not fused else y

    def rows(self, which: Tensor) -> PanelMatrix:
        """Rows number `which` [T] as a matrix, until the next call."""
        found = torch.empty(len(which), self.raw[0].shape[1], dtype=torch.uint8)
        for first, part in zip(self.firsts, self.raw, strict=False):
            own = (which >= first) & (which < first + len(part))
            found[own] = part[which[own] - first]
        return self._packed([found])

    def _strips(self, halves: int) -> Iterator[Sequence[slice]]:
        """Rows that one call multiplies by: some, or of either half as many."""
        width, row = self.outputs // halves, self.raw[0].shape[1]
        step = max(PANEL_ROWS, STRIP // (row * halves) // PANEL_ROWS * PANEL_ROWS)
        for at in range(0, width, step):
            stop = min(width, at + step)
            yield [slice(half * width + at, half * width + stop) for half in range(halves)]

    def _pieces(self, cut: slice) -> Iterator[Tensor]:
        """The bytes of rows, of each part that has some."""
        for first, part in zip(self.firsts, self.raw, strict=False):
            start, stop = max(cut.start - first, 0), min(cut.stop - first, len(part))
            if start < stop:
                yield part[start:stop]

    def _packed(self, pieces: Sequence[Tensor]) -> PanelMatrix:
        """A matrix of these rows."""
        self.scratch.begin()
        count = sum(map(len, pieces))
        made = self.ops.empty_blocks(self.kind, count, self.inputs, self.scratch.empty)
        assert made is not None, "what is mapped is packed by kernels"
        matrix = made.matrix
        if matrix.padded != matrix.inputs:
            for each in (matrix.weight, matrix.scale):
                if each is not None:
                    each.zero_()
        row = 0
        for piece in pieces:
            made.write(row, piece)
            row += len(piece)
        return matrix


class Packing:
    """Threads that pack what is still to be packed, one matrix after the other: the last ones first, since a step that
    packs what it needs begins with the others. They end at one that fails: steps that need it say so, or do without.

    threads: how many there are, each of which computes alone. Beside steps only the first goes on: the others would
    take the cores that steps compute on.
    """

    def __init__(self, weights: Iterable[Packable], threads: int = 1) -> None:
        self._todo, self._ending, self._begun = deque(weights), Event(), Barrier(threads + 1)
        self._lock, self._model_lost, self._waiting = Lock(), False, list[int]()
        self._steps, self._last_step = 0, -IDLE
        self._threads = [
            Thread(target=self._run, args=(i == 0,), name=f"quire-pack-{i}", daemon=True) for i in range(threads)
        ]
        self._left = threads

    def start(self) -> None:
        """Begin, and end before the interpreter does: it would stop the threads within torch, which then aborts the
        process."""
        count = torch.get_num_threads()
        for each in self._threads:
            each.start()
        atexit.register(self._end)  # not of threads that cannot be started
        self._begun.wait()
        torch.set_num_threads(count)  # new threads would inherit what these have set for themselves

    def is_alive(self) -> bool:
        """Whether something is being packed."""
        return any(each.is_alive() for each in self._threads)

    def join(self) -> None:
        """Wait until nothing is."""
        for each in self._threads:
            each.join()

    @contextmanager
    def beside_step(self) -> Iterator[None]:
        """While a step runs."""
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1
            self._last_step = time.monotonic()

    def _run(self, first: bool) -> None:
        torch.set_num_threads(1)
        self._begun.wait()
        try:
            while (matrix := self._next(first)) is not None:
                matrix.pack()
        except Exception as error:
            self._todo.clear()
            log.warning("no more weights are packed beside the steps: %s", str(error) or type(error).__name__)
            if isinstance(error, ModelLost):
                self._say_lost()
        with self._lock:
            self._left -= 1
            if self._left == 0:
                atexit.unregister(self._end)

    def _next(self, first: bool) -> Packable | None:
        """The next matrix of a thread; None at the end."""
        while self._todo and not self._ending.is_set():
            if first or (self._steps == 0 and time.monotonic() - self._last_step >= IDLE):
                with suppress(IndexError):  # another thread has the last one
                    return self._todo.pop()
            self._ending.wait(IDLE)
        return None

    def exit_fd(self) -> int:
        """A descriptor that becomes readable if weights are found to be lost that steps cannot do without. Its
        user closes it."""
        wait, ends = os.pipe()
        with self._lock:
            self._waiting.append(ends)
            if self._model_lost:
                self._close_waiting()
        return wait

    def _say_lost(self) -> None:
        with self._lock:
            self._model_lost = True
            self._close_waiting()

    def _close_waiting(self) -> None:
        while self._waiting:
            os.close(self._waiting.pop())

    def stop(self) -> None:
        """Pack no more: each thread ends with the matrix that it is at."""
        self._ending.set()

    def _end(self) -> None:
        self.stop()
        self.join()


def pack_beside(weights: Iterable[Packable]) -> Packing:
    """A `Packing` of these that has begun, by as many threads as torch has."""
    packing = Packing(weights, min(PACKERS, torch.get_num_threads()))
    packing.start()
    return packing
