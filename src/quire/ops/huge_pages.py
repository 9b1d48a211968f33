"""CPU memory in pages of 2 MiB. A product that reads a matrix once crosses into another page of 4 KiB every 170 ns, and
with nested page tables, as in a virtual machine, the misses of the TLB halve the bandwidth of a core."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

PAGE = 2 << 20
"""Bytes of a huge page."""

CHUNK = 64 << 20
"""Bytes of a chunk of memory that small tensors share."""


def huge_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, in huge pages if the system has them and the tensor is at least one page. Memory is committed
    as it is written. Raises RuntimeError if there is not enough, as torch does."""
    size = math.prod(shape) * dtype.itemsize
    if size < PAGE or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    try:
        held = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"no memory for {size:,} bytes") from error
    with suppress(OSError):  # a system without huge pages
        held.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(held, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    return whole[first : first + size].view(dtype).view(shape)


class HugePages:
    """Allocates tensors in huge pages. Small ones share chunks: one of 1 MiB does not take 2. Thread-safe."""

    def __init__(self) -> None:
        self.lock, self.chunk, self.used = Lock(), torch.empty(0, dtype=torch.uint8), 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros [*shape]. A chunk is freed with the last of its tensors."""
        size = math.prod(shape) * dtype.itemsize
        if size > CHUNK // 4:
            return huge_zeros(*shape, dtype=dtype)
        with self.lock:
            if self.used + size > len(self.chunk):
                self.chunk, self.used = huge_zeros(CHUNK, dtype=torch.uint8), 0
            held = self.chunk[self.used : self.used + size]
            self.used += -(-size // 64) * 64
        return held.view(dtype).view(shape)

    def copy(self, x: Tensor) -> Tensor:
        """A contiguous copy."""
        return self.zeros(*x.shape, dtype=x.dtype).copy_(x)
