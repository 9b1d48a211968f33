"""`python -m benchmarks.pair`: a server asked directly and through Quire, by the same client, in turn.

With --direct URL a Quire is put in front of that very server, unless --through names one. Without it, both are started
one after the other: `vllm serve MODEL`, then `quire serve --backend vllm --model MODEL`, with the same arguments.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.servers import through, vllm
from benchmarks.workloads import prompts
from quire import __version__
from quire.bench.load_client import LoadJob, run_clients, summarize
from quire.bench.load_levels import TOKENS
from quire.bench.monitor import GPUMonitor, environment, served_model
from quire.errors import QuireError
from quire.frontend.http_client import Origin
from quire.frontend.supervisor import free_port

COUNTS: Mapping[int, int] = {16: 100, 64: 384}
"""Requests at a concurrency; others: six each."""


class Unlike(QuireError):
    """Two runs that cannot be compared, and why."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked for. Lengths in tokens, from and to."""

    levels: tuple[int, ...]
    requests: int | None
    prompt: tuple[int, int]
    new: tuple[int, int]
    seed: int
    processes: int
    salt: bool

    def asked(self, level: int, seed: int) -> tuple[list[list[int]], list[int]]:
        count = self.requests or COUNTS.get(level, 6 * level)
        return prompts(count, self.prompt, self.new, seed=seed, ids=TOKENS)


@click.command("pair", context_settings={"ignore_unknown_options": False})
@click.option("--direct", metavar="URL", help="A server that runs already.")
@click.option("--through", "front", metavar="URL", help="A Quire in front of it. Unset: one is started.")
@click.option("--model", help="Without --direct: the model that vLLM serves, both times.")
@click.option("--vllm-command", default="vllm", show_default=True, help="The command that is vLLM.")
@click.option("--concurrency", "levels", multiple=True, type=click.IntRange(1), default=(16, 64), show_default=True)
@click.option(
    "--requests", type=click.IntRange(1), help="Requests a round. Unset: 100 at 16, 384 at 64, else six each."
)
@click.option("--prompt", type=(int, int), default=(128, 256), show_default=True, help="Prompt tokens, from and to.")
@click.option("--new", type=(int, int), default=(32, 64), show_default=True, help="New tokens, from and to.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Rounds; medians are compared.")
@click.option("--seed", default=7, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True, help="Client processes at most.")
@click.option(
    "--salt/--no-salt",
    default=True,
    show_default=True,
    help="Send a cache_salt of its own with each round of each side, so that the second finds nothing cached.",
)
@click.option("--gate", default=0.91, show_default=True, help="Least ratio of tokens/s; less ends with code 1.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("pair"), show_default=True, help="Results' folder."
)
@click.argument("rest", nargs=-1, metavar="[-- VLLM ARGUMENTS]")
def command(
    direct: str | None,
    front: str | None,
    model: str | None,
    vllm_command: str,
    repeat: int,
    gate: float,
    out: Path,
    rest: tuple[str, ...],
    **load: Any,
) -> None:
    """Measure what Quire in front of a server costs: direct and through, same model, prompts and client."""
    if (direct is None) == (model is None):
        raise click.UsageError("give --direct URL of a server that runs, or --model for vLLM to be started")
    if direct is None and front is not None:
        raise click.UsageError("--through needs --direct")
    if direct is not None and rest:
        raise click.UsageError("arguments after -- are for a vLLM that is started here: leave out --direct")
    given = Load(**load)
    out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"quire": __version__, "environment": environment()}
    about |= {"load": asdict(given), "gate": gate, "repeat": repeat, "direct": direct, "model": model}
    about["arguments"] = list(rest)
    with GPUMonitor() as watch:
        if direct is None:
            rows = _in_turn(given, repeat, model or "", vllm_command, rest, out)
        else:
            rows = _side_by_side(given, repeat, direct, front, out)
    (out / "gpu.json").write_text(json.dumps(watch.samples))
    found: dict[str, Any] = {"about": about, "levels": [compared(rows, level) for level in given.levels]}
    (out / "summary.json").write_text(json.dumps(found, indent=1))
    show(found, out)
    short = [row["concurrency"] for row in found["levels"] if row["ratio"] < gate]
    if short:
        raise click.ClickException(f"below the gate of {gate} at concurrency {', '.join(map(str, short))}")


def _side_by_side(load: Load, repeat: int, direct: str, front: str | None, out: Path) -> list[dict[str, Any]]:
    """Both run at once and are asked in turn; the order alternates."""
    rows = []
    with _front(direct, front, out) as other:
        sides = [("direct", direct), ("through", other)]
        model = served_model(direct)
        for side, url in sides:
            rows.append(_round(load, side, url, model, load.levels[0], -1, out))
        for number in range(repeat):
            for level in load.levels:
                for side, url in sides if number % 2 == 0 else sides[::-1]:
                    rows.append(_round(load, side, url, model, level, number, out))
    return rows


@contextmanager
def _front(direct: str, front: str | None, out: Path) -> Iterator[str]:
    if front is not None:
        yield front
        return
    with through(["--backend", "openai", "--upstream", direct], free_port(), out / "through.log") as url:
        yield url


def _in_turn(load: Load, repeat: int, model: str, command: str, rest: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """First all rounds of one, then all of the other: a GPU holds one at a time."""
    rows = []
    own = ["--backend", "vllm", "--model", model, "--vllm-command", command, "--vllm-log", str(out / "vllm.log")]
    for side, started in (
        ("direct", vllm(command, model, rest, free_port(), out / "direct.log")),
        ("through", through([*own, "--", *rest], free_port(), out / "through.log")),
    ):
        with started as url:
            served = served_model(url)
            rows.append(_round(load, side, url, served, load.levels[0], -1, out))
            for number in range(repeat):
                for level in load.levels:
                    rows.append(_round(load, side, url, served, level, number, out))
    return rows


def _round(load: Load, side: str, url: str, model: str, level: int, number: int, out: Path) -> dict[str, Any]:
    """One round of one side; number -1 warms up. Its raw results are kept."""
    ids, new = load.asked(level, load.seed + number)
    where, salt = Origin.parse(url), f"{side}-{level}-{number}" if load.salt else ""
    job = LoadJob(host=where.host, port=where.port, model=model, streams=level, prompts=ids, output_lens=new, salt=salt)
    parts = run_clients(job, load.processes)
    row: dict[str, Any] = {
        "side": side,
        "url": url,
        "concurrency": level,
        "round": number,
        "model": model,
        "salt": salt,
    }
    row |= {"inputs": hashlib.sha256(json.dumps([ids, new]).encode()).hexdigest()[:16], "asked": sum(new)}
    row |= summarize(parts)
    with (out / "raw.jsonl").open("a") as raw:
        raw.write(json.dumps({**row, "parts": parts}) + "\n")
    click.echo(
        f"{side:8} c={level:<4} round {number:2}: {row['tokens_s']:9.1f} tokens/s, "
        f"first token {row['ttft_ms'][0]:.2f} ms, next {row['itl_ms'][0]:.3f} ms, {row['failed']} failed"
    )
    return row


def compared(rows: Sequence[Mapping[str, Any]], level: int) -> dict[str, Any]:
    """One level's rounds, side by side. Raises Unlike when they did not do the same work."""
    sides = {
        side: {row["round"]: row for row in rows if (row["side"], row["concurrency"]) == (side, level)}
        for side in ("direct", "through")
    }
    numbers = sorted(number for number in sides["direct"] if number >= 0)
    ratios, added = [], []
    for number in numbers:
        direct, other = (sides[side].get(number, {}) for side in ("direct", "through"))
        for what in ("model", "inputs", "asked", "prompted", "tokens"):
            if direct.get(what) != other.get(what):
                values = f"{direct.get(what)} directly and {other.get(what)} through"
                raise Unlike(f"concurrency {level}, round {number}: {what} differ ({values}): nothing can be compared")
        if direct["failed"] or other["failed"] or direct["tokens"] != direct["asked"]:
            failed = f"{direct['failed']} failed directly and {other['failed']} through"
            raise Unlike(f"concurrency {level}, round {number}: not every answer came ({failed})")
        ratios.append(other["tokens_s"] / direct["tokens_s"])
        added.append(other["ttft_ms"][0] - direct["ttft_ms"][0])
    medians = {
        side: {
            "tokens_s": statistics.median(sides[side][n]["tokens_s"] for n in numbers),
            "ttft_ms": statistics.median(sides[side][n]["ttft_ms"][0] for n in numbers),
            "itl_ms": statistics.median(sides[side][n]["itl_ms"][0] for n in numbers),
        }
        for side in sides
    }
    best = [max(sides[side][n]["tokens_s"] for n in numbers) for side in ("through", "direct")]
    return {
        "concurrency": level,
        **medians,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "best_ratio": best[0] / best[1],
        "added_ttft_ms": statistics.median(added),
    }


def show(found: Mapping[str, Any], out: Path) -> None:
    table = Table(title="direct and through Quire: medians over rounds", title_justify="left")
    for column in (
        "concurrency",
        "direct tokens/s",
        "through",
        "ratio",
        "first token ms",
        "through",
        "added",
        "next ms",
    ):
        table.add_column(column, justify="right")
    for row in found["levels"]:
        direct, other = row["direct"], row["through"]
        figures = (direct["tokens_s"], other["tokens_s"], direct["ttft_ms"], other["ttft_ms"])
        speeds = [f"{x:,.1f}" for x in figures[:2]]
        firsts = [f"{x:.2f}" for x in figures[2:]]
        gaps = f"{direct['itl_ms']:.3f} / {other['itl_ms']:.3f}"
        ratio, added = f"{row['ratio']:.4f}", f"{row['added_ttft_ms']:.2f}"
        table.add_row(str(row["concurrency"]), *speeds, ratio, *firsts, added, gaps)
    Console().print(table)
    click.echo(f"raw results, logs and figures: {out}")


if __name__ == "__main__":
    command()
