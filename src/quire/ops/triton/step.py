"""The small kernels around a forward: what a step feeds, looked up on the device, and where what it made goes.

Rows are those of `runner.arena`: columns, a page table and a history for each, whoever pads a step being the last row.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait

TOKENS = 128
"""Tokens a program of `stage` looks up."""


@kernel(do_not_specialize=["total"])
def scatter_kernel(data, places, values, total, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    tl.store(data + tl.load(places + i, mask=inside, other=0), tl.load(values + i, mask=inside, other=0), mask=inside)


def scatter(data: Tensor, places: Tensor, values: Tensor) -> None:
    """data [places] = values, all int32."""
    total = len(places)
    scatter_kernel[(triton.cdiv(total, 1024),)](data, places, values, total, BLOCK=1024)


@kernel(do_not_specialize=["limit", "token_programs", "longest"])
def prepare_inputs_kernel(
    counts, span_row, query_start, token_span, length, table, history, tokens, positions, slots, kv_len, page_table,
    limit, token_programs, longest, pages, width, page_size,
    TOKENS: tl.constexpr, PAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs below token_programs: TOKENS tokens each. The others: a span each, and its pages as far as it reads."""
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
        for begin in range(0, tl.cdiv(reach, page_size), PAGES):
            p = begin + tl.arange(0, PAGES)
            held = tl.load(table + own * pages + p, mask=p < pages, other=0)
            tl.store(page_table + mine.to(tl.int64) * pages + p, held, mask=p < pages)


class DeviceRows(NamedTuple):
    """Views of an arena's rows and one of its lanes. counts, span_row, query_start, token_span, picked, pick_row,
    pick_depth: of the step, padded past its end; counts [4]: tokens, spans, picks, chains.

    pick_at: where the token of each pick will stand, as `settle` notes. length, known: a number a row. table [rows, P]
    and history [rows, L], contiguous. chain [chains + 1]: where the picks of each begin; wanted: drafts for each.
    ceiling: what `known` stays at. drafts: the most that a chain can have.
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
    max_history: int
    drafts: int


def prepare_inputs(rows: DeviceRows, batch: RaggedBatch, longest: int, card: DeviceInfo) -> None:
    """Fill the batch's tokens, positions, slots, kv_len and, as far as kv_len, page_table."""
    tokens, spans = len(batch.tokens), len(batch.kv_len)
    programs = triton.cdiv(tokens, TOKENS)
    prepare_inputs_kernel[(programs + spans,)](
        *(rows.counts, rows.span_row, rows.query_start, rows.token_span, rows.num_computed, rows.block_table),
        rows.history,
        *(batch.tokens, batch.positions, batch.slots, batch.kv_len, batch.page_table, tokens, programs, longest),
        *(rows.block_table.shape[1], rows.history.shape[1], batch.page_size),
        TOKENS=TOKENS, PAGES=64, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["spans", "picks", "ceiling"])
def advance_kernel(
    counts, query_start, span_row, picked, pick_row, pick_at, pick_depth, length, known, hidden, out, spans, picks,
    ceiling, columns, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program i: span i's row moves on; hidden state picked[i] is copied, and where its token will stand noted."""
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
    """Every span's row has computed what it was fed; out [R, hidden]: the picked hidden states, as far as picked."""
    columns = hidden.shape[1]
    advance_kernel[(max(spans, len(out)),)](
        *(rows.counts, rows.query_start, rows.span_row, rows.sample_indices, rows.sample_row, rows.sample_position),
        rows.sample_offset,
        *(rows.num_computed, rows.num_known, hidden, out, spans, len(out), rows.max_history, columns),
        BLOCK=block(columns), DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["most", "ceiling", "dropped"])
def verify_kernel(
    counts, chain, pick_row, pick_at, length, known, history, tokens, most, ceiling, dropped, width,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A chain each: from its first token to the first that is not the draft at its place."""
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


def verify(rows: DeviceRows, tokens: Tensor, dropped: int, card: DeviceInfo) -> None:
    """tokens [R] go behind the histories, as far as they are right; those that are not put to the test: dropped."""
    chains = min(len(tokens), len(rows.wanted_drafts))
    verify_kernel[(triton.cdiv(chains, 64),)](
        *(rows.counts, rows.chain, rows.sample_row, rows.sample_position, rows.num_computed, rows.num_known),
        *(rows.history, tokens),
        *(rows.drafts + 1, rows.max_history, dropped, rows.history.shape[1]),
        BLOCK=64, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip
