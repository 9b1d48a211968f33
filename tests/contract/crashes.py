"""An engine that is killed again and again under all kinds of clients.

`python -m tests.contract.crashes MINUTES [--streams 256] [--connections 1500] [--every 120] [--json FILE]` runs it,
prints a table, writes the figures to FILE, and exits with 1 if something is not as it must be: every stream ends with
an answer or an error, memory and descriptors stay flat, and there are answers again within 4 seconds of each kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.protocol import REPORT_SIGNAL
from quire.server import connection
from tests.contract.poison import poisons
from tests.contract.soak import SLOW
from tests.contract.streams import normal
from tests.contract.wire import HOST, answers, ask, request, send
from tests.live import Live, resident, serving

WITHIN = 4.0
"""Seconds from a kill to the first token of the next engine."""

HANGS = 300.0
"""Seconds after which an exchange counts as hung, on however slow a machine."""

FINE = ("answer", "error event", "refused")
"""How a stream may end."""

RESTARTING = (429, 503)

ELSEWHERE = (403, 404)
"""For a strange `Host`, and for what the killed engine knew."""


@dataclass
class Kill:
    """at: seconds from the beginning. connections: open then. ended: seconds until all streams under way had ended;
    answered: until the next engine's first token. front: the server's fewest bytes since the kill before, for cyclic
    garbage comes and goes. engine: its bytes. descriptors: of the server."""

    at: float
    connections: int
    front: int
    engine: int
    descriptors: int
    ended: float = 0.0
    answered: float = 0.0


@dataclass
class Figures:
    """ends: by kind of client and outcome. quiet: (front bytes, descriptors, threads) before and after the clients."""

    seconds: float = 0.0
    streams: int = 0
    kills: list[Kill] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    quiet: list[tuple[int, int, int]] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def drift(self, name: str) -> float:
        """How much more there is at the last third of the kills than at the second, as a share."""
        values = [float(getattr(kill, name)) for kill in self.kills]
        third = max(1, len(values) // 3)
        return statistics.median(values[-third:]) / statistics.median(values[-2 * third : -third] or values[:1]) - 1

    def failures(self, *, share: float = 0.05, within: float = WITHIN) -> list[str]:
        """What is not as it must be. share: most drift."""
        bad = [f"{count} times {end}" for end, count in self.ends.items() if end.endswith((": cut", ": hung"))]
        bad += [f"{kill.answered:.1f} s until answers after a kill" for kill in self.kills if kill.answered > within]
        bad += [f"{name}: drift {100 * self.drift(name):+.1f} %" for name in MEMORY if self.drift(name) > share]
        (_, before, _), (_, after, _) = self.quiet[0], self.quiet[-1]
        if after > before + 2:
            bad.append(f"{before} descriptors before, {after} after")
        return bad


MEMORY = ("front", "engine")


class Clients:
    """Clients of all kinds, each in a loop until `over`."""

    def __init__(self, live: Live, streams: int, connections: int) -> None:
        self.live, self.port, self.streams, self.connections = live, live.port, streams, connections
        self.over = False
        self.figures = Figures(streams=streams)
        self.open = 0
        self.under_way: set[int] = set()
        """Streams that have been asked for, by number."""
        self.killed = float("-inf")
        self.again = asyncio.Event()
        self.fewest = sys.maxsize
        """Bytes of the server since the last kill."""
        self._number = 0
        self._evil = [poison for poison in poisons() if not any(word in poison.name for word in SLOW)]

    def kinds(self) -> list[tuple[str, Callable[[int], Awaitable[str]], int]]:
        """(name, one exchange that says how it ended, how many such clients there are)."""
        rude = max(1, self.streams // 8)
        kinds = [
            ("streaming", self.stream, self.streams),
            ("slow", self.slow, rude),
            ("stopping", self.stopping, rude // 2 + 1),
            ("hanging up", self.hanging_up, rude),
            ("half-closing", self.half_closing, rude // 2 + 1),
            ("pipelining", self.pipelining, rude // 2 + 1),
            ("hostile", self.hostile, 4),
            ("kept", self.kept, rude),
        ]
        return [*kinds, ("silent", self.silent, max(1, self.connections - self.streams))]

    async def client(self, name: str, exchange: Callable[[int], Awaitable[str]], number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * 2)
        while not self.over:
            try:
                async with asyncio.timeout(HANGS):
                    end = await exchange(number)
            except TimeoutError:
                end = "hung"
            except (ConnectionError, asyncio.IncompleteReadError):
                end = "closed"
            self.figures.ends[f"{name}: {end}"] += 1
            if end in ("cut", "hung"):
                self.figures.odd.append(f"{name} {number}: {end}")
            if end != "answer":
                await asyncio.sleep(0.5 + rng.random())

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(HOST, self.port, limit=1 << 20)
        self.open += 1
        try:
            yield reader, writer
        finally:
            self.open -= 1
            writer.transport.abort()

    # ---------------------------------------------------------------- kinds of clients

    async def stream(self, number: int) -> str:
        """What every client should be; this one must hear an answer or an error, whole."""
        self._number += 1
        mine, path, body = self._number, *normal(number, 48)
        async with self.connected() as (reader, writer):
            writer.write(request("POST", path, body))
            began = time.monotonic()
            self.under_way.add(mine)
            try:
                heard = bytearray()
                while data := await reader.read(1 << 16):
                    heard += data
                    if began > self.killed and b"data: {" in data and b'"error"' not in data:
                        self.again.set()
                return ended(bytes(heard))
            except ConnectionError:
                return "cut"
            finally:
                self.under_way.discard(mine)

    async def slow(self, number: int) -> str:
        """Reads a little now and then."""
        path, body = normal(number, 48)
        async with self.connected() as (reader, writer):
            writer.write(request("POST", path, body))
            heard = bytearray()
            while data := await reader.read(512):
                heard += data
                await asyncio.sleep(0.02)
            return ended(bytes(heard))

    async def stopping(self, number: int) -> str:
        """Reads nothing for a while in the middle, as a process that was sent SIGSTOP."""
        path, body = normal(number, 48)
        async with self.connected() as (reader, writer):
            writer.write(request("POST", path, body))
            heard = bytearray(await reader.read(1 << 12))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(2.0)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            while data := await reader.read(1 << 16):
                heard += data
            return ended(bytes(heard))

    async def hanging_up(self, number: int) -> str:
        """Leaves before the answer, or in the middle of it."""
        path, body = normal(number, 200)
        async with self.connected() as (reader, writer):
            writer.write(request("POST", path, body))
            for _ in range(number % 3):
                await reader.read(1 << 12)
            return "left"

    async def half_closing(self, number: int) -> str:
        """Says at once that it has nothing more to say, which may count as leaving."""
        path, body = normal(number, 16)
        async with self.connected() as (reader, writer):
            writer.write(request("POST", path, body))
            writer.write_eof()
            heard = await reader.read()
            return ended(heard) if heard.endswith(b"0\r\n\r\n") else "closed"

    async def pipelining(self, number: int) -> str:
        """Several requests in one breath."""
        body = {"prompt": "Once", "max_tokens": 4}
        parts = [request("POST", "/v1/completions", body, {"Connection": "keep-alive"})] * 2
        heard = await send(self.port, b"".join([*parts, request("GET", "/version")]), seconds=HANGS)
        statuses = [answer.status for answer in heard]
        return "answer" if len(statuses) == 3 and {*statuses} <= {200, *RESTARTING} else "cut"

    async def hostile(self, number: int) -> str:
        """Requests that are not what they seem."""
        self._number += 1
        poison = self._evil[(self._number * 7 + number) % len(self._evil)]
        heard = await send(self.port, *poison.sent(), pause=poison.pause, hang_up=poison.hang_up, seconds=HANGS)
        fine = all(answer.status in (*poison.statuses, *RESTARTING, *ELSEWHERE) for answer in heard)
        if not fine:
            self.figures.odd.append(f"{poison.name}: {[answer.status for answer in heard]}")
        return "answer" if fine else "another status"

    async def kept(self, number: int) -> str:
        """Asks once, and keeps its connection."""
        async with self.connected() as (reader, writer):
            writer.write(request("GET", "/version", None, {"Connection": "keep-alive"}))
            heard = bytearray()
            while data := await reader.read(1 << 12):
                heard += data
            return "answer" if answers(bytes(heard))[0].status == 200 else "refused"

    async def silent(self, number: int) -> str:
        """Says nothing until the server hangs up."""
        async with self.connected() as (reader, _):
            await reader.read()
            return "answer"

    # ---------------------------------------------------------------- the engine

    async def kill(self, began: float) -> None:
        """Once all clients are there and streams are being answered."""
        async with asyncio.timeout(HANGS):
            self.again.clear()
            self.killed = time.monotonic()
            await self.again.wait()
            while self.open < self.connections:
                await asyncio.sleep(0.1)
        live, pid = self.live, self.live.engine_pid()
        kill = Kill(
            time.monotonic() - began,
            self.open,
            self.fewest,
            resident(pid),
            len(opened(live.process.pid)),
        )
        self.figures.kills.append(kill)
        self.fewest = sys.maxsize
        self.again.clear()
        self.killed, lost = time.monotonic(), set(self.under_way)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(HANGS):
            while lost & self.under_way:
                await asyncio.sleep(0.01)
            kill.ended = time.monotonic() - self.killed
            await self.again.wait()
            kill.answered = time.monotonic() - self.killed

    async def watch(self) -> None:
        while not self.over:
            self.fewest = min(self.fewest, resident(self.live.process.pid))
            await asyncio.sleep(1.0)

    async def run(self, seconds: float, every: float, shown: Callable[[str], None]) -> None:
        began, number, clients = time.monotonic(), 0, [asyncio.ensure_future(self.watch())]
        waited_for = []
        for name, exchange, count in self.kinds():
            for _ in range(count):
                number += 1
                clients.append(asyncio.ensure_future(self.client(name, exchange, number)))
                waited_for += clients[-1:] if name in ("streaming", "slow", "stopping") else []
        try:
            while time.monotonic() - began < seconds or not self.figures.kills:
                await asyncio.sleep(min(every, max(0.0, seconds - (time.monotonic() - began))) / 2)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.live.engine_pid(), REPORT_SIGNAL)  # it says what it does, and goes on
                await asyncio.sleep(every / 2)
                await self.kill(began)
                shown(row(self.figures.kills[-1]))
        finally:
            self.over = True
            await asyncio.wait(waited_for, timeout=HANGS)
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            self.figures.seconds = time.monotonic() - began


def ended(heard: bytes) -> str:
    """How a stream ended: in words, or cut."""
    with contextlib.suppress(ValueError, IndexError):
        [answer] = answers(heard)
        if answer.status in RESTARTING:
            return "refused" if "error" in answer.json() else "cut"
        if answer.status == 200 and heard.endswith(b"0\r\n\r\n") and answer.body.endswith(b"data: [DONE]\n\n"):
            return "error event" if b'"error":{' in answer.body else "answer"
    return "cut"


def opened(pid: int) -> list[str]:
    """A process's descriptors."""
    return os.listdir(f"/proc/{pid}/fd")


def quiet(live: Live) -> tuple[int, int, int]:
    """The server's bytes, descriptors and threads, with nothing under way."""
    pid = live.process.pid
    return resident(pid), len(opened(pid)), len(os.listdir(f"/proc/{pid}/task"))


def crashes(
    live: Live, seconds: float, *, streams: int, connections: int, every: float, shown: Callable[[str], None] = print
) -> Figures:
    """So many seconds of clients of all kinds, `streams` and `connections` at once, and a kill each `every` seconds."""

    async def story() -> Figures:
        clients = Clients(live, streams, connections)
        await asyncio.gather(*(clients.stream(i) for i in range(8)))
        await asyncio.to_thread(live.settled, HANGS)
        clients.figures.quiet.append(quiet(live))
        await clients.run(seconds, every, shown)
        async with asyncio.timeout(HANGS):
            while (await ask(live.port, "GET", "/health/ready")).status != 200:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(live.settled, HANGS)
            while len(opened(live.process.pid)) > clients.figures.quiet[0][1] + 2:  # the last connections time out
                await asyncio.sleep(0.1)
        clients.figures.quiet.append(quiet(live))
        return clients.figures

    connection.raise_descriptor_limit()
    return asyncio.run(story())


HEAD = "   kill at  open  front MiB  engine MiB  descriptors  streams ended  answers again"


def row(kill: Kill) -> str:
    return (
        f"{kill.at:8.0f} s  {kill.connections:4d}  {kill.front / 2**20:9.1f}  {kill.engine / 2**20:10.1f}"
        f"  {kill.descriptors:11d}  {kill.ended:11.2f} s  {kill.answered:11.2f} s"
    )


def table(figures: Figures) -> str:
    """What it came to."""
    lines = [HEAD, *map(row, figures.kills), "", f"{figures.seconds:.0f} s with {figures.streams} streams"]
    lines += [f"  {end}: {count}" for end, count in sorted(figures.ends.items())]
    lines += [f"  odd: {one}" for one in figures.odd[:20]]
    for (front, held, threads), when in zip(figures.quiet, ("before", "after"), strict=False):
        lines.append(f"quiet {when}: {front / 2**20:.1f} MiB, {held} descriptors, {threads} threads")
    lines += [f"drift of {name} memory: {100 * figures.drift(name):+.2f} %" for name in MEMORY]
    return "\n".join(
        [*lines, *(f"FAILED: {why}" for why in figures.failures()), "" if figures.failures() else "all well"]
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", type=float)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--connections", type=int, default=1500)
    parser.add_argument("--every", type=float, default=120.0)
    parser.add_argument("--json", type=Path, default=Path("crashes.json"))
    asked, options = parser.parse_known_args()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *options) as live:
        figures = crashes(
            live,
            asked.minutes * 60,
            streams=asked.streams,
            connections=asked.connections,
            every=asked.every,
            shown=lambda line: print(line, flush=True),
        )
    found: dict[str, Any] = vars(figures) | {"kills": [asdict(kill) for kill in figures.kills]}
    found["failures"] = figures.failures()
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + table(figures))
    return 1 if figures.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
