"""`python -m benchmarks.tables`: the tables that small inference engines show of themselves, for Quire, on a CPU.

Random weights in GPT-2's shape, and the embedded model. The variants of a table are built together and measured in
turns, every other turn in reverse order, and medians are shown with the spread of the turns, since the machine may be
shared. All tables share `--minutes`: where a turn would end too late, a table has fewer of them, and says how many.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import click
import torch

from benchmarks import paging
from benchmarks.servers import through
from benchmarks.shapes import write
from quire import __version__
from quire.assembly.engine import build_engine
from quire.bench.monitor import revision
from quire.config import Settings
from quire.engine.engine import Engine
from quire.frontend.supervisor import free_port
from quire.observability.engine_metrics import pool_state

Rows = list[list[str]]
Variant = TypeVar("Variant")
Arguments = tuple[str, ...]
Levels = list[dict[str, Any]]

CONTEXT = 512
"""Tokens a sequence may have where K/V memory is compared; contiguous memory is one block of as many."""
LENGTHS = (16, 32, 64)
"""New tokens where the K/V cache is on and off."""
MEMORY: Mapping[str, str] = MappingProxyType({"paged": "auto", "standard": str(CONTEXT)})
"""--block-size by kind of K/V memory."""


class Turns:
    """Numbers of the turns to measure: at most `count`, none that would end after `seconds`, at least one.

    done: how many there have been.
    """

    def __init__(self, count: int, seconds: float = float("inf")) -> None:
        self.count = count
        self.ends = time.monotonic() + seconds
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        longest = 0.0
        for turn in range(self.count):
            began = time.monotonic()
            if turn and began + longest > self.ends:
                return
            yield turn
            self.done = turn + 1
            longest = max(longest, time.monotonic() - began)


def in_turn(turn: int, variants: Sequence[Variant]) -> Sequence[Variant]:
    """The variants, in reverse order in every other turn."""
    return variants[::-1] if turn % 2 else variants


class Table(NamedTuple):
    """A table of the page. measure: its rows, given a folder for models and the turns."""

    title: str
    about: str
    head: tuple[str, ...]
    measure: Callable[[Path, Turns], Rows]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and how far the turns are from it."""
    middle = statistics.median(values)
    noise = max(abs(value - middle) for value in values) / middle if middle else 0.0
    return f"{middle:,.{digits}f}" + (f" (±{noise:.0%})" if len(values) > 1 else "")


def engine_of(**settings: Any) -> Engine:
    return build_engine(Settings.of(device="cpu", enable_prefix_caching=False, latency_target_ms=0, **settings))


def gpt2(folder: Path, **settings: Any) -> Engine:
    """Random weights in the shape of GPT-2 small, in float32 unless said otherwise."""
    return engine_of(**{"model": str(write(folder, "gpt2")), "load_format": "dummy", "dtype": "float32", **settings})


def answers(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Greedy answers of `new` tokens, all at once."""
    made: dict[str, list[int]] = {engine.submit(list(prompt), new): [] for prompt in prompts}
    while engine.has_pending_work:
        for event in engine.step():
            made[event.id] += event.tokens
    return list(made.values())


# ---------------------------------------------------------------- the tables


def kv_cache(folder: Path, turns: Turns) -> Rows:
    """With the cache an answer is one request; without, each token is a request with everything before it."""
    engine, prompt = gpt2(folder, max_num_seqs=1), [100 + i for i in range(32)]

    def recomputed(new: int) -> list[int]:
        made: list[int] = []
        for _ in range(new):
            made += answers(engine, [[*prompt, *made]], 1)[0]
        return made

    ways: Mapping[str, Callable[[int], list[int]]] = {
        "on": lambda new: answers(engine, [prompt], new)[0],
        "off": recomputed,
    }
    speeds: dict[tuple[str, int], list[float]] = {}
    texts: dict[tuple[str, int], list[int]] = {}
    recomputed(1)
    for turn in turns:
        for new in LENGTHS:
            for way, make in in_turn(turn, list(ways.items())):
                began = time.perf_counter()
                texts[way, new] = make(new)
                speeds.setdefault((way, new), []).append(new / (time.perf_counter() - began))
    engine.close()
    rows = []
    for new in LENGTHS:
        ratio = statistics.median(speeds["on", new]) / statistics.median(speeds["off", new])
        same = "yes" if texts["on", new] == texts["off", new] else "no"
        shown = (spread(speeds[way, new], 1) for way in ("off", "on"))
        rows.append([f"{new}", *shown, f"{ratio:.1f}", same])
    return rows


def batch_sizes(folder: Path, turns: Turns) -> Rows:
    """An engine of each layout; each batch is measured with both."""
    batches = (1, 8, 32, 128, 512)
    sizes: dict[str, Any] = {"shape": "gpt2", "dtype": "float32", "context": CONTEXT, "kv_gib": 1.0}
    lengths: tuple[tuple[int, int], tuple[int, int]] = ((4, 8), (4, 8))
    engines = {layout: paging.built(folder, layout, max(batches), **sizes) for layout in MEMORY}
    for engine, token in engines.values():
        paging.drive(engine, 1, *lengths, token, seed=1)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for turn in turns:
        for batch in batches:
            for layout, (engine, token) in in_turn(turn, list(engines.items())):
                row = paging.drive(engine, batch, *lengths, token, seed=turn)
                found.setdefault((layout, batch), []).append(row)
    for engine, _ in engines.values():
        engine.close()
    rows = []
    for batch in batches:
        cells = [f"{batch}"]
        for layout in ("standard", "paged"):
            measured = found[layout, batch]
            cells += [spread([each["tokens_a_second"] for each in measured])]
            cells += [f"{measured[0]['most_at_once']}", f"{measured[0]['used_share']:.0%}"]
        rows.append(cells)
    return rows


def loads(folder: Path, turns: Turns) -> Rows:
    """1 to 128 users, each asking again when answered, through HTTP."""
    users = ("--max-concurrency", "1,2,4,8,16,32,64,128")
    client = ("--random-input-len", "32:64", "--random-output-len", "16:32", *users)
    variants: dict[Arguments, tuple[Arguments, Arguments]] = {}
    variants |= {(kind,): (memory_flags(kind), client) for kind in ("standard", "paged")}
    return [
        [*variant, f"{level[0]['users']}", speed(level), *quantiles(level, "ttft"), *quantiles(level, "e2el")]
        for variant, levels in served(folder, turns, variants).items()
        for level in levels
    ]


SMALL = ("--kv-cache-memory-bytes", "64MiB", "--max-model-len", f"{CONTEXT}", "--max-num-seqs", "128")


def memory_flags(kind: str) -> tuple[str, ...]:
    return ("--block-size", MEMORY[kind])


SWITCHES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all on": (),
        "no prefix cache": ("--no-enable-prefix-caching",),
        "no chunked prefill": ("--no-enable-chunked-prefill",),
        "standard K/V memory": memory_flags("standard"),
        "static batches": ("--batching", "static"),
    }
)


def rates(folder: Path, turns: Turns) -> Rows:
    """Requests at random moments, at five rates; in a turn the same moments for every switch."""
    gpt2_flags: Arguments = ("--model", str(write(folder, "gpt2")), "--load-format", "dummy", "--dtype", "float32")
    gpt2_flags = (*gpt2_flags, "--kv-cache-memory-bytes", "1GiB")
    shapes: dict[str, tuple[Arguments, str, str]] = {
        "embedded": ((), "4,8,16,32,64", "32"),
        "GPT-2 small": (gpt2_flags, "1,2,4,8,16", "8"),
    }
    variants: dict[Arguments, tuple[Arguments, Arguments]] = {}
    for model, (flags, asked, count) in shapes.items():
        client = ("--random-input-len", "32:64", "--random-output-len", "8:16", "--request-rate", asked)
        for switch, own in SWITCHES.items():
            if model == "embedded" or switch in ("all on", "standard K/V memory"):
                variants[model, switch] = ((*flags, *own), (*client, "--num-prompts", count))
    return [
        [*variant, rate, speed(level), *quantiles(level, "ttft", "e2el")]
        for variant, levels in served(folder, turns, variants).items()
        for rate, level in zip(shapes[variant[0]][1].split(","), levels, strict=True)
    ]


def served(
    folder: Path, turns: Turns, variants: Mapping[Arguments, tuple[Arguments, Arguments]]
) -> dict[Arguments, list[Levels]]:
    """By variant, each level of load in all turns. variants: arguments of a server and of `quire bench serve`.

    All servers run from the beginning to the end; one of them is asked at a time. Prompts differ from turn to turn, so
    that none is in the prefix cache.
    """
    found: dict[Arguments, list[Levels]] = {}
    with ExitStack() as running:
        urls = {}
        for at, (variant, (server, _)) in enumerate(variants.items()):
            flags = (*SMALL, *server, "--no-standby-engine")
            urls[variant] = running.enter_context(through(flags, free_port(), folder / f"server-{at}.log"))
        for turn in turns:
            for variant, (_, client) in in_turn(turn, list(variants.items())):
                for at, level in enumerate(level_rows(folder, urls[variant], (*client, "--seed", f"{turn + 1}"))):
                    levels = found.setdefault(variant, [])
                    if at == len(levels):
                        levels.append([])
                    levels[at].append(level)
    return {variant: found[variant] for variant in variants}


def level_rows(folder: Path, url: str, client: Sequence[str]) -> Levels:
    """What `quire bench serve` saves of a server."""
    result = folder / "levels.json"
    command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", url, "--save-result", str(result)]
    done = subprocess.run([*command, "--processes", "1", *client], capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"quire bench serve {' '.join(client)}: {done.stderr.strip()}")
    levels: Levels = json.loads(result.read_text())["levels"]
    short = [level["level"] for level in levels if level["ok"] != level["requests"]]
    if short:
        raise click.ClickException(f"{url} did not answer all requests at {', '.join(short)}")
    return levels


def speed(level: Levels) -> str:
    """Tokens a second."""
    return spread([turn["tokens_s"] for turn in level])


def quantiles(level: Levels, *names: str) -> list[str]:
    """p50 and p99 of each time in ms, the medians of all turns."""
    return [f"{statistics.median(turn['ms'][name][at] for turn in level):,.0f}" for name in names for at in (0, -1)]


def over_time(folder: Path, turns: Turns) -> Rows:
    """64 requests at once, 16 places; ten moments of each run. Both runs have the same requests and memory."""
    rows = []
    for kind in ("standard", "paged"):
        engine = gpt2(
            folder, max_model_len=CONTEXT, block_size=MEMORY[kind], max_num_seqs=16, kv_cache_memory_bytes=512 << 20
        )
        for i in range(64):
            engine.submit([100 + (7 * i + p) % 3000 for p in range(8 + 5 * i % 24)], 8 + 3 * i % 17)
        samples = []
        began = time.perf_counter()
        while engine.has_pending_work:
            engine.step()
            pool, state, gauges = engine.scheduler.kv.block_pool, pool_state(engine.scheduler), engine.gauges()
            samples.append((time.perf_counter() - began, gauges.running, pool.num_used / pool.num_blocks, state))
        for at in range(10):
            seconds, running, used, state = samples[at * (len(samples) - 1) // 9]
            share = f"{state.internal:.0%}", f"{state.external:.0%}"
            rows.append([kind, f"{seconds / samples[-1][0]:.0%}", f"{running}", f"{used:.0%}", *share])
        engine.close()
    return rows


def loop(folder: Path, turns: Turns) -> Rows:
    """`quire bench engine`: the loop without weights."""
    known = {1000: "26,000 to 29,000 tok/s, 1.5 to 1.7 ms a step", 10_000: "2,079 tok/s, 15.4 ms a step"}
    runs: dict[int, list[dict[str, Any]]] = {requests: [] for requests in known}
    for turn in turns:
        for requests in in_turn(turn, list(known)):
            command = [sys.executable, "-m", "quire", "bench", "engine", "--requests", str(requests), "--json"]
            runs[requests].append(json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL)))
    rows = []
    for requests, theirs in known.items():
        one = sorted(runs[requests], key=lambda run: float(run["tokens_per_s"]))[len(runs[requests]) // 2]
        times = [f"{one[name][q]:,.2f}" for name in ("step_ms", "latency_ms") for q in ("p50", "p99")]
        counts = [f"{one['requests']:,}", f"{one['failed']}", f"{one['peak_kv_use']:.1%}"]
        rows.append([*counts, spread([run["tokens_per_s"] for run in runs[requests]]), *times, theirs])
    return rows


def number_formats(folder: Path, turns: Turns) -> Rows:
    """The same random weights in each format, in turns."""
    formats: Mapping[str, Mapping[str, str]] = {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "fp8 weights": {"quantization": "fp8", "canary": "off"},
        "int8 weights": {"quantization": "int8", "canary": "off"},
    }
    engines = {name: gpt2(folder, max_num_seqs=8, **settings) for name, settings in formats.items()}
    speeds: dict[tuple[str, int], list[float]] = {}
    for engine in engines.values():
        answers(engine, [[100] * 8], 2)
    for turn in turns:
        for name, engine in in_turn(turn, list(engines.items())):
            for batch in (1, 8):
                began = time.perf_counter()
                answers(engine, [[100 + i] * 8 for i in range(batch)], 16)
                speeds.setdefault((name, batch), []).append(16 * batch / (time.perf_counter() - began))
    for engine in engines.values():
        engine.close()
    return [[name, *(spread(speeds[name, batch], 1) for batch in (1, 8))] for name in formats]


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "kv-cache": Table(
            "K/V cache on and off",
            "Random weights in the shape of GPT-2 small, float32, a prompt of 32 tokens, one sequence. Off: each "
            "token is a request of its own with everything before it, and nothing is cached.",
            ("new tokens", "off, tok/s", "on, tok/s", "ratio", "same tokens"),
            kv_cache,
        ),
        "batches": Table(
            "Batch 1 to 512, standard and paged memory",
            f"GPT-2 small, float32, 1 GiB for K/V, contexts of {CONTEXT}; prompts of 4 to 8 tokens, 4 to 8 new ones. "
            "Standard memory is one block as long as the context for each sequence.",
            (
                *("batch", "standard, tok/s", "at once", "of it holding tokens"),
                *("paged, tok/s", "at once", "of it holding tokens"),
            ),
            batch_sizes,
        ),
        "load": Table(
            "1 to 128 users, standard and paged memory",
            "The embedded model behind HTTP, 64 MiB for K/V, at most 128 sequences; prompts of 32 to 64 tokens, 16 to "
            "32 new ones. Times in ms.",
            ("memory", "users", "tok/s", "TTFT p50", "p99", "whole answer p50", "p99"),
            loads,
        ),
        "rates": Table(
            "Five request rates, by model and switch",
            "As above, 8 to 16 new tokens; requests arrive at random moments, the same for every switch. Times in ms.",
            ("model", "switch", "requests/s", "tok/s", "TTFT p50", "p99", "whole answer p50", "p99"),
            rates,
        ),
        "over-time": Table(
            "Fragmentation and use of K/V memory over time",
            f"GPT-2 small, 512 MiB for K/V, contexts of {CONTEXT}, 64 requests at once of which 16 run. Use: blocks "
            "held. Internal: positions of held blocks without a token. External: free blocks outside the longest "
            "free run, which costs nothing where any block serves.",
            ("memory", "of the run", "running", "use", "internal", "external"),
            over_time,
        ),
        "engine": Table(
            "The engine loop, without weights",
            "`quire bench engine`: prompts of 4 to 96 tokens, 4 to 24 new ones, 32 at once. The last column is another "
            "engine, of the same design that scans its queues, on this class of machine.",
            (
                *("submitted", "failed", "peak use", "tok/s", "step p50, ms", "p99", "latency p50, ms", "p99"),
                "another engine",
            ),
            loop,
        ),
        "formats": Table(
            "Number formats on a CPU",
            "GPT-2 small's shape, prompts of 8 tokens, 16 new ones, prefill included. 8-bit weights are multiplied "
            "in 16 or 32 bits where the processor has no instructions for them.",
            ("weights", "batch 1, tok/s", "batch 8, tok/s"),
            number_formats,
        ),
    }
)

ELSEWHERE = (
    (
        "GPU use under load",
        "a GPU",
        "quire bench serve --save-result run.json",
        "[an 8B model on an H100](load-h100-2026-11-26.md)",
    ),
    (
        "vLLM behind Quire beside vLLM alone",
        "a GPU and vLLM",
        "python -m benchmarks.pair --help",
        "[0.993 to 1.0 of direct on an H200](upstream-h200-2026-11-21.md)",
    ),
    (
        "GPT-2 small drafting for GPT-2 medium",
        "both checkpoints: with random weights no draft is accepted",
        "quire serve openai-community/gpt2-medium --speculative-config "
        '\'{"method": "draft_model", "model": "openai-community/gpt2", "num_speculative_tokens": 4}\'',
        "[the embedded model with its own draft](speculation-cpu-2026-11-21.md)",
    ),
    ("a bf16 draft on a GPU", "a GPU", "python -m benchmarks.speculate", "[H200](speculation-h200-2026-11-21.md)"),
    (
        "8B inside 16 GB",
        "a GPU",
        "quire serve Qwen/Qwen3-8B --quantization fp8 --kv-cache-memory-bytes 2GiB",
        "[memory and speed](load-h100-2026-11-26.md#8b-inside-16-gb)",
    ),
)
"""What is not measured here: what it needs, its command, and where it was."""


@click.command("tables")
@click.argument("names", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True, help="Turns of each variant, at most.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=15.0, show_default=True, help="Of all tables."
)
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="Rows; those there are kept.")
@click.option("--page", type=click.Path(path_type=Path), help="Also write a page of all rows there.")
def command(names: tuple[str, ...], turns: int, minutes: float, path: Path, page: Path | None) -> None:
    """Measure the tables named, none by default, add them to a file, and write a page of it."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    ends = time.monotonic() + 60 * minutes
    for at, name in enumerate(names):
        began, load = time.monotonic(), os.getloadavg()[0]
        made = Turns(turns, (ends - began) / (len(names) - at))
        with tempfile.TemporaryDirectory() as folder:
            rows = TABLES[name].measure(Path(folder), made)
        about = {"revision": revision(), "load": round(load, 1), "seconds": round(time.monotonic() - began)}
        found[name] = {"rows": rows, "turns": made.done or 1, **about}
        path.write_text(json.dumps(found, indent=1))
        click.echo(f"{name}: {found[name]['turns']} turns, {about}")
    if page is not None:
        page.write_text(markdown(found))


def markdown(found: Mapping[str, Any]) -> str:
    """The page."""
    where = (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, Quire {__version__}"
    )
    lines = [
        f"# Reference tables on a CPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        "The tables that small inference engines show of themselves, written by `python -m benchmarks.tables`. "
        f"{where}. The machine is shared and was not idle: the load is given with each table, ± is the largest "
        "distance of a turn from the median, and what was measured in turns can be compared, absolute figures hardly. "
        "GPT-2 has random weights, which cost what real ones do.",
        "",
    ]
    for name, table in TABLES.items():
        if name in found:
            run = found[name]
            lines += [f"## {table.title}", "", table.about, ""]
            lines += [f"| {' | '.join(table.head)} |", "|" + "---|" * len(table.head)]
            lines += [f"| {' | '.join(row)} |" for row in run["rows"]]
            command = f"python -m benchmarks.tables {name} --turns {run['turns']} --json rows.json"
            lines += [
                "",
                f"`{command}`, commit {run['revision']}, load {run['load']} at its start, {run['seconds']} s.",
                "",
            ]
    lines += ["## Not measured here", "", "| table | needs | command | measured elsewhere |", "|---|---|---|---|"]
    missing = [
        (table.title, "a quiet machine", f"python -m benchmarks.tables {name} --json rows.json")
        for name, table in TABLES.items()
        if name not in found
    ]
    lines += [f"| {what} | {needs} | `{how}` | |" for what, needs, how in missing]
    lines += [f"| {what} | {needs} | `{how}` | {other} |" for what, needs, how, other in ELSEWHERE]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    command()
