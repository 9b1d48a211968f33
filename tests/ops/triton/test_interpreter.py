"""Kernels that threads launch at the same time in Triton's interpreter, which has one state for the whole process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from tests import interpreter

interpreter.install()


@triton.jit
def numbered(out, SIZE: tl.constexpr):
    """Each program's number, in its part of out."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.zeros([SIZE], tl.int32) + tl.program_id(0))


@pytest.mark.skipif(not knobs.runtime.interpret, reason="kernels are compiled")
def test_threads_launch_in_turns() -> None:
    def launched(number: int) -> bool:
        out = torch.full((256,), -1, dtype=torch.int32)
        numbered[(16,)](out, SIZE=16)
        return torch.equal(out, torch.arange(16, dtype=torch.int32).repeat_interleave(16))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(launched, range(40)))
