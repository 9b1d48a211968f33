"""A load client of one process: `python -m quire.bench.load JSON`. Several of them make one measurement.

Raw HTTP over kept connections and no parsing but of the last event, so that a core sends and reads far more than a
server makes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Job:
    """What one process does: `streams` requests at once until all `prompts` are answered, from wall time `begin` on.

    salt: prompts share no cached prefix with those of another salt; '' sends none. key: the server's, '' sends none.
    """

    host: str
    port: int
    model: str
    streams: int
    prompts: list[list[int]]
    new: list[int]
    begin: float
    salt: str = ""
    key: str = ""
    tls: bool = False


@dataclass
class Tally:
    """Seconds to the first token, between events and of whole answers, and totals by usage.

    failed: answers that did not come whole; refused: of those, the ones with a status of their own, by status. began
    and ended: wall time.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    prompted: int = 0
    events: int = 0
    failed: int = 0
    began: float = 0.0
    ended: float = 0.0


async def stream(job: Job, todo: Iterator[tuple[list[int], int]], tally: Tally) -> None:
    """One connection: one request after the other. Who is refused waits as long as the server says and goes on."""
    reader, writer = await asyncio.open_connection(job.host, job.port, ssl=job.tls or None)
    key = f"Authorization: Bearer {job.key}\r\n" if job.key else ""
    start = f"POST /v1/completions HTTP/1.1\r\nHost: {job.host}\r\n{key}Content-Type: application/json\r\n"
    try:
        for prompt, new in todo:
            body = json.dumps(
                {
                    "model": job.model,
                    "prompt": prompt,
                    "max_tokens": new,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    **({"cache_salt": job.salt} if job.salt else {}),
                }
            ).encode()
            began = time.perf_counter()
            writer.write(f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 200"):
                await answer(reader, began, new, tally)
            else:
                await refusal(reader, head, tally)
    finally:
        writer.close()


async def refusal(reader: asyncio.StreamReader, head: bytes, tally: Tally) -> None:
    """Count it, and wait for what its Retry-After says. Raises ConnectionError where the server said goodbye."""
    status, _, rest = head.decode("latin-1").partition("\r\n")
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest.splitlines())
    }
    code = status.split()[1]
    tally.refused[code] = tally.refused.get(code, 0) + 1
    tally.failed += 1
    await reader.readexactly(int(fields.get("content-length", "0")))
    if fields.get("connection") == "close":
        raise ConnectionError(status)
    await asyncio.sleep(float(fields.get("retry-after", "0")))


async def answer(reader: asyncio.StreamReader, began: float, new: int, tally: Tally) -> None:
    """Read one streamed answer to its end."""
    rest, gaps, told, last = b"", tally.first, 0, began
    while not rest.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError("the server hung up")
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if b'"choices":[{' in event:
                gaps.append(now - last)
                last, gaps = now, tally.gaps
                tally.events += 1
            elif b'"usage":' in event:
                usage = json.loads(event[event.index(b"{") :])["usage"]
                told = usage["completion_tokens"]
                tally.prompted += usage["prompt_tokens"]
    tally.tokens += told
    tally.failed += told != new
    if told:
        tally.whole.append(last - began)


async def run(job: Job) -> Tally:
    tally, todo = Tally(), iter(list(zip(job.prompts, job.new, strict=True)))
    await asyncio.sleep(max(0.0, job.begin - time.time()))
    tally.began = time.time()
    done = await asyncio.gather(*(stream(job, todo, tally) for _ in range(job.streams)), return_exceptions=True)
    tally.failed += sum(isinstance(each, BaseException) for each in done)
    tally.ended = time.time()
    return tally


def main() -> None:
    given: dict[str, Any] = json.load(sys.stdin)
    print(json.dumps(asdict(asyncio.run(run(Job(**given))))))


if __name__ == "__main__":
    main()
