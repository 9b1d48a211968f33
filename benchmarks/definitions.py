"""`python -m benchmarks.definitions WHEEL`: `quire bench serve` beside the client of `vllm bench serve`, on one server.

vLLM's client is read from vLLM's own wheel (`pip download --no-deps vllm`), which is not installed: its load test needs
aiohttp, regex and tqdm, and nothing of its engine. Two comparisons: both clients in turns on the same server, by
default one whose answers take fixed times; and both calculations on the same recorded times, where nothing may differ.
`--record` keeps the latter for tests/bench/test_definitions.py.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.servers import started
from quire.bench.load_client import ClientResult, LoadJob, run_clients
from quire.bench.monitor import served_model
from quire.bench.serve import QUANTILES, measured
from quire.frontend.supervisor import free_port

GOALS: Mapping[str, float] = MappingProxyType({"ttft": 200.0, "tpot": 20.0, "e2el": 1000.0})
TIMES = ("ttft", "tpot", "itl", "e2el")
ABSENT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.benchmarks.datasets": ("SampleRequest", "add_dataset_parser", "get_samples"),
        "vllm.tokenizers": ("TokenizerLike", "get_tokenizer"),
        "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
        "vllm.utils.gc_utils": ("freeze_gc_heap",),
        "vllm.utils.network_utils": ("join_host_port",),
        "vllm.logger": ("init_logger",),
    }
)
"""Modules of vLLM that its load test imports and that these calls do not use, and the names it imports from them."""


@contextmanager
def vllm_client(wheel: Path) -> Iterator[tuple[Any, Any]]:
    """vLLM's modules `benchmarks.serve` and `benchmarks.lib.endpoint_request_func`, unpacked from its wheel."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("vllm/benchmarks/")])
        for package in ("vllm", "vllm.benchmarks", "vllm.utils"):
            module = ModuleType(package)
            module.__path__ = [str(Path(folder, *package.split(".")))]
            sys.modules[package] = module
        for name, names in ABSENT.items():
            module = ModuleType(name)
            vars(module).update(dict.fromkeys(names, SimpleNamespace))
            sys.modules[name] = module
        sys.modules["vllm.logger"].init_logger = lambda name: None  # type: ignore[attr-defined]
        serve = importlib.import_module("vllm.benchmarks.serve")
        yield serve, importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")


async def vllm_outputs(
    endpoint: Any, url: str, model: str, prompts: Sequence[list[int]], lens: Sequence[int], users: int
) -> tuple[list[Any], float]:
    """What vLLM's client records of each request, `users` at once, and the seconds of all of them."""
    aiohttp: Any = importlib.import_module("aiohttp")
    free = asyncio.Semaphore(users)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(prompt: list[int], length: int) -> Any:
            given = endpoint.RequestFuncInput(
                prompt=prompt,
                api_url=f"{url}/v1/completions",
                prompt_len=len(prompt),
                output_len=length,
                model=model,
                ignore_eos=True,
                extra_body={"temperature": 0},
            )
            async with free:
                return await endpoint.async_request_openai_completions(given, session)

        clock = asyncio.get_running_loop().time
        began = clock()
        found = await asyncio.gather(*(one(prompt, length) for prompt, length in zip(prompts, lens, strict=True)))
        return list(found), clock() - began


def vllm_metrics(serve: Any, outputs: Sequence[Any], seconds: float) -> dict[str, Any]:
    """vLLM's calculate_metrics, under the names of `measured`."""
    found, _ = serve.calculate_metrics([], outputs, seconds, None, list(QUANTILES), dict(GOALS))
    return {
        "ok": found.completed,
        "requests_s": found.request_throughput,
        "good_s": found.request_goodput,
        "tokens_s": found.output_throughput,
        "mean_ms": {name: float(getattr(found, f"mean_{name}_ms")) for name in TIMES},
        "ms": {name: [float(ms) for _, ms in getattr(found, f"percentiles_{name}_ms")] for name in TIMES},
    }


def recorded(outputs: Sequence[Any], seconds: float) -> ClientResult:
    """The same times as `quire bench serve` records them."""
    zero = min(one.start_time for one in outputs)
    asked: list[tuple[float, float, float, int, int, int]] = []
    for one in outputs:
        since = one.start_time - zero
        first = since + one.ttft if one.success else 0.0
        asked.append((since, first, since + one.latency, one.prompt_len, one.output_tokens, 200 if one.success else 0))
    done = [one for one in outputs if one.success]
    return {
        "began": 0.0,
        "ended": seconds,
        "tokens": sum(one.output_tokens for one in done),
        "prompted": sum(one.prompt_len for one in done),
        "events": sum(1 + len(one.itl) for one in done),
        "failed": len(outputs) - len(done),
        "first": [one.ttft for one in done],
        "gaps": [gap for one in done for gap in one.itl],
        "asked": asked,
    }


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Rates, means and percentiles by name."""
    found = {name: float(row[name]) for name in ("requests_s", "good_s", "tokens_s")}
    for name in TIMES:
        found[f"mean {name}"] = row["mean_ms"][name]
        found |= {f"p{q} {name}": ms for q, ms in zip(QUANTILES, row["ms"][name], strict=True)}
    return found


@contextmanager
def server(url: str | None, folder: Path) -> Iterator[str]:
    """The one at `url`, or one with 150 ms to the first token and 25 ms between tokens."""
    if url is not None:
        yield url.rstrip("/")
        return
    port = free_port()
    argv = [sys.executable, "-m", "benchmarks.stub", str(port), "150", "25"]
    with started(argv, f"http://127.0.0.1:{port}", "/v1/models", folder / "server.log") as found:
        yield found


@click.command("definitions")
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--url", help="Of a server that runs, http://127.0.0.1:PORT. Unset: one whose answers take fixed times.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Of each client.")
@click.option("--requests", type=click.IntRange(1), default=48, show_default=True, help="In a turn.")
@click.option("--users", type=click.IntRange(1), default=4, show_default=True, help="Requests at once.")
@click.option("--record", type=click.Path(path_type=Path), help="Write the last turn's times and vLLM's figures there.")
def command(wheel: Path, url: str | None, turns: int, requests: int, users: int, record: Path | None) -> None:
    """Compare the two clients on a server, and their calculations on the same times."""
    rng = random.Random(11)
    rows: dict[str, list[dict[str, float]]] = {"vLLM's client": [], "quire bench serve": []}
    worst = 0.0
    with (
        vllm_client(wheel) as (serve, endpoint),
        tempfile.TemporaryDirectory() as folder,
        server(url, Path(folder)) as base,
    ):
        model = served_model(base, "")
        job = LoadJob(
            host="127.0.0.1",
            port=int(base.rpartition(":")[2]),
            model=model,
            streams=users,
            prompts=[],
            output_lens=[],
        )
        for turn in range(turns + 1):
            prompts = [[rng.randrange(100, 1000) for _ in range(rng.randint(16, 48))] for _ in range(requests)]
            lens = [rng.choice((1, 2, 8, 24, 40)) for _ in prompts]
            outputs, seconds = asyncio.run(vllm_outputs(endpoint, base, model, prompts, lens, users))
            theirs = vllm_metrics(serve, outputs, seconds)
            times = recorded(outputs, seconds)
            worst = max(worst, *apart(figures(measured([times], GOALS)), figures(theirs)).values())
            # Reversed, so that nothing of them is in the prefix cache.
            own = replace(job, prompts=[prompt[::-1] for prompt in prompts], output_lens=lens)
            ours = measured(run_clients(own, 1), GOALS)
            if turn:  # the first warms
                rows["vLLM's client"].append(figures(theirs))
                rows["quire bench serve"].append(figures(ours))
            if record is not None:
                about = {"from": wheel.name, "goals": dict(GOALS), "result": times, "vllm": theirs}
                record.write_text(json.dumps(about) + "\n")
    show(rows)
    click.echo(f"The same times, calculated by both: at most {worst:.1e} apart.")


def apart(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Relative differences."""
    return {name: abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-9) for name in theirs}


def show(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Medians over turns, and the median over turns of the difference within a turn."""
    table = Table(*("figure", *rows, "apart in a turn, median"))
    theirs, ours = rows.values()
    for name in theirs[0]:
        middle = (f"{statistics.median(row[name] for row in each):,.2f}" for each in rows.values())
        gaps = [b[name] / a[name] - 1 if a[name] else 0.0 for a, b in zip(theirs, ours, strict=True)]
        table.add_row(name, *middle, f"{statistics.median(gaps):+.1%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    command()
