"""A recording decides again what was decided, and says where changed code departs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quire.cli import main
from quire.engine.engine import Engine
from quire.engine.timing import LatencyController, PlanDelay, VirtualClock
from quire.executors.synthetic import SyntheticHandle
from quire.observability import recording_format
from quire.observability.checkpoint import CLASSES
from quire.observability.recorder import RecordedEngine, Recorder, recorded
from quire.observability.recording_format import Ring
from quire.scheduler.block_pool import RadixPrefixCache
from quire.scheduler.constraint import PENDING
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.kv_offload import KVOffload
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import AdaptiveDrafts
from quire.scheduler.step_time import StepCost, StepTimeModel
from quire.sim.replay import replay
from quire.sim.run import SimConfig, simulate
from quire.sim.workload import uniform
from quire.types import UNLIMITED, Request
from tests.hash_model import HashDevice
from tests.lattice import AXES, Begun, CoreClasses, Drawn, Run, sampled
from tests.mutants import BUGS, plant

SAMPLE = sampled(random.Random(5), 40)


class Short(Ring):
    """Segments of so many frames."""

    def __init__(self, folder: Path, frames: int) -> None:
        super().__init__(folder, 1 << 26)
        self.size, self.frames, self.written = 1 << 16, frames, 0

    @property
    def full(self) -> bool:
        return self.written >= self.frames

    def begin(self, first: bytes) -> None:
        self.written = 0
        super().begin(first)

    def write(self, frame: bytes) -> None:
        self.written += 1
        super().write(frame)


def record(folder: Path, combo: dict[str, Any], frames: int = UNLIMITED) -> Run:
    """One combination of the lattice, recorded in segments of so many frames."""
    ring = Short(folder, frames)
    recorder = Recorder(ring)
    run = Run(CoreClasses(Engine=partial(RecordedEngine, recorder=recorder)), combo)
    run.drive()
    ring.close()
    assert recorder.on
    return run


def as_drawn(combo: dict[str, Any]) -> Callable[[Engine, recording_format.Began], None]:
    """The lattice's own speculation, which no recording can hold."""

    def prepare(engine: Engine, began: recording_format.Began) -> None:
        if combo["drafts"] < 0:
            engine.scheduler.speculation = Drawn(combo["drafts"], random.Random(7))

    return prepare


def named(combo: dict[str, Any]) -> str:
    return "-".join(str(value) for value in combo.values())


def test_the_sample_has_every_value_of_every_axis() -> None:
    for axis, values in AXES.items():
        assert {combo[axis] for combo in SAMPLE} == set(values)


@pytest.mark.parametrize("combo", SAMPLE, ids=named)
def test_every_plan_of_the_lattice_is_made_again(tmp_path: Path, combo: dict[str, Any]) -> None:
    run = record(tmp_path, combo)
    again = replay(recording_format.RecordingReader([tmp_path]), prepare=as_drawn(combo))
    assert again.divergence is None and not again.under_way
    assert again.engine.stats.num_steps == run.eng.stats.num_steps and again.engine.failures == run.eng.failures
    assert again.engine.gauges() == run.eng.gauges()


def begins(combo: dict[str, Any]) -> bool:
    return isinstance(Run(CoreClasses(), combo).constraint, Begun)


def test_plans_of_answers_with_a_known_beginning_are_made_again(tmp_path: Path) -> None:
    """Also those that find the blocks of other answers' beginnings."""
    cases = [combo for combo in sampled(random.Random(5), 60, {**AXES, "reuse": (True,)}) if begins(combo)]
    assert len(cases) > 5
    for i, combo in enumerate(cases):
        run = record(tmp_path / str(i), combo)
        again = replay(recording_format.RecordingReader([tmp_path / str(i)]), prepare=as_drawn(combo))
        assert again.divergence is None and again.engine.gauges() == run.eng.gauges()


@pytest.mark.parametrize("late", [False, True])
def test_blocks_of_a_known_beginning_are_found_in_a_replay_too(tmp_path: Path, late: bool) -> None:
    """late: the constraint is compiled beside the engine."""
    ring = Short(tmp_path, UNLIMITED)
    scheduler = Scheduler(KVCacheManager(60, 4, RadixPrefixCache(4)), rows=8)
    engine = RecordedEngine(scheduler, HashDevice(60, 4), recorder=Recorder(ring), lookahead=1, clock=VirtualClock())
    for id, last in (("a", 5), ("b", 5), ("c", 4)):
        engine.add(Request(id=id, prompt=(9, 8, 7, 6, last), max_new_tokens=9), PENDING if late else Begun())
        if late:
            engine.step()
            engine.set_constraint(id, Begun())
        while engine.has_pending_work:
            engine.step()
    assert engine.stats.num_cached_tokens == 5 + 4
    ring.close()
    again = replay(recording_format.RecordingReader([tmp_path]))
    assert again.divergence is None and again.engine.stats.num_cached_tokens == 9


@pytest.mark.parametrize("combo", [c for c in SAMPLE if c["drafts"] >= 0][:8], ids=named)
def test_a_replay_can_begin_at_every_segment(tmp_path: Path, combo: dict[str, Any]) -> None:
    run = record(tmp_path, combo, frames=40)
    segments = sorted(tmp_path.iterdir())
    assert len(segments) > 2
    for first in range(len(segments)):
        again = replay(recording_format.RecordingReader(segments[first:]))
        assert again.segments == len(segments) - first and again.began.number == first
        assert again.divergence is None and again.engine.stats.num_steps == run.eng.stats.num_steps
        assert again.engine.gauges() == run.eng.gauges()


TIERS = [sizes for sizes in AXES["tiers"] if sizes]


def tiered(rng: random.Random, sizes: tuple[int, ...]) -> dict[str, Any]:
    """A combination whose blocks leave the device and come back."""
    [combo] = sampled(rng, 1)
    return combo | {"reuse": True, "snapshots": None, "tiers": sizes, "tight": rng.choice((1, 2)), "size": 1}


def check_every_segment(folder: Path, combo: dict[str, Any], every: int) -> None:
    """A replay can begin at each of these segments, and ends with the same blocks on the same tiers."""
    run = record(folder, combo, frames=100)
    files = sorted(folder.iterdir())
    for first in range(0, 1 if combo["drafts"] < 0 else len(files), every):
        again = replay(recording_format.RecordingReader(files[first:]), prepare=as_drawn(combo))
        assert again.divergence is None, (combo, first, again.divergence)
        assert again.engine.gauges() == run.eng.gauges()
        was, now = run.sch.kv.offload.stats, again.engine.scheduler.kv.offload.stats
        assert (now.num_hit, now.num_declined) == (was.num_hit, was.num_declined)
        assert (now.evicted, now.prefills.keys()) == (was.evicted, was.prefills.keys())


@pytest.mark.parametrize("sizes", TIERS, ids=str)
def test_copies_between_tiers_are_made_again_from_every_segment(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    rng = random.Random(f"tiers {sizes}")
    for i in range(2):
        check_every_segment(tmp_path / str(i), tiered(rng, sizes), 4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_copies_of_many_lattice_runs_are_made_again(tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"many tiers {seed}")
    for i in range(100):
        check_every_segment(tmp_path / str(i), tiered(rng, rng.choice(TIERS)), 2)


def test_a_store_that_chooses_other_blocks_departs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, COMBO | {"tiers": (4, 6)})
    monkeypatch.setattr(KVOffload, "_take_slot", lambda self: None)
    again = replay(recording_format.RecordingReader([tmp_path]))
    assert again.divergence is not None and "copy of blocks" in again.divergence.what


def tight(folder: Path, make: Callable[..., Engine] | None = None) -> Engine:
    """Forty requests in too few pages, recorded."""
    sizes = {"pages": 12, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "chunk": 16}
    config = SimConfig(**sizes, pressure_policy="preempt", cost=StepCost(0.01))  # type: ignore[arg-type]
    engine = config.build(VirtualClock(), make=make or recorded(folder))
    simulate(engine, uniform(40, prompt=(4, 24), new=(4, 16), shared=8, rate=40.0))
    engine.close()
    return engine


def shown(*args: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["replay", *map(str, args)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done


def report(*args: str | Path, code: int = 0) -> dict[str, Any]:
    """The only recording's report."""
    found = json.loads(shown(*args, "--json", code=code).output)
    [recording] = found["recordings"]
    assert recording["same"] is found["same"] is (code == 0)
    return dict(recording)


def test_replay_finds_the_first_step_at_which_a_changed_scheduler_departs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight(tmp_path)
    steps = report(tmp_path)["preemptions"]["each"]
    contested = next(each["step"] for each in steps if each["request"] != each["for"])

    def the_sequence_itself(self: Scheduler, seq: Any, i: int) -> Any:
        return seq

    monkeypatch.setattr(Scheduler, "_choose_victim", the_sequence_itself)
    said = shown(tmp_path, code=1).output
    departed = report(tmp_path, code=1)
    assert departed["same"] is False and departed["departure"]["step"] == contested
    assert f"departs at step {departed['departure']['step']}" in said and "decided now" in said
    assert departed["departure"]["recorded"] != departed["departure"]["decided"]


def timed(combo: dict[str, Any], folder: Path) -> Run:
    """Depth by measured times and chunks by measured times, on the wall's clock."""
    recorder = Recorder(Short(folder, 60))
    run = Run(CoreClasses(Engine=partial(RecordedEngine, recorder=recorder)), combo)
    paces = {(1 << i, d): 1e-4 * (1 + d / 4) for i in range(5) for d in (0, 1, 2, 3)}
    run.sch.speculation = AdaptiveDrafts(3, StepTimeModel(paces, kv_share=0.01), catch_up_seconds=1e-7)
    run.eng.step_budget = LatencyController(5e-5)
    run.eng._begin()
    run.drive()
    run.eng.close()
    return run


@pytest.mark.parametrize("combo", [c for c in SAMPLE if c["drafts"] == 3][:6], ids=named)
def test_decisions_from_measured_times_are_made_again(tmp_path: Path, combo: dict[str, Any]) -> None:
    run = timed(combo, tmp_path)
    files = sorted(tmp_path.iterdir())[1:]
    for first in range(0, len(files), 2):
        again = replay(recording_format.RecordingReader(files[first:]))
        assert again.divergence is None and again.engine.stats.num_steps == run.eng.stats.num_steps
        assert again.engine.gauges() == run.eng.gauges()
        assert again.engine.scheduler.step_times.fit() == run.sch.step_times.fit()
        assert again.engine.scheduler.speculation.acceptance_rates == run.sch.speculation.acceptance_rates  # type: ignore[attr-defined]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_the_plans_of_many_lattice_runs_are_made_again(tmp_path: Path, seed: int) -> None:
    for i, combo in enumerate(sampled(random.Random(seed), 200)):
        run = record(tmp_path / str(i), combo, frames=100)
        files = sorted((tmp_path / str(i)).iterdir())
        for first in range(0, 1 if combo["drafts"] < 0 else len(files), 3):
            again = replay(recording_format.RecordingReader(files[first:]), prepare=as_drawn(combo))
            assert again.divergence is None and again.engine.gauges() == run.eng.gauges(), combo


def test_the_worked_example_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/recording.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- worked -->\n```sh\n(.*?)```", page, re.DOTALL)
    assert found
    monkeypatch.chdir(tmp_path)
    for line in found[1].splitlines():
        done = CliRunner().invoke(main, line.split()[1:], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
    assert "for free KV blocks" in done.output and "every decision is the same" in done.output


COMBO = dict(
    zip(
        AXES,
        (1, 4, 1, True, 4, (16, 5), "continuous", 0, False, False, "fcfs", "lru", False, "preempt", 3, None, None),
        strict=True,
    )
)


def test_a_run_with_states_of_recurrent_layers_replays_the_same(tmp_path: Path) -> None:
    states = {"snapshots": (3, 8), "drafts": 3, "tight": 2, "feed": (16, 5)}
    record(tmp_path, COMBO | states)
    again = replay(recording_format.RecordingReader([tmp_path]), prepare=as_drawn(COMBO))
    assert again.divergence is None


PLANTED = {
    "reserve forgets steps in flight": 5,
    "gaps are not waited for": 27,
    "a dropped cached page counts as blank": 5,
    "short row preempts although blocks are about to be freed": 6,
    "a finished request still claims a block": 6,
}
"""And the step of COMBO at which each departs."""


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.name in PLANTED], ids=lambda bug: bug.name.replace(" ", "-")
)
def test_a_planted_bug_is_found_by_a_recording_of_before(tmp_path: Path, bug: Any) -> None:
    record(tmp_path, COMBO)
    classes = plant(bug)
    empty = classes.Scheduler(classes.KVCacheManager(1, 1))
    parts = (empty, empty.kv, empty.kv.block_pool, empty.kv.snapshots, empty.waiting, classes.RadixPrefixCache(1))
    known = {**CLASSES, **{type(part).__name__: type(part) for part in parts}}
    again = replay(recording_format.RecordingReader([tmp_path]), known=known, make=classes.Engine)
    assert again.divergence is not None and again.divergence.step == PLANTED[bug.name]


def test_the_summary_says_what_happened_and_why(tmp_path: Path) -> None:
    engine = tight(tmp_path)
    said = shown(tmp_path).output
    assert "every decision is the same" in said
    assert f"steps 1 to {engine.stats.num_steps}" in said and "requests 40: ended 40 length" in said
    assert f"preemptions {engine.scheduler.num_preemptions} (" in said and "is preempted for" in said
    assert "for free KV blocks" in said and "longest steps:" in said
    found = report(tmp_path)
    assert found["same"] and found["tokens"] == engine.stats.num_generated_tokens
    assert found["evictions"] == engine.scheduler.kv.block_pool.evictions
    assert found["settings"]["pages"] == 12 and found["settings"]["budget"] == 16
    assert len(found["preemptions"]["each"]) == engine.scheduler.num_preemptions
    assert found["time"]["executor"] == pytest.approx(engine.stats.num_steps * 0.01)
    assert sum(found["time"].values()) == pytest.approx(found["seconds"]), "every moment is counted once"


def test_what_is_counted_begins_with_the_recording(tmp_path: Path) -> None:
    ring = Short(tmp_path, 60)
    engine = tight(tmp_path, make=partial(RecordedEngine, recorder=Recorder(ring)))
    segments = sorted(tmp_path.iterdir())
    assert len(segments) > 2
    whole, parts = report(tmp_path), [report(segment) for segment in segments]
    assert whole["evictions"] == engine.scheduler.kv.block_pool.evictions > 0
    for name in ("tokens", "fed", "evictions"):
        assert sum(part[name] for part in parts) == whole[name], name
    assert sum(part["preemptions"]["count"] for part in parts) == whole["preemptions"]["count"] > 0


def test_one_request_and_one_step_are_shown(tmp_path: Path) -> None:
    tight(tmp_path)
    each = report(tmp_path)["preemptions"]["each"][0]
    life = shown(tmp_path, "--request", each["request"]).output
    assert "to compute again" in life and "first token after" in life and "ended at its limit" in life
    step = shown(tmp_path, "--step", each["step"]).output
    assert f"step {each['step']}, " in step and each["says"] in step and "feed    row" in step
    found = report(tmp_path, "--step", str(each["step"]))
    assert {"used_pages", "free_pages", "drafted", "accepted_at", "resets"} <= found["step"]["after"].keys()
    assert found["settings"]["pressure"] == "preempt" and found["settings"]["order"] == "fcfs"
    assert [life["id"] for life in report(tmp_path, "--request", "req-3")["request"]] == ["req-3"]
    assert len(report(tmp_path, "--request", "req")["request"]) == 40, "a call's id is that of all its answers"


def test_a_request_or_a_step_that_is_not_in_the_recording_is_an_error(tmp_path: Path) -> None:
    engine = tight(tmp_path)
    assert "no request 'req-99'" in shown(tmp_path, "--request", "req-99", code=2).output
    assert f"it has 1 to {engine.stats.num_steps}" in shown(tmp_path, "--step", "9999", code=2).output


def broken_at(call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler breaks when its so many-th step returns its result."""
    commit, calls = Scheduler.commit, []

    def breaks(self: Scheduler, result: Any) -> Any:
        calls.append(result)
        if len(calls) == call:
            raise error
        return commit(self, result)

    monkeypatch.setattr(Scheduler, "commit", breaks)


def test_a_recorded_crash_is_repeated_and_a_fixed_scheduler_departs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        broken_at(7, AssertionError("pending"), patched)
        with pytest.raises(AssertionError, match="pending"):
            tight(tmp_path)
    with monkeypatch.context() as patched:
        broken_at(7, AssertionError("pending"), patched)
        assert "the engine broke as it did then: AssertionError: pending" in shown(tmp_path).output
    assert "where the recorded engine broke" in shown(tmp_path, code=1).output


def test_delayed_plans_are_made_again_without_the_delay(tmp_path: Path) -> None:
    clock, waits = VirtualClock(), 0
    engine = SimConfig(depth=1, pages=64, page_size=4, cost=StepCost(0.01)).build(clock, make=recorded(tmp_path))
    engine.plan_delay = PlanDelay(clock)
    for i in range(200):
        if i % 5 == 0:
            engine.submit([i] * 9, 12, timeout=0.1 if i % 3 else UNLIMITED)
        engine.step()
        waits += engine.time_to_next_plan() > 0
        clock.sleep_until(clock.now() + engine.time_to_next_plan())
    engine.close()
    found = report(tmp_path)
    assert waits > 150 and found["requests"] == 40 and found["steps"][1] == engine.stats.num_steps


def test_a_step_without_a_result_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SyntheticHandle, "result", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tight(tmp_path)
    said = shown(tmp_path).output
    assert "under way when the recording ended:" in said and "req-0 gets a row" in said.split("under way")[1]
