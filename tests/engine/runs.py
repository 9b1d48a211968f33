"""Whole runs of an engine over a device that takes time, written down step by step: see `test_runs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from quire.engine.engine import Engine
from quire.engine.events import Completed, Observer, StepRecord
from quire.engine.executor import Description, StepHandle
from quire.engine.timing import LatencyController, VirtualClock
from quire.errors import ExecutorLost
from quire.observability import prometheus
from quire.observability.engine_metrics import METRICS, EngineMetrics
from quire.observability.explain import explain
from quire.observability.history import History
from quire.observability.live_view import EngineLiveView
from quire.scheduler.block_pool import EVICTION_POLICIES
from quire.scheduler.constraint import FREE, PENDING, Constraint
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Plan, Result
from quire.scheduler.policy import make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, SpeculationPolicy
from quire.scheduler.step_time import StepCost
from quire.types import UNLIMITED, Request, RequestStepOutput, SamplingParams
from tests.hash_model import HashDevice, HashHandle
from tests.lattice import Grammar

COST = StepCost(0.01, 0.001)


class TimedHandle:
    """A step that is done at `done`."""

    def __init__(self, handle: HashHandle, clock: VirtualClock, done: float) -> None:
        self.handle, self.clock, self.done = handle, clock, done
        self.sample = handle.sample

    def is_done(self) -> bool:
        return self.clock.now() >= self.done

    def result(self) -> Result:
        self.clock.sleep_until(self.done)
        return self.handle.result()


class TimedDevice:
    """The device of the hash model, whose steps take time one after another. lost: steps at which it is lost."""

    def __init__(self, device: HashDevice, clock: VirtualClock, lost: tuple[int, ...]) -> None:
        self.device, self.clock, self.lost = device, clock, lost
        self.busy_until = 0.0
        self.log: list[str] = []

    def describe(self) -> Description:
        return self.device.describe()

    def launch(self, plan: Plan) -> StepHandle:
        if self.device.steps + 1 in self.lost:
            self.device.steps += 1
            raise ExecutorLost("the machine is off")
        handle = self.device.launch(plan)
        cost = COST.seconds(sum(span.num_tokens for span in plan.spans) + sum(plan.num_drafts))
        self.busy_until = max(self.busy_until, self.clock.now()) + cost
        return TimedHandle(handle, self.clock, self.busy_until)

    def reset(self) -> None:
        self.log.append("reset")
        self.busy_until = 0.0
        self.device.reset()

    def close(self) -> None:
        self.log.append("close")


class Trace(Observer):
    """What happened, a line each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_submit(self, request: Request, now: float) -> None:
        self.lines.append(f"{now:.3f} submit {request.id}: {len(request.prompt)} tokens")

    def on_step(self, record: StepRecord) -> None:
        plan, gauges = record.plan, record.gauges
        times = f"{record.planned:.3f} {record.launched:.3f} {record.committed:.3f}"
        fed = [
            f"{id}[{span.row}]+{span.num_tokens}/{span.num_samples}/{span.num_logits}"
            for id, span in zip(record.ids, plan.spans, strict=True)
        ]
        self.lines.append(f"{times} step {record.number}: {' '.join(fed)}")
        for new in plan.new_sequences:
            key = f"seed {new.seed} choice {new.choice} stop {sorted(new.stop_token_ids)} most {new.max_length}"
            self.lines.append(
                f"  open {new.row}: {len(new.tokens)} of {new.prompt_length}, {new.num_computed} computed, {key}"
            )
        if plan.new_blocks or plan.masked_spans or plan.num_drafts:
            blocks = " ".join(f"{row}:{','.join(map(str, each))}" for row, each in plan.new_blocks)
            self.lines.append(
                f"  blocks {blocks or '-'} masked {list(plan.masked_spans)} drafts {list(plan.num_drafts)}"
            )
        self.lines += [f"  {' '.join(map(str, decision))}" for decision in record.decisions]
        self.lines += [f"  {_output(event)}" for event in record.events]
        self.lines += [f"  ended {each.id}" for each in record.ended]
        self.lines.append("  " + " ".join(_gauge(value) for value in gauges))

    def on_end(self, ended: Completed) -> None:
        self.lines.append(f"{ended.finished:.3f} end {ended.id}: {ended.finish}")

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        self.lines.append(f"{now:.3f} failure {reason!r}: {' '.join(suspects)}")


def _gauge(value: object) -> str:
    return "/".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value)


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _output(event: RequestStepOutput) -> str:
    words = [f"{event.id} >", *map(str, event.tokens)]
    words += [f"{name} {value}" for name, value in (("finish", event.finish), ("stop", event.stop_token)) if value]
    words += [f"logprobs {[(one.token, one.logprob) for one in event.logprobs]}"] if event.logprobs else []
    words += [f"prompt {[(one.token, one.logprob) for one in event.prompt_logprobs]}"] if event.prompt_logprobs else []
    words += [f"cached {event.num_cached}"] if event.num_cached else []
    words += [f"error {event.error!r} {event.param} {event.status}"] if event.error is not None else []
    return " ".join(words)


class Run:
    """An engine of these settings, and everything that it reports. make: `Engine`, or what makes recorded ones."""

    make: Callable[..., Engine] = Engine

    def __init__(
        self,
        *,
        blocks: int = 24,
        size: int = 4,
        rows: int = 8,
        seqs: int = 4,
        tokens: int = 24,
        background: int = 8,
        chunk: int = 10,
        lookahead: int = 0,
        reuse: bool = True,
        eviction: str = "lru",
        order: str = "fcfs",
        batching: Any = "continuous",
        pressure: Any = "foresee",
        drafts: int = 0,
        adaptive: bool = False,
        target: float | None = None,
        lost: tuple[int, ...] = (),
        keep: int = UNLIMITED,
    ) -> None:
        self.clock = VirtualClock()
        kv = KVCacheManager(
            blocks, size, make_prefix_cache(size, reuse), EVICTION_POLICIES[eviction](), min_shared_tokens=8
        )
        speculation: SpeculationPolicy = AdaptiveDrafts(drafts) if adaptive else FixedDrafts(drafts)
        self.scheduler = Scheduler(
            kv,
            rows=rows,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_background_tokens=background,
            max_chunk_tokens=chunk,
            policy=make_policy(order, batching=batching, pressure=pressure),
            speculation=speculation,
        )
        self.device = TimedDevice(HashDevice(blocks, size, rows=rows, seed="run"), self.clock, lost)
        self.trace, self.metrics, self.history = Trace(), EngineMetrics(), History()
        self.view = EngineLiveView(self.history)
        self.view.base, self.view.epoch = 0.0, 0.0
        self.view.watch(True)
        self.history.attach(kv)
        self.engine = type(self).make(
            self.scheduler,
            self.device,
            lookahead=lookahead,
            clock=self.clock,
            observers=[self.trace, self.metrics, self.history, self.view],
            step_budget=None if target is None else LatencyController(target),
            keep=keep,
        )
        self.frames: list[str] = []
        self.ids: list[str] = []

    def ask(
        self,
        id: str,
        prompt: range | tuple[int, ...],
        new: int = 4,
        *,
        constraint: Constraint = FREE,
        sampling: SamplingParams | None = None,
        **rest: Any,
    ) -> None:
        self.ids.append(id)
        sampling = SamplingParams(temperature=0.0) if sampling is None else sampling
        self.engine.add(Request(id=id, prompt=tuple(prompt), max_new_tokens=new, sampling=sampling, **rest), constraint)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            outputs = self.engine.step()
            self.trace.lines.append("  given " + ", ".join(_output(event) for event in outputs))
            idle = not self.engine.can_step
            seen = self.view.frame(self.engine, self.clock.now(), last=idle)
            if seen is not None:
                self.frames.append(json.dumps(json.loads(seen[0]), separators=(",", ":")))

    def finish(self, most: int = 300) -> str:
        """Steps until nothing is left; everything that was reported, as text."""
        for _ in range(most):
            if not self.engine.has_pending_work:
                break
            self.step()
        assert not self.engine.has_pending_work
        self.step(4)
        completed = [" ".join(map(_short, each)) for each in self.engine.completed_requests]
        stats = json.dumps(self.engine.metrics_snapshot(), indent=1)
        metrics = [
            line
            for line in prometheus.text(METRICS, self.metrics.snapshot(self.engine), "m").decode().splitlines()
            if not line.startswith("#") and not line.endswith((" 0", " 0.0")) and "_bucket" not in line
        ]
        explained = [json.dumps(explain(self.history, id, self.clock.now()), separators=(",", ":")) for id in self.ids]
        parts = {
            "steps": self.trace.lines,
            "completed": completed,
            "stats": [stats],
            "metrics": metrics,
            "explained": explained,
            "frames": self.frames,
            "left": [*self.device.log, *self.left()],
        }
        return "\n".join(line for name, lines in parts.items() for line in (f"== {name}", *lines, ""))

    def left(self) -> list[str]:
        """What containers hold once no request is left, by name."""
        engine, scheduler = self.engine, self.scheduler
        kv, waiting = scheduler.kv, scheduler.waiting
        held = {
            "rows in use": self.device.device.places - len(set(scheduler.free_rows)),
            "blocks in use": kv.block_pool.num_used,
            "references": sum(kv.block_pool.ref_counts),
            "sequences": len(scheduler.sequences),
            "running": len(scheduler.running),
            "waiting": len(waiting),
            "parked": waiting.num_parked,
            "in flight": len(scheduler.inflight) + len(engine.inflight),
            "prefixes": len(kv.inflight_prefixes),
            "deadlines": sum(id in scheduler.sequences for _, id in engine._deadlines),
            "times": len(engine.stats.requests_by_id),
            "groups": len(engine.recovery.groups) + len(engine.recovery.parked),
            "cached by id": len(self.metrics._cached),
        }
        return [f"{name}: {count}" for name, count in held.items()]


def _mixed(lookahead: int, drafts: int) -> Callable[[], str]:
    """Shared prefixes, priorities, choices, scores, stops, a background request, an abort and a deadline."""

    def run() -> str:
        run = Run(order="priority", lookahead=lookahead, drafts=drafts, blocks=18)
        run.ask("a", range(20), 6, sampling=SamplingParams(logprobs=0, prompt_logprobs=0))
        run.ask("b", range(24), 5, priority=1, stop=frozenset(range(0, 94, 7)))
        run.ask("late", (3, 1, 2), 30, deadline=0.11)
        run.ask("back", range(30, 52), 4, priority=1 << 30)
        run.step(2)
        run.ask("c", (*range(20), 60, 61), 3, seed=7)
        run.ask("d", (*range(20), 60, 61), 3, seed=7, choice=1)
        run.ask("gone", (5, 4, 3, 2, 1), 40, priority=-1)
        run.step(3)
        run.engine.abort("gone")
        run.engine.abort("unknown")
        run.ask("salted", range(20), 2, cache_salt="x", stop=frozenset({1}))
        run.step(4)
        run.engine.reset_prefix_cache()
        run.ask("again", range(20), 2)
        run.ask("grammar", (9, 8, 7), 5, constraint=Grammar())
        run.ask("compiled", (9, 8), 3, constraint=PENDING)
        run.step(2)
        run.engine.set_constraint("compiled", Grammar())
        run.engine.set_constraint("unknown", Grammar())
        return run.finish()

    return run


def _pressure(pressure: str, eviction: str, lookahead: int) -> Callable[[], str]:
    """Ten requests that need twice the blocks there are."""

    def run() -> str:
        run = Run(blocks=10, seqs=5, pressure=pressure, eviction=eviction, lookahead=lookahead, keep=3)
        for i in range(8):
            run.ask(f"r{i}", range(40 + i % 3, 46 + i % 3 + i), 5 + i % 4)
        run.step(3)
        run.ask("r8", range(40, 50), 12)
        run.step(6)
        run.ask("r9", range(60, 61), 1)
        return run.finish()

    return run


def _failures(lookahead: int) -> Callable[[], str]:
    """A request that breaks its steps, one with NaN logits, and a device that is lost twice."""

    def run() -> str:
        run = Run(lookahead=lookahead, lost=(9, 24))
        run.ask("good", range(9), 8)
        run.ask("poison", (5, 6, 7, 96, 8), 5)
        run.ask("sick", (9, 9, 95), 5)
        run.ask("fine", range(9, 21), 8)
        run.step(3)
        run.ask("second", (1, 96), 5)
        run.step(4)
        run.ask("third", (1, 2, 3, 4, 5), 9)
        return run.finish()

    return run


def _static() -> str:
    run = Run(batching="static", chunk=UNLIMITED, reuse=False, tokens=20, seqs=2)
    for i, length in enumerate((12, 9, 3, 20)):
        run.ask(f"r{i}", range(length), 3 + i)
    return run.finish()


def _adaptive() -> str:
    run = Run(drafts=4, adaptive=True, blocks=200, tokens=100, chunk=100)
    for i in range(3):
        run.ask(f"r{i}", range(i, i + 5), 60 + 30 * i)
    return run.finish()


def _target() -> str:
    run = Run(target=0.03, blocks=200, tokens=200, chunk=200)
    run.ask("first", range(4), 24)
    run.step(3)
    run.ask("long", range(90), 4)
    run.step(2)
    run.ask("longer", range(5, 90), 4)
    return run.finish()


def _abandoned() -> str:
    """Closed in the middle of its work."""
    run = Run(lookahead=1)
    run.ask("a", range(20), 6)
    run.ask("b", range(20), 6)
    run.ask("c", (1, 2), 6, constraint=PENDING)
    run.step(3)
    run.engine.abandon()
    run.ask("d", (1, 2), 2)
    text = run.finish()
    run.engine.close()
    return text + "\n".join(run.device.log)


RUNS: dict[str, Callable[[], str]] = {
    "mixed": _mixed(0, 0),
    "mixed-ahead-drafted": _mixed(2, 2),
    "preempted": _pressure("preempt", "lru", 0),
    "preempted-ahead": _pressure("preempt", "fifo", 1),
    "reserved": _pressure("reserve", "lru", 1),
    "foreseen": _pressure("foresee", "fifo", 0),
    "failing": _failures(0),
    "failing-ahead": _failures(1),
    "static": _static,
    "adaptive": _adaptive,
    "target": _target,
    "abandoned": _abandoned,
}
