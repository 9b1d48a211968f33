"""How well `quire simulate` predicts: fit steps on one half of a trace that the engine replays, predict the other
half.

python -m benchmarks.simulated                      # the embedded model on one core, about four minutes
python -m benchmarks.simulated --clock processor    # where other programs run, too
python -m benchmarks.simulated --repeats 5 --json FILE
python -m benchmarks.simulated --shape llama-3.2-3b --gpu h200 --shrink 1 --speeds 20,1000 --requests 400    # on a card

Both halves are replayed by the real engine in this process, in turns; the second half at least twice, whose spread is
what the machine itself is good for. A prediction is within its bounds if its error is at most the bound, or twice the
spread of the replays where that is more. Run it where nothing else runs; or let time be what this process computes, and
its pauses: then what other programs take from it counts no longer, but for caches.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.shapes import SHAPES, write
from quire.assembly.engine import build_engine
from quire.bench.calibrate import about
from quire.bench.simulated import build_model, layer_shares
from quire.config import Settings
from quire.config.option import amount
from quire.engine.engine import Engine
from quire.engine.timing import Clock, WallClock
from quire.sim.calibration import Calibration, StepSample, StepSampler, fit
from quire.sim.devices import DEVICES, Device
from quire.sim.fleet import prepare
from quire.sim.replica import Replica
from quire.sim.results import Results, summarize
from quire.sim.steady import floor_ms
from quire.sim.trace import Trace, read_trace

BOUNDS: Mapping[str, float] = {"tokens_s": 0.05, "ttft_p50": 0.10, "ttft_p99": 0.20, "itl_p50": 0.10}
LONGEST_ANSWER = 200
LONGEST = 8192
"""Tokens of a prompt and its answer, of a shape."""
_WARM_UP = 16


class ProcessorClock:
    """Seconds of processor time that this process took, and those that it had nothing to do: they pass at once."""

    def __init__(self) -> None:
        self._idle = 0.0

    def now(self) -> float:
        """Both together."""
        return time.process_time() + self._idle

    def sleep_until(self, when: float) -> None:
        """Time passes at once."""
        self._idle += max(0.0, when - self.now())


CLOCKS: Mapping[str, Callable[[], Clock]] = {"wall": WallClock, "processor": ProcessorClock}


def halves(path: str, requests: int, shrink: float, speed: float, longest: int) -> tuple[Trace, Trace]:
    """Every second request of the trace is in the second half, so that both are alike; each as fast as half of it."""
    whole = read_trace(Path(path)).shrunk(shrink)
    parts = (Trace("first half"), Trace("second half"))
    for number in range(min(requests, len(whole))):
        output = min(LONGEST_ANSWER, whole.outputs[number])
        prompt = min(whole.prompts[number], longest - output)
        parts[number % 2].add(whole.arrivals[number] / speed, prompt, output)
    return parts[0].part(0, len(parts[0])), parts[1].part(0, len(parts[1]))


def replayed(engine: Engine, trace: Trace, sampler: StepSampler) -> tuple[dict[str, float], list[StepSample]]:
    """Replay a trace on the engine's clock, as the engine's process does. Returns what came of it, and its steps."""
    clock = engine.clock
    results, last = Results(len(trace)), dict[str, float]()
    vocab = engine.description.vocab_size
    requests = [prepare(trace, number)[1] for number in range(len(trace))]
    prompts = [tuple((7 * i + 13 * n) % vocab for i in range(len(each.prompt))) for n, each in enumerate(requests)]
    sampler.restart()
    sampler.samples.clear()
    begin, sent = clock.now(), 0
    while sent < len(trace) or engine.has_pending_work:
        now = clock.now() - begin
        while sent < len(trace) and trace.arrivals[sent] <= now:
            results.arrival[sent], results.prompt[sent] = trace.arrivals[sent], trace.prompts[sent]
            results.output[sent] = trace.outputs[sent]
            engine.submit(prompts[sent], trace.outputs[sent], id=str(sent))
            sent += 1
        arrival = begin + trace.arrivals[sent] if sent < len(trace) else math.inf
        if not engine.has_pending_work:
            clock.sleep_until(arrival)
            continue
        due = clock.now() + floor_ms(engine.time_to_next_plan())
        if due > clock.now():
            clock.sleep_until(min(due, arrival))
            if arrival <= due:
                continue
        for output in engine.step():
            at = clock.now() - begin
            if output.tokens:
                if output.id in last:
                    results.gap(at - last[output.id], 1)
                else:
                    results.first_token(int(output.id), at, output.num_cached)
                last[output.id] = at
            if output.finish is not None:
                results.ended(int(output.id), at, 0)
    return figures(results), sampler.samples[_WARM_UP:]


def figures(results: Results) -> dict[str, float]:
    """What is compared."""
    row = summarize(results, {}, 0.0, 0.0)
    ms = row["ms"]
    return {
        "tokens_s": row["tokens_s"],
        "ttft_p50": ms["ttft"]["p50"],
        "ttft_p99": ms["ttft"]["p99"],
        "itl_p50": ms["itl"]["p50"],
    }


def predicted(
    settings: Settings, halves: Sequence[Trace], samples: Sequence[StepSample], card: Device | None, memory: int
) -> tuple[dict[str, float], Calibration]:
    """The same figures of the second half by simulation, and the fit. As the engine has, the simulated one has seen the
    first half before: what it knows of its steps decides how prompts are cut. memory: of the card, or of this machine.
    """
    stages = settings.execution.pipeline_parallel_size
    calibration = fit(samples, about(settings), stages=stages, shares=layer_shares(settings, stages))
    model = build_model(settings, device=card, calibration=calibration, memory=memory, prefixes=False)
    results = Results(0)
    replica = Replica(0, model.engine, results)
    for trace in halves:
        results = replica.results = Results(len(trace))
        begin = replica.clock.time
        for number, at in enumerate(trace.arrivals):
            results.arrival[number], results.prompt[number] = begin + at, trace.prompts[number]
            results.output[number] = trace.outputs[number]
            replica.send(begin + at, number, prepare(trace, number)[1])
        replica.advance(math.inf)
    return figures(results), calibration


def step_error(calibration: Calibration, samples: Sequence[StepSample]) -> float:
    """Of all steps together: what is predicted of their own contents, relative to what they took, less 1."""
    cost = calibration.cost
    foretold = sum(cost.seconds(each.tokens, each.kv, each.rows, each.pairs) for each in samples)
    return foretold / sum(each.seconds for each in samples) - 1


def compare(
    settings: Settings, card: Device | None, first: Trace, second: Trace, repeats: int, clock: Clock
) -> dict[str, Any]:
    """Replay both halves in turns, and predict each replay of the second from those of the first before and after it:
    it does not matter then that a machine becomes slower or faster little by little. Medians.

    `steps` and `itself` say where an error comes from: of the sum of the second half's step times, and of figures that
    are predicted from the second half's own steps, to which only the simulated engine and the form of the fit add.
    """
    sampler = StepSampler()
    engine = build_engine(settings, observers=[sampler])
    engine.clock = clock
    if engine.plan_delay is not None:
        engine.plan_delay.clock = clock
    has = engine.description
    memory = has.block_bytes * has.num_blocks + (1 << 32) if card is None else card.memory
    measured, foretold, errors, steps, itself = [], [], [], [], []
    try:
        replayed(engine, first, sampler)  # steps that are the first of their kind take longer
        before = list(replayed(engine, first, sampler)[1])
        for _ in range(repeats):
            seen, own = replayed(engine, second, sampler)
            measured.append(seen)
            after = list(replayed(engine, first, sampler)[1])
            one, found = predicted(settings, (first, second), before + after, card, memory)
            foretold.append(one)
            errors.append(found.error)
            steps.append(step_error(found, own))
            same, _ = predicted(settings, (first, second), own, card, memory)
            itself.append({name: same[name] / seen[name] - 1 for name in BOUNDS})
            before = after
    finally:
        engine.close()
    rows = {}
    for name, bound in BOUNDS.items():
        values = [each[name] for each in measured]
        middle, guess = statistics.median(values), statistics.median(each[name] for each in foretold)
        spread = (max(values) - min(values)) / middle
        error = guess / middle - 1
        rows[name] = {
            "measured": middle,
            "predicted": guess,
            "error": error,
            "spread": spread,
            "allowed": max(bound, 2 * spread),
            "within": abs(error) <= max(bound, 2 * spread),
            "within_bound": abs(error) <= bound,
        }
    causes = {"steps": statistics.median(steps)}
    causes |= {f"itself {name}": statistics.median(each[name] for each in itself) for name in BOUNDS}
    return {"rows": rows, "fit_error": statistics.median(errors), "repeats": repeats, "causes": causes}


@click.command()
@click.option("--trace", default="azure-code", show_default=True, help="As of quire simulate.")
@click.option("--requests", default=240, show_default=True, help="In both halves together.")
@click.option("--shrink", default=8.0, show_default=True)
@click.option("--speeds", default="2,1000", show_default=True, help="Of the trace; 1000: all at once.")
@click.option("--shape", type=click.Choice([*SHAPES]), help="A model of random weights. Unset: the embedded one.")
@click.option("--gpu", type=click.Choice([*DEVICES]), help="The card that is here, of those that simulate knows.")
@click.option("--stages", default=1, show_default=True, help="Of a pipeline: --pipeline-parallel-size.")
@click.option("--repeats", type=click.IntRange(2), default=3, show_default=True)
@click.option("--clock", type=click.Choice([*CLOCKS]), default="wall", show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Save all figures there.")
def main(
    trace: str,
    requests: int,
    shrink: float,
    speeds: str,
    shape: str | None,
    gpu: str | None,
    stages: int,
    repeats: int,
    clock: str,
    path: Path | None,
) -> None:
    """Compare predictions of the second half of a trace with replays of it."""
    if clock == "processor" and stages > 1:
        raise click.UsageError("--clock processor counts one process, and stages are processes of their own")
    options: dict[str, Any] = {"enable_prefix_caching": False, "pipeline_parallel_size": stages}
    options |= {"device": "cuda"} if gpu else {"device": "cpu", "threads": 1}
    folder = tempfile.TemporaryDirectory()
    if shape is not None:
        options |= {"model": str(write(Path(folder.name), shape)), "load_format": "dummy", "max_model_len": LONGEST}
    settings, card = Settings.of(**options), DEVICES[gpu] if gpu else None
    found = {}
    for speed in speeds.split(","):
        longest = 2048 if shape is None else LONGEST
        first, second = halves(trace, requests, shrink, float(speed), longest - 8)
        found[speed] = compare(settings, card, first, second, repeats, CLOCKS[clock]())
        click.echo(f"speed {speed}: mean error of the fit {100 * found[speed]['fit_error']:.1f} %")
        for name, row in found[speed]["rows"].items():
            click.echo(
                f"  {name:9} measured {row['measured']:9.2f} predicted {row['predicted']:9.2f} "
                f"error {100 * row['error']:+6.1f} % spread {100 * row['spread']:5.1f} % "
                f"allowed {100 * row['allowed']:5.1f} % {'ok' if row['within'] else 'OUTSIDE'}"
                f"{'' if row['within_bound'] else ' (only by the spread)' if row['within'] else ''}"
            )
        if stages == 1:
            causes = found[speed]["causes"].items()
            click.echo("  " + ", ".join(f"{name} {100 * error:+.1f} %" for name, error in causes))
    if path is not None:
        path.write_text(json.dumps({"about": dict(about(settings)), "speeds": found, "memory": amount(0)}))


if __name__ == "__main__":
    main()
