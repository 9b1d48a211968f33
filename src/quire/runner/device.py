"""The small steps around a forward on the device, in plain torch: the CPU path, and the oracle of the kernels.

Shapes depend on the key of a step alone. The kernels read nothing back to the host, so all of it can be captured.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.runner.arena import Arena, Lane
from quire.runner.ngram import follow, lookup

DROPPED = -3
"""The token of a pick that stands behind a wrong draft: it was never put to the test."""


class DeviceSteps(Protocol):
    """Letters as in `arena`; a batch's T and S are padded: what lies past the counts feeds token 0 into page 0."""

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        """data[places] = values, places being different."""

    def stage(self, arena: Arena, lane: Lane, batch: RaggedBatch, longest: int) -> None:
        """Fill the batch's tokens, positions, slots, kv_len and page_table from the arena. longest: max_model_len."""

    def settle(self, arena: Arena, lane: Lane, spans: int, hidden: Tensor, out: Tensor) -> None:
        """Every span's row has computed what it was fed; out [R, hidden]: the picked hidden states, as far as picked.

        `pick_at` takes the place in its row's history of the token that each will bring.
        """

    @property
    def offers(self) -> int:
        """Traits (see `traits`) of rows that `choose` can sample."""

    def choose(self, arena: Arena, lane: Lane, logits: Tensor, tokens: Tensor, asked: int) -> None:
        """tokens [R] int32 of logits [R, V] float32, used up, for the rows of `pick_row`.

        asked: the traits that any of those rows has.
        -1: the logits are broken. -2: nothing is allowed.
        """

    def verify(self, arena: Arena, tokens: Tensor) -> None:
        """Each chain's tokens [R] go behind its row's history up to the first that is not the draft at its place.

        Below 0 counts as 0, and ends a chain. The others become DROPPED. The rows' lengths follow.
        """

    def lookup(self, arena: Arena, chains: int, depth: int, longest: int, shortest: int) -> None:
        """`depth` drafts behind the histories of the first `chains` chains: see `ngram.lookup`."""

    def route(self, arena: Arena, chains: int, tokens: int, at: int) -> None:
        """Fill the draft lane: what its model is to be fed before draft number `at` of each chain that wants one.

        Each row's tokens from `done` on, the last of which is picked. at -1: all but the last, unpicked, and no more
        than `tokens` in all.
        """

    def place(self, arena: Arena, tokens: Tensor) -> None:
        """tokens [R] are drafts: each goes to where the draft lane says that it stands."""


class PlainSteps:
    """See `DeviceSteps`. Greedy rows only."""

    offers = 0

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        data[places.long()] = values

    def stage(self, arena: Arena, lane: Lane, batch: RaggedBatch, longest: int) -> None:
        tokens, spans, size = len(batch.tokens), len(batch.kv_len), batch.page_size
        start = lane.query_start[: spans + 1]
        row, length = lane.span_row[:spans].long(), lane.length
        n = start[1:] - start[:-1]
        batch.kv_len.copy_(torch.where(n > 0, length[row] + n, 0))
        batch.page_table.copy_(arena.table[row])
        at = torch.arange(tokens, device=arena.device)
        fed = at < lane.counts[0]
        span = torch.where(fed, lane.token_span[:tokens], 0).long()
        place = torch.where(fed, length[row[span]] + at - start[span], 0)
        page = torch.where(fed, arena.table[row[span], place // size], 0)
        batch.tokens.copy_(torch.where(fed, arena.history[row[span], place], 0))
        batch.positions.copy_(place.clamp(max=longest - 1))
        batch.slots.copy_(torch.where(fed, page * size + place % size, 0))

    def settle(self, arena: Arena, lane: Lane, spans: int, hidden: Tensor, out: Tensor) -> None:
        start, row = lane.query_start[: spans + 1], lane.span_row[:spans].long()
        lane.length[row] = (lane.length[row] + start[1:] - start[:-1]).clamp(max=arena.ceiling - 1)
        picks = len(out)
        real = torch.arange(picks, device=arena.device) < lane.counts[2]
        lane.pick_at[:picks] = arena.columns["known"][lane.pick_row[:picks].long()] + lane.pick_depth[:picks]
        torch.index_select(hidden, 0, torch.where(real, lane.picked[:picks], 0).long(), out=out)

    def choose(self, arena: Arena, lane: Lane, logits: Tensor, tokens: Tensor, asked: int) -> None:
        peak, best = logits.max(1)
        tokens.copy_(torch.where(peak.isfinite(), best, -1))

    def verify(self, arena: Arena, tokens: Tensor) -> None:
        lane, known, drawn = arena.step, arena.columns["known"], tokens.clone()
        chains = min(len(tokens), arena.spans)
        first, end = arena.chain[:chains].long(), arena.chain[1 : chains + 1].long()
        going = torch.arange(chains, device=arena.device) < lane.counts[3]
        first, end = first.where(going, 0), end.where(going, 0)
        row = torch.where(going, lane.pick_row[first], arena.count).long()
        begin, keep = lane.pick_at[first], torch.zeros_like(row)
        tokens.fill_(DROPPED)
        for depth in range(arena.drafts + 1):
            going &= first + depth < end
            at = torch.where(going, first + depth, 0)
            where = (row.where(going, arena.count), torch.where(going, begin + depth, 0))
            token, draft = drawn[at], arena.history[where]
            tokens[at[going]] = token[going]
            arena.history[where] = token.clamp(min=0).where(going, draft)
            keep += going
            going = going & (token == draft)
        known[row] = torch.where(keep > 0, (begin + keep).clamp(max=arena.ceiling), known[row]).int()
        lane.length[row] = torch.where(keep > 0, known[row] - 1, lane.length[row])

    def lookup(self, arena: Arena, chains: int, depth: int, longest: int, shortest: int) -> None:
        for c in range(min(chains, int(arena.step.counts[3]))):
            row = int(arena.step.pick_row[arena.chain[c]])
            known = int(arena.columns["known"][row])
            history = arena.history[row, :known].cpu().numpy()
            found = follow(history, lookup(history, longest, shortest), depth)
            arena.history[row, known : known + depth] = torch.from_numpy(found)

    def route(self, arena: Arena, chains: int, tokens: int, at: int) -> None:
        lane, step, known = arena.draft, arena.step, arena.columns["known"]
        there = torch.arange(chains, device=arena.device) < step.counts[3]
        row = torch.where(there, step.pick_row[arena.chain[:chains].long()], arena.count)
        wanted = there & (arena.wanted[:chains] > max(at, 0))
        done = torch.minimum(lane.length[row.long()], known[row.long()] - 1) if at < 1 else lane.length[row.long()]
        n = torch.where(wanted, known[row.long()] + at - done, 0).clamp(0, (tokens, 2, 1)[min(at, 1) + 1])
        n = (n - (n.cumsum(0) - tokens).clamp(min=0)).clamp(min=0).int()
        lane.length[row[there].long()] = done[there]
        lane.span_row[:chains] = torch.where(n > 0, row, arena.count)
        lane.query_start[0], lane.query_start[1 : chains + 1] = 0, n.cumsum(0)
        total = int(n.sum())
        lane.token_span[:total] = torch.repeat_interleave(torch.arange(chains, device=arena.device), n.long())
        lane.picked[:chains] = (lane.query_start[1 : chains + 1] - 1).clamp(min=0)
        lane.pick_row[:chains] = lane.span_row[:chains]
        lane.pick_depth[:chains] = at
        lane.counts.copy_(torch.tensor([total, chains, chains, chains]))

    def place(self, arena: Arena, tokens: Tensor) -> None:
        lane, picks = arena.draft, len(tokens)
        arena.history[lane.pick_row[:picks].long(), lane.pick_at[:picks].long()] = tokens.clamp(min=0)
