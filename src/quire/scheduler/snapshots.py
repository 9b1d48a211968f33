"""Snapshots of recurrent states: the prefix cache of models whose past is not K/V alone.

K/V of a prefix is of use only with the state after it. Blocks of the radix tree therefore own snapshots, slots on the
device with the state after the block's last token, and a prefix is found up to the deepest block that has one. Where
snapshots are taken is decided per sequence, see `StateSnapshots`; a plan names them, and a step writes them while it
feeds the token, so that neither a chunk nor a step more is needed. A snapshot is found once its step is committed, as
blocks are. A slot may be given away while a step in flight reads it: steps run in order, and read before they write.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.scheduler.block_pool import RadixNode, RadixPrefixCache
from quire.scheduler.pins import Pins
from quire.scheduler.plan import Span
from quire.scheduler.sequence import Sequence
from quire.types import UNLIMITED


class SnapshotStats(NamedTuple):
    """Snapshots that are kept, and how many were taken, gone on from, and evicted so far."""

    num_kept: int = 0
    num_taken: int = 0
    num_hits: int = 0
    num_evicted: int = 0


class HybridPrefixCache(RadixPrefixCache):
    """A radix tree some of whose blocks have snapshots, and a match ends at one.

    num_snapshots: slots, numbered from 1; with none nothing is ever found.
    """

    def __init__(self, block_size: int, num_snapshots: int) -> None:
        super().__init__(block_size)
        self.num_snapshots = num_snapshots
        self.snapshots: OrderedDict[int, int] = OrderedDict()
        """Slots by block, least recently used first."""
        self.shared: set[int] = set()
        """Blocks whose snapshots were used at least twice; the turns of a conversation use each other's once."""
        self.used: set[int] = set()
        self.free_slots = list(range(num_snapshots, 0, -1))
        self.num_taken = self.num_hits = self.num_evicted = 0

    def match(self, tokens: Seq[int], salt: str) -> tuple[list[int], RadixNode | None]:
        """Walk from the root, and back to the last block that has a snapshot."""
        path = self.path(tokens, salt)
        found = self._resumable(path)
        return [block for block, _ in path[:found]], path[found - 1][1] if found else self.root

    def path(self, tokens: Seq[int], salt: str) -> list[tuple[int, RadixNode]]:
        """(block, node behind it) of all blocks whose K/V is known, whether they have snapshots or not."""
        node, path = self.root, []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = node.get(self.key(tokens, start, salt))
            if found is None:
                break
            path.append(found)
            node = found[1]
        return path

    def _resumable(self, path: Seq[tuple[int, RadixNode]]) -> int:
        """How many blocks of a path lead to the last one that has a snapshot."""
        return next((i for i in range(len(path), 0, -1) if path[i - 1][0] in self.snapshots), 0)

    def frontier(self, tokens: Seq[int], salt: str) -> Seq[tuple[RadixNode | None, int]]:
        """Each node from where a match ends to where the K/V ends: another sequence may be computing on any of them."""
        path = self.path(tokens, salt)
        nodes = [self.root, *(node for _, node in path)]
        return [(nodes[i], i * self.block_size) for i in range(self._resumable(path), len(nodes))]

    def common_length(self, node: RadixNode, tokens: Seq[int], start: int, salt: str) -> int | None:
        """Counted from where the match ended, along the K/V that is known behind it."""
        at = start
        while (found := node.get(self.key(tokens, at, salt))) is not None:
            node, at = found[1], at + self.block_size
        more = super().common_length(node, tokens, at, salt)
        return None if more is None else at - start + more

    def known_length(self, tokens: Seq[int], salt: str) -> int:
        """Tokens whose K/V is cached."""
        return len(self.path(tokens, salt)) * self.block_size

    def use(self, block: int) -> int:
        """The slot of a block's snapshot, which is now the most recently used one."""
        self.num_hits += 1
        self.snapshots.move_to_end(block)
        (self.shared if block in self.used else self.used).add(block)
        return self.snapshots[block]

    def take(self, pins: Pins) -> int | None:
        """A slot to write to; the snapshot there is evicted. None: steps in flight write to all.

        The least recently used one goes, of those that several did not use while these are more than a quarter, and of
        pinned blocks last: else many prompts that are not repeated would evict the beginnings that others share.
        """
        if not self.free_slots:
            spared = self.shared if len(self.snapshots) - len(self.shared) > self.num_snapshots // 4 else ()
            unpinned = [block for block in self.snapshots if block not in pins.pinned]
            first = next(iter(unpinned or self.snapshots), None)
            if first is None:
                return None
            block = next((each for each in unpinned if each not in spared), first)
            self.num_evicted += 1
            self._drop(block)
        self.num_taken += 1
        return self.free_slots.pop()

    def _drop(self, block: int) -> None:
        self.shared.discard(block)
        self.used.discard(block)
        self.free_slots.append(self.snapshots.pop(block))

    def attach(self, slot: int, tokens: Seq[int], salt: str) -> None:
        """`slot` has the state after `tokens`, whole blocks. It is free again if their K/V is not cached."""
        path = self.path(tokens, salt)
        block = path[-1][0] if len(path) * self.block_size == len(tokens) else None
        if block is None or block in self.snapshots:
            self.free_slots.append(slot)
        else:
            self.snapshots[block] = slot

    def remove(self, block: int) -> None:
        """Its snapshot goes with it."""
        super().remove(block)
        if block in self.snapshots:
            self.num_evicted += 1
            self._drop(block)

    def clear(self) -> None:
        """Snapshots go, too; slots that steps in flight write to are given back when their sequences are freed."""
        super().clear()
        for block in list(self.snapshots):
            self._drop(block)


class Snapshots:
    """Where a sequence's states are kept for others. As it is, none are, and all that is cached can be gone on from."""

    def admit(self, seq: Sequence) -> None:
        """A sequence is admitted; its cached blocks are known."""

    def shared_length(self, leader: Sequence, length: int) -> int:
        """Up to where a sequence can go on from what `leader` will have cached of a common beginning of `length`."""
        return length

    def plan(self, seqs: Seq[Sequence], spans: Seq[Span]) -> tuple[tuple[int, int, int], ...]:
        """`Plan.snapshots` of a step."""
        return ()

    def commit(self, seq: Sequence) -> None:
        """The blocks of a sequence have been cached."""

    def free(self, seq: Sequence) -> None:
        """A sequence leaves the device, and no step of it is in flight."""

    def stats(self) -> SnapshotStats:
        """Counts since the start."""
        return SnapshotStats()


class NoSnapshots(Snapshots):
    """The past of a model is K/V alone, or nothing is cached."""


class StateSnapshots(Snapshots):
    """Snapshots are taken where other sequences are likely to go on, or known to:

    - at the last whole block of a prompt, for the next turn of a conversation;
    - where a prompt leaves a cached one, whose K/V reaches farther than its snapshots: the end of a shared beginning;
    - where a waiting sequence with a common beginning leaves it, before that is computed;
    - at the ends of prefixes that are to be pinned;
    - every `interval` tokens, for the beginnings not yet known to be shared; of answers, too, where no drafts are
      verified, since only then the host knows how long a sequence is.
    """

    def __init__(self, cache: HybridPrefixCache, pins: Pins, interval: int = UNLIMITED) -> None:
        self.cache, self.pins = cache, pins
        self.interval = -(-interval // cache.block_size) * cache.block_size

    def admit(self, seq: Sequence) -> None:
        """Note where its states are kept, and where it begins."""
        request, size, cached, tokens = seq.request, self.cache.block_size, seq.num_cached, seq.prefix_tokens
        seq.snapshot = self.cache.use(seq.blocks[-1]) if cached else 0
        ends = {(len(tokens) - 1) // size * size, self.cache.known_length(tokens[:-1], request.cache_salt)}
        ends |= {min(length, len(tokens)) // size * size for length, _ in request.pins}
        ends.add((cached // self.interval + 1) * self.interval)
        seq.snapshot_lengths = sorted(end for end in ends if end > cached)
        seq.num_fed = cached

    def shared_length(self, leader: Sequence, length: int) -> int:
        """Where it is planned already, the deepest snapshot on its way; else a snapshot will be taken at `length`."""
        if length <= leader.num_fed or not self.cache.num_snapshots:
            return max((at for at, _ in leader.snapshots_inflight if at <= length), default=0)
        self._want(leader, length)
        return length

    def _want(self, seq: Sequence, length: int) -> None:
        if length not in seq.snapshot_lengths:
            insort(seq.snapshot_lengths, length)

    def plan(self, seqs: Seq[Sequence], spans: Seq[Span]) -> tuple[tuple[int, int, int], ...]:
        """The snapshots that fall into a step's spans."""
        taken = list[tuple[int, int, int]]()
        for j, seq in enumerate(seqs):
            end = seq.num_fed = len(seq.tokens) + seq.max_inflight - seq.num_unscheduled
            while seq.snapshot_lengths[0] <= end:
                length, start = seq.snapshot_lengths.pop(0), end - spans[j].num_tokens
                if not length % self.interval:
                    self._want(seq, length + self.interval)
                # With drafts in flight the host does not know how long the sequence is.
                if seq.max_inflight == seq.num_inflight and (slot := self.cache.take(self.pins)):
                    seq.snapshots_inflight.append((length, slot))
                    taken.append((j, length - start, slot))
        return tuple(taken)

    def commit(self, seq: Sequence) -> None:
        """What has been computed can be found."""
        inflight = seq.snapshots_inflight
        while inflight and inflight[0][0] <= seq.num_computed and seq.prefix_node is not None:
            length, slot = inflight.pop(0)
            self.cache.attach(slot, seq.prefix_tokens[:length], seq.request.cache_salt)

    def free(self, seq: Sequence) -> None:
        """Its snapshots that were not found are free again."""
        self.cache.free_slots += (slot for _, slot in seq.snapshots_inflight)
        seq.snapshots_inflight, seq.snapshot_lengths = [], []

    def stats(self) -> SnapshotStats:
        """Those of the cache."""
        cache = self.cache
        return SnapshotStats(len(cache.snapshots), cache.num_taken, cache.num_hits, cache.num_evicted)
