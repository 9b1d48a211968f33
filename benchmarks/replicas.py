"""`python -m benchmarks.replicas`: a killed replica, a deployment that grows and shrinks, prompts with shared prefixes.

Each part starts `quire serve` on loopback. `kill` sends SIGKILL to one replica of several while all answer. `scale`
makes prompts wait until the deployment has grown, and then few requests until it has shrunk. `prefixes` sends prompts
that begin in one of some ways, in random order, to replicas by longest prefix and in turn, and to one engine whose
cache is as large as all of theirs; and has the simulator predict the first two. Counts of tokens and of requests hardly
depend on the machine's speed; nothing else is compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.servers import through
from quire.bench.simulated import build_model
from quire.config import Settings
from quire.frontend.supervisor import free_port
from quire.sim.calibration import read_calibration
from quire.sim.fleet import FleetConfig, simulate_fleet
from quire.sim.sessions import Sessions
from quire.sim.trace import Run

WORDS = range(300, 1900)
"""Token ids that prompts are made of."""
PREFIX_BLOCKS, BLOCK = 32, 16
RETRIES = 20


@dataclass
class Outcome:
    """What came of one request. errors: of tries that failed."""

    tokens: tuple[int, ...] = ()
    cached: int = 0
    errors: list[str] = field(default_factory=list)
    answered: bool = False


class Load:
    """Requests to one server. model: as the server calls it."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.client, self.model = client, model

    async def ask(self, prompt: Sequence[int], tokens: int, *, retries: int = 0) -> Outcome:
        """A streamed completion; again after an error, as a client that retries does."""
        out = Outcome()
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        for attempt in range(retries + 1):
            try:
                out.tokens, out.cached = await self._stream(body)
                out.answered = True
                return out
            except (httpx.HTTPError, RuntimeError) as error:
                out.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2 * (attempt < retries))
        return out

    async def _stream(self, body: dict[str, Any]) -> tuple[tuple[int, ...], int]:
        """Token ids and cached tokens of a stream. Raises RuntimeError for an error in it, and for one that is cut."""
        got: list[int] = []
        cached, done = 0, False
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()[:300]}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    got += [id for choice in event["choices"] for id in choice.get("token_ids") or ()]
                    if event.get("usage"):
                        cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        if not done or len(got) != body["max_tokens"]:
            raise RuntimeError(f"the stream was cut after {len(got)} tokens")
        return tuple(got), cached

    async def stats(self) -> dict[str, Any]:
        """/stats."""
        found: dict[str, Any] = (await self.client.get("/stats")).json()
        return found

    async def until(self, count: int, seconds: float) -> float:
        """Wait until so many replicas are ready; seconds that it took. Raises TimeoutError."""
        began = time.monotonic()
        while len([one for one in (await self.stats()).get("replicas", ()) if one["alive"]]) != count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not {count} replicas within {seconds:g} s: {(await self.stats())['replicas']}")
            await asyncio.sleep(0.2)
        return time.monotonic() - began


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """`quire serve ARGUMENTS`; its address."""
    with tempfile.TemporaryDirectory() as folder, through(arguments, free_port(), Path(folder) / "log") as url:
        yield url


@asynccontextmanager
async def load(url: str, key: str = "none") -> AsyncIterator[Load]:
    """A client of a server. key: of its administrator."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300.0, trust_env=False) as client:
        yield Load(client, (await client.get("/v1/models")).json()["data"][0]["id"])


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.choice(WORDS) for _ in range(tokens)] for _ in range(count)]


# ---------------------------------------------------------------- a killed replica


async def kill(
    at: Load, *, clients: int, tokens: int, expected: Sequence[tuple[int, ...]] | None = None
) -> dict[str, Any]:
    """Kill one replica while all `clients` stream, each an answer of its own; wait until it has been replaced."""
    asked = prompts(clients, 24, 1)
    before = (await at.stats())["replicas"]
    count = len(before)
    running = [asyncio.ensure_future(at.ask(prompt, tokens, retries=RETRIES)) for prompt in asked]
    held: dict[str, int] = {}
    while sum(held.values()) < clients:  # every stream has a replica
        held = {each["name"]: each["outstanding"] for each in (await at.stats())["replicas"]}
        await asyncio.sleep(0.05)
    victim = max(before, key=lambda each: held[each["name"]])
    os.kill(victim["pid"], signal.SIGKILL)
    outcomes = await asyncio.gather(*running)
    seconds = await at.until(count, 120)
    again = [await at.ask(prompt, tokens) for prompt in asked]
    reference = list(expected) if expected is not None else [each.tokens for each in again]
    failed = [outcome for outcome in outcomes if outcome.errors]
    first = [outcome.errors[0] for outcome in failed]
    return {
        "replicas": count,
        "streams": clients,
        "on_the_killed_replica": held[victim["name"]],
        "broken_streams": len(failed),
        "broken_with_a_named_error": sum("was lost while this request ran" in why for why in first),
        "most_retries": max(len(outcome.errors) for outcome in outcomes),
        "answered_in_the_end": sum(outcome.answered for outcome in outcomes),
        "answers_as_expected": sum(one.tokens == other for one, other in zip(outcomes, reference, strict=True)),
        "seconds_until_replaced": round(seconds, 1),
    }


# ---------------------------------------------------------------- more and fewer replicas


async def scale(
    at: Load, *, low: int, high: int, width: int, prompt: int, tokens: int, seconds: float
) -> dict[str, Any]:
    """Prompts wait until there are `high` replicas; then one request at a time until there are `low`."""
    sizes: list[int] = []
    outcomes: list[Outcome] = []
    numbers = iter(range(1 << 30))

    async def client(stop: asyncio.Event) -> None:
        while not stop.is_set():
            outcomes.append(await at.ask(prompts(1, prompt, next(numbers))[0], tokens))

    async def watch(count: int, clients: int) -> float:
        stop = asyncio.Event()
        running = [asyncio.ensure_future(client(stop)) for _ in range(clients)]
        began = time.monotonic()
        while not sizes or sizes[-1] != count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not {count} replicas within {seconds:g} s, but {sizes}")
            now = len((await at.stats())["replicas"])
            if not sizes or sizes[-1] != now:
                sizes.append(now)
            await asyncio.sleep(0.2)
        took = time.monotonic() - began
        stop.set()
        await asyncio.gather(*running)
        return took

    up = await watch(high, width)
    down = await watch(low, 1)
    return {
        "sizes": sizes,
        "requests": len(outcomes),
        "failed": sum(not outcome.answered for outcome in outcomes),
        "errors": Counter(why for outcome in outcomes for why in outcome.errors),
        "seconds_up": round(up, 1),
        "seconds_down": round(down, 1),
    }


# ---------------------------------------------------------------- shared prefixes


@dataclass(frozen=True)
class Prefixes:
    """The load: `count` beginnings, each asked for `each` times in random order, with an end of its own."""

    count: int = 50
    each: int = 8
    own: int = 16
    width: int = 4
    tokens: int = 2

    def requests(self) -> list[tuple[int, list[int]]]:
        """(number of the beginning, prompt) each."""
        begins = prompts(self.count, PREFIX_BLOCKS * BLOCK, 2)
        order = [number for number in range(self.count) for _ in range(self.each)]
        random.Random(3).shuffle(order)
        ends = prompts(len(order), self.own, 4)
        return [(number, begins[number] + end) for number, end in zip(order, ends, strict=True)]


async def hits(at: Load, what: Prefixes) -> int:
    """Hit tokens."""
    waiting = iter(what.requests())
    total = 0

    async def client() -> None:
        nonlocal total
        for _, prompt in waiting:
            outcome = await at.ask(prompt, what.tokens)
            assert outcome.answered, outcome.errors
            total += outcome.cached

    await asyncio.gather(*(client() for _ in range(what.width)))
    return total


class Clients(Sessions):
    """The same load for a simulation: each client asks what comes next once its last request has ended."""

    def __init__(self, what: Prefixes) -> None:
        self.what = what
        self.order = iter([number for number, _ in what.requests()])
        count = what.count * what.each
        super().__init__(what.width, count=count, turns=1, think=0.0, answered=(what.tokens, what.tokens), system=0)

    def _ask(self, history: tuple[Run, ...], turn: int) -> int:
        number = len(self.outputs)
        begin = ((1000 + next(self.order), PREFIX_BLOCKS * BLOCK),)
        self._history[number] = (*begin, ((1 << 20) + number, self.what.own))
        self._turn[number] = turn
        self.outputs.append(self.what.tokens)
        return number


def simulated(what: Prefixes, replicas: int, policy: str, engine: dict[str, Any], path: Path) -> int:
    """Hit tokens of the same load in a simulation. path: of the calibration."""
    model = build_model(Settings.of(**engine), calibration=read_calibration(path), memory=8 << 30)
    results, _ = simulate_fleet(FleetConfig(model.engine, replicas=replicas, policy=policy), Clients(what))
    return sum(results.cached)


def calibrate(folder: Path, seconds: float) -> Path:
    """What steps take on this machine, as `quire calibrate` measures it."""
    path = folder / "calibration.json"
    command = [sys.executable, "-m", "quire", "calibrate", "embedded", "--seconds", str(seconds), "--output", str(path)]
    subprocess.run([*command, "--threads", "1"], check=True, capture_output=True)
    return path


def prefixes(what: Prefixes, *, replicas: int, blocks: int, repeats: int, seconds: float) -> dict[str, Any]:
    """By longest prefix and in turn, with `blocks` KV blocks a replica, and one engine with all of these."""

    async def run(url: str) -> list[int]:
        out = []
        async with load(url) as at:
            for _ in range(repeats):
                await at.client.post("/reset_prefix_cache")
                out.append(await hits(at, what))
        return out

    common = ["--threads", "1", "--max-num-seqs", "8"]
    many = ["--replicas", str(replicas), "--num-gpu-blocks-override", str(blocks), *common]
    engine = {"num_gpu_blocks_override": blocks, "max_num_seqs": 8, "threads": 1}
    measured: dict[str, list[int]] = {}
    for policy in ("longest_prefix", "round_robin"):
        with server(*many, "--replica-policy", policy) as url:
            measured[policy] = asyncio.run(run(url))
    with server("--num-gpu-blocks-override", str(replicas * blocks), *common) as url:
        measured["one engine"] = asyncio.run(run(url))
    with tempfile.TemporaryDirectory() as folder:
        path = calibrate(Path(folder), seconds)
        predicted = {
            policy: simulated(what, replicas, policy, engine, path) for policy in ("longest_prefix", "round_robin")
        }
    tokens = what.count * what.each * (PREFIX_BLOCKS * BLOCK + what.own)
    mean = {name: sum(each) / len(each) for name, each in measured.items()}
    return {
        "prompt_tokens": tokens,
        "hit_tokens": measured,
        "predicted": predicted,
        "of_round_robin": mean["longest_prefix"] / mean["round_robin"],
        "of_one_engine": mean["longest_prefix"] / mean["one engine"],
        "error": {name: total / mean[name] - 1 for name, total in predicted.items()},
    }


# ---------------------------------------------------------------- command


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(["kill", "scale", "prefixes"]))
@click.option("--replicas", default=3, show_default=True)
@click.option("--clients", default=24, show_default=True, help="Streams while a replica is killed.")
@click.option("--repeats", default=2, show_default=True, help="Of the runs with prefixes.")
@click.option("--blocks", default=900, show_default=True, help="KV blocks of a replica, in the runs with prefixes.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Save all figures there.")
def main(parts: Sequence[str], replicas: int, clients: int, repeats: int, blocks: int, path: Path | None) -> None:
    """Run PARTS, by default all."""
    found: dict[str, Any] = {}
    count = str(replicas)
    for part in parts or ("kill", "scale", "prefixes"):
        if part == "kill":
            with server("--replicas", count, "--threads", "1") as url:
                found[part] = asyncio.run(_with(url, partial(kill, clients=clients, tokens=100)))
        elif part == "scale":
            scaling = ["--max-replicas", count, "--replica-queued-tokens", "2000"]
            delays = ["--replica-up-delay", "1", "--replica-down-delay", "5"]
            sizes: dict[str, Any] = {"low": 1, "high": replicas, "width": 24, "prompt": 600, "tokens": 4}
            with server("--replicas", "1", *scaling, *delays, "--threads", "1") as url:
                found[part] = asyncio.run(_with(url, partial(scale, **sizes, seconds=300)))
        else:
            what = Prefixes()
            found[part] = prefixes(what, replicas=replicas, blocks=blocks, repeats=repeats, seconds=15)
        click.echo(json.dumps({part: found[part]}, indent=1))
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


async def _with(url: str, work: Any) -> dict[str, Any]:
    async with load(url) as at:
        out: dict[str, Any] = await work(at)
        return out


if __name__ == "__main__":
    main()
