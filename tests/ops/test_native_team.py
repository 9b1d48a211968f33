"""Threads of one call of the library, which wait for each other between its kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHAIN = """
import ctypes, os, sys
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))
import quire, torch
from quire.ops.native.call import handle_of
from quire.ops.native.library import CCall, CLinear, best_level
from quire.ops.native.ops import NativeOps

torch.set_num_threads(2)
torch.manual_seed(0)
torch.ones(1 << 20).sum()  # torch makes its threads
ops = NativeOps(best_level())
matrix = ops.empty_panels(320, 320, torch.float32)
matrix.write(0, torch.linalg.qr(torch.randn(320, 320))[0].contiguous())  # of which products stay as large
turns = torch.randn(2, 320)


def product(source, target):
    of = ctypes.addressof(handle_of(matrix)[0])
    return CLinear(of, source.data_ptr(), target.data_ptr(), None, 1, 320, 320, 0, 0, 0, 0, 320, 0, 0)


both = product(turns[0], turns[1]), product(turns[1], turns[0])
calls = (CCall * 500)(*(CCall(ctypes.addressof(both[i % 2]), 0, 0, 0) for i in range(500)))
begin, answers = turns.clone(), []
for threads in (1, 2):
    turns.copy_(begin)
    ops.library.quire_run(ctypes.byref(calls), len(calls), threads)
    answers.append(turns.clone())
assert torch.equal(*answers)
assert answers[0].isfinite().all() and not torch.equal(answers[0], begin)
"""


def test_kernels_read_what_those_before_them_wrote_whether_threads_share_a_core() -> None:
    """On one core a thread that waits must sleep, or it takes the time of the one that it waits for."""
    for cores in ("2", "1"):
        done = subprocess.run(
            [sys.executable, "-c", CHAIN, cores],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
