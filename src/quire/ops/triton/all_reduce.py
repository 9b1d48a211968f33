"""Sums over the GPUs of a host in one kernel: each GPU writes what it has into the others' memory, and adds up what has
arrived in its own (a one-shot all-reduce, as in TensorRT-LLM and vLLM), without NVLink's multicast.

A small sum is a matter of latency: NCCL's takes 8 microseconds and more, and a decode step has two for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from quire.ops.triton.launch import DeviceInfo, kernel, release, wait

PROGRAMS = 128
"""Of each sum, so that a program finds how many sums there were in a number of its own. All must be resident at once,
since they wait for those of other GPUs: of 128 threads each, they are on any GPU of 8 multiprocessors and more."""

BLOCK = 1024
"""Elements that a program moves at a time."""

CAPACITY = 4 << 20
"""Bytes of the largest sum. Every rank's part is sent whole to every other, so larger ones are a library's."""


def buffer_bytes(size: int, capacity: int = CAPACITY) -> int:
    """Bytes of the memory that each of `size` ranks shares: an arrival number for each rank and program, and twice
    every rank's part."""
    return size * PROGRAMS * 8 + 2 * size * capacity


@kernel
def sum_kernel(
    x, out, peers, calls, numbers, each,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = the sum of every rank's x, of `numbers` elements, in float32 and in the order of ranks. Program p has the
    elements from p * each * BLOCK.

    peers: int64 [SIZE], addresses of every rank's buffer. calls: int64 [PROGRAMS], how many sums there were. The
    buffer's halves take turns: a rank that writes into a half again has been answered in the call between, so that the
    reader has ended the call before it.
    """
    program = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    call = tl.load(calls + program) + 1
    tl.store(calls + program, call)
    first = program * each * BLOCK
    if first < numbers:
        half = (call % 2) * SIZE
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                into = tl.load(peers + peer) + SIZE * PROGRAMS * 8 + (half + RANK) * CAPACITY
                into = tl.multiple_of(into.to(x.dtype), 16)
                for i in range(each):
                    at = first + i * BLOCK + tl.arange(0, BLOCK)
                    tl.store(into + at, tl.load(x + at, mask=at < numbers), mask=at < numbers)
        tl.debug_barrier()  # what other threads have written is written before the arrival number
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                flags = tl.load(peers + peer).to(calls.dtype)
                tl.atomic_xchg(flags + RANK * PROGRAMS + program, call, sem="release", scope="sys")
        own = tl.load(peers + RANK)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                flag = own.to(calls.dtype) + peer * PROGRAMS + program
                while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < call:
                    pass
        parts = own + SIZE * PROGRAMS * 8 + half * CAPACITY
        for i in range(each):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(SIZE):
                if peer == RANK:
                    part = tl.load(x + at, mask=at < numbers)
                else:
                    part = tl.multiple_of((parts + peer * CAPACITY).to(x.dtype), 16)
                    part = tl.load(part + at, mask=at < numbers, volatile=True)
                total += part.to(tl.float32)
            tl.store(out + at, total.to(x.dtype.element_ty), mask=at < numbers)


class PeerSum:
    """Sums of up to `most` bytes. Every rank makes the same calls in one order; kernels of one stream, which may be
    captured."""

    def __init__(
        self,
        rank: int,
        buffers: Sequence[int],
        card: DeviceInfo,
        device: torch.device,
        most: int = CAPACITY,
        owner: object = None,
    ) -> None:
        """buffers: addresses of every rank's memory of `buffer_bytes`, zeros, as this process reaches it. owner: what
        keeps them."""
        self.rank, self.size, self.card, self.most, self.owner = rank, len(buffers), card, most, owner
        self.peers = torch.tensor(list(buffers), dtype=torch.int64, device=device)
        self.calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, of the same bits on every rank, whatever else is summed in the call."""
        x = x.contiguous()
        out, numbers = torch.empty_like(x), x.numel()
        each = triton.cdiv(numbers, PROGRAMS * BLOCK)
        sum_kernel[(PROGRAMS,)](
            x, out, self.peers, self.calls, numbers, each,
            RANK=self.rank, SIZE=self.size, CAPACITY=self.most, PROGRAMS=PROGRAMS, BLOCK=BLOCK,
            DEPENDENT=self.card.dependent, num_warps=4, **self.card.options,
        )  # fmt: skip
        return out


def peer_sum(group: dist.ProcessGroup, rank: int, device: torch.device) -> PeerSum:
    """Over memory that torch lets the GPUs of `group` write. Every rank calls this, and then exchanges something before
    the first sum: no rank may write before all buffers are zero.

    Raises RuntimeError where GPUs cannot reach each other's memory.
    """
    memory = symmetric_memory.empty(buffer_bytes(group.size()), dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, group)
    return PeerSum(rank, handle.buffer_ptrs, DeviceInfo.of(device), device, owner=(memory, handle))
