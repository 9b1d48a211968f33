"""The small kernels of drafting: what a draft model is fed, where its tokens go, and look-up in a row's own history."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.noise import fold
from quire.ops.triton.step import DeviceRows


@kernel(do_not_specialize=["chains", "tokens", "at", "most", "nobody"])
def prepare_draft_kernel(
    step_counts, chain, step_row, wanted, known, done, counts, span_row, query_start, token_span, picked, pick_row,
    pick_depth, chains, tokens, at, most, nobody, FEW: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: all chains at once. FEW: a row has two tokens at most, whose spans are noted here."""
    c = tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    inside = c < chains
    there = inside & (c < tl.load(step_counts + 3))
    row = tl.load(step_row + tl.load(chain + c, mask=there, other=0), mask=there, other=0)
    upto, had = tl.load(known + row, mask=there, other=0), tl.load(done + row, mask=there, other=0)
    had = tl.where(at < 1, tl.minimum(had, upto - 1), had)
    tl.store(done + row, had, mask=there)
    drafts = tl.load(wanted + c, mask=there, other=0)
    n = tl.where(drafts > tl.maximum(at, 0), upto + at - had, 0)
    n = tl.minimum(tl.maximum(n, 0), most)
    n = tl.maximum(n - tl.maximum(tl.cumsum(n, 0) - tokens, 0), 0)
    end = tl.cumsum(n, 0)
    row = tl.where(n > 0, row, nobody)
    tl.store(span_row + c, row, mask=inside)
    tl.store(pick_row + c, row, mask=inside)
    tl.store(picked + c, tl.maximum(end - 1, 0), mask=inside)
    tl.store(pick_depth + c, tl.zeros([BLOCK], tl.int32) + at, mask=inside)
    tl.store(query_start + 1 + c, end, mask=inside)
    tl.store(query_start, 0)
    tl.store(counts, tl.sum(n, 0))
    tl.store(counts + 2, chains)
    if FEW:
        tl.store(token_span + end - n, c, mask=n > 0)
        tl.store(token_span + end - 1, c, mask=n > 0)


@kernel
def spread_kernel(query_start, token_span, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """A span each: its tokens are its."""
    mine = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    start, end = tl.load(query_start + mine), tl.load(query_start + mine + 1)
    for begin in range(start, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(token_span + at, tl.zeros([BLOCK], tl.int32) + mine, mask=at < end)


def prepare_draft(step: DeviceRows, draft: DeviceRows, chains: int, tokens: int, at: int, card: DeviceInfo) -> None:
    """See `runner.device.DeviceSteps.route`. The row behind the last takes what padding writes."""
    same = {"DEPENDENT": card.dependent, **card.options}
    prepare_draft_kernel[(1,)](
        *(step.counts, step.chain, step.sample_row, step.wanted_drafts, step.num_known),
        *(draft.num_computed, draft.counts, draft.span_row, draft.query_start, draft.token_span),
        *(draft.sample_indices, draft.sample_row, draft.sample_offset, chains, tokens, at),
        *((tokens, 2, 1)[min(at, 1) + 1], len(step.num_known) - 1),
        FEW=at >= 0, BLOCK=block(chains, 16), num_warps=4, **same,
    )  # fmt: skip
    if at < 0:
        spread_kernel[(chains,)](draft.query_start, draft.token_span, BLOCK=1024, num_warps=4, **same)


@kernel(do_not_specialize=["picks"])
def write_drafts_kernel(pick_row, pick_at, history, drawn, picks, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < picks
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(pick_row + i, mask=inside, other=0).to(tl.int64)
    at = tl.load(pick_at + i, mask=inside, other=0)
    tl.store(history + row * width + at, tl.maximum(tl.load(drawn + i, mask=inside, other=0), 0), mask=inside)


def write_drafts(draft: DeviceRows, drawn: Tensor, card: DeviceInfo) -> None:
    """What was drawn goes where the lane says that it stands."""
    write_drafts_kernel[(triton.cdiv(len(drawn), 256),)](
        *(draft.sample_row, draft.sample_position, draft.history, drawn, len(drawn), draft.history.shape[1]),
        BLOCK=256, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["depth", "longest", "shortest"])
def lookup_kernel(
    counts, chain, pick_row, known, history, depth, longest, shortest, width,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chain: of the places that end as its history does, the one with the longest such end, and the latest."""
    c = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    if c >= tl.load(counts + 3):
        return
    row = tl.load(pick_row + tl.load(chain + c)).to(tl.int64)
    size, mine = tl.load(known + row), history + row * width
    best = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, size - 1, BLOCK):
        end = begin + tl.arange(0, BLOCK)
        alike, same = tl.zeros([BLOCK], tl.int64), end < size - 1
        for j in range(longest):
            seen = tl.load(mine + end - j, mask=same & (end >= j), other=-1)
            same = same & (seen == tl.load(mine + tl.maximum(size - 1 - j, 0)))
            alike += same.to(tl.int64)
        best = tl.maximum(best, tl.where(alike >= shortest, alike * 4294967296 + end, 0))
    found = tl.max(best, 0)
    at = tl.where(found > 0, (found % 4294967296) + 1, size)
    d = tl.arange(0, DRAFTS)
    tokens = tl.load(mine + tl.minimum(at + d, size - 1), mask=d < depth, other=0)
    tl.store(mine + size + d, tokens, mask=d < depth)


def lookup(step: DeviceRows, chains: int, depth: int, longest: int, shortest: int, card: DeviceInfo) -> None:
    """See `runner.ngram.lookup`: `depth` tokens from where it leads go behind each chain's history."""
    lookup_kernel[(chains,)](
        *(step.counts, step.chain, step.sample_row, step.num_known, step.history, depth, longest, shortest),
        *(step.history.shape[1],), DRAFTS=block(depth), BLOCK=1024, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["rate"])
def force_kernel(
    counts, pick_row, pick_at, pick_depth, history, tokens, rate, width,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A pick each that has a draft behind it: the draft itself, or another token."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    picks = tl.load(counts + 2)
    drafted = (i + 1 < picks) & (tl.load(pick_depth + i + 1, mask=i + 1 < picks, other=0) > 0)
    row = tl.load(pick_row + i, mask=drafted, other=0)
    at = tl.load(pick_at + i, mask=drafted, other=0)
    draft = tl.load(history + row.to(tl.int64) * width + at, mask=drafted, other=0)
    drawn = fold(row.to(tl.uint32), at.to(tl.uint32)).to(tl.float32) / 4294967296.0
    tl.store(tokens + i, tl.where(drawn < rate, draft, draft ^ 1), mask=drafted)


def force(step: DeviceRows, tokens: Tensor, rate: float, card: DeviceInfo) -> None:
    """Sampled tokens [R] become the drafts at their places with a chance of `rate`, and are others without it."""
    force_kernel[(triton.cdiv(len(tokens), 256),)](
        *(step.counts, step.sample_row, step.sample_position, step.sample_offset, step.history, tokens, rate),
        *(step.history.shape[1],), BLOCK=256, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip
