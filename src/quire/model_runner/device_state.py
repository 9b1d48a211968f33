"""Row state on the device: one tensor of int32 that holds every row and the spans of the step, changed by scatters.

A plan becomes (place, value) pairs in one pinned buffer, one copy and one scatter. In steady decode nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.graphs import padding
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.features import COLUMNS, Column
from quire.scheduler.plan import Plan

COUNTERS = ("known", "length", "done", "prompt", "stream")
"""Columns of one int32 a row: tokens of its history; those whose K/V is computed, by the model and by a draft model;
those of its prompt; and the key of its noise. Those of `sampling.features.COLUMNS` follow."""

Ints32 = npt.NDArray[np.int32]
Update = tuple["int | Ints32", Ints32]
"""Numbers, and where they go: from a place on, or each to its own."""


class StepInputs(NamedTuple):
    """What a forward is fed and which of its hidden states are picked: a step's own, and that of drafting.

    counts [4]: tokens, spans, picks, chains. span_row [S], query_start [S+1], token_span [T]. picked, pick_row,
    pick_at, pick_depth [R]: the token whose hidden state is picked, its row, where in its row's history the token that
    it brings will stand, and how many drafts are before it. num_computed: the column of tokens whose K/V is made.
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


class DeviceState:
    """The tensor and its parts as views of it. One row more than there are takes what padding writes.

    spans, tokens: the most a step has. Letters: S spans, T tokens fed, R logits rows, P pages, L tokens a history has.
    A chain is a span that samples: its picks lie side by side, from `chain[c]` to `chain[c + 1]`, the token that each
    brings being compared with the draft before the next. `wanted`: drafts to make for each chain.
    """

    def __init__(self, rows: RowState, *, spans: int, tokens: int, device: torch.device) -> None:
        self.num_rows, self.device, self.spans = rows.num_rows, device, spans
        self.max_history, self.max_drafts, self.max_samples = (
            rows.max_history,
            rows.max_drafts,
            padding(spans * (1 + rows.max_drafts)),
        )
        self.num_table_columns, self.max_blocks = rows.block_table.shape[1], rows.tokens.shape[1]
        sizes = {"chain": spans + 1, "wanted": spans}
        for lane, picks in (("step", self.max_samples), ("draft", spans)):
            sizes |= {f"{lane}.counts": 4, f"{lane}.span_row": spans, f"{lane}.query_start": spans + 1}
            sizes |= {f"{lane}.token_span": tokens, f"{lane}.sample_indices": picks, f"{lane}.sample_row": picks}
            sizes |= {f"{lane}.sample_position": picks, f"{lane}.sample_offset": picks}
        sizes |= dict.fromkeys((*COUNTERS, *COLUMNS), rows.num_rows + 1)
        sizes |= {
            "table": (rows.num_rows + 1) * self.num_table_columns,
            "history": (rows.num_rows + 1) * self.max_blocks,
        }
        self.offsets: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            self.offsets[name] = end
            end += -(-size // 32) * 32
        self.sizes = sizes
        self.data = torch.zeros(end, dtype=torch.int32, device=device)
        self.column_at = np.array([self.offsets[name] for name in (*COUNTERS, *COLUMNS)], dtype=np.int32)
        self.block_table = self.part("table", sizes["table"]).view(-1, self.num_table_columns)
        self.history = self.part("history", sizes["history"]).view(-1, self.max_blocks)
        self.columns = {name: self.part(name, self.num_rows + 1) for name in COUNTERS} | {
            name: self._column(name, column) for name, column in COLUMNS.items()
        }
        self.chain, self.wanted_drafts = self.part("chain"), self.part("wanted")
        self.step, self.draft = self._step_inputs("step", "length"), self._step_inputs("draft", "done")
        self.reset()

    def part(self, name: str, size: int | None = None) -> Tensor:
        """The first `size` numbers of one of the arrays, or of a column; all of them."""
        begin = self.offsets[name]
        return self.data[begin : begin + (self.sizes[name] if size is None else size)]

    def _step_inputs(self, lane: str, length: str) -> StepInputs:
        parts = {name: self.part(f"{lane}.{name}") for name in StepInputs._fields if name != "num_computed"}
        return StepInputs(**parts, num_computed=self.columns[length])

    def _column(self, name: str, column: Column) -> Tensor:
        values = self.part(name, self.num_rows + 1)
        return values if column.is_integer else values.view(torch.float32)

    def reset(self) -> None:
        """No rows, and a step of no spans: all that is fed is padding."""
        self.data.zero_()
        for lane in (self.step, self.draft):
            lane.span_row.fill_(self.num_rows)
            lane.sample_row.fill_(self.num_rows)
        for name, column in COLUMNS.items():
            self.columns[name].fill_(column.off)


class UploadRing:
    """Carries a plan's changes to an arena: pinned buffers in turn, so that one may be filled while another travels.

    turns: how many; the oldest must have travelled before it is filled again, which steps in flight guarantee.
    """

    def __init__(self, arena: DeviceState, *, num_slots: int) -> None:
        self.arena = arena
        self.pinned = arena.device.type == "cuda"
        self.slot = 0
        self.host: list[Tensor] = [self._buffer(1 << 15) for _ in range(num_slots)]
        self.on_device = torch.empty(1 << 16, dtype=torch.int32, device=arena.device)
        self.run = np.arange(1 << 16, dtype=np.int32)

    def _buffer(self, pairs: int) -> Tensor:
        return torch.empty(2 * pairs, dtype=torch.int32, pin_memory=self.pinned)

    def pack(self, pieces: Iterable[Update]) -> tuple[Tensor, Tensor] | None:
        """(places, values) on the device. None: no pieces."""
        runs = list(pieces)
        total = sum(len(values) for _, values in runs)
        if not total:
            return None
        apart = -(-total // 32) * 32  # so that the values, too, begin at a round address
        self._fit(apart)
        buffer = self.host[self.slot]
        host = buffer.numpy()
        end = 0
        for begin, values in runs:
            size = len(values)
            np.add(self.run[:size] if isinstance(begin, int) else 0, begin, out=host[end : end + size], dtype=np.int32)
            host[apart + end : apart + end + size] = values
            end += size
        there = self.on_device[: apart + total]
        there.copy_(buffer[: apart + total], non_blocking=True)
        self.slot = (self.slot + 1) % len(self.host)
        return there[:total], there[apart:]

    def empty(self) -> tuple[Tensor, Tensor]:
        """What `pack` makes of a number that changes nothing."""
        sent = self.pack([(self.arena.offsets["step.counts"], np.zeros(1, dtype=np.int32))])
        assert sent is not None
        return sent

    def _fit(self, pairs: int) -> None:
        if len(self.run) < pairs:
            self.run = np.arange(2 * pairs, dtype=np.int32)
        if len(self.on_device) < 2 * pairs:
            self.on_device = torch.empty(4 * pairs, dtype=torch.int32, device=self.arena.device)
        if len(self.host[self.slot]) < 2 * pairs:
            self.host[self.slot] = self._buffer(2 * pairs)


def step_updates(arena: DeviceState, rows: RowState, plan: Plan, shape: StepShape | None, spans: int) -> list[Update]:
    """What a plan, taken up by host `rows` already, changes in the arena.

    shape: of its spans if they are not those of the step before; spans: up to how many of them to pad.
    """
    out: list[Update] = []
    fresh = {one.row for one in plan.new_sequences}
    for row in fresh:
        out.append((arena.column_at + np.int32(row), columns(rows, row)))
        out.append((arena.offsets["table"] + row * arena.num_table_columns, rows.block_table[row]))
        out.append((arena.offsets["history"] + row * arena.max_blocks, rows.tokens[row, : int(rows.num_known[row])]))
    for row, pages in plan.new_blocks:
        if row not in fresh:
            begin = arena.offsets["table"] + row * arena.num_table_columns + int(rows.num_blocks[row]) - len(pages)
            out.append((begin, np.array(pages, dtype=np.int32)))
    if shape is not None:
        out += layout(arena, shape, spans)
    return out


def columns(rows: RowState, row: int) -> Ints32:
    """A row's numbers, in the order of COUNTERS and COLUMNS; float32 as their bits."""
    features = rows.features
    out = np.empty(len(COUNTERS) + len(COLUMNS), dtype=np.int32)
    stream = features.stream[row : row + 1].view(np.int32)[0]
    out[: len(COUNTERS)] = rows.num_known[row], rows.num_computed[row], 0, rows.prompt_length[row], stream
    floats = out.view(np.float32)
    for at, (name, column) in enumerate(COLUMNS.items(), len(COUNTERS)):
        (out if column.is_integer else floats)[at] = features.columns[name][row]
    return out


def layout(arena: DeviceState, shape: StepShape, spans: int) -> list[tuple[int, Ints32]]:
    """A shape's arrays, padded to `spans` with spans of no tokens, and picks of the first token for nobody's row."""
    count, picks, tokens = len(shape.spans), len(shape.sample_indices), int(shape.query_start[-1])
    heads = padding(picks)
    row, pick_row = np.full(spans, arena.num_rows, np.int32), np.full(heads, arena.num_rows, np.int32)
    start = np.full(spans + 1, tokens, dtype=np.int32)
    picked, depth = np.zeros(heads, np.int32), np.zeros(heads, np.int32)
    start[: count + 1] = shape.query_start
    row[:count], pick_row[:picks], picked[:picks], depth[:picks] = (
        shape.row,
        shape.sample_row,
        shape.sample_indices,
        shape.sample_offset,
    )
    parts = {
        "step.counts": np.array((tokens, count, picks, len(shape.first_sample)), dtype=np.int32),
        "step.span_row": row,
        "step.query_start": start,
        "step.token_span": shape.token_span.astype(np.int32),
        "step.sample_indices": picked,
        "step.sample_row": pick_row,
        "step.sample_offset": depth,
        "chain": np.append(shape.first_sample, picks).astype(np.int32),
    }
    return [(arena.offsets[name], values) for name, values in parts.items()]
