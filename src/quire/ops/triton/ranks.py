"""Order of float32 numbers as integers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank(x):
    """A float32 as an int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ranked(i):
    """The float32 of a rank."""
    return (i ^ ((i >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
