"""The small steps around a forward on the device: their interface, and in plain torch, the oracle of the kernels.

Shapes depend on a step's `GraphKey` alone. The kernels read nothing back to the host, so all of it can be captured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState, StepInputs
from quire.model_runner.sampling.features import MASKED, MAX_LOGPROBS, SCORED, SamplingFeatures
from quire.model_runner.sampling.noise import Ids
from quire.model_runner.sampling.sampler import BROKEN, Sampler, score_tokens
from quire.ops.operands import VocabularyPart
from quire.ops.ragged import RaggedBatch
from quire.types import TokenLogprobs

DROPPED = -3
"""The token of a sample after a rejected draft: it is not compared with anything."""


class DeviceSteps(Protocol):
    """Shape letters as in `DeviceState`. A batch's T and S are padded: padding feeds token 0 into the null block."""

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        """data[places] = values, of which equal places have equal values. places, values: on the device, or pinned."""

    def copy(self, out: Tensor, source: Tensor) -> None:
        """out = source, int32 of as many numbers, which lies on the device or is pinned."""

    def prepare_inputs(self, state: DeviceState, inputs: StepInputs, batch: RaggedBatch, longest: int) -> None:
        """Fill the batch's tokens, positions, slots, kv_len, page_table and where states are read. longest:
        max_model_len."""

    def advance(self, state: DeviceState, inputs: StepInputs, spans: int, hidden: Tensor, out: Tensor) -> None:
        """Add what each span was fed to its row's computed tokens; out [R, hidden] takes the hidden states sampled at.

        `sample_position` takes the index in its row's history of the token that each will give.
        """

    def sample(
        self,
        state: DeviceState,
        inputs: StepInputs,
        logits: Tensor,
        tokens: Tensor,
        features: int,
        scores: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        """tokens [R] int32 of logits [R, V], which may be changed, for the rows of `sample_row`.

        features: those that any of the rows has (see `sampling.features`). Token -1: the logits are broken; -2: no
        token is allowed. scores [R, SCORE_WIDTH] int32: takes log-probabilities where rows ask for them. part: what
        these logits are of, where no row has other features than RANDOM; None: the whole vocabulary.
        """

    def score(self, logits: Tensor, tokens: Tensor, wanted: Tensor, scores: Tensor) -> None:
        """scores [R, SCORE_WIDTH] int32 of tokens [R] int32 under logits [R, V].

        wanted [R] int32: how many of the likeliest tokens to add, at most MAX_LOGPROBS; -1: not scored. See
        `read_scores`.
        """

    def verify(self, state: DeviceState, tokens: Tensor) -> None:
        """Append each chain's tokens [R] to its row's history, up to the first that differs from the draft there.

        A token below 0 is written as 0 and ends its chain. Those after the end become DROPPED. Rows' lengths follow.
        """

    def lookup(self, state: DeviceState, chains: int, depth: int, longest: int, shortest: int) -> None:
        """Write `depth` drafts after the histories of the first `chains` chains, as the function `lookup` does."""

    def prepare_draft(self, state: DeviceState, chains: int, tokens: int, at: int) -> None:
        """Fill `state.draft`: what the draft model is fed before draft number `at` of each chain that wants one.

        Each row's tokens from `done` on; the last one is sampled at. at -1: all but the last, at most `tokens` in all,
        and none is sampled at.
        """

    def write_drafts(self, state: DeviceState, tokens: Tensor) -> None:
        """Write drafts [R] to the rows' histories, at the positions in `state.draft`."""


def follow(history: npt.NDArray[np.int32], at: int, count: int) -> npt.NDArray[np.int32]:
    """`count` tokens of the history from index `at` on; past its end, its last token."""
    return history[np.minimum(np.arange(at, at + count), len(history) - 1)]


def lookup(history: npt.NDArray[np.int32], longest: int, shortest: int) -> int:
    """The index after the latest earlier occurrence of the longest suffix, of up to `longest` tokens, that has one.

    len(history) if no suffix of `shortest` tokens occurs earlier.
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


SCORE_WIDTH = 2 + 2 * MAX_LOGPROBS
"""Numbers of a line of scores: a token's log-probability (float32) and rank; then the likeliest tokens; then theirs."""


def read_scores(scores: npt.NDArray[np.int32], tokens: Sequence[int], wanted: Sequence[int]) -> list[TokenLogprobs]:
    """Lines of scores [R, SCORE_WIDTH] as values, for the tokens that they are of."""
    most = max(wanted, default=0)
    ids = scores[:, 2 : 2 + most].ravel().tolist()
    values = scores[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + most].view(np.float32).ravel().tolist()
    # A line has `most` pairs. All of this is done by the interpreter's own loops: no Python for each token.
    tops: Iterable[tuple[Any, ...]] = itertools.repeat(())
    if most:
        tops = zip(*[iter(zip(ids, values, strict=True))] * most, strict=True)
    if min(wanted, default=0) < most:
        tops = (top[:count] for top, count in zip(tops, wanted, strict=False))
    lines = zip(tokens, scores[:, 0].view(np.float32).tolist(), scores[:, 1].tolist(), tops, strict=False)
    return [*map(_TOKEN_LOGPROBS, lines)]


_TOKEN_LOGPROBS: Callable[[Iterable[object]], TokenLogprobs] = partial(tuple.__new__, TokenLogprobs)
"""`TokenLogprobs._make`, at a third of its cost."""


class RowsView(NamedTuple):
    """Rows of a `DeviceState` on a CPU, as the host's sampler reads them."""

    features: SamplingFeatures
    tokens: npt.NDArray[np.int32]
    num_known: npt.NDArray[np.int32]
    prompt_length: npt.NDArray[np.int32]
    epoch: int


class SamplesView(NamedTuple):
    """Samples of a step's or a draft's inputs, as the host's sampler reads them."""

    sample_row: Ids
    sample_offset: Ids


class TorchSteps:
    """`DeviceSteps` in plain torch, on a CPU; sampling is the host's."""

    def __init__(self) -> None:
        self.sampler: Sampler | None = None
        self.calls = itertools.count()

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        """data[places] = values."""
        data[places.long()] = values

    def copy(self, out: Tensor, source: Tensor) -> None:
        """out = source."""
        out.copy_(source)

    def prepare_inputs(self, state: DeviceState, inputs: StepInputs, batch: RaggedBatch, longest: int) -> None:
        """Fill the batch."""
        tokens, spans = len(batch.tokens), len(batch.kv_len)
        size = batch.page_size
        start = inputs.query_start[: spans + 1]
        row, length = inputs.span_row[:spans].long(), inputs.num_computed
        n = start[1:] - start[:-1]
        batch.kv_len.copy_(torch.where(n > 0, length[row] + n, 0))
        batch.page_table.copy_(state.block_table[row])
        if batch.states is not None:
            slot = 1 + row * (1 + state.max_drafts) + state.columns["state"][row]
            batch.states.source.copy_(torch.where((n > 0) & (length[row] > 0), slot, 0))
        at = torch.arange(tokens, device=state.device)
        fed = at < inputs.counts[0]
        span = torch.where(fed, inputs.token_span[:tokens], 0).long()
        place = torch.where(fed, length[row[span]] + at - start[span], 0)
        page = torch.where(fed, state.block_table[row[span], place // size], 0)
        batch.tokens.copy_(torch.where(fed, state.history[row[span], place], 0))
        batch.positions.copy_(place.clamp(max=longest - 1))
        batch.slots.copy_(torch.where(fed, page * size + place % size, 0))

    def advance(self, state: DeviceState, inputs: StepInputs, spans: int, hidden: Tensor, out: Tensor) -> None:
        """Advance rows and select hidden states."""
        start, row = inputs.query_start[: spans + 1], inputs.span_row[:spans].long()
        inputs.num_computed[row] = (inputs.num_computed[row] + start[1:] - start[:-1]).clamp(max=state.max_history - 1)
        samples = len(out)
        real = torch.arange(samples, device=state.device) < inputs.counts[2]
        inputs.sample_position[:samples] = (
            state.columns["known"][inputs.sample_row[:samples].long()] + inputs.sample_offset[:samples]
        )
        torch.index_select(hidden, 0, torch.where(real, inputs.sample_indices[:samples], 0).long(), out=out)

    def sample(
        self,
        state: DeviceState,
        inputs: StepInputs,
        logits: Tensor,
        tokens: Tensor,
        features: int,
        scores: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        """Sample with the host's sampler."""
        logits = logits if part is None else part.gather(logits)
        row = inputs.sample_row[: len(tokens)].numpy()
        which = np.flatnonzero(row < state.num_rows)
        known, prompt = state.columns["known"].numpy(), state.columns["prompt"].numpy()
        rows = RowsView(state.features, state.history.numpy(), known, prompt, next(self.calls))
        offset = inputs.sample_offset[: len(tokens)].numpy()
        samples = SamplesView(row[which].astype(np.intp), offset[which].astype(np.intp))
        if self.sampler is None or self.sampler.vocab_size != logits.shape[1]:
            self.sampler = Sampler(logits.shape[1])
        index = state.mask_index[: len(tokens)].numpy()[which]
        masked = np.flatnonzero(index >= 0) if features & MASKED else ()
        words = int(state.mask_words[0])
        masks = [(int(i), state.masks[int(index[i]) * words :][:words].numpy().tobytes()) for i in masked]
        sampled = self.sampler(logits[torch.from_numpy(which)], rows, samples, masks)
        drawn = sampled.tokens.copy()
        for r, why in sampled.errors.items():
            drawn[r] = -1 if why == BROKEN else -2
        tokens[torch.from_numpy(which)] = torch.from_numpy(drawn.astype(np.int32))
        if scores is not None and features & SCORED:
            for r, each in sampled.logprobs.items():
                if len(each.top) <= MAX_LOGPROBS:
                    _write_score(scores[int(which[r])], each)

    def score(self, logits: Tensor, tokens: Tensor, wanted: Tensor, scores: Tensor) -> None:
        """Score with the host's function."""
        known, most = (given.clamp(min=0).numpy().astype(np.intp) for given in (tokens, wanted))
        made = score_tokens(logits.float(), known, most)
        for line, each in zip(scores, made, strict=True):
            _write_score(line, each)

    def verify(self, state: DeviceState, tokens: Tensor) -> None:
        """Append tokens up to the first rejected draft."""
        inputs, num_known = state.step, state.columns["known"]
        drawn = tokens.clone()
        chains = min(len(tokens), state.spans)
        first, end = state.chain[:chains].long(), state.chain[1 : chains + 1].long()
        active = torch.arange(chains, device=state.device) < inputs.counts[3]
        first, end = first.where(active, 0), end.where(active, 0)
        row = torch.where(active, inputs.sample_row[first], state.num_rows).long()
        begin, keep = inputs.sample_position[first], torch.zeros_like(row)
        tokens.fill_(DROPPED)
        for depth in range(state.max_drafts + 1):
            active &= first + depth < end
            at = torch.where(active, first + depth, 0)
            where = (row.where(active, state.num_rows), torch.where(active, begin + depth, 0))
            token, draft = drawn[at], state.history[where]
            tokens[at[active]] = token[active]
            state.history[where] = token.clamp(min=0).where(active, draft)
            keep += active
            active = active & (token == draft)
        state.columns["state"][row] = (keep.clamp(min=1) - 1).int()
        num_known[row] = torch.where(keep > 0, (begin + keep).clamp(max=state.max_history), num_known[row]).int()
        inputs.num_computed[row] = torch.where(keep > 0, num_known[row] - 1, inputs.num_computed[row])

    def lookup(self, state: DeviceState, chains: int, depth: int, longest: int, shortest: int) -> None:
        """Drafts by the function `lookup`, on the host."""
        for c in range(min(chains, int(state.step.counts[3]))):
            row = int(state.step.sample_row[state.chain[c]])
            num_known = int(state.columns["known"][row])
            history = state.history[row, :num_known].cpu().numpy()
            found = follow(history, lookup(history, longest, shortest), depth)
            state.history[row, num_known : num_known + depth] = torch.from_numpy(found)

    def prepare_draft(self, state: DeviceState, chains: int, tokens: int, at: int) -> None:
        """Fill `state.draft`."""
        inputs, step = state.draft, state.step
        num_known = state.columns["known"]
        exists = torch.arange(chains, device=state.device) < step.counts[3]
        row = torch.where(exists, step.sample_row[state.chain[:chains].long()], state.num_rows)
        wanted = exists & (state.wanted_drafts[:chains] > max(at, 0))
        known, done = num_known[row.long()], inputs.num_computed[row.long()]
        if at < 1:
            done = torch.minimum(done, known - 1)
        n = torch.where(wanted, known + at - done, 0).clamp(0, (tokens, 2, 1)[min(at, 1) + 1])
        n = (n - (n.cumsum(0) - tokens).clamp(min=0)).clamp(min=0).int()
        inputs.num_computed[row[exists].long()] = done[exists]
        inputs.span_row[:chains] = torch.where(n > 0, row, state.num_rows)
        inputs.query_start[0], inputs.query_start[1 : chains + 1] = 0, n.cumsum(0)
        total = int(n.sum())
        inputs.token_span[:total] = torch.repeat_interleave(torch.arange(chains, device=state.device), n.long())
        inputs.sample_indices[:chains] = (inputs.query_start[1 : chains + 1] - 1).clamp(min=0)
        inputs.sample_row[:chains] = inputs.span_row[:chains]
        inputs.sample_offset[:chains] = at
        inputs.counts.copy_(torch.tensor([total, chains, chains, chains]))

    def write_drafts(self, state: DeviceState, tokens: Tensor) -> None:
        """Write drafts to histories."""
        row, position = state.draft.sample_row[: len(tokens)], state.draft.sample_position[: len(tokens)]
        state.history[row.long(), position.long()] = tokens.clamp(min=0)


def _write_score(line: Tensor, score: TokenLogprobs) -> None:
    """Write one line of scores."""
    floats, count = line.view(torch.float32), len(score.top)
    floats[0], line[1] = score.logprob, score.rank
    line[2 : 2 + count] = torch.tensor([token for token, _ in score.top], dtype=torch.int32)
    floats[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count] = torch.tensor([value for _, value in score.top])
