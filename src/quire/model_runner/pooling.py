"""Hidden states of prompts become vectors: pooled chunk by chunk, then through what the model has behind that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.model_runner.row_state import RowState, StepShape
from quire.scheduler.plan import Plan
from quire.types import WHOLE_PROMPT, Pooling


def unchanged(x: Tensor) -> Tensor:
    """x."""
    return x


@dataclass(frozen=True, slots=True)
class PoolingHeads:
    """What follows pooling, float32 [N, hidden] -> [N, n]. dense: of embeddings. classify, reads: the classifier, None
    for none, and which hidden states it reads."""

    dense: Callable[[Tensor], Tensor] = unchanged
    classify: Callable[[Tensor], Tensor] | None = None
    reads: Pooling = "last"


class _Ended(NamedTuple):
    """A prompt that ends in this step: its span, how it is pooled, and what it was pooled to."""

    span: int
    how: Pooling
    vectors: Tensor


class PromptPooler:
    """Pools the prompts of rows that ask for it.

    What is needed of earlier chunks is kept on the device: of a mean the sum so far, in float64, which for float32
    numbers of like size is exact, so that chunks and neighbours do not change it. Nothing here waits for the device, so
    a step may be pooled while earlier ones are in flight.
    """

    def __init__(self, heads: PoolingHeads | None = None) -> None:
        self.heads = PoolingHeads() if heads is None else heads
        self._how: dict[int, Pooling] = {}
        self._kept: dict[int, Tensor] = {}

    def apply_plan(self, plan: Plan) -> None:
        """Note the rows that a plan opens. A row that needs its whole prompt begins at the first token."""
        for one in plan.new_sequences:
            self._drop(one.row)
            if one.sampling.pooling is not None:
                self._how[one.row] = one.sampling.pooling

    def _reads(self, row: int) -> Pooling | None:
        """Which hidden states of a row are needed."""
        how = self._how.get(row)
        return self.heads.reads if how == "classify" else how

    def wants_all(self, shape: StepShape) -> bool:
        """Whether the hidden states of every token are needed, not only of those sampled at."""
        return bool(self._how) and any(self._reads(span.row) in WHOLE_PROMPT for span in shape.spans)

    def covers(self, shape: StepShape) -> bool:
        """Whether every span is pooled, so that nothing need be sampled."""
        return bool(self._how) and all(span.row in self._how for span in shape.spans)

    def feed(
        self, rows: RowState, shape: StepShape, hidden: Tensor | None, selected: Tensor | None
    ) -> dict[int, Tensor]:
        """Numbers [n] float32 of the prompts that end in this step, by span; they share memory with nothing.

        hidden [T, H]: of the tokens fed, if `wants_all`. selected [R, H]: of those that are sampled at, if any are.
        """
        if not self._how:
            return {}
        means = [s for s, span in enumerate(shape.spans) if self._reads(span.row) == "mean"]
        sums = self._add_up(shape, means, hidden) if means and hidden is not None else {}
        ended = list[_Ended]()
        for s, span in enumerate(shape.spans):
            how, reads = self._how.get(span.row), self._reads(span.row)
            if how is None:
                continue
            if reads == "mean":
                self._kept[span.row] = sums[s]
            elif reads in WHOLE_PROMPT:
                assert hidden is not None
                self._keep(span.row, reads, hidden[int(shape.query_start[s]) : int(shape.query_start[s + 1])])
            if not span.num_samples:
                continue
            if reads == "last":
                assert selected is not None
                last = int(shape.first_sample[np.searchsorted(shape.sampling_spans, s)]) + span.num_samples - 1
                vectors = selected[last : last + 1].float()
            else:
                vectors = self._kept[span.row]
                if reads == "mean":
                    vectors = (vectors / int(rows.prompt_length[span.row])).float()[None]
            ended.append(_Ended(s, how, vectors))
            self._drop(span.row)
        return self._through_heads(ended)

    def _keep(self, row: int, reads: Pooling | None, fed: Tensor) -> None:
        """The first hidden state, or all of them."""
        if reads == "cls":
            if row not in self._kept:
                self._kept[row] = fed[:1].float().clone()
            return
        before = self._kept.get(row)
        own = fed.float()
        self._kept[row] = own.clone() if before is None else torch.cat((before, own))

    def _add_up(self, shape: StepShape, means: Sequence[int], hidden: Tensor) -> Mapping[int, Tensor]:
        """By span, the sum [H] float64 of its hidden states so far, added up in the order of the tokens."""
        place = np.full(len(shape.spans), len(means))
        place[means] = np.arange(len(means))
        total = hidden.new_zeros(len(means) + 1, hidden.shape[1], dtype=torch.float64)
        for i, s in enumerate(means):
            before = self._kept.get(shape.spans[s].row)
            if before is not None:
                total[i] = before
        # There are more rows than tokens in a padded step.
        fed = hidden[: len(shape.token_span)].double()
        total.index_add_(0, torch.from_numpy(place[shape.token_span]).to(hidden.device), fed)
        return {s: total[i] for i, s in enumerate(means)}

    def _through_heads(self, ended: Sequence[_Ended]) -> dict[int, Tensor]:
        """Each head computes all that goes through it at once."""
        made: dict[int, Tensor] = {}
        for classified in (False, True):
            some = [each for each in ended if (each.how == "classify") is classified]
            head = self.heads.classify if classified else self.heads.dense
            if not some:
                continue
            if head is None:
                raise ValueError("this model has no classifier")
            counts = [len(each.vectors) for each in some]
            out = head(torch.cat([each.vectors for each in some])).float()
            ends = np.cumsum(counts).tolist()
            made |= {
                each.span: out[end - count : end].flatten() for each, end, count in zip(some, ends, counts, strict=True)
            }
        return made

    def _drop(self, row: int) -> None:
        self._how.pop(row, None)
        self._kept.pop(row, None)

    def reset(self) -> None:
        """Forget every row."""
        self._how.clear()
        self._kept.clear()


def pooled_bytes(made: Mapping[int, Tensor] | None) -> dict[int, bytes]:
    """Vectors as a Result has them: float32, little-endian."""
    return {s: one.cpu().numpy().astype(np.dtype("<f4")).tobytes() for s, one in (made or {}).items()}
