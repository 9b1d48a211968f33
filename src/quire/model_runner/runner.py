"""The runner of a CPU, and what it has in common with the look-ahead runner.

A plan becomes one forward, logits, samples and a Result; prefill, chunks, decode and verification are the same call.
Steps run in the order launched, each as far as it can: the forward of a step with masked spans runs at launch, and
sampling when its masks are there. Once a step has failed, every later one fails too, until `reset`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import ExecutorLost, StepFailed
from quire.layers.stages import ONE_STAGE, Pipeline
from quire.model_runner.graphs import GraphKey
from quire.model_runner.images import ImageRunner
from quire.model_runner.pooling import Pooled, PoolingHeads, PromptPooler, with_pooled
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.sampler import Sampled, Sampler
from quire.model_runner.speculative import Drafter
from quire.model_runner.step_io import (
    Model,
    PromptScores,
    build_batch,
    masks_by_sample,
    score_prompt,
    step_result,
)
from quire.ops.ragged import LayerKV
from quire.scheduler.plan import Mask, Plan, Result, StepSamples
from quire.types import TokenLogprobs

NO_SPANS = StepShape.of(())


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """One launched step of either runner: an `engine.executor.StepHandle`.

    hidden [T, hidden]: of every token, where prompts are scored or drafts read it. pooled: vectors of prompts that end
    in this step. samples: whether anything is sampled: of prompts that are pooled nothing is. The fields from
    `is_new_shape` on are the look-ahead runner's, and what has "host" in its name is on its way there: host_tokens [R],
    sampled; host_scores [R, SCORE_WIDTH], their log-probabilities; host_drafts [masked spans, drafts], made by the
    step; logits [rows with SCORED_WIDE, V]. prompt_scores: of prompt tokens. features: of its rows. drafting: what is
    run once the step has sampled. event: reached when all that has arrived; None where work is done as it is launched.
    sampled: of a step of a pipeline, what the last stage has sampled: set there, and handed in where this is another.
    """

    runner: BaseRunner
    plan: Plan
    shape: StepShape = NO_SPANS
    hidden: Tensor | None = None
    logits: Tensor | None = None
    pooled: Sequence[Pooled] = ()
    samples: bool = True
    masks: Sequence[Sequence[Mask]] | None = None
    outcome: Result | None = None
    failure: Exception | None = None
    is_new_shape: bool = False
    features: int = 0
    host_tokens: npt.NDArray[np.int32] | None = None
    host_scores: npt.NDArray[np.int32] | None = None
    host_drafts: Tensor | None = None
    prompt_scores: PromptScores | None = None
    drafting: Sequence[GraphKey] = ()
    event: torch.cuda.Event | None = None
    sampled: StepSamples | None = None

    def follow(self, sampled: StepSamples) -> None:
        """Hand in what the last stage has sampled, for which `result` waits in the others, where it is empty."""
        self.sampled = sampled

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Hand in the masks of `plan.masked_spans`, in order: one mask per sampled row."""
        self.masks = masks
        self.runner.sample(self)

    def is_done(self) -> bool:
        """Whether `result` has nothing to wait for: the device is past the step, but for drafts made after it."""
        try:
            if self.outcome is not None or self.failure is not None or self.event is None:
                return True
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            # The device failed: `result` raises what happened.
            return True

    def result(self) -> Result:
        """What the step sampled. Raises StepFailed, with the error of the step as its cause, or ExecutorLost."""
        self.runner.complete(self)
        if isinstance(self.failure, ExecutorLost):
            raise self.failure
        if self.failure is not None:
            reason = str(self.failure) or type(self.failure).__name__
            raise StepFailed(f"the step failed: {reason.splitlines()[0]}") from self.failure
        if self.outcome is None and self not in self.runner.inflight:
            raise StepFailed("the step was dropped by a reset")
        if self.outcome is None:
            raise StepFailed("the step waits for masks that have not been handed in")
        return self.outcome


class BaseRunner(ABC):
    """Steps in flight over rows and a KV pool.

    kv: one LayerKV per layer, of which block 0 is the null block. heads: what follows pooling. images: the encoder;
    None: there is none.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: RowState,
        sampler: Sampler,
        heads: PoolingHeads | None = None,
        images: ImageRunner | None = None,
    ) -> None:
        self.model, self.kv = model, kv
        self.rows, self.sampler = rows, sampler
        self.pool = PromptPooler(heads)
        self.images = images
        self.inflight: deque[LaunchedStep] = deque()
        self.failure: Exception | None = None

    def sample(self, step: LaunchedStep) -> None:
        """Sample a step whose masks have been handed in."""
        self.complete(step)

    @torch.inference_mode()
    def complete(self, step: LaunchedStep) -> None:
        """Complete the steps up to `step`, as far as their masks are there. An error is kept for `result`."""
        while self.inflight and step.outcome is None and step.failure is None:
            first = self.inflight[0]
            try:
                self._forward(first)
                if self._waits(first):
                    return
                self._complete(first)
            except Exception as failure:
                # Of whatever class it is: the engine finds out which request causes it.
                self.failure = first.failure = failure
            self.inflight.popleft()

    def _waits(self, step: LaunchedStep) -> bool:
        """Whether something is missing without which a step is not completed."""
        return bool(step.plan.masked_spans) and step.masks is None

    def reset(self) -> None:
        """Forget every row and step."""
        self.inflight.clear()
        self.failure = None
        self.rows.reset()
        self.pool.reset()
        if self.images is not None:
            self.images.reset()

    def close(self) -> None:
        """Release the KV pool."""
        self.reset()
        self.kv = ()

    @abstractmethod
    def _forward(self, step: LaunchedStep) -> None:
        """Run the step's forward, unless that is done. Raises what an earlier step failed with."""

    @abstractmethod
    def _complete(self, step: LaunchedStep) -> None:
        """Sample a step whose forward ran and whose masks are there; set `step.outcome`."""

    def _score_prompts(self, step: LaunchedStep, spans: Iterable[int]) -> dict[int, Sequence[TokenLogprobs]]:
        """Prompt log-probabilities of spans by the host, while rows are as they were when the step was fed."""
        hidden, step.hidden = step.hidden, None
        if hidden is None:
            return {}
        vocab = self.sampler.vocab_size
        return {s: score_prompt(self.model, self.rows, step.shape, s, hidden, vocab) for s in spans}


class Runner(BaseRunner):
    """Runs each step as it is launched. device: where batches are put.

    pipeline: the stage of the model. One before the last runs forwards only, of which several may be in flight; its
    rows learn what was sampled by `LaunchedStep.follow`. So no row may have a span before that is known.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: RowState,
        sampler: Sampler,
        drafter: Drafter | None,
        device: torch.device,
        heads: PoolingHeads | None = None,
        images: ImageRunner | None = None,
        pipeline: Pipeline = ONE_STAGE,
    ) -> None:
        super().__init__(model, kv, rows, sampler, heads, images)
        self.drafter, self.device, self.pipeline = drafter, device, pipeline

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Run a plan as far as its masks allow, or in a stage before the last, its forward."""
        step = LaunchedStep(self, plan)
        self.inflight.append(step)
        if self.pipeline.last:
            self.complete(step)
            return step
        try:
            self._forward(step)
        except Exception as failure:
            self.failure = step.failure = failure
        return step

    def complete(self, step: LaunchedStep) -> None:
        """Complete every step as far as its masks are there: waiting gains nothing on a CPU."""
        super().complete(self.inflight[-1] if self.inflight and self.pipeline.last else step)

    def reset(self) -> None:
        """Forget every row and step."""
        super().reset()
        if self.drafter is not None:
            self.drafter.reset()

    def _waits(self, step: LaunchedStep) -> bool:
        return super()._waits(step) if self.pipeline.last else step.sampled is None

    def _forward(self, step: LaunchedStep) -> None:
        if step.logits is not None:
            return
        with self.pipeline.step(bool(step.plan.spans)):
            if self.failure is not None:
                raise self.failure
            self._feed(step)

    def _feed(self, step: LaunchedStep) -> None:
        rows, pool = self.rows, self.pool
        shape = step.shape = rows.apply_plan(step.plan)
        pool.apply_plan(step.plan)
        if self.images is not None:
            self.images.apply_plan(step.plan, rows)
        if not shape.spans:
            step.logits = torch.empty((0, self.sampler.vocab_size), device=self.device)
            return
        batch = build_batch(rows, shape, self.device)
        if self.images is not None:
            begins = {s: int(rows.num_computed[row]) for s, row in enumerate(shape.row.tolist()) if row in rows.images}
            batch = self.images.place(batch, rows, shape, begins)
        samples = len(shape.sample_indices)
        reads = self.drafter is not None and self.drafter.reads_hidden
        wants_all = bool(shape.scored_spans) or pool.wants_all(shape) or reads
        if not wants_all and samples < len(batch.tokens):
            # One token's at least, since no model needs to know how to compute none.
            indices = shape.sample_indices if samples else shape.query_start[:1]
            wanted = torch.from_numpy(indices.astype(np.int32)).to(self.device)
            batch = replace(batch, output_indices=wanted)
        hidden = self.model.forward(batch, self.kv)
        if not self.pipeline.last:
            step.logits = hidden.new_empty((0, self.sampler.vocab_size))
            rows.advance_chunks(shape)
            return
        step.hidden = hidden if shape.scored_spans or reads else None
        selected = hidden
        if samples < len(hidden):
            selected = hidden[torch.from_numpy(shape.sample_indices).to(self.device)]
        # An encoder has no logits.
        step.samples = samples > 0 and not pool.covers(shape)
        step.pooled = pool.feed(rows, shape, hidden, selected)
        if step.samples:
            step.logits = self.model.logits(selected)
        else:
            step.logits = hidden.new_empty((0, self.sampler.vocab_size), dtype=torch.float32)

    def _complete(self, step: LaunchedStep) -> None:
        rows, shape, plan = self.rows, step.shape, step.plan
        assert step.logits is not None
        if not shape.spans:
            step.outcome, step.sampled = Result([], []), StepSamples([], [], [])
            return
        if not self.pipeline.last:
            self._follow(step)
            return
        hidden, before = step.hidden, rows.num_computed.copy()
        scores = self._score_prompts(step, shape.scored_spans)
        sampled = nothing_sampled(len(shape.sample_indices))
        if step.samples:
            sampled = self.sampler(step.logits, rows, shape, masks_by_sample(plan, shape, step.masks))
        keep, failed = rows.advance(shape, sampled.tokens, sampled.bad)
        if self.drafter is not None:
            self.drafter.follow(rows, shape, before, hidden)
        if plan.num_drafts and self.drafter is not None:
            num_drafts = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
            drafts = self.drafter.propose(rows, shape.sampling_row, num_drafts)
            rows.set_drafts(shape.sampling_row, drafts, num_drafts)
        done = step_result(plan, shape, sampled, keep, failed, scores, rows)
        step.outcome = with_pooled(done, step.pooled)
        if not self.pipeline.first:
            drafted = [rows.drafts_of(row) for row in shape.sampling_row.tolist()] if plan.num_drafts else []
            step.sampled = StepSamples(sampled.tokens.tolist(), np.flatnonzero(sampled.bad).tolist(), drafted)

    def _follow(self, step: LaunchedStep) -> None:
        """Advance the rows of a step that the last stage has sampled."""
        rows, shape, sampled = self.rows, step.shape, step.sampled
        assert sampled is not None
        bad = np.zeros(len(sampled.tokens), np.bool_)
        bad[sampled.bad] = True
        rows.advance_samples(shape, np.array(sampled.tokens, np.intp), bad)
        if sampled.drafts:
            counts = np.array([len(each) for each in sampled.drafts], np.intp)
            drafts = np.zeros((len(counts), int(counts.max())), np.int32)
            for line, each in zip(drafts, sampled.drafts, strict=True):
                line[: len(each)] = each
            rows.set_drafts(shape.sampling_row, drafts, counts)
        step.outcome = Result([], [])


def nothing_sampled(count: int) -> Sampled:
    """Tokens that end prompts which are pooled alone: any would do."""
    return Sampled(np.zeros(count, np.intp), np.zeros(count, np.bool_), {}, {})
