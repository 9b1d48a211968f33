"""Copies of K/V blocks in simulations: between tiers of one engine, and from prefill engines to decode engines.

What is copied when, and what waits for it, is decided by the engines' own `KVOffload` and `PrefillOffload`. Here a copy
takes the seconds that a line in its bytes says, one after another of a kind.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from quire.engine.timing import VirtualClock
from quire.scheduler.kv_offload import NO_FAILURES, Copy, CopyDone, Prefill
from quire.scheduler.kv_transfer import choose_engine

Role = Literal["prefill", "decode"]
CopyTimes = Mapping[str, tuple[float, float]]
"""By kind of copy: seconds of any, and of each byte."""

_NETWORK = (1e-4, 1e-9)
GPU_COPIES: CopyTimes = MappingProxyType(
    {"save": (2e-5, 2e-11), "load": (2e-5, 2e-11), "write": (1e-4, 5e-10), "read": (1e-4, 5e-10), "send": _NETWORK}
)
CPU_COPIES: CopyTimes = MappingProxyType({**GPU_COPIES, "save": (1e-5, 2e-10), "load": (1e-5, 2e-10)})
"""Assumed where no calibration says more: 50 GB/s to and from a GPU, 5 GB/s within host memory, 2 GB/s of a disk, and
1 GB/s between engines, whose frames are authenticated."""


class SimulatedStore:
    """The store of an engine's tiers. num_slots, max_files: blocks of host memory and of files. times: of copies."""

    def __init__(self, clock: VirtualClock, num_slots: int, max_files: int, block_bytes: int, times: CopyTimes) -> None:
        self.clock, self.times = clock, times
        self.num_slots, self.max_files, self.block_bytes = num_slots, max_files, block_bytes
        self.other_side: SimulatedClient | SimulatedServer | None = None
        self._busy: dict[str, float] = {}
        self._ended: list[tuple[float, int, CopyDone]] = []
        self._count = 0

    def copy(self, kind: Copy, ticket: int, blocks: int) -> float:
        """Begin a copy once those of its kind before it have ended. Returns when it ends."""
        now, (base, per_byte) = self.clock.time, self.times[kind]
        end = max(now, self._busy.get(kind, 0.0)) + base + per_byte * blocks * self.block_bytes
        self._busy[kind] = end
        self.report(end, CopyDone(kind, ticket, NO_FAILURES, end - now))
        return end

    def report(self, at: float, done: CopyDone) -> None:
        """A copy ends at `at`."""
        self._count += 1
        heapq.heappush(self._ended, (at, self._count, done))

    def next_event(self) -> float:
        """When the next copy ends, or something comes from another engine; infinity: nothing is under way."""
        ended = self._ended[0][0] if self._ended else math.inf
        return ended if self.other_side is None else min(ended, self.other_side.next_event())

    def poll(self) -> Seq[CopyDone]:
        """The copies that have ended."""
        if isinstance(self.other_side, SimulatedClient):
            self.other_side.receive_until(self.clock.time)
        found = list[CopyDone]()
        while self._ended and self._ended[0][0] <= self.clock.time:
            found.append(heapq.heappop(self._ended)[2])
        return found

    def files(self) -> Seq[bytes]:
        """None are there at the start."""
        return ()

    def save(self, ticket: int, copies: Seq[tuple[bytes, int, int]], held: bool) -> None:
        """See `BlockStore`."""
        self.copy("save", ticket, len(copies))

    def overwritten(self, blocks: Seq[int]) -> None:
        """Nothing is copied."""

    def load(self, ticket: int, copies: Seq[tuple[bytes, int, int]]) -> None:
        """See `BlockStore`."""
        self.copy("load", ticket, len(copies))

    def read(self, ticket: int, copies: Seq[tuple[bytes, int]]) -> None:
        """See `BlockStore`."""
        self.copy("read", ticket, len(copies))

    def write(self, ticket: int, key: bytes, slot: int) -> None:
        """See `BlockStore`."""
        self.copy("write", ticket, 1)

    def remove(self, keys: Seq[bytes]) -> None:
        """It takes no time."""

    def wait(self, seconds: float) -> None:
        """The replica's clock waits."""

    def fileno(self) -> int:
        """Nothing is waited for by descriptor."""
        return -1

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A prompt that a prefill engine computes. keys: of its blocks that are missing, by number. coming: what is known
    to come, in order: seconds, and the number of a block, or why no more come."""

    server: SimulatedServer
    id: str
    keys: dict[int, bytes]
    tokens: int
    began: float
    progress: float
    coming: deque[tuple[float, int | str]] = field(default_factory=deque)


class SimulatedClient:
    """A decode engine's prefill engines."""

    def __init__(self, number: int, split: Split, store: SimulatedStore) -> None:
        self.number, self.split, self.store = number, split, store
        self.min_tokens = split.min_tokens
        self.asked: dict[int, _Asked] = {}

    def next_event(self) -> float:
        """When the next block comes, or is late."""
        return min((self._next(each) for each in self.asked.values()), default=math.inf)

    def _next(self, each: _Asked) -> float:
        late = each.progress + self.split.timeout
        return min(late, each.coming[0][0]) if each.coming else late

    def unavailable(self) -> str:
        """All are there."""
        return ""

    def receive(self, ticket: int, prefill: Prefill, copies: Seq[tuple[bytes, int]]) -> None:
        """Ask the engine that a server would ask."""
        loads = [
            sum(each.tokens for each in self.asked.values() if each.server is server) for server in self.split.servers
        ]
        server = self.split.servers[choose_engine(loads, copies[0][0])]
        keys, now = {number: key for number, (key, _) in enumerate(copies, prefill.first)}, self.store.clock.time
        id = f"prefill-{self.number}-{ticket}-{prefill.id}"
        self.asked[ticket] = _Asked(server, id, keys, len(prefill.tokens), now, now)
        server.ask(now + self.store.times["send"][0], self, ticket, prefill._replace(id=id))

    def receive_until(self, now: float) -> None:
        """Take the blocks that have come by now, and end what is late."""
        for ticket, each in list(self.asked.items()):
            while ticket in self.asked and (at := self._next(each)) <= now:
                if not each.coming or at < each.coming[0][0]:
                    self._end(ticket, at, "timeout")
                    continue
                _, what = each.coming.popleft()
                if isinstance(what, str):
                    self._end(ticket, at, what)
                    continue
                each.progress = at
                each.keys.pop(what, None)
                if not each.keys:
                    self._end(ticket, at, "")

    def cancel(self, ticket: int) -> None:
        """The prefill engine forgets it."""
        if ticket in self.asked:
            self._end(ticket, self.store.clock.time, "cancelled")

    def _end(self, ticket: int, at: float, reason: str) -> None:
        each = self.asked.pop(ticket)
        if reason in ("timeout", "cancelled"):
            each.server.forget(at + self.store.times["send"][0], each.id)
        failed = dict.fromkeys(each.keys.values(), reason)
        self.store.report(at, CopyDone("receive", ticket, failed, at - each.began, each.server.name))

    def close(self) -> None:
        """Nothing to end."""


class SimulatedServer:
    """A prefill engine's decode engines."""

    def __init__(self, name: str, store: SimulatedStore) -> None:
        self.name, self.store = name, store
        self.callers: dict[str, tuple[SimulatedClient, int]] = {}
        self._coming: list[tuple[float, int, Prefill | str]] = []
        self._count = 0

    def next_event(self) -> float:
        """When the next prompt comes."""
        return self._coming[0][0] if self._coming else math.inf

    def _come(self, at: float, what: Prefill | str) -> None:
        self._count += 1
        heapq.heappush(self._coming, (at, self._count, what))

    def ask(self, at: float, client: SimulatedClient, ticket: int, prefill: Prefill) -> None:
        """A decode engine asks for a prompt, which comes here at `at`."""
        self.callers[prefill.id] = client, ticket
        self._come(at, prefill)

    def forget(self, at: float, id: str) -> None:
        """A decode engine no longer wants it."""
        if self.callers.pop(id, None) is not None:
            self._come(at, id)

    def poll(self) -> Seq[Prefill | str]:
        """What has come."""
        found = list[Prefill | str]()
        while self._coming and self._coming[0][0] <= self.store.clock.time:
            found.append(heapq.heappop(self._coming)[2])
        return found

    def send(self, ticket: int, id: str, number: int, key: bytes, slot: int) -> None:
        """Blocks leave one after another, and come as they leave."""
        self._tell(id, self.store.copy("send", ticket, 1), number)

    def fail(self, id: str, reason: str) -> None:
        """No more blocks of this prompt are sent."""
        self._tell(id, self.store.clock.time + self.store.times["send"][0], reason)
        self.callers.pop(id, None)

    def _tell(self, id: str, at: float, what: int | str) -> None:
        if id in self.callers:
            client, ticket = self.callers[id]
            if ticket in client.asked:
                client.asked[ticket].coming.append((at, what))

    def done(self, id: str) -> None:
        """All its blocks were sent."""
        self.callers.pop(id, None)

    def drain(self) -> None:
        """A simulation ends when all have been answered."""

    def close(self) -> None:
        """Nothing to end."""


class Split:
    """What connects the prefill engines of a deployment with its decode engines. min_tokens: least tokens of a prompt
    that are computed there. timeout: seconds to wait for the next block of one. max_slowdown: see `KVOffload`."""

    def __init__(self, min_tokens: int, timeout: float, max_slowdown: float) -> None:
        self.min_tokens, self.timeout, self.max_slowdown = min_tokens, timeout, max_slowdown
        self.servers: list[SimulatedServer] = []
        self.clients: list[SimulatedClient] = []

    def server(self, store: SimulatedStore) -> SimulatedServer:
        """The connection of one prefill engine more."""
        store.other_side = server = SimulatedServer(f"prefill-{len(self.servers)}", store)
        self.servers.append(server)
        return server

    def client(self, store: SimulatedStore) -> SimulatedClient:
        """The connection of one decode engine more."""
        store.other_side = client = SimulatedClient(len(self.clients), self, store)
        self.clients.append(client)
        return client
