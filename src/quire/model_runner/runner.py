"""The one runner: a plan becomes a forward, logits, samples and a Result; prefill, chunk, decode, verify alike.

Steps run in the order launched, each as far as it can: a step with masked spans is fed at once and sampled when its
masks come. Once a step has failed, so has every one after it, until `reset`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.errors import StepFailed
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.speculative import Drafter
from quire.model_runner.step_io import (
    Model,
    PromptPooler,
    build_batch,
    masks_by_sample,
    pooled_bytes,
    score_prompt,
    step_result,
)
from quire.ops.ragged import LayerKV
from quire.scheduler.plan import Mask, Plan, Result
from quire.types import TokenLogprobs


class RunnerStep:
    """One launched step: the lower door's handle."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.plan = plan
        self.shape: StepShape | None = None
        self.logits: Tensor | None = None
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.pooled: dict[int, Tensor] = {}
        self.masks: Sequence[Sequence[Mask]] | None = None
        self.outcome: Result | None = None
        self.failure: Exception | None = None
        self._runner = runner

    @property
    def can_sample(self) -> bool:
        return not self.plan.masked_spans or self.masks is not None

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """The masks of `plan.masked`, in order, one per sampled row."""
        self.masks = masks
        self._runner.advance()

    def is_done(self) -> bool:
        """Forwards run as they are launched."""
        return True

    def result(self) -> Result:
        """Raises StepFailed, caused by what went wrong."""
        if self.failure is not None:
            reason = str(self.failure) or type(self.failure).__name__
            raise StepFailed(f"the step failed: {reason.splitlines()[0]}") from self.failure
        if self.outcome is None:
            raise StepFailed("the step waits for masks that have not been handed in")
        return self.outcome


class Runner:
    """Folds plans over rows and a KV pool.

    kv: one LayerKV a layer, page 0 spare. device: where batches go.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: RowState,
        sampler: Sampler,
        drafter: Drafter,
        device: torch.device,
    ) -> None:
        self.model, self.kv, self.rows, self.sampler, self.drafter = model, kv, rows, sampler, drafter
        self.device, self.pool = device, PromptPooler()
        self.queue: deque[RunnerStep] = deque()
        self.failure: Exception | None = None

    def launch(self, plan: Plan) -> RunnerStep:
        step = RunnerStep(self, plan)
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
                if not step.can_sample:
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
        self.pool.reset()
        self.drafter.reset()

    def close(self) -> None:
        """Let go of the K/V pool."""
        self.reset()
        self.kv = ()

    # ---------------------------------------------------------------- the two halves of a step

    def _feed(self, step: RunnerStep) -> None:
        rows = self.rows
        shape = step.shape = rows.apply_plan(step.plan)
        self.pool.apply_plan(step.plan)
        batch = build_batch(rows, shape, self.device)
        every = shape.scored_spans or self.pool.wants_all(shape)
        if not every and 0 < len(shape.sample_indices) < len(batch.tokens):
            batch = replace(
                batch, output_indices=torch.from_numpy(shape.sample_indices.astype(np.int32)).to(self.device)
            )
        hidden = self.model.forward(batch, self.kv)
        for s in shape.scored_spans:
            step.scores[s] = score_prompt(self.model, rows, shape, s, hidden, self.sampler.vocab_size)
        picked = hidden
        if len(shape.sample_indices) < len(hidden):
            picked = hidden[torch.from_numpy(shape.sample_indices).to(self.device)]
        step.pooled = self.pool.feed(rows, shape, hidden, picked)
        if len(shape.sample_indices) == 0:
            step.logits = hidden.new_empty((0, self.sampler.vocab_size), dtype=torch.float32)
            return
        step.logits = self.model.logits(picked)

    def _sample(self, step: RunnerStep) -> None:
        rows, shape = self.rows, step.shape
        assert shape is not None
        assert step.logits is not None
        sampled = self.sampler(step.logits, rows, shape, masks_by_sample(step.plan, shape, step.masks))
        keep, failed = rows.advance(shape, sampled.tokens, sampled.bad)
        if step.plan.num_drafts:
            depth = np.array(step.plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
            rows.set_drafts(shape.sampling_row, self.drafter.propose(rows, shape.sampling_row, depth), depth)
        done = step_result(step.plan, shape, sampled, keep, failed, step.scores, rows)
        step.outcome = done._replace(pooled=pooled_bytes(step.pooled))
