"""The small kernels around a forward: what a step feeds, looked up on the device, and where what it made goes.

Rows are those of `runner.arena`: columns, a page table and a history for each, whoever pads a step being the last row.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton.launch import Card, block, release, wait

TOKENS = 128
"""Tokens a program of `stage` looks up."""


@triton.jit(do_not_specialize=["total"])
def scatter_kernel(data, places, values, total, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    tl.store(data + tl.load(places + i, mask=inside, other=0), tl.load(values + i, mask=inside, other=0), mask=inside)


def scatter(data: Tensor, places: Tensor, values: Tensor) -> None:
    """data [places] = values, all int32."""
    total = len(places)
    scatter_kernel[(triton.cdiv(total, 1024),)](data, places, values, total, BLOCK=1024)


@triton.jit(do_not_specialize=["limit", "token_programs", "longest"])
def stage_kernel(
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


class Rows(NamedTuple):
    """Views of an arena. counts, span_row, query_start, token_span, picked, pick_row: of the step, padded past its end.

    pick_at: where the token of each pick will stand, as `settle` notes. length, known: a number a row. table [rows, P]
    and history [rows, L], contiguous. ceiling: what `known` stays at.
    """

    counts: Tensor
    span_row: Tensor
    query_start: Tensor
    token_span: Tensor
    picked: Tensor
    pick_row: Tensor
    pick_at: Tensor
    length: Tensor
    known: Tensor
    table: Tensor
    history: Tensor
    ceiling: int


def stage(rows: Rows, batch: RaggedBatch, longest: int, card: Card) -> None:
    """Fill the batch's tokens, positions, slots, kv_len and, as far as kv_len, page_table."""
    tokens, spans = len(batch.tokens), len(batch.kv_len)
    programs = triton.cdiv(tokens, TOKENS)
    stage_kernel[(programs + spans,)](
        *(rows.counts, rows.span_row, rows.query_start, rows.token_span, rows.length, rows.table, rows.history),
        *(batch.tokens, batch.positions, batch.slots, batch.kv_len, batch.page_table, tokens, programs, longest),
        *(rows.table.shape[1], rows.history.shape[1], batch.page_size),
        TOKENS=TOKENS, PAGES=64, DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["spans", "picks", "ceiling"])
def settle_kernel(
    query_start, span_row, picked, pick_row, pick_at, length, known, hidden, out, spans, picks, ceiling, columns,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
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
    if i < picks:
        at = tl.arange(0, BLOCK)
        source = tl.load(picked + i).to(tl.int64) * columns
        line = tl.load(hidden + source + at, mask=at < columns, other=0.0)
        tl.store(out + i.to(tl.int64) * columns + at, line, mask=at < columns)
        tl.store(pick_at + i, tl.load(known + tl.load(pick_row + i)))


def settle(rows: Rows, spans: int, hidden: Tensor, out: Tensor, card: Card) -> None:
    """Every span's row has computed what it was fed; out [R, hidden]: the picked hidden states."""
    columns = hidden.shape[1]
    settle_kernel[(max(spans, len(out)),)](
        *(rows.query_start, rows.span_row, rows.picked, rows.pick_row, rows.pick_at, rows.length, rows.known),
        *(hidden, out, spans, len(out), rows.ceiling, columns),
        BLOCK=block(columns), DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["picks", "ceiling"])
def append_kernel(
    pick_row, known, history, drawn, state, tokens, picks, ceiling, width,
    STATE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """STATE: tokens take what was drawn, or below 0 what went wrong. Either way they go behind the histories."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < picks
    wait(DEPENDENT)
    release(DEPENDENT)
    token = tl.load(drawn + i, mask=inside, other=0)
    if STATE:
        bad = tl.load(state + i, mask=inside, other=0)
        token = tl.where(bad > 0, -bad, token)
        tl.store(tokens + i, token, mask=inside)
    row = tl.load(pick_row + i, mask=inside, other=0).to(tl.int64)
    at = tl.load(known + row, mask=inside, other=0)
    tl.store(history + row * width + at, tl.maximum(token, 0), mask=inside)
    tl.store(known + row, tl.minimum(at + 1, ceiling), mask=inside)


def append(rows: Rows, drawn: Tensor, state: Tensor | None, tokens: Tensor, card: Card) -> None:
    """What was drawn goes behind the histories of `pick_row`, with `state` also to `tokens`; see `sampler.Drawn`."""
    picks = len(tokens)
    append_kernel[(triton.cdiv(picks, 256),)](
        *(rows.pick_row, rows.known, rows.history, drawn, drawn if state is None else state, tokens, picks),
        *(rows.ceiling, rows.history.shape[1]), STATE=state is not None, BLOCK=256,
        DEPENDENT=card.dependent, **card.options,
    )  # fmt: skip
