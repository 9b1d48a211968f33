"""`python -m benchmarks.http_cpu`: streams of a server on this CPU beside the engine alone, in turns, step by step.

Both have the same random weights, options and requests. What to read are counts (steps, sequences a step) and seconds
of the processor's time: both hold on a machine that is busy with something else.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.counted import STEPS, CountedExecutor, Step, read
from benchmarks.front import child, spent
from benchmarks.servers import spawned
from benchmarks.shapes import words
from quire.assembly.engine import build_engine
from quire.assembly.server import serve
from quire.bench.cpu import Case, prompts_of
from quire.bench.layer_cost import answer
from quire.bench.load_client import LoadJob, run_clients, summarize
from quire.bench.peers import checkpoints
from quire.bench.shapes import DTYPES, SHAPES
from quire.config import Settings
from quire.weights.locate import EMBEDDED

SERVER = "import json, sys; from benchmarks.http_cpu import serve_counted; serve_counted(json.loads(sys.argv[1]))"
SMALL = 4000
"""Token ids that the embedded model has."""

OFFLINE = "import json, sys; from benchmarks.http_cpu import run_offline; run_offline(json.loads(sys.argv[1]))"


class Turn(NamedTuple):
    """One side's answers to all requests. seconds: of the processor. wall: by the clock. front: of `seconds`, those of
    the process that clients talk to."""

    seconds: float
    wall: float
    front: float
    steps: list[Step]


@click.command("http_cpu")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--format", "kind", type=click.Choice([*DTYPES, "q8_0"]), default="bf16", show_default=True)
@click.option("--model", help="In place of random weights: a model of the shape's vocabulary, or embedded.")
@click.option("--quantization", default="auto", show_default=True, help="As of `quire serve`.")
@click.option("--streams", default=8, show_default=True)
@click.option("--prompt", default=64, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=32, show_default=True, help="Tokens of an answer.")
@click.option("--threads", default=1, show_default=True)
@click.option("--repeat", default=5, show_default=True, help="Turns, of which medians count.")
@click.option("--cores", help="Of the server and of the engine alone, as taskset takes them; clients run on any.")
@click.option("--port", default=18331, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store every step there.")
def command(
    shape: str,
    kind: str,
    model: str | None,
    quantization: str,
    streams: int,
    prompt: int,
    new: int,
    threads: int,
    repeat: int,
    cores: str | None,
    port: int,
    path: Path | None,
) -> None:
    """Serve streams and answer the same requests without a server: steps, sequences a step, processor time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = {
            "model": model or str(written(folder, shape, kind)),
            "device": "cpu",
            "dtype": "auto" if model == EMBEDDED else DTYPES.get(kind, "bfloat16"),
            "quantization": quantization,
            "threads": threads,
            "max_num_seqs": streams,
            "max_model_len": prompt + new + 1,
            "canary": "off",  # random weights say nothing about quality
        }
        if model != EMBEDDED:
            names = folder / "tokenizer"  # beside a GGUF file, that one would be read
            names.mkdir()
            words(SHAPES[shape]["vocab_size"]).save(str(names / "tokenizer.json"))
            options["tokenizer"] = str(names)
        sides: dict[str, Served | Alone] = {
            "http": stack.enter_context(served(options, port, folder / "steps", pinned(cores))),
            "offline": stack.enter_context(alone(options, pinned(cores))),
        }
        found: dict[str, list[Turn]] = {name: [] for name in sides}
        for turn in range(repeat + 1):
            ids = prompts_of(Case(streams, prompt, new), random.Random(turn))
            ids = [[token % SMALL for token in each] for each in ids] if model == EMBEDDED else ids
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                row = sides[name].answer(ids, new)
                if turn:  # the first warms
                    found[name].append(row)
                    click.echo(json.dumps({"turn": turn, "side": name, **figures(row)}))
    click.echo(json.dumps(summary(found)))
    if path is not None:
        path.write_text(json.dumps(found))


def pinned(cores: str | None) -> list[str]:
    """The beginning of a command that runs on these cores alone."""
    return [] if cores is None else ["taskset", "--cpu-list", cores]


def written(folder: Path, shape: str, kind: str) -> Path:
    """Random weights of a shape."""
    if kind in DTYPES:
        return checkpoints.write_folder(folder / "model", SHAPES[shape], DTYPES[kind])
    return checkpoints.write_gguf(folder / f"{kind}.gguf", SHAPES[shape], kind)


def figures(turn: Turn) -> dict[str, Any]:
    """What is printed of a turn."""
    steps = turn.steps
    own = turn.seconds - turn.front - sum(step.seconds for step in steps)
    return {
        "seconds": round(turn.seconds, 3),
        "wall": round(turn.wall, 3),
        "steps": len(steps),
        "rows_a_step": round(sum(step.rows for step in steps) / len(steps), 2),
        "tokens": sum(step.tokens for step in steps),
        "executor_ms_a_step": round(1e3 * sum(step.seconds for step in steps) / len(steps), 3),
        "engine_us_a_step": round(1e6 * own / len(steps), 1),
        "front_us_a_step": round(1e6 * turn.front / len(steps), 1),
    }


def summary(found: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Medians of each side, and of the turns' ratios, offline over HTTP: by the processor's time, by the clock."""
    rows = {name: [figures(turn) for turn in turns] for name, turns in found.items()}
    medians = {
        name: {key: statistics.median(row[key] for row in each) for key in each[0]} for name, each in rows.items()
    }
    pairs = list(zip(found["offline"], found["http"], strict=True))
    ratios = {
        "ratio": statistics.median(a.seconds / b.seconds for a, b in pairs),
        "wall_ratio": statistics.median(a.wall / b.wall for a, b in pairs),
    }
    return {**medians, **{name: round(value, 3) for name, value in ratios.items()}}


# -------------------------------------------------------------------- the server


class Served:
    """A server."""

    def __init__(self, pid: int, port: int, steps: Path) -> None:
        self.pid, self.port, self.steps = pid, port, steps

    def answer(self, ids: list[list[int]], new: int) -> Turn:
        """Answers to all prompts at once, of `new` tokens each."""
        job = LoadJob(
            host="127.0.0.1", port=self.port, model="m", streams=len(ids), prompts=ids, output_lens=[new] * len(ids)
        )
        before, engine = len(read(self.steps)), child(self.pid)
        front, whole = spent(self.pid), spent(engine)
        seen = summarize(run_clients(job, 1))
        front, whole = spent(self.pid) - front, spent(engine) - whole
        if seen["failed"]:
            raise click.ClickException(f"{seen['failed']} requests failed")
        return Turn(front + whole, seen["seconds"], front, read(self.steps)[before:])


@contextmanager
def served(options: Mapping[str, Any], port: int, steps: Path, prefix: Sequence[str]) -> Iterator[Served]:
    """A server of these options. prefix: of its command."""
    argv = [*prefix, sys.executable, "-c", SERVER, json.dumps({**options, "port": port})]
    steps.touch()
    with spawned(argv, port, os.environ | {STEPS: str(steps)}) as pid:
        yield Served(pid, port, steps)


def serve_counted(options: Mapping[str, Any]) -> None:
    """Serve with an engine process of `benchmarks.counted`, until it is stopped."""
    quiet = {"uvicorn_log_level": "warning", "disable_log_stats": True, "served_model_name": ["m"]}
    serve(Settings.of(**quiet, **options), child="benchmarks.counted")


# -------------------------------------------------------------------- the engine alone


class Alone:
    """An engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def answer(self, ids: list[list[int]], new: int) -> Turn:
        """See `Served.answer`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([ids, new]) + "\n")
        self.process.stdin.flush()
        seconds, wall, steps = json.loads(self.process.stdout.readline())
        return Turn(seconds, wall, 0.0, [Step(*each) for each in steps])


@contextmanager
def alone(options: Mapping[str, Any], prefix: Sequence[str]) -> Iterator[Alone]:
    """An engine of these options. prefix: of its command."""
    argv = [*prefix, sys.executable, "-c", OFFLINE, json.dumps(options)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        with process.stdin:
            yield Alone(process)


def run_offline(options: Mapping[str, Any]) -> None:
    """Answer what standard input asks for, a line of prompts each, until it ends."""
    steps = list[Step]()
    engine = build_engine(Settings.of(**options), wrap=lambda executor: CountedExecutor(executor, steps.append))
    for line in sys.stdin:
        ids, new = json.loads(line)
        steps.clear()
        began, wall = time.process_time(), time.perf_counter()
        answer(engine, ids, new)
        print(json.dumps([time.process_time() - began, time.perf_counter() - wall, steps]), flush=True)


if __name__ == "__main__":
    command()
