"""`quire simulate`: what a deployment would do under a load, with the scheduler itself on a virtual clock."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import Progress

from quire.bench.load_levels import parse_goodput, parse_range
from quire.bench.offline import FILE, writable
from quire.bench.simulate_page import page
from quire.cli.base import SettingsCommand
from quire.cli.ranges import FiniteRange, size_of
from quire.cli.tables import numbers, print_pairs
from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig, InvalidRequest, nearest
from quire.scheduler.routing import MAX_IMBALANCE, ROUTING_POLICIES
from quire.sim.calibration import Calibration, read_calibration
from quire.sim.devices import DEVICES, find_device
from quire.sim.fleet import Autoscaling, FleetConfig, PrefillPool, has_prefixes, simulate_fleet
from quire.sim.results import PERCENTILES, summarize
from quire.sim.sessions import Sessions
from quire.sim.trace import BUILT_IN, Trace, read_trace

if TYPE_CHECKING:
    from quire.bench.simulated import SimulatedModel

MAX_RUNS = 256
"""Most combinations of --set."""
_DEPLOYMENT = (
    *("replicas", "prefill_replicas", "policy", "max_imbalance", "routers", "speed", "users", "startup_time"),
    *("autoscale_tokens", "prefill_max_slowdown"),
)
"""What --set may name besides the engine's options."""
_NEEDED: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "users": ("turns", "think", "input_len", "output_len"),
        "autoscale": ("autoscale_tokens", "startup_time"),
        "prefill_replicas": (
            *("prefill_calibration", "prefill_min_tokens", "prefill_max_slowdown", "prefill_timeout"),
        ),
        "targets": ("max_replicas",),
    }
)
"""Options that mean something only beside another: the others by that one."""
_OF_TRACES = ("speed", "shrink", "repeat", "overlap")
_TARGET = re.compile(r"(ttft|tpot|itl|e2el)_(mean|p50|p90|p95|p99)=(\d+(?:\.\d+)?)(ms|s)")

OnProgress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: a model, a load, a deployment. given: the command's own options, as they were written.

    goals: seconds by ttft, tpot and e2el. targets: milliseconds by (what, statistic).
    """

    settings: Settings
    given: Mapping[str, Any]
    goals: Mapping[str, float]
    targets: Mapping[tuple[str, str], float]
    calibration: Calibration | None
    prefill_calibration: Calibration | None = None

    def changed(self, values: Mapping[str, str]) -> Question:
        """With other values by name, of the engine's options or of the deployment's. Raises InvalidConfig."""
        mine: dict[str, Any] = {}
        engine: dict[str, Any] = {}
        for name, value in values.items():
            if name in _DEPLOYMENT:
                mine[name] = _deployment_value(name, value)
            else:
                engine[name] = OPTIONS[name].read(value, f"--set {name}")
        return replace(self, settings=self.settings.changed(**engine), given={**self.given, **mine})


def _deployment_value(name: str, value: str) -> Any:
    """What the command's own option of this name reads. Raises InvalidConfig."""
    option = next(each for each in (*_load_options(), *_deployment_options()) if each.name == name)
    try:
        return option.type.convert(value, option, click.get_current_context(silent=True))
    except click.BadParameter as error:
        raise InvalidConfig(f"--set {name}: {error.message}") from error


def _parse_sets(sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """NAME=A,B,C of each --set. Raises InvalidConfig for an unknown name, and for too many combinations."""
    known = [
        *_DEPLOYMENT,
        "pipeline_parallel_size",
        *(name for name, each in OPTIONS.items() if each.section in ("model", "cache", "scheduler")),
    ]
    out: dict[str, tuple[str, ...]] = {}
    for text in sets:
        name, equals, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not values:
            raise InvalidConfig(f"--set {text}: must be NAME=VALUE[,VALUE...]")
        if name not in known:
            raise InvalidConfig(f"--set {name}: no such option of an engine or a deployment.{nearest(name, known)}")
        out[name] = (values,) if values.startswith("{") else tuple(each.strip() for each in values.split(","))
    if math.prod(map(len, out.values())) > MAX_RUNS:
        raise InvalidConfig(f"--set makes {math.prod(map(len, out.values()))} combinations: {MAX_RUNS} at most")
    return out


def _parse_targets(texts: Sequence[str]) -> dict[tuple[str, str], float]:
    """Milliseconds by (what, statistic). Raises InvalidConfig."""
    out = {}
    for text in texts:
        found = _TARGET.fullmatch(text)
        if found is None:
            raise InvalidConfig(
                f"--target {text}: must be such as ttft_p99=500ms: ttft, tpot, itl or e2el; mean, p50, p90, p95 or p99"
            )
        if (found[1], found[2]) == ("itl", "mean"):
            raise InvalidConfig("--target: itl has percentiles only, p50 to p99")
        out[found[1], found[2]] = float(found[3]) * (1e3 if found[4] == "s" else 1.0)
    return out


_SHOWN: Any = MappingProxyType({"show_default": True})
_COUNT = click.IntRange(1)
MAX_REPLICAS = 100_000
_REPLICAS = click.IntRange(1, MAX_REPLICAS)
_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "trace": "Azure's CSV, Mooncake's JSON lines, what `quire bench serve` saved, a recording (file or folder); or "
        f"one that is made up: {', '.join(BUILT_IN)}.  [default: azure-code]",
        "overlap": "Repetitions all at once, shifted against each other.",
        "imbalance": "Requests that a replica chosen for a prefix may have more than another.",
        "autoscale": "Replicas come and go with queued tokens.",
        "prefill": "Engines that compute prompts for all replicas: prefill/decode disaggregation.",
        "prefill_steps": "Step times of these engines, where they differ.",
        "prefill_least": "Prompts with fewer tokens are computed by the replica.",
        "prefill_wait": "Seconds that a replica waits for the next block.",
        "prefill_slowest": "A replica computes a prompt itself where they are predicted to take so many times as long.",
        "tokens": "Queued prompt tokens a replica may have.",
        "goals": "Count the requests within ttft:MS,tpot:MS,e2el:MS.",
        "targets": "Look for the fewest replicas with, for example, ttft_p99=500ms.",
        "sets": "Try each value of an option: of the engine, or replicas, policy, speed, users ...",
        "steps": "Plan every step, also where many are alike: slower, the same.",
        "output": "Write a page with charts: cost against goodput.",
    }
)


def _parse_scale(value: str) -> tuple[int, int]:
    """Read `1:8`. Raises BadParameter."""
    low, high = parse_range(value)
    if high > MAX_REPLICAS:
        raise click.BadParameter(f"{high} replicas are more than {MAX_REPLICAS}")
    return low, high


def _load_options() -> list[click.Parameter]:
    return [
        click.Option(["--trace"], metavar="FILE", help=_TEXTS["trace"]),
        click.Option(["--sessions", "users"], type=_COUNT, help="Instead of a trace: users who think between turns."),
        click.Option(["--turns"], type=_COUNT, default=6, help="Of a session.", **_SHOWN),
        click.Option(["--think"], type=FiniteRange(0), default=10.0, help="Seconds a user thinks.", **_SHOWN),
        click.Option(["--input-len"], type=parse_range, default="50:400", help="Tokens of a question.", **_SHOWN),
        click.Option(["--output-len"], type=parse_range, default="50:400", help="Tokens of an answer.", **_SHOWN),
        click.Option(["--num-prompts"], type=_COUNT, help="Requests. Unset: the whole trace; 1,000 of sessions."),
        click.Option(["--speed"], type=FiniteRange(1e-6), default=1.0, help="Of the trace.", **_SHOWN),
        click.Option(["--shrink"], type=FiniteRange(1), default=1.0, help="Divides its prompts.", **_SHOWN),
        click.Option(["--repeat"], type=_COUNT, default=1, help="The trace so many times, in turn.", **_SHOWN),
        click.Option(["--overlap"], is_flag=True, help=_TEXTS["overlap"]),
    ]


def _deployment_options() -> list[click.Parameter]:
    policies, nonnegative = click.Choice(list(ROUTING_POLICIES)), click.IntRange(0)
    engines = click.IntRange(0, MAX_REPLICAS)
    return [
        click.Option(["--gpu"], metavar="NAME", help=f"The card of each replica: {', '.join(DEVICES)}."),
        click.Option(["--calibration"], type=FILE, help="Step times that `quire calibrate` measured, instead."),
        click.Option(["--memory"], metavar="SIZE", help="Of each replica; unset: the card's, or 16GiB."),
        click.Option(["--replicas"], type=_REPLICAS, default=1, **_SHOWN),
        click.Option(["--policy"], type=policies, default="least_loaded", help="Of routing.", **_SHOWN),
        click.Option(["--max-imbalance"], type=nonnegative, default=MAX_IMBALANCE, help=_TEXTS["imbalance"], **_SHOWN),
        click.Option(["--routers"], type=_COUNT, default=1, help="Each with its share of the replicas.", **_SHOWN),
        click.Option(["--autoscale"], metavar="MIN:MAX", type=_parse_scale, help=_TEXTS["autoscale"]),
        click.Option(["--autoscale-tokens"], type=_COUNT, default=8192, help=_TEXTS["tokens"], **_SHOWN),
        click.Option(
            ["--startup-time"], type=FiniteRange(0), default=30.0, help="Seconds a new replica takes.", **_SHOWN
        ),
        click.Option(["--prefill-replicas"], type=engines, default=0, help=_TEXTS["prefill"], **_SHOWN),
        click.Option(["--prefill-calibration"], type=FILE, help=_TEXTS["prefill_steps"]),
        click.Option(["--prefill-min-tokens"], type=_COUNT, default=256, help=_TEXTS["prefill_least"], **_SHOWN),
        click.Option(
            ["--prefill-max-slowdown"],
            type=FiniteRange(0.1),
            default=4.0,
            help=_TEXTS["prefill_slowest"],
            **_SHOWN,
        ),
        click.Option(["--prefill-timeout"], type=FiniteRange(0.1), default=10.0, help=_TEXTS["prefill_wait"], **_SHOWN),
        click.Option(["--price-per-hour", "price"], type=FiniteRange(0), help="Of a replica."),
    ]


def _answer_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--goodput", "goals"], type=parse_goodput, default="", metavar="WHAT:MS[,...]", help=_TEXTS["goals"]
        ),
        click.Option(["--target", "targets"], multiple=True, metavar="WHAT=TIME", help=_TEXTS["targets"]),
        click.Option(["--max-replicas"], type=_REPLICAS, default=4096, help="Where the search ends.", **_SHOWN),
        click.Option(["--set", "sets"], multiple=True, metavar="NAME=A,B", help=_TEXTS["sets"]),
        click.Option(["--jobs"], type=_COUNT, default=os.cpu_count() or 1, help="Processes.", **_SHOWN),
        click.Option(["--step-by-step"], is_flag=True, help=_TEXTS["steps"]),
        click.Option(["--output"], type=FILE, callback=writable, help=_TEXTS["output"]),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ]


def _check_given(context: click.Context, sets: Mapping[str, Sequence[str]]) -> None:
    """Raise InvalidConfig for an option that would change nothing, on the command line or of --set."""
    flags = {param.name: param.opts[0] for param in context.command.params}
    given = {name for name in flags if context.get_parameter_source(str(name)) is ParameterSource.COMMANDLINE} | {*sets}
    for needed, names in _NEEDED.items():
        for name in given.intersection(names) if needed not in given else ():
            raise InvalidConfig(f"{flags[name]} changes nothing without {flags[needed]}: leave it out, or give both")
    for name in given.intersection(_OF_TRACES) if "users" in given else ():
        raise InvalidConfig(f"{flags[name]} is of a trace, and --sessions has none: leave it out")


@click.command(
    "simulate",
    cls=SettingsCommand,
    sections=("model", "cache", "scheduler"),
    also=("device", "pipeline_parallel_size"),
    positional=True,
    params=[*_load_options(), *_deployment_options(), *_answer_options()],
)
def command(settings: Settings, as_json: bool, output: Path | None, **given: Any) -> None:
    """Run a load through replicas of MODEL on a virtual clock: the scheduler, cache, router and autoscaler are those of
    a server; what a step takes is computed.

    The exit status is 1 where no number of replicas meets the targets.
    """
    goals = {what: ms / 1e3 for what, ms in given.pop("goals").items()}
    targets, sets = _parse_targets(given.pop("targets")), _parse_sets(given.pop("sets"))
    _check_given(click.get_current_context(), sets)
    path, prefill_path = given.pop("calibration"), given.pop("prefill_calibration")
    if (path is None) == (given["gpu"] is None):
        raise InvalidConfig("say where steps run, by one of --gpu and --calibration", param="gpu")
    if given["trace"] is not None and given["users"] is not None:
        raise InvalidConfig("--trace and --sessions are two loads: give one of them", param="trace")
    if targets and given["autoscale"] is not None:
        raise InvalidConfig("--target looks for a number of replicas, which --autoscale changes: give one of them")
    question = Question(
        settings=settings,
        given=given,
        goals=goals,
        targets=targets,
        calibration=None if path is None else read_calibration(path),
        prefill_calibration=None if prefill_path is None else read_calibration(prefill_path),
    )
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for values in _combinations(sets):
            asked = question.changed(values)
            rows += [{"set": values, **row} for row in _answer(asked, bars)]
    for row in rows:
        row["name"] = ", ".join([*(f"{name} {value}" for name, value in row["set"].items())]) or "as asked"
    found = {
        "model": settings.model.model,
        "load": rows[0]["load"],
        "goals": {what: 1e3 * limit for what, limit in goals.items()},
        "runs": rows,
    }
    if output is not None:
        output.write_text(page(found), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found, bool(goals), question)
        if output is not None:
            click.echo(f"{output}: open it in a browser")
    if targets and not any(row["chosen"] for row in rows):
        raise SystemExit(1)


def _combinations(sets: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, str]]:
    for values in itertools.product(*sets.values()):
        yield dict(zip(sets, values, strict=True))


# ---------------------------------------------------------------- one question


def load_of(given: Mapping[str, Any]) -> Trace | Sessions:
    """The trace or the sessions that the options describe. Raises InvalidRequest and InvalidConfig."""
    count = given["num_prompts"]
    if given["users"] is not None:
        return Sessions(
            int(given["users"]),
            count=count or 1000,
            turns=given["turns"],
            think=given["think"],
            asked=given["input_len"],
            answered=given["output_len"],
        )
    trace = read_trace(Path(given["trace"] or "azure-code"))
    if count is not None and given["repeat"] == 1:
        if count > len(trace):
            raise InvalidRequest(
                f"the trace has {len(trace)} requests, not {count}: --repeat makes more", param="num_prompts"
            )
        trace = trace.part(0, count)
    if given["shrink"] != 1.0:
        trace = trace.shrunk(given["shrink"])
    trace = trace.repeated(given["repeat"], overlap=given["overlap"])
    if count is not None:
        trace = trace.part(0, min(count, len(trace)))
    return trace if given["speed"] == 1.0 else trace.faster(given["speed"])


def _answer(question: Question, bars: Progress) -> list[dict[str, Any]]:
    """The row of a question; with targets, of every number of replicas that was tried, the answer's `chosen`."""
    given = question.given
    load = load_of(given)
    if isinstance(load, Trace) and not len(load):
        raise InvalidRequest("the trace has no requests", param="trace")

    def run(replicas: int) -> dict[str, Any]:
        fresh = load_of(given) if isinstance(load, Sessions) else load
        bar = bars.add_task(f"{replicas} replica{'s' if replicas > 1 else ''}", total=1.0)
        row = simulated(question, fresh, replicas, lambda done, share: bars.update(bar, completed=share))
        bars.remove_task(bar)
        return row

    if not question.targets:
        return [{**run(int(given["replicas"])), "chosen": True}]
    return search(run, int(given["replicas"]), int(given["max_replicas"]), int(given["routers"]))


def search(run: Callable[[int], dict[str, Any]], first: int, most: int, step: int = 1) -> list[dict[str, Any]]:
    """Rows of the numbers of replicas that were tried, by number; `chosen` is the least that meets the targets.

    More replicas are taken to be no worse: the number is doubled until the targets are met, and the rest bisected.
    """
    rows: dict[int, dict[str, Any]] = {}

    def meets(count: int) -> bool:
        if count not in rows:
            rows[count] = run(count * step)
        return bool(rows[count]["meets"])

    low, high = 0, max(1, first // step)
    while not meets(high) and high * step < most:
        low, high = high, min(2 * high, max(high + 1, most // step))
    while meets(high) and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return [{**rows[count], "chosen": count == high and rows[count]["meets"]} for count in sorted(rows)]


def simulated(
    question: Question, load: Trace | Sessions, replicas: int, on_progress: OnProgress = lambda done, share: None
) -> dict[str, Any]:
    """Run a load through so many replicas. Returns what is reported of it, plain JSON."""
    given, settings = question.given, question.settings
    memory = given["memory"]
    if memory is None and question.calibration is not None:
        memory = "16GiB"
    room = None if memory is None else size_of(memory)

    def model_of(calibration: Calibration | None) -> SimulatedModel:
        device = None if calibration is not None else find_device(given["gpu"])
        known = has_prefixes(load)
        # Imported here, since it imports torch.
        build_model = import_module("quire.bench.simulated").build_model
        made: SimulatedModel = build_model(
            settings, device=device, calibration=calibration, memory=room, prefixes=known
        )
        return made

    model, pool, engines = model_of(question.calibration), None, int(given["prefill_replicas"])
    if engines:
        other = question.prefill_calibration
        build = (model if other is None else model_of(other)).engine
        asked = (given["prefill_min_tokens"], given["prefill_timeout"], given["prefill_max_slowdown"])
        pool = PrefillPool(build, engines, *asked)
    scaling = None
    if given["autoscale"] is not None:
        low, high = given["autoscale"]
        scaling = Autoscaling(given["autoscale_tokens"], low, high, startup=given["startup_time"])
    config = FleetConfig(
        model.engine,
        replicas=replicas,
        policy=given["policy"],
        max_imbalance=int(given["max_imbalance"]),
        routers=int(given["routers"]),
        autoscaling=scaling,
        max_queued=settings.scheduler.max_num_queued_reqs,
        step_by_step=given["step_by_step"],
        jobs=given["jobs"],
        prefill=pool,
    )
    results, totals = simulate_fleet(config, load, on_progress)
    results.overhead = model.first_token
    row = summarize(results, question.goals, totals.busy, totals.replica_seconds)
    row |= {"load": load.name, "replicas": replicas, "steps": totals.steps, "evictions": totals.evictions}
    row |= {"sizes": totals.sizes, "has_prefixes": has_prefixes(load), "describes": model.describe()}
    row |= {"prefill_replicas": engines, "tiers": dict(totals.tiers)}
    if engines:
        row["prefill_utilisation"] = totals.prefill_busy * (replicas + engines) / (engines * totals.replica_seconds)
    if totals.drafted:
        row["draft_acceptance"] = totals.accepted / totals.drafted
    if given["price"] is not None:
        row["cost"] = given["price"] * row["replica_hours"]
        tokens = row["tokens_s"] * row["seconds"]
        row["cost_per_million_tokens"] = 1e6 * row["cost"] / tokens if tokens else math.inf
    row["meets"] = row["answered"] == row["requests"] and all(
        row["ms"][what][statistic] <= limit for (what, statistic), limit in question.targets.items()
    )
    return row


# ---------------------------------------------------------------- for people


def _show(found: Mapping[str, Any], goals: bool, question: Question) -> None:
    """A table of all runs, and more of the one where there is one."""
    rows, priced = found["runs"], question.given["price"] is not None
    first = rows[0]
    print_pairs(
        [("model", found["model"]), ("load", f"{first['load']}: {first['requests']:,} requests"), *first["describes"]]
    )
    heads = ["run", "replicas", "answered", "requests/s", "tokens/s", "first token", "between", "whole answer", "busy"]
    heads += ["hits", "preempted"] + ["good"] * goals + ["cost"] * priced + ["digest"]
    table = numbers("times in milliseconds, p50 / p99", *heads, left=("run",))
    for row in rows:
        ms = [f"{row['ms'][what]['p50']:,.1f} / {row['ms'][what]['p99']:,.1f}" for what in ("ttft", "itl", "e2el")]
        mark = " *" if question.targets and row["chosen"] else ""
        hits = f"{100 * row['hit_rate']:.0f} %" if row["has_prefixes"] else "unknown"
        cells = [row["name"] + mark, f"{row['replicas']:,}", f"{row['answered']:,}/{row['requests']:,}"]
        cells += [f"{row['requests_s']:,.2f}", f"{row['tokens_s']:,.0f}", *ms, f"{100 * row['utilisation']:.0f} %"]
        cells += [hits, f"{row['preemptions']:,}"]
        cells += [f"{100 * row['good_share']:.1f} %"] * goals
        cells += [f"{row.get('cost', 0.0):,.2f}"] * priced + [row["digest"]]
        table.add_row(*cells)
    Console(width=max(Console().width, 200), highlight=False).print(table)
    for line in _conclusions(found, question):
        click.echo(line)


def _conclusions(found: Mapping[str, Any], question: Question) -> Iterator[str]:
    settings = question.settings
    for row in found["runs"]:
        if row["too_long"]:
            yield f"{row['name']}: {row['too_long']} requests are too long to ever run (max_model_len, KV pool)."
        if row["refused"]:
            limit = settings.scheduler.max_num_queued_reqs
            yield f"{row['name']}: {row['refused']} requests were refused with 429: more than {limit} waited."
        if row["tiers"]:
            counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in row["tiers"].items())
            yield f"{row['name']}: K/V that was copied: {counts}."
        if row["prefill_replicas"]:
            busy = 100 * row["prefill_utilisation"]
            yield f"{row['name']}: prefill engines {row['prefill_replicas']}, busy {busy:.0f} % of the time."
    if not found["runs"][0]["has_prefixes"]:
        yield "The trace does not say which prompts begin alike: nothing is found in the prefix cache."
    if question.targets:
        wanted = ", ".join(f"{what} {statistic} {limit:g} ms" for (what, statistic), limit in question.targets.items())
        for row in found["runs"]:
            if row["chosen"]:
                least = "1 replica is" if row["replicas"] == 1 else f"{row['replicas']} replicas are"
                yield f"* {least} the fewest with {wanted}{_settings_of(row)}."
        names = {json.dumps(row["set"]) for row in found["runs"]} - {
            json.dumps(row["set"]) for row in found["runs"] if row["chosen"]
        }
        for name in sorted(names):
            said = _settings_of({"set": json.loads(name)})
            yield f"No number of replicas up to {question.given['max_replicas']} has {wanted}{said}."


def _settings_of(row: Mapping[str, Any]) -> str:
    return "".join(f", {name} {value}" for name, value in row["set"].items())


__all__ = ["PERCENTILES", "Question", "command", "load_of", "search", "simulated"]
