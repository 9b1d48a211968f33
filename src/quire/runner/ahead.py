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

from quire.core.plan import Mask, Plan, Result, Span
from quire.errors import StepFailed
from quire.ops.ragged import LayerKV
from quire.runner.arena import Arena, Piece, Post, changes
from quire.runner.batch import blank, part
from quire.runner.device import DROPPED, DeviceSteps
from quire.runner.graphs import Done, Key, Mark, Queue, coarse, crowd, padding
from quire.runner.pooling import Pool, vectors
from quire.runner.proposers import Desk, Proposer
from quire.runner.results import Model, masked, result, score_prompt, told
from quire.runner.rows import Rows, Shape
from quire.runner.sampler import Sampled, Sampler
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
        self.fed: Tensor | None = None
        """Token ids, where the host samples behind drafts that only the device knows."""
        self.pooled: Mapping[int, Tensor] = {}
        """Vectors that are on their way here."""
        self.drafting: Sequence[Key] = ()
        self.masks: Sequence[Sequence[Mask]] | None = None
        self.done: Result | None = None
        self.failure: Exception | None = None
        self._runner = runner

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """The masks of `plan.masked`, in order, one per sampled row."""
        self.masks = masks
        self._runner.bring(self)

    def over(self) -> bool:
        """Whether the device has come past it, but for drafts that are made behind it."""
        try:
            return self.done is not None or self.failure is not None or self.mark.query()
        except RuntimeError:  # `result` says what
            return True

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
        proposer: Proposer,
        *,
        tokens: int,
        turns: int,
        device: torch.device,
    ) -> None:
        self.model, self.kv, self.rows, self.sampler, self.proposer = model, kv, rows, sampler, proposer
        self.steps, self.queue, self.device = steps, queue, device
        spans = max(padding(rows.count), crowd(rows.count))
        tokens = coarse(padding(max(tokens, spans * (1 + rows.drafts))))
        pinned = device.type == "cuda"
        with queue:
            self.arena = Arena(rows, spans=spans, tokens=tokens, device=device)
            self.post = Post(self.arena, turns=turns)
            self.batch = blank(self.arena, rows, tokens)
            self.tokens = torch.zeros(self.arena.picks, dtype=torch.int32, device=device)
        self.desk = Desk(self.arena, steps, self.batch, rows.max_model_len)
        self.ring = torch.zeros((turns, self.arena.picks), dtype=torch.int32, pin_memory=pinned)
        self.turn = self.asked = 0
        self.flight: deque[Flight] = deque()
        self.pool = Pool()
        self.failure: Exception | None = None
        self.sent: tuple[object, int] | None = None
        self.wanted: tuple[object, object] | None = None
        self.picked: Tensor | None = None
        """[R, hidden], made when the first forward says how wide and what numbers."""

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
        self.pool.reset()
        self.proposer.reset()
        self.sent = self.wanted = None
        with self.queue:
            self.arena.reset()

    def close(self) -> None:
        """Let go of the K/V pool and the graphs."""
        self.reset()
        self.kv = ()
        self.queue.close()

    @torch.inference_mode()
    def warm(self, keys: Sequence[Key]) -> None:
        """Be ready for all of these, on padding, before there are rows: nothing is compiled or captured later."""
        with self.queue:
            touch = partial(self.steps.scatter, self.arena.data, *self.post.one())
            self.queue.rehearse([touch, *(partial(self._work, key) for key in keys)])
            for key in keys:
                self.queue.get_ready(key, partial(self._work, key))
            self.arena.reset()
            touch()
        self.queue.wait()

    def pace(self, rows: int, drafts: int) -> float:
        """Seconds of a decode step of so many rows that verifies and makes so many drafts each, on padding."""
        shape = Shape.of(tuple(Span(r, 1 + drafts, 1 + drafts, 1 + drafts) for r in range(rows)))
        keys = [Key.of(shape), Key.head(len(shape.picked), 0)]
        if drafts:
            keys += self.proposer.keys(shape, np.full(rows, drafts, np.intp), 0, len(self.batch.tokens))
            self.proposer.reset()
        return self.seconds(keys)

    @torch.inference_mode()
    def seconds(self, keys: Sequence[Key]) -> float:
        """The least of a few times that doing all of it takes, while there are no rows."""
        took = []
        with self.queue:
            for _ in range(4):
                began = time.perf_counter()
                for key in keys:
                    self._run(key)
                self.queue.wait()
                took.append(time.perf_counter() - began)
            self.arena.reset()
        return min(took)

    # ---------------------------------------------------------------- out

    def _launch(self, step: Flight) -> None:
        rows, plan, epoch = self.rows, step.plan, self.rows.epoch
        shape = step.shape = rows.admit(plan)
        step.fresh = rows.epoch != epoch
        key = Key.of(shape)
        sent = (shape, key.spans)
        news = changes(self.arena, rows, plan, None if sent == self.sent else shape, key.spans)
        self.sent = sent
        if step.fresh:
            self.asked = int(np.bitwise_or.reduce(rows.traits.bits[shape.row]))
        step.drafting = self._drafting(plan, shape, news)
        if (parcel := self.post.pack(news)) is not None:
            self.steps.scatter(self.arena.data, *parcel)
        step.here = bool(plan.masked or shape.scored or self.asked & ~self.steps.offers)
        self._forward(step, shape, key)
        picks = len(shape.picked)
        if step.here:
            step.fed = None if shape.even else self.batch.tokens[: int(shape.query_start[-1])]
        elif picks:
            self._run(Key.head(picks, self.asked))
            home = self.ring[self.turn, :picks]
            home.copy_(self.tokens[:picks], non_blocking=True)
            step.home = home.numpy()
            self.turn = (self.turn + 1) % len(self.ring)
        step.mark = self.queue.mark()
        for key in () if step.here else step.drafting:
            self._run(key)

    def _forward(self, step: Flight, shape: Shape, key: Key) -> None:
        """Hidden states of every token are for steps that want them: they stay outside the graphs."""
        pool, hidden = self.pool, None
        pool.admit(step.plan)
        if shape.scored or pool.wants_all(shape):
            hidden = self._body(key, every=True)
        else:
            self._run(key)
        made = pool.feed(self.rows, shape, hidden, self.picked)
        step.pooled = {s: one.to("cpu", non_blocking=True) for s, one in made.items()}
        step.hidden = hidden if shape.scored else None

    def _drafting(self, plan: Plan, shape: Shape, news: list[Piece]) -> Sequence[Key]:
        """What is to be run once this step has sampled; the device hears who wants how many drafts."""
        self.proposer.admit(plan, shape, self.rows)
        if not any(plan.drafts):
            return ()
        wanted = np.array(plan.drafts, dtype=np.intp)[shape.samples]
        if self.wanted != (shape, plan.drafts):
            self.wanted = shape, plan.drafts
            news.append((self.arena.at["wanted"], wanted.astype(np.int32)))
        return self.proposer.keys(shape, wanted, self.asked & self.steps.offers, len(self.batch.tokens))

    def _run(self, key: Key) -> None:
        self.queue.run(key, partial(self._work, key))

    def _work(self, key: Key) -> None:
        if key.kind == "feed":
            self._body(key)
        elif key.kind == "sample":
            self._head(key)
        else:
            self.proposer.run(key, self.desk)

    def _body(self, key: Key, *, every: bool = False) -> Tensor:
        """Hidden states of the key's step: those that are picked, or every one."""
        tokens, spans, most = key[:3]
        arena = self.arena
        picks = min(tokens, padding(spans * (1 + arena.drafts)))
        wanted = None if every or picks >= tokens else arena.step.picked[:picks].clamp(max=tokens - 1)
        batch = part(self.batch, tokens, spans, most, wanted)
        self.steps.stage(arena, arena.step, batch, self.rows.max_model_len)
        hidden = self.model.forward(batch, self.kv)
        if self.picked is None:
            self.picked = hidden.new_zeros(arena.picks, hidden.shape[1])
        self.steps.settle(arena, arena.step, spans, hidden, self.picked[:picks])
        return hidden

    def _head(self, key: Key) -> None:
        tokens = self.tokens[: key.tokens]
        assert self.picked is not None
        logits = self.model.logits(self.picked[: key.tokens])
        self.steps.choose(self.arena, self.arena.step, logits, tokens, key.asked)
        self.steps.verify(self.arena, tokens)

    # ---------------------------------------------------------------- home

    def _complete(self, step: Flight) -> None:
        shape, rows = step.shape, self.rows
        assert shape is not None
        step.mark.synchronize()
        if step.fresh:
            rows.check(shape)
        scores: dict[int, list[TokenLogprobs]] = {}
        right: npt.NDArray[np.bool_] | None = None
        if step.here:
            with self.queue:
                sampled, scores = self._sample(step, shape)
        else:
            sampled = told(step.home)
            right = ~shape.last & (np.append(sampled.tokens[1:], DROPPED) != DROPPED)
        keep, failed = rows.settle(shape, sampled.tokens, sampled.bad, right)
        if step.plan.drafts:
            with self.queue:
                self._guessed(step.plan, shape)
        done = result(step.plan, shape, sampled, keep, failed, scores, rows)
        step.done = done._replace(pooled=vectors(step.pooled))

    def _guessed(self, plan: Plan, shape: Shape) -> None:
        """How many drafts every row has; and where a grammar is to follow them, which."""
        rows = self.rows
        rows.guessed[shape.sampled_row] = np.array(plan.drafts, dtype=np.intp)[shape.samples]
        for s in plan.masked:
            row = shape.spans[s].row
            at = slice(int(rows.known[row]), int(rows.known[row] + rows.guessed[row]))
            rows.tokens[row, at] = self.arena.history[row, at].cpu().numpy()

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
        if step.fed is not None:
            behind = np.flatnonzero(~shape.last)
            row = shape.row_row[behind]
            drafts = step.fed.cpu().numpy()[shape.picked[behind] + 1]
            rows.tokens[row, rows.known[row] + shape.depth[behind]] = drafts
        sampled = self.sampler(
            self.model.logits(self.picked[:picks]), rows, shape, masked(step.plan, shape, step.masks)
        )
        tokens = self.tokens[:picks]
        tokens.copy_(torch.from_numpy(sampled.tokens.astype(np.int32)))
        self.steps.verify(self.arena, tokens)
        for key in step.drafting:
            self._run(key)
        return sampled, scores
