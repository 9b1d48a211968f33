"""`python -m benchmarks.front`: what a streamed token costs the processes between a step and its reader.

Steps take a fixed time and no processor, so what is left is ours. Processor time a token is what to read: it holds on a
busy machine too. Two source trees are measured in turns, and the ratios of their medians count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.servers import spawned
from benchmarks.timed import STEP
from benchmarks.workloads import prompts
from quire.assembly.server import serve
from quire.bench.load_client import LoadJob, run_clients, summarize
from quire.bench.monitor import revision
from quire.config import Settings

SERVER = "import json, sys; from benchmarks.front import serve_synthetic; serve_synthetic(json.loads(sys.argv[1]))"

_FIGURES = ("front_us", "engine_us", "tokens_s", "ttft_ms", "itl_ms", "itl_p99_ms")


@click.command("front")
@click.option("--streams", "levels", multiple=True, type=int, default=(1, 16, 64, 256), show_default=True)
@click.option("--step-ms", default=2.0, show_default=True, help="What a step takes for each 64 streams, and at least.")
@click.option("--new", default=256, show_default=True, help="Tokens of each answer.")
@click.option("--seconds", default=4.0, show_default=True, help="How long a round is, roughly.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--chat", is_flag=True, help="Ask /v1/chat/completions.")
@click.option("--logprobs", default=-1, help="Likeliest tokens asked for beside each token; -1: no log-probabilities.")
@click.option("--lookahead", default=1, show_default=True, help="Steps launched ahead of results.")
@click.option("--recording-dir", type=click.Path(path_type=Path), help="Record steps there.")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Another checkout, to be compared with.")
@click.option("--port", default=18326, show_default=True)
def command(levels: tuple[int, ...], rounds: int, chat: bool, against: Path | None, port: int, **sizes: Any) -> None:
    """Serve synthetic steps to streams: microseconds of processor a token in the front and in the engine's process."""
    trees = {"this": Path(__file__).parents[1], **({} if against is None else {"that": against})}
    for level in levels:
        step = sizes["step_ms"] * max(1, level / 64)
        with ExitStack() as running:
            servers = {
                name: (port + i, running.enter_context(serving(tree, port + i, step, sizes)))
                for i, (name, tree) in enumerate(trees.items())
            }
            found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for turn in range(rounds + 1):
                for name, (at, pid) in list(servers.items())[:: 1 if turn % 2 else -1]:
                    row = measure(pid, at, level, chat, step, sizes)
                    if turn:  # the first warms
                        found[name].append(row)
        result = {
            "revision": revision(),
            "streams": level,
            "step_ms": step,
            "chat": chat,
            "logprobs": sizes["logprobs"],
        } | compare(found)
        click.echo(json.dumps(result))


def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of each tree's rounds, and this tree's over that one's, where that is not 0 (events came together)."""
    medians = {
        name: {what: statistics.median(row[what] for row in rows) for what in rows[0]} for name, rows in found.items()
    }
    result: dict[str, Any] = {name: {what: round(x, 3) for what, x in row.items()} for name, row in medians.items()}
    if "that" in medians:
        that = medians["that"]
        result["ratios"] = {what: round(x / that[what], 3) for what, x in medians["this"].items() if that[what]}
    return result


def measure(pid: int, port: int, level: int, chat: bool, step: float, sizes: dict[str, Any]) -> dict[str, float]:
    """One round against one server."""
    count = level * max(1, round(sizes["seconds"] * 1e3 / step / sizes["new"]))
    ids, _ = prompts(count, (16, 32), (1, 1), seed=7)
    small = [[100 + token % 900 for token in prompt] for prompt in ids]
    new = [sizes["new"]] * count
    job = LoadJob(
        host="127.0.0.1", port=port, model="embedded", streams=level, prompts=small, output_lens=new, chat=chat
    )
    if (wanted := sizes["logprobs"]) >= 0:
        job.extra = {"logprobs": True, "top_logprobs": wanted} if chat else {"logprobs": wanted}
    before = spent(pid), spent(child(pid))
    seen = summarize(run_clients(job, 1))
    after = spent(pid), spent(child(pid))
    if seen["failed"]:
        raise click.ClickException(f"{seen['failed']} requests failed")
    tokens = seen["tokens"]
    numbers = (
        *(1e6 * (b - a) / tokens for a, b in zip(before, after, strict=True)),
        seen["tokens_s"],
        seen["ttft_ms"][0],
        *seen["itl_ms"],
    )
    return dict(zip(_FIGURES, numbers, strict=True))


def child(pid: int) -> int:
    """The engine's process, of a front's."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def spent(pid: int) -> float:
    """Seconds of processor time that all threads of a process have used."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def serving(tree: Path, port: int, step: float, sizes: dict[str, Any]) -> AbstractContextManager[int]:
    """A server of a checkout's code; its process id."""
    options = {"lookahead": sizes["lookahead"], "recording_dir": sizes["recording_dir"], "port": port}
    path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, "-P", "-c", SERVER, json.dumps(options, default=str)]
    return spawned(argv, port, os.environ | {"PYTHONPATH": path, STEP: str(step)})


def serve_synthetic(options: Mapping[str, Any]) -> None:
    """Serve with an engine process of `benchmarks.timed`, until it is stopped."""
    # The embedded model is loaded for its tokenizer and not run.
    small = {"device": "cpu", "num_gpu_blocks_override": 64, "max_model_len": 1024}
    few = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "disable_log_stats": True}
    serve(Settings.of(uvicorn_log_level="warning", **small, **few, **options), child="benchmarks.timed")


if __name__ == "__main__":
    command()
