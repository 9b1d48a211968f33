"""A load client of one process: `python -m quire.bench.load JSON`. Several of them make one measurement.

Raw HTTP over kept connections and no parsing but of the last event, so that a core sends and reads far more than a
server makes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

FAILURES = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""What a connection that breaks raises, or one that does not speak HTTP."""


@dataclass(kw_only=True)
class Job:
    """What one process does: ask for all `prompts`, at most `streams` at once, from wall time `begin` on.

    new: tokens of each answer. due: seconds after `begin` when each prompt is asked; empty: as soon as a stream is
    free. salt: prompts share no cached prefix with those of another salt; '' sends none. key: of the API. told: write
    a dot for each request that has ended, before the tally.
    """

    host: str
    port: int
    model: str
    streams: int
    prompts: list[list[int]]
    new: list[int]
    begin: float = 0.0
    due: list[float] = field(default_factory=list)
    salt: str = ""
    key: str = ""
    path: str = ""
    tls: bool = False
    told: bool = False
    chat: bool = False


class Asked(NamedTuple):
    """One request: seconds after `begin` when it was to be asked, of its first token (0 for none) and of its end.

    A request that had to wait for a free stream has been waiting since it was due; whoever is refused waits as long as
    the server says before the next. status: of HTTP, 0 where the connection broke, 500 where an error came in the
    stream.
    """

    since: float
    first: float
    ended: float
    prompt: int
    new: int
    status: int


@dataclass
class Tally:
    """Seconds to the first token and between events, and totals by usage. began and ended: wall time."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    tokens: int = 0
    prompted: int = 0
    events: int = 0
    failed: int = 0
    began: float = 0.0
    ended: float = 0.0


async def stream(job: Job, todo: Iterator[int], zero: float, tally: Tally) -> None:
    """One request after the other, on a connection that is kept while all goes well. zero: `begin`, by the monotonic
    clock."""
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    for number in todo:
        if job.due:
            await asyncio.sleep(max(0.0, zero + job.due[number] - time.perf_counter()))
        since = zero + job.due[number] if job.due else time.perf_counter()
        try:
            if reader is None or writer is None:
                reader, writer = await asyncio.open_connection(job.host, job.port, ssl=job.tls or None)
            writer.write(spoken(job, number))
            one = await answer(reader, since, tally)
        except FAILURES:
            one = Asked(since, 0.0, time.perf_counter(), 0, 0, 0)
        if one.status != 200 and writer is not None:
            writer.close()
            reader = writer = None
        tally.failed += one.new != job.new[number] or one.status != 200
        first = one.first and one.first - zero
        tally.asked.append(one._replace(since=one.since - zero, first=first, ended=one.ended - zero))
        if job.told:
            sys.stdout.write(".")
            sys.stdout.flush()
    if writer is not None:
        writer.close()


def spoken(job: Job, number: int) -> bytes:
    """A request as it goes over the wire."""
    words = " ".join(map(str, job.prompts[number]))
    asked = {"messages": [{"role": "user", "content": words}]} if job.chat else {"prompt": job.prompts[number]}
    body = json.dumps(
        {
            "model": job.model,
            **asked,
            "max_tokens": job.new[number],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": job.salt} if job.salt else {}),
        }
    ).encode()
    key = f"Authorization: Bearer {job.key}\r\n" if job.key else ""
    path = f"{job.path}/v1/{'chat/' if job.chat else ''}completions"
    head = f"POST {path} HTTP/1.1\r\nHost: {job.host}\r\nContent-Type: application/json\r\n{key}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader, since: float, tally: Tally) -> Asked:
    """Read one streamed answer to its end; times by the monotonic clock."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        ended = time.perf_counter()
        await asyncio.sleep(patience(head))
        return Asked(since, 0.0, ended, 0, 0, status)
    rest, first, last, told, prompted = b"", 0.0, since, 0, 0
    while not rest.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError("the server hung up")
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if b'"choices":[{' in event:
                (tally.gaps if first else tally.first).append(now - last)
                first, last = first or now, now
                tally.events += 1
            elif b'"usage":' in event:
                usage = json.loads(event[event.index(b"{") :])["usage"]
                told, prompted = usage["completion_tokens"], usage["prompt_tokens"]
            elif b'"error":' in event:
                status = 500
    tally.tokens += told
    tally.prompted += prompted
    return Asked(since, first, time.perf_counter(), prompted, told, status)


def patience(head: bytes) -> float:
    """Seconds that a refusal asks to wait, as its Retry-After says."""
    found = re.search(rb"\r\nretry-after: *(\d+)\r\n", head, re.IGNORECASE)
    return float(found[1]) if found else 0.0


async def run(job: Job) -> Tally:
    tally, todo = Tally(), iter(range(len(job.prompts)))
    zero = time.perf_counter() + job.begin - time.time()
    await asyncio.sleep(max(0.0, job.begin - time.time()))
    tally.began = time.time()
    await asyncio.gather(*(stream(job, todo, zero, tally) for _ in range(min(job.streams, len(job.prompts)))))
    tally.ended = time.time()
    return tally


def main() -> None:
    given: dict[str, Any] = json.load(sys.stdin)
    print(json.dumps(asdict(asyncio.run(run(Job(**given))))))


if __name__ == "__main__":
    main()
