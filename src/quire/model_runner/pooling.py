"""Hidden states of prompts become vectors: pooled chunk by chunk, then through what the model has behind that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.sampler import BROKEN
from quire.model_runner.transfers import to_device, to_host
from quire.scheduler.plan import Plan, Result
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


class Pooled(NamedTuple):
    """What prompts that end in a step are pooled to: for each of `spans` the next `counts` of numbers [.], float32."""

    spans: list[int]
    counts: list[int]
    numbers: Tensor

    def on_host(self) -> Pooled:
        """The same on its way to the host."""
        return self._replace(numbers=to_host(self.numbers))


class _Ended(NamedTuple):
    """Prompts that end in this step: their spans, how each is pooled, and rows of vectors that each has."""

    spans: Sequence[int]
    how: Sequence[Pooling]
    vectors: Tensor
    counts: Sequence[int]


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

    def feed(self, rows: RowState, shape: StepShape, hidden: Tensor | None, selected: Tensor | None) -> list[Pooled]:
        """What the prompts that end in this step are pooled to, which shares memory with nothing.

        hidden [T, H]: of the tokens fed, if `wants_all`. selected [R, H]: of those that are sampled at, if any are.
        """
        if not self._how:
            return []
        by_kind: dict[Pooling, list[int]] = {}
        for s, span in enumerate(shape.spans):
            reads = self._reads(span.row)
            if reads is not None:
                by_kind.setdefault(reads, []).append(s)
        made: list[_Ended] = []
        for reads, spans in by_kind.items():
            ended = [s for s in spans if shape.num_samples[s]]
            vectors = self._vectors(reads, rows, shape, spans, selected if reads == "last" else hidden)
            if vectors is not None:
                counts = rows.prompt_length[shape.row[ended]].tolist() if reads == "all" else [1] * len(ended)
                made.append(_Ended(ended, [self._how[shape.spans[s].row] for s in ended], vectors, counts))
        for one in made:
            for s in one.spans:
                self._drop(shape.spans[s].row)
        return self._through_heads(made)

    def _vectors(
        self, reads: Pooling, rows: RowState, shape: StepShape, spans: Sequence[int], hidden: Tensor | None
    ) -> Tensor | None:
        """[N, H] float32: what those of `spans` that end are pooled to, one after the other; None if none ends. What
        others need later is kept."""
        ended = [s for s in spans if shape.num_samples[s]]
        if hidden is None:
            return None
        if reads == "last":
            last = shape.first_sample[np.searchsorted(shape.sampling_spans, ended)] + shape.num_samples[ended] - 1
            return hidden[to_device(last, hidden.device)].float() if ended else None
        if reads == "mean":
            total = self._add_up(shape, spans, hidden)
            place = {s: i for i, s in enumerate(spans)}
            self._kept |= {shape.spans[s].row: total[place[s]] for s in spans if not shape.num_samples[s]}
            length = to_device(rows.prompt_length[shape.row[ended]].astype(np.float64), hidden.device)
            own = to_device(np.array([place[s] for s in ended], np.intp), hidden.device)
            return (total[own] / length[:, None]).float() if ended else None
        if reads == "cls":
            fresh = [s for s in spans if shape.spans[s].row not in self._kept]
            firsts = hidden[to_device(shape.query_start[fresh].astype(np.int64), hidden.device)].float()
            if fresh == ended:
                return firsts if ended else None
            self._kept |= {shape.spans[s].row: first[None] for s, first in zip(fresh, firsts, strict=True)}
        else:
            for s in spans:
                own = hidden[int(shape.query_start[s]) : int(shape.query_start[s + 1])].float()
                before = self._kept.get(shape.spans[s].row)
                self._kept[shape.spans[s].row] = own.clone() if before is None else torch.cat((before, own))
        return torch.cat([self._kept[shape.spans[s].row] for s in ended]) if ended else None

    def _add_up(self, shape: StepShape, means: Sequence[int], hidden: Tensor) -> Tensor:
        """[means + 1, H] float64: of each span the sum of its hidden states so far, in the order of the tokens."""
        place = np.full(len(shape.spans), len(means))
        place[means] = np.arange(len(means))
        total = hidden.new_zeros(len(means) + 1, hidden.shape[1], dtype=torch.float64)
        for i, s in enumerate(means):
            before = self._kept.get(shape.spans[s].row)
            if before is not None:
                total[i] = before
        # There are more rows than tokens in a padded step.
        fed = hidden[: len(shape.token_span)].double()
        return total.index_add_(0, to_device(place[shape.token_span], hidden.device), fed)

    def _through_heads(self, ended: Sequence[_Ended]) -> list[Pooled]:
        """Each head computes all that goes through it at once."""
        made: list[Pooled] = []
        for classified in (False, True):
            parts = list[Tensor]()
            spans, counts = list[int](), list[int]()
            for each in ended:
                which = [i for i, how in enumerate(each.how) if (how == "classify") is classified]
                spans += [each.spans[i] for i in which]
                counts += [each.counts[i] for i in which]
                pieces = torch.split(each.vectors, list(each.counts)) if len(which) < len(each.how) else ()
                parts += [pieces[i] for i in which] if pieces else [each.vectors] if which else []
            if not spans:
                continue
            head = self.heads.classify if classified else self.heads.dense
            if head is None:
                raise ValueError("this model has no classifier")
            out = head(torch.cat(parts)).float()
            made.append(Pooled(spans, [count * out.shape[1] for count in counts], out.flatten()))
        return made

    def _drop(self, row: int) -> None:
        self._how.pop(row, None)
        self._kept.pop(row, None)

    def reset(self) -> None:
        """Forget every row."""
        self._how.clear()
        self._kept.clear()


def with_pooled(result: Result, made: Sequence[Pooled]) -> Result:
    """A step's result with what its prompts were pooled to, by span: float32, little-endian. Numbers that are not
    finite are an error of their span."""
    if not made:
        return result
    pooled, errors, tokens = dict[int, bytes](), dict(result.errors), list(result.tokens)
    for one in made:
        numbers = one.numbers.cpu().numpy().astype(np.dtype("<f4"))
        for s, part in zip(one.spans, np.split(numbers, np.cumsum(one.counts)[:-1]), strict=True):
            pooled[s] = part.tobytes()
            if not np.isfinite(part).all():
                errors[s], tokens[s] = BROKEN, []
    return result._replace(tokens=tokens, pooled=pooled, errors=errors)
