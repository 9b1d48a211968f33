"""A simulated deployment: replicas behind a router, with an autoscaler, on a virtual clock.

Replicas run apart from each other between arrivals. A replica is advanced to an arrival only if a request of it may
have ended before (`Replica.horizon`), since nothing else of it matters to the router. Where routing needs no load, each
replica is run on its own, from its first request to its last, in several processes.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from quire.errors import InvalidConfig
from quire.scheduler.autoscaling import FleetLoad, QueuedTokensAutoscaler
from quire.scheduler.routing import MAX_IMBALANCE, RoutingPolicy, make_routing_policy
from quire.sim.copies import Split
from quire.sim.replica import BuildSide, Ended, Replica
from quire.sim.results import Results
from quire.sim.sessions import Sessions
from quire.sim.trace import Run, Trace
from quire.types import Request

OnProgress = Callable[[int, float], None]
"""Called with how many requests have ended, and how far the simulation is, 0 to 1."""

_REPORT_EVERY = 512
_START, _LOOK, _ARRIVAL = 0, 1, 2


class PrefillPool(NamedTuple):
    """Engines that compute the prompts of all replicas. build: makes one. The rest: see `Split`."""

    build: BuildSide
    engines: int
    min_tokens: int
    timeout: float
    max_slowdown: float


class Autoscaling(NamedTuple):
    """How a deployment grows and shrinks. interval, startup: seconds between two looks, and until a replica answers."""

    target: int
    low: int
    high: int
    startup: float = 30.0
    interval: float = 5.0
    up_delay: float = 10.0
    down_delay: float = 300.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A deployment. policy: of routing. routers: each with its share of replicas, requests in turn. max_queued:
    requests that may wait at a replica. step_by_step: never several steps at once. jobs: processes. prefill: engines
    that compute prompts for replicas, which then only answer; None: there are none."""

    build: BuildSide
    replicas: int = 1
    policy: str = "least_loaded"
    max_imbalance: int = MAX_IMBALANCE
    routers: int = 1
    autoscaling: Autoscaling | None = None
    max_queued: float = math.inf
    step_by_step: bool = False
    jobs: int = 1
    prefill: PrefillPool | None = None

    def router(self) -> RoutingPolicy:
        """A router of it. Raises InvalidConfig for an unknown policy."""
        return make_routing_policy(self.policy, max_imbalance=self.max_imbalance)


@dataclass
class Totals:
    """What replicas did. busy, replica_seconds: see `summarize`. sizes: (seconds, replicas) whenever the number
    changed."""

    steps: int = 0
    busy: float = 0.0
    replica_seconds: float = 0.0
    evictions: int = 0
    accepted: int = 0
    drafted: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts by the tier that their K/V came from, and prompts for prefill engines by what came of them."""
    prefill_busy: float = 0.0
    """Of `busy`, that of prefill engines."""
    sizes: list[tuple[float, int]] = field(default_factory=list)

    def add(self, replica: Replica, until: float) -> None:
        """Count a replica that was there until then."""
        scheduler = replica.engine.scheduler
        self.steps += replica.engine.stats.num_steps
        self.busy += replica.executor.busy
        self.replica_seconds += max(0.0, until - replica.started)
        self.evictions += scheduler.kv.block_pool.evictions
        self.accepted += scheduler.draft_stats.num_accepted
        self.drafted += scheduler.draft_stats.num_drafted
        offload = scheduler.kv.offload.stats
        self.tiers.update({f"{tier}_tokens": count for tier, count in offload.num_hit.items() if count})
        self.tiers.update({f"prefills_{outcome}": count for outcome, count in offload.prefills.items()})

    def merge(self, other: Totals) -> None:
        """Add what another process counted."""
        for name in ("steps", "busy", "replica_seconds", "evictions", "accepted", "drafted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.tiers.update(other.tiers)


def simulate_fleet(
    config: FleetConfig, load: Trace | Sessions, on_progress: OnProgress = lambda done, share: None
) -> tuple[Results, Totals]:
    """Run a trace, or users in sessions, through a deployment. Raises InvalidConfig for what does not go together."""
    if config.replicas % config.routers:
        raise InvalidConfig(
            f"{config.replicas} replicas cannot be divided among {config.routers} routers: choose a divisor"
        )
    if isinstance(load, Sessions) and config.routers > 1:
        raise InvalidConfig("sessions go through one router: leave --routers at 1")
    if config.autoscaling is not None and config.routers > 1:
        raise InvalidConfig("autoscaling is for one router: leave --routers at 1")
    if config.prefill is not None and (config.routers > 1 or config.autoscaling is not None):
        raise InvalidConfig(
            "prefill engines serve a fixed number of replicas behind one router: leave --routers and --autoscale out"
        )
    apart = config.prefill is None and (config.routers > 1 or not config.router().needs_load)
    if isinstance(load, Sessions) or config.autoscaling is not None or not apart:
        fleet = Fleet(config, load, on_progress)
        return fleet.run()
    return _run_shares(config, load, on_progress)


class Fleet:
    """One router with its replicas, in one process. numbers: of replicas, where it has a share of them; requests: of
    the trace's requests those that it gets, None for all."""

    def __init__(
        self,
        config: FleetConfig,
        load: Trace | Sessions,
        on_progress: OnProgress,
        *,
        numbers: range | None = None,
        requests: range | None = None,
    ) -> None:
        self.config, self.load, self.on_progress = config, load, on_progress
        self.results = Results(len(load))
        self.totals = Totals()
        self.router = config.router()
        scaling = config.autoscaling
        self.scaler = None
        if scaling is not None:
            delays = {"up_delay": scaling.up_delay, "down_delay": scaling.down_delay}
            self.scaler = QueuedTokensAutoscaler(scaling.target, low=scaling.low, high=scaling.high, **delays)
        self.replicas: dict[str, Replica] = {}
        pool = config.prefill
        self.split = None if pool is None else SplitReplicas(pool, self.results)
        self.retiring: set[str] = set()
        self.starting: list[tuple[float, str]] = []
        self.queued_tokens = 0
        self._requests = range(len(load)) if requests is None else requests
        self._place = 0
        self._next_look = math.inf if scaling is None else scaling.interval
        self._due: dict[str, float] = {}
        self._horizons: list[tuple[float, int, str]] = []
        self._ended: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._firsts: list[tuple[float, int]] = []
        self._arrivals: list[tuple[float, int]] = []
        self._num_ended = 0
        self._next_number = 0
        for number in numbers or range(config.replicas if scaling is None else scaling.low):
            self._start(number, 0.0)

    # ---------------------------------------------------------------- replicas

    def _start(self, number: int, at: float) -> Replica:
        config = self.config
        options: Any = {"step_by_step": config.step_by_step, "max_queued": config.max_queued}
        if self.split is None:
            replica = Replica(number, config.build, self.results, started=at, **options)
        else:
            replica = self.split.decode(number, config.build, **options)
        self.replicas[replica.name] = replica
        self.router.add(replica.name)
        self._next_number = max(self._next_number, number + 1)
        return replica

    def _scale(self, at: float) -> None:
        """The autoscaler's look at `at`."""
        assert self.scaler is not None
        assert self.config.autoscaling is not None
        running, startup = len(self.router.replicas), self.config.autoscaling.startup
        load = FleetLoad(at, self.queued_tokens, running, len(self.starting))
        change = self.scaler.desired(load) - running - len(self.starting)
        for _ in range(change):
            heapq.heappush(self.starting, (at + startup, f"replica-{self._next_number}"))
            self._next_number += 1
        for _ in range(-change):
            if self.starting:
                self.starting.remove(max(self.starting))
                heapq.heapify(self.starting)
            else:
                outstanding = self.router.outstanding
                name = min(self.router.replicas, key=lambda each: (outstanding[each], -self.replicas[each].number))
                self.router.remove(name)
                self.retiring.add(name)
                self._retire(name, at)
        if len(self.router.replicas) != running:
            self.totals.sizes.append((at, len(self.router.replicas)))

    def _retire(self, name: str, at: float) -> None:
        """A replica that takes no more requests goes once it has ended those that it has."""
        if name in self.retiring and not self.router.outstanding.get(name):
            self.retiring.discard(name)
            self.totals.add(self.replicas.pop(name), at)
            self._due.pop(name, None)

    # ---------------------------------------------------------------- the clock

    def run(self) -> tuple[Results, Totals]:
        """Run until every request has ended."""
        self.totals.sizes.append((0.0, len(self.router.replicas)))
        load = self.load
        if isinstance(load, Sessions):
            self._arrivals = [(at, number) for number, at in enumerate(load.first_arrivals())]
            heapq.heapify(self._arrivals)
        while (event := self._next_event()) is not None:
            at, kind = event
            self._pass(at)
            if kind == _START:
                _, name = heapq.heappop(self.starting)
                self._start(int(name.rpartition("-")[2]), at)
                self.totals.sizes.append((at, len(self.router.replicas)))
            elif kind == _LOOK:
                self._scale(at)
                assert self.config.autoscaling is not None
                self._next_look += self.config.autoscaling.interval
            else:
                self._send(at, self._take_arrival())
        self._pass(math.inf)
        end = max((at for at in self.results.end if at == at), default=0.0)
        prefill = () if self.split is None else self.split.prefill
        for replica in (*self.replicas.values(), *prefill):
            self.totals.add(replica, end)
        self.totals.prefill_busy = sum(each.executor.busy for each in prefill)
        return self.results, self.totals

    def _next_event(self) -> tuple[float, int] | None:
        """(seconds, kind) of what comes next; None once no request can arrive."""
        while True:
            arrival = self._next_arrival()
            start = self.starting[0][0] if self.starting else math.inf
            at, kind = min((start, _START), (self._next_look, _LOOK), (arrival, _ARRIVAL))
            horizon = self._next_horizon() if isinstance(self.load, Sessions) else math.inf
            if horizon < at:  # an answer may bring about an arrival before
                self._pass(math.nextafter(horizon, math.inf))
            elif arrival == math.inf and horizon == math.inf:
                return None
            else:
                return at, kind

    def _next_arrival(self) -> float:
        """Seconds; infinity after the last one that is known."""
        if isinstance(self.load, Trace):
            return self.load.arrivals[self._requests[self._place]] if self._place < len(self._requests) else math.inf
        return self._arrivals[0][0] if self._arrivals else math.inf

    def _take_arrival(self) -> int:
        """The request that arrives next."""
        self._place += 1
        return self._requests[self._place - 1] if isinstance(self.load, Trace) else heapq.heappop(self._arrivals)[1]

    def _next_horizon(self) -> float:
        """Seconds before which nothing ends: not what replicas do, and not what is known to have ended."""
        known = self._ended[0][0] if self._ended else math.inf
        return min(known, self._horizons[0][0] if self._horizons else math.inf)

    def _pass(self, at: float) -> None:
        """Let time pass to `at`: everything that ended up to then is known to the router."""
        horizons = self._horizons
        while horizons and horizons[0][0] <= at:
            horizon, _, name = heapq.heappop(horizons)
            if self._due.get(name) == horizon:  # others are of earlier states
                replica = self.replicas[name]
                replica.advance(at)
                self._take(replica)
                self._expect(replica, max(replica.horizon(), math.nextafter(at, math.inf)))
        while self._firsts and self._firsts[0][0] <= at:
            self.queued_tokens -= self.results.prompt[heapq.heappop(self._firsts)[1]]
        while self._ended and self._ended[0][0] <= at:
            self._end(*heapq.heappop(self._ended))

    def _expect(self, replica: Replica, horizon: float) -> None:
        """Look at a replica again at `horizon`."""
        self._due[replica.name] = horizon
        if horizon < math.inf:
            heapq.heappush(self._horizons, (horizon, replica.number, replica.name))

    def _take(self, replica: Replica) -> None:
        """Note what ended in a replica, which may be later than now: its steps end when they end."""
        for ended in replica.ended:
            heapq.heappush(self._ended, (ended.at, ended.number, replica.name, ended.tokens))
        for first in replica.first_tokens:
            heapq.heappush(self._firsts, first)
        replica.ended, replica.first_tokens = [], []

    def _end(self, at: float, number: int, name: str, tokens: tuple[int, ...]) -> None:
        self.router.finished(name)
        self._num_ended += 1
        if not tokens:
            self.queued_tokens -= self.results.prompt[number]
        self._retire(name, at)
        if isinstance(self.load, Sessions) and (turn := self.load.next_turn(number, at, tokens)) is not None:
            self.results.add(*turn)
            heapq.heappush(self._arrivals, (turn[0], len(self.results) - 1))
        if self._num_ended % _REPORT_EVERY == 0:
            self.on_progress(self._num_ended, self._num_ended / max(1, self._count))

    @property
    def _count(self) -> int:
        """Requests that there will be at most."""
        return self.load.count if isinstance(self.load, Sessions) else len(self._requests)

    def _send(self, at: float, number: int) -> None:
        """Route a request."""
        runs, request = prepare(self.load, number)
        results = self.results
        results.arrival[number], results.prompt[number] = at, len(request.prompt)
        results.output[number] = request.max_new_tokens
        chunks = runs if has_prefixes(self.load) else ()
        name = self.router.choose(chunks)
        assert name is not None, "autoscaling keeps at least one replica"
        self.router.sent(name, chunks)
        replica = self.replicas[name]
        results.replica[number] = replica.number
        self.queued_tokens += len(request.prompt)
        replica.advance(at)
        self._take(replica)
        replica.send(at, number, request)
        self._expect(replica, at)


class SplitReplicas:
    """Prefill and decode engines, which run together: what one does next may depend on what another sends it.

    Each has its own clock. The one that is due first goes on, so that whatever another can still send comes later.
    """

    def __init__(self, pool: PrefillPool, results: Results) -> None:
        self.connections = Split(pool.min_tokens, pool.timeout, pool.max_slowdown)
        build = partial(pool.build, split=self.connections, role="prefill")
        self.prefill = [Replica(number, build, results) for number in range(pool.engines)]
        self.all: list[Replica] = [*self.prefill]

    def decode(self, number: int, build: BuildSide, **options: Any) -> Replica:
        """A replica that answers."""
        made = partial(build, split=self.connections, role="decode")
        replica = SplitReplica(self, number, made, self.prefill[0].results, **options)
        self.all.append(replica)
        return replica

    def next_time(self) -> float:
        """When one of them does something next."""
        return min(each.next_time() for each in self.all)

    def advance(self, until: float) -> None:
        """Do everything that begins before `until`."""
        while True:
            at, _, first = min((each.next_time(), i, each) for i, each in enumerate(self.all))
            if at >= until:
                return
            Replica.advance(first, math.nextafter(at, math.inf))


class SplitReplica(Replica):
    """A decode engine: it goes on with those that it is connected with."""

    def __init__(self, all: SplitReplicas, *args: Any, **options: Any) -> None:
        self.all = all
        super().__init__(*args, **options)

    def horizon(self) -> float:
        """Seconds before which nothing happens in any of them."""
        return self.all.next_time() if self.engine.has_pending_work or self.inbox else math.inf

    def advance(self, until: float) -> None:
        """Let all of them do what begins before `until`."""
        self.all.advance(until)


def has_prefixes(load: Trace | Sessions) -> bool:
    """Whether prompts are known by more than their length."""
    return isinstance(load, Sessions) or load.has_prefixes


def prepare(load: Trace | Sessions, number: int) -> tuple[tuple[Run, ...], Request]:
    """The runs of a request's prompt, and the request."""
    runs = load.runs(number)
    prompt: tuple[int, ...] = ()
    if len(runs) == 1:
        prompt = (runs[0][0],) * runs[0][1]
    else:
        tokens: list[int] = []
        for token, count in runs:
            tokens += [token] * count
        prompt = tuple(tokens)
    seed = load.answer_seed(number) if isinstance(load, Sessions) else number
    return runs, Request(id=str(number), prompt=prompt, max_new_tokens=load.outputs[number], seed=seed)


# ---------------------------------------------------------------- shares in several processes


class _Share(NamedTuple):
    """What one process runs: of one router its replicas and requests; or of a deployment some replicas, each on its
    own."""

    config: FleetConfig
    load: Trace
    router: int
    part: int
    parts: int


def _run_shares(config: FleetConfig, load: Trace, on_progress: OnProgress) -> tuple[Results, Totals]:
    """Routers, or replicas that share no router's state, in `jobs` processes."""
    if config.routers > 1:
        shares = [_Share(config, load, router, 0, 1) for router in range(config.routers)]
    else:
        parts = max(1, min(config.jobs, config.replicas))
        shares = [_Share(config, load, -1, part, parts) for part in range(parts)]
    results, totals = Results(len(load)), Totals(sizes=[(0.0, config.replicas)])
    results.arrival[:] = load.arrivals
    results.prompt[:], results.output[:] = load.prompts, load.outputs
    if config.jobs <= 1 or len(shares) == 1:
        for share in shares:
            found, part = _run_share(share, on_progress)
            results.merge(found)
            totals.merge(part)
    else:
        spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with spawn.Manager() as manager, ProcessPoolExecutor(config.jobs, mp_context=spawn) as pool:
            progress: Any = manager.dict()
            tasks = {pool.submit(_run_reporting, share, i, progress): i for i, share in enumerate(shares)}
            for task in as_completed(tasks):
                found, part = task.result()
                results.merge(found)
                totals.merge(part)
                done = sum(progress.values())
                on_progress(done, done / max(1, len(load)))
    end = max((at for at in results.end if at == at), default=0.0)
    totals.replica_seconds = config.replicas * end
    return results, totals


def _run_reporting(share: _Share, i: int, progress: Any) -> tuple[Results, Totals]:
    def report(done: int, _: float) -> None:
        progress[i] = done

    return _run_share(share, report)


def _run_share(share: _Share, on_progress: OnProgress) -> tuple[Results, Totals]:
    config, load = share.config, share.load
    if share.router >= 0:
        each = config.replicas // config.routers
        numbers = range(share.router * each, (share.router + 1) * each)
        requests = range(share.router, len(load), config.routers)
        return Fleet(config, load, on_progress, numbers=numbers, requests=requests).run()
    results, totals, done = Results(len(load)), Totals(), 0
    for number in range(share.part, config.replicas, share.parts):
        done += _run_alone(config, load, number, results, totals)
        on_progress(done, done / max(1, len(load)))
    return results, totals


def _run_alone(config: FleetConfig, load: Trace, number: int, results: Results, totals: Totals) -> int:
    """A replica whose requests are known from the start: in turn, each `replicas`-th. Returns how many they were."""
    requests = range(number, len(load), config.replicas)
    replica = Replica(number, config.build, results, step_by_step=config.step_by_step, max_queued=config.max_queued)
    for request in requests:
        at = load.arrivals[request]
        results.replica[request] = number
        results.arrival[request], results.prompt[request] = at, load.prompts[request]
        results.output[request] = load.outputs[request]
        replica.send(at, request, prepare(load, request)[1])
        if len(replica.inbox) >= 64:
            replica.advance(at)
            replica.ended, replica.first_tokens = [], []
    replica.advance(math.inf)
    totals.add(replica, replica.clock.time)
    return len(requests)


__all__ = ["Autoscaling", "Ended", "Fleet", "FleetConfig", "Totals", "prepare", "simulate_fleet"]
