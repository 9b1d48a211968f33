"""Sums over the GPUs of a host in one kernel: each GPU writes what it has into the others' memory, and adds up what has
arrived in its own (a one-shot all-reduce, as in TensorRT-LLM and vLLM), without NVLink's multicast. Nothing else says
that it has arrived: what has not is a NaN that is never sent. Logits are gathered in the same way.

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

from quire.ops.operands import Norm
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import add_scaled, normalize, row_of, warps

PROGRAMS = 128
"""Of each sum, so that a program finds how many sums there were in a number of its own. All must be resident at once,
since they wait for those of other GPUs: of 128 threads each, they are on any GPU of 8 multiprocessors and more."""

BLOCK, GATHERED = 1024, 4096
"""Elements that a program moves at a time: of sums, and of what is gathered."""

CLEARED = tl.constexpr(1024)
"""Words that a program empties at a time."""

CAPACITY = 4 << 20
"""Bytes of the largest sum. Every rank's part is sent whole to every other, so larger ones are a library's."""

TURNS = tl.constexpr(3)
"""Thirds of the memory, which sums use by turns."""

EMPTY = 0xFF
"""Every byte of memory in which nothing has arrived. As a number that is a NaN, in place of which another is sent."""

TWO_SHOT = 128 << 10
"""Bytes from which sums over more than two GPUs that are normed have two shots."""


def buffer_bytes(size: int, capacity: int = CAPACITY) -> int:
    """Bytes of the memory that each of `size` ranks shares, `EMPTY` at first: every rank's part, at each turn."""
    return int(TURNS.value) * size * capacity


@triton.jit
def part_of(peers, peer, rank, turn, x, CAPACITY: tl.constexpr, SIZE: tl.constexpr):
    """Where rank `rank` writes in the buffer of rank `peer` at this turn: a pointer to integers as wide as x's
    numbers."""
    kind: tl.constexpr = tl.core.get_int_dtype(x.dtype.element_ty.primitive_bitwidth, True)
    place = tl.load(peers + peer) + (turn * SIZE + rank) * CAPACITY
    return tl.multiple_of(place.to(tl.pointer_type(kind)), 16)


@triton.jit
def bits_of(x):
    """What is sent of numbers: their bits, of which none are EMPTY."""
    kind: tl.constexpr = tl.core.get_int_dtype(x.dtype.primitive_bitwidth, True)
    bits = x.to(kind, bitcast=True)
    return tl.where(bits == -1, bits ^ 1, bits)


@triton.jit
def empty_last(
    x, peers, calls, call, read, numbers,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Empty this program's share of what the call before this one has read, and count this one, of so many numbers. The
    next to write there is another rank's next call but one, when it has read what this rank sends in the next."""
    program = tl.program_id(0)
    tl.debug_barrier()  # every thread has read what is counted
    tl.store(calls + program, call + 1)
    tl.store(calls + PROGRAMS + program, numbers * (x.dtype.element_ty.primitive_bitwidth // 8))
    for rank in tl.static_range(SIZE):
        if rank != RANK or SIZE > 2:  # two ranks have one shot, in which none writes into its own memory
            part = tl.load(peers + RANK) + ((call + TURNS - 1) % TURNS * SIZE + rank) * CAPACITY
            part = tl.multiple_of(part.to(tl.pointer_type(tl.int32)), 16)
            for first in range(program * CLEARED, tl.cdiv(read, 4), PROGRAMS * CLEARED):
                at = first + tl.arange(0, CLEARED)
                tl.store(part + at, tl.full([CLEARED], -1, tl.int32), mask=at < tl.cdiv(read, 4))


@triton.jit
def sum_parts(
    x, place, peers, turn, at, inside, RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of what every rank has written, from `at` on of its part, in float32 and in the order of ranks, rounded
    to x's dtype, as soon as all of it has arrived. This rank's part is at `place` of x."""
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    total, missing = own, tl.full([], 1, tl.int32)
    while missing > 0:
        total = tl.zeros([BLOCK], tl.float32)
        absent = tl.zeros([BLOCK], tl.int32)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                total += own
            else:
                theirs = part_of(peers, RANK, peer, turn, x, CAPACITY, SIZE)
                bits = tl.load(theirs + at, mask=inside, other=0, volatile=True)
                absent |= (bits == -1).to(tl.int32)
                total += bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        missing = tl.max(absent, 0)
    return total.to(x.dtype.element_ty)


@kernel
def sum_kernel(
    x, out, peers, calls, numbers, each,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = the sum of every rank's x, of `numbers` elements, in float32 and in the order of ranks. Program p has the
    elements from p * each * BLOCK.

    peers: int64 [SIZE], addresses of every rank's buffer. calls: int64 [2, PROGRAMS], how many sums there were and the
    bytes of the last one, for each program.
    """
    first = tl.program_id(0) * each * BLOCK
    wait(DEPENDENT)
    release(DEPENDENT)
    call, read = tl.load(calls + tl.program_id(0)), tl.load(calls + PROGRAMS + tl.program_id(0))
    turn = call % TURNS
    for i in range(each):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        bits = bits_of(tl.load(x + at, mask=at < numbers, other=0.0))
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                tl.store(part_of(peers, peer, RANK, turn, x, CAPACITY, SIZE) + at, bits, mask=at < numbers)
    empty_last(x, peers, calls, call, read, numbers, RANK, SIZE, CAPACITY, PROGRAMS)
    for i in range(each):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        total = sum_parts(x, at, peers, turn, at, at < numbers, RANK, SIZE, CAPACITY, BLOCK)
        tl.store(out + at, total, mask=at < numbers)


@kernel
def gather_kernel(
    x, out, peers, calls, numbers, each, width,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [rows, SIZE * width] = every rank's x [rows, width], side by side. Elements are shared out, and peers and
    calls are, as in `sum_kernel`."""
    first = tl.program_id(0) * each * BLOCK
    wait(DEPENDENT)
    release(DEPENDENT)
    call, read = tl.load(calls + tl.program_id(0)), tl.load(calls + PROGRAMS + tl.program_id(0))
    turn = call % TURNS
    for i in range(each):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < numbers, other=0.0)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                tl.store(out + beside(at, width, RANK, SIZE), value, mask=at < numbers)
            else:
                tl.store(part_of(peers, peer, RANK, turn, x, CAPACITY, SIZE) + at, bits_of(value), mask=at < numbers)
    empty_last(x, peers, calls, call, read, numbers, RANK, SIZE, CAPACITY, PROGRAMS)
    for i in range(each):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                bits = arrived(part_of(peers, RANK, peer, turn, x, CAPACITY, SIZE) + at, at < numbers)
                value = bits.to(x.dtype.element_ty, bitcast=True)
                tl.store(out + beside(at, width, peer, SIZE), value, mask=at < numbers)


@triton.jit
def beside(at, width, rank, SIZE: tl.constexpr):
    """Where the number at `at` of a rank's rows of `width` is in rows of all ranks."""
    return at // width * (SIZE * width) + rank * width + at % width


@triton.jit
def arrived(theirs, inside):
    """What is at `theirs` where `inside`, as soon as all of it has arrived."""
    bits = tl.load(theirs, mask=inside, other=0, volatile=True)
    while tl.max((bits == -1).to(tl.int32), 0) > 0:
        bits = tl.load(theirs, mask=inside, other=0, volatile=True)
    return bits


@triton.jit
def sum_columns(
    x, peers, turn, rows,
    COLUMNS: tl.constexpr, PART: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Two shots for this program's rows: each rank sums as many columns, and gives all what it has found. Rank r's part
    of this rank's buffer has it behind what r gave in the first shot, from number rows * COLUMNS / SIZE on."""
    WIDTH: tl.constexpr = COLUMNS // SIZE
    column = tl.arange(0, PART)
    own = column < WIDTH
    second = rows * WIDTH  # both fit: a part has room for all of x, which is SIZE times as much
    for row in range(tl.program_id(0), rows, PROGRAMS):
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                bits = bits_of(tl.load(x + row * COLUMNS + peer * WIDTH + column, mask=own, other=0.0))
                into = part_of(peers, peer, RANK, turn, x, CAPACITY, SIZE)
                tl.store(into + row * WIDTH + column, bits, mask=own)
    for row in range(tl.program_id(0), rows, PROGRAMS):
        place, given = row * COLUMNS + RANK * WIDTH + column, row * WIDTH + column
        bits = bits_of(sum_parts(x, place, peers, turn, given, own, RANK, SIZE, CAPACITY, PART))
        for peer in tl.static_range(SIZE):
            tl.store(part_of(peers, peer, RANK, turn, x, CAPACITY, SIZE) + second + given, bits, mask=own)


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
    WIDTH: tl.constexpr = COLUMNS // SIZE
    gain, shift = row_of(weight, bias, at, inside, BIAS)
    first_gain, first_shift = gain, shift
    if FIRST:
        first_gain, first_shift = row_of(first_weight, first_bias, at, inside, BIAS)
    wait(DEPENDENT)
    release(DEPENDENT)
    call, read = tl.load(calls + program), tl.load(calls + PROGRAMS + program)
    turn = call % TURNS
    if SHOTS == 1:
        for row in range(program, rows, PROGRAMS):
            bits = bits_of(tl.load(x + row * COLUMNS + at, mask=inside, other=0.0))
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    into = part_of(peers, peer, RANK, turn, x, CAPACITY, SIZE)
                    tl.store(into + row * COLUMNS + at, bits, mask=inside)
    else:
        sum_columns(x, peers, turn, rows, COLUMNS, PART, RANK, SIZE, CAPACITY, PROGRAMS)
    empty_last(x, peers, calls, call, read, rows * COLUMNS, RANK, SIZE, CAPACITY, PROGRAMS)
    for row in range(program, rows, PROGRAMS):
        place = row * COLUMNS + at
        added = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        if SHOTS == 1:
            value = sum_parts(x, place, peers, turn, place, inside, RANK, SIZE, CAPACITY, BLOCK)
        else:
            summed = part_of(peers, RANK, 0, turn, x, CAPACITY, SIZE) + (rows + row) * WIDTH
            whose = (at // WIDTH) * (CAPACITY // (x.dtype.element_ty.primitive_bitwidth // 8))
            value = arrived(summed + whose + at % WIDTH, inside).to(x.dtype.element_ty, bitcast=True)
        if FIRST:
            exact = normalize(value.to(tl.float32), first_gain, first_shift, inside, COLUMNS, first_eps, CENTRED)
            value = exact.to(value.dtype)
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
        """buffers: addresses of every rank's memory of `buffer_bytes`, EMPTY, as this process reaches it. owner: what
        keeps them. two_shot, programs: see `TWO_SHOT` and `PROGRAMS`."""
        self.rank, self.size, self.card, self.most, self.owner = rank, len(buffers), card, most, owner
        self.two_shot, self.programs = two_shot, programs
        self.peers = torch.tensor(list(buffers), dtype=torch.int64, device=device)
        self.calls = torch.zeros(2, programs, dtype=torch.int64, device=device)

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

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x [..., width] side by side, some rows at a time if it is larger than a sum may be."""
        width = x.shape[-1]
        rows, at_once = x.contiguous().view(-1, width), self.most // (width * x.element_size())
        out = x.new_empty(len(rows), self.size * width)
        for some, into in zip(rows.split(at_once), out.split(at_once), strict=True):
            each = triton.cdiv(some.numel(), self.programs * GATHERED)
            gather_kernel[(self.programs,)](
                some, into, self.peers, self.calls, some.numel(), each, width,
                RANK=self.rank, SIZE=self.size, CAPACITY=self.most, PROGRAMS=self.programs, BLOCK=GATHERED,
                DEPENDENT=self.card.dependent, num_warps=8, **self.card.options,
            )  # fmt: skip
        return out.view(*x.shape[:-1], self.size * width)

    def shots(self, x: Tensor) -> int:
        """Of a sum that is normed. Two where ranks can share out columns, 16 bytes at a time."""
        even = x.shape[-1] * x.element_size() % (16 * self.size) == 0
        return 2 if self.size > 2 and x.nbytes >= self.two_shot and even else 1


def peer_sum(group: dist.ProcessGroup, rank: int, device: torch.device) -> PeerSum:
    """Over memory that torch lets the GPUs of `group` write. Every rank calls this, and then exchanges something before
    the first sum: no rank may write before all buffers are empty.

    Raises RuntimeError where GPUs cannot reach each other's memory.
    """
    memory = symmetric_memory.empty(buffer_bytes(group.size()), dtype=torch.uint8, device=device)
    memory.fill_(EMPTY)
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, group)
    return PeerSum(rank, handle.buffer_ptrs, DeviceInfo.of(device), device, owner=(memory, handle))
