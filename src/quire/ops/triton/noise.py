"""The noise of `sampling.noise`, token by token: integers are equal by definition, logarithms up to rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """The finalizer of the hash."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def fold(h, v):
    """Hash `v`, uint32, into `h`."""
    return mix(h ^ mix(v + 0x9E3779B9))


@triton.jit
def exponential(h):
    """Exponentials of mean 1 from hashes. Double precision on the way, so that 1 - w keeps every bit of h."""
    return (-tl.log((4294967295.5 - h.to(tl.float64)) * 2.3283064365386963e-10)).to(tl.float32)


@triton.jit
def least(key, block, BLOCK: tl.constexpr):
    """The least exponential of each block of BLOCK tokens, and the token in the block that has it."""
    head = fold(key, (block + 1073741824).to(tl.uint32))
    holder = fold(head, (block * 0).to(tl.uint32)) & (BLOCK - 1)
    return exponential(head) / BLOCK, holder.to(tl.int32)


@triton.jit
def exponentials(key, block, BLOCK: tl.constexpr):
    """The exponentials of one block's tokens, [BLOCK]."""
    i = tl.arange(0, BLOCK)
    low, holder = least(key, block, BLOCK)
    return low + tl.where(i == holder, 0.0, exponential(fold(key, (block * BLOCK + i).to(tl.uint32))))


@triton.jit
def scores(x, temperature, key, block, BLOCK: tl.constexpr):
    """x [BLOCK], the logits of one block of tokens -> their scores with noise; the greatest of all wins."""
    return tl.div_rn(x, temperature) - tl.log(exponentials(key, block, BLOCK))
