"""Row state on the device: one tensor of int32 that holds every row and the spans of the step, changed by scatters.

A plan becomes (place, value) pairs in one pinned buffer, one copy and one scatter. In steady decode nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.core.plan import Plan
from quire.runner.graphs import padding
from quire.runner.rows import Rows, Shape
from quire.runner.traits import HOT

COLUMNS = (
    *("known", "length", "done", "prompt", "top_k", "stream"),
    *("temperature", "top_p", "min_p", "repetition", "frequency", "presence"),
)
"""A number a row: tokens of its history, those whose K/V is made, by the model and by a draft model, those of its
prompt; how it is sampled."""

FLOATS = COLUMNS.index("temperature")
"""From here on they are float32, kept as their bits."""

OFF: Mapping[str, float] = MappingProxyType({"top_k": 1 << 30, "top_p": 2.0, "repetition": 1.0})
"""What changes nothing, where that is not 0."""

Ints32 = npt.NDArray[np.int32]
Piece = tuple["int | Ints32", Ints32]
"""Numbers, and where they go: from a place on, or each to its own."""


class Lane(NamedTuple):
    """What a forward is fed and which of its hidden states are picked: a step's own, and that of drafting.

    counts [4]: tokens, spans, picks, chains. span_row [S], query_start [S+1], token_span [T]. picked, pick_row,
    pick_at, pick_depth [R]: the token whose hidden state is picked, its row, where in its row's history the token that
    it brings will stand, and how many drafts are before it. length: the column of tokens whose K/V is made.
    """

    counts: Tensor
    span_row: Tensor
    query_start: Tensor
    token_span: Tensor
    picked: Tensor
    pick_row: Tensor
    pick_at: Tensor
    pick_depth: Tensor
    length: Tensor


class Arena:
    """The tensor and its parts as views of it. One row more than there are takes what padding writes.

    spans, tokens: the most a step has. Letters: S spans, T tokens fed, R logits rows, P pages, L tokens a history has.
    A chain is a span that samples: its picks lie side by side, from `chain[c]` to `chain[c + 1]`, the token that each
    brings being compared with the draft before the next. `wanted`: drafts to make for each chain.
    """

    def __init__(self, rows: Rows, *, spans: int, tokens: int, device: torch.device) -> None:
        self.count, self.device, self.spans = rows.count, device, spans
        self.ceiling, self.drafts, self.picks = rows.ceiling, rows.drafts, padding(spans * (1 + rows.drafts))
        self.pages, self.longest = rows.pages.shape[1], rows.tokens.shape[1]
        sizes = {"chain": spans + 1, "wanted": spans}
        for lane, picks in (("step", self.picks), ("draft", spans)):
            sizes |= {f"{lane}.counts": 4, f"{lane}.span_row": spans, f"{lane}.query_start": spans + 1}
            sizes |= {f"{lane}.token_span": tokens, f"{lane}.picked": picks, f"{lane}.pick_row": picks}
            sizes |= {f"{lane}.pick_at": picks, f"{lane}.pick_depth": picks}
        sizes |= dict.fromkeys(COLUMNS, rows.count + 1)
        sizes |= {"table": (rows.count + 1) * self.pages, "history": (rows.count + 1) * self.longest}
        self.at: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            self.at[name] = end
            end += -(-size // 32) * 32
        self.sizes = sizes
        self.data = torch.zeros(end, dtype=torch.int32, device=device)
        self.column_at = np.array([self.at[name] for name in COLUMNS], dtype=np.int32)
        self.table = self.part("table", sizes["table"]).view(-1, self.pages)
        self.history = self.part("history", sizes["history"]).view(-1, self.longest)
        self.columns = {name: self._column(name) for name in COLUMNS}
        self.chain, self.wanted = self.part("chain"), self.part("wanted")
        self.step, self.draft = self._lane("step", "length"), self._lane("draft", "done")
        self.reset()

    def part(self, name: str, size: int | None = None) -> Tensor:
        """The first `size` numbers of one of the arrays, or of a column; all of them."""
        begin = self.at[name]
        return self.data[begin : begin + (self.sizes[name] if size is None else size)]

    def _lane(self, lane: str, length: str) -> Lane:
        parts = {name: self.part(f"{lane}.{name}") for name in Lane._fields if name != "length"}
        return Lane(**parts, length=self.columns[length])

    def _column(self, name: str) -> Tensor:
        column = self.part(name, self.count + 1)
        return column.view(torch.float32) if COLUMNS.index(name) >= FLOATS else column

    def reset(self) -> None:
        """No rows, and a step of no spans: all that is fed is padding."""
        self.data.zero_()
        for lane in (self.step, self.draft):
            lane.span_row.fill_(self.count)
            lane.pick_row.fill_(self.count)
        for name, value in OFF.items():
            self.columns[name].fill_(value)


class Post:
    """Carries a plan's changes to an arena: pinned buffers in turn, so that one may be filled while another travels.

    turns: how many; the oldest must have travelled before it is filled again, which steps in flight guarantee.
    """

    def __init__(self, arena: Arena, *, turns: int) -> None:
        self.arena = arena
        self.pinned = arena.device.type == "cuda"
        self.turn = 0
        self.host: list[Tensor] = [self._buffer(1 << 15) for _ in range(turns)]
        self.there = torch.empty(1 << 16, dtype=torch.int32, device=arena.device)
        self.run = np.arange(1 << 16, dtype=np.int32)

    def _buffer(self, pairs: int) -> Tensor:
        return torch.empty(2 * pairs, dtype=torch.int32, pin_memory=self.pinned)

    def pack(self, pieces: Iterable[Piece]) -> tuple[Tensor, Tensor] | None:
        """(places, values) on the device. None: no pieces."""
        runs = list(pieces)
        total = sum(len(values) for _, values in runs)
        if not total:
            return None
        apart = -(-total // 32) * 32  # so that the values, too, begin at a round address
        self._fit(apart)
        buffer = self.host[self.turn]
        host = buffer.numpy()
        end = 0
        for begin, values in runs:
            size = len(values)
            np.add(self.run[:size] if isinstance(begin, int) else 0, begin, out=host[end : end + size], dtype=np.int32)
            host[apart + end : apart + end + size] = values
            end += size
        there = self.there[: apart + total]
        there.copy_(buffer[: apart + total], non_blocking=True)
        self.turn = (self.turn + 1) % len(self.host)
        return there[:total], there[apart:]

    def one(self) -> tuple[Tensor, Tensor]:
        """What `pack` makes of a number that changes nothing."""
        sent = self.pack([(self.arena.at["step.counts"], np.zeros(1, dtype=np.int32))])
        assert sent is not None
        return sent

    def _fit(self, pairs: int) -> None:
        if len(self.run) < pairs:
            self.run = np.arange(2 * pairs, dtype=np.int32)
        if len(self.there) < 2 * pairs:
            self.there = torch.empty(4 * pairs, dtype=torch.int32, device=self.arena.device)
        if len(self.host[self.turn]) < 2 * pairs:
            self.host[self.turn] = self._buffer(2 * pairs)


def changes(arena: Arena, rows: Rows, plan: Plan, shape: Shape | None, spans: int) -> list[Piece]:
    """What a plan, taken up by host `rows` already, changes in the arena.

    shape: of its spans if they are not those of the step before; spans: up to how many of them to pad.
    """
    out: list[Piece] = []
    fresh = {one.row for one in plan.opened}
    for row in fresh:
        out.append((arena.column_at + np.int32(row), columns(rows, row)))
        out.append((arena.at["table"] + row * arena.pages, rows.pages[row]))
        out.append((arena.at["history"] + row * arena.longest, rows.tokens[row, : int(rows.known[row])]))
    for row, pages in plan.grown:
        if row not in fresh:
            begin = arena.at["table"] + row * arena.pages + int(rows.held[row]) - len(pages)
            out.append((begin, np.array(pages, dtype=np.int32)))
    if shape is not None:
        out += layout(arena, shape, spans)
    return out


def columns(rows: Rows, row: int) -> Ints32:
    """A row's numbers, in the order of COLUMNS."""
    t = rows.traits
    out = np.empty(len(COLUMNS), dtype=np.int32)
    out[:4] = rows.known[row], rows.length[row], 0, rows.prompt[row]
    out[4] = min(int(t.top_k[row]) or OFF["top_k"], OFF["top_k"])
    out[5] = t.stream[row : row + 1].view(np.int32)[0]
    heat = t.temperature[row] if t.bits[row] & HOT else 0.0
    top_p = t.top_p[row] if t.top_p[row] < 1 else OFF["top_p"]
    floats = (heat, top_p, t.min_p[row], t.repetition[row], t.frequency[row], t.presence[row])
    out.view(np.float32)[FLOATS:] = floats
    return out


def layout(arena: Arena, shape: Shape, spans: int) -> list[tuple[int, Ints32]]:
    """A shape's arrays, padded to `spans` with spans of no tokens, and picks of the first token for nobody's row."""
    count, picks, tokens = len(shape.spans), len(shape.picked), int(shape.query_start[-1])
    heads = padding(picks)
    row, pick_row = np.full(spans, arena.count, np.int32), np.full(heads, arena.count, np.int32)
    start = np.full(spans + 1, tokens, dtype=np.int32)
    picked, depth = np.zeros(heads, np.int32), np.zeros(heads, np.int32)
    start[: count + 1] = shape.query_start
    row[:count], pick_row[:picks], picked[:picks], depth[:picks] = shape.row, shape.row_row, shape.picked, shape.depth
    parts = {
        "step.counts": np.array((tokens, count, picks, len(shape.first)), dtype=np.int32),
        "step.span_row": row,
        "step.query_start": start,
        "step.token_span": shape.token_span.astype(np.int32),
        "step.picked": picked,
        "step.pick_row": pick_row,
        "step.pick_depth": depth,
        "chain": np.append(shape.first, picks).astype(np.int32),
    }
    return [(arena.at[name], values) for name, values in parts.items()]
