"""Routing policies: which replica of a model gets a request.

A policy holds what it decides by: the replicas, and how many requests each has outstanding. It reads no clock and does
no I/O, so the same object routes for a proxy (`frontend/upstream.py`), for a deployment on a cluster, and in a
simulation (`sim/fleet.py`). Prompts are given as chunks, hashable values of which two prompts with the same beginning
share the first ones: pieces of a request's text, or names of its KV blocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Sequence as Seq
from hashlib import blake2b

from quire.errors import InvalidConfig, nearest

Chunks = Seq[Hashable]
"""A prompt's beginning, in pieces."""

MAX_IMBALANCE = 4
"""Requests that a replica chosen for its cached prefix may have beyond those of the least loaded one."""


class RoutingPolicy:
    """Least loaded: the replica with the fewest outstanding requests, in turn among equals. Subclasses override
    `choose`.

    max_imbalance: for policies that prefer a replica for what it has cached, the requests that it may have beyond those
    of the least loaded one.
    """

    needs_load = True
    """Whether a choice depends on which requests have ended. If not, a whole trace can be routed before it is run."""

    def __init__(self, *, max_imbalance: int = MAX_IMBALANCE) -> None:
        self.max_imbalance = max_imbalance
        self.outstanding: dict[str, int] = {}
        """By replica, its requests that have not ended."""
        self._turns: dict[str, int] = {}
        self._num_turns = 0
        self._heap: list[tuple[int, int, str]] = []

    # ---------------------------------------------------------------- what happens

    def add(self, replica: str) -> None:
        """A replica takes requests from now on. One that is known stays as it is."""
        if replica not in self._turns:
            self._turns[replica] = 0
            self.outstanding.setdefault(replica, 0)
            self._changed(replica)

    def remove(self, replica: str) -> None:
        """A replica takes no more requests. Those that it has still count until they end."""
        self._turns.pop(replica, None)
        if not self.outstanding.get(replica):
            self.outstanding.pop(replica, None)

    def sent(self, replica: str, prompt: Chunks = ()) -> None:
        """A request with this prompt was sent to `replica`."""
        self.outstanding[replica] = self.outstanding.get(replica, 0) + 1
        self._num_turns += 1
        if replica in self._turns:
            self._turns[replica] = self._num_turns
            self._changed(replica)

    def finished(self, replica: str) -> None:
        """A request of `replica` ended, or left it for another one."""
        self.outstanding[replica] -= 1
        if replica in self._turns:
            self._changed(replica)
        elif not self.outstanding[replica]:
            del self.outstanding[replica]

    # ---------------------------------------------------------------- choices

    @property
    def replicas(self) -> Collection[str]:
        """Those that take requests."""
        return self._turns.keys()

    def choose(self, prompt: Chunks = (), without: Collection[str] = ()) -> str | None:
        """The replica for a request with this prompt, none of `without`; None where there is none.

        Changes nothing: `sent` says that the request went there.
        """
        return self.least_loaded(without)

    def least_loaded(self, without: Collection[str] = ()) -> str | None:
        """The replica with the fewest outstanding requests, of equal ones the one that was chosen longest ago."""
        if without:
            rest = [each for each in self._turns if each not in without]
            return min(rest, key=lambda each: (self.outstanding[each], self._turns[each]), default=None)
        heap = self._heap
        while heap:  # entries of earlier states are dropped when they come to the top
            load, turn, replica = heap[0]
            if self._turns.get(replica) == turn and self.outstanding[replica] == load:
                return replica
            heapq.heappop(heap)
        return None

    def may_take(self, replica: str, least: str) -> bool:
        """Whether `replica` is not much busier than the least loaded one."""
        return self.outstanding[replica] <= self.outstanding[least] + self.max_imbalance

    def _changed(self, replica: str) -> None:
        heapq.heappush(self._heap, (self.outstanding[replica], self._turns[replica], replica))
        if len(self._heap) > 64 + 8 * len(self._turns):
            self._heap = [(self.outstanding[each], turn, each) for each, turn in self._turns.items()]
            heapq.heapify(self._heap)


class RoundRobin(RoutingPolicy):
    """In turn, whatever they have to do."""

    needs_load = False

    def choose(self, prompt: Chunks = (), without: Collection[str] = ()) -> str | None:
        """The next one."""
        replicas = list(self._turns)
        for i in range(len(replicas)):
            replica = replicas[(self._num_turns + i) % len(replicas)]
            if replica not in without:
                return replica
        return None


class PrefixHash(RoutingPolicy):
    """By a hash of the prompt's first chunk, unless that replica is much busier than the least loaded one.

    Consistent hashing (Karger et al., STOC 1997): a replica that comes or goes moves only its own share of the prompts.
    Several routers choose alike without knowing of each other.
    """

    NUM_POINTS = 128
    """Points of each replica on the ring."""

    def __init__(self, *, max_imbalance: int = MAX_IMBALANCE) -> None:
        super().__init__(max_imbalance=max_imbalance)
        self._ring: list[tuple[int, str]] = []

    def add(self, replica: str) -> None:
        """See RoutingPolicy."""
        if replica not in self._turns:
            for i in range(self.NUM_POINTS):
                insort(self._ring, (_hash64(f"{i} {replica}"), replica))
        super().add(replica)

    def remove(self, replica: str) -> None:
        """See RoutingPolicy."""
        self._ring = [point for point in self._ring if point[1] != replica]
        super().remove(replica)

    def choose(self, prompt: Chunks = (), without: Collection[str] = ()) -> str | None:
        """The first point of the ring behind the prompt's."""
        least = self.least_loaded(without)
        if least is None or len(self._turns) - len(without) < 2:
            return least
        start = bisect_right(self._ring, (_hash64(repr(prompt[0]) if prompt else ""), ""))
        for i in range(len(self._ring)):
            replica = self._ring[(start + i) % len(self._ring)][1]
            if replica not in without:
                return replica if self.may_take(replica, least) else least
        return least


class LongestPrefix(RoutingPolicy):
    """The replica that was sent the longest beginning of the prompt, unless it is much busier than the least loaded
    one.

    Replicas are not asked what they have cached: what they were sent is remembered, `max_chunks` chunks of each, least
    recently used forgotten first. Give it about as many as a replica's cache holds.
    """

    def __init__(self, *, max_imbalance: int = MAX_IMBALANCE, max_chunks: int = 1 << 16) -> None:
        super().__init__(max_imbalance=max_imbalance)
        self.max_chunks = max_chunks
        self._known: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, set[str]] = {}
        """By hash of a beginning, the replicas that were sent it."""

    def add(self, replica: str) -> None:
        """See RoutingPolicy."""
        self._known.setdefault(replica, OrderedDict())
        super().add(replica)

    def remove(self, replica: str) -> None:
        """See RoutingPolicy. What it has cached is taken to be lost."""
        for key in self._known.pop(replica, ()):
            self._forget(key, replica)
        super().remove(replica)

    def sent(self, replica: str, prompt: Chunks = ()) -> None:
        """See RoutingPolicy."""
        super().sent(replica, prompt)
        known = self._known.get(replica)
        if known is None:
            return
        for key in reversed(_beginnings(prompt)):  # the shortest is used last, and forgotten last
            known[key] = None
            known.move_to_end(key)
            self._holders.setdefault(key, set()).add(replica)
        while len(known) > self.max_chunks:
            self._forget(known.popitem(last=False)[0], replica)

    def _forget(self, key: int, replica: str) -> None:
        holders = self._holders[key]
        holders.discard(replica)
        if not holders:
            del self._holders[key]

    def matched(self, prompt: Chunks) -> dict[str, int]:
        """By replica, how many of the prompt's chunks it was sent, from the first on; those without any left out."""
        found: dict[str, int] = {}
        for length, key in enumerate(_beginnings(prompt), 1):
            holders = self._holders.get(key)
            if not holders:
                break
            found.update(dict.fromkeys(sorted(holders), length))
        return found

    def choose(self, prompt: Chunks = (), without: Collection[str] = ()) -> str | None:
        """The longest match among those that may take it; of equal ones, the least loaded."""
        least = self.least_loaded(without)
        if least is None:
            return None
        matched = {each: n for each, n in self.matched(prompt).items() if each in self._turns and each not in without}
        allowed = [each for each in matched if self.may_take(each, least)]
        if not allowed:
            return least
        return min(allowed, key=lambda each: (-matched[each], self.outstanding[each], self._turns[each]))


ROUTING_POLICIES: Mapping[str, type[RoutingPolicy]] = {
    "least_loaded": RoutingPolicy,
    "round_robin": RoundRobin,
    "prefix_hash": PrefixHash,
    "longest_prefix": LongestPrefix,
}
"""The policies by name."""


def make_routing_policy(name: str, *, max_imbalance: int = MAX_IMBALANCE) -> RoutingPolicy:
    """The policy of this name. Raises InvalidConfig for an unknown one."""
    if name not in ROUTING_POLICIES:
        known = ", ".join(ROUTING_POLICIES)
        raise InvalidConfig(
            f"the routing policy must be one of {known}, not {name!r}.{nearest(name, ROUTING_POLICIES)}"
        )
    return ROUTING_POLICIES[name](max_imbalance=max_imbalance)


def _hash64(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _beginnings(prompt: Chunks) -> list[int]:
    """A hash of each beginning of the prompt, the shortest first."""
    out, key = [], 0
    for chunk in prompt:
        key = hash((key, chunk))
        out.append(key)
    return out
