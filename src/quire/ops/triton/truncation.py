"""Thresholds by bisection: what top_k, top_p and min_p leave, found without a sort. See `runner.truncate`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weighed(
    logits, peak, one, two, three, top, heat, vocab, chunks, MASS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Of a row's logits above each of three rising numbers, (the sum of exp((logit - top) / heat) or their number) x 3,
    then their number x 3. Chunks whose greatest logit, at `peak`, is not above the first are not read."""
    a, b, c = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    i, j, k = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for chunk in range(chunks):
        if tl.load(peak + chunk) > one:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            i += (x > one).to(tl.int32)
            j += (x > two).to(tl.int32)
            k += (x > three).to(tl.int32)
            if MASS:
                mass = tl.exp2((x - top) / heat * 1.4426950408889634)
                a += tl.where(x > one, mass, 0.0)
                b += tl.where(x > two, mass, 0.0)
                c += tl.where(x > three, mass, 0.0)
    first, second, third = tl.sum(i, 0), tl.sum(j, 0), tl.sum(k, 0)
    if MASS:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), first, second, third
    else:
        return first.to(tl.float32), second.to(tl.float32), third.to(tl.float32), first, second, third


@triton.jit
def rank(x):
    """A float32 as an int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ranked(i):
    """The float32 of a rank."""
    return (i ^ ((i >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(floor, high, part, by_rank):
    """The number that is `part` quarters of the way from floor to high, but neither."""
    low, up = rank(floor).to(tl.int64), rank(high).to(tl.int64)
    even = rank(floor + (high - floor) * (0.25 * part)).to(tl.int64)
    even = tl.where(by_rank, low + (up - low) * part // 4, even)
    return ranked(tl.minimum(tl.maximum(even, low + 1), up - 1).to(tl.int32))


@triton.jit
def narrowed(logits, peak, limit, above, start, top, heat, vocab, chunks, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The greatest number, up to where no logit lies between, above which there is at least `limit`; or `above`.

    Cut in four each time: by value first, for that is how logits lie, then by rank, so that it ends. start: at or
    below `top`, where to begin if enough is above it.
    """
    floor = tl.maximum(start, above)
    much, _, _, number, _, _ = weighed(logits, peak, floor, floor, floor, top, heat, vocab, chunks, MASS, CHUNK)
    while (much < limit) & (floor > above):
        floor = tl.maximum(floor - (top - floor) * 3.0 - 1.0, above)
        much, _, _, number, _, _ = weighed(logits, peak, floor, floor, floor, top, heat, vocab, chunks, MASS, CHUNK)
    high, beyond, step = top, number * 0, number * 0
    number = tl.where(much < limit, 0, number)
    while (number - beyond > 1) & (rank(high).to(tl.int64) - 1 > rank(floor).to(tl.int64)):
        one, two = between(floor, high, 1, step >= 12), between(floor, high, 2, step >= 12)
        three = between(floor, high, 3, step >= 12)
        a, b, c, i, j, k = weighed(logits, peak, one, two, three, top, heat, vocab, chunks, MASS, CHUNK)
        up, more = tl.where(c >= limit, high, three), tl.where(c >= limit, beyond, k)
        up, more = tl.where(b >= limit, up, two), tl.where(b >= limit, more, j)
        high, beyond = tl.where(a >= limit, up, one), tl.where(a >= limit, more, i)
        floor, number = tl.where(a >= limit, one, floor), tl.where(a >= limit, i, number)
        floor, number = tl.where(b >= limit, two, floor), tl.where(b >= limit, j, number)
        floor, number = tl.where(c >= limit, three, floor), tl.where(c >= limit, k, number)
        step += 1
    return floor


@triton.jit
def limited(logits, peak, bottom, top, heat, many, share, far, vocab, chunks, CHUNK: tl.constexpr):
    """What a logit must be above. many, share, far: top_k, top_p, min_p. bottom, top: the least and greatest of the
    chunks' peaks."""
    above = tl.full([], -3e38, tl.float32)
    if far > 0.0:
        above = ranked(rank(top + heat * tl.log(far)) - 1)
    if many < vocab:
        start = bottom - (top - bottom) * 0.01 - 1e-3
        above = narrowed(logits, peak, many.to(tl.float32), above, start, top, heat, vocab, chunks, False, CHUNK)
    if share < 1.0:
        whole, _, _, _, _, _ = weighed(logits, peak, above, above, above, top, heat, vocab, chunks, True, CHUNK)
        limit = tl.maximum(share * whole, 1e-30)
        # All that is below has too little mass to be missed, were it the whole vocabulary.
        start = top - heat * tl.log(vocab / (1.0 - share)) - 1e-3
        above = narrowed(logits, peak, limit, above, start, top, heat, vocab, chunks, True, CHUNK)
    return above
