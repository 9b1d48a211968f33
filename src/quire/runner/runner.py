"""The one runner: a plan becomes a forward, logits, samples and a Result; prefill, chunk, decode, verify alike.

Steps run in the order launched, each as far as it can: a step with masked spans is fed at once and sampled when its
masks come. Once a step has failed, so has every one after it, until `reset`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.core.plan import Mask, Plan, Result
from quire.errors import StepFailed
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.runner.batch import ragged
from quire.runner.drafts import Drafter
from quire.runner.logprobs import score
from quire.runner.rows import Ints, Rows, Shape
from quire.runner.sampler import Sampled, Sampler
from quire.values import TokenLogprobs

_CHUNK = 1 << 24
"""Logits held at once for prompt log-probabilities, in numbers: 64 MiB."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Hidden states [T, hidden] of the tokens fed; writes their K/V."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V] float32, the caller's to change."""


class Step:
    """One launched step: the lower door's handle."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.plan = plan
        self.shape: Shape | None = None
        self.logits: Tensor | None = None
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.masks: Sequence[Sequence[Mask]] | None = None
        self.done: Result | None = None
        self.failure: Exception | None = None
        self._runner = runner

    @property
    def ready(self) -> bool:
        return not self.plan.masked or self.masks is not None

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """The masks of `plan.masked`, in order, one per sampled row."""
        self.masks = masks
        self._runner.advance()

    def result(self) -> Result:
        """Raises StepFailed, caused by what went wrong."""
        if self.failure is not None:
            reason = str(self.failure) or type(self.failure).__name__
            raise StepFailed(f"the step failed: {reason.splitlines()[0]}") from self.failure
        if self.done is None:
            raise StepFailed("the step waits for masks that have not been handed in")
        return self.done


class Runner:
    """Folds plans over rows and a KV pool.

    kv: one LayerKV a layer, page 0 spare. device: where batches go.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: Rows,
        sampler: Sampler,
        drafter: Drafter,
        device: torch.device,
    ) -> None:
        self.model, self.kv, self.rows, self.sampler, self.drafter = model, kv, rows, sampler, drafter
        self.device = device
        self.queue: deque[Step] = deque()
        self.failure: Exception | None = None

    def launch(self, plan: Plan) -> Step:
        step = Step(self, plan)
        self.queue.append(step)
        self.advance()
        return step

    @torch.inference_mode()
    def advance(self) -> None:
        """Do what can be done, in order. What goes wrong is kept for whoever asks for the result."""
        while self.queue:
            step = self.queue[0]
            try:
                if self.failure is not None:
                    raise self.failure
                if step.logits is None:
                    self._feed(step)
                if not step.ready:
                    return
                self._sample(step)
            except Exception as failure:  # whatever it is, the engine finds out whose fault it was
                self.failure = step.failure = failure
            self.queue.popleft()

    def reset(self) -> None:
        """Forget every row and step."""
        self.queue.clear()
        self.failure = None
        self.rows.reset()

    def close(self) -> None:
        """Let go of the K/V pool."""
        self.reset()
        self.kv = ()

    # ---------------------------------------------------------------- the two halves of a step

    def _feed(self, step: Step) -> None:
        rows = self.rows
        shape = step.shape = rows.fold(step.plan)
        hidden = self.model.forward(ragged(rows, shape, self.device), self.kv)
        for s in shape.scored:
            step.scores[s] = self._score_prompt(shape, s, hidden)
        if len(shape.picked) == 0:
            step.logits = hidden.new_empty((0, self.sampler.vocab_size), dtype=torch.float32)
            return
        if len(shape.picked) < len(hidden):
            hidden = hidden[torch.from_numpy(shape.picked).to(self.device)]
        step.logits = self.model.logits(hidden)

    def _score_prompt(self, shape: Shape, s: int, hidden: Tensor) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt tokens that follow those span `s` feeds, a bounded piece at a time."""
        rows, (row, n, sampled, logits) = self.rows, shape.spans[s]
        begin = int(rows.length[row]) + n - logits
        end = min(int(rows.length[row]) + n - sampled, int(rows.prompt[row]) - 1)
        first = int(shape.query_start[s]) - int(rows.length[row])
        wanted = rows.traits.prompt_logprobs[row] or 0
        piece = max(1, _CHUNK // self.sampler.vocab_size)
        out: list[TokenLogprobs] = []
        for at in range(begin, end, piece):
            upto = min(at + piece, end)
            part = self.model.logits(hidden[first + at : first + upto]).cpu()
            targets = rows.tokens[row, at + 1 : upto + 1].astype(np.intp)
            out += score(part, targets, np.full(upto - at, wanted))
        return out

    def _sample(self, step: Step) -> None:
        rows, shape = self.rows, step.shape
        assert shape is not None
        assert step.logits is not None
        sampled = self.sampler(step.logits, rows, shape, _masked(step, shape))
        keep, failed = rows.settle(shape, sampled.tokens, sampled.bad)
        if self.drafter.depth:
            rows.draft(shape.sampled_row, self.drafter.propose(rows, shape.sampled_row))
        step.done = self._result(step, shape, sampled, keep, failed)

    def _result(self, step: Step, shape: Shape, sampled: Sampled, keep: Ints, failed: Ints) -> Result:
        flat = sampled.tokens.tolist()
        tokens: list[list[int]] = [[] for _ in shape.spans]
        samples, first, kept = shape.samples.tolist(), shape.first.tolist(), keep.tolist()
        for s, at, count in zip(samples, first, kept, strict=True):
            tokens[s] = flat[at : at + count]
        told = (
            {
                s: [sampled.logprobs[r] for r in range(at, at + count)]
                for s, at, count in zip(samples, first, kept, strict=True)
                if at in sampled.logprobs
            }
            if sampled.logprobs
            else {}
        )
        errors = {samples[q]: sampled.errors[int(failed[q])] for q in np.flatnonzero(failed >= 0).tolist()}
        drafts = [self.rows.drafted(shape.spans[s].row) for s in step.plan.masked]
        return Result(tokens, drafts, told, step.scores, errors)


def _masked(step: Step, shape: Shape) -> list[tuple[int, Mask]]:
    """(sampled row, its mask) for every row of a masked span."""
    out: list[tuple[int, Mask]] = []
    for s, masks in zip(step.plan.masked, step.masks or (), strict=True):
        at = int(shape.first[np.searchsorted(shape.samples, s)])
        out += [(at + i, each) for i, each in enumerate(masks)]
    return out
