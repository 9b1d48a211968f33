"""The small steps around a forward on the device, in plain torch: the CPU path, and the oracle of the kernels.

Nothing is read back to the host, and shapes depend on the key of a step alone, so all of it can be captured.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.runner.arena import Arena


class DeviceSteps(Protocol):
    """Letters as in `arena`; a batch's T and S are padded: what lies past the counts feeds token 0 into page 0."""

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        """data[places] = values, places being different."""

    def stage(self, arena: Arena, batch: RaggedBatch, longest: int) -> None:
        """Fill the batch's tokens, positions, slots, kv_len and page_table from the arena. longest: max_model_len."""

    def settle(self, arena: Arena, spans: int, hidden: Tensor, out: Tensor) -> None:
        """Every span's row has computed what it was fed; out [R, hidden]: the picked hidden states.

        `pick_at` takes the place in its row's history of the token that each will bring.
        """

    @property
    def offers(self) -> int:
        """Traits (see `traits`) of rows that `choose` can sample."""

    def choose(self, arena: Arena, logits: Tensor, tokens: Tensor, asked: int) -> None:
        """tokens [R] int32 of logits [R, V] float32, used up, for the rows of `pick_row`, and `append` them.

        asked: the traits that any of those rows has.
        -1: the logits are broken. -2: nothing is allowed.
        """

    def append(self, arena: Arena, tokens: Tensor) -> None:
        """tokens [R] go behind the histories of `pick_row`; below 0 counts as 0."""


class PlainSteps:
    """See `DeviceSteps`. Greedy rows only."""

    offers = 0

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        data[places.long()] = values

    def stage(self, arena: Arena, batch: RaggedBatch, longest: int) -> None:
        tokens, spans, size = len(batch.tokens), len(batch.kv_len), batch.page_size
        counts, start = arena.part("counts", 3), arena.part("query_start", spans + 1)
        row, length = arena.part("span_row", spans).long(), arena.columns["length"]
        n = start[1:] - start[:-1]
        batch.kv_len.copy_(torch.where(n > 0, length[row] + n, 0))
        batch.page_table.copy_(arena.table[row])
        at = torch.arange(tokens, device=arena.device)
        fed = at < counts[0]
        span = torch.where(fed, arena.part("token_span", tokens), 0).long()
        place = torch.where(fed, length[row[span]] + at - start[span], 0)
        page = torch.where(fed, arena.table[row[span], place // size], 0)
        batch.tokens.copy_(torch.where(fed, arena.history[row[span], place], 0))
        batch.positions.copy_(place.clamp(max=longest - 1))
        batch.slots.copy_(torch.where(fed, page * size + place % size, 0))

    def settle(self, arena: Arena, spans: int, hidden: Tensor, out: Tensor) -> None:
        start, row = arena.part("query_start", spans + 1), arena.part("span_row", spans).long()
        length = arena.columns["length"]
        length[row] = (length[row] + start[1:] - start[:-1]).clamp(max=arena.ceiling - 1)
        known = arena.columns["known"][arena.part("pick_row", len(out)).long()]
        arena.part("pick_at", len(out)).copy_(known)
        torch.index_select(hidden, 0, arena.part("picked", len(out)).long(), out=out)

    def choose(self, arena: Arena, logits: Tensor, tokens: Tensor, asked: int) -> None:
        peak, best = logits.max(1)
        tokens.copy_(torch.where(peak.isfinite(), best, -1))
        self.append(arena, tokens)

    def append(self, arena: Arena, tokens: Tensor) -> None:
        row = arena.part("pick_row", len(tokens)).long()
        known = arena.columns["known"][row]
        arena.history[row, known] = tokens.clamp(min=0)
        arena.columns["known"][row] = (known + 1).clamp(max=arena.ceiling)
