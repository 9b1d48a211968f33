"""The statistics of a replay: an observer that counts, and keeps the request or step that was asked for."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from quire.engine.engine import Engine
from quire.engine.events import Completed, Gauges, Observer, StepRecord
from quire.observability.explain import explain
from quire.observability.history import History
from quire.observability.recording_format import Began
from quire.scheduler.kv_offload import OffloadStats
from quire.sim.replay import decision_text, step_lines, step_summary
from quire.types import Request

KEPT = 200
"""Preemptions listed one by one; the others are only counted."""
LONGEST = 5

_NAMES: Mapping[str, str] = {
    "used_blocks": "used_pages",
    "free_blocks": "free_pages",
    "draft_totals": "drafted",
    "accepted_by_position": "accepted_at",
    "prefix_cache_resets": "resets",
}
"""The report's name of a gauge, where it differs."""


def _reported(gauges: Gauges) -> dict[str, Any]:
    return {_NAMES.get(name, name): value for name, value in gauges._asdict().items()}


def _offloaded(stats: OffloadStats) -> dict[str, dict[str, int]]:
    """Counts of K/V tiers: tokens that came back, blocks copied, prompts for prefill engines, and blocks lost."""
    return {
        "hit_tokens": {str(tier): count for tier, count in stats.num_hit.items()},
        "copied_blocks": {str(kind): count for kind, count in stats.copied.items()},
        "prefills": dict(stats.prefills),
        "failures": dict(stats.failures),
    }


class ReplayStats(Observer):
    """Counts and times of a whole recording. request, step: which ones to keep."""

    def __init__(self, request: str | None = None, step: int | None = None) -> None:
        self.wanted, self.asked = request, step
        self.history = History()
        self.lives: dict[str, dict[str, Any] | None] = {}
        self.step: dict[str, Any] | None = None
        self.requests = self.tokens = self.fed = self.failures = 0
        self.first = self.last = self._last_commit = 0.0
        self.first_step = self.last_step = 0
        self.ended: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.what: Counter[str] = Counter()
        self.lost: dict[str, float] = defaultdict(float)
        self.preempted: list[dict[str, Any]] = []
        self.again = 0
        self.longest: list[tuple[float, int, int, int]] = []
        self.between = self.planning = self.running = 0.0
        self.gauges: Any = None

    def begin(self, engine: Engine, began: Began) -> None:
        """Take over the state with which the recording begins."""
        self.first = self.last = self._last_commit = began.clock
        self.history.attach(engine.scheduler.kv)
        for times in engine.stats.requests_by_id.values():
            seq = times.seq
            self.history.on_submit(seq.request, times.submitted)
            story = self.history.requests[seq.request.id]
            story.opened, story.first, story.waiting = times.opened, times.first_token, seq.row is None
            story.held, story.hits, story.preemptions = list(seq.blocks), seq.num_cached, seq.preemptions
            story.from_host, story.from_disk, story.from_remote = (
                seq.num_from_host,
                seq.num_from_disk,
                seq.num_from_remote,
            )
            story.transfer = seq.transfer
        self.requests = len(engine.stats.requests_by_id)
        self.evictions = engine.scheduler.kv.block_pool.evictions
        self._offload = engine.scheduler.kv.offload.stats
        self._offload_before = _offloaded(self._offload)

    # ---------------------------------------------------------------- an observer

    def on_submit(self, request: Request, now: float) -> None:
        """Count it."""
        self.requests += 1
        self.history.on_submit(request, now)

    def on_step(self, record: StepRecord) -> None:
        """Count its tokens and decisions."""
        self.history.on_step(record)
        fed = sum(span.num_tokens for span in record.plan.spans)
        self.fed += fed
        self.tokens += sum(len(event.tokens) for event in record.events)
        self.first_step = self.first_step or record.number
        self.last_step, self.last, self.gauges = record.number, record.committed, record.gauges
        self._times(record, fed)
        for what, id, by, n in record.decisions:
            self.what[what] += 1
            if what == "waits":
                self.waited[by] += 1
                self.lost[by] += record.committed - record.planned
            elif what == "preempted":
                self.again += n
                if len(self.preempted) < KEPT:
                    preemption = {"step": record.number, "request": id, "for": by, "tokens": n}
                    self.preempted.append(preemption | {"says": decision_text((what, id, by, n))})
        for ended in record.ended:
            self._end(ended)
        if record.number == self.asked:
            self.step = self._shown(record)

    def on_end(self, ended: Completed) -> None:
        """Count it."""
        self.history.on_end(ended)
        self._end(ended)

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """Count it."""
        self.failures += 1
        self.history.on_failure(reason, suspects, now)

    def _end(self, ended: Completed) -> None:
        self.ended[ended.finish] += 1
        if self._wants(ended.id):
            self.lives[ended.id] = explain(self.history, ended.id, ended.finished)

    def _wants(self, id: str) -> bool:
        """A call's id stands for all its answers, whose ids have a number behind it."""
        return self.wanted in (id, id.rpartition("-")[0])

    def _times(self, record: StepRecord, fed: int) -> None:
        """Where the time went: between steps, planning, or waiting for the executor."""
        begun = max(record.launched, self._last_commit)
        took = record.committed - begun
        if record.planned > self._last_commit:
            self.between += record.planned - self._last_commit
            self.planning += record.launched - record.planned
        self.running += took
        self._last_commit = record.committed
        item = (took, record.number, len(record.plan.spans), fed)
        (heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop)(self.longest, item)

    def _shown(self, record: StepRecord) -> dict[str, Any]:
        plan = step_summary(record.plan, record.ids, record.decisions)
        return {
            "step": record.number,
            "planned": record.planned - self.first,
            "seconds": record.committed - record.planned,
            "plan": step_lines(plan, record.ids),
            "requests": record.ids,
            "tokens": {event.id: len(event.tokens) for event in record.events},
            "ended": {ended.id: ended.finish for ended in record.ended},
            "after": _reported(record.gauges),
        }

    def _tiers(self) -> dict[str, dict[str, int]]:
        """What has been counted since the recording began, without zeros."""
        found = dict[str, dict[str, int]]()
        for what, counts in _offloaded(self._offload).items():
            before = self._offload_before[what]
            if more := {name: n - before.get(name, 0) for name, n in counts.items() if n != before.get(name, 0)}:
                found[what] = more
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """The explanations of the request asked for, one an answer; empty: it is not in the recording."""
        open = [id for id in self.history.requests if self._wants(id) and id not in self.lives]
        found = self.lives | {id: explain(self.history, id, self.last) for id in open}
        return [life for life in found.values() if life is not None]

    def report(self) -> dict[str, Any]:
        """Plain JSON. Times in seconds."""
        gauges = self.gauges
        return {
            "steps": [self.first_step, self.last_step],
            "seconds": self.last - self.first,
            "requests": self.requests,
            "ended": dict(self.ended),
            "tokens": self.tokens,
            "fed": self.fed,
            "failures": self.failures,
            "preemptions": {"count": self.what["preempted"], "tokens_again": self.again, "each": self.preempted},
            "evictions": gauges.evictions - self.evictions if gauges else 0,
            "discarded_spans": gauges.discarded_spans if gauges else 0,
            "tiers": self._tiers(),
            "waited": {name: {"steps": n, "seconds": self.lost[name]} for name, n in self.waited.most_common()},
            "known": list(self.history.requests)[-100:],
            "time": {"executor": self.running, "planning": self.planning, "between": self.between},
            "longest_steps": [
                {"step": number, "seconds": took, "rows": rows, "fed": fed}
                for took, number, rows, fed in sorted(self.longest, reverse=True)
            ],
        }
