"""A recording again: its inputs through the engine of this very code, each plan compared with the one recorded.

No model, no torch, no waiting: the clock says what it said, steps bring home what they brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.plan import Mask, Plan, Result
from quire.core.step import Decision
from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.executor import Description
from quire.errors import ExecutorLost, InvalidConfig, InvalidRequest, StepFailed
from quire.observe import tape
from quire.observe.checkpoint import CLASSES, CONSTRAINTS, GIVEN, STATE, Classes, request, restore
from quire.values import TokenLogprobs

_UNSEEN = TokenLogprobs(0, 0.0, 1)


@dataclass(frozen=True, slots=True)
class Departure:
    """Where this code decides otherwise. step: the number of the step being planned or committed. what: in words.

    recorded, decided: both sides, as lines.
    """

    step: int
    what: str
    recorded: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)


class _Over(BaseException):
    """The recording ends here. Not an Exception: no engine may take it for a failing step."""


class _Departed(BaseException):
    def __init__(self, what: str, recorded: list[str], decided: list[str]) -> None:
        self.what, self.recorded, self.decided = what, recorded, decided


class Script:
    """The frames of a recording in order, and what the clock said between them."""

    def __init__(self, frames: Sequence[tape.AnyFrame], start: float) -> None:
        self.frames, self.place = frames, 0
        self._said: list[float] = []
        self._ahead = False
        self._last = start

    @property
    def next(self) -> tape.AnyFrame:
        if self.place >= len(self.frames):
            raise _Over
        return self.frames[self.place]

    def take(self) -> tape.AnyFrame:
        """The next frame, done with."""
        frame = self.next
        if not self._ahead:
            self._said = frame.at[::-1]
        self._ahead = False
        self.place += 1
        return frame

    def now(self) -> float:
        """What the clock said; the same again where this code looks more often."""
        if not self._said and not self._ahead:
            self._said, self._ahead = self.next.at[::-1], True
        if self._said:
            self._last = self._said.pop()
        return self._last

    def sleep_until(self, when: float) -> None:
        """Nobody waits in a replay."""


class ScriptedHandle:
    def __init__(self, executor: ScriptedExecutor) -> None:
        self.executor = executor

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        self.executor.fails("masks")

    def result(self) -> Result:
        return self.executor.result()


class ScriptedExecutor:
    """Compares the plans it is given with those recorded, and brings home what came home."""

    def __init__(self, script: Script, about: Description) -> None:
        self.script, self.about = script, about
        self.scheduler: Any = None
        self._spans: Any = ()

    def describe(self) -> Description:
        return self.about

    def fails(self, where: str) -> None:
        """Raises what was raised here, if anything was."""
        script = self.script
        frame = script.frames[script.place] if script.place < len(script.frames) else None
        if isinstance(frame, tape.Reset) and frame.where == where:
            raise (ExecutorLost if frame.lost else StepFailed)(frame.kind)

    def launch(self, plan: Plan) -> ScriptedHandle:
        step, frame = self.scheduler.flight[-1], self.script.next
        decided = told(plan, [seq.request.id for seq in step.seqs], step.decisions)
        if not isinstance(frame, tape.Launched):
            raise _Departed(f"it plans a step where {_said(frame)}", [], lines(decided))
        self._spans = frame.spans or self._spans
        recorded = Told(frame.opened, frame.grown, self._spans, frame.masked, frame.drafts, frame.why)
        if recorded.plan != decided.plan:
            raise _Departed("it plans another step", lines(recorded), lines(decided))
        self.script.take()
        self.fails("launch")
        return ScriptedHandle(self)

    def result(self) -> Result:
        self.fails("result")
        frame = self.script.next
        if not isinstance(frame, tape.Landed):
            raise _Departed(f"it waits for a step to come home where {_said(frame)}", [], [])
        self.script.take()
        step = self.scheduler.flight[0]
        tokens = [[0] * count for count in frame.counts]
        try:
            place = {seq.order: j for j, seq in enumerate(step.seqs)} if frame.pages else {}
            for order, position, name in frame.pages:
                j = place[order]
                tokens[j][position - len(step.seqs[j].tokens)] = name
            for id, position in frame.stops:
                j = [seq.request.id for seq in step.seqs].index(id)
                tokens[j][position - len(step.seqs[j].tokens)] = 1
        except (KeyError, IndexError, ValueError):
            raise _Departed("what came home is not what this step asked for", [], []) from None
        return Result(
            tokens,
            [[] for _ in step.late],
            prompt_logprobs={j: [_UNSEEN] * count for j, count in frame.told.items()},
            errors=dict.fromkeys(frame.errors, "it had an error of its own"),
        )

    def reset(self) -> None:
        frame = self.script.next
        if not isinstance(frame, tape.Reset):
            raise _Departed(f"a step fails where {_said(frame)}", [], [])
        self.script.take()

    def close(self) -> None:
        """There is nothing to give back."""


@dataclass(frozen=True, slots=True)
class Told:
    """A plan and why, as recordings have them."""

    opened: Any
    grown: Any
    spans: Any
    masked: Any
    drafts: Any
    why: Sequence[Decision]

    @property
    def plan(self) -> tuple[Any, ...]:
        return (list(self.opened), self.grown, self.spans, self.masked, self.drafts)


def told(plan: Plan, ids: Iterable[str], decisions: Sequence[Decision]) -> Told:
    """As the recorder writes it. ids: whose spans the plan's are."""
    whose = {span.row: id for id, span in zip(ids, plan.spans, strict=True)}
    opened = [(whose[o.row], o.row, len(o.tokens), o.start, o.prompt, o.limit) for o in plan.opened]
    return Told(opened, plan.grown, plan.spans, plan.masked, plan.drafts, decisions)


def lines(told: Told) -> list[str]:
    """A plan and why it was made so, a line for each row that opens, feeds or grows."""
    out = [
        f"open    row {row}: {id}, {tokens} tokens, {start} of them cached, at most {limit}"
        for id, row, tokens, start, _, limit in told.opened
    ]
    drafts = told.drafts or (0,) * len(told.spans)
    for j, ((row, n, rows, logits), draft) in enumerate(zip(told.spans, drafts, strict=False)):
        more = f", drafts {draft}" * bool(draft) + ", masked" * (j in told.masked)
        out.append(f"feed    row {row}: {n} tokens, sample {rows}{more}" + f", logits {logits}" * (logits != rows))
    out += [f"pages   row {row}: {' '.join(map(str, pages))}" for row, pages in told.grown]
    return out + [f"because {why(decision)}" for decision in told.why]


def why(decision: Sequence[Any]) -> str:
    """A decision as a sentence."""
    what, id, by, n = decision
    return {
        "opened": f"{id} gets a row" + f", {n} tokens found in the prefix cache" * bool(n),
        "follows": f"{id} waits for the first {n} tokens that {by} is computing",
        "waits": f"{id} waits for {by}",
        "preempted": f"{id} is preempted for {by}, with {n} tokens computed",
        "sat-out": f"{id} sits this step out: its {by} are on their way home",
    }.get(what, f"{what} {id} {by} {n}")


def _said(frame: tape.AnyFrame) -> str:
    return {
        "Launched": "the recording has another step planned",
        "Landed": "the recording waits for a step to come home",
        "Reset": "in the recording the steps in flight failed",
        "Idled": "the recording has nothing to do",
        "Crashed": "the recorded engine broke",
    }.get(type(frame).__name__, f"the recording goes on with {type(frame).__name__}")


@dataclass(slots=True)
class Replay:
    """What came of it. crash: what the engine broke with, where the recorded one broke too. under_way: the recording
    ends in the middle of a step."""

    engine: Engine
    began: tape.Began
    departure: Departure | None = None
    crash: Exception | None = None
    under_way: bool = False


def replay(
    segments: Sequence[tape.Segment],
    observers: Iterable[Observer] = (),
    *,
    known: Classes = CLASSES,
    make: Callable[..., Engine] = Engine,
    prepare: Callable[[Engine], None] = lambda engine: None,
) -> Replay:
    """Decide everything again. segments: of one recording, one after another.

    known, make: the code to do it with. prepare: gives the engine what the recording could not hold. Raises
    InvalidConfig where there is nothing to begin with.
    """
    began = segments[0].began
    script = Script([frame for segment in segments for frame in segment.frames], began.clock)
    engine = _engine(began, script, observers, known, make)
    prepare(engine)
    out = Replay(engine, began)
    try:
        while script.place < len(script.frames):
            _turn(engine, script)
    except _Over:
        out.under_way = True
    except _Departed as departed:
        out.departure = Departure(_number(engine), departed.what, departed.recorded, departed.decided)
    except Exception as error:
        frame = script.frames[script.place] if script.place < len(script.frames) else None
        if isinstance(frame, tape.Crashed) and frame.kind == type(error).__name__:
            out.crash = error
        else:
            said = [_said(frame)] if isinstance(frame, tape.Crashed) else []
            out.departure = Departure(_number(engine), f"the engine breaks: {type(error).__name__}: {error}", said)
    return out


def _number(engine: Engine) -> int:
    return engine.ledger.steps + len(engine.scheduler.flight)


def _turn(engine: Engine, script: Script) -> None:
    """One thing that was done with the engine."""
    frame = script.next
    if isinstance(frame, tape.Arrived):
        script.take()
        told = [getattr(frame, name) for name in frame.__struct_fields__[1:-1]]
        asked = request(told, engine.scheduler.kv.reuse.every)
        try:
            engine.add(asked, CONSTRAINTS[frame.constraint])
        except InvalidRequest as refusal:
            raise _Departed(f"it refuses request {frame.id}: {refusal}", [], []) from None
    elif isinstance(frame, tape.Provided):
        script.take()
        engine.provide(frame.id, GIVEN)
    elif isinstance(frame, tape.Left):
        script.take()
        engine.abort(frame.id, frame.why)
    elif isinstance(frame, tape.Deepened):
        script.take()
        engine.depth = frame.depth
    else:
        _step(engine, script, frame)


def _step(engine: Engine, script: Script, frame: tape.AnyFrame) -> None:
    place = script.place
    engine.step()
    if script.place > place:
        return
    if not isinstance(frame, tape.Idled):
        recorded = []
        if isinstance(frame, tape.Launched):
            recorded = lines(Told(frame.opened, frame.grown, frame.spans or (), frame.masked, frame.drafts, frame.why))
        raise _Departed(f"it has nothing to do where {_said(frame)}", recorded, [])
    script.take()


def _engine(
    began: tape.Began, script: Script, observers: Iterable[Observer], known: Classes, make: Callable[..., Engine]
) -> Engine:
    roots = restore(began.state, known)
    try:
        scheduler = roots["scheduler"]
        about = began.about
        sizes = about["pages"], about["page_size"], about["rows"], about["max_model_len"]
        executor = ScriptedExecutor(script, Description(*sizes, vocab_size=1 << 64))
        executor.scheduler = scheduler
        engine = make(scheduler, executor, clock=script, observers=observers, pacer=roots["pacer"], keep=0)
        for name in STATE:
            setattr(engine, name, roots[name])
        engine.flight.extend((*times, ScriptedHandle(executor)) for times in roots["flight"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"the recording begins with no state of an engine: {error!r}") from error
    return engine
