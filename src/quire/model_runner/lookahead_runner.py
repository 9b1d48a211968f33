"""The runner of a device with look-ahead: plans are launched without waiting, tokens return through a pinned ring.

The device keeps the rows (`DeviceState`), drafts by itself and feeds itself. The host keeps them too, one step behind,
for what it samples itself. The device samples a step when it can sample every row of it; otherwise logits are copied to
the host, whose sampler draws before anything is launched after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.errors import StepFailed
from quire.model_runner.device_state import DeviceState, Update, UploadRing, step_updates
from quire.model_runner.device_steps import DROPPED, DeviceSteps
from quire.model_runner.graphs import GraphKey, WorkQueue, bucket_seqs, bucket_tokens, padding
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.runner import BaseRunner, LaunchedStep
from quire.model_runner.sampling.sampler import Sampled, Sampler
from quire.model_runner.speculative import DraftContext, Proposer
from quire.model_runner.step_io import (
    Model,
    empty_batch,
    masks_by_sample,
    pooled_bytes,
    sampled_from_host,
    slice_batch,
    step_result,
)
from quire.ops.ragged import LayerKV
from quire.scheduler.plan import Plan, Span
from quire.types import TokenLogprobs


class LookaheadRunner(BaseRunner):
    """Launches steps on `device` ahead of their results.

    max_tokens: the most that a step feeds. num_slots: of the upload ring and of the tokens' ring, one more than steps
    in flight at once.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: RowState,
        sampler: Sampler,
        steps: DeviceSteps,
        queue: WorkQueue,
        proposer: Proposer | None,
        *,
        max_tokens: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, kv, rows, sampler)
        self.steps, self.queue = steps, queue
        self.proposer = proposer
        spans = max(padding(rows.num_rows), bucket_seqs(rows.num_rows))
        max_tokens = bucket_tokens(padding(max(max_tokens, spans * (1 + rows.max_drafts))))
        with queue:
            self.state = DeviceState(rows, spans=spans, tokens=max_tokens, device=device)
            self.uploads = UploadRing(self.state, num_slots=num_slots)
            self.batch = empty_batch(self.state, rows, max_tokens)
            self.tokens = torch.zeros(self.state.max_samples, dtype=torch.int32, device=device)
        self.draft_context = DraftContext(self.state, steps, self.batch, rows.max_model_len)
        pinned = device.type == "cuda"
        self.ring = torch.zeros((num_slots, self.state.max_samples), dtype=torch.int32, pin_memory=pinned)
        self.ring_slot = 0
        self.features = 0
        self.last_inputs: tuple[object, int] | None = None
        self.last_drafts: tuple[object, object] | None = None
        # [R, hidden], allocated by the first forward, which shows the width and the dtype.
        self.hidden: Tensor | None = None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Launch a plan; nothing is waited for unless the host samples the step before it."""
        step = LaunchedStep(self, plan)
        try:
            if self.inflight and self.inflight[-1].sampled_on_host:
                self.complete(self.inflight[-1])
                if self.inflight:
                    raise StepFailed("a step was launched after one that still waits for its masks")
            if self.failure is not None:
                raise self.failure
            with self.queue:
                self._launch(step)
        except Exception as failure:
            # Of whatever class it is: the engine finds out which request causes it.
            self.failure = step.failure = failure
        else:
            self.inflight.append(step)
        return step

    def reset(self) -> None:
        """Forget every row and step, once the device is idle."""
        self.queue.synchronize()
        super().reset()
        if self.proposer is not None:
            self.proposer.reset()
        self.last_inputs = self.last_drafts = None
        with self.queue:
            self.state.reset()

    def close(self) -> None:
        """Release the KV pool and the graphs."""
        super().close()
        self.queue.close()

    @torch.inference_mode()
    def precompile(self, keys: Sequence[GraphKey]) -> None:
        """Be ready for all of these, on padding, before there are rows: nothing is compiled or captured later."""
        with self.queue:
            touch = partial(self.steps.scatter, self.state.data, *self.uploads.empty())
            self.queue.precompile([touch, *(partial(self._work, key) for key in keys)])
            for key in keys:
                self.queue.prepare(key, partial(self._work, key))
            self.state.reset()
            touch()
        self.queue.synchronize()

    def step_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Seconds of a decode step of so many rows that verifies and makes so many drafts each, on padding."""
        shape = StepShape.of(tuple(Span(r, 1 + num_drafts, 1 + num_drafts, 1 + num_drafts) for r in range(num_rows)))
        keys = [GraphKey.of(shape), GraphKey.head(len(shape.sample_indices), 0)]
        if num_drafts and self.proposer is not None:
            keys += self.proposer.keys(shape, np.full(num_rows, num_drafts, np.intp), 0, len(self.batch.tokens))
            self.proposer.reset()
        return self.time_keys(keys)

    @torch.inference_mode()
    def time_keys(self, keys: Sequence[GraphKey]) -> float:
        """Seconds that doing all of it takes, the least of four runs, while there are no rows."""
        took = []
        with self.queue:
            for _ in range(4):
                started = time.perf_counter()
                for key in keys:
                    self._run(key)
                self.queue.synchronize()
                took.append(time.perf_counter() - started)
            self.state.reset()
        return min(took)

    # Launching

    def _launch(self, step: LaunchedStep) -> None:
        rows, plan, epoch = self.rows, step.plan, self.rows.epoch
        shape = step.shape = rows.apply_changes(plan)
        step.is_new_shape = rows.epoch != epoch
        key = GraphKey.of(shape)
        inputs = (shape, key.spans)
        updates = step_updates(self.state, rows, plan, None if inputs == self.last_inputs else shape, key.spans)
        self.last_inputs = inputs
        if step.is_new_shape:
            self.features = int(np.bitwise_or.reduce(rows.features.bits[shape.row]))
        step.drafting = self._draft_keys(plan, shape, updates)
        if (upload := self.uploads.pack(updates)) is not None:
            self.steps.scatter(self.state.data, *upload)
        unsupported = self.features & ~self.steps.supported_features
        step.sampled_on_host = bool(plan.masked_spans or shape.scored_spans or unsupported)
        self._feed(step, shape, key)
        samples = len(shape.sample_indices)
        if step.sampled_on_host:
            step.fed_tokens = None if shape.one_sample_each else self.batch.tokens[: int(shape.query_start[-1])]
        elif samples:
            self._run(GraphKey.head(samples, self.features))
            slot = self.ring[self.ring_slot, :samples]
            slot.copy_(self.tokens[:samples], non_blocking=True)
            step.host_tokens = slot.numpy()
            self.ring_slot = (self.ring_slot + 1) % len(self.ring)
        step.event = self.queue.record()
        if not step.sampled_on_host:
            for key in step.drafting:
                self._run(key)

    def _feed(self, step: LaunchedStep, shape: StepShape, key: GraphKey) -> None:
        """The forward. One that returns the hidden states of every token is not captured."""
        pool, hidden = self.pool, None
        pool.apply_plan(step.plan)
        if shape.scored_spans or pool.wants_all(shape):
            hidden = self._body(key, every=True)
        else:
            self._run(key)
        made = pool.feed(self.rows, shape, hidden, self.hidden)
        step.pooled = {s: vector.to("cpu", non_blocking=True) for s, vector in made.items()}
        step.hidden = hidden if shape.scored_spans else None

    def _draft_keys(self, plan: Plan, shape: StepShape, updates: list[Update]) -> Sequence[GraphKey]:
        """What is run once this step has sampled; how many drafts each row wants is added to `updates`."""
        if self.proposer is None:
            return ()
        self.proposer.admit(plan, shape, self.rows)
        if not any(plan.num_drafts):
            return ()
        wanted_drafts = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
        if self.last_drafts != (shape, plan.num_drafts):
            self.last_drafts = shape, plan.num_drafts
            updates.append((self.state.offsets["wanted"], wanted_drafts.astype(np.int32)))
        features = self.features & self.steps.supported_features
        return self.proposer.keys(shape, wanted_drafts, features, len(self.batch.tokens))

    def _run(self, key: GraphKey) -> None:
        self.queue.run(key, partial(self._work, key))

    def _work(self, key: GraphKey) -> None:
        if key.kind == "feed":
            self._body(key)
        elif key.kind == "sample":
            self._head(key)
        else:
            assert self.proposer is not None
            self.proposer.run(key, self.draft_context)

    def _body(self, key: GraphKey, *, every: bool = False) -> Tensor:
        """Hidden states of the key's step: those that are sampled at, or every one."""
        tokens, spans, max_query = key[:3]
        state = self.state
        samples = min(tokens, padding(spans * (1 + state.max_drafts)))
        outputs = None
        if samples < tokens and not every:
            outputs = state.step.sample_indices[:samples].clamp(max=tokens - 1)
        batch = slice_batch(self.batch, tokens, spans, max_query, outputs)
        self.steps.prepare_inputs(state, state.step, batch, self.rows.max_model_len)
        hidden = self.model.forward(batch, self.kv)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(state.max_samples, hidden.shape[1])
        self.steps.advance(state, state.step, spans, hidden, self.hidden[:samples])
        return hidden

    def _head(self, key: GraphKey) -> None:
        tokens = self.tokens[: key.tokens]
        assert self.hidden is not None
        logits = self.model.logits(self.hidden[: key.tokens])
        self.steps.sample(self.state, self.state.step, logits, tokens, key.features)
        self.steps.verify(self.state, tokens)

    # Completing

    def _complete(self, step: LaunchedStep) -> None:
        rows, shape = self.rows, step.shape
        if step.event is not None:
            step.event.synchronize()
        if step.is_new_shape:
            rows.check(shape)
        scores: dict[int, list[TokenLogprobs]] = {}
        matches = None
        if step.sampled_on_host:
            with self.queue:
                scores = self._score_prompts(step)
                sampled = self._sample(step, shape)
        else:
            sampled = sampled_from_host(step.host_tokens)
            matches = ~shape.is_last_sample & (np.append(sampled.tokens[1:], DROPPED) != DROPPED)
        keep, failed = rows.advance(shape, sampled.tokens, sampled.bad, matches)
        if step.plan.num_drafts:
            with self.queue:
                self._record_drafts(step.plan, shape)
        done = step_result(step.plan, shape, sampled, keep, failed, scores, rows)
        step.outcome = done._replace(pooled=pooled_bytes(step.pooled))

    def _record_drafts(self, plan: Plan, shape: StepShape) -> None:
        """Note how many drafts each row has, and their tokens where a grammar has to follow them."""
        rows = self.rows
        rows.num_drafted[shape.sampling_row] = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
        for s in plan.masked_spans:
            row = shape.spans[s].row
            at = slice(int(rows.num_known[row]), int(rows.num_known[row] + rows.num_drafted[row]))
            rows.tokens[row, at] = self.state.history[row, at].cpu().numpy()

    def _sample(self, step: LaunchedStep, shape: StepShape) -> Sampled:
        """Sample on the host, with rows as they were when the step was fed, and send the tokens to the device."""
        rows, samples = self.rows, len(shape.sample_indices)
        if not samples:
            return sampled_from_host(None)
        assert self.hidden is not None
        if step.fed_tokens is not None:
            drafted = np.flatnonzero(~shape.is_last_sample)
            row = shape.sample_row[drafted]
            drafts = step.fed_tokens.cpu().numpy()[shape.sample_indices[drafted] + 1]
            rows.tokens[row, rows.num_known[row] + shape.sample_offset[drafted]] = drafts
        logits = self.model.logits(self.hidden[:samples])
        sampled = self.sampler(logits, rows, shape, masks_by_sample(step.plan, shape, step.masks))
        tokens = self.tokens[:samples]
        tokens.copy_(torch.from_numpy(sampled.tokens.astype(np.int32)))
        self.steps.verify(self.state, tokens)
        for key in step.drafting:
            self._run(key)
        return sampled
