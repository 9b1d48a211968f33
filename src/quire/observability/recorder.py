"""The flight recorder: an engine that records its inputs and decisions, so that they can be replayed.

`RecordedEngine` wraps the clock and the executor, and overrides what is called from outside; the engine's own code
needs no changes. An error in recording ends the recording, and nothing else.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from quire import __version__
from quire.engine.engine import Engine, in_vocabulary
from quire.engine.events import Completed, Observer, StepRecord
from quire.engine.executor import Description, Executor, StepHandle
from quire.engine.timing import Clock, WallClock
from quire.errors import ExecutorLost, QuireError
from quire.observability import recording_format
from quire.observability.checkpoint import ENGINE_STATE, Anonymizer, constraint_of, pack, request_fields
from quire.observability.recording_format import Ring
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.kv_offload import BlockStore, Copy, CopyDone, KVOffload, Offload, Prefill, PrefillClient, next_key
from quire.scheduler.kv_transfer import PrefillOffload, PrefillServer
from quire.scheduler.plan import Mask, Plan, Result, Span
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence
from quire.types import FinishReason, Request, RequestStepOutput

log = logging.getLogger(__name__)

P = ParamSpec("P")


def _safely(record: Callable[Concatenate[Recorder, P], None]) -> Callable[Concatenate[Recorder, P], None]:
    """Log an error in `record`, and end the recording."""

    def recording(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.on:
            try:
                record(self, *args, **kwargs)
            except Exception as error:
                self.on = False
                log.error("recording has stopped, serving continues: %s: %s", type(error).__name__, error)

    return recording


@dataclass(slots=True)
class _Filling:
    """A sequence whose blocks are to be named. key: of the last one named. end: of its next full block. due: step at
    which to look again."""

    seq: Sequence
    key: bytes
    end: int
    due: int = -1


class Recorder(Observer):
    """Writes the frames of one engine; an observer of its steps."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.on = True
        self.run = ""
        """The name of the recording that goes on; empty when it is over, until `begin`."""
        self.frames = self.steps = self.lookahead = 0
        self.at: list[float] = []
        self._counts: list[int] = []
        self._errors: list[int] = []
        self._prompt_logprobs: dict[int, int] = {}
        self._landing = False
        self._failed = ("masks", "", False)
        self._spans: tuple[Span, ...] | None = None
        self._filling: dict[str, _Filling] = {}
        self._due: dict[int, list[_Filling]] = {}

    def attach(self, scheduler: Scheduler, lookahead: int) -> None:
        """Record the engine of this scheduler."""
        self.scheduler, self.lookahead = scheduler, lookahead
        self.anonymizer = Anonymizer(scheduler.kv.prefix_cache.block_size)

    @_safely
    def write(self, frame: recording_format.RecordFrame) -> None:
        """Append a frame, unless the recording is over."""
        if not self.run:
            return
        self.frames += 1
        self.at = []
        self.ring.write(recording_format.encode(frame))

    @_safely
    def begin(self, clock: float, about: Description, state: Callable[[], dict[str, Any]]) -> None:
        """Begin a segment, which can be read without those before it; of a new recording if the last one is over."""
        self.run = self.run or secrets.token_hex(8)
        sizes = {"vocab_size": about.vocab_size, "max_model_len": about.max_model_len}
        sizes |= {"page_size": about.block_size, "pages": about.num_blocks, "rows": about.num_rows}
        if isinstance(offload := self.scheduler.kv.offload, KVOffload):
            store = offload.store
            sizes |= {"slots": store.num_slots, "files": store.max_files, "block_bytes": store.block_bytes}
            sizes["min_tokens"] = offload.prefill.min_tokens
        head = (recording_format.VERSION, __version__, self.run, self.ring.segments, time.time(), clock, sizes)
        self.ring.begin(recording_format.encode(recording_format.Began([], *head, pack(state(), self.anonymizer))))
        self._spans = None

    def end(self) -> None:
        """The recording is over."""
        self.run, self._landing = "", False

    # ---------------------------------------------------------------- inputs and results

    @_safely
    def arrived(self, request: Request, seq: Sequence, incoming: bool) -> None:
        """Record a request. incoming: it is another engine's, and recorded already."""
        size = self.anonymizer.block_size
        key, names = self.anonymizer.names(seq.tokens, request.cache_salt)
        self._filling[request.id] = _Filling(seq, key, (len(names) + 1) * size)
        if incoming:
            return
        *about, pins, owner = request_fields(request, names, self.anonymizer.salt(request.cache_salt))
        self.write(recording_format.Arrived(*(self.at, *about, constraint_of(seq), pins, owner, seq.num_begun)))

    @_safely
    def constraint_set(self, id: str) -> None:
        """Record that a request has its constraint, unless the request has ended."""
        seq, names = self.scheduler.sequences.get(id), list[int]()
        if seq is not None and seq.num_begun:
            key, names = self.anonymizer.names(seq.tokens, seq.request.cache_salt)
            self._filling[id] = _Filling(seq, key, (len(names) + 1) * self.anonymizer.block_size)
        self.write(recording_format.ConstraintSet(self.at, id, 0 if seq is None else seq.num_begun, names))

    @_safely
    def launched(self, plan: Plan) -> None:
        """Record a plan."""
        step = self.scheduler.inflight[-1]
        # Decisions and new sequences are in the same order.
        ids = [why.request_id for why in step.decisions if why.kind == "opened"]
        opened = []
        for id, o in zip(ids, plan.new_sequences, strict=True):
            opened.append((id, o.row, len(o.tokens), o.num_computed, o.prompt_length, o.max_length))
            self._arm(self._filling[id])
        spans = None if plan.spans is self._spans else plan.spans
        self._spans = plan.spans
        self.write(
            recording_format.Launched(
                self.at, opened, plan.new_blocks, spans, plan.masked_spans, plan.num_drafts, step.decisions
            )
        )

    @_safely
    def finished(self, result: Result) -> None:
        """Keep a result until its step is committed."""
        self._counts = list(map(len, result.tokens))
        self._errors = list(result.errors)
        self._prompt_logprobs = {j: len(rows) for j, rows in result.prompt_logprobs.items()}
        self._landing = True

    @contextmanager
    def failing(self, where: str) -> Iterator[None]:
        """Keep the cause of a step that fails inside, until the executor is reset."""
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            self._failed = (where, type(cause).__name__, isinstance(error, ExecutorLost))
            raise

    @_safely
    def reset(self) -> None:
        """Record that all steps in flight failed."""
        self._landing, self._spans = False, None
        if self.run:
            self.write(recording_format.Reset(self.at, *self._failed))
            log.warning("the events before the failed step are recorded in %s", self.ring.path)
        self._failed = ("masks", "", False)

    @_safely
    def prefills_arrived(self, prefills: abc.Sequence[Prefill | str], vocab_size: int) -> None:
        """Record what decode engines ask of this one."""
        found = list[tuple[str, int, list[int] | None, int, str, int]]()
        for each in prefills:
            if isinstance(each, str):
                found.append((each, 0, None, -1, "", 0))
                continue
            valid = in_vocabulary(each.tokens, vocab_size)
            names = self.anonymizer.names(each.tokens, each.salt)[1] if valid else None
            salt = self.anonymizer.salt(each.salt)
            found.append((each.id, len(each.tokens), names, each.first, salt, each.priority))
        self.write(recording_format.PrefillsArrived(self.at, found))

    @_safely
    def prefill_asked(self, reason: str) -> None:
        """Record why no prefill engine could be asked."""
        self.write(recording_format.PrefillAsked(self.at, reason))

    @_safely
    def copy_started(self, kind: Copy, ticket: int, copies: Iterable[tuple[bytes, *tuple[int, ...]]]) -> None:
        """Record a copy of blocks, known by their keys."""
        name = self.anonymizer.name
        blocks = [(name(key), *places) for key, *places in copies]
        self.write(recording_format.CopyStarted(self.at, kind, ticket, blocks))

    @_safely
    def copies_ended(self, ended: abc.Sequence[CopyDone]) -> None:
        """Record what became of copies."""
        name = self.anonymizer.name
        copies = [(*each[:2], [(name(key), why) for key, why in each.failed.items()], *each[3:]) for each in ended]
        self.write(recording_format.CopiesEnded(self.at, copies))

    @_safely
    def crashed(self, error: Exception) -> None:
        """Record an error of the engine itself."""
        if self._landing:
            self._land([], [])
        self.write(recording_format.Crashed(self.at, type(error).__name__))

    # ---------------------------------------------------------------- observer
    # Submissions are recorded by `arrived`, failures by `reset`.

    @_safely
    def on_step(self, record: StepRecord) -> None:
        """Record a committed step, with the names of the blocks that it filled."""
        self.steps = step = self.steps + 1
        pages: list[tuple[int, int, int]] = []
        size = self.anonymizer.block_size
        for filling in self._due.pop(step, ()):
            if filling.due == step:
                arrival, tokens = filling.seq.arrival, filling.seq.tokens
                for end in range(filling.end, len(tokens) + 1, size):
                    filling.key = next_key(filling.key, tokens[end - size : end])
                    pages.append((arrival, end - 1, self.anonymizer.name(filling.key)))
                    filling.end = end + size
                self._arm(filling)
        for ended in record.ended:
            del self._filling[ended.id]
        stops = [(e.id, e.prompt_tokens + len(e.tokens) - 1) for e in record.ended if e.finish == "stop"]
        self._land(pages, stops)

    def on_end(self, ended: Completed) -> None:
        """Forget a request that ended outside a step."""
        self._filling.pop(ended.id, None)

    def _land(self, pages: list[tuple[int, int, int]], stops: list[tuple[str, int]]) -> None:
        self._landing = False
        self.write(recording_format.Landed(self.at, self._counts, pages, stops, self._errors, self._prompt_logprobs))

    def _arm(self, filling: _Filling) -> None:
        """Look again when its next block may be full: a step adds at most one token and its drafts.

        Not while it has no row, nor for its last token, which is never fed.
        """
        seq, end = filling.seq, filling.end
        if seq.row is None or end >= seq.max_length:
            return
        due = self.steps - (len(seq.tokens) - end) // (1 + self.scheduler.speculation.max_drafts)
        filling.due = due = max(due, self.steps + 1)
        self._due.setdefault(due, []).append(filling)


class RecordedClock:
    """Records the times that the engine reads while it decides, not those that others read."""

    def __init__(self, inner: Clock, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.deciding = False
        self._now = inner.now

    def now(self) -> float:
        """The inner clock's time."""
        now = self._now()
        if self.deciding:
            self.recorder.at.append(now)
        return now

    def sleep_until(self, when: float) -> None:
        """Sleep on the inner clock."""
        self.inner.sleep_until(when)


@dataclass(slots=True)
class RecordedHandle:
    """A step in flight; records its result or failure."""

    inner: StepHandle
    recorder: Recorder

    def sample(self, masks: abc.Sequence[abc.Sequence[Mask]]) -> None:
        """Sample with these masks."""
        with self.recorder.failing("masks"):
            self.inner.sample(masks)

    def is_done(self) -> bool:
        """Whether the result is there."""
        return self.inner.is_done()

    def result(self) -> Result:
        """Wait for the result."""
        with self.recorder.failing("result"):
            result = self.inner.result()
        self.recorder.finished(result)
        return result


class RecordedExecutor:
    """An executor that records plans, results and failures."""

    def __init__(self, inner: Executor, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.describe = inner.describe

    def launch(self, plan: Plan) -> StepHandle:
        """Record the plan, then launch it."""
        self.recorder.launched(plan)
        with self.recorder.failing("launch"):
            return RecordedHandle(self.inner.launch(plan), self.recorder)

    def reset(self) -> None:
        """Drop all steps in flight."""
        self.recorder.reset()
        self.inner.reset()

    def close(self) -> None:
        """Close the executor and the recording."""
        self.inner.close()
        self.recorder.ring.close()


class RecordedStore:
    """A store of K/V tiers; records the copies that start and end while the engine decides, not those at its close."""

    def __init__(self, inner: BlockStore, recorder: Recorder, clock: RecordedClock) -> None:
        self.inner, self.recorder, self.clock = inner, recorder, clock
        self.num_slots, self.block_bytes, self.max_files = inner.num_slots, inner.block_bytes, inner.max_files
        self.files, self.remove, self.wait = inner.files, inner.remove, inner.wait
        self.overwritten = inner.overwritten
        self.fileno, self.close = inner.fileno, inner.close

    def started(self, kind: Copy, ticket: int, copies: Iterable[tuple[bytes, *tuple[int, ...]]]) -> None:
        """Record a copy."""
        if self.clock.deciding:
            self.recorder.copy_started(kind, ticket, copies)

    def save(self, ticket: int, copies: abc.Sequence[tuple[bytes, int, int]], held: bool) -> None:
        """Record it, then copy to host memory."""
        self.started("save", ticket, copies)
        with self.recorder.failing("copy"):
            self.inner.save(ticket, copies, held)

    def load(self, ticket: int, copies: abc.Sequence[tuple[bytes, int, int]]) -> None:
        """Record it, then copy to the device."""
        self.started("load", ticket, copies)
        with self.recorder.failing("copy"):
            self.inner.load(ticket, copies)

    def read(self, ticket: int, copies: abc.Sequence[tuple[bytes, int]]) -> None:
        """Record it, then read files."""
        self.started("read", ticket, copies)
        self.inner.read(ticket, copies)

    def write(self, ticket: int, key: bytes, slot: int) -> None:
        """Record it, then write a file."""
        self.started("write", ticket, [(key, slot)])
        with self.recorder.failing("copy"):
            self.inner.write(ticket, key, slot)

    def poll(self) -> abc.Sequence[CopyDone]:
        """The copies that have ended."""
        ended = self.inner.poll()
        if ended and self.clock.deciding:
            self.recorder.copies_ended(ended)
        return ended


class RecordedPrefillClient:
    """Prefill engines; records whether one could be asked, and what was asked for."""

    def __init__(self, inner: PrefillClient, store: RecordedStore) -> None:
        self.inner, self.store = inner, store
        self.min_tokens, self.cancel, self.close = inner.min_tokens, inner.cancel, inner.close

    def unavailable(self) -> str:
        """Why no prefill engine can be asked now."""
        reason = self.inner.unavailable()
        if self.store.clock.deciding:
            self.store.recorder.prefill_asked(reason)
        return reason

    def receive(self, ticket: int, prefill: Prefill, copies: abc.Sequence[tuple[bytes, int]]) -> None:
        """Record it, then ask."""
        self.store.started("receive", ticket, copies)
        self.inner.receive(ticket, prefill, copies)


class RecordedPrefillServer:
    """Decode engines; records what they ask for, and what is sent."""

    def __init__(self, inner: PrefillServer, store: RecordedStore, vocab_size: int) -> None:
        self.inner, self.store, self.vocab_size = inner, store, vocab_size
        self.fail, self.done, self.drain, self.close = inner.fail, inner.done, inner.drain, inner.close

    def poll(self) -> abc.Sequence[Prefill | str]:
        """What decode engines ask for."""
        found = self.inner.poll()
        if found:
            self.store.recorder.prefills_arrived(found, self.vocab_size)
        return found

    def send(self, ticket: int, id: str, number: int, key: bytes, slot: int) -> None:
        """Record it, then send a block."""
        self.store.started("send", ticket, [(key, number, slot)])
        self.inner.send(ticket, id, number, key, slot)


def record_copies(offload: Offload, recorder: Recorder, clock: RecordedClock, vocab_size: int) -> None:
    """Record the copies of an engine's K/V tiers, if it has any."""
    if not isinstance(offload, KVOffload):
        return
    offload.store = store = RecordedStore(offload.store, recorder, clock)
    offload.prefill = RecordedPrefillClient(offload.prefill, store)
    if isinstance(offload, PrefillOffload):
        offload.server = RecordedPrefillServer(offload.server, store, vocab_size)


class RecordedEngine(Engine):
    """An engine whose decisions can be replayed from what `recorder` writes."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        recorder: Recorder,
        clock: Clock | None = None,
        observers: Iterable[Observer] = (),
        **rest: Any,
    ) -> None:
        self.recorder = recorder
        self._clock = RecordedClock(WallClock() if clock is None else clock, recorder)
        recorded, observers = RecordedExecutor(executor, recorder), (*observers, recorder)
        super().__init__(scheduler, recorded, clock=self._clock, observers=observers, **rest)
        recorder.attach(scheduler, self.lookahead)
        record_copies(scheduler.kv.offload, recorder, self._clock, self.description.vocab_size)
        self._begin()

    def step(self) -> list[RequestStepOutput]:
        """As `Engine.step`, recorded."""
        recorder, clock = self.recorder, self._clock
        if not recorder.on:
            return super().step()
        if self.lookahead != recorder.lookahead:
            recorder.lookahead = self.lookahead
            recorder.write(recording_format.LookaheadChanged(recorder.at, self.lookahead))
        before = recorder.frames
        clock.deciding = True
        try:
            out = super().step()
        except Exception as error:
            recorder.crashed(error)
            raise
        finally:
            clock.deciding = False
        if recorder.frames == before:
            recorder.write(recording_format.Idled(recorder.at))
        self._begin_if_full()
        return out

    def add(self, request: Request, constraint: Constraint = FREE) -> None:
        """As `Engine.add`, recorded."""
        incoming = self._clock.deciding  # it is added by a step, for another engine
        if not (self.recorder.run or incoming):
            self._begin()
        self._clock.deciding = self.recorder.on
        try:
            super().add(request, constraint)
        finally:
            self._clock.deciding = incoming
        self.recorder.arrived(request, self.scheduler.sequences[request.id], incoming)
        if not incoming:
            self._begin_if_full()

    def set_constraint(self, id: str, constraint: Constraint) -> None:
        """As `Engine.set_constraint`, recorded."""
        super().set_constraint(id, constraint)
        self.recorder.constraint_set(id)

    def abort(self, id: str, why: FinishReason = "abort") -> None:
        """As `Engine.abort`, recorded unless the engine calls it itself, at a deadline."""
        self._end_request(id, why, super().abort, why)

    def fail(self, id: str, error: QuireError) -> None:
        """As `Engine.fail`, recorded unless the engine calls it itself."""
        self._end_request(id, "error", super().fail, error)

    def abandon(self) -> None:
        """As `Engine.abandon`, recorded as the end of each request and of the recording: `add` begins another."""
        for id in list(self.scheduler.sequences):
            self.abort(id)
        self.recorder.end()
        super().abandon()

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`, recorded."""
        self.recorder.write(recording_format.PrefixCacheReset(self.recorder.at))
        self._clock.deciding = self.recorder.on
        try:
            super().reset_prefix_cache()
        finally:
            self._clock.deciding = False

    def _end_request(self, id: str, why: FinishReason, end: Callable[[str, Any], None], how: Any) -> None:
        if self._clock.deciding:
            end(id, how)
        elif id in self.scheduler.sequences:
            self._clock.deciding = True
            try:
                end(id, how)
            finally:
                self._clock.deciding = False
            self.recorder.write(recording_format.Left(self.recorder.at, id, why))

    def _begin_if_full(self) -> None:
        if self.recorder.ring.full and self.recorder.on:
            self._begin()

    def _begin(self) -> None:
        self.recorder.begin(self.clock.now(), self.description, self._state)

    def _state(self) -> dict[str, Any]:
        roots = {name: getattr(self, name) for name in ENGINE_STATE}
        return roots | {"inflight": [(planned, launched) for planned, launched, _ in self.inflight]}


def recorded(folder: Path, limit: int = 1 << 28) -> Callable[..., Engine]:
    """A constructor like `Engine`, of engines that are recorded in `folder`, which holds at most `limit` bytes.

    Raises InvalidConfig if the folder cannot be written to.
    """
    ring = Ring(folder, limit)
    return lambda *parts, **rest: RecordedEngine(*parts, recorder=Recorder(ring), **rest)
