"""`python -m benchmarks.doors`: decode on this CPU through each executor, interleaved, on the embedded model.

What is measured is steady decode: from when the last prompt has been fed to when the first answer ends. Ratios of
medians are what to read.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from quire.assembly import extra
from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import Unavailable
from quire.weights.locate import EMBEDDED, locate

_READY = re.compile(r"is ready at (\S+:\d+):")


@click.command("doors")
@click.option("--batch", default=8, show_default=True, help="Sequences at once.")
@click.option("--prompt", default=32, show_default=True, help="Prompt tokens a sequence.")
@click.option("--new", default=128, show_default=True, help="New tokens a sequence.")
@click.option("--repeat", default=9, show_default=True, help="Interleaved rounds; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(batch: int, prompt: int, new: int, repeat: int, as_json: bool) -> None:
    """Decode through local, gRPC on loopback, and ONNX Runtime (pip install 'quire-llm[grpc,onnx]')."""
    speeds: dict[str, list[float]] = {}
    here = {"dtype": "float32", "device": "cpu", "max_num_seqs": batch}  # a CPU, where there is a GPU, too
    flags = [word for name, value in here.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder, elsewhere(*flags) as at:
        extra("quire.weights.onnx_export", "onnx").export(locate(EMBEDDED), Path(folder))
        engines = {
            "local": build_engine(Settings.of(**here), keep=batch),
            "grpc": build_engine(Settings.of(executor="grpc", executor_address=at), keep=batch),
            "onnx": build_engine(Settings.of(model=folder, executor="onnx", max_num_seqs=batch), keep=batch),
        }
        for turn in range(repeat + 1):
            order = list(engines.items())
            for name, engine in order if turn % 2 else reversed(order):
                speed = decode(engine, batch, prompt, new, turn)
                if turn:  # the first warms
                    speeds.setdefault(name, []).append(speed)
        for engine in engines.values():
            engine.close()
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    rows = {name: {"tokens_per_s": speed, "of_local": speed / medians["local"]} for name, speed in medians.items()}
    if as_json:
        click.echo(json.dumps({"batch": batch, "prompt": prompt, "new": new, "executors": rows, "rounds": speeds}))
        return
    table = Table("executor", "decode tok/s", "of local", title=f"batch {batch}, float32")
    for name in ("local", "grpc", "onnx"):
        table.add_row(name, f"{rows[name]['tokens_per_s']:.0f}", f"{rows[name]['of_local']:.3f}")
    Console().print(table)


def decode(engine: Engine, batch: int, prompt: int, new: int, turn: int) -> float:
    """Tokens a second in the steps in which all sequences decode."""
    for i in range(batch):
        engine.submit([1000 + (7 * turn + 13 * i + p) % 3000 for p in range(prompt)], new)
    tokens, began, now = 0, 0.0, 1.0
    while engine.has_pending_work:
        events = engine.step()
        if began and any(event.finish for event in events):
            break
        if began:
            tokens, now = tokens + sum(len(event.tokens) for event in events), time.perf_counter()
        elif len(events) == batch and all(seq.num_computed >= prompt for seq in engine.scheduler.running):
            began = time.perf_counter()
    while engine.has_pending_work:
        engine.step()
    return tokens / (now - began)


@contextmanager
def elsewhere(*flags: str) -> Iterator[str]:
    """A `quire executor` on loopback: its address. Raises Unavailable if it does not start."""
    argv = [sys.executable, "-m", "quire", "executor", "--listen", "127.0.0.1:0", *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = _READY.search(process.stdout.readline() if process.stdout else "")
            if said is None:
                raise Unavailable("quire executor did not start")
            yield said[1]
        finally:
            process.terminate()


if __name__ == "__main__":
    command()
