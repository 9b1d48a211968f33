"""Replays a recording: its inputs through this code's engine, each plan compared with the recorded one.

No model, no torch, no waiting: the clock and the results are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.executor import Description
from quire.errors import ExecutorLost, InvalidConfig, InvalidRequest, StepFailed
from quire.observability import recording_format
from quire.observability.checkpoint import (
    CLASSES,
    CONSTRAINTS,
    ENGINE_STATE,
    MAX_STATE_TOKENS,
    Classes,
    anonymized_tokens,
    named_key,
    recorded_request,
    replayed_constraint,
    restore,
)
from quire.scheduler.kv_offload import Copy, CopyDone, KVOffload, Prefill
from quire.scheduler.kv_transfer import PrefillOffload
from quire.scheduler.plan import Mask, Plan, Result
from quire.scheduler.sequence import Decision
from quire.types import TokenLogprobs

_LARGE = 1 << 16
"""Tokens of a request from which on the recording's total is checked."""
_UNSEEN = TokenLogprobs(0, 0.0, 1)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where this code decides otherwise.

    step: the number of the step being planned or committed. what: in words. recorded, decided: both sides, as lines.
    """

    step: int
    what: str
    recorded: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)


class _Over(BaseException):
    """The recording ends here. Not an Exception: no engine may take it for a failing step."""


class _Damaged(BaseException):
    """The recording cannot be read any further."""


class _Diverged(BaseException):
    def __init__(self, what: str, recorded: list[str], decided: list[str]) -> None:
        self.what, self.recorded, self.decided = what, recorded, decided


class Script:
    """The frames of one recording in order, over all its segments, and the clock's readings between them."""

    def __init__(self, reader: recording_format.RecordingReader) -> None:
        began = reader.take()
        if not isinstance(began, recording_format.Began):
            raise InvalidConfig("there is no recording to replay")
        self.reader = reader
        self.began = self.last = began
        self.place = 0
        self._said: list[float] = []
        self._ahead = False
        self._now = began.clock

    @property
    def coming(self) -> recording_format.AnyFrame | None:
        """The next frame; None where the recording ends, or the next segment does not follow."""
        frame = self.reader.next
        while isinstance(frame, recording_format.Began):
            if (frame.run, frame.number) != (self.last.run, self.last.number + 1):
                return None
            self.last = frame
            self._read()
            frame = self.reader.next
        return frame

    def _read(self) -> None:
        try:
            self.reader.take()
        except InvalidConfig as error:
            raise _Damaged from error

    @property
    def next(self) -> recording_format.AnyFrame:
        """The next frame. Ends the replay where there is none."""
        frame = self.coming
        if frame is None:
            raise _Over
        return frame

    def take(self) -> recording_format.AnyFrame:
        """The next frame; the script moves past it."""
        frame = self.next
        if not self._ahead:
            self._said = frame.at[::-1]
        self._ahead = False
        self.place += 1
        self._read()
        return frame

    def now(self) -> float:
        """The clock's recorded reading; the same again where this code reads it more often."""
        if not self._said and not self._ahead:
            self._said, self._ahead = self.next.at[::-1], True
        if self._said:
            self._now = self._said.pop()
        return self._now

    def sleep_until(self, when: float) -> None:
        """A replay does not wait."""

    def leave(self) -> None:
        """Go on to the next recording."""
        while self.coming is not None:
            self._read()


class ScriptedHandle:
    """A step whose result is the recorded one."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        self.executor = executor

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Raises what was raised here, if anything was."""
        self.executor.fails("masks")

    def is_done(self) -> bool:
        """A replay does not wait."""
        return True

    def result(self) -> Result:
        """The recorded result."""
        return self.executor.result()


class ScriptedExecutor:
    """Compares plans with the recorded ones, and returns recorded results."""

    def __init__(self, script: Script, about: Description) -> None:
        self.script, self.about = script, about
        self.scheduler: Any = None
        self._spans: Any = ()

    def describe(self) -> Description:
        """As the recorded executor did, as far as decisions depend on it."""
        return self.about

    def fails(self, where: str) -> None:
        """Raises what was raised here, if anything was."""
        frame = self.script.coming
        if isinstance(frame, recording_format.Reset) and frame.where == where:
            raise (ExecutorLost if frame.lost else StepFailed)(frame.kind)

    def launch(self, plan: Plan) -> ScriptedHandle:
        """Compare the plan with the recorded one."""
        step, frame = self.scheduler.inflight[-1], self.script.next
        decided = step_summary(plan, [seq.request.id for seq in step.seqs], step.decisions)
        if not isinstance(frame, recording_format.Launched):
            raise _Diverged(f"it plans a step where {_said(frame)}", [], step_lines(decided))
        self._spans = frame.spans or self._spans
        recorded = StepSummary(frame.opened, frame.grown, self._spans, frame.masked, frame.drafts, frame.why)
        if recorded.plan != decided.plan:
            raise _Diverged("it plans another step", step_lines(recorded), step_lines(decided))
        self.script.take()
        self.fails("launch")
        return ScriptedHandle(self)

    def result(self) -> Result:
        """The recorded result of the oldest step, with tokens under their recorded names."""
        self.fails("result")
        frame = self.script.next
        if not isinstance(frame, recording_format.Landed):
            raise _Diverged(f"it waits for a step where {_said(frame)}", [], [])
        self.script.take()
        step = self.scheduler.inflight[0]
        try:
            if sum(frame.counts) + sum(frame.prompt_logprobs.values()) > recording_format.MAX_PROMPT_TOKENS:
                raise ValueError
            tokens = [[0] * count for count in frame.counts]
            place = {seq.arrival: j for j, seq in enumerate(step.seqs)} if frame.pages else {}
            for order, position, name in frame.pages:
                j = place[order]
                tokens[j][position - len(step.seqs[j].tokens)] = name
            for id, position in frame.stops:
                j = [seq.request.id for seq in step.seqs].index(id)
                tokens[j][position - len(step.seqs[j].tokens)] = 1
        except (KeyError, IndexError, ValueError):
            raise _Diverged("the recorded result is not what this step asked for", [], []) from None
        return Result(
            tokens,
            [[] for _ in step.masked_seqs],
            prompt_logprobs={j: [_UNSEEN] * count for j, count in frame.prompt_logprobs.items()},
            errors=dict.fromkeys(frame.errors, "it had an error of its own"),
        )

    def reset(self) -> None:
        """The recorded executor was reset here too."""
        frame = self.script.next
        if not isinstance(frame, recording_format.Reset):
            raise _Diverged(f"a step fails where {_said(frame)}", [], [])
        self.script.take()

    def close(self) -> None:
        """Nothing to free."""


class ScriptedCopies:
    """K/V tiers and other engines, as recorded: compares copies that start, and returns how recorded ones ended."""

    def __init__(self, executor: ScriptedExecutor, offload: KVOffload, about: dict[str, int]) -> None:
        self.executor, self.script, self.offload = executor, executor.script, offload
        self.num_slots, self.max_files, self.block_bytes = about["slots"], about["files"], about["block_bytes"]
        self.min_tokens = about["min_tokens"]
        offload.next_key = named_key
        offload.store = offload.prefill = self
        if isinstance(offload, PrefillOffload):
            offload.server = ScriptedPrefillServer(self)
        kv = executor.scheduler.kv
        offload.attach(kv.block_pool, kv.pins)

    def started(self, kind: Copy, ticket: int, copies: Iterable[tuple[bytes, *tuple[int, ...]]]) -> None:
        """Compare a copy with the recorded one."""
        decided = [(int.from_bytes(key, "little"), *places) for key, *places in copies]
        frame = self.script.next
        if not isinstance(frame, recording_format.CopyStarted):
            raise _Diverged(f"it starts to {kind} blocks where {_said(frame)}", [], copy_lines(kind, decided))
        if (frame.kind, frame.ticket, frame.blocks) != (kind, ticket, decided):
            raise _Diverged("it copies other blocks", copy_lines(frame.kind, frame.blocks), copy_lines(kind, decided))
        self.script.take()
        self.executor.fails("copy")

    def files(self) -> Sequence[bytes]:
        """The state has those that were there."""
        return ()

    def save(self, ticket: int, copies: Sequence[tuple[bytes, int, int]], held: bool) -> None:
        """Compare it with the recorded one."""
        self.started("save", ticket, copies)

    def overwritten(self, blocks: Sequence[int]) -> None:
        """Nothing is copied."""

    def load(self, ticket: int, copies: Sequence[tuple[bytes, int, int]]) -> None:
        """Compare it with the recorded one."""
        self.started("load", ticket, copies)

    def read(self, ticket: int, copies: Sequence[tuple[bytes, int]]) -> None:
        """Compare it with the recorded one."""
        self.started("read", ticket, copies)

    def write(self, ticket: int, key: bytes, slot: int) -> None:
        """Compare it with the recorded one."""
        self.started("write", ticket, [(key, slot)])

    def remove(self, keys: Sequence[bytes]) -> None:
        """There are no files."""

    def receive(self, ticket: int, prefill: Prefill, copies: Sequence[tuple[bytes, int]]) -> None:
        """Compare it with the recorded one."""
        self.started("receive", ticket, copies)

    def cancel(self, ticket: int) -> None:
        """The recording says how it ended."""

    def unavailable(self) -> str:
        """As recorded."""
        frame = self.script.next
        if not isinstance(frame, recording_format.PrefillAsked):
            raise _Diverged(f"it asks for a prefill engine where {_said(frame)}", [], [])
        self.script.take()
        return frame.reason

    def poll(self) -> Sequence[CopyDone]:
        """The recorded copies that have ended here."""
        frame = self.script.coming
        if not isinstance(frame, recording_format.CopiesEnded):
            return ()
        self.script.take()
        ended = list[CopyDone]()
        for kind, ticket, failed, seconds, peer in frame.copies:
            if ticket not in self.offload.pending or self.offload.pending[ticket].kind != kind:
                raise _Diverged(f"in the recording {kind} {ticket} ends, which was not started", [], [])
            ended.append(CopyDone(kind, ticket, {named_key(b"", [name]): why for name, why in failed}, seconds, peer))
        return ended

    def wait(self, seconds: float) -> None:
        """A replay does not wait."""

    def fileno(self) -> int:
        """Nothing is waited for."""
        return -1

    def close(self) -> None:
        """Nothing to free."""


class ScriptedPrefillServer:
    """What decode engines asked for, as recorded."""

    def __init__(self, copies: ScriptedCopies) -> None:
        self.copies, self.script = copies, copies.script

    def poll(self) -> Sequence[Prefill | str]:
        """The recorded requests that come here."""
        frame, found = self.script.coming, list[Prefill | str]()
        if not isinstance(frame, recording_format.PrefillsArrived):
            return found
        self.script.take()
        for id, count, names, first, salt, priority in frame.prefills:
            # Token ids that were out of range are out of range again.
            tokens = [-1] * count if names is None else anonymized_tokens(count, names, self.copies.offload.block_size)
            found.append(id if first < 0 else Prefill(id, tokens, first, salt, priority))
        return found

    def send(self, ticket: int, id: str, number: int, key: bytes, slot: int) -> None:
        """Compare it with the recorded one."""
        self.copies.started("send", ticket, [(key, number, slot)])

    def fail(self, id: str, reason: str) -> None:
        """There is no other engine."""

    def done(self, id: str) -> None:
        """There is no other engine."""

    def drain(self) -> None:
        """There is no other engine."""

    def close(self) -> None:
        """Nothing to free."""


def copy_lines(kind: str, blocks: Iterable[Sequence[int]]) -> list[str]:
    """A copy of blocks, a line each."""
    return [f"{kind:7} block {name:x}: {' '.join(map(str, places))}" for name, *places in blocks]


def _said(frame: recording_format.AnyFrame) -> str:
    return {
        "Launched": "the recording has another step planned",
        "Landed": "the recording waits for a step",
        "Reset": "in the recording the steps in flight failed",
        "Idled": "the recording has nothing to do",
        "Crashed": "the recorded engine broke",
        "CopyStarted": "the recording starts a copy of blocks",
        "CopiesEnded": "in the recording copies of blocks end",
        "PrefillAsked": "the recording asks for a prefill engine",
        "PrefillsArrived": "in the recording decode engines ask for prompts",
    }.get(type(frame).__name__, f"the recording goes on with {type(frame).__name__}")


@dataclass(slots=True)
class Replay:
    """The outcome. segments: how many were read. crash: the exception that ended the engine, where the recorded one
    ended too. under_way: the recording ends in the middle of a step."""

    engine: Engine
    began: recording_format.Began
    segments: int = 1
    divergence: Divergence | None = None
    crash: Exception | None = None
    under_way: bool = False


def replay(
    reader: recording_format.RecordingReader,
    observers: Iterable[Observer] = (),
    *,
    known: Classes = CLASSES,
    make: Callable[..., Engine] = Engine,
    prepare: Callable[[Engine, recording_format.Began], None] = lambda engine, began: None,
) -> Replay:
    """Replay the next recording of `reader`, which stands behind it afterwards.

    known, make: the classes and the engine to do it with. prepare: gives the engine what the recording could not hold.
    Raises InvalidConfig where there is nothing to begin with, or the recording is damaged.
    """
    script = Script(reader)
    engine = _engine(script, observers, known, make)
    prepare(engine, script.began)
    out = Replay(engine, script.began)
    try:
        _play(script, out)
        script.leave()
    except _Damaged as damaged:
        raise InvalidConfig(str(damaged.__cause__)) from damaged
    out.segments = script.last.number - script.began.number + 1
    return out


def _play(script: Script, out: Replay) -> None:
    engine = out.engine
    try:
        while script.coming is not None:
            _turn(engine, script)
    except _Over:
        out.under_way = True
    except _Diverged as departed:
        out.divergence = Divergence(_number(engine), departed.what, departed.recorded, departed.decided)
    except Exception as error:
        frame = script.coming
        if isinstance(frame, recording_format.Crashed) and frame.kind == type(error).__name__:
            out.crash = error
        else:
            said = [_said(frame)] if isinstance(frame, recording_format.Crashed) else []
            out.divergence = Divergence(_number(engine), f"the engine breaks: {type(error).__name__}: {error}", said)


def _number(engine: Engine) -> int:
    return engine.stats.num_steps + len(engine.scheduler.inflight)


def _turn(engine: Engine, script: Script) -> None:
    """Repeat one call of the engine."""
    frame = script.next
    if isinstance(frame, recording_format.Arrived):
        script.take()
        _check_size(engine, frame.tokens + frame.begun)
        fields = [getattr(frame, name) for name in frame.__struct_fields__[1:] if name not in ("constraint", "begun")]
        size = engine.scheduler.kv.prefix_cache.block_size
        fields[2] = frame.pages[: frame.tokens // size]
        constraint = CONSTRAINTS[frame.constraint]
        if frame.begun:
            constraint = replayed_constraint(frame.tokens, frame.begun, frame.pages, size)
        try:
            engine.add(recorded_request(fields, size), constraint)
        except InvalidRequest as refusal:
            raise _Diverged(f"it refuses request {frame.id}: {refusal}", [], []) from None
    elif isinstance(frame, recording_format.ConstraintSet):
        script.take()
        seq, size = engine.scheduler.sequences.get(frame.id), engine.scheduler.kv.prefix_cache.block_size
        prompt = 0 if seq is None else seq.prompt_length
        _check_size(engine, frame.begun)
        engine.set_constraint(frame.id, replayed_constraint(prompt, frame.begun, frame.pages, size))
    elif isinstance(frame, recording_format.Left):
        script.take()
        engine.abort(frame.id, frame.why)
    elif isinstance(frame, recording_format.PrefixCacheReset):
        script.take()
        engine.reset_prefix_cache()
    elif isinstance(frame, recording_format.LookaheadChanged):
        script.take()
        engine.lookahead = frame.lookahead
    else:
        _step(engine, script, frame)


def _check_size(engine: Engine, more: int) -> None:
    """Raises _Damaged where sequences with so many tokens more are larger than any engine's."""
    if more > _LARGE and more + sum(len(seq.tokens) for seq in engine.scheduler.sequences.values()) > MAX_STATE_TOKENS:
        raise _Damaged from InvalidConfig(f"the recording's sequences have more than {MAX_STATE_TOKENS} tokens")


def _step(engine: Engine, script: Script, frame: recording_format.AnyFrame) -> None:
    place = script.place
    engine.step()
    if script.place > place:
        return
    if not isinstance(frame, recording_format.Idled):
        recorded = []
        if isinstance(frame, recording_format.Launched):
            recorded = step_lines(
                StepSummary(frame.opened, frame.grown, frame.spans or (), frame.masked, frame.drafts, frame.why)
            )
        raise _Diverged(f"it is idle where {_said(frame)}", recorded, [])
    script.take()


def _engine(script: Script, observers: Iterable[Observer], known: Classes, make: Callable[..., Engine]) -> Engine:
    began = script.began
    roots = restore(began.state, known)
    try:
        scheduler = roots["scheduler"]
        about = began.about
        sizes = about["pages"], about["page_size"], about["rows"], about["max_model_len"]
        executor = ScriptedExecutor(script, Description(*sizes, vocab_size=1 << 64))
        executor.scheduler = scheduler
        if isinstance(offload := scheduler.kv.offload, KVOffload):
            ScriptedCopies(executor, offload, about)
        engine = make(scheduler, executor, clock=script, observers=observers, step_budget=roots["step_budget"], keep=0)
        for name in ENGINE_STATE:
            setattr(engine, name, roots[name])
        engine.inflight.extend((*times, ScriptedHandle(executor)) for times in roots["inflight"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"the recording does not start with an engine's state: {error!r}") from error
    return engine


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A plan and its decisions, as recordings hold them."""

    opened: Any
    grown: Any
    spans: Any
    masked: Any
    drafts: Any
    why: Sequence[Decision]

    @property
    def plan(self) -> tuple[Any, ...]:
        """What is compared: all but the decisions."""
        return (list(self.opened), self.grown, self.spans, self.masked, self.drafts)


def step_summary(plan: Plan, ids: Iterable[str], decisions: Sequence[Decision]) -> StepSummary:
    """As the recorder writes it. ids: the request of each span."""
    whose = {span.row: id for id, span in zip(ids, plan.spans, strict=True)}
    opened = [
        (whose[o.row], o.row, len(o.tokens), o.num_computed, o.prompt_length, o.max_length) for o in plan.new_sequences
    ]
    return StepSummary(opened, plan.new_blocks, plan.spans, plan.masked_spans, plan.num_drafts, decisions)


def step_lines(summary: StepSummary, ids: Sequence[str] = ()) -> list[str]:
    """A plan and its decisions, a line for each row that opens, feeds or grows. ids: the request of each span."""
    out = [
        f"open    row {row}: {id}, {tokens} tokens, {start} of them cached, at most {limit}"
        for id, row, tokens, start, _, limit in summary.opened
    ]
    drafts = summary.drafts or (0,) * len(summary.spans)
    for j, ((row, n, rows, logits), draft) in enumerate(zip(summary.spans, drafts, strict=False)):
        more = f", drafts {draft}" * bool(draft) + ", masked" * (j in summary.masked)
        more += f", logits {logits}" * (logits != rows) + (f"  {ids[j]}" if ids else "")
        out.append(f"feed    row {row}: {n} tokens, sample {rows}{more}")
    out += [f"pages   row {row}: {' '.join(map(str, pages))}" for row, pages in summary.grown]
    return out + [f"because {decision_text(decision)}" for decision in summary.why]


def decision_text(decision: Sequence[Any]) -> str:
    """A decision as a sentence."""
    what, id, by, n = decision
    return {
        "opened": f"{id} gets a row" + f", {n} tokens found in the prefix cache" * bool(n),
        "follows": f"{id} waits for the first {n} tokens that {by} is computing",
        "waits": f"{id} waits for {by}",
        "preempted": f"{id} is preempted for {by}, with {n} tokens computed",
        "sat-out": f"{id} skips this step: its {by} will be freed by a step in flight",
    }.get(what, f"{what} {id} {by} {n}")
