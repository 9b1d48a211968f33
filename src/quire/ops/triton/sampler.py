"""Sampling on the device without a sort: see `runner.sampler` for what it means, and `runner.noise` for the noise.

Two kernels. `survey` walks every chunk of every row of logits: edits them (mask, bias, penalties), finds the greatest,
and draws from the chunk, which needs noise for one token in 32 and a few more. `choose` takes the best of a row's
chunks; a row that truncates is searched there for its threshold first: the least logit that so few are above, or so
little mass is. Rows ask for nothing by values that change nothing; penalties are worked out from the row's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import Card, block, release, wait
from quire.ops.triton.noise import fold, least, scores

CHUNK = 2048
"""Tokens a program of `survey` looks at."""

BLOCK = 32
"""Tokens that share a hash, as in `runner.noise`."""

FINE, BROKEN, STUCK = 0, 1, 2
"""What became of a row: it has a token; its logits are not finite; nothing is allowed."""


class Settings(NamedTuple):
    """How each of the store's rows is sampled: columns on the device, a number a row, and lists for those with lists.

    temperature float32, 0: the greatest logit. stream int64: of `runner.noise.stream`, a uint32. top_k int32, off:
    the vocabulary's size or more. top_p and min_p float32, off: above 1, and 0. repetition, frequency, presence
    float32, off: 1, 0, 0. masked int32: the row of `masks` that applies, -1 for none. masks int32 [., ceil(V / 32)]:
    bit t says whether token t may be. listed int32 [rows + 1]: row r's entries of the lists begin at listed[r].
    token int32, amount float32, until int32 [entries]: `amount` is added to a token's logit while fewer than `until`
    tokens of the answer are there (a ban is -inf).
    """

    temperature: Tensor
    stream: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    masked: Tensor
    masks: Tensor
    listed: Tensor
    token: Tensor
    amount: Tensor
    until: Tensor


@triton.jit
def edited(
    x, at, row, position, history, prompt, repetition, frequency, presence, masked, masks, words, listed, token,
    amount, until, width, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk's logits x [CHUNK] of tokens `at`, after mask, bias and penalties. `position` tokens are before it."""
    line = tl.load(masked + row)
    if line >= 0:
        word = tl.load(masks + line.to(tl.int64) * words + at // 32, mask=at // 32 < words, other=0)
        x = tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf"))
    start = tl.load(prompt + row)
    for entry in range(tl.load(listed + row), tl.load(listed + row + 1)):
        applies = (at == tl.load(token + entry)) & (position - start < tl.load(until + entry))
        x += tl.where(applies, tl.load(amount + entry), 0.0)
    by = tl.load(repetition + row)
    often, once = tl.load(frequency + row), tl.load(presence + row)
    if (by != 1.0) | (often != 0.0) | (once != 0.0):
        first = tl.min(at, 0)
        seen = tl.zeros([CHUNK], tl.int32)
        said = tl.zeros([CHUNK], tl.int32)
        for begin in range(0, position, 256):
            i = begin + tl.arange(0, 256)
            known = tl.load(history + row.to(tl.int64) * width + i, mask=i < position, other=-1) - first
            here = (known >= 0) & (known < CHUNK) & (i < position)
            known = tl.where(here, known, 0)
            seen += tl.histogram(known, CHUNK, mask=here)
            said += tl.histogram(known, CHUNK, mask=here & (i >= start))
        x = tl.where(seen > 0, tl.where(x > 0.0, tl.div_rn(x, by), x * by), x)
        x = tl.where(said > 0, x - (often * said.to(tl.float32) + once), x)
    return x


@triton.jit
def drawn(x, first, temperature, key, above, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(best score, its token) of the logits x [CHUNK] of tokens from `first` on; what is not above `above` is out.

    Blocks are opened in the order of what they could score at most, until none could score more than the best.
    """
    count: tl.constexpr = CHUNK // BLOCK
    block = first // BLOCK + tl.arange(0, count)
    tile = tl.reshape(tl.where(x > above, x, float("-inf")), [count, BLOCK])
    shortest, _ = least(key, block, BLOCK)
    bound = tl.div_rn(tl.max(tile, 1), temperature) - tl.log(shortest)
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    top = tl.max(bound, 0)
    while top > best:
        opened = block == first // BLOCK + tl.argmax(bound, 0)
        chosen = tl.max(tl.where(opened, block, 0), 0)
        value = tl.max(tl.where(opened[:, None], tile, float("-inf")), 0)
        score = scores(value, temperature, key, chosen, BLOCK)
        found = tl.max(score, 0)
        token = tl.where(found > best, chosen * BLOCK + tl.argmax(score, 0), token)
        best = tl.maximum(found, best)
        bound = tl.where(opened, float("-inf"), bound)
        top = tl.max(bound, 0)
    return best, token


@triton.jit
def survey_kernel(
    logits, row_of, position_of, history, prompt, temperature, stream, top_k, top_p, min_p, repetition, frequency,
    presence, masked, masks, listed, token, amount, until, found, tokens, raw, peak, width, words, vocab, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of a row. What it finds goes to [R, chunks]: best score, its token, greatest logit before and after."""
    r, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(DEPENDENT)
    release(DEPENDENT)
    row, position = tl.load(row_of + r), tl.load(position_of + r)
    if row < 0:
        return
    place = logits + r.to(tl.int64) * vocab + at
    x = tl.load(place, mask=at < vocab, other=float("-inf"))
    before = tl.max(tl.where(x != x, float("inf"), x), 0)
    x = edited(
        x, at, row, position, history, prompt, repetition, frequency, presence, masked, masks, words, listed, token,
        amount, until, width, CHUNK)  # fmt: skip
    best, winner = tl.max(x, 0), chunk * CHUNK + tl.argmax(x, 0)
    to = r * chunks + chunk
    tl.store(raw + to, before)
    tl.store(peak + to, best)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        if (tl.load(top_k + row) < vocab) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0):
            tl.store(place, x, mask=at < vocab)
        else:
            key = fold(tl.load(stream + row).to(tl.uint32), position.to(tl.uint32))
            best, winner = drawn(x, chunk * CHUNK, heat, key, float("-inf"), CHUNK, BLOCK)
    tl.store(found + to, best)
    tl.store(tokens + to, winner)


@triton.jit
def weighed(logits, peak, above, top, temperature, vocab, chunks, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Of a row's logits above `above`, (the sum of exp((logit - top) / temperature), or else their number; the number).

    Chunks whose greatest logit is not above are not read.
    """
    mass, count = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.int32)
    for chunk in range(chunks):
        if tl.load(peak + chunk) > above:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
            count += (x > above).to(tl.int32)
            if MASS:
                mass += tl.where(x > above, tl.exp2((x - top) / temperature * 1.4426950408889634), 0.0)
    number = tl.sum(count, 0)
    amount = number.to(tl.float32)
    if MASS:
        amount = tl.sum(mass, 0)
    return amount, number


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
def narrowed(
    logits, peak, limit, above, bottom, top, temperature, vocab, chunks, MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """The greatest number, up to where no logit lies between, above which there is at least `limit`; or `above`.

    Bisected by value first, for that is how logits lie, then by rank, so that it ends. bottom: where to begin.
    """
    floor = tl.maximum(bottom - (top - bottom) * 0.01 - 1e-3, above)
    much, number = weighed(logits, peak, floor, top, temperature, vocab, chunks, MASS, CHUNK)
    while (much < limit) & (floor > above):
        floor = tl.maximum(floor - (top - floor) * 3.0 - 1.0, above)
        much, number = weighed(logits, peak, floor, top, temperature, vocab, chunks, MASS, CHUNK)
    high, beyond, step = top, number * 0, number * 0
    number = tl.where(much < limit, 0, number)
    while (number - beyond > 1) & (rank(high) - 1 > rank(floor)):
        middle = floor * 0.5 + high * 0.5
        lost = (step >= 24) | (middle <= floor) | (middle >= high)
        middle = tl.where(lost, ranked(rank(floor) // 2 + rank(high) // 2), middle)
        middle = tl.where((middle <= floor) | (middle >= high), ranked(rank(floor) + 1), middle)
        much, between = weighed(logits, peak, middle, top, temperature, vocab, chunks, MASS, CHUNK)
        enough = much >= limit
        floor, number = tl.where(enough, middle, floor), tl.where(enough, between, number)
        high, beyond = tl.where(enough, high, middle), tl.where(enough, beyond, between)
        step += 1
    return floor


@triton.jit
def choose_kernel(
    logits, row_of, position_of, temperature, stream, top_k, top_p, min_p, found, tokens, raw, peak, out, state, vocab,
    chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: the best of its chunks, or what can be drawn from above its threshold."""
    r, c = tl.program_id(0), tl.arange(0, CHUNKS)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    at, inside = r * chunks + c, c < chunks
    peaks = tl.load(peak + at, mask=inside, other=float("-inf"))
    top, before = tl.max(peaks, 0), tl.max(tl.load(raw + at, mask=inside, other=float("-inf")), 0)
    score = tl.load(found + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens + r * chunks + tl.argmax(score, 0))
    bad = tl.where(tl.abs(before) == float("inf"), 1, tl.where(top == float("-inf"), 2, 0))
    heat = tl.load(temperature + row)
    many, share, far = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if (bad == 0) & (heat > 0.0) & ((many < vocab) | (share < 1.0) | (far > 0.0)):
        mine, peak = logits + r.to(tl.int64) * vocab, peak + r * chunks
        bottom = tl.min(tl.where(peaks > float("-inf"), peaks, top), 0)
        above = tl.full([], -3e38, tl.float32)
        if far > 0.0:
            above = ranked(rank(top + heat * tl.log(far)) - 1)
        if many < vocab:
            above = narrowed(
                mine, peak, many.to(tl.float32), above, bottom, top, heat, vocab, chunks, False, CHUNK)  # fmt: skip
        if share < 1.0:
            whole, _ = weighed(mine, peak, above, top, heat, vocab, chunks, True, CHUNK)
            limit = tl.maximum(share * whole, 1e-30)
            above = narrowed(mine, peak, limit, above, bottom, top, heat, vocab, chunks, True, CHUNK)
        key = fold(tl.load(stream + row).to(tl.uint32), tl.load(position_of + r).to(tl.uint32))
        best = tl.full([], float("-inf"), tl.float32)
        for chunk in range(chunks):
            if tl.load(peak + chunk) > above:
                i = chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(mine + i, mask=i < vocab, other=float("-inf"))
                one, winner = drawn(x, chunk * CHUNK, heat, key, above, CHUNK, BLOCK)
                token = tl.where(one > best, winner, token)
                best = tl.maximum(one, best)
    tl.store(out + r, token)
    tl.store(state + r, bad)


class Drawn(NamedTuple):
    """tokens [R] int32; state [R] int32: FINE, BROKEN or STUCK."""

    tokens: Tensor
    state: Tensor


def sample(
    logits: Tensor, rows: Tensor, positions: Tensor, history: Tensor, prompt: Tensor, settings: Settings, card: Card
) -> Drawn:
    """One token for each row of logits [R, V] float32, which may be changed. Nothing is read back: it may be captured.

    rows [R] int32: the store's row of each, below 0 for none. positions [R] int32: the index in its sequence of the
    token drawn. history [., L] int32: the tokens of each of the store's rows, all before `positions` there; prompt [.]
    int32: how many of them are the prompt's.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    found, raw, peak = logits.new_empty(3, count, chunks).unbind()
    tokens = logits.new_empty(count, chunks, dtype=torch.int32)
    out, state = logits.new_zeros(2, count, dtype=torch.int32).unbind()
    s = settings
    survey_kernel[(count, chunks)](
        *(logits, rows, positions, history, prompt, s.temperature, s.stream, s.top_k, s.top_p, s.min_p, s.repetition),
        *(s.frequency, s.presence, s.masked, s.masks, s.listed, s.token, s.amount, s.until, found, tokens, raw, peak),
        *(history.shape[1], s.masks.shape[1], vocab, chunks),
        CHUNK=CHUNK, BLOCK=BLOCK, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    choose_kernel[(count,)](
        *(logits, rows, positions, s.temperature, s.stream, s.top_k, s.top_p, s.min_p, found, tokens, raw, peak, out),
        *(state, vocab, chunks), CHUNKS=block(chunks), CHUNK=CHUNK, BLOCK=BLOCK, DEPENDENT=card.dependent,
        num_warps=8, **card.options,
    )  # fmt: skip
    return Drawn(out, state)
