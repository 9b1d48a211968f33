"""Sampling on the device without a sort: see `runner.sampler` for what it means, and `runner.noise` for the noise.

`survey` walks every chunk of every row: the greatest logit, and for each block of 32 tokens what it could score at
most. `choose` takes a row's greatest, or opens its blocks, the most promising first, until none could score more: a
handful of the vocabulary. A row that truncates is searched for its threshold first: the least logit that so few are
above, or so little mass is. Before both come the edits. What no row asks for is not launched; what one row asks for
changes nothing for another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.logits_processors import process_logits
from quire.ops.triton.noise import fold, least, scores
from quire.ops.triton.sampling_tensors import ALL_FEATURES, BLOCK, CHUNK, RequestedFeatures, SamplingTensors
from quire.ops.triton.truncation import limited


@kernel
def survey_kernel(
    logits, row_of, position_of, temperature, stream, peak, winner, held, holder_of, bounds, peaks, vocab, chunks,
    HOT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of one row. To [R, chunks]: the greatest logit (NaN counts as inf), its token, and of what is drawn
    from the tokens that hold their block's least noise, score and token. To [R, blocks]: bound and greatest logit."""
    count: tl.constexpr = CHUNK // BLOCK
    r, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    x = tl.load(logits + r.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    to = r * chunks + chunk
    tl.store(peak + to, tl.max(tl.where(x != x, float("inf"), x), 0))
    tl.store(winner + to, chunk * CHUNK + tl.argmax(x, 0))
    if HOT:
        heat = tl.load(temperature + row)
        if heat > 0.0:
            key = fold(tl.load(stream + row).to(tl.uint32), tl.load(position_of + r).to(tl.uint32))
            block = chunk * count + tl.arange(0, count)
            tile = tl.reshape(x, [count, BLOCK])
            shortest, holder = least(key, block, BLOCK)
            gain = tl.log(shortest)
            greatest = tl.max(tile, 1)
            place = to.to(tl.int64) * count + tl.arange(0, count)
            tl.store(bounds + place, tl.div_rn(greatest, heat) - gain)
            tl.store(peaks + place, greatest)
            own = tl.arange(0, BLOCK)[None, :] == holder[:, None]
            score = tl.div_rn(tl.max(tl.where(own, tile, float("-inf")), 1), heat) - gain
            best = tl.argmax(score, 0)
            tl.store(held + to, tl.max(score, 0))
            token = (chunk * count + tl.arange(0, count)) * BLOCK + holder
            tl.store(holder_of + to, tl.sum(tl.where(tl.arange(0, count) == best, token, 0), 0))


@kernel
def choose_kernel(
    logits, row_of, position_of, temperature, stream, top_k, top_p, min_p, raw, peak, winner, held, holder_of, bounds,
    peaks, out, state, vocab, chunks, HOT: tl.constexpr, CUT: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: its greatest logit, or the token that scores most of those above its threshold."""
    r, c = tl.program_id(0), tl.arange(0, CHUNKS)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    at, inside = r * chunks + c, c < chunks
    tops = tl.load(peak + at, mask=inside, other=float("-inf"))
    top, before = tl.max(tops, 0), tl.max(tl.load(raw + at, mask=inside, other=float("-inf")), 0)
    token = tl.load(winner + r * chunks + tl.argmax(tops, 0))
    bad = tl.where(tl.abs(before) == float("inf"), 1, tl.where(top == float("-inf"), 2, 0))
    if HOT:
        heat = tl.load(temperature + row)
        if (bad == 0) & (heat > 0.0):
            mine = logits + r.to(tl.int64) * vocab
            above = tl.full([], float("-inf"), tl.float32)
            score = tl.load(held + at, mask=inside, other=float("-inf"))
            best, token = tl.max(score, 0), tl.load(holder_of + r * chunks + tl.argmax(score, 0))
            if CUT:
                many, share, far = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
                if (many < vocab) | (share < 1.0) | (far > 0.0):
                    bottom = tl.min(tl.where(tops > float("-inf"), tops, top), 0)
                    above = limited(
                        mine, peak + r * chunks, bottom, top, heat, many, share, far, vocab, chunks, CHUNK)  # fmt: skip
                    best = tl.full([], float("-inf"), tl.float32)
            key = fold(tl.load(stream + row).to(tl.uint32), tl.load(position_of + r).to(tl.uint32))
            block = tl.arange(0, BLOCKS)
            total = chunks * (CHUNK // BLOCK)
            place = r.to(tl.int64) * total + block
            bound = tl.load(bounds + place, mask=block < total, other=float("-inf"))
            if CUT:
                greatest = tl.load(peaks + place, mask=block < total, other=float("-inf"))
                bound = tl.where(greatest > above, bound, float("-inf"))
            token = opened(mine, bound, best, token, above, heat, key, vocab, BLOCKS, BLOCK)
    tl.store(out + r, tl.where(bad > 0, -bad, token))
    tl.store(state + r, bad)


@triton.jit
def opened(
    logits, bound, best, token, above, heat, key, vocab, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The token that scores most, `token` with `best` being known: blocks are opened while one could score more."""
    block = tl.arange(0, BLOCKS)
    most = tl.max(bound, 0)
    while most > best:
        chosen = tl.argmax(bound, 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        score = scores(tl.where(x > above, x, float("-inf")), heat, key, chosen, BLOCK)
        found = tl.max(score, 0)
        token = tl.where(found > best, chosen * BLOCK + tl.argmax(score, 0), token)
        best = tl.maximum(found, best)
        bound = tl.where(block == chosen, float("-inf"), bound)
        most = tl.max(bound, 0)
    return token


class Drawn(NamedTuple):
    """tokens [R] int32, -state for a row that has none; state [R] int32: FINE, BROKEN or STUCK."""

    tokens: Tensor
    state: Tensor


def sample(
    logits: Tensor, rows: Tensor, positions: Tensor, history: Tensor, prompt: Tensor, settings: SamplingTensors,
    card: DeviceInfo,
    asked: RequestedFeatures = ALL_FEATURES, *, tally: Tensor, out: Tensor | None = None,
) -> Drawn:  # fmt: skip
    """One token for each row of logits [R, V], widened as they are read; they may be changed. Nothing is read back.

    rows [R] int32: the store's row of each, below 0 for none. positions [R] int32: the index in its sequence of the
    token drawn. history [., L] int32: the tokens of each of the store's rows, all before `positions` there; prompt [.]
    int32: how many of them are the prompt's. tally int32 [at least R, V], 0 before and after; unused without edits.
    out [R] int32: where the tokens are to be.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    logits = logits.float() if asked.processed else logits  # edits are not rounded
    peak, held, raw = logits.new_empty(3, count, chunks, dtype=torch.float32).unbind()
    winner, holder = logits.new_empty(2, count, chunks, dtype=torch.int32).unbind()
    blocks = chunks * (CHUNK // BLOCK)
    bounds, peaks = logits.new_empty(2, count, blocks if asked.random else 1, dtype=torch.float32).unbind()
    state = logits.new_zeros(count, dtype=torch.int32)
    out = torch.zeros_like(state) if out is None else out
    s = settings
    same = {"DEPENDENT": card.dependent, **card.options}
    if asked.processed:
        process_logits(logits, rows, positions, history, prompt, settings, card, tally, raw)
    survey_kernel[(count, chunks)](
        *(logits, rows, positions, s.temperature, s.stream, peak, winner, held, holder, bounds, peaks, vocab, chunks),
        HOT=asked.random, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4, **same,
    )  # fmt: skip
    choose_kernel[(count,)](
        *(logits, rows, positions, s.temperature, s.stream, s.top_k, s.top_p, s.min_p),
        raw if asked.processed else peak,
        *(peak, winner, held, holder, bounds, peaks, out, state, vocab, chunks),
        HOT=asked.random, CUT=asked.truncated and asked.random, CHUNKS=block(chunks), BLOCKS=block(blocks), CHUNK=CHUNK,
        BLOCK=BLOCK, num_warps=16 if asked.truncated and asked.random else 8 if asked.random else 1, **same,
    )  # fmt: skip
    return Drawn(out, state)
