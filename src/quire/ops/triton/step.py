"""The small kernels around a forward: what a step feeds is looked up on the device, and what it computes is stored
there.

Rows are those of `model_runner.device_state`: columns, a block table and a history each; padding uses the last row. The
kernels of drafting prepare what a draft model is fed, store its tokens, and look up drafts in a row's own history.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.noise import fold

TOKENS = 128
"""Tokens that a program of `prepare_inputs_kernel` looks up."""


@kernel(do_not_specialize=["total"])
def scatter_kernel(data, places, values, total, BLOCK: tl.constexpr):
    """BLOCK values per program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    tl.store(data + tl.load(places + i, mask=inside, other=0), tl.load(values + i, mask=inside, other=0), mask=inside)


def scatter(data: Tensor, places: Tensor, values: Tensor) -> None:
    """data [places] = values, all int32."""
    total = len(places)
    scatter_kernel[(triton.cdiv(total, 1024),)](data, places, values, total, BLOCK=1024)


@kernel(do_not_specialize=["total"])
def copy_kernel(out, source, total, BLOCK: tl.constexpr):
    """BLOCK values per program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(source + i, mask=i < total, other=0), mask=i < total)


def copy(out: Tensor, source: Tensor) -> None:
    """out = source, int32 of as many numbers."""
    total = len(out)
    copy_kernel[(triton.cdiv(total, 4096),)](out, source, total, BLOCK=4096, num_warps=8)


@kernel(do_not_specialize=["limit", "token_programs", "longest"])
def prepare_inputs_kernel(
    counts, span_row, query_start, token_span, length, table, history, tokens, positions, slots, kv_len, page_table,
    state, source, limit, token_programs, longest, pages, width, page_size,
    TOKENS: tl.constexpr, PAGES: tl.constexpr, STATES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs below token_programs: TOKENS tokens each. The others: one span each, and its blocks as far as it
    reads."""
    program = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    if program < token_programs:
        at = program * TOKENS + tl.arange(0, TOKENS)
        fed, inside = at < tl.load(counts), at < limit
        span = tl.load(token_span + at, mask=fed, other=0)
        row = tl.load(span_row + span, mask=fed, other=0).to(tl.int64)
        place = tl.load(length + row, mask=fed, other=0) + at - tl.load(query_start + span, mask=fed, other=0)
        page = tl.load(table + row * pages + place // page_size, mask=fed, other=0).to(tl.int64)
        token = tl.load(history + row * width + place, mask=fed, other=0)
        tl.store(tokens + at, token.to(tl.int64), mask=inside)
        tl.store(positions + at, tl.where(fed, tl.minimum(place, longest - 1), 0).to(tl.int64), mask=inside)
        tl.store(slots + at, tl.where(fed, page * page_size + place % page_size, 0), mask=inside)
    else:
        mine = program - token_programs
        n = tl.load(query_start + mine + 1) - tl.load(query_start + mine)
        own = tl.load(span_row + mine).to(tl.int64)
        reach = tl.where(n > 0, tl.load(length + own) + n, 0)
        tl.store(kv_len + mine, reach)
        if STATES:
            slot = 1 + own * STATES + tl.load(state + own)
            tl.store(source + mine, tl.where(reach > n, slot, 0))
        for begin in range(0, tl.cdiv(reach, page_size), PAGES):
            p = begin + tl.arange(0, PAGES)
            held = tl.load(table + own * pages + p, mask=p < pages, other=0)
            tl.store(page_table + mine.to(tl.int64) * pages + p, held, mask=p < pages)


class DeviceRows(NamedTuple):
    """Views of a `DeviceState`: its rows, and the `StepInputs` of a step or of drafting, padded; counts [4]: tokens,
    spans, samples, chains.

    sample_position: where the token of each sample will be stored, as `advance` notes. num_computed, num_known: a
    number per row. block_table [rows, P] and history [rows, L], contiguous. chain [chains + 1]: where the samples of
    each chain begin. wanted_drafts: drafts for each. state: which of its states a row goes on from. max_history: the
    limit of num_known. drafts: the most of a chain.
    """

    counts: Tensor
    span_row: Tensor
    query_start: Tensor
    token_span: Tensor
    sample_indices: Tensor
    sample_row: Tensor
    sample_position: Tensor
    sample_offset: Tensor
    num_computed: Tensor
    num_known: Tensor
    block_table: Tensor
    history: Tensor
    chain: Tensor
    wanted_drafts: Tensor
    state: Tensor
    max_history: int
    drafts: int


def prepare_inputs(rows: DeviceRows, batch: RaggedBatch, longest: int, card: DeviceInfo) -> None:
    """Fill the batch's tokens, positions, slots, kv_len, the states' source and, as far as kv_len, page_table."""
    tokens, spans, states = len(batch.tokens), len(batch.kv_len), batch.states
    programs = triton.cdiv(tokens, TOKENS)
    prepare_inputs_kernel[(programs + spans,)](
        *(rows.counts, rows.span_row, rows.query_start, rows.token_span, rows.num_computed, rows.block_table),
        rows.history,
        *(batch.tokens, batch.positions, batch.slots, batch.kv_len, batch.page_table),
        *(rows.state, batch.kv_len if states is None else states.source, tokens, programs, longest),
        *(rows.block_table.shape[1], rows.history.shape[1], batch.page_size),
        TOKENS=TOKENS, PAGES=64, STATES=0 if states is None else 1 + rows.drafts, DEPENDENT=card.dependent,
        **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["spans", "picks", "ceiling"])
def advance_kernel(
    counts, query_start, span_row, picked, pick_row, pick_at, pick_depth, length, known, hidden, out, spans, picks,
    ceiling, columns, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program i: span i's row advances; hidden state picked[i] is copied, and the position of its token noted."""
    i = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    if i < spans:
        n = tl.load(query_start + i + 1) - tl.load(query_start + i)
        row = tl.load(span_row + i)
        if n > 0:
            tl.store(length + row, tl.minimum(tl.load(length + row) + n, ceiling - 1))
    if (i < picks) & (i < tl.load(counts + 2)):
        at = tl.arange(0, BLOCK)
        source = tl.load(picked + i).to(tl.int64) * columns
        line = tl.load(hidden + source + at, mask=at < columns, other=0.0)
        tl.store(out + i.to(tl.int64) * columns + at, line, mask=at < columns)
        tl.store(pick_at + i, tl.load(known + tl.load(pick_row + i)) + tl.load(pick_depth + i))


def advance(rows: DeviceRows, spans: int, hidden: Tensor, out: Tensor, card: DeviceInfo) -> None:
    """Add what each span was fed to its row's computed tokens; out [R, hidden]: the hidden states sampled at."""
    columns = hidden.shape[1]
    advance_kernel[(max(spans, len(out)),)](
        *(rows.counts, rows.query_start, rows.span_row, rows.sample_indices, rows.sample_row, rows.sample_position),
        rows.sample_offset,
        *(rows.num_computed, rows.num_known, hidden, out, spans, len(out), rows.max_history, columns),
        BLOCK=block(columns), DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["most", "ceiling", "dropped"])
def verify_kernel(
    counts, chain, pick_row, pick_at, length, known, state, history, tokens, most, ceiling, dropped, width,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chain each: from its first token to the first that differs from the draft at its position."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    there = c < tl.load(counts + 3)
    first, end = tl.load(chain + c, mask=there, other=0), tl.load(chain + c + 1, mask=there, other=0)
    row = tl.load(pick_row + first, mask=there, other=0).to(tl.int64)
    begin = tl.load(pick_at + first, mask=there, other=0)
    keep, going = tl.zeros([BLOCK], tl.int32), there
    for depth in range(most):
        at, place = first + depth, history + row * width + begin + depth
        inside = there & (at < end)
        token = tl.load(tokens + at, mask=inside, other=0)
        going = going & inside
        draft = tl.load(place, mask=going & (at + 1 < end), other=-9)
        tl.store(tokens + at, tl.where(going, token, dropped), mask=inside)
        tl.store(place, tl.maximum(token, 0), mask=going)
        keep += going.to(tl.int32)
        going = going & (token == draft)
    upto = tl.minimum(begin + keep, ceiling)
    tl.store(known + row, upto, mask=there)
    tl.store(length + row, upto - 1, mask=there)
    tl.store(state + row, tl.maximum(keep, 1) - 1, mask=there)


def verify(rows: DeviceRows, tokens: Tensor, dropped: int, card: DeviceInfo) -> None:
    """Append tokens [R] to the histories, as far as drafts are right; those after become `dropped`."""
    chains = min(len(tokens), len(rows.wanted_drafts))
    verify_kernel[(triton.cdiv(chains, 64),)](
        *(rows.counts, rows.chain, rows.sample_row, rows.sample_position, rows.num_computed, rows.num_known),
        *(rows.state, rows.history, tokens),
        *(rows.drafts + 1, rows.max_history, dropped, rows.history.shape[1]),
        BLOCK=64, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["chains", "tokens", "at", "most", "padding_row"])
def prepare_draft_kernel(
    step_counts, chain, step_row, wanted, known, done, counts, span_row, query_start, token_span, picked, pick_row,
    pick_depth, chains, tokens, at, most, padding_row, FEW: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: all chains at once. FEW: a row has at most two tokens, whose spans are noted here."""
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
    row = tl.where(n > 0, row, padding_row)
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
    """One span per program: note it for each of its tokens."""
    mine = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    start, end = tl.load(query_start + mine), tl.load(query_start + mine + 1)
    for begin in range(start, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(token_span + at, tl.zeros([BLOCK], tl.int32) + mine, mask=at < end)


def prepare_draft(step: DeviceRows, draft: DeviceRows, chains: int, tokens: int, at: int, card: DeviceInfo) -> None:
    """See `DeviceSteps.prepare_draft`. The row after the last takes what padding writes."""
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
    """BLOCK drafts per program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < picks
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(pick_row + i, mask=inside, other=0).to(tl.int64)
    at = tl.load(pick_at + i, mask=inside, other=0)
    tl.store(history + row * width + at, tl.maximum(tl.load(drawn + i, mask=inside, other=0), 0), mask=inside)


def write_drafts(draft: DeviceRows, drawn: Tensor, card: DeviceInfo) -> None:
    """Store sampled drafts in the histories."""
    write_drafts_kernel[(triton.cdiv(len(drawn), 256),)](
        *(draft.sample_row, draft.sample_position, draft.history, drawn, len(drawn), draft.history.shape[1]),
        BLOCK=256, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["depth", "longest", "shortest"])
def lookup_kernel(
    counts, chain, pick_row, known, history, depth, longest, shortest, width,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chain: of the positions that end as its history does, the one with the longest match, and of several the
    latest."""
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
