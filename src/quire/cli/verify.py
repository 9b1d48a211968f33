"""`quire verify`: the same requests in every situation of an engine, compared to the bit with each alone, and timed.

A situation that did not occur proves nothing, so each counts what occurred.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console

from quire.assembly.engine import build_policy, build_scheduler, make_executor
from quire.assembly.limits import BuiltExecutor
from quire.assembly.tiers import refuse_tiers
from quire.assembly.tokenizer import build_tokenizer, require_text
from quire.cli.tables import console, numbers
from quire.config import Settings
from quire.engine.engine import Engine
from quire.engine.events import Gauges, Observer, StepRecord
from quire.engine.executor import Description
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, QuireError
from quire.models.registry import read_spec
from quire.types import GREEDY, Request, SamplingParams, TokenLogprobs
from quire.weights.canary import PROBE, probe
from quire.weights.files import read_config
from quire.weights.locate import EMBEDDED, locate


def run(settings: Settings, requests: int, new: int, repeat: int, as_json: bool) -> None:
    """`quire verify`, see `quire.cli.late`."""
    require_text(settings, "quire verify")
    refuse_tiers(settings, "`quire verify`")
    rows = list[Row]()
    with Console(stderr=True).status("answering") as status:
        for row in verified(settings, count=requests, new=new):
            rows.append(row)
            status.update(f"answered: {row.name}")
        cost, why = charged(settings, repeat)
    about = {
        "model": settings.model.model,
        "deterministic": bool(settings.execution.deterministic),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    if as_json:
        priced = [{**each._asdict(), "ratio": each.ratio} for each in cost]
        found = {"equal": equal(rows), "situations": list(map(plain, rows)), "price": priced, "unpriced": why}
        click.echo(json.dumps(about | found))
    else:
        show(settings, rows, cost, why)
    click.get_current_context().exit(0 if equal(rows) else 1)


def charged(settings: Settings, repeat: int) -> tuple[list[Price], str]:
    """The price, or why there is none."""
    if not repeat:
        return [], "not asked for (--repeat 0)"
    try:
        return prices(settings, repeat), ""
    except InvalidConfig as error:
        return [], str(error)


def equal(rows: Sequence[Row]) -> bool:
    """Whether no answer differs."""
    return not any(row.differ for row in rows)


def plain(row: Row) -> dict[str, Any]:
    """A situation's row for JSON."""
    return {
        **row._asdict(),
        "happened": row.happened[0],
        "of": row.happened[1],
        "first": row.first and row.first._asdict(),
    }


def show(settings: Settings, rows: Sequence[Row], cost: Sequence[Price], why: str) -> None:
    """Print the tables. why: there is no price."""
    out = console(160)
    mode = "deterministic mode" if settings.execution.deterministic else "default mode"
    table = numbers(
        f"{settings.model.model}, {mode}: beside what each request is answered alone",
        *("situation", "requests", "tokens", "seen", "differ", "in tokens", "log-prob. apart", "the first"),
        left=("situation", "seen", "the first"),
    )
    for row in rows:
        seen = f"{row.happened[0]:,} {row.happened[1]}" if row.happened[0] else "it did not come about"
        counts = (str(row.differ), str(row.changed), f"{row.apart:.1e}" if row.apart else "0")
        cells = (str(row.requests), f"{row.tokens:,}", seen, *counts, describe(row.first))
        table.add_row(row.name, *(("", "", "not tried", "", "", "", row.why) if row.why else cells))
    out.print(table)
    out.print(verdict(bool(settings.execution.deterministic), rows))
    if not cost:
        out.print(f"price: {why}")
        return
    headings = ("workload", "default", "deterministic", "ratio")
    table = numbers("price, tokens a second, medians of turns", *headings, left=("workload",))
    for each in cost:
        table.add_row(each.workload, f"{each.off:,.0f}", f"{each.on:,.0f}", f"{each.ratio:.2f}")
    out.print(table)


def describe(first: Difference | None) -> str:
    """The position, and both tokens with their log-probabilities."""
    if first is None:
        return ""
    alone, here = ("the end" if each is None else f"{each[0]} ({each[1]:.9g})" for each in (first.alone, first.here))
    return f"request {first.request}, token {first.position + 1}: {alone} alone, {here} here"


def verdict(deterministic: bool, rows: Sequence[Row]) -> str:
    """The conclusion, in a sentence."""
    idle = [row.name for row in rows if not row.happened[0]]
    rest = f" Not put to the test: {', '.join(idle)}." if idle else ""
    if equal(rows):
        return f"Every token and every log-probability compared is the same to the bit.{rest}"
    if deterministic:
        return f"Some differ: on this machine the mode does not keep its promise. Please report it, with --json.{rest}"
    return f"Some differ, by rounding, as they may in the default mode; --deterministic is the one without.{rest}"


# ---------------------------------------------------------------- situations

LENGTHS = (1, 60, 9, 350, 120, 33, 600, 17)
"""Tokens of prompts: less than a block, several, more than a step feeds."""

SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    GREEDY,
    SamplingParams(temperature=1.0, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.2, min_p=0.02, presence_penalty=0.5),
)

CHUNK = 13
"""Tokens of a prompt a step, where chunks are small."""

Answer = tuple[TokenLogprobs, ...]


class ScheduleObserver(Observer):
    """Counts the rows of steps, and chunks of prompts."""

    def __init__(self) -> None:
        self.rows = self.chunks = 0

    def on_step(self, record: StepRecord) -> None:
        """A step was committed."""
        self.rows = max(self.rows, len(record.plan.spans))
        self.chunks += sum(not span.num_samples for span in record.plan.spans)


Seen = Callable[[ScheduleObserver, Gauges], tuple[int, str]]
"""Counts what shows that a situation occurred: (how often, of what)."""


class Situation(NamedTuple):
    """together: all at once, or one after the other. twice: after a round of answers of one token, with what that left
    in the cache. chunked, tight: small chunks; fewer blocks than those that run at once need, the shortest asked first.
    """

    name: str
    seen: Seen
    together: bool = True
    twice: bool = False
    chunked: bool = False
    tight: bool = False


def drafted(watch: ScheduleObserver, gauges: Gauges) -> tuple[int, str]:
    """Number of drafts, and how many were accepted."""
    return gauges.draft_totals[1], f"drafts, {gauges.draft_totals[2]:,} right"


PLAIN = (
    Situation("alone, once more", lambda watch, gauges: (watch.rows, "at a time"), together=False),
    Situation("in a batch", lambda watch, gauges: (watch.rows if watch.rows > 1 else 0, "at a time")),
    Situation(
        "warm prefix cache", lambda watch, gauges: (gauges.prefix_hit, "tokens found"), together=False, twice=True
    ),
    Situation("small chunks", lambda watch, gauges: (watch.chunks, "chunks"), chunked=True),
    Situation("preempted", lambda watch, gauges: (gauges.preemptions, "preemptions"), tight=True),
)


def drafting(name: str) -> tuple[Situation, ...]:
    """Situations with speculation of this name."""
    return (
        Situation(name, drafted),
        Situation(f"{name}, all at once", drafted, twice=True, chunked=True, tight=True),
    )


class Difference(NamedTuple):
    """Where an answer first is not what it was alone, in a token or in how likely it was.

    alone, here: (token, log-probability), None where that answer has ended.

    same: tokens before one is another. apart: the most that a log-probability moved up to there.
    """

    request: str
    position: int
    alone: tuple[int, float] | None
    here: tuple[int, float] | None
    same: int
    apart: float


class Row(NamedTuple):
    """What became of one situation. tokens: compared, in each answer up to where one is another. happened: what of it
    was seen, and how often. differ: answers of which something differs; changed: of which tokens do. apart: the most a
    log-probability moved. why: it was not tried."""

    name: str
    requests: int = 0
    tokens: int = 0
    happened: tuple[int, str] = (0, "")
    differ: int = 0
    changed: int = 0
    apart: float = 0.0
    first: Difference | None = None
    why: str = ""


def verified(settings: Settings, *, count: int, new: int) -> Iterator[Row]:
    """A row a situation. count: requests; new: tokens of each answer. Raises what building such an engine does."""
    plain = settings.changed(speculative_config=None)
    made = make_executor(plain)
    with closing(made.executor):
        asked = requests(settings, made, count=count, new=new)
        alone = {request.id: found for request in asked for found in ask(engine(plain, made), [request]).values()}
        for situation in PLAIN:
            yield tried(plain, made, situation, asked, alone)
    for name, how in drafts(settings).items():
        fast = settings.changed(speculative_config=how)
        try:
            made = make_executor(fast)
        except InvalidConfig as error:
            yield Row(name, why=str(error))
            continue
        with closing(made.executor):
            for situation in drafting(name):
                yield tried(fast, made, situation, asked, alone)


def drafts(settings: Settings) -> Mapping[str, str]:
    """How to speculate, by what it is called: as configured; else by look-up, and by the draft a model brings."""
    configured = settings.scheduler.speculative_config
    if configured is not None:
        return {"drafts as configured": json.dumps({**json.loads(configured), "adaptive": False})}
    found = {"drafts by look-up": json.dumps({"method": "ngram", "prompt_lookup_min": 1, "adaptive": False})}
    if settings.model.model == EMBEDDED:
        found["drafts by a model"] = json.dumps({"method": "draft_model", "adaptive": False})
    return found


def requests(settings: Settings, made: BuiltExecutor, *, count: int, new: int) -> list[Request]:
    """Always the same: greedy and seeded, of all lengths that fit."""
    about = made.executor.describe()
    try:
        encoded = build_tokenizer(settings).encode(PROBE)
    except (InvalidModel, InvalidRequest):
        encoded = ()
    text, room = (
        probe(about.vocab_size, encoded),
        min(about.max_model_len, about.num_blocks * about.block_size) - new - 1,
    )
    if room < 1:
        raise InvalidConfig(f"answers of {new} tokens do not fit in the context: lower --new", param="new")

    def prompt(i: int) -> tuple[int, ...]:
        return tuple(text[(37 * i + at) % len(text)] for at in range(min(LENGTHS[i % len(LENGTHS)], room)))

    return [
        Request(
            id=f"{i + 1}",
            prompt=prompt(i),
            max_new_tokens=new,
            sampling=replace(SAMPLINGS[i % len(SAMPLINGS)], logprobs=1),
            seed=settings.model.fixed_seed + i,
        )
        for i in range(count)
    ]


def engine(
    settings: Settings, made: BuiltExecutor, *, pages: int = 0, chunk: int = 0, watch: ScheduleObserver | None = None
) -> Engine:
    """A new one around an executor that is there. pages, chunk: fewer than it has, smaller than usual; 0: not so.

    Where pages are few, requests are let in rashly, so that some lose theirs.
    """
    executor, limits = made.executor, made.limits
    executor.reset()
    about = executor.describe()
    if pages:
        about = replace(about, num_blocks=min(pages, about.num_blocks))
        settings = settings.changed(pressure_policy="preempt")
    if chunk:
        limits = limits._replace(max_chunk_tokens=chunk, max_num_batched_tokens=max(limits.max_num_seqs, chunk))
    observers = () if watch is None else (watch,)
    return Engine(
        build_scheduler(settings, about, limits, build_policy(settings)),
        executor,
        lookahead=limits.lookahead,
        observers=observers,
        keep=0,
    )


def ask(engine: Engine, asked: Sequence[Request]) -> dict[str, Answer]:
    """Run the requests to their end. Raises QuireError if one fails."""
    answers: dict[str, list[TokenLogprobs]] = {request.id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_pending_work:
        for event in engine.step():
            if event.error is not None:
                raise QuireError(f"request {event.id} failed: {event.error}")
            answers[event.id] += event.logprobs
    return {id: tuple(answer) for id, answer in answers.items()}


def tried(
    settings: Settings, made: BuiltExecutor, situation: Situation, asked: Sequence[Request], alone: Mapping[str, Answer]
) -> Row:
    """Answer the requests in a situation, and compare with the answers alone."""
    watch, pages = ScheduleObserver(), 0
    if situation.tight:
        asked = sorted(asked, key=lambda request: len(request.prompt))
        pages = scarce(asked, made.executor.describe(), made.limits.max_num_seqs)
    it = engine(settings, made, pages=pages, chunk=CHUNK if situation.chunked else 0, watch=watch)
    groups, found = [asked] if situation.together else [[request] for request in asked], dict[str, Answer]()
    for group in groups if situation.twice else ():
        ask(it, [replace(request, max_new_tokens=1) for request in group])
    for group in groups:
        found |= ask(it, group)
    differences = {id: difference(id, alone[id], answer) for id, answer in found.items()}
    departed = [each for each in differences.values() if each is not None]
    return Row(
        situation.name,
        requests=len(asked),
        tokens=sum(len(alone[id]) if each is None else each.same for id, each in differences.items()),
        happened=situation.seen(watch, it.gauges()),
        differ=len(departed),
        changed=sum(each.same < len(alone[each.request]) for each in departed),
        apart=max((each.apart for each in departed), default=0.0),
        first=min(departed, key=lambda each: (each.position, int(each.request)), default=None),
    )


def scarce(asked: Sequence[Request], about: Description, at_once: int) -> int:
    """The smallest number of blocks that holds the longest request and makes the others preempt each other; but where
    there are many, a quarter of what those that may run at once take when they begin, so that they are soon done."""
    size = about.block_size
    least = max(-(-(len(r.prompt) + r.max_new_tokens + about.num_drafts) // size) for r in asked)
    begun = [len(request.prompt) // size + 1 for request in asked]
    grown = [-(-(len(request.prompt) + request.max_new_tokens) // size) for request in asked]
    many = sum(begun) * min(at_once, len(asked)) // (4 * len(asked))
    few = (
        max(first, least)
        for first, then in zip(accumulate(begun), accumulate(grown), strict=True)
        if then > max(first, least)
    )
    return max(many, next(few, least))


def difference(request: str, alone: Answer, here: Answer) -> Difference | None:
    """The first difference, None without one; log-probabilities of a token and of the likeliest ones count too."""
    both = list(zip_longest(alone, here))
    if alone == here:
        return None
    first = next(at for at, (one, other) in enumerate(both) if one != other)
    same = next((at for at, (one, other) in enumerate(both) if not one or not other or one[0] != other[0]), len(both))
    apart = max((abs(one.logprob - other.logprob) for one, other in zip(alone[:same], here, strict=False)), default=0.0)
    one, other = (None if each is None else (each.token, each.logprob) for each in both[first])
    return Difference(request, first, one, other, same, apart)


# ---------------------------------------------------------------- what the mode costs

PROMPT, NEW, LONG = 32, 48, 480
"""Tokens: of prompts and answers where decode is timed; of the prompt that is timed by itself."""


Timed = Callable[[Engine, int], float]
"""(engine, number of the turn) -> tokens a second."""


class Price(NamedTuple):
    """Tokens a second by workload, medians: off, on, and what is left of it."""

    workload: str
    off: float
    on: float

    @property
    def ratio(self) -> float:
        """Speed in deterministic mode, as a share of the default mode's."""
        return self.on / self.off


def prices(settings: Settings, repeat: int) -> list[Price]:
    """Decode at batch 1 and 8, and a prompt. Raises InvalidConfig where there is no such mode; needs the weights
    twice."""
    asked = settings.model
    folder = locate(asked.model, revision=asked.revision, cache=asked.download_dir)
    spec = read_spec(read_config(folder))
    room = min(asked.max_model_len or spec.context, spec.context, PROMPT + NEW + LONG)
    with ExitStack() as stack:
        modes = dict[bool, tuple[Settings, BuiltExecutor]]()
        for on in (True, False):
            modes[on] = (chosen := variant(settings, on, room)), make_executor(chosen)
            stack.enter_context(closing(modes[on][1].executor))
        workloads: dict[str, Timed] = {
            **{f"decode, {n} at once": partial(decode, vocab=spec.vocab, batch=n, room=room) for n in (1, 8)},
            "a prompt": partial(fill, vocab=spec.vocab, room=room),
        }
        return [price(name, modes, repeat, timed) for name, timed in workloads.items()]


def variant(settings: Settings, on: bool, longest: int) -> Settings:
    """The mode on or off, alone on the device with few rows, so that both fit."""
    return settings.changed(
        deterministic=on,
        max_model_len=longest,
        num_gpu_blocks_override=None,
        enable_prefix_caching=False,
        max_num_seqs=8,
        max_num_batched_tokens=None,
        speculative_config=None,
    )


def price(name: str, modes: dict[bool, tuple[Settings, BuiltExecutor]], repeat: int, timed: Timed) -> Price:
    """Time both modes in turns."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(repeat + 1):
        for mode in (False, True) if turn % 2 else (True, False):
            speeds[mode].append(timed(engine(*modes[mode]), turn))
    return Price(name, *(statistics.median(speeds[mode][1:]) for mode in (False, True)))


def decode(it: Engine, turn: int, *, vocab: int, batch: int, room: int) -> float:
    """Tokens a second, from when all have their first."""
    new = min(NEW, room // 2)
    for i in range(batch):
        prompt = tuple((101 * i + 7 * at + turn) % vocab for at in range(min(PROMPT, room - new)))
        it.add(Request(id=str(i), prompt=prompt, max_new_tokens=new, sampling=GREEDY))
    begun, made, began = set[str](), 0, 0.0
    while it.has_pending_work:
        events = it.step()
        if len(begun) == batch:
            made += sum(len(event.tokens) for event in events)
        else:
            begun.update(event.id for event in events)
            began = time.perf_counter()
    return made / (time.perf_counter() - began)


def fill(it: Engine, turn: int, *, vocab: int, room: int) -> float:
    """Prompt tokens a second."""
    count = min(LONG, room - 1)
    it.add(
        Request(id="0", prompt=tuple((7 * at + turn) % vocab for at in range(count)), max_new_tokens=1, sampling=GREEDY)
    )
    began = time.perf_counter()
    while it.has_pending_work:
        it.step()
    return count / (time.perf_counter() - began)
