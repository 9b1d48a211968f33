"""Copies of KV blocks between a device's pool, host memory and files: `scheduler.kv_offload.BlockStore` for a pool of
torch tensors.

What is saved is taken out of the pool in the order of steps. On a CPU that is a copy of memory. On a GPU blocks are
gathered into a staging buffer and from there copied to pinned memory, on streams of their own; what overwrites them, a
step or a load, waits for the first alone. All else is done by threads: loads, which write to blocks that no step uses,
and files.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.executors.block_files import BadBlock, BlockFiles
from quire.model_runner.graphs import WorkQueue
from quire.ops.ragged import LayerKV
from quire.scheduler.kv_offload import NO_FAILURES, Copy, CopyDone
from quire.scheduler.plan import NULL_BLOCK

log = logging.getLogger(__name__)

NUM_READERS = 4
"""Threads that read files: a checksum takes a core for each 1 or 2 GB/s."""
MAX_GATHERED = 64
"""Blocks that are gathered at once."""
LAST_WRITES = 2.0
"""Seconds for which blocks are written at the end; a server waits 5 for its engine."""
STAGING_BYTES = 64 << 20
"""Bytes of a staging buffer on a GPU."""

Pairs = Seq[tuple[int, int]]
"""Slots of host memory and blocks of the device, in the order from where to where."""


def pool_tensors(kv: Seq[LayerKV]) -> list[Tensor]:
    """The tensors that hold K/V, as [blocks, bytes] each: a block's bytes lie together in each of them."""
    held = [each for layer in kv for each in layer.pools if each.numel()]
    return [each.view(torch.uint8).reshape(len(each), -1) for each in held]


def block_bytes(kv: Seq[LayerKV]) -> int:
    """Bytes of a block in all layers."""
    return sum(each.shape[1] for each in pool_tensors(kv))


Wait = Callable[[], None]
Begin = Callable[[], Wait]


class PoolCopies(Protocol):
    """Copies between blocks of a pool and lines of host memory."""

    def save(self, pairs: Pairs, held: bool) -> Begin:
        """Copy (block, line), after the steps that were launched before; and before those launched later, unless the
        blocks are held. Returns what begins it, as far as that is not done; and that what waits until the lines are
        written. Each is called by a thread."""

    def overwritten(self, blocks: Seq[int]) -> None:
        """Steps that are launched later overwrite blocks that were held."""

    def load(self, pairs: Pairs) -> Wait:
        """Called where the steps are launched. What it returns is called by another thread: it copies (line, block),
        after steps and saves that were begun before, and waits until the blocks are written."""


class BlockMover(Protocol):
    """Copies between blocks of a pool, all layers of each, and the first lines of a buffer on the same device.

    blocks [n] int64. lines [>= n, bytes] uint8.
    """

    def gather(self, blocks: Tensor, lines: Tensor) -> None:
        """From blocks to lines."""

    def scatter(self, blocks: Tensor, lines: Tensor) -> None:
        """From lines to blocks."""


class TorchMover:
    """A `BlockMover` by operations of torch, some for each layer. tensors: see `pool_tensors`."""

    def __init__(self, tensors: Seq[Tensor]) -> None:
        self.tensors = tensors

    def gather(self, blocks: Tensor, lines: Tensor) -> None:
        """From blocks to lines."""
        for part, line in _parts(self.tensors, lines):
            line[: len(blocks)].copy_(part.index_select(0, blocks))

    def scatter(self, blocks: Tensor, lines: Tensor) -> None:
        """From lines to blocks."""
        for part, line in _parts(self.tensors, lines):
            part.index_copy_(0, blocks, line[: len(blocks)])


def _columns(pairs: Pairs) -> tuple[list[int], list[int]]:
    first, second = zip(*pairs, strict=True)
    return list(first), list(second)


def _pieces(pairs: Pairs, most: int) -> list[Pairs]:
    return [pairs[at : at + most] for at in range(0, len(pairs), most)]


def _runs(slots: Seq[int]) -> list[tuple[int, int, int]]:
    """(where it begins, its first slot, how many) of each run of slots that lie one behind the other."""
    starts = [i for i in range(len(slots)) if not i or slots[i] != slots[i - 1] + 1]
    return [(at, slots[at], end - at) for at, end in zip(starts, [*starts[1:], len(slots)], strict=True)]


class HostCopies:
    """Copies of a pool on the CPU. lines [slots, bytes] uint8."""

    def __init__(self, kv: Seq[LayerKV], lines: Tensor) -> None:
        self.parts = _parts(pool_tensors(kv), lines)

    @torch.inference_mode()
    def save(self, pairs: Pairs, held: bool) -> Begin:
        """The copy is made here: the blocks may be overwritten at once."""
        for piece in _pieces(pairs, MAX_GATHERED):
            blocks, slots = map(torch.tensor, _columns(piece))
            for part, line in self.parts:
                line.index_copy_(0, slots, part.index_select(0, blocks))
        return lambda: lambda: None

    def overwritten(self, blocks: Seq[int]) -> None:
        """They have been copied."""

    def load(self, pairs: Pairs) -> Wait:
        """No step uses the blocks meanwhile, and what was saved before has been copied."""
        return partial(self._load, pairs)

    @torch.inference_mode()
    def _load(self, pairs: Pairs) -> None:
        for piece in _pieces(pairs, MAX_GATHERED):
            slots, blocks = map(torch.tensor, _columns(piece))
            for part, line in self.parts:
                part.index_copy_(0, blocks, line.index_select(0, slots))


def _parts(tensors: Seq[Tensor], lines: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each tensor [blocks, n] with its columns of `lines` [slots, n], in words of 8 bytes where that is possible."""
    word = torch.int64 if all(each.shape[1] % 8 == 0 for each in tensors) else torch.uint8
    parts, lines, at = [], lines.view(word), 0
    for each in (tensor.view(word) for tensor in tensors):
        parts.append((each, lines[:, at : at + each.shape[1]]))
        at += each.shape[1]
    return parts


def _reached(events: Seq[torch.cuda.Event | None]) -> None:
    """Wait for them."""
    for event in events:
        if event is not None:
            event.synchronize()


@dataclass(frozen=True)
class StagingBuffer:
    """A stream with a staging buffer [blocks, bytes] that is used in its order. stream: None on a CPU, on which all is
    done in order."""

    stream: torch.cuda.Stream | None
    buffer: Tensor

    def submitted(self) -> AbstractContextManager[object]:
        """What is submitted inside the block belongs to the stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def after(self, event: torch.cuda.Event | None) -> None:
        """Let the stream wait for an event."""
        if event is not None and self.stream is not None:
            self.stream.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        """An event of what was submitted so far."""
        return None if self.stream is None else self.stream.record_event()

    def synchronize(self) -> None:
        """Wait until nothing is left to do."""
        if self.stream is not None:
            self.stream.synchronize()


class Gathered:
    """Blocks that are taken out of the pool together. launched: whether `event` is known."""

    def __init__(self) -> None:
        self.launched = threading.Event()
        self.event: torch.cuda.Event | None = None

    def wait(self) -> torch.cuda.Event | None:
        """The event that is reached when they have been gathered."""
        self.launched.wait()
        return self.event


class DeviceCopies:
    """Copies of a pool on a GPU, or of one on a CPU as if it were on a GPU. queue: in which steps run. lines: pinned.

    Two buffers take turns in each direction: while the one copies over the bus, the other gathers or scatters. Blocks
    that go out and blocks that take their places share the bus, which carries both ways at once: each piece of a load
    waits for what it overwrites alone.
    """

    def __init__(self, lines: Tensor, mover: BlockMover, queue: WorkQueue, device: torch.device) -> None:
        self.lines, self.mover, self.queue, self.device = lines, mover, queue, device
        self.size = max(1, min(MAX_GATHERED, STAGING_BYTES // lines.shape[1]))
        self.outward, self.inward = (self._staging(), self._staging()), (self._staging(), self._staging())
        self._launching = threading.Lock()
        self._num_pieces = 0
        self._gathered: dict[int, Gathered] = {}
        """By block that was held when it was saved last: what overwrites it waits for that."""

    @torch.inference_mode()
    def _staging(self) -> StagingBuffer:
        """A buffer; the block that takes stray writes is moved there and back, so that nothing is compiled or allocated
        later."""
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        staging = StagingBuffer(
            stream, torch.empty((self.size, self.lines.shape[1]), dtype=torch.uint8, device=self.device)
        )
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with staging.submitted():
            null = torch.tensor([NULL_BLOCK]).to(self.device, non_blocking=True)
            self.mover.gather(null, staging.buffer)
            self.mover.scatter(null, staging.buffer)
        staging.synchronize()
        return staging

    def save(self, pairs: Pairs, held: bool) -> Begin:
        """Gather behind the steps before. Later steps wait for that; and for the bus, where more is saved than both
        buffers hold: not if the blocks are held, which a thread gathers."""
        with self.queue:
            launched = self.queue.record()
        pieces = [(piece, Gathered()) for piece in _pieces(pairs, self.size)]
        begin = partial(self._save, pieces, launched)
        if held:
            self._gathered.update((block, each) for piece, each in pieces for block, _ in piece)
            return begin
        wait = begin()
        self._wait_for(each for _, each in pieces)
        return lambda: wait

    def _save(self, pieces: Seq[tuple[Pairs, Gathered]], launched: torch.cuda.Event | None) -> Wait:
        try:
            for piece, gathered in pieces:
                with self._launching:
                    self._launch_save(piece, gathered, launched)
            ends = [staging.record() for staging in self.outward]
        finally:
            for _, gathered in pieces:
                gathered.launched.set()
        return partial(_reached, ends)

    @torch.inference_mode()
    def _launch_save(self, piece: Pairs, gathered: Gathered, launched: torch.cuda.Event | None) -> None:
        """Gather a piece into the next buffer, and copy it over the bus."""
        staging = self.outward[self._num_pieces % 2]
        self._num_pieces += 1
        staging.after(launched)
        with staging.submitted():
            blocks, slots = _columns(piece)
            self.mover.gather(torch.tensor(blocks).to(self.device, non_blocking=True), staging.buffer)
            gathered.event = staging.record()
            gathered.launched.set()
            for at, slot, count in _runs(slots):
                self.lines[slot : slot + count].copy_(staging.buffer[at : at + count], non_blocking=True)

    def _wait_for(self, pieces: Iterable[Gathered]) -> None:
        """Have steps that are launched later wait."""
        for each in pieces:
            if (event := each.wait()) is not None:
                with self.queue:
                    event.wait()

    def overwritten(self, blocks: Seq[int]) -> None:
        """Steps wait until they have been gathered."""
        self._wait_for({self._gathered.pop(block) for block in blocks if block in self._gathered})

    def load(self, pairs: Pairs) -> Wait:
        """The other thread launches and waits."""
        with self.queue:
            launched = self.queue.record()
        gathered = {block: self._gathered.pop(block) for _, block in pairs if block in self._gathered}
        return partial(self._load, pairs, launched, gathered)

    @torch.inference_mode()
    def _load(self, pairs: Pairs, launched: torch.cuda.Event | None, gathered: Mapping[int, Gathered]) -> None:
        for turn, piece in enumerate(_pieces(pairs, self.size)):
            staging = self.inward[turn % 2]
            with staging.submitted():
                slots, blocks = _columns(piece)
                for at, slot, count in _runs(slots):
                    staging.buffer[at : at + count].copy_(self.lines[slot : slot + count], non_blocking=True)
                chosen = torch.tensor(blocks).to(self.device, non_blocking=True)
                staging.after(launched)
                for each in {gathered[block] for block in blocks if block in gathered}:
                    staging.after(each.wait())
                self.mover.scatter(chosen, staging.buffer)
        for staging in self.inward:
            staging.synchronize()


class Workers:
    """Threads that do what is put into their queue, in order. They end with the process, and wait for nothing."""

    def __init__(self, name: str, count: int) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"quire-{name}", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Do `work` later."""
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # of whatever class: what comes after it is done all the same
                log.exception("work of the thread %s", threading.current_thread().name)

    def close(self, timeout: float) -> None:
        """End what is in the queue, and then the threads; those that take longer are left behind."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout)


class TieredBlockStore:
    """A `scheduler.kv_offload.BlockStore`. lines [slots, bytes]: host memory. files: None: there is no directory.
    close_files: called at the end."""

    def __init__(
        self,
        copies: PoolCopies,
        lines: Tensor,
        files: BlockFiles | None = None,
        max_files: int = 0,
        close_files: Callable[[], None] = lambda: None,
    ) -> None:
        self.copies, self.lines, self._files = copies, lines, files
        self.num_slots, self.block_bytes = lines.shape
        self.max_files = max_files
        self._close_files = close_files
        self.memory = lines.numpy()
        """The lines [slots, bytes], for others that copy from and to them."""
        self._done: deque[CopyDone] = deque()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._saver, self._saved = Workers("kv-saves", 1), Workers("kv-saved", 1)
        self._loader = Workers("kv-loads", 1)
        self._writer = Workers("kv-writes", 1)
        self._readers = Workers("kv-reads", NUM_READERS if files is not None else 0)
        self._closed = self._stopped = False
        self._waking = threading.Lock()

    def files(self) -> Seq[bytes]:
        """Keys of the files that are there, least recently used first."""
        return [] if self._files is None else self._files.scan()

    def save(self, ticket: int, copies: Seq[tuple[bytes, int, int]], held: bool) -> None:
        """Take the blocks out of the pool now, or in a thread, and wait for host memory in another."""
        began, keys = time.perf_counter(), [key for key, *_ in copies]
        begin = self.copies.save([(block, slot) for _, block, slot in copies], held)

        def work() -> None:
            try:
                wait = begin()
            except Exception:  # of whatever class: the blocks are computed again
                self.report(CopyDone("save", ticket, dict.fromkeys(keys, "copy"), time.perf_counter() - began))
            else:
                self._saved.put(lambda: self._run("save", ticket, keys, wait, began))

        self._saver.put(work)

    def overwritten(self, blocks: Seq[int]) -> None:
        """Steps that are launched later wait for what they overwrite."""
        self.copies.overwritten(blocks)

    def load(self, ticket: int, copies: Seq[tuple[bytes, int, int]]) -> None:
        """In a thread."""
        work = self.copies.load([(slot, block) for _, slot, block in copies])
        self._loader.put(lambda: self._run("load", ticket, [key for key, *_ in copies], work))

    def _run(self, kind: Copy, ticket: int, keys: Seq[bytes], work: Wait, began: float | None = None) -> None:
        began = time.perf_counter() if began is None else began
        failed = NO_FAILURES
        try:
            work()
        except Exception:  # of whatever class: the blocks are computed again
            failed = dict.fromkeys(keys, "copy")
        self.report(CopyDone(kind, ticket, failed, time.perf_counter() - began))

    def read(self, ticket: int, copies: Seq[tuple[bytes, int]]) -> None:
        """Each file in the next thread that is free."""
        assert self._files is not None
        left, failed, began, files = [len(copies)], dict[bytes, str](), time.perf_counter(), self._files
        lock = threading.Lock()

        def work(key: bytes, slot: int) -> None:
            reason = _reason(lambda: files.read(key, memoryview(self.memory[slot])))
            with lock:
                left[0] -= 1
                if reason:
                    failed[key] = reason
                last = not left[0]
            if last:
                self.report(CopyDone("read", ticket, failed, time.perf_counter() - began))

        for key, slot in copies:
            self._readers.put(partial(work, key, slot))

    def write(self, ticket: int, key: bytes, slot: int) -> None:
        """In a thread, in the order of calls."""
        assert self._files is not None
        files = self._files

        def work() -> None:
            if self._stopped:
                return
            began = time.perf_counter()
            reason = _reason(lambda: files.write(key, memoryview(self.memory[slot])))
            failed: Mapping[bytes, str] = {key: reason} if reason else NO_FAILURES
            self.report(CopyDone("write", ticket, failed, time.perf_counter() - began))

        self._writer.put(work)

    def remove(self, keys: Seq[bytes]) -> None:
        """In the thread that writes, after what was to be written before."""
        for key in keys:
            assert self._files is not None
            self._writer.put(partial(self._files.remove, key))

    def report(self, done: CopyDone) -> None:
        """A copy has ended. Called by any thread."""
        self._done.append(done)
        self.wake()

    def wake(self) -> None:
        """Have the engine's thread poll. Called by any thread."""
        # Once it is closed, the descriptor may be another file's.
        with self._waking, suppress(OSError):  # a full pipe wakes as well
            if not self._closed:
                os.write(self._waker, b"\0")

    def poll(self) -> Seq[CopyDone]:
        """What has ended."""
        with suppress(BlockingIOError):
            os.read(self._wake, 1 << 16)
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> None:
        """Return when there is something to poll, or after so many seconds."""
        self._selector.select(seconds)

    def fileno(self) -> int:
        """A descriptor that can be read while there is something to poll."""
        return self._wake

    def close(self) -> None:
        """End the threads, within seconds; again: nothing happens."""
        with self._waking:
            if self._closed:
                return
            self._closed = True
        for each in (self._saver, self._saved, self._loader):
            each.close(timeout=1.0)
        self._writer.close(timeout=LAST_WRITES)
        self._stopped = True
        self._readers.close(timeout=0.1)
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)
        self._close_files()


def _reason(work: Callable[[], None]) -> str:
    """Why `work` failed; empty if it did not."""
    try:
        work()
    except BadBlock as error:
        return error.reason
    except Exception:  # of whatever class: the block is computed again
        return "io"
    return ""


def host_lines(num_slots: int, size: int, *, pinned: bool) -> Tensor:
    """Host memory for so many blocks [num_slots, size] uint8; pinned: for copies by a GPU.

    Raises MemoryError if there is not that much.
    """
    try:
        return torch.empty((num_slots, size), dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise MemoryError(f"{num_slots:,} KV blocks of {size:,} bytes in host memory (--kv-offloading-size)") from error


def digest_of(tensors: Seq[Tensor]) -> bytes:
    """A digest of tensors' shapes, dtypes and bits: sums of their words, as fast as memory is read."""
    sums = [
        f"{tuple(each.shape)} {each.dtype} {int(_words(each).sum(dtype=torch.int64))} {_sample(each)}"
        for each in tensors
        if each.numel() and not each.is_meta
    ]
    return "\n".join(sums).encode()


def _words(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.is_mkldnn else tensor
    flat = dense.detach().contiguous().view(-1).view(torch.uint8)
    return flat.view(torch.int32) if len(flat) % 4 == 0 else flat


def _sample(tensor: Tensor) -> str:
    """A few of its words, which tell tensors apart whose words were exchanged."""
    words = _words(tensor)
    at = np.linspace(0, len(words) - 1, 16).astype(np.int64)
    return str(words[torch.from_numpy(at).to(words.device)].tolist())
