"""The lattice: every combination of settings must give the naive loop's tokens, with invariants after every commit."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.engine import engine
from quire.engine.timing import VirtualClock
from quire.scheduler import block_pool, kv_offload, scheduler, snapshots
from quire.scheduler import kv_cache as kv_room
from quire.scheduler.block_pool import EVICTION_POLICIES
from quire.scheduler.constraint import FREE
from quire.scheduler.policy import make_policy
from quire.scheduler.speculation import FixedDrafts
from quire.scheduler.step_time import StepTimeModel
from quire.types import BACKGROUND, UNLIMITED, Pin, Request, SamplingParams
from tests.executors.wired import Wired
from tests.hash_model import POISON, SICK, VOCAB, HashDevice, logprob, naive
from tests.hash_store import HashStore


@dataclass
class CoreClasses:
    """The classes under test; the planted bugs swap in broken ones."""

    KVCacheManager: Any = kv_room.KVCacheManager
    Scheduler: Any = scheduler.Scheduler
    Engine: Any = engine.Engine
    NoPrefixCache: Any = block_pool.NoPrefixCache
    RadixPrefixCache: Any = block_pool.RadixPrefixCache
    HybridPrefixCache: Any = snapshots.HybridPrefixCache
    KVOffload: Any = kv_offload.KVOffload


STOP = frozenset(t for t in range(VOCAB) if t % 17 == 0)
_ALLOWED = [sum(1 << t for t in range(VOCAB) if (t + r) % 3).to_bytes(13, "little") for r in range(3)]


def mask_after(output: Sequence[int]) -> bytes:
    return _ALLOWED[(output[-1] if output else 0) % 3]


class Grammar:
    """A constraint whose mask depends on the token before: one late or stale mask changes the answer."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        out = list(output)
        return [mask_after(out + list(drafts[:i])) for i in range(len(drafts) + 1)]

    def why(self) -> str:
        return ""

    def beginning(self) -> Sequence[int]:
        return ()


FORCED = (5, 40, 11, 7, 61)


def mask_behind(output: Sequence[int]) -> bytes:
    """Of answers that begin with FORCED."""
    return mask_after(output) if len(output) >= len(FORCED) else (1 << FORCED[len(output)]).to_bytes(13, "little")


class Begun(Grammar):
    """One whose answers begin with tokens that are known beforehand."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        out = list(output)
        return [mask_behind(out + list(drafts[:i])) for i in range(len(drafts) + 1)]

    def beginning(self) -> Sequence[int]:
        return FORCED


class Drawn:
    """Speculation whose depth is drawn at random."""

    def __init__(self, most: int, rng: random.Random) -> None:
        self.max_drafts, self.rng = abs(most), rng
        self.step_times = StepTimeModel()

    def begin_plan(self, width: int) -> None:
        """Nothing to decide."""

    def num_drafts(self, seq: Any) -> int:
        return self.rng.randint(0, self.max_drafts)

    def record_acceptance(self, seq: Any, fed: int, accepted: int) -> None:
        assert 0 <= accepted <= fed <= self.max_drafts, "accepted drafts that were not fed"

    def remove(self, seq: Any) -> None:
        assert seq.finish_reason, "forgotten while it goes on"


FOREVER = 1e9
"""Seconds of a pin: the unit in which the time of a run passes."""

GAPS = (2, 7, 8, 13)
"""These run only while no other request could."""


def _workload() -> list[Request]:
    """Duplicates and shared prefixes on purpose: together with a tight pool they catch the subtle bugs."""
    rng = random.Random(0)
    draw = lambda n: tuple(rng.randrange(94) for _ in range(n))  # noqa: E731
    shared = draw(23)
    shapes = [((shared if i % 2 else ()) + draw(rng.randrange(1, 20)), rng.randrange(1, 25)) for i in range(12)]
    shapes += [(shapes[1][0], 9), (shapes[1][0], 12), (shared[:20], 6), (shared[:20], 6)]
    logprobs = {3: SamplingParams(logprobs=0, prompt_logprobs=0), 13: SamplingParams(prompt_logprobs=0)}
    requests = [
        Request(
            id=str(i),
            prompt=prompt,
            max_new_tokens=new,
            stop=STOP if i % 3 else frozenset(),
            sampling=logprobs.get(i, SamplingParams()),
            priority=BACKGROUND if i in GAPS else i % 3,
            pins=(Pin(len(prompt) - i % 5, FOREVER * (1 + i % 3)), Pin(20, 3 * FOREVER)) if i % 2 else (),
            owner=str(i % 4),
        )
        for i, (prompt, new) in enumerate(shapes)
    ]
    fork = shared + draw(9)
    return requests + [Request(id=f"fork-{c}", prompt=fork, max_new_tokens=8, seed=7, choice=c) for c in range(3)]


REQUESTS = _workload()
CONSTRAINED = {r.id for i, r in enumerate(REQUESTS) if i % 4 == 2}
LONGEST = max(len(r.prompt) + r.max_new_tokens for r in REQUESTS)


def answers(requests: Sequence[Request], recurrent: bool, begun: bool = False) -> dict[str, list[int]]:
    """What each request's tokens must be in the end. begun: constrained ones begin with FORCED."""
    mask = mask_behind if begun else mask_after
    masks = {r.id: mask if r.id in CONSTRAINED else None for r in requests}
    how = [(r.id, (r.prompt, r.max_new_tokens, r.stop, (r.seed, r.choice))) for r in requests]
    return {id: naive(*each, masks[id], recurrent) for id, each in how}


EITHER = (False, True)
WANT = {(recurrent, begun): answers(REQUESTS, recurrent, begun) for recurrent in EITHER for begun in EITHER}
"""By whether the model has recurrent layers, and whether constrained answers begin with FORCED."""
BAD = [
    Request(id="poison", prompt=(5, 6, 7, POISON, 8), max_new_tokens=5),
    Request(id="sick", prompt=(9, 9, SICK), max_new_tokens=5),
]

AXES: dict[str, Sequence[Any]] = {
    "depth": (0, 1, 2, -1),  # -1: drawn anew each step
    "size": (1, 4, LONGEST + 8),
    "tight": (1, 2, 16),
    "reuse": (False, True),
    "cap": (1, 4, UNLIMITED),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (64, 7), (9, UNLIMITED)),  # budget, chunk
    "admit": ("continuous", "static"),
    "drafts": (0, 3, -3),  # -3: a depth from 0 to 3, drawn anew for each row and step
    "eager": (False, True),
    "late": (False, True),  # arrivals one a step, or all at once
    "order": ("fcfs", "priority"),
    "eviction": ("lru", "fifo"),
    "fails": (False, True),  # hiccups, a poison request and a sick one
    "pressure": ("preempt", "foresee", "reserve"),
    "pins": (0, 3, UNLIMITED),
    "snapshots": (None, None, (0, UNLIMITED), (1, 4), (3, UNLIMITED), (40, 8)),  # None: no state; slots and interval
    # slots of host memory, files, and tokens from which on a prefill engine computes prompts; not with states
    "tiers": (None, (1, 0), (4, 6), (40, 2), (500, 0), (6, 3, 1), (60, 0, 9)),
}
GROUPS = ((2, 1), (2, 2), (3, 2))
"""(groups of rows, depth): of pipelines of two and three stages."""


def sampled(rng: random.Random, count: int, axes: dict[str, Sequence[Any]] = AXES) -> list[dict[str, Any]]:
    """`count` different combinations: all of them do not fit in memory."""
    sizes = [len(values) for values in axes.values()]
    found = []
    for number in rng.sample(range(math.prod(sizes)), count):
        combination = {}
        for name, values in axes.items():
            number, at = divmod(number, len(values))
            combination[name] = values[at]
        found.append(combination)
    return found


def check(sch: scheduler.Scheduler, dev: HashDevice) -> None:
    """KV invariants and page ownership, after every commit."""
    pool = sch.kv.block_pool
    held = {id(s): s for s in sch.running}
    held |= {id(s): s for step in sch.inflight for s in (*step.seqs, *step.deferred_frees) if s.row is not None}
    want = [0] * len(pool.ref_counts)
    for page in (*(page for s in held.values() for page in s.blocks), *sch.kv.offload.held_blocks()):
        want[page] += 1
    assert want == pool.ref_counts, "reference counts"
    assert len({s.priority >= BACKGROUND for s in sch.running}) <= 1, "a background request runs while others run"
    assert all(s in sch.running and s.inflight_prefix == place for place, s in sch.kv.inflight_prefixes.items()), (
        "claims"
    )
    leaders = {id(s): s for s in (*held.values(), *sch.running)}
    assert sum(len(s.waiters) for s in leaders.values()) == sch.waiting.num_parked, "followers"
    pins = sch.kv.pins
    rest = [*pool.free_list, *getattr(pins.others, "_blocks", getattr(pins.others, "_allocated_at", ())), *pins._free]
    assert len(rest) == len(set(rest)) and set(rest) == {b for b, n in enumerate(want) if n == 0} - {0}, "free pages"
    assert all(end > pins.now for end, _, _ in pins.pinned.values()), "a pin outlives its time"
    assert len(pins.pinned) <= pins.max_blocks and pins._free.keys() <= pins.pinned.keys(), "pins"
    assert Counter(owner for _, _, owner in pins.pinned.values()) == pins.counts, "pins by owner"
    assert pins.pinned.keys() <= getattr(sch.kv.prefix_cache, "edges", {}).keys(), "a pinned page is not published"
    check_snapshots(sch, held.values())
    check_tiers(sch)
    rows = [s.row for s in held.values()]
    assert len(set(rows)) == len(rows) and not set(rows) & set(sch.free_rows), "rows"
    assert all(s.blocks == [] for s in sch.sequences.values() if s.row is None), "pages without a row"
    flying = dict.fromkeys(held, 0)
    for step in sch.inflight:
        assert len(step.plan.num_drafts) in (0, len(step.plan.spans)), "drafts of each span or of none"
        for s, span in zip(step.seqs, step.plan.spans, strict=True):
            flying[id(s)] += span.num_samples > 0
    assert all(s.num_inflight == flying[id(s)] for s in held.values()), "pending"
    hot = dev.hot()
    assert all(pool.ref_counts[b] == 1 for b in hot), "a page that a step in flight may write is free or shared"
    assert not hot & set(getattr(sch.kv.prefix_cache, "edges", {})), "a published page may still be written"


def check_snapshots(sch: Any, held: Iterable[Any]) -> None:
    """Every slot is free, of a published page, or in flight."""
    cache, inflight = sch.kv.prefix_cache, [slot for s in held for _, slot in s.snapshots_inflight]
    known = getattr(cache, "snapshots", {})
    assert known.keys() <= getattr(cache, "edges", {}).keys(), "a snapshot of a page that is not published"
    slots = [*known.values(), *inflight, *getattr(cache, "free_slots", ())]
    assert sorted(slots) == list(range(1, 1 + getattr(cache, "num_snapshots", 0))), "slots of snapshots"


def check_tiers(sch: Any) -> None:
    """Every slot is free or has one block; what is known of published pages is of these alone."""
    tiers = sch.kv.offload
    if hasattr(tiers, "store"):
        entries = {id(each): each for each in tiers.host.values()}
        entries |= {id(each): each for copy in tiers.pending.values() for each in copy.entries}
        entries |= {id(each): each for each in tiers._saved}
        slots = [*tiers.free_slots, *(each.slot for each in entries.values())]
        assert sorted(slots) == list(range(tiers.store.num_slots)), "slots of host memory"
        assert tiers.keys.keys() == sch.kv.prefix_cache.edges.keys(), "keys of published pages"
        assert tiers.arrived.keys() <= tiers.keys.keys(), "a page came back and is not published"
        assert len(tiers.disk) <= tiers.store.max_files, "too many files"


def keys_hold(sch: Any, dev: HashDevice) -> None:
    """A published page holds what its key says."""
    for page, (_, key) in getattr(sch.kv.prefix_cache, "edges", {}).items():
        assert tuple(dev.mem.get((page, i)) for i in range(dev.size)) == key, "published page, other contents"


class Run:
    """One combination, driven to its end."""

    def __init__(self, classes: CoreClasses, combo: dict[str, Any]) -> None:
        self.combo = combo
        c = combo
        self.pages = -(-LONGEST // c["size"]) * c["tight"]
        slots, interval = c.get("snapshots") or (None, UNLIMITED)
        radix = classes.RadixPrefixCache if slots is None else partial(classes.HybridPrefixCache, num_snapshots=slots)
        index = radix(c["size"]) if c["reuse"] else classes.NoPrefixCache()
        eviction = EVICTION_POLICIES[c["eviction"]]()
        bounds = {"min_shared_tokens": 4, "max_pinned_blocks": c["pins"], "snapshot_interval": interval}
        apart = ("pressure", "pins", "snapshots", "tiers", "groups")  # the same whatever these are
        work = sorted((axis, value) for axis, value in combo.items() if axis not in apart)
        begun = random.Random(f"opening {work}").random() < 0.2
        self.want, self.constraint = WANT[slots is not None, begun], Begun() if begun else Grammar()
        self.rng = random.Random(repr(work))
        seed = str(self.rng.random())
        self.groups = c.get("groups", 1)
        self.dev = HashDevice(self.pages, c["size"], eager=c["eager"], seed=seed, snapshots=slots, groups=self.groups)
        self.tiers = None
        if c["reuse"] and slots is None and (sizes := c.get("tiers")):
            slots, files, least = (*sizes, UNLIMITED)[:3]
            rng = random.Random(f"tiers {work}")
            store = HashStore(self.dev, slots, files, rng, faulty=c["fails"], min_tokens=least)
            self.tiers = classes.KVOffload(store, c["size"], store)
        kv = classes.KVCacheManager(self.pages, c["size"], index, eviction, **bounds, offload=self.tiers)
        budget, chunk = c["feed"]
        self.sch: scheduler.Scheduler = classes.Scheduler(
            kv,
            rows=64,
            max_num_seqs=c["cap"],
            max_num_batched_tokens=budget,
            max_background_tokens=UNLIMITED if chunk == UNLIMITED else 5,
            max_chunk_tokens=chunk,
            policy=make_policy(c["order"], batching=c["admit"], pressure=c["pressure"]),
            speculation=Drawn(c["drafts"], random.Random(7)) if c["drafts"] < 0 else FixedDrafts(c["drafts"]),
            groups=self.groups,
        )
        if c["fails"]:
            self.dev.hiccup = self._hiccup
        wired = random.Random(f"wired {work}").random() < 0.25  # by messages of the gRPC contract
        executor = Wired(self.dev) if wired else self.dev
        self.clock = VirtualClock()  # time passes only in `_pass_time`
        self.eng: engine.Engine = classes.Engine(self.sch, executor, lookahead=max(c["depth"], 0), clock=self.clock)
        self.said: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}
        self.finish: dict[str, str] = {}
        self.last_hiccup = -40
        self.emptied = random.Random(f"resets {work}")  # in some, the prefix cache is emptied now and then
        self.empties = c["reuse"] and self.emptied.random() < 0.25
        self.followed = self.expired = 0
        self._stamp()

    def _hiccup(self) -> bool:
        """Some steps fail for no reason at all, but never the same one twice."""
        apart = self.dev.steps - self.last_hiccup > 40
        if apart and self.rng.random() < 0.05:
            self.last_hiccup = self.dev.steps
            return True
        return False

    def _stamp(self) -> None:
        pool, dev, commit = self.sch.kv.block_pool, self.dev, self.sch.commit
        drop = pool.decref

        def stamped(page: int) -> None:
            assert pool.ref_counts[page] > 1 or page not in dev.hot(), "a page was freed while a step may write it"
            drop(page)

        def checked(result: Any) -> Any:
            out = commit(result)
            check(self.sch, dev)
            self.followed = max(self.followed, self.sch.waiting.num_parked)
            return out

        pool.decref, self.sch.commit = stamped, checked
        pins = self.sch.kv.pins
        pins.advance = partial(self._advance, advance=pins.advance)  # type: ignore[method-assign]

    def drive(self) -> None:
        todo = [*REQUESTS, *BAD] if self.combo["fails"] else list(REQUESTS)
        doomed = {i: self.rng.randrange(3, 40) for i in ("5", "9", "13", "fork-0")}
        n = 0
        while todo or self.eng.has_pending_work:
            if self.combo["depth"] < 0:
                self.eng.lookahead = self.rng.randrange(3)  # the depth is only a number: change it while running
            for _ in range(1 if self.combo["late"] else len(todo)):
                if todo:
                    request = todo.pop(0)
                    self.eng.add(request, self.constraint if request.id in CONSTRAINED else FREE)
            for i, when in doomed.items():
                if when == n:
                    self.eng.abort(i)
            if self.eng.recovery.active and self.rng.random() < 0.1:  # a suspect's client hangs up
                suspect = self.eng.recovery.groups[0][0].request.id
                doomed.setdefault(suspect, n)
                self.eng.abort(suspect)
            if self.empties and self.emptied.random() < 0.1:
                self.eng.reset_prefix_cache()
                assert not self.sch.kv.prefix_cache.match(REQUESTS[0].prompt, "")[0], "something is found after a reset"
            if n % 7 == 6:
                self._pass_time()
            for event in self.eng.step():
                self._hear(event)
            check(self.sch, self.dev)
            n += 1
            if n % 16 == 0:
                keys_hold(self.sch, self.dev)
            assert n < 6000, "stuck"
        keys_hold(self.sch, self.dev)
        self._settle(doomed)

    def _pass_time(self) -> None:
        """Some pins will end when the engine plans next."""
        self.clock.time += FOREVER / 2

    def _advance(self, now: float, advance: Callable[[float], None]) -> None:
        """Exactly those pins end whose time is over, and nothing else counts as expired."""
        pins = self.sch.kv.pins
        over = {block for block, (end, _, _) in pins.pinned.items() if end <= now}
        left, expired = pins.pinned.keys() - over, pins.ended["expired"]
        advance(now)
        assert pins.pinned.keys() == left, "pins that ended are not those whose time was over"
        assert pins.ended["expired"] == expired + len(over), "pins that expired are counted"
        self.expired += len(over)

    def _hear(self, event: Any) -> None:
        assert event.id not in self.finish, "an event after the end"
        self.said.setdefault(event.id, []).extend(event.tokens)
        self.logprobs.setdefault(event.id, []).extend(event.logprobs)
        self.prompt_logprobs.setdefault(event.id, []).extend(event.prompt_logprobs)
        if event.finish:
            self.finish[event.id] = event.finish

    def _settle(self, doomed: dict[str, int]) -> None:
        c, sch, dev = self.combo, self.sch, self.dev
        for _ in range(1000):
            sch.poll_offload(self.clock.now())
        assert self.tiers is None or not self.tiers.pending, "a copy never ends"
        assert sch.kv.block_pool.num_free == self.pages and not dev.unread and len(sch.free_rows) == 64, "leak"
        assert not sch.sequences and not len(sch.waiting), "a sequence was forgotten"
        for r in REQUESTS:
            made, want = self.said.get(r.id, []), self.want[r.id][len(r.prompt) :]
            if self.finish[r.id] == "abort":
                assert r.id in doomed and made == want[: len(made)], "aborted: not a prefix"
            else:
                assert made == want, f"tokens of {r.id}: {made} want {want}"
                assert self.finish[r.id] == ("stop" if made[-1] in r.stop else "length"), "finish reason"
                self._logprobs(r)
        if c["fails"]:
            ends = {self.finish[r.id] for r in BAD if r.id not in doomed}
            assert ends <= {"error"}, "errors are reported"
        else:
            assert not self.eng.failures, "a step failed: the device's assertions count as failed steps"
            # In groups, a row alone has no step ahead of its own.
            least = 1 if self.groups > 1 else min(c["depth"], 1) + 1
            assert c["depth"] < 0 or least <= dev.deepest <= c["depth"] + 1, "no look-ahead happened"
            if c["depth"] == 0:
                assert not sch.discarded_spans, "depth 0 wastes nothing"
        if c["drafts"] == 0:
            assert not sch.discarded_spans.get("length"), "a span was planned past a known end"

    def _logprobs(self, r: Request) -> None:
        tokens = self.want[r.id]
        if r.sampling.prompt_logprobs is not None:
            want = [logprob(tokens[:p], tokens[p]) for p in range(1, len(r.prompt))]
            assert self.prompt_logprobs[r.id] == want, "prompt log-probabilities"
        if r.sampling.logprobs is not None:
            want = [logprob(tokens[:p], tokens[p]) for p in range(len(r.prompt), len(tokens))]
            assert self.logprobs[r.id] == want, "log-probabilities"


def run(combo: dict[str, Any], classes: CoreClasses | None = None) -> Run:
    """Drive one combination; AssertionError says what broke."""
    it = Run(classes or CoreClasses(), combo)
    it.drive()
    return it
