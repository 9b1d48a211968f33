"""Everything at once for a long time: `python -m tests.contract.soak SECONDS` prints what it came to.

What must be flat: resident memory, descriptors, threads, and pages once all is quiet.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from quire.engine.protocol import REPORT_SIGNAL
from tests.contract.poison import Poison, poisons
from tests.contract.streams import hear_all
from tests.contract.wire import HOST, ask, request, send
from tests.live import Live, serving

OPTIONS = ("--dtype", "float32", "--num-gpu-blocks-override", "512")
STREAMS = 12
LEAST = 6
"""Rounds, on however slow a machine."""

SLOW = ("in a row", "drops", "never comes", "stops")
"""Poisons that take their time by themselves, and are left out."""


class Sample(NamedTuple):
    """How things stood at `at` seconds, with nothing under way. Bytes; of the front and of the engine."""

    at: float
    front: int
    engine: int
    descriptors: int
    threads: int
    pages: int


class Figures(NamedTuple):
    """samples: one a round. rounds: of streams, each equal to the first. answers: by status."""

    samples: list[Sample]
    rounds: int
    answers: Counter[int]

    def drift(self, name: str) -> float:
        """How much more there is in the last third of the samples than in the second, as a share."""
        values = [float(getattr(sample, name)) for sample in self.samples]
        third = len(values) // 3
        return statistics.median(values[-third:]) / statistics.median(values[third : 2 * third]) - 1


def soak(live: Live, seconds: float) -> Figures:
    """Rounds of streams beside hostile requests and clients that leave, for so long; each round ends in quiet.

    What goes wrong is raised with what the server has to say of it.
    """
    try:
        return asyncio.run(_soak(live, seconds))
    except Exception as error:
        os.kill(live.engine_pid(), REPORT_SIGNAL)
        time.sleep(1.0)
        raise AssertionError(f"{live.stats()}\n{live.log[-8000:]}") from error


async def _soak(live: Live, seconds: float) -> Figures:
    port, began = live.port, time.monotonic()
    known = await hear_all(port, STREAMS)
    evil = [poison for poison in poisons() if not any(word in poison.name for word in SLOW)]
    samples: list[Sample] = []
    answers: Counter[int] = Counter()
    rounds = 0
    while time.monotonic() - began < seconds or rounds < LEAST:
        some = [evil[(rounds * 16 + i) % len(evil)] for i in range(16)]
        heard = await asyncio.gather(hear_all(port, STREAMS), _swallow(port, some, answers), _usual(port, answers))
        assert heard[0] == known, f"round {rounds} was different"
        rounds += 1
        await asyncio.to_thread(live.settled)
        samples.append(look(live, time.monotonic() - began))
    return Figures(samples, rounds, answers)


async def _swallow(port: int, some: list[Poison], answers: Counter[int]) -> None:
    for poison in some:
        for answer in await send(port, *poison.sent(), pause=poison.pause, hang_up=poison.hang_up, seconds=300):
            assert answer.status in poison.statuses, (poison.name, answer)
            answers[answer.status] += 1


USUAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 8, "logprobs": 3, "echo": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 12, "guided_regex": "[a-c]{4}"}),
    ("/v1/embeddings", {"input": ["a dog", "a boat"]}),
    ("/tokenize", {"prompt": "Once upon a time"}),
)


async def _usual(port: int, answers: Counter[int]) -> None:
    """What clients ask, and one that leaves in the middle."""
    for path, body in USUAL:
        answer = await ask(port, "POST", path, body, seconds=300)
        assert answer.status == 200, answer
        answers[200] += 1
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1000, "stream": True}))
    await reader.readuntil(b"data: ")
    writer.close()


def look(live: Live, at: float) -> Sample:
    """Both processes, now."""
    memory, pids = live.memory(), (live.process.pid, live.engine_pid())
    return Sample(
        at,
        memory.front,
        memory.engine,
        sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids),
        int(live.stats()["cache"]["used_pages"]),
    )


def table(figures: Figures) -> str:
    """The figures, line by line."""
    first, last = figures.samples[len(figures.samples) // 3], figures.samples[-1]
    counts = ", ".join(f"{status or 'closed'}: {count}" for status, count in sorted(figures.answers.items()))
    lines = [f"{figures.rounds} rounds in {last.at:.0f} s; answers besides the streams: {counts}"]
    for name in Sample._fields[1:]:
        drift = f", drift {100 * figures.drift(name):+.2f} %" if getattr(last, name) else ""
        lines.append(f"{name}: {getattr(first, name)} after a third, {getattr(last, name)} at the end{drift}")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *OPTIONS) as server:
        print(table(soak(server, float(sys.argv[1]))))
