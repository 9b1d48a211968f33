"""A store of K/V tiers for `HashDevice`: copies end when it pleases, files are lost now and then, and every copy moves
what is really there at the time. It is also the client of a prefill engine, which sends some blocks, or all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from quire.scheduler.kv_offload import NO_FAILURES, CopyDone, Prefill
from quire.types import UNLIMITED
from tests.hash_model import POISON, SICK, HashDevice

GARBAGE = -9
Contents = tuple[int | None, ...]


class HashStore:
    """slots, max_files: how many blocks each tier holds. faulty: whether copies and files fail. min_tokens: of prompts
    that a prefill engine computes."""

    def __init__(
        self,
        device: HashDevice,
        slots: int,
        max_files: int,
        rng: random.Random,
        *,
        faulty: bool,
        min_tokens: int = UNLIMITED,
    ) -> None:
        self.min_tokens = min_tokens
        self.cancelled = set[int]()
        self.device, self.rng, self.faulty = device, rng, faulty
        self.num_slots, self.max_files, self.block_bytes = slots, max_files, 8 * device.size
        self.memory: dict[int, tuple[bytes, Contents]] = {}
        self.on_disk: dict[bytes, Contents] = {}
        self.work: list[tuple[CopyDone, Callable[[], CopyDone]]] = []
        self.busy: dict[int, int] = {}
        self.held: dict[int, Callable[[int], None]] = {}
        """What takes a block that was held when it was saved last."""
        self.closed = False

    def files(self) -> Sequence[bytes]:
        return list(self.on_disk)

    def _later(self, done: CopyDone, work: Callable[[], CopyDone]) -> None:
        self.work.append((done, work))

    def _fails(self) -> bool:
        return self.faulty and self.rng.random() < 0.1

    def _contents(self, block: int) -> Contents:
        return tuple(self.device.mem.get((block, i)) for i in range(self.device.size))

    def save(self, ticket: int, copies: Sequence[tuple[bytes, int, int]], held: bool) -> None:
        """Blocks that are held are taken as late as they may be."""
        taken: dict[int, Contents] = {}

        def take(block: int) -> None:
            taken.setdefault(block, self._contents(block))

        for _, block, slot in copies:
            assert not self.busy.get(slot), "a slot is written while a copy uses it"
            self.busy[slot] = 1
            if held:
                self.held[block] = take
            else:
                take(block)
        failed = {key: "copy" for key, _, _ in copies if self._fails()}
        resets = self.device.resets

        def work() -> CopyDone:
            for key, block, slot in copies:
                take(block)
                # What a device copied that failed meanwhile is worth nothing.
                kept = taken[block] if self.device.resets == resets else (GARBAGE,) * self.device.size
                self.memory[slot] = key, kept
                self.busy[slot] = 0
            return CopyDone("save", ticket, failed, 1e-6)

        self._later(CopyDone("save", ticket), work)

    def overwritten(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self.held:
                self.held.pop(block)(block)

    def load(self, ticket: int, copies: Sequence[tuple[bytes, int, int]]) -> None:
        self.overwritten([block for _, _, block in copies])
        failed = {key: "copy" for key, _, _ in copies if self._fails()}

        def write() -> None:
            for key, slot, block in copies:
                if key not in failed:
                    held, contents = self.memory[slot]
                    assert held == key, "a slot has another block"
                    for i, token in enumerate(contents):
                        if token is not None:
                            self.device.mem[block, i] = token

        early = self.rng.random() < 0.5
        if early:
            write()

        def work() -> CopyDone:
            if not early:
                write()
            return CopyDone("load", ticket, failed, 1e-6)

        self._later(CopyDone("load", ticket), work)

    def read(self, ticket: int, copies: Sequence[tuple[bytes, int]]) -> None:
        for _, slot in copies:
            assert not self.busy.get(slot), "a slot is written while a copy uses it"
            self.busy[slot] = 1

        def work() -> CopyDone:
            failed = {}
            for key, slot in copies:
                self.busy[slot] = 0
                if key not in self.on_disk or self._fails():
                    failed[key] = "checksum"
                    self.on_disk.pop(key, None)
                else:
                    self.memory[slot] = key, self.on_disk[key]
            return CopyDone("read", ticket, failed, 1e-6)

        self._later(CopyDone("read", ticket), work)

    def unavailable(self) -> str:
        return "down" if self.rng.random() < 0.1 else ""

    def receive(self, ticket: int, prefill: Prefill, copies: Sequence[tuple[bytes, int]]) -> None:
        size = self.device.size
        assert len(prefill.tokens) == (prefill.first + len(copies)) * size + 1, "the token after the blocks"
        for _, slot in copies:
            assert not self.busy.get(slot), "a slot is written while a copy uses it"
            self.busy[slot] = 1
        ill = {POISON, SICK}.intersection(prefill.tokens)  # its steps fail there, too
        lost = {key for key, _ in copies if ill or self._fails()}

        def work() -> CopyDone:
            reason = "cancelled" if ticket in self.cancelled else "closed"
            failed = dict.fromkeys([key for key, _ in copies] if ticket in self.cancelled else lost, reason)
            for number, (key, slot) in enumerate(copies, prefill.first):
                self.busy[slot] = 0
                tokens = tuple(prefill.tokens[number * size : (number + 1) * size])
                self.memory[slot] = key, (GARBAGE,) * size if key in failed else tokens
            return CopyDone("receive", ticket, failed, 1e-6, "a prefill engine")

        self._later(CopyDone("receive", ticket), work)

    def cancel(self, ticket: int) -> None:
        self.cancelled.add(ticket)

    def write(self, ticket: int, key: bytes, slot: int) -> None:
        held, contents = self.memory[slot]
        assert held == key, "a slot has another block"
        if fails := self._fails():
            contents = ()

        def work() -> CopyDone:
            assert self.memory[slot][0] == key, "a slot was given away while it was written to a file"
            if not fails:
                self.on_disk[key] = contents
            return CopyDone("write", ticket, {key: "io"} if fails else NO_FAILURES, 1e-6)

        self._later(CopyDone("write", ticket), work)

    def remove(self, keys: Sequence[bytes]) -> None:
        def work() -> CopyDone:
            for key in keys:
                self.on_disk.pop(key, None)
            return CopyDone("write", 0)

        self._later(CopyDone("write", 0), work)

    def poll(self) -> Sequence[CopyDone]:
        """Those of a kind end in order, as one thread ends them."""
        ended, left, stuck = list[CopyDone](), [], set[str]()
        for done, work in self.work:
            if done.kind in stuck or self.rng.random() < 0.4:
                stuck.add(done.kind)
                left.append((done, work))
            elif (made := work()).ticket:
                ended.append(made)
        self.work = left
        return ended

    def wait(self, seconds: float) -> None:
        """There is something to poll at any time."""

    def fileno(self) -> int:
        raise AssertionError("nothing waits here")

    def close(self) -> None:
        self.closed = True
