"""`quire bench startup`: from a process's start to a ready engine and to its first token, cold and warm.

As `vllm bench startup`, but a start is measured from outside: it includes Python's own start and all imports. Cold:
empty caches of compiled kernels, and a model's files that are not in the page cache, as far as the system lets go of
them. Warm: both as earlier starts left them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

import quire
from quire.bench.offline import offline_command, percentiles, report
from quire.cli.base import integer
from quire.config import Settings
from quire.errors import InvalidModel, QuireError
from quire.types import SamplingParams
from quire.weights.locate import check, locate

CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name a folder of compiled code."""

READY = "quire-bench: ready"
FIRST_TOKEN = "quire-bench: first token"
MEASURES = {READY: "startup", FIRST_TOKEN: "first_token"}.items()
"""What the child prints, and how the result calls the time until then."""


@offline_command(
    "startup",
    [
        integer("--num-iters-cold", 3, "Cold starts measured.", low=0),
        integer("--num-iters-warmup", 1, "Starts before the warm ones, not counted.", low=0),
        integer("--num-iters-warm", 3, "Warm starts measured.", low=0),
    ],
)
def command(
    settings: Settings,
    output_json: Path | None,
    as_json: bool,
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
) -> None:
    """Measure the time from process start to a ready engine, and to its first token, each time in a new process."""
    if not num_iters_cold and not num_iters_warm:
        raise click.BadParameter("0, as is --num-iters-warm: nothing to measure", param_hint="--num-iters-cold")
    folder = locate(settings.model.model, revision=settings.model.revision, cache=settings.model.download_dir)
    check(folder)
    phases = ["cold"] * num_iters_cold + ["warmup"] * num_iters_warmup * bool(num_iters_warm)
    phases += ["warm"] * num_iters_warm
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warmup": [], "warm": []}
    for phase in track(phases, "starts", console=Console(stderr=True), transient=True, disable=as_json):
        starts[phase].append(cold_start(settings, folder) if phase == "cold" else start(settings, {}))
    result: dict[str, Any] = {"model": settings.model.model}
    lines = []
    for phase in ("cold", "warm"):
        for _, measure in MEASURES:
            if times := [one[measure] for one in starts[phase]]:
                result[f"avg_{phase}_{measure}_time"] = statistics.fmean(times)
                result[f"{phase}_{measure}_times"] = times
                result[f"{phase}_{measure}_percentiles"] = percentiles(times)
                what = f"Avg {phase} {measure.replace('_', ' ')} time"
                lines.append(f"{what}: {statistics.fmean(times):.2f} seconds (median {statistics.median(times):.2f})")
    report(result, "\n".join(lines), output_json, as_json)


def cold_start(settings: Settings, folder: Path) -> dict[str, float]:
    """Seconds of a start with empty caches of compiled code and without the model's files in the page cache."""
    evict(folder)
    with tempfile.TemporaryDirectory() as empty:
        return start(settings, {name: str(Path(empty, name)) for name in CACHES})


def evict(folder: Path) -> None:
    """Drop a model's files from the page cache, where the system has a call for that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if path.suffix in (".safetensors", ".bin", ".gguf"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(settings: Settings, environ: Mapping[str, str]) -> dict[str, float]:
    """Seconds from a new process's start to each of MEASURES. Raises QuireError with what it says when it fails."""
    argv = [sys.executable, "-m", "quire.bench.startup"]
    times = {}
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | dict(environ)
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin as stdin:
                json.dump(dict(settings.flat()), stdin)
            for line in process.stdout:
                for mark, measure in MEASURES:
                    if line.strip() == mark:
                        times[measure] = time.perf_counter() - began
        if process.returncode:
            log.seek(0)
            output = log.read().strip().splitlines()
            if process.returncode == 2:
                raise InvalidModel(output[-1])
            raise QuireError("\n".join(["no start", *output[-8:]]))
    return times


def main() -> int:
    """Start an engine with the settings on standard input and generate one token, printing when each has happened."""
    try:
        with quire.LLM(settings=Settings.of(**json.load(sys.stdin))) as llm:
            print(READY, flush=True)
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
            llm.generate([[1]], params, use_tqdm=False)
            print(FIRST_TOKEN, flush=True)
    except QuireError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
