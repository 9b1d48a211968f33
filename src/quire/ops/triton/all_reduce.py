"""Sums over the GPUs of a host in one kernel: each GPU writes what it has into the others' memory, and adds up what has
arrived in its own (a one-shot all-reduce, as in TensorRT-LLM and vLLM), without NVLink's multicast.

A small sum is a matter of latency: NCCL's takes 8 microseconds and more, and a decode step has two for each layer. What
follows each of them is a residual stream, to which it is added, and a norm: `PeerSum.add_norm` does all of it in one
kernel. Where that sums more than a little over more than two GPUs, each GPU sums a part of every row and writes the
result into the others' memory (a two-shot all-reduce), which moves fewer bytes and waits twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from quire.ops.base import Norm
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import add_scaled, normalize, row_of, warps

PROGRAMS = 128
"""Of each sum, so that a program finds how many sums there were in a number of its own. All must be resident at once,
since they wait for those of other GPUs: of 128 threads each, they are on any GPU of 8 multiprocessors and more."""

BLOCK = 1024
"""Elements that a program moves at a time."""

CAPACITY = 4 << 20
"""Bytes of the largest sum. Every rank's part is sent whole to every other, so larger ones are a library's."""


def buffer_bytes(size: int, capacity: int = CAPACITY, programs: int = PROGRAMS) -> int:
    """Bytes of the memory that each of `size` ranks shares: two arrival numbers for each rank and program, and twice
    every rank's part."""
    return 2 * size * programs * 8 + 2 * size * capacity


TWO_SHOT = 256 << 10
"""Bytes from which sums over more than two GPUs that are normed have two shots."""


@triton.jit
def exchange(
    peers, calls, program, call, SHOT: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Let the same program of every other rank know that this one has written its part of a call, and wait for theirs.
    SHOT: 0 for the first part of a call, 1 for the second."""
    tl.debug_barrier()  # what other threads have written is written before the arrival number
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = tl.load(peers + peer).to(calls.dtype) + SHOT * SIZE * PROGRAMS
            tl.atomic_xchg(flags + RANK * PROGRAMS + program, call, sem="release", scope="sys")
    own = tl.load(peers + RANK).to(calls.dtype) + SHOT * SIZE * PROGRAMS
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            while tl.atomic_add(own + peer * PROGRAMS + program, 0, sem="acquire", scope="sys") < call:
                pass


@triton.jit
def part_of(peers, peer, rank, call, x, CAPACITY: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Where rank `rank` writes in the buffer of rank `peer` in this call, a pointer like x."""
    place = tl.load(peers + peer) + 2 * SIZE * PROGRAMS * 8 + ((call % 2) * SIZE + rank) * CAPACITY
    return tl.multiple_of(place.to(x.dtype), 16)


@triton.jit
def sum_parts(
    x, place, peers, call, at, inside,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of what every rank has written, from `at` on of its part, in float32 and in the order of ranks, rounded
    to x's dtype. This rank's part is at `place` of x."""
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            part = tl.load(x + place, mask=inside, other=0.0)
        else:
            theirs = part_of(peers, RANK, peer, call, x, CAPACITY, SIZE, PROGRAMS)
            part = tl.load(theirs + at, mask=inside, other=0.0, volatile=True)
        total += part.to(tl.float32)
    return total.to(x.dtype.element_ty)


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
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                into = part_of(peers, peer, RANK, call, x, CAPACITY, SIZE, PROGRAMS)
                for i in range(each):
                    at = first + i * BLOCK + tl.arange(0, BLOCK)
                    tl.store(into + at, tl.load(x + at, mask=at < numbers), mask=at < numbers)
        exchange(peers, calls, program, call, 0, RANK, SIZE, PROGRAMS)
        for i in range(each):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            total = sum_parts(x, at, peers, call, at, at < numbers, RANK, SIZE, CAPACITY, PROGRAMS, BLOCK)
            tl.store(out + at, total, mask=at < numbers)


@triton.jit
def sum_columns(
    x, peers, calls, program, call, rows,
    COLUMNS: tl.constexpr, PART: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Two shots for this program's rows: each rank sums as many columns, and gives all what it has found. Rank r's part
    of this rank's buffer has it behind what r gave in the first shot, from number rows * COLUMNS / SIZE on."""
    WIDTH: tl.constexpr = COLUMNS // SIZE
    column = tl.arange(0, PART)
    own = column < WIDTH
    second = rows * WIDTH  # both fit: a part has room for all of x, which is SIZE times as much
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            into = part_of(peers, peer, RANK, call, x, CAPACITY, SIZE, PROGRAMS)
            for row in range(program, rows, PROGRAMS):
                value = tl.load(x + row * COLUMNS + peer * WIDTH + column, mask=own)
                tl.store(into + row * WIDTH + column, value, mask=own)
    exchange(peers, calls, program, call, 0, RANK, SIZE, PROGRAMS)
    for row in range(program, rows, PROGRAMS):
        place, given = row * COLUMNS + RANK * WIDTH + column, row * WIDTH + column
        total = sum_parts(x, place, peers, call, given, own, RANK, SIZE, CAPACITY, PROGRAMS, PART)
        for peer in tl.static_range(SIZE):
            into = part_of(peers, peer, RANK, call, x, CAPACITY, SIZE, PROGRAMS) + second
            tl.store(into + given, total, mask=own)
    exchange(peers, calls, program, call, 1, RANK, SIZE, PROGRAMS)


@kernel
def sum_norm_kernel(
    x, residual, out, weight, bias, first_weight, first_bias, gain_of_sum, peers, calls, rows, eps, first_eps, scale,
    NORM: tl.constexpr, FIRST: tl.constexpr, GAINED: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr,
    SHOTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `sum_kernel`, of rows of COLUMNS numbers, of which program p has every one PROGRAMS after row p; then as
    `rows.norm_kernel` with that sum for x. PART: a power of two that holds the columns which a rank sums where
    there are two SHOTS, see `sum_columns`."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < COLUMNS
    gain, shift = row_of(weight, bias, at, inside, BIAS)
    first_gain, first_shift = gain, shift
    if FIRST:
        first_gain, first_shift = row_of(first_weight, first_bias, at, inside, BIAS)
    wait(DEPENDENT)
    release(DEPENDENT)
    call = tl.load(calls + program) + 1
    tl.store(calls + program, call)
    if program < rows:
        WIDTH: tl.constexpr = COLUMNS // SIZE
        if SHOTS == 1:
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    into = part_of(peers, peer, RANK, call, x, CAPACITY, SIZE, PROGRAMS)
                    for row in range(program, rows, PROGRAMS):
                        place = row * COLUMNS + at
                        tl.store(into + place, tl.load(x + place, mask=inside), mask=inside)
            exchange(peers, calls, program, call, 0, RANK, SIZE, PROGRAMS)
        else:
            sum_columns(x, peers, calls, program, call, rows, COLUMNS, PART, RANK, SIZE, CAPACITY, PROGRAMS)
        for row in range(program, rows, PROGRAMS):
            place = row * COLUMNS + at
            if SHOTS == 1:
                value = sum_parts(x, place, peers, call, place, inside, RANK, SIZE, CAPACITY, PROGRAMS, BLOCK)
            else:
                summed = part_of(peers, RANK, 0, call, x, CAPACITY, SIZE, PROGRAMS) + (rows + row) * WIDTH
                whose = (at // WIDTH) * (CAPACITY // (x.dtype.element_ty.primitive_bitwidth // 8))
                value = tl.load(summed + whose + at % WIDTH, mask=inside, other=0.0, volatile=True)
            if FIRST:
                exact = normalize(value.to(tl.float32), first_gain, first_shift, inside, COLUMNS, first_eps, CENTRED)
                value = exact.to(value.dtype)
            added = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            value = add_scaled(value, added, scale, gain_of_sum, GAINED)
            tl.store(residual + place, value, mask=inside)
            if NORM:
                made = normalize(value.to(tl.float32), gain, shift, inside, COLUMNS, eps, CENTRED)
                tl.store(out + place, made.to(value.dtype), mask=inside)


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
        two_shot: int = TWO_SHOT,
        programs: int = PROGRAMS,
    ) -> None:
        """buffers: addresses of every rank's memory of `buffer_bytes`, zeros, as this process reaches it. owner: what
        keeps them. two_shot, programs: see `TWO_SHOT` and `PROGRAMS`."""
        self.rank, self.size, self.card, self.most, self.owner = rank, len(buffers), card, most, owner
        self.two_shot, self.programs = two_shot, programs
        self.peers = torch.tensor(list(buffers), dtype=torch.int64, device=device)
        self.calls = torch.zeros(programs, dtype=torch.int64, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, of the same bits on every rank, whatever else is summed in the call."""
        x = x.contiguous()
        out, numbers = torch.empty_like(x), x.numel()
        each = triton.cdiv(numbers, self.programs * BLOCK)
        sum_kernel[(self.programs,)](
            x, out, self.peers, self.calls, numbers, each,
            RANK=self.rank, SIZE=self.size, CAPACITY=self.most, PROGRAMS=self.programs, BLOCK=BLOCK,
            DEPENDENT=self.card.dependent, num_warps=4, **self.card.options,
        )  # fmt: skip
        return out

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        before: Norm | None = None,
        scale: float = 1.0,
        gain: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.add_norm` of the sum of every rank's x, which is rounded as if it were made first."""
        x = x.contiguous()
        columns = x.shape[-1]
        out = residual if norm is None else torch.empty_like(x)
        last = norm or before or Norm(x, 0.0)
        first = before or last
        sum_norm_kernel[(self.programs,)](
            *(x, residual, out, last.weight, last.weight if last.bias is None else last.bias),
            *(first.weight, first.weight if first.bias is None else first.bias, x if gain is None else gain),
            *(self.peers, self.calls, x.numel() // columns, last.eps, first.eps, scale),
            NORM=norm is not None, FIRST=before is not None, GAINED=gain is not None, CENTRED=last.centred,
            BIAS=last.bias is not None, SHOTS=self.shots(x), COLUMNS=columns, BLOCK=block(columns),
            PART=block(columns // self.size), RANK=self.rank, SIZE=self.size, CAPACITY=self.most,
            PROGRAMS=self.programs, DEPENDENT=self.card.dependent, num_warps=warps(block(columns)), **self.card.options,
        )  # fmt: skip
        return out, residual

    def shots(self, x: Tensor) -> int:
        """Of a sum that is normed. Two where ranks can share out columns, 16 bytes at a time."""
        even = x.shape[-1] * x.element_size() % (16 * self.size) == 0
        return 2 if self.size > 2 and x.nbytes >= self.two_shot and even else 1


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
