"""The runner of a device with look-ahead: plans are launched without waiting, tokens return through a pinned ring.

The device keeps the rows (`DeviceState`), samples, drafts by itself and feeds itself. The host keeps the rows too, one
step behind. A step with masked spans is sampled when the host has made its masks, which it does while the forward runs.
Numbers return, not logits, with one exception: log-probabilities of more than MAX_LOGPROBS tokens at a position.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import StepFailed
from quire.model_runner.device_state import DeviceState, MaskUpload, Update, UploadRing, step_updates
from quire.model_runner.device_steps import DROPPED, SCORE_WIDTH, DeviceSteps, read_scores
from quire.model_runner.graphs import GraphKey, WorkQueue, bucket_seqs, bucket_tokens, padding, power_of_two
from quire.model_runner.images import ImageRunner
from quire.model_runner.pooling import PoolingHeads, with_pooled
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.runner import BaseRunner, LaunchedStep, nothing_sampled
from quire.model_runner.sampling.features import (
    DRAFT_FEATURES,
    MASKED,
    RANDOM,
    SCORED,
    SCORED_WIDE,
    count_on_device,
)
from quire.model_runner.sampling.sampler import Sampled, Sampler, score_tokens
from quire.model_runner.speculative import DraftContext, Proposer
from quire.model_runner.step_io import (
    Model,
    PromptScores,
    empty_batch,
    first_samples,
    sampled_from_host,
    scored_positions,
    shift_positions,
    slice_batch,
    step_result,
)
from quire.ops.gemm import num_tuned
from quire.ops.operands import VocabularyPart
from quire.ops.ragged import LONG, NO_LONG_SPANS, LayerKV, LongSpan, LongSpans, RaggedBatch
from quire.ops.stages import stage_ended
from quire.scheduler.plan import Plan, Span
from quire.types import TokenLogprobs

MASK_LINES = (1, 2, 4, 8)
"""Numbers of different masks in a step whose copies are captured at the start: more are rare."""

SCATTERED = (32, 1024)
"""Numbers of changes that are sent as so many: blocks of a step that decodes, and also its spans."""


def scattering(count: int, slot: int) -> GraphKey:
    """The key of sending so many changes from a slot of the ring."""
    return GraphKey(count, slot, 0, 0, "scatter")


NONE_LARGER: Mapping[GraphKey, GraphKey] = MappingProxyType({})

PIECES = (16, 64, 256)
"""Positions whose logits are computed at once for prompt log-probabilities: the last ones are padded to one of these,
so that kernels exist."""


class LookaheadRunner(BaseRunner):
    """Launches steps on `device` ahead of their results.

    max_tokens: the most that a step feeds. num_slots: of the upload ring and of the tokens' ring, one more than steps
    in flight at once. generates: whether the model has logits. near: as `ModelSpec.near`. part: of the vocabulary,
    where ranks share it out.
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
        heads: PoolingHeads | None = None,
        images: ImageRunner | None = None,
        generates: bool = True,
        near: int = 0,
        part: VocabularyPart | None = None,
    ) -> None:
        super().__init__(model, kv, rows, sampler, heads, images)
        self.generates = generates
        self.near, self.part = near, part
        self.steps, self.queue = steps, queue
        self.proposer = proposer
        spans = max(padding(rows.num_rows), bucket_seqs(rows.num_rows))
        max_tokens = bucket_tokens(padding(max(max_tokens, spans * (1 + rows.max_drafts))))
        with queue:
            vocab = sampler.vocab_size
            self.state = DeviceState(rows, spans=spans, tokens=max_tokens, vocab_size=vocab, device=device)
            sizes = [size for size in SCATTERED if queue.captures(scattering(size, 0))]
            self.uploads = UploadRing(self.state, num_slots=num_slots, sizes=sizes)
            self.masks = MaskUpload(self.state)
            shifted = images is not None and images.config.multi_axis
            self.batch = empty_batch(self.state, rows, max_tokens, shifted=shifted)
            samples = self.state.max_samples
            self.tokens = torch.zeros(samples, dtype=torch.int32, device=device)
            self.scores = torch.zeros((samples, SCORE_WIDTH), dtype=torch.int32, device=device)
        self.draft_context = DraftContext(self.state, steps, self.batch, rows.max_model_len)
        pinned = device.type == "cuda"
        self.ring = torch.zeros((num_slots, samples), dtype=torch.int32, pin_memory=pinned)
        self.score_ring = torch.zeros((num_slots, samples, SCORE_WIDTH), dtype=torch.int32, pin_memory=pinned)
        self.ring_slot = 0
        self.features = 0
        self.last_inputs: tuple[object, int] | None = None
        self.last_drafts: tuple[object, object] | None = None
        # [R, hidden] and [T, hidden], allocated by the first forward that needs them, which shows the width and the
        # dtype: the hidden states that are sampled at, and every token's.
        self.hidden: Tensor | None = None
        self.every: Tensor | None = None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Launch a plan; nothing is waited for."""
        step = LaunchedStep(self, plan)
        try:
            if self.failure is not None:
                raise self.failure
            if self.inflight and self._waits_for_masks(self.inflight[-1]):
                raise StepFailed("a step was launched after one that still waits for its masks")
            with self.queue:
                self._launch(step)
        except Exception as failure:
            # Of whatever class it is: the engine finds out which request causes it.
            self.failure = step.failure = failure
        else:
            self.inflight.append(step)
        return step

    @torch.inference_mode()
    def sample(self, step: LaunchedStep) -> None:
        """Send a step's masks and launch its sampling, behind its forward."""
        if self.failure is not None or step not in self.inflight:
            return
        try:
            with self.queue:
                first = first_samples(step.plan, step.shape)
                self._copy_masks(self.masks.fill(step.masks or (), first, len(step.shape.sample_indices)))
                self._sample(step, step.features | MASKED)
        except Exception as failure:
            self.failure = failure

    def _waits_for_masks(self, step: LaunchedStep) -> bool:
        return bool(step.plan.masked_spans) and step.masks is None

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
    def precompile(self, keys: Sequence[GraphKey], larger: Mapping[GraphKey, GraphKey] = NONE_LARGER) -> None:
        """Be ready for all of these, on padding, before there are rows: nothing is compiled later, and nothing captured
        but those in `larger`, see `WorkQueue.postpone`."""
        if self.near:
            near = {key: key._replace(near=True) for key in keys if key.kind in ("feed", "hidden")}
            keys = [*keys, *near.values()]
            larger = {**larger, **{near[key]: near[to] for key, to in larger.items() if key in near}}
        with self.queue:
            scoring = [partial(self._score_padding, size) for size in PIECES] if self.generates else []
            uncaptured: list[Callable[[], object]] = [*scoring, *self._image_padding(keys)]
            sent = self.uploads.pack(self.uploads.nothing(1))
            assert sent is not None
            touch = [
                partial(self.steps.scatter, self.state.data, *sent[:2]),
                partial(self.masks.copy, 1, self.steps.copy),
            ]
            self.queue.precompile([*touch, *(partial(self._work, key) for key in keys), *uncaptured])
            stage_ended("kernels")
            self._prepare(keys, larger)
            for work in uncaptured:
                work()
            self.state.reset()
            for below in (0, *self.uploads.sizes):
                for _ in self.uploads.host:
                    self._scatter(self.uploads.nothing(below + 1))
            for lines in MASK_LINES:
                self._copy_masks(lines)
        self.queue.synchronize()
        stage_ended("graphs")

    def _prepare(self, keys: Sequence[GraphKey], larger: Mapping[GraphKey, GraphKey]) -> None:
        """Capture what steps need at first, and postpone the rest, unless it turns out that products are not tuned."""
        works = {key: partial(self._work, key) for key in keys}
        tuned = num_tuned()
        self.queue.prepare_all([each for each in works.items() if each[0] not in larger])
        rest = [(key, works[key]) for key in keys if key in larger]
        if self.queue.agreed(num_tuned() == tuned):
            self.queue.postpone(rest, larger)
        else:
            self.queue.prepare_all(rest)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Capture one of the graphs that were postponed, while nothing is in flight; False: none is left."""
        with self.queue:
            return self.queue.prepare_next()

    def step_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Seconds of a decode step of so many rows that verifies and makes so many drafts each, on padding."""
        shape = StepShape.of(tuple(Span(r, 1 + num_drafts, 1 + num_drafts, 1 + num_drafts) for r in range(num_rows)))
        keys = [GraphKey.of(shape), GraphKey.head(len(shape.sample_indices), 0)]
        if self.proposer is not None:
            keys += self.proposer.follow(shape)
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
        if self.images is not None:
            self.images.apply_plan(plan, rows)
        step.is_new_shape = rows.epoch != epoch
        key = GraphKey.of(shape)
        if self.near:
            # What its blocks hold bounds a sequence's length, which the host need not know.
            key = key._replace(near=int(rows.num_blocks[shape.row].max(initial=0)) * rows.block_size <= self.near)
        key = self.queue.serving(key)
        inputs = (shape, key.spans)
        updates = step_updates(
            self.state, rows, plan, None if inputs == self.last_inputs else shape, key.spans, key.tokens
        )
        self.last_inputs = inputs
        if step.is_new_shape:
            self.features = int(np.bitwise_or.reduce(rows.features.bits[shape.row]))
        step.features = self.features
        step.drafting = self._draft_keys(plan, shape, updates)
        self._scatter(updates)
        self._restore_states(plan)
        self._feed(step, shape, key)
        if not plan.masked_spans:
            self._sample(step, step.features)

    def _scatter(self, updates: list[Update]) -> None:
        """Send what changes on the device. A few numbers change in most steps: their kernel is a graph, since launching
        it takes the host ten times as long."""
        if (upload := self.uploads.pack(updates)) is None:
            return
        work = partial(self.steps.scatter, self.state.data, *upload[:2])
        if upload.fixed:
            self.queue.run(scattering(len(upload.places), upload.slot), work)
        else:
            work()

    def _copy_masks(self, lines: int) -> None:
        """Copy so many lines of masks to the device."""
        key = GraphKey(power_of_two(lines), 0, 0, 0, "masks")
        self.queue.run(key, partial(self.masks.copy, min(key.tokens, self.state.max_samples), self.steps.copy))

    def _restore_states(self, plan: Plan) -> None:
        """Copy the snapshots that rows open with to the rows' own slots, so that no step writes what another row's span
        still reads."""
        rows = self.rows
        for one in plan.new_sequences:
            if one.snapshot:
                source, target = rows.num_states + one.snapshot, int(rows.first_state(np.array(one.row)))
                for pool in zip(*(each.state for each in self.kv if each.state is not None), strict=True):
                    torch._foreach_copy_([each[target] for each in pool], [each[source] for each in pool])

    def _sample(self, step: LaunchedStep, features: int) -> None:
        """Sample what the forward made, start the copies of what returns, then draft."""
        shape, samples = step.shape, len(step.shape.sample_indices)
        if step.samples:
            self._run(GraphKey.head(samples, features & ~SCORED_WIDE))
            slot = self.ring[self.ring_slot, :samples]
            slot.copy_(self.tokens[:samples], non_blocking=True)
            step.host_tokens = slot.numpy()
            if features & SCORED:
                lines = self.score_ring[self.ring_slot, :samples]
                lines.copy_(self.scores[:samples], non_blocking=True)
                step.host_scores = lines.numpy()
            bits = self.rows.features.bits
            if features & SCORED_WIDE and len(wide := np.flatnonzero(bits[shape.sample_row] & SCORED_WIDE)):
                assert self.hidden is not None
                hidden = self.hidden[torch.from_numpy(wide).to(self.hidden.device)]
                step.logits = self.model.logits(hidden).float().to("cpu", non_blocking=True)
            self.ring_slot = (self.ring_slot + 1) % len(self.ring)
        if not step.plan.masked_spans:
            step.event = self.queue.record()
        for key in step.drafting:
            self._run(key)
        if step.plan.masked_spans:
            step.host_drafts = self._drafts_of(step)
            step.event = self.queue.record()

    def _drafts_of(self, step: LaunchedStep) -> Tensor | None:
        """[masked spans, drafts] what is drafted for rows with a grammar, on its way to the host."""
        if not any(step.plan.num_drafts):
            return None
        state, spans = self.state, step.shape.spans
        row = torch.tensor([spans[s].row for s in step.plan.masked_spans], device=state.device)
        at = state.columns["known"][row][:, None] + torch.arange(max(step.plan.num_drafts), device=state.device)
        return state.history[row[:, None], at.long()].to("cpu", non_blocking=True)

    def _score_on_device(self, step: LaunchedStep, hidden: Tensor) -> PromptScores | None:
        """Log-probabilities of the prompt tokens that follow those the step feeds, in pieces."""
        rows, shape = self.rows, step.shape
        spans: list[tuple[int, npt.NDArray[np.int32], int]] = []
        sources: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        ahead = self._fed_ahead()
        for s in shape.scored_spans:
            row = shape.spans[s].row
            wanted = rows.features.prompt_logprobs[row]
            if wanted is None or count_on_device(wanted) < 0:
                continue
            computed = int(rows.num_computed[row]) + ahead[row]
            begin, end = scored_positions(shape, s, computed, int(rows.prompt_length[row]))
            if end > begin:
                spans.append((s, rows.tokens[row, begin + 1 : end + 1].copy(), wanted))
                sources.append(np.arange(begin, end) - computed + int(shape.query_start[s]))
        if not spans:
            return None
        counts = [len(targets) for _, targets, _ in spans]
        total, most = sum(counts), PIECES[-1]
        padded = total - total % most + next(size for size in (0, *PIECES) if size >= total % most)
        given = np.full((3, padded), -1, dtype=np.int32)
        given[0, :total] = np.concatenate(sources)
        given[1, :total] = np.concatenate([targets for _, targets, _ in spans])
        given[2, :total] = np.repeat([wanted for *_, wanted in spans], counts)
        scores = self._scores(hidden, torch.from_numpy(given))
        return PromptScores(scores[:total].to("cpu", non_blocking=True), spans)

    def _fed_ahead(self) -> Counter[int]:
        """Tokens of each row that steps in flight feed: the same prompt's, where the next step feeds a prompt."""
        ahead = Counter[int]()
        for span in (span for each in self.inflight for span in each.shape.spans):
            ahead[span.row] += span.num_tokens
        return ahead

    def _long_spans(self, shape: StepShape, key: GraphKey) -> LongSpans:
        """Prompts' long chunks, whose lengths the host knows; none in a step that is captured."""
        if self.queue.captures(key) or shape.max_query <= LONG:
            return NO_LONG_SPANS
        ahead, computed, start = self._fed_ahead(), self.rows.num_computed, shape.query_start
        spans = [
            LongSpan(s, int(start[s]), span.num_tokens, int(computed[span.row]) + ahead[span.row])
            for s, span in enumerate(shape.spans)
            if span.num_tokens > LONG
        ]
        return LongSpans(spans, len(spans) == len(shape.spans))

    def _long_padding(self, key: GraphKey) -> LongSpans:
        """A long span of padding, for which kernels are made ready: the most of one step after as many tokens."""
        longest = self.rows.max_model_len
        count = min(key.tokens, longest)
        return LongSpans([LongSpan(0, 0, count, min(count, longest - count))] if count > LONG else ())

    def _scores(self, hidden: Tensor, given: Tensor) -> Tensor:
        """Scores [N, SCORE_WIDTH] of N positions. given int32 [3, N]: the index in hidden [T, H] of each, its next
        token, and how many of the likeliest are wanted; -1: padding."""
        given = (given.pin_memory() if hidden.is_cuda else given).to(hidden.device, non_blocking=True)
        source, tokens, wanted = given
        scores = torch.zeros((len(source), SCORE_WIDTH), dtype=torch.int32, device=hidden.device)
        fed = hidden[source.clamp(min=0).long()]
        parts = (each.split(PIECES[-1]) for each in (fed, tokens, wanted, scores))
        for rows, *part in zip(*parts, strict=True):
            self.steps.score(self.model.logits(rows), *part)
        return scores

    def _score_padding(self, size: int) -> None:
        """Launch what scores `size` positions, if a forward has shown how wide hidden states are."""
        if self.hidden is not None:
            self._scores(self.hidden, torch.full((3, size), -1, dtype=torch.int32))

    def _feed(self, step: LaunchedStep, shape: StepShape, key: GraphKey) -> None:
        """The forward. One that feeds tokens of images is not captured."""
        pool, hidden = self.pool, None
        pool.apply_plan(step.plan)
        long = self._long_spans(shape, key)
        if shape.scored_spans or pool.wants_all(shape):
            key = key._replace(kind="hidden")
        begins = self._image_begins(shape)
        if begins:
            self._body(key, long, lambda batch: self._place(batch, shape, begins))
        else:
            self.queue.run(key, partial(self._body, key, long))
        if key.kind == "hidden":
            assert self.every is not None
            hidden = self.every[: key.tokens]
        step.samples = len(shape.sample_indices) > 0 and not pool.covers(shape)
        step.pooled = [each.on_host() for each in pool.feed(self.rows, shape, hidden, self.hidden)]
        if hidden is None or not shape.scored_spans:
            return
        step.prompt_scores = self._score_on_device(step, hidden)
        on_host = len(shape.scored_spans) - (0 if step.prompt_scores is None else len(step.prompt_scores.spans))
        # Until the host reads them, later steps have overwritten them.
        step.hidden = hidden.clone() if on_host else None

    def _image_begins(self, shape: StepShape) -> dict[int, int]:
        """Where spans begin that do so before the end of their prompts' images, by span. Those behind have only their
        positions shifted, which the device does by itself; how far it is there, the host need not know."""
        rows = self.rows
        if not rows.images:
            return {}
        ahead = self._fed_ahead()
        begins = {
            s: int(rows.num_computed[span.row]) + ahead[span.row]
            for s, span in enumerate(shape.spans)
            if span.row in rows.images
        }
        ends = {s: rows.images[shape.spans[s].row][-1] for s in begins}
        return {s: begin for s, begin in begins.items() if begin < ends[s].start + ends[s].length}

    def _place(self, batch: RaggedBatch, shape: StepShape, begins: Mapping[int, int]) -> RaggedBatch:
        assert self.images is not None
        return self.images.place(batch, self.rows, shape, begins)

    def _draft_keys(self, plan: Plan, shape: StepShape, updates: list[Update]) -> Sequence[GraphKey]:
        """What is run once this step has sampled; how many drafts each row wants is added to `updates`."""
        if self.proposer is None:
            return ()
        self.proposer.admit(plan, shape, self.rows)
        follow = self.proposer.follow(shape)
        if not any(plan.num_drafts):
            return follow
        wanted_drafts = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
        if self.last_drafts != (shape, plan.num_drafts):
            self.last_drafts = shape, plan.num_drafts
            updates.append((self.state.offsets["wanted"], wanted_drafts.astype(np.int32)))
        features = self.features & DRAFT_FEATURES
        return follow + self.proposer.keys(shape, wanted_drafts, features, len(self.batch.tokens))

    def _run(self, key: GraphKey) -> None:
        self.queue.run(key, partial(self._work, key))

    def _work(self, key: GraphKey) -> None:
        if key.kind in ("feed", "hidden"):
            self._body(key, NO_LONG_SPANS if self.queue.captures(key) else self._long_padding(key))
        elif key.kind == "sample":
            self._head(key)
        else:
            assert self.proposer is not None
            self.proposer.run(key, self.draft_context)

    def _body(
        self,
        key: GraphKey,
        long_spans: LongSpans = NO_LONG_SPANS,
        place: Callable[[RaggedBatch], RaggedBatch] | None = None,
    ) -> None:
        """The forward of the key's step. place: adds images to its batch."""
        tokens, spans, max_query = key[:3]
        state = self.state
        samples = min(tokens, padding(spans * (1 + state.max_drafts)))
        reads = self.proposer is not None and self.proposer.reads_hidden
        outputs, every = None, reads or key.kind == "hidden"
        if samples < tokens and not every:
            outputs = state.step.sample_indices[:samples].clamp(max=tokens - 1)
        batch = slice_batch(self.batch, tokens, spans, max_query, outputs, long_spans=long_spans)
        if key.near:
            batch = replace(batch, max_kv=self.near)
        self.steps.prepare_inputs(state, state.step, batch, self.rows.max_model_len)
        shift_positions(state, batch)
        hidden = self.model.forward(batch if place is None else place(batch), self.kv)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(state.max_samples, hidden.shape[1])
        self.steps.advance(state, state.step, spans, hidden, self.hidden[:samples])
        if key.kind == "hidden":
            if self.every is None:
                self.every = hidden.new_zeros(len(self.batch.tokens), hidden.shape[1])
            self.every[:tokens] = hidden
        if self.proposer is not None and self.proposer.reads_hidden:
            self.proposer.keep(hidden)

    def _image_padding(self, keys: Sequence[GraphKey]) -> list[Callable[[], None]]:
        """What launches all that images need: the encoder, and forwards that feed tokens of images, of which all have
        kernels of their own where those see each other, and one where they do not."""
        if self.images is None:
            return []
        fed = [key for key in keys if key.kind == "feed" and key.max_query > 1]
        fed = fed if self.images.config.whole_images else fed[-1:]
        forwards = [partial(self._body, key, place=self.images.place_padding) for key in fed]
        return [self.images.encode_padding, *forwards]

    def _head(self, key: GraphKey) -> None:
        tokens = self.tokens[: key.tokens]
        assert self.hidden is not None
        # Only candidates travel between ranks where a token's score is its own.
        part = self.part if not key.features & ~RANDOM else None
        logits = (self.model if part is None else part).logits(self.hidden[: key.tokens])
        self.steps.sample(self.state, self.state.step, logits, tokens, key.features, self.scores[: key.tokens], part)
        self.steps.verify(self.state, tokens)

    # Completing

    def _forward(self, step: LaunchedStep) -> None:
        """Nothing: `launch` has run it."""
        if self.failure is not None:
            raise self.failure

    def _complete(self, step: LaunchedStep) -> None:
        rows, shape = self.rows, step.shape
        if step.event is not None:
            step.event.synchronize()
        if step.is_new_shape:
            rows.check(shape)
        scores = {} if step.prompt_scores is None else step.prompt_scores.read()
        if rest := [s for s in shape.scored_spans if s not in scores]:
            with self.queue:
                scores |= self._score_prompts(step, rest)
        sampled = sampled_from_host(step.host_tokens)
        if not step.samples:
            sampled = nothing_sampled(len(shape.sample_indices))
        sampled = sampled._replace(logprobs=self._logprobs(step, sampled))
        matches = None
        if not shape.one_sample_each:
            matches = ~shape.is_last_sample & (np.append(sampled.tokens[1:], DROPPED) != DROPPED)
        keep, failed = rows.advance(shape, sampled.tokens, sampled.bad, matches)
        if step.plan.num_drafts:
            self._record_drafts(step)
        done = step_result(step.plan, shape, sampled, keep, failed, scores, rows)
        step.outcome = with_pooled(done, step.pooled)

    def _logprobs(self, step: LaunchedStep, sampled: Sampled) -> dict[int, TokenLogprobs]:
        """Log-probabilities of samples, by sample."""
        features, row = self.rows.features, step.shape.sample_row
        out: dict[int, TokenLogprobs] = {}
        for table, bit in ((step.host_scores, SCORED), (step.logits, SCORED_WIDE)):
            if table is None:
                continue
            which = np.flatnonzero(features.bits[row] & bit)
            tokens, wanted = sampled.tokens[which], features.logprobs[row[which]]
            if isinstance(table, Tensor):
                made = score_tokens(table, np.maximum(tokens, 0), wanted)
            else:
                made = read_scores(table[which], tokens.tolist(), wanted.tolist())
            out |= zip(which.tolist(), made, strict=True)
        return out

    def _record_drafts(self, step: LaunchedStep) -> None:
        """Note how many drafts each row has, and their tokens where a grammar has to follow them."""
        rows, plan, shape = self.rows, step.plan, step.shape
        rows.num_drafted[shape.sampling_row] = np.array(plan.num_drafts, dtype=np.intp)[shape.sampling_spans]
        if step.host_drafts is None:
            return
        for s, drafts in zip(plan.masked_spans, step.host_drafts.numpy(), strict=True):
            row = shape.spans[s].row
            count, known = int(rows.num_drafted[row]), int(rows.num_known[row])
            rows.tokens[row, known : known + count] = drafts[:count]
