"""Sampling on the device without a sort: see `model_runner.sampling.sampler` for what it computes.

`survey_kernel` reads every chunk of every row: the greatest logit, and for each block of 32 tokens an upper bound on
their scores. `choose_kernel` takes a row's greatest logit, or opens its blocks, the highest bound first, until no other
block can hold a higher score: a handful of the vocabulary. For a row that truncates, the threshold is found first, by
bisection (`limited`). Masks, lists of tokens (allowed, bias, bans) and penalties are applied before both, see
`edits.py`; log-probabilities are of the logits as they were, see `logprobs.py`. What no row asks for is not launched;
what one row asks for changes nothing for another.

Ranks that divide the vocabulary choose among their own tokens first, and then among their candidates (`elect_kernel`),
unless a row asks for something that all logits decide together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import VocabularyPart
from quire.ops.triton.edits import ListTensors, Penalties, edit_by_lists, penalise, restrict
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait, wait_and_release
from quire.ops.triton.logprobs import score
from quire.ops.triton.noise import fold, least, scores
from quire.ops.triton.ranks import rank, ranked

CHUNK = 4096
"""Tokens that one program of `survey_kernel` reads."""

BLOCK = 32
"""Tokens that share a hash, as in `model_runner.sampling.noise`."""

FINE, BROKEN, STUCK = 0, 1, 2
"""What became of a row: it has a token; its logits are not finite; all are -inf after the penalties."""


class SamplingTensors(NamedTuple):
    """How each row is sampled: a column on the device for each parameter.

    temperature float32 [rows], 0: greedy. stream int64 [rows]: of `model_runner.sampling.noise.stream`, a uint32. top_k
    int32 [rows], off: the vocabulary's size or more. top_p, min_p float32 [rows], off: above 1, and 0. logprobs int32
    [rows], off: -1.
    """

    temperature: Tensor
    stream: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    logprobs: Tensor
    penalties: Penalties
    lists: ListTensors

    @staticmethod
    def of(columns: Mapping[str, Tensor]) -> SamplingTensors:
        """The columns of these names."""
        own = {name: columns[name] for name in SamplingTensors._fields if name in columns}
        penalties = Penalties(*[columns[name] for name in Penalties._fields])
        lists = ListTensors(*[columns[name] for name in ListTensors._fields])
        return SamplingTensors(**own, penalties=penalties, lists=lists)


class RequestedFeatures(NamedTuple):
    """What any of the rows may ask for: a temperature; top_k, top_p or min_p; a penalty; a mask of this step; allowed
    tokens; bias, bad words or min_tokens; log-probabilities.

    Kernels for the rest are not launched.
    """

    random: bool = True
    truncated: bool = True
    penalised: bool = True
    masked: bool = False
    allowed: bool = False
    listed: bool = False
    scored: bool = False

    @property
    def edited(self) -> bool:
        """Whether logits are changed before they are sampled from."""
        return self.penalised or self.masked or self.allowed or self.listed


class RowHistories(NamedTuple):
    """Of each of the store's rows: tokens int32 [., L], all before the positions that are drawn, and how many of them
    are the prompt's, int32 [.]. masks int32 [.]: lines of `mask_words` int32 [1] words, whose bits are the allowed
    tokens; mask_index int32 [R]: which of them each sample has, -1: none."""

    tokens: Tensor
    prompt: Tensor
    masks: Tensor
    mask_words: Tensor
    mask_index: Tensor


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
    # 1 less than a number above 2^24 is that number, and the search would not end.
    least = tl.maximum(1.0, tl.abs(top) * 1e-6)
    much, _, _, number, _, _ = weighed(logits, peak, floor, floor, floor, top, heat, vocab, chunks, MASS, CHUNK)
    while (much < limit) & (floor > above):
        floor = tl.maximum(floor - (top - floor) * 3.0 - least, above)
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
def limited(logits, peak, bottom, top, heat, top_k, top_p, min_p, vocab, chunks, CHUNK: tl.constexpr):
    """The number that a logit must be above. bottom, top: the least and greatest of the chunks' peaks."""
    above = tl.full([], -3e38, tl.float32)
    if min_p > 0.0:
        above = ranked(rank(top + heat * tl.log(min_p)) - 1)
    if top_k < vocab:
        start = bottom - (top - bottom) * 0.01 - 1e-3
        above = narrowed(logits, peak, top_k.to(tl.float32), above, start, top, heat, vocab, chunks, False, CHUNK)
    if top_p < 1.0:
        whole, _, _, _, _, _ = weighed(logits, peak, above, above, above, top, heat, vocab, chunks, True, CHUNK)
        limit = tl.maximum(top_p * whole, 1e-30)
        # All that is below has too little mass to be missed, were it the whole vocabulary.
        start = top - heat * tl.log(vocab / (1.0 - top_p)) - 1e-3
        above = narrowed(logits, peak, limit, above, start, top, heat, vocab, chunks, True, CHUNK)
    return above


@kernel
def survey_kernel(
    logits, row_of, position_of, temperature, stream, peak, winner, held, holder_of, bounds, peaks, vocab, chunks,
    first, HOT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of one row. To [R, chunks]: the greatest logit (NaN counts as inf), its token, and of what is drawn
    from the tokens that hold their block's least noise, score and token. To [R, blocks]: bound and greatest logit.
    first: the token of column 0."""
    count: tl.constexpr = CHUNK // BLOCK
    r, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    x = tl.load(logits + r.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    to = r * chunks + chunk
    tl.store(peak + to, tl.max(x, 0))
    tl.store(winner + to, first + chunk * CHUNK + tl.argmax(x, 0))
    if HOT:
        heat = tl.load(temperature + row)
        if heat > 0.0:
            key = fold(tl.load(stream + row).to(tl.uint32), tl.load(position_of + r).to(tl.uint32))
            block = chunk * count + tl.arange(0, count)
            tile = tl.reshape(x, [count, BLOCK])
            shortest, holder = least(key, first // BLOCK + block, BLOCK)
            gain = tl.log(shortest)
            greatest = tl.max(tile, 1)
            place = to.to(tl.int64) * count + tl.arange(0, count)
            tl.store(bounds + place, tl.div_rn(greatest, heat) - gain)
            tl.store(peaks + place, greatest)
            own = tl.arange(0, BLOCK)[None, :] == holder[:, None]
            score = tl.div_rn(tl.max(tl.where(own, tile, float("-inf")), 1), heat) - gain
            best = tl.argmax(score, 0)
            tl.store(held + to, tl.max(score, 0))
            token = first + block * BLOCK + holder
            tl.store(holder_of + to, tl.sum(tl.where(tl.arange(0, count) == best, token, 0), 0))


@kernel
def choose_kernel(
    logits, row_of, position_of, temperature, stream, top_k, top_p, min_p, raw, peak, winner, held, holder_of, bounds,
    peaks, out, state, vocab, chunks, first, HOT: tl.constexpr, CUT: tl.constexpr, APART: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: its greatest logit, or the token that scores most of those above its threshold. APART: out [R, 3] takes
    what `elect_kernel` reads."""
    r, c = tl.program_id(0), tl.arange(0, CHUNKS)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    at, inside = r * chunks + c, c < chunks
    tops = tl.load(peak + at, mask=inside, other=float("-inf"))
    # A row that was not edited has no other greatest logit from before.
    top = tl.max(tops, 0)
    before = tl.maximum(top, tl.max(tl.load(raw + at, mask=inside, other=float("-inf")), 0))
    best, token = top, tl.load(winner + r * chunks + tl.argmax(tops, 0))
    bad = tl.where(tl.abs(before) == float("inf"), 1, tl.where(top == float("-inf"), 2, 0))
    if HOT:
        heat = tl.load(temperature + row)
        if (bad == 0) & (heat > 0.0):
            mine = logits + r.to(tl.int64) * vocab
            above = tl.full([], float("-inf"), tl.float32)
            score = tl.load(held + at, mask=inside, other=float("-inf"))
            best, token = tl.max(score, 0), tl.load(holder_of + r * chunks + tl.argmax(score, 0))
            if CUT:
                k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
                if (k < vocab) | (p < 1.0) | (least_p > 0.0):
                    bottom = tl.min(tl.where(tops > float("-inf"), tops, top), 0)
                    above = limited(
                        mine, peak + r * chunks, bottom, top, heat, k, p, least_p, vocab, chunks, CHUNK)  # fmt: skip
                    best = tl.full([], float("-inf"), tl.float32)
            key = fold(tl.load(stream + row).to(tl.uint32), tl.load(position_of + r).to(tl.uint32))
            block = tl.arange(0, BLOCKS)
            total = chunks * (CHUNK // BLOCK)
            place = r.to(tl.int64) * total + block
            bound = tl.load(bounds + place, mask=block < total, other=float("-inf"))
            if CUT:
                greatest = tl.load(peaks + place, mask=block < total, other=float("-inf"))
                bound = tl.where(greatest > above, bound, float("-inf"))
            best, token = opened(mine, bound, best, token, above, heat, key, vocab, first, BLOCKS, BLOCK)
    if APART:
        tl.store(out + 3 * r, top.to(tl.int32, bitcast=True))
        tl.store(out + 3 * r + 1, best.to(tl.int32, bitcast=True))
        tl.store(out + 3 * r + 2, token)
    else:
        tl.store(out + r, tl.where(bad > 0, -bad, token))
        tl.store(state + r, bad)


@triton.jit
def opened(
    logits, bound, best, token, above, heat, key, vocab, first, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(The highest score, its token), of which `best` and `token` are known: blocks are opened while one could score
    more."""
    block = tl.arange(0, BLOCKS)
    most = tl.max(bound, 0)
    while most > best:
        chosen = tl.argmax(bound, 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        score = scores(tl.where(x > above, x, float("-inf")), heat, key, first // BLOCK + chosen, BLOCK)
        found = tl.max(score, 0)
        token = tl.where(found > best, first + chosen * BLOCK + tl.argmax(score, 0), token)
        best = tl.maximum(found, best)
        bound = tl.where(block == chosen, float("-inf"), bound)
        most = tl.max(bound, 0)
    return best, token


@kernel
def elect_kernel(found, row_of, out, state, SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    """One row's token, by every rank's greatest logit, best score and its token: found [R, SIZE, 3]."""
    r = tl.program_id(0)
    wait_and_release(DEPENDENT)
    if tl.load(row_of + r) < 0:
        return
    top, best = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for i in tl.static_range(SIZE):
        place = found + 3 * (r * SIZE + i)
        top = tl.maximum(top, tl.load(place).to(tl.float32, bitcast=True))
        score = tl.load(place + 1).to(tl.float32, bitcast=True)
        token = tl.where(score > best, tl.load(place + 2), token)
        best = tl.maximum(score, best)
    bad = tl.where(tl.abs(top) == float("inf"), 1, 0)
    tl.store(out + r, tl.where(bad > 0, -bad, token))
    tl.store(state + r, bad)


def sample(
    logits: Tensor, rows: Tensor, positions: Tensor, histories: RowHistories, settings: SamplingTensors,
    card: DeviceInfo,
    asked: RequestedFeatures, *, tally: Tensor, out: Tensor | None = None, scores: Tensor | None = None,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token for each row of logits [R, V], widened as they are read; they may be changed. Nothing is read back.

    Returns tokens [R] int32, -state for a row that has none, and state [R] int32: FINE, BROKEN or STUCK.

    rows [R] int32: the store's row of each, below 0 for none. positions [R] int32: the index in its sequence of the
    token drawn. tally int32 [at least R, V], 0 before and after; unused without penalties. out [R] int32: where the
    tokens are to be. scores [R, 2 + 2 * most] int32: where log-probabilities are to be, see `logprobs.score`.
    part: what logits are of, where no more than `random` is asked; None: the whole vocabulary.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    blocks = chunks * (CHUNK // BLOCK) if asked.random else 1
    # Tensors of their own: parts of one would be aligned differently by their sizes, and compile kernels again.
    peak, held = (logits.new_empty(count, chunks, dtype=torch.float32) for _ in range(2))
    winner, holder = (logits.new_empty(count, chunks, dtype=torch.int32) for _ in range(2))
    bounds, peaks = (logits.new_empty(count, blocks, dtype=torch.float32) for _ in range(2))
    state = logits.new_zeros(count, dtype=torch.int32)
    out = torch.zeros_like(state) if out is None else out
    s, unedited, raw = settings, logits, peak
    first, chosen = (0, out) if part is None else (part.first, out.new_empty(count, 3))
    same = {"DEPENDENT": card.dependent, **card.options}
    if asked.edited:
        raw = logits.new_empty(count, chunks, dtype=torch.float32)
        logits = edit(logits, rows, positions, histories, settings, card, asked, tally=tally, raw=raw)
    survey_kernel[(count, chunks)](
        *(logits, rows, positions, s.temperature, s.stream, peak, winner, held, holder, bounds, peaks),
        *(vocab, chunks, first), HOT=asked.random, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4, **same,
    )  # fmt: skip
    choose_kernel[(count,)](
        *(logits, rows, positions, s.temperature, s.stream, s.top_k, s.top_p, s.min_p, raw),
        *(peak, winner, held, holder, bounds, peaks, chosen, state, vocab, chunks, first),
        HOT=asked.random, CUT=asked.truncated and asked.random, APART=part is not None, CHUNKS=block(chunks),
        CHUNK=CHUNK, BLOCKS=block(chunks * (CHUNK // BLOCK)) if asked.random else 1,
        BLOCK=BLOCK, num_warps=16 if asked.truncated and asked.random else 8 if asked.random else 1, **same,
    )  # fmt: skip
    if part is not None:
        elect_kernel[(count,)](part.gather(chosen), rows, out, state, SIZE=part.size, num_warps=1, **same)
    if asked.scored and scores is not None:
        score(unedited, out, rows, s.logprobs, scores, card)
    return out, state


def edit(
    logits: Tensor, rows: Tensor, positions: Tensor, histories: RowHistories, settings: SamplingTensors,
    card: DeviceInfo,
    asked: RequestedFeatures, *, tally: Tensor, raw: Tensor,
) -> Tensor:  # fmt: skip
    """Logits [R, V] after masks, lists and penalties; the greatest ones as they were go to raw [R, chunks]."""
    # Sums are not rounded, and nothing is changed where log-probabilities of what the model made are wanted.
    added = asked.listed or asked.penalised
    dtype = torch.float32 if added else logits.dtype
    edited = logits if dtype == logits.dtype and not asked.scored else torch.empty_like(logits, dtype=dtype)
    lists = settings.lists
    masks = histories.mask_index, histories.masks, histories.mask_words
    restrict(logits, edited, rows, masks, lists, raw, card, CHUNK, masked=asked.masked, whole=added)
    if asked.listed:
        edit_by_lists(edited, rows, positions, histories.tokens, histories.prompt, lists, card)
    if asked.penalised:
        penalise(edited, rows, positions, histories.tokens, histories.prompt, settings.penalties, tally, card)
    return edited
