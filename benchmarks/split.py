"""`python -m benchmarks.split`: a prefill and a decode engine beside two engines that do both, under the same load.

Two arrangements of two servers, one a GPU (on a CPU they share its cores): `mixed`, each of which gets every other
request, and `split`, where one computes long prompts for the other, which is asked. Both get the same requests at the
same times, which come at random (a Poisson process) at several rates. A request is good when it meets both targets, to
the first token and between tokens; goodput is the offered rate times the share of good ones. Prompts are new every
time, so that neither finds one in its prefix cache.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.servers import spawned
from benchmarks.shapes import SHAPES, write
from quire.bench.load_client import ClientResult, LoadJob, RequestTiming, run_clients
from quire.bench.load_levels import LoadLevel, load_levels, parse_goodput, parse_range, parse_rates
from quire.bench.monitor import environment, fetch
from quire.bench.serve import QUANTILES, measured
from quire.frontend.supervisor import free_port
from quire.observability.histogram import percentile

ARRANGEMENTS = ("mixed", "split")
TARGETS = ("ttft:1000,tpot:8", "ttft:1000,tpot:10", "ttft:1000,tpot:15", "ttft:1000,tpot:25")
Row = dict[str, Any]


@dataclass(frozen=True)
class Servers:
    """Servers of one arrangement, by port. asked: those that clients ask, every other request each."""

    ports: tuple[int, int]
    asked: tuple[int, ...]
    ready_s: float


@click.command("split", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--rate", "rates", type=parse_rates, default="2,4,6,8", show_default=True, help="Requests a second.")
@click.option("--seconds", default=15.0, show_default=True, help="In which requests come, at each rate.")
@click.option("--prompt", type=parse_range, default="2048:6144", show_default=True, help="Tokens a prompt has.")
@click.option("--new", type=parse_range, default="64:192", show_default=True, help="Tokens an answer has.")
@click.option(
    "--goodput", "targets", multiple=True, default=TARGETS, show_default=True, help="ttft:MS,tpot:MS; several."
)
@click.option("--host-gib", default=8.0, show_default=True, help="Host memory of each side of the split, for blocks.")
@click.option("--connections", default=1, show_default=True, help="Between the two sides of the split.")
@click.option("--processes", default=4, show_default=True, help="Client processes.")
@click.option("--check", default=8, show_default=True, help="Requests, one by one, whose tokens are compared.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store every request's times there.")
def command(
    model: str,
    options: tuple[str, ...],
    rates: tuple[float, ...],
    seconds: float,
    prompt: tuple[int, int],
    new: tuple[int, int],
    targets: tuple[str, ...],
    host_gib: float,
    connections: int,
    processes: int,
    check: int,
    path: Path | None,
) -> None:
    """Measure MODEL: embedded, a folder, or a shape of benchmarks.shapes. OPTIONS, after `--`: of `quire serve`."""
    goals = {target: parse_goodput(target) for target in targets}
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if model in SHAPES:
            options = (*options, "--load-format", "dummy")
            model = str(write(Path(folder), model))
        levels = [level(rate, round(rate * seconds), prompt, new) for rate in rates]
        probes = level(1.0, check, prompt, (16, 16))
        for name in ARRANGEMENTS:
            with arranged(name, model, options, host_gib, connections) as servers:
                run = partial(offered, servers, processes)
                run(level(max(rates), 4 * processes, prompt, new, seed=99))  # warms caches and connections
                tokens = [greedy(servers.asked[0], each) for each in probes.prompts]
                found.append({"arrangement": name, "ready_s": servers.ready_s, "tokens": tokens})
                for rate, each in zip(rates, levels, strict=True):
                    found.append({"arrangement": name, "rate": rate, **judged(run(each), rate, goals)})
                    found[-1]["transfer"] = transfer(servers.ports[-1])
                    click.echo(json.dumps({k: v for k, v in found[-1].items() if k != "asked"}))
                    if path is not None:
                        about = {"environment": environment(), "options": options, "prompt": prompt, "new": new}
                        path.write_text(json.dumps({**about, "rows": found}))
    for line in summary(found, targets):
        click.echo(line)


# -------------------------------------------------------------------- servers


@contextmanager
def arranged(name: str, model: str, options: Sequence[str], host_gib: float, connections: int) -> Iterator[Servers]:
    """Two servers of a model, started at the same time, ready and, when split, connected. A decode engine connects to
    an address as often as it is named."""
    ports = free_port(), free_port()
    roles: tuple[Sequence[str], Sequence[str]] = (), ()
    if name == "split":
        size, address = ("--kv-offloading-size", str(host_gib)), f"127.0.0.1:{free_port()}"
        prefill = (*size, "--disaggregation-mode", "prefill", "--disaggregation-address", address)
        addresses = ",".join([address] * connections)
        roles = prefill, (*size, "--disaggregation-mode", "decode", "--disaggregation-address", addresses)
    began = time.perf_counter()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(card: int) -> None:
            argv = [sys.executable, "-m", "quire", "serve", "--model", model, "--served-model-name", "model"]
            argv += ["--port", str(ports[card]), "--disable-log-stats", "--uvicorn-log-level", "warning"]
            visible = {"CUDA_VISIBLE_DEVICES": str(card)} if torch.cuda.is_available() else {}
            stack.enter_context(spawned([*argv, *options, *roles[card]], ports[card], {**os.environ, **visible}))

        list(pool.map(start, range(2)))
        if name == "split":
            connected(ports[1])
        yield Servers(ports, ports if name == "mixed" else ports[1:], time.perf_counter() - began)


def connected(port: int) -> None:
    """Wait until a decode engine uses its prefill engine. Raises ClickException after a minute."""
    prompts = load_prompts()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        greedy(port, next(prompts))
        if metric(port, "quire:remote_prefills_total", 'outcome="done"'):
            return
        time.sleep(0.5)
    raise click.ClickException("the decode engine does not reach the prefill engine")


def load_prompts() -> Iterator[list[int]]:
    """Prompts that are long enough for another engine, and unlike others'."""
    for seed in itertools.count(1000):
        yield from level(1.0, 1, (320, 320), (1, 1), seed=seed).prompts


def metric(port: int, name: str, labels: str = "") -> float:
    """The sum of a server's samples of a metric that have these labels."""
    text = (fetch(f"http://127.0.0.1:{port}/metrics") or b"").decode()
    lines = (line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] == name and labels in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def transfer(port: int) -> Row:
    """What a decode engine has got so far: prompts by outcome, bytes, and seconds from asking to the last block."""
    name = "quire:remote_prefills_total"
    text = (fetch(f"http://127.0.0.1:{port}/metrics") or b"").decode()
    outcomes = re.findall(rf'^{name}{{.*outcome="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {
        "outcomes": {outcome: float(count) for outcome, count in outcomes if float(count)},
        "bytes": metric(port, "quire:kv_offload_copied_bytes_total", 'copy="receive"'),
        "seconds": metric(port, "quire:remote_prefill_seconds_total"),
    }


# -------------------------------------------------------------------- load


def level(rate: float, count: int, prompt: tuple[int, int], new: tuple[int, int], seed: int = 7) -> LoadLevel:
    """Requests at random times; the same for the same arguments."""
    (made,) = load_levels(
        users=(),
        rates=(rate,),
        burstiness=1.0,
        trace=None,
        speed=1.0,
        shrink=1.0,
        num_prompts=count,
        length=prompt,
        new=new,
        shared=0,
        seed=seed + round(1000 * rate),
    )
    return made


def offered(servers: Servers, processes: int, load: LoadLevel) -> list[ClientResult]:
    """Send a load, its requests in turn to the servers that are asked."""
    ways = len(servers.asked)

    def send(way: int) -> list[ClientResult]:
        job = LoadJob(
            host="127.0.0.1",
            port=servers.asked[way],
            model="model",
            streams=load.users,
            prompts=load.prompts[way::ways],
            output_lens=load.output_lens[way::ways],
            due=load.due[way::ways],
        )
        return run_clients(job, processes // ways)

    with ThreadPoolExecutor(ways) as pool:
        return [result for results in pool.map(send, range(ways)) for result in results]


def greedy(port: int, prompt: list[int]) -> list[int]:
    """16 tokens of an answer."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


# -------------------------------------------------------------------- results


def judged(results: Sequence[ClientResult], rate: float, goals: Mapping[str, Mapping[str, float]]) -> Row:
    """One load's row: shares of good requests and goodput by targets, times in milliseconds, every request's times."""
    whole = measured(results, {})
    shares = {target: measured(results, each)["good"] / whole["requests"] for target, each in goals.items()}
    gaps = [gap for result in results for gap in result["gaps"]]
    shown = (QUANTILES.index(50), QUANTILES.index(99))
    times = {what: [round(whole["ms"][what][i], 2) for i in shown] for what in ("ttft", "tpot", "itl")}
    return {
        "requests": whole["requests"],
        "answered": whole["ok"],
        "seconds": whole["seconds"],
        "p50_p99_ms": times,
        "longest_gap_ms": 1e3 * percentile(gaps, 100),
        "good_share": shares,
        "goodput": {target: share * rate for target, share in shares.items()},
        "asked": [RequestTiming(*one) for one in whole["asked"]],
    }


def summary(found: Sequence[Row], targets: Sequence[str]) -> Iterator[str]:
    """Equal tokens; then for each target the goodput of both arrangements at the rate where it is highest, and the
    highest rate of which nine tenths are good."""
    first, second = (row["tokens"] for row in found if "tokens" in row)
    equal = sum(a == b for a, b in zip(first, second, strict=True))
    yield f"{equal} of {len(first)} answers have equal tokens"
    for target in targets:
        best: dict[str, float] = {}
        held: dict[str, float] = {}
        for name in ARRANGEMENTS:
            rows = [row for row in found if row["arrangement"] == name and "rate" in row]
            best[name] = max(row["goodput"][target] for row in rows)
            held[name] = max((row["rate"] for row in rows if row["good_share"][target] >= 0.9), default=0.0)
        ratio = best["split"] / best["mixed"] if best["mixed"] else float("inf")
        yield (
            f"{target}: goodput mixed {best['mixed']:.2f}, split {best['split']:.2f} ({ratio:.2f} times); "
            f"nine tenths are good up to {held['mixed']:g} and {held['split']:g} requests/s"
        )


if __name__ == "__main__":
    command()
