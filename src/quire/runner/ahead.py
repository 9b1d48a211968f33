"""The runner of a device that is run ahead of: plans go out without waiting, tokens come home through a pinned ring.

The device keeps the rows (`arena`) and feeds itself; the host keeps them too, a step behind, for what it samples
itself. A step is sampled on the device when every row is plain greedy there; otherwise logits come home and the
host's sampler draws, before anything is launched after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.core.plan import STUCK, Mask, Plan, Result
from quire.errors import StepFailed
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.runner.arena import Arena, Post, changes
from quire.runner.device import DeviceSteps
from quire.runner.graphs import Done, Key, Mark, Queue, coarse, crowd, padding
from quire.runner.results import Model, masked, result, score_prompt
from quire.runner.rows import Rows, Shape
from quire.runner.sampler import BROKEN, Sampled, Sampler
from quire.values import TokenLogprobs


class Flight:
    """One launched step: the lower door's handle."""

    def __init__(self, runner: AheadRunner, plan: Plan) -> None:
        self.plan = plan
        self.shape: Shape | None = None
        self.fresh = False
        self.here = False
        """Sampled by the host."""
        self.home: npt.NDArray[np.int32] | None = None
        self.mark: Mark = Done()
        self.hidden: Tensor | None = None
        self.masks: Sequence[Sequence[Mask]] | None = None
        self.done: Result | None = None
        self.failure: Exception | None = None
        self._runner = runner

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """The masks of `plan.masked`, in order, one per sampled row."""
        self.masks = masks
        self._runner.bring(self)

    def result(self) -> Result:
        """Raises StepFailed, caused by what went wrong."""
        self._runner.bring(self)
        if self.failure is not None:
            reason = str(self.failure) or type(self.failure).__name__
            raise StepFailed(f"the step failed: {reason.splitlines()[0]}") from self.failure
        if self.done is None:
            raise StepFailed("the step waits for masks that have not been handed in")
        return self.done


class AheadRunner:
    """Folds plans over rows and a KV pool on `device`.

    kv: one LayerKV a layer, page 0 spare. tokens: the most a step feeds. turns: steps under way at once, and one more.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        rows: Rows,
        sampler: Sampler,
        steps: DeviceSteps,
        queue: Queue,
        *,
        tokens: int,
        turns: int,
        device: torch.device,
    ) -> None:
        self.model, self.kv, self.rows, self.sampler = model, kv, rows, sampler
        self.steps, self.queue, self.device = steps, queue, device
        spans = max(padding(rows.count), crowd(rows.count))
        pinned = device.type == "cuda"
        with queue:
            self.arena = Arena(rows, spans=spans, tokens=coarse(padding(tokens)), device=device)
            self.post = Post(self.arena, turns=turns)
            self.batch = self._batch(spans, coarse(padding(tokens)))
            self.tokens = torch.zeros(spans, dtype=torch.int32, device=device)
        self.ring = torch.zeros((turns, spans), dtype=torch.int32, pin_memory=pinned)
        self.turn = 0
        self.flight: deque[Flight] = deque()
        self.failure: Exception | None = None
        self.sent: tuple[object, int] | None = None
        self.asked = 0
        self.picked: Tensor | None = None
        """[S, hidden], made when the first forward says how wide and what numbers."""

    def _batch(self, spans: int, tokens: int) -> RaggedBatch:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return RaggedBatch(
            tokens=zeros(tokens),
            positions=zeros(tokens),
            slots=zeros(tokens),
            query_start=self.arena.part("query_start", spans + 1),
            kv_len=zeros(spans, dtype=torch.int32),
            page_table=zeros(spans, self.arena.pages, dtype=torch.int32),
            page_size=self.rows.page_size,
            max_query=tokens,
            max_kv=self.rows.max_model_len,
        )

    # ---------------------------------------------------------------- the door

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        step = Flight(self, plan)
        try:
            if self.flight and self.flight[-1].here:
                self.bring(self.flight[-1])
                if self.flight:
                    raise StepFailed("a step was launched after one that still waits for its masks")
            if self.failure is not None:
                raise self.failure
            with self.queue:
                self._launch(step)
        except Exception as failure:  # whatever it is, the engine finds out whose fault it was
            self.failure = step.failure = failure
        else:
            self.flight.append(step)
        return step

    @torch.inference_mode()
    def bring(self, step: Flight) -> None:
        """Complete the steps up to this one, as far as can be. What goes wrong is kept for who asks for the result."""
        while step.done is None and step.failure is None:
            first = self.flight[0]
            if first.plan.masked and first.masks is None:
                return
            try:
                if self.failure is not None:
                    raise self.failure
                self._complete(first)
            except Exception as failure:
                self.failure = first.failure = failure
            self.flight.popleft()

    def reset(self) -> None:
        """Forget every row and step."""
        self.flight.clear()
        self.queue.wait()
        self.failure = None
        self.rows.reset()
        self.sent = None
        with self.queue:
            self.arena.reset()

    def close(self) -> None:
        """Let go of the K/V pool and the graphs."""
        self.reset()
        self.kv = ()
        self.queue.close()

    @torch.inference_mode()
    def warm(self, keys: Sequence[Key]) -> None:
        """Do everything once on padding, before there are rows, so that nothing is compiled or captured later."""
        with self.queue:
            for key in keys:
                if key.spans:
                    self.queue.run(key, lambda key=key: self._body(key))  # type: ignore[misc]
                else:
                    self.queue.run(key, lambda key=key: self._head(key))  # type: ignore[misc]
            self.arena.reset()
            self.steps.scatter(self.arena.data, *self.post.one())
        self.queue.wait()

    # ---------------------------------------------------------------- out

    def _launch(self, step: Flight) -> None:
        rows, plan = self.rows, step.plan
        epoch = rows.epoch
        shape = step.shape = rows.admit(plan)
        step.fresh = rows.epoch != epoch
        if step.fresh and (shape.rows > 1).any():
            raise StepFailed("this executor verifies no drafts")
        key = Key.of(shape)
        sent = (shape, key.spans)
        news = changes(self.arena, rows, plan, None if sent == self.sent else shape, key.spans)
        self.sent = sent
        if (parcel := self.post.pack(news)) is not None:
            self.steps.scatter(self.arena.data, *parcel)
        if step.fresh:
            self.asked = int(np.bitwise_or.reduce(rows.traits.bits[shape.row]))
        step.here = bool(plan.masked or shape.scored or self.asked & ~self.steps.offers)
        if shape.scored:
            step.hidden = self._body(key)
        else:
            self.queue.run(key, lambda: self._body(key))
        picks = len(shape.picked)
        if not step.here and picks:
            head = Key(padding(picks), 0, 0, self.asked)
            self.queue.run(head, lambda: self._head(head))
            home = self.ring[self.turn, :picks]
            home.copy_(self.tokens[:picks], non_blocking=True)
            step.home = home.numpy()
            self.turn = (self.turn + 1) % len(self.ring)
        step.mark = self.queue.mark()

    def _body(self, key: Key) -> Tensor:
        tokens, spans, most, _ = key
        whole = self.batch
        batch = RaggedBatch(
            tokens=whole.tokens[:tokens],
            positions=whole.positions[:tokens],
            slots=whole.slots[:tokens],
            query_start=whole.query_start[: spans + 1],
            kv_len=whole.kv_len[:spans],
            page_table=whole.page_table[:spans],
            page_size=whole.page_size,
            max_query=most,
            max_kv=whole.max_kv,
        )
        self.steps.stage(self.arena, batch, self.rows.max_model_len)
        hidden = self.model.forward(batch, self.kv)
        if self.picked is None:
            self.picked = hidden.new_zeros(len(whole.kv_len), hidden.shape[1])
        self.steps.settle(self.arena, spans, hidden, self.picked[: min(tokens, spans)])
        return hidden

    def _head(self, key: Key) -> None:
        tokens = self.tokens[: key.tokens]
        assert self.picked is not None
        self.steps.choose(self.arena, self.model.logits(self.picked[: key.tokens]), tokens, key.asked)

    # ---------------------------------------------------------------- home

    def _complete(self, step: Flight) -> None:
        shape, rows = step.shape, self.rows
        assert shape is not None
        step.mark.synchronize()
        if step.fresh:
            rows.check(shape)
        scores: dict[int, list[TokenLogprobs]] = {}
        if step.here:
            with self.queue:
                sampled, scores = self._sample(step, shape)
        else:
            sampled = told(step.home)
        keep, failed = rows.settle(shape, sampled.tokens, sampled.bad)
        step.done = result(step.plan, shape, sampled, keep, failed, scores, rows)

    def _sample(self, step: Flight, shape: Shape) -> tuple[Sampled, dict[int, list[TokenLogprobs]]]:
        """The host's part, rows being as they were when the step was fed; the device hears what was drawn."""
        rows, picks = self.rows, len(shape.picked)
        scores: dict[int, list[TokenLogprobs]] = {}
        for s in shape.scored:
            assert step.hidden is not None
            scores[s] = score_prompt(self.model, rows, shape, s, step.hidden, self.sampler.vocab_size)
        step.hidden = None
        if not picks:
            return told(None), scores
        assert self.picked is not None
        sampled = self.sampler(
            self.model.logits(self.picked[:picks]), rows, shape, masked(step.plan, shape, step.masks)
        )
        tokens = self.tokens[:picks]
        tokens.copy_(torch.from_numpy(sampled.tokens.astype(np.int32)))
        self.steps.append(self.arena, tokens)
        return sampled, scores


def told(home: npt.NDArray[np.int32] | None) -> Sampled:
    """What the device sampled, and where it could not."""
    tokens = np.zeros(0, np.intp) if home is None else home.astype(np.intp)
    bad = tokens < 0
    errors = {r: BROKEN if tokens[r] == -1 else STUCK for r in np.flatnonzero(bad).tolist()}
    return Sampled(tokens, bad, errors, {})
