"""The runner of a device that is run ahead of: plans go out without waiting, tokens come home through a pinned ring.

The device keeps the rows (`arena`), drafts for itself and feeds itself; the host keeps them too, a step behind, for
what it samples itself. A step is sampled on the device when it can sample every row of it; otherwise logits come home
and the host's sampler draws, before anything is launched after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import StepFailed
from quire.model_runner.device_state import DeviceState, Update, UploadRing, step_updates
from quire.model_runner.device_steps import DROPPED, DeviceSteps
from quire.model_runner.graphs import Completed, Event, GraphKey, Queue, bucket_seqs, bucket_tokens, padding
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.sampler import Sampled, Sampler
from quire.model_runner.speculative import DraftContext, Proposer
from quire.model_runner.step_io import (
    Model,
    PromptPooler,
    empty_batch,
    masks_by_sample,
    pooled_bytes,
    sampled_from_host,
    score_prompt,
    slice_batch,
    step_result,
)
from quire.ops.ragged import LayerKV
from quire.scheduler.plan import Mask, Plan, Result, Span
from quire.types import TokenLogprobs


class LookaheadStep:
    """One launched step: the lower door's handle."""

    def __init__(self, runner: LookaheadRunner, plan: Plan) -> None:
        self.plan = plan
        self.shape: StepShape | None = None
        self.is_new_shape = False
        self.sampled_on_host = False
        """Sampled by the host."""
        self.host_tokens: npt.NDArray[np.int32] | None = None
        self.event: Event = Completed()
        self.hidden: Tensor | None = None
        self.fed_tokens: Tensor | None = None
        """Token ids, where the host samples behind drafts that only the device knows."""
        self.pooled: Mapping[int, Tensor] = {}
        """Vectors that are on their way here."""
        self.drafting: Sequence[GraphKey] = ()
        self.masks: Sequence[Sequence[Mask]] | None = None
        self.outcome: Result | None = None
        self.failure: Exception | None = None
        self._runner = runner

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """The masks of `plan.masked`, in order, one per sampled row."""
        self.masks = masks
        self._runner.complete(self)

    def is_done(self) -> bool:
        """Whether the device has come past it, but for drafts that are made behind it."""
        try:
            return self.outcome is not None or self.failure is not None or self.event.query()
        except RuntimeError:  # `result` says what
            return True

    def result(self) -> Result:
        """Raises StepFailed, caused by what went wrong."""
        self._runner.complete(self)
        if self.failure is not None:
            reason = str(self.failure) or type(self.failure).__name__
            raise StepFailed(f"the step failed: {reason.splitlines()[0]}") from self.failure
        if self.outcome is None:
            raise StepFailed("the step waits for masks that have not been handed in")
        return self.outcome


class LookaheadRunner:
    """Folds plans over rows and a KV pool on `device`.

    kv: one LayerKV a layer, page 0 spare. tokens: the most a step feeds. turns: steps under way at once, and one more.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: RowState,
        sampler: Sampler,
        steps: DeviceSteps,
        queue: Queue,
        proposer: Proposer,
        *,
        max_tokens: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.model, self.kv, self.rows, self.sampler, self.proposer = model, kv, rows, sampler, proposer
        self.steps, self.queue, self.device = steps, queue, device
        spans = max(padding(rows.num_rows), bucket_seqs(rows.num_rows))
        max_tokens = bucket_tokens(padding(max(max_tokens, spans * (1 + rows.max_drafts))))
        pinned = device.type == "cuda"
        with queue:
            self.state = DeviceState(rows, spans=spans, tokens=max_tokens, device=device)
            self.uploads = UploadRing(self.state, num_slots=num_slots)
            self.batch = empty_batch(self.state, rows, max_tokens)
            self.tokens = torch.zeros(self.state.max_samples, dtype=torch.int32, device=device)
        self.draft_context = DraftContext(self.state, steps, self.batch, rows.max_model_len)
        self.ring = torch.zeros((num_slots, self.state.max_samples), dtype=torch.int32, pin_memory=pinned)
        self.ring_slot = self.features = 0
        self.inflight: deque[LookaheadStep] = deque()
        self.pool = PromptPooler()
        self.failure: Exception | None = None
        self.last_inputs: tuple[object, int] | None = None
        self.last_drafts: tuple[object, object] | None = None
        self.hidden: Tensor | None = None
        """[R, hidden], made when the first forward says how wide and what numbers."""

    # ---------------------------------------------------------------- the door

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LookaheadStep:
        step = LookaheadStep(self, plan)
        try:
            if self.inflight and self.inflight[-1].sampled_on_host:
                self.complete(self.inflight[-1])
                if self.inflight:
                    raise StepFailed("a step was launched after one that still waits for its masks")
            if self.failure is not None:
                raise self.failure
            with self.queue:
                self._launch(step)
        except Exception as failure:  # whatever it is, the engine finds out whose fault it was
            self.failure = step.failure = failure
        else:
            self.inflight.append(step)
        return step

    @torch.inference_mode()
    def complete(self, step: LookaheadStep) -> None:
        """Complete the steps up to this one, as far as can be. What goes wrong is kept for who asks for the result."""
        while step.outcome is None and step.failure is None:
            first = self.inflight[0]
            if first.plan.masked_spans and first.masks is None:
                return
            try:
                if self.failure is not None:
                    raise self.failure
                self._complete(first)
            except Exception as failure:
                self.failure = first.failure = failure
            self.inflight.popleft()

    def reset(self) -> None:
        """Forget every row and step."""
        self.inflight.clear()
        self.queue.synchronize()
        self.failure = None
        self.rows.reset()
        self.pool.reset()
        self.proposer.reset()
        self.last_inputs = self.last_drafts = None
        with self.queue:
            self.state.reset()

    def close(self) -> None:
        """Let go of the K/V pool and the graphs."""
        self.reset()
        self.kv = ()
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
        if num_drafts:
            keys += self.proposer.keys(shape, np.full(num_rows, num_drafts, np.intp), 0, len(self.batch.tokens))
            self.proposer.reset()
        return self.time_keys(keys)

    @torch.inference_mode()
    def time_keys(self, keys: Sequence[GraphKey]) -> float:
        """The least of a few times that doing all of it takes, while there are no rows."""
        took = []
        with self.queue:
            for _ in range(4):
                began = time.perf_counter()
                for key in keys:
                    self._run(key)
                self.queue.synchronize()
                took.append(time.perf_counter() - began)
            self.state.reset()
        return min(took)

    # ---------------------------------------------------------------- out

    def _launch(self, step: LookaheadStep) -> None:
        rows, plan, epoch = self.rows, step.plan, self.rows.epoch
        shape = step.shape = rows.apply_changes(plan)
        step.is_new_shape = rows.epoch != epoch
        key = GraphKey.of(shape)
        sent = (shape, key.spans)
        updates = step_updates(self.state, rows, plan, None if sent == self.last_inputs else shape, key.spans)
        self.last_inputs = sent
        if step.is_new_shape:
            self.features = int(np.bitwise_or.reduce(rows.features.bits[shape.row]))
        step.drafting = self._draft_keys(plan, shape, updates)
        if (upload := self.uploads.pack(updates)) is not None:
            self.steps.scatter(self.state.data, *upload)
        step.sampled_on_host = bool(
            plan.masked_spans or shape.scored_spans or self.features & ~self.steps.supported_features
        )
        self._forward(step, shape, key)
        picks = len(shape.sample_indices)
        if step.sampled_on_host:
            step.fed_tokens = None if shape.one_sample_each else self.batch.tokens[: int(shape.query_start[-1])]
        elif picks:
            self._run(GraphKey.head(picks, self.features))
            home = self.ring[self.ring_slot, :picks]
            home.copy_(self.tokens[:picks], non_blocking=True)
            step.host_tokens = home.numpy()
            self.ring_slot = (self.ring_slot + 1) % len(self.ring)
        step.event = self.queue.record()
        for key in () if step.sampled_on_host else step.drafting:
            self._run(key)

    def _forward(self, step: LookaheadStep, shape: StepShape, key: GraphKey) -> None:
        """Hidden states of every token are for steps that want them: they stay outside the graphs."""
        pool, hidden = self.pool, None
        pool.apply_plan(step.plan)
        if shape.scored_spans or pool.wants_all(shape):
            hidden = self._body(key, every=True)
        else:
            self._run(key)
        made = pool.feed(self.rows, shape, hidden, self.hidden)
        step.pooled = {s: one.to("cpu", non_blocking=True) for s, one in made.items()}
        step.hidden = hidden if shape.scored_spans else None

    def _draft_keys(self, plan: Plan, shape: StepShape, updates: list[Update]) -> Sequence[GraphKey]:
        """What is to be run once this step has sampled; the device hears who wants how many drafts."""
        self.proposer.admit(plan, shape, self.rows)
        if not any(plan.num_drafts):
            return ()
        wanted_drafts = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
        if self.last_drafts != (shape, plan.num_drafts):
            self.last_drafts = shape, plan.num_drafts
            updates.append((self.state.offsets["wanted"], wanted_drafts.astype(np.int32)))
        return self.proposer.keys(
            shape, wanted_drafts, self.features & self.steps.supported_features, len(self.batch.tokens)
        )

    def _run(self, key: GraphKey) -> None:
        self.queue.run(key, partial(self._work, key))

    def _work(self, key: GraphKey) -> None:
        if key.kind == "feed":
            self._body(key)
        elif key.kind == "sample":
            self._head(key)
        else:
            self.proposer.run(key, self.draft_context)

    def _body(self, key: GraphKey, *, every: bool = False) -> Tensor:
        """Hidden states of the key's step: those that are picked, or every one."""
        tokens, spans, most = key[:3]
        state = self.state
        picks = min(tokens, padding(spans * (1 + state.max_drafts)))
        wanted = None if every or picks >= tokens else state.step.sample_indices[:picks].clamp(max=tokens - 1)
        batch = slice_batch(self.batch, tokens, spans, most, wanted)
        self.steps.prepare_inputs(state, state.step, batch, self.rows.max_model_len)
        hidden = self.model.forward(batch, self.kv)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(state.max_samples, hidden.shape[1])
        self.steps.advance(state, state.step, spans, hidden, self.hidden[:picks])
        return hidden

    def _head(self, key: GraphKey) -> None:
        tokens = self.tokens[: key.tokens]
        assert self.hidden is not None
        logits = self.model.logits(self.hidden[: key.tokens])
        self.steps.sample(self.state, self.state.step, logits, tokens, key.features)
        self.steps.verify(self.state, tokens)

    # ---------------------------------------------------------------- home

    def _complete(self, step: LookaheadStep) -> None:
        shape, rows = step.shape, self.rows
        assert shape is not None
        step.event.synchronize()
        if step.is_new_shape:
            rows.check(shape)
        scores: dict[int, list[TokenLogprobs]] = {}
        right: npt.NDArray[np.bool_] | None = None
        if step.sampled_on_host:
            with self.queue:
                sampled, scores = self._sample(step, shape)
        else:
            sampled = sampled_from_host(step.host_tokens)
            right = ~shape.is_last_sample & (np.append(sampled.tokens[1:], DROPPED) != DROPPED)
        keep, failed = rows.advance(shape, sampled.tokens, sampled.bad, right)
        if step.plan.num_drafts:
            with self.queue:
                self._record_drafts(step.plan, shape)
        done = step_result(step.plan, shape, sampled, keep, failed, scores, rows)
        step.outcome = done._replace(pooled=pooled_bytes(step.pooled))

    def _record_drafts(self, plan: Plan, shape: StepShape) -> None:
        """How many drafts every row has; and where a grammar is to follow them, which."""
        rows = self.rows
        rows.num_drafted[shape.sampling_row] = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
        for s in plan.masked_spans:
            row = shape.spans[s].row
            at = slice(int(rows.num_known[row]), int(rows.num_known[row] + rows.num_drafted[row]))
            rows.tokens[row, at] = self.state.history[row, at].cpu().numpy()

    def _sample(self, step: LookaheadStep, shape: StepShape) -> tuple[Sampled, dict[int, list[TokenLogprobs]]]:
        """The host's part, rows being as they were when the step was fed; the device hears what was drawn."""
        rows, picks = self.rows, len(shape.sample_indices)
        scores: dict[int, list[TokenLogprobs]] = {}
        for s in shape.scored_spans:
            assert step.hidden is not None
            scores[s] = score_prompt(self.model, rows, shape, s, step.hidden, self.sampler.vocab_size)
        step.hidden = None
        if not picks:
            return sampled_from_host(None), scores
        assert self.hidden is not None
        if step.fed_tokens is not None:
            behind = np.flatnonzero(~shape.is_last_sample)
            row = shape.sample_row[behind]
            drafts = step.fed_tokens.cpu().numpy()[shape.sample_indices[behind] + 1]
            rows.tokens[row, rows.num_known[row] + shape.sample_offset[behind]] = drafts
        sampled = self.sampler(
            self.model.logits(self.hidden[:picks]), rows, shape, masks_by_sample(step.plan, shape, step.masks)
        )
        tokens = self.tokens[:picks]
        tokens.copy_(torch.from_numpy(sampled.tokens.astype(np.int32)))
        self.steps.verify(self.state, tokens)
        for key in step.drafting:
            self._run(key)
        return sampled, scores
