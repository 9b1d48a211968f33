"""Load clients: processes that send completion requests over raw HTTP and record when their tokens come.

One process is `python -m quire.bench.load_client`. Its standard input is two lines: a LoadJob as JSON, and, once it has
written READY, the time at which to begin. `run_clients` starts several at once. Connections are kept open and only the
last event of an answer is parsed, so that one core sends and reads far more than a server produces.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from quire.frontend.http_client import Origin
from quire.observability.histogram import percentile

FAILURES = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""Raised by connections that break and by peers that do not speak HTTP."""

READY = b"+"
"""Written to standard output by a process that has its job and waits for the time at which to begin."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter] | tuple[None, None]

ClientResult = dict[str, Any]
"""One process's ClientTally as plain JSON."""


@dataclass(kw_only=True)
class LoadJob:
    """Requests that one process sends: all `prompts`, at most `streams` at once, from wall time `begin` on.

    output_lens: tokens of each answer. due: seconds after `begin` at which each prompt is sent; empty: as soon as a
    stream is free. salt: `cache_salt` of the requests, '' for none. extra: further fields of each body. key: API key.
    report_progress: write a dot to standard output for each finished request, before the result.
    """

    host: str
    port: int
    model: str
    streams: int
    prompts: list[list[int]]
    output_lens: list[int]
    begin: float = 0.0
    due: list[float] = field(default_factory=list)
    salt: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    path: str = ""
    tls: bool = False
    report_progress: bool = False
    chat: bool = False


class RequestTiming(NamedTuple):
    """Times of one request in seconds after `begin`: when it was due, of its first token (0 for none), and of its last.

    Without a token, `ended` is the end of the answer. The wait for a free stream counts from when the request was due.
    status: of HTTP, 0 where the connection broke, 500 where the stream held an error.
    """

    since: float
    first: float
    ended: float
    prompt: int
    new: int
    status: int


@dataclass
class ClientTally:
    """Seconds to first tokens and between events of answers without an error, and token counts from `usage`.

    began and ended are wall times.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    asked: list[RequestTiming] = field(default_factory=list)
    tokens: int = 0
    prompted: int = 0
    events: int = 0
    failed: int = 0
    began: float = 0.0
    ended: float = 0.0


# ---------------------------------------------------------------- one process


async def connect(job: LoadJob) -> Connection:
    """A connection to the server, or none where there is no way to it now."""
    try:
        return await asyncio.open_connection(job.host, job.port, ssl=job.tls or None)
    except OSError:
        return None, None


async def run_stream(
    job: LoadJob, todo: Iterator[int], zero: float, tally: ClientTally, opened: Connection = (None, None)
) -> None:
    """Send one request after the other on one connection. zero: `begin` by the monotonic clock. opened: to begin with.

    The connection is opened again after a failure, and after a refusal's Retry-After has passed.
    """
    reader, writer = opened
    for number in todo:
        if job.due:
            await asyncio.sleep(max(0.0, zero + job.due[number] - time.perf_counter()))
        since = zero + job.due[number] if job.due else time.perf_counter()
        try:
            if reader is None or writer is None:
                reader, writer = await asyncio.open_connection(job.host, job.port, ssl=job.tls or None)
            writer.write(encode_request(job, number))
            timing = await read_answer(reader, since, tally)
        except FAILURES:
            timing = RequestTiming(since, 0.0, time.perf_counter(), 0, 0, 0)
        if timing.status != 200 and writer is not None:
            writer.close()
            reader = writer = None
        tally.failed += timing.new != job.output_lens[number] or timing.status != 200
        first = timing.first and timing.first - zero
        tally.asked.append(timing._replace(since=timing.since - zero, first=first, ended=timing.ended - zero))
        if job.report_progress:
            sys.stdout.write(".")
            sys.stdout.flush()
    if writer is not None:
        writer.close()


def encode_request(job: LoadJob, number: int) -> bytes:
    """Request `number` of a job as bytes of HTTP/1.1."""
    text = " ".join(map(str, job.prompts[number]))
    prompt = {"messages": [{"role": "user", "content": text}]} if job.chat else {"prompt": job.prompts[number]}
    body = json.dumps(
        {
            "model": job.model,
            **prompt,
            "max_tokens": job.output_lens[number],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": job.salt} if job.salt else {}),
            **job.extra,
        }
    ).encode()
    key = f"Authorization: Bearer {job.key}\r\n" if job.key else ""
    path = f"{job.path}/v1/{'chat/' if job.chat else ''}completions"
    host = Origin(job.host, job.port, job.tls, job.path).authority
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{key}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader, since: float, tally: ClientTally) -> RequestTiming:
    """Read one streamed answer to its end; times are of the monotonic clock."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        ended = time.perf_counter()
        await asyncio.sleep(retry_after(head))
        return RequestTiming(since, 0.0, ended, 0, 0, status)
    rest = b""
    arrived: list[float] = []
    num_new = 0
    num_prompt = 0
    while not rest.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if b'"choices":[{' in event:
                arrived.append(now)
            elif b'"usage":' in event:
                usage = json.loads(event[event.index(b"{") :])["usage"]
                num_new = usage["completion_tokens"]
                num_prompt = usage["prompt_tokens"]
            elif b'"error":' in event:
                status = 500
    tally.tokens += num_new
    tally.prompted += num_prompt
    tally.events += len(arrived)
    if not arrived:
        return RequestTiming(since, 0.0, time.perf_counter(), num_prompt, num_new, status)
    if status == 200:
        tally.first.append(arrived[0] - since)
        tally.gaps.extend(later - earlier for earlier, later in pairwise(arrived))
    return RequestTiming(since, arrived[0], arrived[-1], num_prompt, num_new, status)


def retry_after(head: bytes) -> float:
    """Seconds that a refusal's Retry-After header asks to wait, 0 without one."""
    found = re.search(rb"\r\nretry-after: *(\d+)\r\n", head, re.IGNORECASE)
    return float(found[1]) if found else 0.0


async def run_job(job: LoadJob) -> ClientTally:
    """Run a job in this process."""
    tally = ClientTally()
    todo = iter(range(len(job.prompts)))
    zero = time.perf_counter() + job.begin - time.time()
    streams = min(job.streams, len(job.prompts))
    # Before, so that streams begin together; but at a rate a server might not wait for so long for a request.
    opened = await asyncio.gather(*(connect(job) for _ in range(0 if job.due else streams)))
    opened += [(None, None)] * (streams - len(opened))
    await asyncio.sleep(max(0.0, job.begin - time.time()))
    tally.began = time.time()
    await asyncio.gather(*(run_stream(job, todo, zero, tally, each) for each in opened))
    tally.ended = time.time()
    return tally


# ---------------------------------------------------------------- several processes


def run_clients(
    job: LoadJob, processes: int, on_progress: Callable[[int], None] = lambda count: None
) -> list[ClientResult]:
    """Divide a job among at most `processes` processes that begin at the same time, as soon as all of them are ready.

    on_progress: called from threads with the number of requests that ended since the last call. Raises RuntimeError if
    a process ends before it is ready.
    """
    workers = max(1, min(processes, job.streams, len(job.prompts)))
    running = []
    for i in range(workers):
        share = replace(
            job,
            streams=job.streams // workers + (i < job.streams % workers),
            prompts=job.prompts[i::workers],
            output_lens=job.output_lens[i::workers],
            due=job.due[i::workers],
            report_progress=True,
        )
        argv = [sys.executable, "-m", "quire.bench.load_client"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _write_line(process, asdict(share))
        running.append(process)
    for process in running:
        assert process.stdout is not None
        if process.stdout.read(len(READY)) != READY:
            raise RuntimeError("a load client ended before it was ready; its error is on standard error")
    begin = time.time() + 0.02
    for process in running:
        assert process.stdin is not None
        with process.stdin:
            _write_line(process, begin)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(partial(_read_result, on_progress=on_progress), running))


def _write_line(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _read_result(process: subprocess.Popen[bytes], on_progress: Callable[[int], None]) -> ClientResult:
    """A process's result, which follows a dot for each finished request."""
    assert process.stdout is not None
    with process.stdout as stdout:
        while (first := stdout.read(1)) == b".":
            on_progress(1)
        result: ClientResult = json.loads(first + stdout.read())
    process.wait()
    return result


def summarize(results: Sequence[ClientResult]) -> dict[str, Any]:
    """Tokens a second from the first process's begin to the last one's end, and [p50, p99] times in milliseconds."""
    seconds = max(one["ended"] for one in results) - min(one["began"] for one in results)
    tokens = sum(one["tokens"] for one in results)
    events = sum(one["events"] for one in results)
    first = [x for one in results for x in one["first"]]
    gaps = [x for one in results for x in one["gaps"]]
    return {
        "failed": sum(one["failed"] for one in results),
        "seconds": seconds,
        "tokens": tokens,
        "prompted": sum(one["prompted"] for one in results),
        "tokens_s": tokens / seconds,
        "tokens_an_event": tokens / max(1, events),
        "ttft_ms": [1e3 * percentile(first, q) for q in (50, 99)],
        "itl_ms": [1e3 * percentile(gaps, q) for q in (50, 99)],
        "ms_a_token_mean": 1e3 * sum(gaps) / max(1, tokens - len(first)),
    }


def main() -> None:
    """Run the job on standard input and print its tally."""
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    print(READY.decode(), end="", flush=True)
    given["begin"] = json.loads(sys.stdin.readline())
    print(json.dumps(asdict(asyncio.run(run_job(LoadJob(**given))))))


if __name__ == "__main__":
    main()
