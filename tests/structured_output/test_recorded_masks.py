"""What grammars allow step by step, how they are refused, compiled and timed, as written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.scheduler.constraint import MaskRequest
from quire.structured_output.compiler import GrammarCompiler, _attempt
from quire.structured_output.llguidance import LlguidanceCompiler, Matcher, ParallelMasks, TimeBudget
from quire.types import Request, SamplingParams, StructuredOutputsParams
from tests.calls import Calls
from tests.expected import check
from tests.structured_output.little import allowed, compiler, tokenizer, tokens_of

EXPECTED = Path(__file__).parent / "expected"
OBJECT = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})

STRUCTURES: tuple[dict[str, Any], ...] = (
    {"regex": "a[bc]{2,3}1?"},
    {"choice": ("ab", "aa1", "true")},
    {"json": OBJECT},
    {"json": OBJECT, "disable_any_whitespace": True},
    {"json": OBJECT, "whitespace_pattern": "[ ]{2}"},
    {"json_object": True},
    {"grammar": 'start: "a" (B | "1")*\nB: /b+/'},
    {"regex": "ab?", "thoughts": "maybe"},
    {"regex": "ab?", "thoughts": "open"},
    {"choice": ("a", "b"), "thoughts": "open"},
    {"json": '{"type": "nonsense"}'},
    {"json": '{"not": {}}'},
    {"regex": "(a"},
    {"regex": "[^a]{0}x{3}Q"},
    {"grammar": "start: missing"},
    {"grammar": "start: )("},
    {"choice": ("",)},
    {"json": '{"oneOf": [{"type": "integer"}, {"minimum": 5}]}'},
    {"json": '{"type": "string", "pattern": "^é+$"}'},
)


def structure(given: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(param="the_field", **given)


def masks(matcher: Matcher, output: Sequence[int], drafts: Sequence[int] = ()) -> str:
    return str([sorted(allowed(mask)) if mask else mask for mask in matcher.masks(output, drafts)])


def walked(given: dict[str, Any]) -> list[str]:
    """The masks along two answers; and over drafts, the last of which ends the text."""
    lines = ["", str(given)]
    try:
        make = compiler()(structure(given))
    except InvalidRequest as error:
        return [*lines, f"refused: {error} ({error.param}, {error.code})"]
    for pick in (0, -1):
        matcher, output = make(), list[int]()
        for _ in range(9):
            known = sorted(allowed(matcher.masks(output, ())[0]))
            lines.append(f"  after {output}: {known} {matcher.why()}".rstrip())
            if known in ([], [0]):
                break
            output.append([token for token in known if token][pick])
        lines.append(f"  over drafts: {masks(make(), (), [*output[:3], 0, 5])}")
        lines.append(f"  not allowed: {masks(matcher, [*output, 59])} {matcher.why()}")
        lines.append(f"  back: {masks(matcher, output[:1])} {matcher.mask_bytes}")
    return lines


def test_what_grammars_allow_is_as_written_down() -> None:
    check(EXPECTED / "allowed.txt", "\n".join(line for given in STRUCTURES for line in walked(given)))


class Ticks:
    """A clock that moves by `step` each time it is read."""

    def __init__(self, *steps: float) -> None:
        self.now, self.steps = 0.0, list(steps)

    def __call__(self) -> float:
        self.now += self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return self.now


def test_what_masks_may_cost_is_as_written_down() -> None:
    lines = []
    make = compiler()(structure({"regex": "[ab]*"}))
    for once, each, step in ((0.5, 0.001, 0.1), (0.5, 0.2, 0.25), (1.0, 0.0, 0.125), (0.0, 0.0, 0.0)):
        matcher = make()
        matcher._budget = TimeBudget(once, each, Ticks(step))
        output = list[int]()
        for _ in range(9):
            lines.append(f"{once} {each} {step}: {len(output)} {masks(matcher, output)} {matcher.why()}".rstrip())
            output.append(tokens_of("a")[0])
    for step in (0.0999, 0.1001):
        try:
            LlguidanceCompiler(tokenizer, clock=Ticks(step))(structure({"regex": "[ab]*"}))
            lines.append(f"first mask in {step}: taken")
        except InvalidRequest as error:
            lines.append(f"first mask in {step}: {error}")
    check(EXPECTED / "costs.txt", "\n".join(lines))


def test_masks_of_steps_are_made_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, by threads, or one by one: by how long the steps before took."""
    lines = []
    make = compiler()(structure({"regex": "[ab]*1"}))
    grammars = [make(), compiler()(structure({"choice": ("ab", "b")}))(), make()]
    a, b, one = (tokens_of(text)[0] for text in ("a", "b", "1"))
    slow, quick = 0.01, 1e-5
    steps: list[tuple[float, list[list[int]], list[list[int]]]] = [
        (quick, [[], [], []], [[], [], []]),
        (quick, [[a], [a], [b]], [[b], [b], [one, 0, b]]),
        (slow, [[a, b], [a, b], [b, one]], [[], [0], [5]]),
        (slow, [[a, b], [a, b], [b, one]], [[], [], []]),
        (slow, [[a, b], [59], [b, one, 0]], [[one, a], [], []]),
        (quick, [[a, b], [a], [b]], [[], [], []]),
        (quick, [[], [], []], [[], [], []]),
    ]
    ticks, cpu = Ticks(quick), Ticks(quick)
    together = ParallelMasks(2, clock=ticks, cpu_clock=cpu)
    for step, outputs, drafts in steps * 2:
        ticks.steps = cpu.steps = [step]
        asked: list[MaskRequest] = [
            (grammar, [7, *out], 1, draft) for grammar, out, draft in zip(grammars, outputs, drafts, strict=True)
        ]
        made = together(asked)
        lines.append(f"{step} {outputs} {drafts}: {type(made).__name__}")
        for span in made:
            lines.append(f"  {[sorted(allowed(bytes(mask))) if mask is not None else None for mask in span]}")
        lines.append(f"  {together._measure} {together._slow} {together._pause} {together._wait}")
        lines.append(f"  {[grammar.why() for grammar in grammars]}")
    check(EXPECTED / "steps.txt", "\n".join(lines))


def asked(id: str, text: str, param: str) -> Request:
    form = StructuredOutputsParams(regex=text, param=param)
    return Request(id=id, prompt=(1,), max_new_tokens=1, sampling=SamplingParams(structured_outputs=form))


def test_grammars_are_compiled_and_kept_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without threads: the worker is run by hand."""
    calls, now = Calls(), [0.0]

    def compile(form: StructuredOutputsParams) -> Any:
        text = form.kind[1]
        calls.lines.append(f"  compile {text}")
        if "!" in text:
            raise InvalidRequest(f"{form.param}: not {text}", param=form.param, code="bad")
        if "?" in text:
            raise ValueError("secret")
        return lambda: f"grammar of {text}"

    monkeypatch.setattr(GrammarCompiler, "_start_worker", lambda self: calls.lines.append("  a worker is started"))
    it = GrammarCompiler(
        compile, workers=2, spare_workers=1, timeout=5.0, max_entries=3, max_chars=12, clock=lambda: now[0]
    )

    def worked(start_only: bool = False) -> None:
        job = it._queue.get_nowait()
        assert job is not None
        if job.timed_out:
            calls.lines.append("  one that is too late is left out")
            return
        job.started = True
        if not start_only:
            it._done.append((job, _attempt(compile, job.structure)))
            it._wakeup[1].send(b"\0")

    def state() -> None:
        calls.lines.append(
            f"  {[form.kind[1] for form in it._cache]} chars {it._cached_chars} jobs {len(it._jobs)} "
            f"timeout {it.timeout()} idle {it._idle} fds {len(it.wait_fds())}"
        )

    def told(title: str, work: Any) -> None:
        calls.lines.append(title)
        try:
            found = work()
            for one in found if isinstance(found, list) else [found]:
                pair = one if isinstance(one, tuple) else ("", one)
                calls.lines.append(
                    f"  {pair[0]} {type(pair[1]).__name__} {pair[1] if 'Pending' not in type(pair[1]).__name__ else ''}"
                )
        except InvalidRequest as error:
            calls.lines.append(f"  {error} ({error.param}, {error.code})")
        state()

    told("a asks", lambda: it.constraint_for(asked("a", "one", "x")))
    now[0] = 1.0
    told("b asks for the same", lambda: it.constraint_for(asked("b", "one", "y")))
    told("c is wrong", lambda: it.constraint_for(asked("c", "no!", "x")))
    told("d breaks", lambda: it.constraint_for(asked("d", "b?", "x")))
    told("nothing yet", it.poll)
    worked()
    worked()
    told("two are ready", it.poll)
    told("b asks again", lambda: it.constraint_for(asked("b", "one", "y")))
    told("c asks again", lambda: it.constraint_for(asked("e", "no!", "other")))
    worked(start_only=True)
    now[0] = 5.999
    told("in time", it.poll)
    now[0] = 6.0
    told("too late", it.poll)
    told("at once", lambda: it.get_or_compile(asked("f", "sixsix", "x")))
    told("at once again", lambda: it.get_or_compile(asked("f", "sixsix", "x")))
    told("at once, wrong", lambda: it.get_or_compile(asked("f", "n!", "z")))
    told("at once, broken", lambda: it.get_or_compile(asked("f", "b?", "z")))
    for text in ("x", "y", "one", "z", "long" * 9):
        told(f"more: {text}", lambda text=text: it.get_or_compile(asked("g", text, "x")))
    told("late twice", lambda: it.constraint_for(asked("h", "h", "x")))
    worked(start_only=True)
    told("late thrice", lambda: it.constraint_for(asked("i", "i", "x")))
    now[0] = 20.0
    told("no worker is left to spare", it.poll)
    worked()
    it.warm_up()
    state()
    it.close()
    check(EXPECTED / "compilations.txt", "\n".join(calls.lines))
