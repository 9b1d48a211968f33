"""The prefill engine's half of a prefill/decode split: prompts of decode engines are computed as requests of one token,
and their blocks are sent as they are computed.

The decode engine's half is `KVOffload`, to which a prefill engine is one more tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from quire.scheduler.kv_offload import BlockStore, CopyDone, HostBlock, KVOffload, PendingCopy, Prefill
from quire.scheduler.sequence import Sequence
from quire.types import Request, RequestStepOutput


class PrefillServer(Protocol):
    """The transport to decode engines: where another one than TCP fits. Sends end through `BlockStore.poll`."""

    def poll(self) -> Seq[Prefill | str]:
        """Prompts to compute since the last call, each with an id of its own, and ids of those no longer wanted."""

    def send(self, ticket: int, id: str, number: int, key: bytes, slot: int) -> None:
        """Send block `number` of a prompt from a slot of host memory. It ends within bounded time."""

    def fail(self, id: str, reason: str) -> None:
        """No more blocks of this prompt will be sent."""

    def done(self, id: str) -> None:
        """All its blocks were given to `send`."""

    def drain(self) -> None:
        """Refuse further prompts as busy."""

    def close(self) -> None:
        """End all."""


def choose_engine(loads: Seq[float], key: bytes) -> int:
    """Which prefill engine a decode engine asks: the one with the least load; of several, one that follows from the
    key, so that prompts that begin alike find each other's blocks.

    loads: tokens that it has asked each for; infinite where it cannot ask. key: of the first block that is wanted.
    """
    least, count = min(loads), len(loads)
    return min(range(count), key=lambda i: (loads[i] > least, (i - key[0]) % count))


@dataclass(eq=False, slots=True)
class Export:
    """A prompt whose blocks are sent. next: number of the first one that is not computed yet, of `end`. held: blocks of
    the device, each with a reference, that wait for a slot. saving: those that are being copied to one."""

    next: int
    end: int
    held: deque[tuple[int, bytes, int]] = field(default_factory=deque)
    saving: deque[tuple[int, HostBlock]] = field(default_factory=deque)


class PrefillOffload(KVOffload):
    """K/V tiers of an engine that computes prompts for others. server: where their requests come from."""

    def __init__(self, store: BlockStore, block_size: int, server: PrefillServer) -> None:
        super().__init__(store, block_size)
        self.server = server
        self.exports: dict[str, Export] = {}
        self.running = set[str]()
        """Ids of others' requests that this engine has not ended."""
        self._flush_due = False

    # ---------------------------------------------------------------- requests

    def incoming(self) -> Seq[Request | str]:
        """Requests of one token: when it is sampled, all blocks of the prompt are computed."""
        found = list[Request | str]()
        for each in self.server.poll():
            if isinstance(each, str):
                self._forget(each)
                found.append(each)
                continue
            self.exports[each.id] = Export(each.first, (len(each.tokens) - 1) // self.block_size)
            self.running.add(each.id)
            prompt = tuple(each.tokens)
            found.append(
                Request(id=each.id, prompt=prompt, max_new_tokens=1, cache_salt=each.salt, priority=each.priority)
            )
        return found

    def refuse(self, id: str) -> None:
        """It can never run here."""
        self.running.discard(id)
        self._fail(id, "refused")

    def outgoing(self, outputs: list[RequestStepOutput]) -> list[RequestStepOutput]:
        """Others' requests have no use for tokens. One that ended before its blocks were computed has failed."""
        if not self.running:
            return outputs
        own = list[RequestStepOutput]()
        for output in outputs:
            if output.id not in self.running:
                own.append(output)
            elif output.finish is not None:
                self.running.discard(output.id)
                export = self.exports.get(output.id)
                if export is not None and export.next < export.end:
                    self._fail(output.id, "failed")
        return own

    # ---------------------------------------------------------------- blocks

    def admit(self, seq: Sequence) -> None:
        """Blocks that the prefix cache has can be sent at once."""
        super().admit(seq)
        self.computed(seq)

    def computed(self, seq: Sequence) -> None:
        """Hold the blocks that are new until they are copied to host memory."""
        export = self.exports.get(seq.request.id)
        if export is None:
            return
        for number in range(export.next, min(export.end, seq.num_computed // self.block_size)):
            block = seq.blocks[number]
            self.pool.incref(block)
            export.held.append((number, self.keys_of(seq, number + 1)[number], block))
            export.next = number + 1
            self._flush_due = True

    def timeout(self) -> float | None:
        """Seconds until `poll` is due; 0 while blocks wait for `flush`, which no other request may bring about."""
        return 0.0 if self._flush_due else super().timeout()

    def flush(self) -> None:
        """Copies of blocks that are to be sent are copies as those of evicted ones."""
        self._flush_due = False
        copied = [block for export in self.exports.values() for block in self._save(export)]
        super().flush()
        for block in copied:
            self.pool.decref(block)
        self._send_saved()

    def _save(self, export: Export) -> list[int]:
        """Give slots to blocks, while there are any. Returns the blocks."""
        copied = list[int]()
        while export.held:
            number, key, block = export.held[0]
            entry = self.host.get(key)
            if entry is None:
                if (slot := self._take_slot()) is None:
                    break
                entry = self.host[key] = HostBlock(key, slot, key in self.disk)
                self._saves.append((key, block, slot))
                self._saved.append(entry)
            entry.users += 1
            export.saving.append((number, entry))
            export.held.popleft()
            copied.append(block)
        return copied

    def _send_saved(self) -> None:
        """Send what has been copied to host memory; a prompt whose copy failed has failed."""
        for id, export in list(self.exports.items()):
            while export.saving and export.saving[0][1].ready:
                number, entry = export.saving.popleft()
                self.server.send(self._begin(PendingCopy("send", [entry])), id, number, entry.key, entry.slot)
            if export.saving and export.saving[0][1].dropped:
                self._fail(id, "failed")
            elif export.next >= export.end and not export.held and not export.saving:
                del self.exports[id]
                self.server.done(id)

    def poll(self, now: float) -> Seq[Sequence]:
        """What has been copied to host memory is sent."""
        freed = super().poll(now)
        self._send_saved()
        return freed

    def _end(self, copy: PendingCopy, done: CopyDone) -> None:
        super()._end(copy, done)
        if copy.kind == "send":
            self.stats.prefill_seconds += done.seconds

    # ---------------------------------------------------------------- forgetting

    def _forget(self, id: str) -> None:
        """Nothing more of it is sent."""
        export = self.exports.pop(id, None)
        if export is None:
            return
        for _, _, block in export.held:
            self.pool.decref(block)
        for _, entry in export.saving:
            self._release(entry)

    def _fail(self, id: str, reason: str) -> None:
        self._forget(id)
        self.server.fail(id, reason)

    def reset(self) -> None:
        """What the device has is lost: the other engines compute what has not been sent."""
        for id in list(self.exports):
            self._fail(id, "failed")
        super().reset()

    def held_blocks(self) -> Seq[int]:
        """Those that wait for a slot, too."""
        held = [block for export in self.exports.values() for _, _, block in export.held]
        return [*super().held_blocks(), *held]

    def drain(self) -> bool:
        """Whether others' prompts are being computed or sent; more of them are refused."""
        self.server.drain()
        return bool(self.running or self.exports or any(copy.kind == "send" for copy in self.pending.values()))

    def close(self) -> None:
        """The other engines compute what has not been sent."""
        self.server.close()
        super().close()
