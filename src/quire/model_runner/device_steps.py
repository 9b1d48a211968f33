"""The small steps around a forward on the device, in plain torch: the CPU path, and the oracle of the kernels.

Shapes depend on the key of a step alone. The kernels read nothing back to the host, so all of it can be captured.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState, StepInputs
from quire.ops.ragged import RaggedBatch

DROPPED = -3
"""The token of a pick that stands behind a wrong draft: it was never put to the test."""


class DeviceSteps(Protocol):
    """Letters as in `arena`; a batch's T and S are padded: what lies past the counts feeds token 0 into page 0."""

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        """data[places] = values, places being different."""

    def prepare_inputs(self, state: DeviceState, inputs: StepInputs, batch: RaggedBatch, longest: int) -> None:
        """Fill the batch's tokens, positions, slots, kv_len and page_table from the arena. longest: max_model_len."""

    def advance(self, state: DeviceState, inputs: StepInputs, spans: int, hidden: Tensor, out: Tensor) -> None:
        """Every span's row has computed what it was fed; out [R, hidden]: the picked hidden states, as far as picked.

        `pick_at` takes the place in its row's history of the token that each will bring.
        """

    @property
    def supported_features(self) -> int:
        """Traits (see `traits`) of rows that `choose` can sample."""

    def sample(self, state: DeviceState, inputs: StepInputs, logits: Tensor, tokens: Tensor, features: int) -> None:
        """tokens [R] int32 of logits [R, V] float32, used up, for the rows of `pick_row`.

        asked: the traits that any of those rows has.
        -1: the logits are broken. -2: nothing is allowed.
        """

    def verify(self, state: DeviceState, tokens: Tensor) -> None:
        """Each chain's tokens [R] go behind its row's history up to the first that is not the draft at its place.

        Below 0 counts as 0, and ends a chain. The others become DROPPED. The rows' lengths follow.
        """

    def lookup(self, state: DeviceState, chains: int, depth: int, longest: int, shortest: int) -> None:
        """`depth` drafts behind the histories of the first `chains` chains: see `ngram.lookup`."""

    def prepare_draft(self, state: DeviceState, chains: int, tokens: int, at: int) -> None:
        """Fill the draft lane: what its model is to be fed before draft number `at` of each chain that wants one.

        Each row's tokens from `done` on, the last of which is picked. at -1: all but the last, unpicked, and no more
        than `tokens` in all.
        """

    def write_drafts(self, state: DeviceState, tokens: Tensor) -> None:
        """tokens [R] are drafts: each goes to where the draft lane says that it stands."""


def follow(history: npt.NDArray[np.int32], at: int, count: int) -> npt.NDArray[np.int32]:
    """`count` tokens of the history from `at` on, its last one repeated past its end."""
    return history[np.minimum(np.arange(at, at + count), len(history) - 1)]


def lookup(history: npt.NDArray[np.int32], longest: int, shortest: int) -> int:
    """Where the tokens begin that followed the latest earlier occurrence of the longest known suffix.

    len(history) when no suffix of `shortest` tokens was seen before.
    """
    size = found = len(history)
    ends = np.flatnonzero(history[:-1] == history[-1])
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[history[ends - length + 1] == history[size - length]]
        if not len(ends):
            break
        if length >= shortest:
            found = int(ends[-1]) + 1
    return found


class TorchSteps:
    """See `DeviceSteps`. Greedy rows only."""

    supported_features = 0

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        data[places.long()] = values

    def prepare_inputs(self, state: DeviceState, inputs: StepInputs, batch: RaggedBatch, longest: int) -> None:
        tokens, spans, size = len(batch.tokens), len(batch.kv_len), batch.page_size
        start = inputs.query_start[: spans + 1]
        row, length = inputs.span_row[:spans].long(), inputs.num_computed
        n = start[1:] - start[:-1]
        batch.kv_len.copy_(torch.where(n > 0, length[row] + n, 0))
        batch.page_table.copy_(state.block_table[row])
        at = torch.arange(tokens, device=state.device)
        fed = at < inputs.counts[0]
        span = torch.where(fed, inputs.token_span[:tokens], 0).long()
        place = torch.where(fed, length[row[span]] + at - start[span], 0)
        page = torch.where(fed, state.block_table[row[span], place // size], 0)
        batch.tokens.copy_(torch.where(fed, state.history[row[span], place], 0))
        batch.positions.copy_(place.clamp(max=longest - 1))
        batch.slots.copy_(torch.where(fed, page * size + place % size, 0))

    def advance(self, state: DeviceState, inputs: StepInputs, spans: int, hidden: Tensor, out: Tensor) -> None:
        start, row = inputs.query_start[: spans + 1], inputs.span_row[:spans].long()
        inputs.num_computed[row] = (inputs.num_computed[row] + start[1:] - start[:-1]).clamp(max=state.max_history - 1)
        picks = len(out)
        real = torch.arange(picks, device=state.device) < inputs.counts[2]
        inputs.sample_position[:picks] = (
            state.columns["known"][inputs.sample_row[:picks].long()] + inputs.sample_offset[:picks]
        )
        torch.index_select(hidden, 0, torch.where(real, inputs.sample_indices[:picks], 0).long(), out=out)

    def sample(self, state: DeviceState, inputs: StepInputs, logits: Tensor, tokens: Tensor, features: int) -> None:
        peak, best = logits.max(1)
        tokens.copy_(torch.where(peak.isfinite(), best, -1))

    def verify(self, state: DeviceState, tokens: Tensor) -> None:
        inputs, num_known, drawn = state.step, state.columns["known"], tokens.clone()
        chains = min(len(tokens), state.spans)
        first, end = state.chain[:chains].long(), state.chain[1 : chains + 1].long()
        going = torch.arange(chains, device=state.device) < inputs.counts[3]
        first, end = first.where(going, 0), end.where(going, 0)
        row = torch.where(going, inputs.sample_row[first], state.num_rows).long()
        begin, keep = inputs.sample_position[first], torch.zeros_like(row)
        tokens.fill_(DROPPED)
        for depth in range(state.max_drafts + 1):
            going &= first + depth < end
            at = torch.where(going, first + depth, 0)
            where = (row.where(going, state.num_rows), torch.where(going, begin + depth, 0))
            token, draft = drawn[at], state.history[where]
            tokens[at[going]] = token[going]
            state.history[where] = token.clamp(min=0).where(going, draft)
            keep += going
            going = going & (token == draft)
        num_known[row] = torch.where(keep > 0, (begin + keep).clamp(max=state.max_history), num_known[row]).int()
        inputs.num_computed[row] = torch.where(keep > 0, num_known[row] - 1, inputs.num_computed[row])

    def lookup(self, state: DeviceState, chains: int, depth: int, longest: int, shortest: int) -> None:
        for c in range(min(chains, int(state.step.counts[3]))):
            row = int(state.step.sample_row[state.chain[c]])
            num_known = int(state.columns["known"][row])
            history = state.history[row, :num_known].cpu().numpy()
            found = follow(history, lookup(history, longest, shortest), depth)
            state.history[row, num_known : num_known + depth] = torch.from_numpy(found)

    def prepare_draft(self, state: DeviceState, chains: int, tokens: int, at: int) -> None:
        inputs, step, num_known = state.draft, state.step, state.columns["known"]
        there = torch.arange(chains, device=state.device) < step.counts[3]
        row = torch.where(there, step.sample_row[state.chain[:chains].long()], state.num_rows)
        wanted = there & (state.wanted_drafts[:chains] > max(at, 0))
        done = (
            torch.minimum(inputs.num_computed[row.long()], num_known[row.long()] - 1)
            if at < 1
            else inputs.num_computed[row.long()]
        )
        n = torch.where(wanted, num_known[row.long()] + at - done, 0).clamp(0, (tokens, 2, 1)[min(at, 1) + 1])
        n = (n - (n.cumsum(0) - tokens).clamp(min=0)).clamp(min=0).int()
        inputs.num_computed[row[there].long()] = done[there]
        inputs.span_row[:chains] = torch.where(n > 0, row, state.num_rows)
        inputs.query_start[0], inputs.query_start[1 : chains + 1] = 0, n.cumsum(0)
        total = int(n.sum())
        inputs.token_span[:total] = torch.repeat_interleave(torch.arange(chains, device=state.device), n.long())
        inputs.sample_indices[:chains] = (inputs.query_start[1 : chains + 1] - 1).clamp(min=0)
        inputs.sample_row[:chains] = inputs.span_row[:chains]
        inputs.sample_offset[:chains] = at
        inputs.counts.copy_(torch.tensor([total, chains, chains, chains]))

    def write_drafts(self, state: DeviceState, tokens: Tensor) -> None:
        inputs, picks = state.draft, len(tokens)
        state.history[inputs.sample_row[:picks].long(), inputs.sample_position[:picks].long()] = tokens.clamp(min=0)
