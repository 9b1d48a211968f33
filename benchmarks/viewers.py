"""`python -m benchmarks.viewers`: what viewers of the live page cost running requests, on the embedded model.

The same streams all the time; parts of a few seconds without viewers, with some that read, with some that have stopped
reading, in changing order, so that whatever else the machine does falls on all alike. Ratios of medians count.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.servers import spawned
from benchmarks.workloads import prompts
from quire.bench.load_client import LoadJob
from quire.bench.monitor import revision

KINDS = ("none", "reading", "stopped")
VIEWERS = "import asyncio, sys; from benchmarks.viewers import view_all; asyncio.run(view_all(*map(int, sys.argv[1:])))"

_SETTLE = 0.5
"""Seconds after a change that are not measured."""

_ENOUGH = 100_000
"""Prompts: more than are answered while the benchmark runs."""

_STOPPED_BUFFER = 4096
"""Bytes that the kernel takes in for a viewer who does not read."""


@click.command("viewers")
@click.option("--viewers", default=10, show_default=True)
@click.option("--streams", default=64, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="How long each of a round's three parts is.")
@click.option("--rounds", default=24, show_default=True)
@click.option("--port", default=18324, show_default=True)
def command(viewers: int, streams: int, seconds: float, rounds: int, port: int) -> None:
    """Serve the embedded model to streams, with and without viewers of /ui, and compare: tokens/s, CPU a token."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with serving(port) as pid, streaming(port, streams), watching(port, viewers) as switch:
        time.sleep(_SETTLE * 6)
        for i in range(rounds):
            for kind in (*KINDS[i % 3 :], *KINDS[: i % 3]):
                switch(kind)
                time.sleep(_SETTLE)
                found[kind].append(measure(pid, port, seconds))
                click.echo(json.dumps({"viewers": kind, **found[kind][-1]}), err=True)
    click.echo(json.dumps({"revision": revision(), "streams": streams, "viewers": viewers, **compare(found)}, indent=1))


def compare(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians by kind, and their ratios to those of none."""
    medians = {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for kind, runs in found.items()
    }
    ratios = {
        kind: {name: round(value / medians["none"][name], 4) for name, value in each.items()}
        for kind, each in medians.items()
        if kind != "none"
    }
    return {"medians": medians, "ratios": ratios}


def serving(port: int) -> AbstractContextManager[int]:
    """A server of the embedded model; its process id."""
    arguments = ["serve", "--port", str(port), "--disable-log-stats", "--uvicorn-log-level", "warning"]
    return spawned([sys.executable, "-m", "quire", *arguments], port)


def measure(pid: int, port: int, seconds: float) -> dict[str, float]:
    """tokens/s, and milliseconds of CPU a token in the server's two processes, from one token to another at least so
    many seconds later: the first steps may wait for kernels that compile."""
    before, began = (more_than(made(port), port), ticks(pid)), time.perf_counter()
    time.sleep(seconds)
    after, took = (more_than(before[0], port), ticks(pid)), time.perf_counter() - began
    tokens, cpu = after[0] - before[0], (after[1] - before[1]) / os.sysconf("SC_CLK_TCK")
    return {"tokens_per_s": tokens / took, "cpu_ms": 1e3 * cpu / tokens}


def made(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=10) as answer:
        return int(json.load(answer)["generated_tokens"])


def more_than(count: int, port: int) -> int:
    """The number of tokens made, as soon as it is above `count`. Raises ClickException after a minute."""
    until = time.monotonic() + 60
    while (now := made(port)) <= count:
        if time.monotonic() > until:
            raise click.ClickException("no token was made for a minute: is the server stuck?")
        time.sleep(0.005)
    return now


def ticks(pid: int) -> int:
    """CPU time of a process and its children, in the kernel's ticks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for each in (pid, *children):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


@contextmanager
def streaming(port: int, streams: int) -> Iterator[None]:
    """So many streams at once, for as long as it is needed."""
    ids, new = prompts(_ENOUGH, (16, 48), (32, 64), seed=7)
    small = [[token % 1000 for token in prompt] for prompt in ids]
    job = LoadJob(
        host="127.0.0.1", port=port, model="embedded", streams=streams, prompts=small, output_lens=new, begin=0.0
    )
    argv = [sys.executable, "-m", "quire.bench.load_client"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stdin is not None
    # The second line is when it may begin: at once.
    process.stdin.write(f"{json.dumps(asdict(job))}\n{job.begin}\n")
    process.stdin.close()
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watching(port: int, viewers: int) -> Iterator[Callable[[str], None]]:
    """Viewers of the live page, in a process of their own; what is yielded makes them of one of KINDS."""
    arguments = [sys.executable, "-c", VIEWERS, str(port), str(viewers)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    stdin = process.stdin

    def switch(kind: str) -> None:
        stdin.write(f"{kind}\n")
        stdin.flush()

    try:
        yield switch
    finally:
        stdin.close()
        process.wait()


async def view(port: int, reads: bool) -> None:
    """One viewer. One that does not read has asked, and leaves its socket full."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20 if reads else _STOPPED_BUFFER)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, b"GET /ui/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while not reads:
            await asyncio.sleep(3600)
        while await loop.sock_recv(sock, 1 << 18):
            pass


async def view_all(port: int, viewers: int) -> None:
    """Viewers of the kind that standard input names, until it ends."""
    watching: list[asyncio.Task[None]] = []
    while kind := (await asyncio.to_thread(sys.stdin.readline)).strip():
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        many = 0 if kind == "none" else viewers
        watching = [asyncio.create_task(view(port, kind == "reading")) for _ in range(many)]
    for task in watching:
        task.cancel()


if __name__ == "__main__":
    command()
