"""`quire bench cpu`: Quire on this CPU beside other engines, in one run, interleaved, on the same random weights.

All get the same shape, weights, threads, prompts and lengths; the order changes from round to round, and a peer's
process stands still while another engine has its turn. Ratios and medians are what to read: the speed of a shared CPU
drifts.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from quire.assembly.engine import build_engine
from quire.bench.layer_cost import NEW, answer, layer_cost
from quire.bench.peers import checkpoints
from quire.bench.peers.process import Peer, check, pythons
from quire.bench.shapes import CLOCKS, DTYPES, SHAPES
from quire.cli.tables import numbers
from quire.config import Settings
from quire.engine.executor import Executor
from quire.errors import InvalidConfig
from quire.executors.local import LocalExecutor

Decode = Callable[[list[list[int]], int], float]
"""(prompts, new tokens) -> seconds for all of them."""


@dataclass
class Case:
    """One row: so many sequences, tokens of a prompt and new tokens; seconds of each engine by turn, for one new token
    and for all of them."""

    batch: int
    prompt: int
    new: int
    first: dict[str, list[float]] = field(default_factory=dict)
    whole: dict[str, list[float]] = field(default_factory=dict)
    layer: dict[str, float] = field(default_factory=dict)
    """Of Quire, see `layer_cost`."""

    def speeds(self) -> Iterator[tuple[str, dict[str, float]]]:
        """What is measured, and the median tokens a second of each engine."""
        prompted, made = self.batch * self.prompt, self.batch * self.new
        yield "prompt", {name: statistics.median(prompted / s for s in found) for name, found in self.first.items()}
        if self.new > 1:
            pairs = {name: zip(self.first[name], self.whole[name], strict=True) for name in self.whole}
            decoded = made - self.batch
            yield (
                "decode",
                {name: statistics.median(decoded / max(1e-9, b - a) for a, b in each) for name, each in pairs.items()},
            )
            yield "all", {name: statistics.median(made / s for s in found) for name, found in self.whole.items()}


def run(
    shape: str,
    kind: str,
    vs: str,
    named: tuple[str, ...],
    batches: tuple[int, ...],
    prompt: int,
    new: int,
    long_prompt: int,
    repeat: int,
    threads: int,
    clock: str,
    cpu_kernels: str,
    quantization: str,
    as_json: bool,
) -> None:
    """`quire bench cpu`, see `quire.bench.late`."""
    threads = threads or torch.get_num_threads()
    if clock == "cpu" and threads > 1:
        raise InvalidConfig("--clock cpu also counts what a thread spends waiting for another: use --threads 1 with it")
    torch.set_num_threads(threads)
    peers = [name for name in vs.split(",") if name]
    check(peers, kind)
    cases = [Case(batch, prompt, new) for batch in batches]
    cases += [Case(1, long_prompt, 1)] if long_prompt else []
    # Of a GGUF file, too, whatever kernels run: its peers round activations to 8 bits.
    how = {"dtype": DTYPES.get(kind, "bfloat16"), "threads": threads}
    how |= {"cpu_kernels": cpu_kernels, "quantization": quantization}
    found = _measure(shape, kind, {name: pythons(named)[name] for name in peers}, cases, how, clock, repeat, as_json)
    click.echo(json.dumps(found)) if as_json else _show(found)


def _measure(
    shape: str,
    kind: str,
    peers: Mapping[str, str],
    cases: Sequence[Case],
    how: Mapping[str, Any],
    clock: str,
    repeat: int,
    quiet: bool,
) -> dict[str, Any]:
    """All rounds of all cases, and what is printed of them. peers: the Python of each."""
    sequences, context = max(case.batch for case in cases), max(case.prompt + case.new for case in cases) + 1
    bandwidths = list[float]()
    with ExitStack() as stack:
        files = stack.enter_context(_written(SHAPES[shape], kind, peers))
        size = _size(files["quire"])
        own = _Quire(files["quire"], how, sequences, context + NEW, clock)
        engines: dict[str, Decode] = {"quire": own}
        versions = {"torch": str(torch.__version__)}
        for name, python in peers.items():
            started = Peer(name, python, files[name], how["threads"], sequences, context, clock)
            engines[name] = peer = stack.enter_context(started)
            versions[name] = peer.version
        for case in cases:
            label = f"{case.batch} x {case.prompt} + {case.new}"
            for turn in track(range(repeat), label, console=Console(stderr=True), transient=True, disable=quiet):
                _round(case, turn, engines)
                bandwidths.append(bandwidth(CLOCKS[clock]))
            if case.new > 1:
                case.layer = own.layer_cost(prompts_of(case, random.Random(repeat)), SHAPES[shape]["num_hidden_layers"])
    floor = statistics.median(bandwidths) / size
    return {
        "shape": shape,
        "format": kind,
        "repeat": repeat,
        **how,
        "clock": clock,
        "versions": versions,
        "cpu": _cpu(),
        "bandwidth": statistics.median(bandwidths),
        "floor": floor,
        "rows": [row for case in cases for row in _rows(case, floor)],
    }


def _size(model: Path) -> int:
    """Bytes of a checkpoint, which a step of decoding reads."""
    return sum(each.stat().st_size for each in (model.iterdir() if model.is_dir() else [model]))


def _round(case: Case, turn: int, engines: Mapping[str, Decode]) -> None:
    """One turn of every engine, in another order than the last."""
    rng = random.Random(turn)
    prompts = prompts_of(case, rng)
    # Fresh ones each, so that no prefix is found again.
    again = [[rng.randrange(1000, 40000), *each[1:]] for each in prompts]
    names = list(engines)
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        if turn == 0:
            engines[name]([[turn + 1, *each[1:]] for each in prompts], 2)  # the first call prepares buffers
        case.first.setdefault(name, []).append(engines[name](prompts, 1))
        if case.new > 1:
            case.whole.setdefault(name, []).append(engines[name](again, case.new))


def prompts_of(case: Case, rng: random.Random) -> list[list[int]]:
    """Random tokens."""
    return [[rng.randrange(1000, 40000) for _ in range(case.prompt)] for _ in range(case.batch)]


def _rows(case: Case, floor: float) -> Iterator[dict[str, Any]]:
    """What the JSON has of a case: tokens a second, and Quire's ratio to each peer; of one sequence's decoding its
    share of what memory allows."""
    for what, speed in case.speeds():
        ratios = {name: speed["quire"] / other for name, other in speed.items() if name != "quire"}
        share = {"share": speed["quire"] / floor} if what == "decode" and case.batch == 1 else {}
        sizes = {"batch": case.batch, "prompt": case.prompt, "new": case.new}
        layer = {"layer": case.layer} if what == "decode" else {}
        yield {**sizes, "what": what, "speed": speed, "ratio": ratios, **share, **layer}


@contextmanager
def _written(shape: Mapping[str, Any], kind: str, peers: Mapping[str, str]) -> Iterator[Mapping[str, Path]]:
    """The random weights, as each engine reads them. Q4_K_M is written by the llama.cpp among the peers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = ("quire", *peers)
        if kind not in DTYPES:
            file = folder / f"{kind}.gguf"
            if kind == "q4_k_m":
                checkpoints.quantize(
                    peers.get("llama-cpp", sys.executable),
                    checkpoints.write_gguf(folder / "bf16.gguf", shape, "bf16"),
                    file,
                )
            else:
                checkpoints.write_gguf(file, shape, kind)
            yield dict.fromkeys(engines, file)
            return
        files = dict.fromkeys(engines, checkpoints.write_folder(folder / "model", shape, DTYPES[kind]))
        if "llama-cpp" in peers:
            files["llama-cpp"] = checkpoints.write_gguf(folder / "bf16.gguf", shape, "bf16")
        yield files


class _Quire:
    """Quire in this process."""

    def __init__(self, model: Path, how: Mapping[str, Any], batch: int, context: int, clock: str) -> None:
        self.now, self.executors = CLOCKS[clock], list[Executor]()
        self.engine = build_engine(
            Settings.of(
                model=str(model),
                device="cpu",  # where there is a GPU, too
                max_num_seqs=batch,
                max_model_len=context,
                canary="off",  # random weights say nothing about quality
                **how,
            ),
            wrap=self.keep,
        )

    def keep(self, executor: Executor) -> Executor:
        """Remember what runs the model."""
        self.executors.append(executor)
        return executor

    def __call__(self, prompts: list[list[int]], new: int) -> float:
        """See `Decode`."""
        began = self.now()
        answer(self.engine, prompts, new)
        return self.now() - began

    def layer_cost(self, prompts: list[list[int]], layers: int) -> dict[str, float]:
        """See `layer_cost`."""
        (executor,) = self.executors
        assert isinstance(executor, LocalExecutor)
        return layer_cost(self.engine, executor, prompts, layers, self.now)


def bandwidth(now: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second that torch's threads read of memory, by a clock: the best of a few reads."""
    held, best = torch.ones(1 << 25), 0.0
    for _ in range(3):
        began = now()
        held.sum()
        best = max(best, held.nbytes / (now() - began))
    return best


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def _show(found: Mapping[str, Any]) -> None:
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    peers = [name for name in rows[0]["speed"] if name != "quire"]
    title = f"{found['shape']} {found['format']}, {found['threads']} threads, {found['clock']} clock, {found['cpu']}"
    headings = [heading for name in peers for heading in (f"{name} tok/s", "ratio")]
    table = numbers(title, "case", "quire tok/s", *headings, "of memory's", left=("case",))
    read = f"memory reads {found['bandwidth'] / 1e9:.1f} GB/s, the weights {found['floor']:.1f} times a second"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    costs = [
        f"quire's layers, {row['what']} of {row['batch']}: {row['layer']['us']:.1f} us each, "
        f"{row['layer']['calls']:.1f} calls into torch and kernels"
        for row in rows
        if "layer" in row
    ]
    table.caption, table.caption_justify = "\n".join([f"{read}; {versions}", *costs]), "left"
    for row in rows:
        speeds = [text for name in peers for text in (f"{row['speed'][name]:.1f}", f"{row['ratio'][name]:.2f}")]
        case = f"{row['what']}, {row['batch']} x {row['prompt']} + {row['new']}"
        share = f"{row['share']:.2f}" if "share" in row else ""
        table.add_row(case, f"{row['speed']['quire']:.1f}", *speeds, share)
    Console().print(table)
