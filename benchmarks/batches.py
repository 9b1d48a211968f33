"""`python -m benchmarks.batches`: what a batch in the gaps costs those who ask meanwhile.

One server, the embedded model, people who come at random; the same people at the same moments with a batch running and
without one, turn by turn, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import click
import httpx

from quire.observability.histogram import percentile

_CHAT = "/v1/chat/completions"
_LINES = 3000
_NEW = 64


@click.command("batches")
@click.option("--rounds", default=12, show_default=True, help="Turns with a batch, and as many without.")
@click.option("--people", default=40, show_default=True, help="Requests a turn.")
@click.option("--rate", default=4.0, show_default=True, help="Requests a second, on average.")
@click.option("--port", default=18323, show_default=True)
def command(rounds: int, people: int, rate: float, port: int) -> None:
    """Measure p50 and p95 of interactive requests with a batch in the gaps and without."""
    with tempfile.TemporaryDirectory() as folder, serving(folder, port) as url:
        click.echo(json.dumps(asyncio.run(compare(url, rounds, people, rate)), indent=1))


@contextmanager
def serving(folder: str, port: int) -> Iterator[str]:
    arguments = ["serve", "--port", str(port), "--batch-dir", folder, "--uvicorn-log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "quire", *arguments, "--disable-log-stats"])
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            if process.poll() is not None:
                raise click.ClickException(f"the server ended with code {process.returncode}")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


async def compare(url: str, rounds: int, people: int, rate: float) -> dict[str, Any]:
    """Times of whole answers and to the first token, with a batch and without: medians over turns of a turn's
    percentile, and of the ratio of two turns with the same people."""
    seen: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    lines = 0
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        await turn(client, people, rate, seed=0)  # warms caches and connections
        for number in range(rounds):
            for batch in (True, False) if number % 2 else (False, True):
                id = await begin(client) if batch else None
                seen[batch].append(await turn(client, people, rate, seed=number + 1))
                if id is not None:
                    lines += await end(client, id)
    row: dict[str, Any] = {"turns": rounds, "requests": rounds * people, "lines": lines}
    for what, at in (("answer_ms", 0), ("first_ms", 1)):
        for q in (50, 95):
            turns = [
                [1e3 * percentile([one[at] for one in each], q) for each in seen[batch]] for batch in (True, False)
            ]
            with_it, without = map(median, turns)
            ratio = median(a / b for a, b in zip(*turns, strict=True))
            row[f"{what}_p{q}"] = {"with": with_it, "without": without, "ratio": ratio}
    return row


async def begin(client: httpx.AsyncClient) -> str:
    """A batch that outlasts the turn, at work."""
    body = {"max_tokens": 200, "ignore_eos": True}
    asked = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": _CHAT,
            "body": {
                **body,
                "messages": [{"role": "user", "content": f"Tell me a story about {i} dogs. " * (1 + i % 5)}],
            },
        }
        for i in range(_LINES)
    ]
    data = "\n".join(map(json.dumps, asked))
    sent = await client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    made = {"input_file_id": sent.json()["id"], "endpoint": _CHAT, "completion_window": "24h"}
    id = str((await client.post("/v1/batches", json=made)).json()["id"])
    while not (await client.get("/stats")).json()["active_requests"]:
        await asyncio.sleep(0.02)
    return id


async def end(client: httpx.AsyncClient, id: str) -> int:
    """Cancel it; how many of its lines were answered."""
    await client.post(f"/v1/batches/{id}/cancel")
    while (batch := (await client.get(f"/v1/batches/{id}")).json())["status"] != "cancelled":
        await asyncio.sleep(0.02)
    return int(batch["request_counts"]["completed"])


async def turn(client: httpx.AsyncClient, people: int, rate: float, seed: int) -> list[tuple[float, float]]:
    """(seconds of the whole answer, seconds to its first token) of each who came."""
    dice = random.Random(seed)
    coming = []
    for number in range(people):
        await asyncio.sleep(dice.expovariate(rate))
        coming.append(asyncio.ensure_future(ask(client, f"In year {seed * 1000 + number}, ")))
    return list(await asyncio.gather(*coming))


async def ask(client: httpx.AsyncClient, prompt: str) -> tuple[float, float]:
    body = {"prompt": prompt, "max_tokens": _NEW, "ignore_eos": True, "temperature": 0, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            first = first or time.perf_counter() - began
    return time.perf_counter() - began, first


if __name__ == "__main__":
    command()
