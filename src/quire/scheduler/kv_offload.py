"""K/V tiers: evicted blocks go to host memory and from there to a directory, and come back where that is faster than
computing them. Another engine, which computes prompts for this one, is a tier as well: blocks are received from it.

A block is known by the hash of its tokens, of all tokens before it and of the salt. Blocks that come back are put into
the prefix cache once they have arrived, so everything else sees them as blocks that were computed here. Nothing waits
for a copy but the sequence that wants the block: it waits beside the queue.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, get_args

from quire.scheduler.block_pool import BlockPool
from quire.scheduler.pins import Pins
from quire.scheduler.sequence import Sequence, Transfer
from quire.scheduler.step_time import LineFit, StepTimeModel
from quire.types import UNLIMITED, Request, RequestStepOutput

Tier = Literal["host", "disk", "remote"]
Copy = Literal["save", "load", "read", "write", "receive", "send"]
"""save: from the device to host memory; load: back; write: from host memory to a file; read: back; receive: from a
prefill engine to host memory; send: from host memory to a decode engine."""

FILES_TRIED, PREFILL_TRIED, ALL_TRIED = 1, 2, 3
"""Values of `Sequence.num_fetches`."""
LONGEST_WAIT = 1.0
"""Seconds that a sequence waits for blocks at least, before it computes them after all; or twice the time of that."""
MIN_AHEAD = 8
"""Blocks of the device that are saved together before they are evicted."""
MAX_WRITES = 16
"""Files that are being written at once."""
RETRY = 0.98
"""What the predicted time of a copy is multiplied by, each time that it was too long, so that it is measured again."""

NO_FAILURES: Mapping[bytes, str] = MappingProxyType({})


class CopyDone(NamedTuple):
    """A copy has ended. failed: what went wrong, by the key of the block: none of the others did. seconds: it took.
    peer: address of the other engine, if there was one."""

    kind: Copy
    ticket: int
    failed: Mapping[bytes, str] = NO_FAILURES
    seconds: float = 0.0
    peer: str = ""


class BlockStore(Protocol):
    """Copies blocks between the device, slots of host memory, and files. Every copy is started, and ends later.

    num_slots: of host memory. block_bytes: of a block. max_files: most files at once; 0: there is no directory.
    """

    num_slots: int
    block_bytes: int
    max_files: int

    def files(self) -> Seq[bytes]:
        """Keys of the files that are there at the start, least recently used first."""

    def save(self, ticket: int, copies: Seq[tuple[bytes, int, int]], held: bool) -> None:
        """Copy (key, block, slot) to host memory. Later steps may overwrite the blocks at once; those that are held not
        before `overwritten` was called, or a load of them."""

    def overwritten(self, blocks: Seq[int]) -> None:
        """Steps from now on may overwrite blocks that were held."""

    def load(self, ticket: int, copies: Seq[tuple[bytes, int, int]]) -> None:
        """Copy (key, slot, block) to the device, each after what was saved of the block before."""

    def read(self, ticket: int, copies: Seq[tuple[bytes, int]]) -> None:
        """Read files into (key, slot)."""

    def write(self, ticket: int, key: bytes, slot: int) -> None:
        """Write a slot to a file."""

    def remove(self, keys: Seq[bytes]) -> None:
        """Remove files, also those whose writing has not ended."""

    def poll(self) -> Seq[CopyDone]:
        """The copies that have ended since the last call."""

    def wait(self, seconds: float) -> None:
        """Return when there is something to poll, or after so many seconds."""

    def fileno(self) -> int:
        """A descriptor that can be read while there is something to poll."""

    def close(self) -> None:
        """End; copies that have not ended are dropped."""


class Prefill(NamedTuple):
    """A prompt that another engine is to compute, and whose blocks it sends as they are computed.

    id: of the request. tokens: those of the blocks, and the one after them. first: number of the first block that is
    wanted; those before are known. salt, priority: as the request's.
    """

    id: str
    tokens: Seq[int]
    first: int
    salt: str
    priority: int


class PrefillClient(Protocol):
    """The transport to prefill engines: where another one than TCP fits. Copies end through `BlockStore.poll`.

    min_tokens: least tokens that a prefill engine is asked to compute; UNLIMITED: it is asked for none.
    """

    min_tokens: int

    def unavailable(self) -> str:
        """Why no prefill engine can be asked now; empty if one can."""

    def receive(self, ticket: int, prefill: Prefill, copies: Seq[tuple[bytes, int]]) -> None:
        """Ask for blocks, each into (key, slot), in order. It ends in bounded time, whatever the other side does."""

    def cancel(self, ticket: int) -> None:
        """End it soon, and have the other side forget it; no effect if it has ended."""

    def close(self) -> None:
        """End all."""


class NoPrefillClient:
    """There are no prefill engines."""

    min_tokens = UNLIMITED

    def unavailable(self) -> str:
        """There is none."""
        return "none"

    def receive(self, ticket: int, prefill: Prefill, copies: Seq[tuple[bytes, int]]) -> None:
        """Never called."""

    def cancel(self, ticket: int) -> None:
        """Nothing was asked for."""

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False, slots=True)
class HostBlock:
    """A block in host memory. on_disk: a file has it, too. origin: where it came from when it came here last. users:
    copies under way from or to its slot. dropped: it is found no more, and its slot is free once nothing uses it."""

    key: bytes
    slot: int
    on_disk: bool
    origin: Tier = "host"
    ready: bool = False
    users: int = 1
    dropped: bool = False


@dataclass(eq=False, slots=True)
class PendingCopy:
    """A copy that has not ended. waiters: sequences that wait for it, until `due`. Of a load: tokens, salt: the prefix
    whose last blocks it brings. held: device blocks before them. blocks: device blocks that it writes. Of what a
    prefill engine sends: began, and amount, the blocks that had been asked for and had not come, with these; predicted,
    computing: see `Transfer`."""

    kind: Copy
    entries: list[HostBlock]
    waiters: list[Sequence] = field(default_factory=list)
    due: float = math.inf
    tokens: list[int] = field(default_factory=list)
    salt: str = ""
    held: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cancelled: bool = False
    began: float = 0.0
    amount: int = 0
    predicted: float = 0.0
    computing: float = math.inf


@dataclass(slots=True)
class OffloadStats:
    """Totals since the start, in blocks. copied: by kind of copy. evicted: by tier. failures: by reason. num_declined:
    prefixes that were computed since that was predicted to be faster. num_queried, num_hit: tokens looked up, and
    tokens that came back and were used, by tier. prefills: prompts that prefill engines were to compute, by what came
    of it: done, or why some of their blocks are computed here. prefill_seconds: those took, together."""

    copied: dict[Copy, int] = field(default_factory=lambda: dict.fromkeys(get_args(Copy), 0))
    evicted: dict[Tier, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    failures: dict[str, int] = field(default_factory=dict)
    num_declined: int = 0
    num_queried: int = 0
    num_hit: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(get_args(Tier), 0))
    prefills: dict[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0

    def fail(self, reason: str, count: int = 1) -> None:
        """Count a failure."""
        self.failures[reason] = self.failures.get(reason, 0) + count


class Offload:
    """What the scheduler needs of the tiers below the device. As it is, there are none: what is evicted is gone."""

    def __init__(self) -> None:
        self.stats = OffloadStats()

    def attach(self, pool: BlockPool, pins: Pins) -> None:
        """The pool whose blocks are kept, and which of them are pinned."""

    def cached(self, block: int, seq: Sequence, index: int) -> None:
        """Block number `index` of a sequence is in the prefix cache as `block`."""

    def computed(self, seq: Sequence) -> None:
        """Its blocks are written as far as `num_computed`, by a step that is committed."""

    def evict(self, block: int) -> None:
        """`block` is about to be overwritten."""

    def fetch(
        self, seq: Sequence, known: Seq[int], step_times: StepTimeModel, max_tokens: int, num_queued: int
    ) -> bool:
        """Start to bring back blocks of `known`, its tokens that may be cached. True: it waits for that."""
        return False

    def admit(self, seq: Sequence) -> None:
        """A sequence has got its cached blocks."""

    def poll(self, now: float) -> Seq[Sequence]:
        """Take what has ended. Returns the sequences that wait no longer."""
        return ()

    def incoming(self) -> Seq[Request | str]:
        """Requests that other engines have made of this one, and ids of those that they no longer want."""
        return ()

    def refuse(self, id: str) -> None:
        """An incoming request cannot run here."""

    def outgoing(self, outputs: list[RequestStepOutput]) -> list[RequestStepOutput]:
        """Those of this engine's own requests."""
        return outputs

    def drain(self) -> bool:
        """Take no more requests of other engines. Whether some are left."""
        return False

    def flush(self) -> None:
        """Start the copies that planning asked for, before the plan is launched."""

    def timeout(self) -> float | None:
        """Seconds until `poll` is due although no copy has ended; None: never."""
        return None

    def reset(self) -> None:
        """The device lost its K/V."""

    def clear(self) -> None:
        """Forget everything, on every tier."""

    def num_blocks(self) -> Mapping[Tier, int]:
        """Blocks that are kept, by tier."""
        return {}

    def block_bytes(self) -> int:
        """Bytes of one."""
        return 0

    def fileno(self) -> int | None:
        """A descriptor that can be read while there is something to poll; None: there never is."""
        return None

    def wait(self, seconds: float) -> None:
        """Return when there is something to poll, or after so many seconds."""

    def held_blocks(self) -> Seq[int]:
        """Device blocks with a reference for a copy, one entry a reference."""
        return ()

    def close(self) -> None:
        """End."""


class NoOffload(Offload):
    """No tiers, and no other engines."""


def first_key(salt: str) -> bytes:
    """What the key of a prefix's first block continues: prefixes of different salts have no key in common."""
    return hashlib.sha256(b"salt\0" + salt.encode("utf-8", "surrogatepass")).digest()


def next_key(key: bytes, tokens: Seq[int]) -> bytes:
    """The key of the block of `tokens` after the block of `key`, 32 bytes. The digest of an image, which stands in its
    tokens' places, is larger than a token."""
    try:
        return hashlib.sha256(key + b"i" + array("i", tokens).tobytes()).digest()
    except OverflowError:
        return hashlib.sha256(key + b"t" + ",".join(map(str, tokens)).encode()).digest()


class KVOffload(Offload):
    """Which block is on which tier, and what is copied when. prefill: the engines that compute prompts for this one.
    max_slowdown: how many times as long as computing a prompt here they may be predicted to take.

    A block that is evicted from the device is copied to host memory, unless it is there. Where host memory holds more
    than the device, blocks are copied as soon as some are full, so that eviction costs nothing. From a full host memory
    the least recently used one goes; half of it is kept in files as well, or free, so that none is lost for want of a
    file. Of files, too, the least recently used goes. A block that comes back stays on the tiers that it was on.
    """

    next_key: Callable[[bytes, Seq[int]], bytes] = staticmethod(next_key)

    def __init__(
        self,
        store: BlockStore,
        block_size: int,
        prefill: PrefillClient | None = None,
        max_slowdown: float = math.inf,
    ) -> None:
        super().__init__()
        self.max_slowdown = max_slowdown
        self.store, self.block_size = store, block_size
        self.prefill: PrefillClient = NoPrefillClient() if prefill is None else prefill
        self.keys: dict[int, bytes] = {}
        """By block of the device, if it is in the prefix cache."""
        self.arrived: dict[int, Tier] = {}
        """Blocks of the device that came back, and that no sequence has used since; and from where."""
        self.host: OrderedDict[bytes, HostBlock] = OrderedDict()
        self.disk: OrderedDict[bytes, None] = OrderedDict((key, None) for key in store.files())
        self.free_slots = list(range(store.num_slots - 1, -1, -1))
        self.pending: dict[int, PendingCopy] = {}
        self.times: dict[Copy, LineFit] = {"load": LineFit(), "read": LineFit(), "receive": LineFit()}
        self.now = 0.0
        self._optimism: dict[Copy, float] = dict.fromkeys(self.times, 1.0)
        self._num_copies = self._num_writes = 0
        self._ahead: dict[int, bytes] = {}
        """Keys of blocks of the device that are to be saved before they are evicted."""
        self._saves_ahead = False
        self._overwritten: list[int] = []
        """Blocks that were evicted while they are saved."""
        self._saves: list[tuple[bytes, int, int]] = []
        self._saved: list[HostBlock] = []
        self._loads: list[int] = []
        self._lookup: dict[bytes, int] = {}
        """The tickets that bring a block nearer, by its key."""
        self._may_write = True

    def attach(self, pool: BlockPool, pins: Pins) -> None:
        """The pool whose blocks are kept. What comes back takes the place of no pinned one."""
        self.pool, self.pins = pool, pins
        self._saves_ahead = self.store.num_slots > pool.num_blocks
        self._make_room_on_disk(0)

    # ---------------------------------------------------------------- from the device

    def keys_of(self, seq: Sequence, count: int) -> list[bytes]:
        """The keys of its first blocks, at least `count`."""
        keys, size = seq.block_keys, self.block_size
        if len(keys) < count:
            tokens = seq.prefix_tokens
            key = keys[-1] if keys else first_key(seq.request.cache_salt)
            for at in range(len(keys) * size, count * size, size):
                keys.append(key := self.next_key(key, tokens[at : at + size]))
        return keys

    def cached(self, block: int, seq: Sequence, index: int) -> None:
        """Note its key."""
        self.keys[block] = key = self.keys_of(seq, index + 1)[index]
        if self._saves_ahead and key not in self.host:
            self._ahead[block] = key

    def evict(self, block: int) -> None:
        """Copy it to host memory before the next step, unless it is there."""
        self.arrived.pop(block, None)
        self._ahead.pop(block, None)
        key = self.keys.pop(block, None)
        if key is None:
            return
        if (held := self.host.get(key)) is not None:
            self.host.move_to_end(key)
            if not held.ready:
                self._overwritten.append(block)
        elif (slot := self._take_slot()) is None:
            self.stats.fail("no_room")
        else:
            entry = self.host[key] = HostBlock(key, slot, key in self.disk)
            self._saves.append((key, block, slot))
            self._saved.append(entry)

    # ---------------------------------------------------------------- slots and files

    def _take_slot(self) -> int | None:
        """A free slot, else that of the least recently used block, if possible of one that is on disk as well. None:
        copies use all."""
        if not self.free_slots:
            idle = (each for each in self.host.values() if each.ready and not each.users)
            first = next(idle, None)
            if first is None:
                return None
            victim = first
            if self.store.max_files and not first.on_disk:
                victim = next((each for each in idle if each.on_disk), first)
            self.stats.evicted["host"] += 1
            self._drop(victim)
        return self.free_slots.pop()

    def _drop(self, entry: HostBlock) -> None:
        """It is found no more; its slot is free, now or when no copy uses it."""
        del self.host[entry.key]
        entry.dropped = True
        if not entry.users:
            self.free_slots.append(entry.slot)

    def _release(self, entry: HostBlock) -> None:
        """A copy from or to it has ended."""
        entry.users -= 1
        if entry.dropped and not entry.users:
            self.free_slots.append(entry.slot)

    def _write_ahead(self) -> None:
        """Write the least recently used blocks to files, until half of the slots can be given away."""
        self._may_write = False
        wanted = max(1, self.store.num_slots // 2) - len(self.free_slots)
        for entry in self.host.values():
            if wanted <= 0 or self._num_writes >= MAX_WRITES:
                return
            if not entry.ready:
                continue
            wanted -= 1
            if not entry.on_disk:
                self._write(entry)

    def _write(self, entry: HostBlock) -> None:
        """Start to write a block to a file."""
        self._make_room_on_disk(1)
        self.disk[entry.key] = None
        entry.on_disk = True
        entry.users += 1
        self._num_writes += 1
        self.store.write(self._begin(PendingCopy("write", [entry])), entry.key, entry.slot)

    def _make_room_on_disk(self, count: int) -> None:
        """Remove the least recently used files until there is room for `count` more."""
        while self.disk and len(self.disk) + count > self.store.max_files:
            key, _ = self.disk.popitem(last=False)
            self._forget_file(key)
            self.stats.evicted["disk"] += 1
            self.store.remove([key])

    def _forget_file(self, key: bytes) -> None:
        self.disk.pop(key, None)
        if (entry := self.host.get(key)) is not None:
            entry.on_disk = False

    # ---------------------------------------------------------------- back to the device

    def fetch(
        self, seq: Sequence, known: Seq[int], step_times: StepTimeModel, max_tokens: int, num_queued: int
    ) -> bool:
        """First what is on disk is read, then what is on no tier is computed by a prefill engine, then all of it is
        loaded; reads and loads if that is predicted to pay."""
        if seq.num_fetches >= ALL_TRIED:
            return False
        size, salt = self.block_size, seq.request.cache_salt
        held, _ = self.pool.prefix_cache.match(known, salt)
        wanted = self.keys_of(seq, len(known) // size)[len(held) : len(known) // size]
        run = self._present(wanted)
        if not seq.num_fetches:
            self.stats.num_queried += len(wanted) * size
        if (ticket := next((self._lookup[key] for key in run if key in self._lookup), None)) is not None:
            self.pending[ticket].waiters.append(seq)
            return True
        compute = self._compute_seconds(len(run) * size, step_times, max_tokens)
        if not seq.num_fetches:
            seq.num_fetches = FILES_TRIED
            if self._read(seq, run, compute):
                return True
        if seq.num_fetches < PREFILL_TRIED:
            seq.num_fetches = PREFILL_TRIED
            # Those behind it in the queue wait for what is computed here.
            if self._receive(
                seq, run, wanted, len(held), lambda n: num_queued * self._compute_seconds(n, step_times, max_tokens)
            ):
                return True
        run = run[: next((i for i, key in enumerate(run) if key not in self.host), len(run))]
        rest = -(-len(seq.tokens) // size) - len(held)
        room = self.pool.num_free - self.pins.num_free - sum(not self.pool.ref_counts[block] for block in held)
        if run and rest > room:
            return False  # it cannot be admitted now, either
        seq.num_fetches = ALL_TRIED
        compute = self._compute_seconds(len(run) * size, step_times, max_tokens)
        return bool(run) and self._load(seq, run, known, held, compute)

    def _present(self, wanted: Seq[bytes]) -> Seq[bytes]:
        """The first of them, as far as each is on a tier; of those that are on disk alone as many as half the slots."""
        reads = 0
        for i, key in enumerate(wanted):
            if (entry := self.host.get(key)) is not None:
                if entry.ready or key in self._lookup:
                    continue
                return wanted[:i]
            reads += 1
            if key not in self.disk or 2 * reads > self.store.num_slots:
                return wanted[:i]
        return wanted

    def _compute_seconds(self, tokens: int, step_times: StepTimeModel, max_tokens: int) -> float:
        """What steps take that compute so many tokens; infinite while too little has been measured."""
        line = step_times.fit()
        if not line.per_token:
            return math.inf
        return line.per_token * tokens + line.base * -(-tokens // max_tokens)

    def _copy_seconds(self, kind: Copy, count: int) -> float:
        """What a copy of so many blocks takes; 0 while none has been measured."""
        base, per_block = self.times[kind].line()
        return (base + per_block * count) * self._optimism[kind]

    def _declined(self, seconds: float, compute: float, *kinds: Copy) -> bool:
        """Whether copies of these kinds take too long. Each time that they do, less is predicted the next time."""
        if seconds < compute:
            return False
        for kind in kinds:
            self._optimism[kind] *= RETRY
        return True

    def _receive_seconds(self, amount: int) -> float:
        """What it takes until a prefill engine has sent so many blocks, with those that it was asked for before: by
        what earlier ones have taken, and by how long the oldest one has been waited for."""
        waiting = next((copy for copy in self.pending.values() if copy.kind == "receive"), None)
        least = 0.0 if waiting is None else (self.now - waiting.began) * amount / waiting.amount
        return max(self._copy_seconds("receive", amount), least)

    def _read(self, seq: Sequence, run: Seq[bytes], compute: float) -> bool:
        """Start to read those of `run` that are on disk alone."""
        missing = [key for key in run if key not in self.host]
        if not missing:
            return False
        seconds = self._copy_seconds("read", len(missing)) + self._copy_seconds("load", len(run))
        if self._declined(seconds, compute, "read", "load"):
            self.stats.num_declined += 1
            return False
        for key in run:
            if key in self.host:
                self.host.move_to_end(key)
        entries = list[HostBlock]()
        for key in missing:
            if (slot := self._take_slot()) is None:
                break
            self.disk.move_to_end(key)
            entries.append(HostBlock(key, slot, True, "disk"))
            self.host[key] = entries[-1]
        if not entries:
            return False
        ticket = self._begin(PendingCopy("read", entries, [seq], self._due(compute)))
        self._lookup |= dict.fromkeys((each.key for each in entries), ticket)
        self.store.read(ticket, [(each.key, each.slot) for each in entries])
        return True

    def _receive(
        self, seq: Sequence, run: Seq[bytes], wanted: Seq[bytes], num_held: int, compute: Callable[[int], float]
    ) -> bool:
        """Have a prefill engine compute the blocks behind `run`, of one prompt as many as half the slots. compute:
        seconds that so many tokens take here."""
        size, first = self.block_size, num_held + len(run)
        keys = wanted[len(run) :][: self.store.num_slots // 2]
        if len(keys) * size < self.prefill.min_tokens:
            return False
        reason = "images" if seq.request.images else self.prefill.unavailable()
        asked = sum(len(copy.entries) for copy in self.pending.values() if copy.kind == "receive")
        predicted, computing = self._receive_seconds(asked + len(keys)), compute(len(keys) * size)
        if not reason and self._declined(predicted, self.max_slowdown * computing, "receive"):
            reason = "slower"
        entries = list[HostBlock]()
        for key in run:
            if key in self.host:
                self.host.move_to_end(key)
        for key in () if reason else keys:
            if key in self.host or (slot := self._take_slot()) is None:
                break
            entries.append(HostBlock(key, slot, key in self.disk, "remote"))
            self.host[key] = entries[-1]
        if not entries:
            nothing = Transfer("", len(keys) * size, 0, 0, 0.0, reason or "no_room", predicted, computing)
            self._end_prefill([seq], nothing)
            return False
        ticket = self._begin(
            PendingCopy(
                *("receive", entries, [seq]),
                began=self.now,
                amount=asked + len(entries),
                predicted=predicted,
                computing=computing,
            )
        )
        self._lookup |= dict.fromkeys((each.key for each in entries), ticket)
        tokens, request = seq.tokens[: (first + len(entries)) * size + 1], seq.request
        prefill = Prefill(request.id, tokens, first, request.cache_salt, request.priority)
        self.prefill.receive(ticket, prefill, [(each.key, each.slot) for each in entries])
        return True

    def _end_prefill(self, waiters: Seq[Sequence], transfer: Transfer) -> None:
        """Note what came of it."""
        outcome = transfer.failed or "done"
        self.stats.prefills[outcome] = self.stats.prefills.get(outcome, 0) + 1
        self.stats.prefill_seconds += transfer.seconds
        for seq in waiters:
            seq.transfer = transfer

    def _load(self, seq: Sequence, run: Seq[bytes], known: Seq[int], held: list[int], compute: float) -> bool:
        """Start to copy a run of blocks that are in host memory behind the blocks `held` of the same prefix."""
        pool, entries = self.pool, [self.host[key] for key in run]
        received = any(each.origin == "remote" for each in entries)
        if not received and self._declined(self._copy_seconds("load", len(run)), compute, "load"):
            self.stats.num_declined += 1
            return False
        for block in held:
            pool.incref(block)
        for entry in reversed(entries):
            entry.users += 1
            self.host.move_to_end(entry.key)
        blocks = [pool.allocate() for _ in run]
        tokens = list(known[: (len(held) + len(run)) * self.block_size])
        ticket = self._begin(
            PendingCopy("load", entries, [seq], self._due(compute), tokens, seq.request.cache_salt, held, blocks)
        )
        self._lookup |= dict.fromkeys(run, ticket)
        self._loads.append(ticket)
        return True

    def _due(self, compute: float) -> float:
        return self.now + max(LONGEST_WAIT, 0.0 if compute == math.inf else 2 * compute)

    def _begin(self, copy: PendingCopy) -> int:
        self._num_copies += 1
        self.pending[self._num_copies] = copy
        return self._num_copies

    def admit(self, seq: Sequence) -> None:
        """Count what came back for it: the first sequence that uses a block counts it."""
        seq.num_fetches = 0
        came = [self.arrived.pop(block, None) for block in seq.blocks]
        found: dict[Tier, int] = {tier: came.count(tier) * self.block_size for tier in get_args(Tier)}
        seq.num_from_host, seq.num_from_disk, seq.num_from_remote = found["host"], found["disk"], found["remote"]
        for tier, count in found.items():
            self.stats.num_hit[tier] += count

    # ---------------------------------------------------------------- copies start and end

    def flush(self) -> None:
        """Saves first: a load may write to a block that is saved."""
        written = {block for ticket in self._loads for block in self.pending[ticket].blocks}
        saves, self._saves = [*zip(self._saves, self._saved, strict=True)], []
        self._saved = []
        groups = [[each for each in saves if (each[0][1] in written) == held] for held in (False, True)]
        ahead = self._begin_ahead() if len(self._ahead) >= MIN_AHEAD else []
        begun = [
            (self._begin(PendingCopy("save", [entry for _, entry in group])), [copy for copy, _ in group], held)
            for group, held in ((groups[0], False), (groups[1], True), (ahead, True))
            if group
        ]
        for each in begun:
            self.store.save(*each)
        if self._overwritten:
            blocks, self._overwritten = self._overwritten, []
            self.store.overwritten([block for block in blocks if block not in written])
        loads, self._loads = self._loads, []
        for ticket in loads:
            copy = self.pending[ticket]
            pairs = zip(copy.entries, copy.blocks, strict=True)
            self.store.load(ticket, [(entry.key, entry.slot, block) for entry, block in pairs])
        if self._may_write and self.store.max_files:
            self._write_ahead()

    def _begin_ahead(self) -> list[tuple[tuple[bytes, int, int], HostBlock]]:
        """Give slots to blocks that are full, as far as there are any: in the order in which they would be evicted."""
        begun = list[tuple[tuple[bytes, int, int], HostBlock]]()
        ahead, self._ahead = self._ahead, {}
        for block, key in reversed(ahead.items()):
            if key in self.host:
                continue
            if (slot := self._take_slot()) is None:
                break
            entry = self.host[key] = HostBlock(key, slot, key in self.disk)
            begun.append(((key, block, slot), entry))
        return begun

    def poll(self, now: float) -> Seq[Sequence]:
        """Take what has ended, let those go on that have waited too long, and give up what none waits for."""
        self.now = now
        if not self.pending:
            return ()
        freed = list[Sequence]()
        for done in self.store.poll():
            copy = self.pending.pop(done.ticket)
            self._end(copy, done)
            freed += copy.waiters
        for ticket, copy in self.pending.items():
            if copy.kind == "receive" and copy.waiters and all(seq.finish_reason for seq in copy.waiters):
                copy.waiters = []
                self.prefill.cancel(ticket)
            if copy.due <= now and copy.waiters:
                self.stats.fail("timeout")
                for seq in copy.waiters:
                    seq.num_fetches = ALL_TRIED
                freed += copy.waiters
                copy.waiters = []
        return freed

    def _end(self, copy: PendingCopy, done: CopyDone) -> None:
        """A copy has ended: its blocks are where it brought them, but for those that failed."""
        for reason in done.failed.values():
            self.stats.fail(reason)
        moved = len(copy.entries) - len(done.failed)
        self.stats.copied[copy.kind] += moved
        measured = moved
        if copy.kind == "receive":  # what did not come in time says how slow it is, what was lost says nothing
            measured = copy.amount if set(done.failed.values()) <= {"timeout"} else 0
        if copy.kind in self.times and measured:
            self._optimism[copy.kind] = 1.0
            self.times[copy.kind].add(measured, done.seconds)
        if copy.kind == "receive":
            reason, size = next(iter(done.failed.values()), ""), self.block_size
            sizes = len(copy.entries) * size, moved * size, moved * self.store.block_bytes
            found = Transfer(done.peer, *sizes, done.seconds, reason, copy.predicted, copy.computing)
            self._end_prefill(copy.waiters, found)
        if copy.kind in ("load", "read", "receive"):
            for entry in copy.entries:
                self._lookup.pop(entry.key, None)
        if copy.kind == "load":
            self._end_load(copy, done)
        elif copy.kind == "write":
            self._num_writes -= 1
            if done.failed and not copy.entries[0].dropped:
                self._forget_file(copy.entries[0].key)
        for entry in copy.entries:
            if copy.kind in ("save", "read", "receive"):
                self._may_write = True
                if entry.key in done.failed and copy.kind == "read":
                    self._forget_file(entry.key)
                if entry.key in done.failed and not entry.dropped:
                    self._drop(entry)
                entry.ready = not entry.dropped
            self._release(entry)
        self._may_write = self._may_write or (copy.kind == "write" and not done.failed)

    def _end_load(self, copy: PendingCopy, done: CopyDone) -> None:
        """Put the blocks into the prefix cache, up to the first that failed."""
        pool, size, cache = self.pool, self.block_size, self.pool.prefix_cache
        start = len(copy.held)
        held, node = cache.match(copy.tokens[: start * size], copy.salt)
        if not copy.cancelled and len(held) == start and node is not None:
            for i, (entry, block) in enumerate(zip(copy.entries, copy.blocks, strict=True), start):
                if entry.key in done.failed:
                    break
                node = cache.insert(node, copy.tokens, i * size, copy.salt, block)
                if cache.contains(block):
                    self.keys[block], self.arrived[block] = entry.key, entry.origin
                    entry.origin = "host"
        for block in reversed((*copy.held, *copy.blocks)):
            pool.decref(block)

    def timeout(self) -> float | None:
        """Seconds until the first sequence has waited too long."""
        due = min((copy.due for copy in self.pending.values() if copy.waiters), default=math.inf)
        return None if due == math.inf else max(0.0, due - self.now)

    # ---------------------------------------------------------------- forgetting

    def reset(self) -> None:
        """What is being copied from or to the device is of no use; other tiers keep what they have."""
        self.keys.clear()
        self.arrived.clear()
        self._ahead.clear()
        self._overwritten.clear()
        for copy in self.pending.values():
            if copy.kind == "save":
                for entry in copy.entries:
                    if not entry.dropped:
                        self._drop(entry)
            copy.cancelled = True
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        """Saves that were not begun; loads that were not are begun, so that they end as others do."""
        for entry in self._saved:
            if not entry.dropped:
                self._drop(entry)
            self._release(entry)
        self._saves, self._saved = [], []
        self.flush()

    def clear(self) -> None:
        """Forget everything, on every tier."""
        self.reset()
        for entry in list(self.host.values()):
            self._drop(entry)
        self.store.remove(list(self.disk))
        self.disk.clear()

    # ---------------------------------------------------------------- what can be read

    def num_blocks(self) -> Mapping[Tier, int]:
        """Blocks that are kept, by tier."""
        return {"host": len(self.host), "disk": len(self.disk)}

    def block_bytes(self) -> int:
        """Bytes of one."""
        return self.store.block_bytes

    def fileno(self) -> int | None:
        """A descriptor that can be read while there is something to poll."""
        return self.store.fileno()

    def wait(self, seconds: float) -> None:
        """Return when there is something to poll, or after so many seconds."""
        self.store.wait(seconds)

    def held_blocks(self) -> Seq[int]:
        """Device blocks with a reference for a copy, one entry a reference."""
        return [block for copy in self.pending.values() for block in (*copy.held, *copy.blocks)]

    def close(self) -> None:
        """End; before, blocks that are in host memory alone are written, as far as time allows, the last used first."""
        for entry in [*reversed(self.host.values())][: self.store.max_files]:
            if entry.ready and not entry.on_disk:
                self._write(entry)
        self.prefill.close()
        self.store.close()
