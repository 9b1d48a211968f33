"""`quire calibrate`: what steps of a model take on this machine, for `quire simulate --calibration`."""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from quire import __version__
from quire.assembly.engine import build_engine
from quire.assembly.tokenizer import require_text
from quire.bench.simulated import layer_shares
from quire.cli.tables import print_pairs
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig
from quire.observability.recording_format import Began, CopiesEnded, CopyStarted, RecordingReader
from quire.sim.calibration import Calibration, StepSampler, fit, fit_copies
from quire.sim.replay import replay
from quire.types import SamplingParams

_WARM_UP = 32
"""Steps that are not counted: the first of each shape do more."""

LARGE_ERROR = 0.1
"""Mean relative error of a fit from which on there is a warning: first tokens are several times as far off."""


def run(settings: Settings, output: Path, seconds: float, recording: Path | None, as_json: bool) -> None:
    """`quire calibrate`, see `quire.bench.late`."""
    if recording is None:
        found = measure(settings, seconds)
    else:
        sampler, stages = recorded_steps(recording)
        details = {**about(settings), "recording": recording.name}
        found = fit(sampler.samples, details, stages=stages, shares=layer_shares(settings, stages))
        found = replace(found, copies=fit_copies(recorded_copies(recording)))
    found.write(output)
    if found.error > LARGE_ERROR:
        click.echo(
            f"warning: the fit is {100 * found.error:.0f} % off in the mean; above {100 * LARGE_ERROR:.0f} % what is "
            "simulated with it is a rough guess: calibrate while nothing else runs here, with more --seconds, or from "
            "a --recording of your own load",
            err=True,
        )
    cost = found.cost
    if as_json:
        click.echo(
            json.dumps({"output": str(output), **cost._asdict(), "error": found.error, "samples": found.samples})
        )
        return
    print_pairs(
        [
            ("steps", f"{found.samples:,}"),
            ("any step", f"{1e3 * cost.base:.3f} ms"),
            ("a token fed", f"{1e6 * cost.per_token:.2f} us"),
            ("1,000 positions read", f"{1e9 * cost.per_kv:.2f} us"),
            ("a row of logits", f"{1e6 * cost.per_row:.2f} us"),
            ("1,000 pairs of a prompt", f"{1e9 * cost.per_pair:.3f} us"),
            *(
                [("stages, from one to the next", f"{found.stages}, {1e3 * found.hop:.3f} ms")]
                if found.stages > 1
                else []
            ),
            ("mean error of the fit", f"{100 * found.error:.1f} %"),
            *(
                (f"{kind}, a MiB", f"{1e3 * (base + each * 2**20):.3f} ms")
                for kind, (base, each) in found.copies.items()
            ),
        ]
    )
    click.echo(f"{output}: give it to quire simulate --calibration")


def about(settings: Settings) -> Mapping[str, Any]:
    """What a calibration is of."""
    return {
        "model": settings.model.model,
        "dtype": settings.model.dtype,
        "quantization": settings.model.quantization,
        "quire": __version__,
        "machine": platform.machine(),
        "processor": platform.processor(),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def recorded_steps(path: Path) -> tuple[StepSampler, int]:
    """The steps of recordings, and the stages of the pipeline that ran them.

    Raises InvalidConfig where this code decides otherwise than the recorded one, and where stages differ.
    """
    if not path.exists():
        raise InvalidConfig(f"there is no recording {path}: `quire serve --recording-dir` makes one", param="recording")
    reader, sampler, stages = RecordingReader([path]), StepSampler(), set[int]()
    while reader.next is not None:
        again = replay(reader, [sampler])
        if again.divergence is not None:
            raise InvalidConfig(
                f"{path}: step {again.divergence.step} is decided otherwise by this version of Quire: record again",
                param="recording",
            )
        sampler.restart()
        stages.add(again.engine.scheduler.groups)
    if len(stages) > 1:
        raise InvalidConfig(
            f"{path} has recordings of pipelines of {sorted(stages)} stages: give those of one", param="recording"
        )
    return sampler, stages.pop()


def recorded_copies(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(bytes, seconds) of copies of K/V blocks in recordings, by kind. What a prefill engine computes is none."""
    reader, found, size = RecordingReader([path]), dict[str, list[tuple[int, float]]](), 0
    started = dict[int, int]()
    while (frame := reader.take()) is not None:
        if isinstance(frame, Began):
            size, started = frame.about.get("block_bytes", 0), started if frame.number else {}
        elif isinstance(frame, CopyStarted):
            started[frame.ticket] = len(frame.blocks)
        elif isinstance(frame, CopiesEnded):
            for kind, ticket, failed, seconds, _ in frame.copies:
                if (blocks := started.pop(ticket, 0)) and kind != "receive" and not failed:
                    found.setdefault(kind, []).append((blocks * size, seconds))
    return found


def measure(settings: Settings, seconds: float) -> Calibration:
    """Load the model, and run prompts and answers of all lengths for so long."""
    require_text(settings, "quire calibrate")
    sampler = StepSampler()
    engine = build_engine(settings.changed(enable_prefix_caching=False, recording_dir=None), observers=[sampler])
    try:
        with Progress(console=Console(stderr=True), transient=True) as bars:
            bar, begin = bars.add_task("measuring", total=seconds), time.monotonic()
            for turn, (width, prompt) in enumerate(_mixes(engine)):
                _run_mix(engine, width, prompt, turn)
                bars.update(bar, completed=time.monotonic() - begin)
                if time.monotonic() - begin >= seconds and len(sampler.samples) >= 3 * _WARM_UP:
                    break
        device, stages = engine.description.device, engine.scheduler.groups
    finally:
        engine.close()
    details = {**about(settings), "device": device}
    return fit(sampler.samples[_WARM_UP:], details, stages=stages, shares=layer_shares(settings, stages))


def _mixes(engine: Engine) -> Any:
    """(sequences, prompt tokens) without end: powers of two, in an order that varies everything early on."""
    rng, most = random.Random(7), engine.scheduler.max_num_seqs
    longest = min(
        engine.description.max_model_len - 64,
        engine.scheduler.kv.block_pool.num_blocks * engine.scheduler.kv.block_size // 2,
    )
    while True:
        width = 1 << rng.randint(0, max(0, most.bit_length() - 1))
        prompt = min(longest, 1 << rng.randint(3, max(3, longest.bit_length() - 1)))
        room = engine.scheduler.kv.block_pool.num_blocks * engine.scheduler.kv.block_size
        yield max(1, min(width, most, room // (prompt + 64))), max(1, prompt)


def _run_mix(engine: Engine, width: int, prompt: int, turn: int) -> None:
    """Requests that begin alike in length; each answer has a length of its own, so that the batch shrinks step by
    step."""
    rng = random.Random(turn)
    vocab = min(1000, engine.description.vocab_size)
    for i in range(width):
        tokens = [rng.randrange(vocab) for _ in range(max(1, int(prompt * rng.uniform(0.5, 1.0))))]
        engine.submit(tokens, rng.randint(2, 32), id=f"{turn}-{i}", sampling=SamplingParams(temperature=0.0))
    while engine.has_pending_work:
        engine.step()
