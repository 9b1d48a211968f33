"""`python -m benchmarks.host`: the host's work of a step, by feature of its requests, without a card.

Scheduler, engine, look-ahead runner, masks and output processing are those of `LLM` on a GPU; the device is a double
that answers at once with tokens that were chosen before. Processor time of the thread is measured, which other
processes change little, without the double's own. Of that the double also makes a clock on which forwards and sampling
take what they would on a card, so that it shows how much of the host's work is hidden behind them.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.price import FEATURES, Batch, Feature, Row, params, usual_ids
from benchmarks.shapes import byte_words
from benchmarks.workloads import prompts
from quire import heap
from quire.bench.monitor import environment
from quire.engine.engine import Engine
from quire.engine.timing import LatencyController
from quire.executors.local import CudaExecutor
from quire.frontend.interface import Call, Delta
from quire.frontend.outputs import request_output
from quire.frontend.processor import OutputProcessor, output_processor, requests
from quire.model_runner.device_state import DeviceState, StepInputs
from quire.model_runner.device_steps import SCORE_WIDTH, TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.sampling.features import MAX_LOGPROBS
from quire.models.registry import Model
from quire.ops.ragged import KVShape
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.policy import SchedulingPolicy
from quire.scheduler.scheduler import Scheduler
from quire.structured_output.llguidance import LlguidanceCompiler, ParallelMasks
from quire.tokenization.detokenizer import StopStrings
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, RequestOutput, RequestStepOutput, SamplingParams

Ints = npt.NDArray[np.int32]

VOCAB = 151_936
"""Tokens of Qwen3's vocabulary."""

SIZES = (1, 16, 64, 256)
BLOCK = 64
MEASURED = (
    "logprobs",
    "prompt_logprobs",
    "allowed",
    "bias",
    "bad words",
    "min_tokens",
    "stop strings",
    "JSON schema",
    "regex",
    "tools",
)
"""Features of `benchmarks.price`."""

PLAIN, PLAIN_SHORT = Feature(), "plain, short prompts"


# ---------------------------------------------------------------- the device


class Reached:
    """An event of the double's clock."""

    def __init__(self, card: Card, at: float) -> None:
        self.card, self.at = card, at

    def query(self) -> bool:
        return self.card.now() >= self.at

    def synchronize(self) -> None:
        self.card.waited += max(0.0, self.at - self.card.now())


class Card(WorkQueue):
    """A device that has done what it is given as soon as it is given it, and a clock on which it takes its time.

    forward: milliseconds of a step, and of each token that it feeds; head: of sampling, and of each row sampled.
    slower: how much slower the host beside it is than this one.
    spent: seconds of the thread that are the double's own. waited: seconds for which the host would have waited.
    """

    def __init__(self, forward: tuple[float, float], head: tuple[float, float], slower: float = 1.0) -> None:
        self.forward, self.head, self.slower = forward, head, slower
        self.spent = self.waited = self.end = self.busy = 0.0
        self.on_sample: Callable[[GraphKey], None] = lambda key: None

    @contextmanager
    def own(self) -> Iterator[None]:
        """What is done inside is the device's work."""
        began = time.thread_time()
        yield
        self.spent += time.thread_time() - began

    def host(self) -> float:
        """Seconds of the host's work so far."""
        return time.thread_time() - self.spent

    def now(self) -> float:
        """The clock."""
        return self.slower * self.host() + self.waited

    def sleep_until(self, when: float) -> None:
        self.waited += max(0.0, when - self.now())

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        if key.kind == "masks":  # the card reads them by itself
            return
        with self.own():
            base, each = self.head if key.kind == "sample" else self.forward
            took = 1e-3 * (base + each * key.tokens)
            self.end = max(self.end, self.now()) + took
            self.busy += took
            if key.kind == "sample":
                self.on_sample(key)

    def record(self) -> Any:
        return Reached(self, self.end)


class Scripted(TorchSteps):
    """What runs around the forward: rows that sample the tokens of `script` in turn."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card
        self.script: Ints = np.zeros((1, 1), np.int32)
        random = np.random.default_rng(7)
        self.scored = np.zeros((1 << 14, SCORE_WIDTH), np.int32)
        self.scored[:, 1:] = random.integers(1, 1000, self.scored[:, 1:].shape)
        values = self.scored.view(np.float32)[:, 2 + MAX_LOGPROBS :]
        values[:] = -np.sort(random.random(values.shape))
        self.scored[:, 0] = self.scored[:, 2 + MAX_LOGPROBS]

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        with self.card.own():
            data.numpy()[places.numpy()] = values.numpy()

    def draw(self, state: DeviceState, inputs: StepInputs, tokens: Tensor) -> None:
        """The tokens [R] of a step's samples."""
        row = inputs.sample_row[: len(tokens)].numpy()
        known, prompt = state.columns["known"].numpy(), state.columns["prompt"].numpy()
        at = known[row] - prompt[row]
        tokens.numpy()[:] = self.script[row % len(self.script), np.clip(at, 0, self.script.shape[1] - 1)]
        known[row] += 1

    def score(self, logits: Tensor, tokens: Tensor, wanted: Tensor, scores: Tensor) -> None:
        with self.card.own():
            scores.numpy()[:] = self.scored[: len(scores)]


class Nowhere:
    """Memory of the card, to which it copies by itself."""

    def __getitem__(self, at: object) -> Nowhere:
        return self

    def copy_(self, source: Tensor, *, non_blocking: bool = False) -> None:
        return


class NoModel:
    """A model that computes nothing."""

    def __init__(self, vocab: int) -> None:
        self.spec = SimpleNamespace(
            vocab=vocab,
            kv_shapes=(KVShape(1, 1, 1),),
            state_shapes=(),
            token_types=1,
            bidirectional=False,
            generates=True,
            recurrent=False,
            near=0,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


# ---------------------------------------------------------------- one engine, and batches of requests


class Asked(NamedTuple):
    """A request, the constraint of its answer, and what reads its outputs."""

    call: Call
    request: Request
    constraint: Constraint
    processor: OutputProcessor
    deltas: list[Delta]


class Host:
    """An engine over the double, and what `LLM` does around it."""

    def __init__(self, tokenizer: Tokenizer, sequences: int, card: Card, length: int = 4096) -> None:
        self.card, self.tokenizer, self.length = card, tokenizer, length
        self.vocab = tokenizer.vocab_size
        self.steps = Scripted(card)
        rows, blocks = 2 * sequences, 16 * sequences + 64
        executor = CudaExecutor(
            cast(Model, NoModel(self.vocab)),
            pages=blocks,
            page_size=BLOCK,
            rows=rows,
            max_model_len=length,
            tokens=8192,
            dtype=torch.float32,
            device=torch.device("cpu"),
            steps=self.steps,
            queue=card,
        )
        runner = executor.runner
        runner.state.masks = cast(Tensor, Nowhere())
        runner.hidden = torch.zeros(runner.state.max_samples, 1)
        runner.every = torch.zeros(len(runner.batch.tokens), 1)
        runner.scores.numpy()[:] = self.steps.scored[: len(runner.scores)]
        card.on_sample = lambda key: self.steps.draw(runner.state, runner.state.step, runner.tokens[: key.tokens])
        self.scheduler = Scheduler(
            KVCacheManager(blocks, BLOCK, make_prefix_cache(BLOCK, True)),
            rows=rows,
            max_num_seqs=sequences,
            max_num_batched_tokens=8192,
            policy=SchedulingPolicy(pressure="foresee"),
            compute_masks=ParallelMasks(),
        )
        self.engine = Engine(
            self.scheduler, executor, lookahead=1, clock=card, step_budget=LatencyController(0.1), keep=0
        )
        self.compiler = LlguidanceCompiler(lambda: tokenizer)
        self.grammars: dict[str, Callable[[], Constraint]] = {}
        self.scripts: dict[str, Ints] = {}
        self.names = itertools.count()
        self.steady: Callable[[Callable[[], int]], int] = lambda step: step()
        """Runs a step in which all sequences decode, and none comes or goes."""

    def constraint(self, name: str) -> Constraint:
        """A constraint for a new sequence of a feature."""
        form = FEATURES[name].structure if name in FEATURES else None
        if form is None:
            return FREE
        if name not in self.grammars:
            self.grammars[name] = self.compiler(form(0))
        return self.grammars[name]()

    def script(self, name: str, most: int) -> Ints:
        """Answers [8, most] that a feature's structure allows, chosen at random; the same for all without one."""
        key = name if self.constraint(name) is not FREE else ""
        if key not in self.scripts or self.scripts[key].shape[1] < most:
            random = np.random.default_rng(3)
            made = random.integers(*usual_ids(self.vocab), (8, most)).astype(np.int32)
            for line in made if key else ():
                constraint, tokens = self.constraint(name), list[int]()
                for at in range(most):
                    mask = np.frombuffer(constraint.masks(tokens, ())[0] or b"", np.uint8)
                    line[at] = random.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")))
                    tokens.append(int(line[at]))
            self.scripts[key] = made
        return self.scripts[key]

    def batch(self, size: int, turn: int, prompt: tuple[int, int], new: tuple[int, int]) -> Batch:
        """Random requests. What their features name of plain answers is not in those of the double."""
        ids, lengths = prompts(size, prompt, new, seed=1000 * size + turn, ids=usual_ids(self.vocab))
        answers = [tuple(range(300 + i % 500, 300 + i % 500 + n)) for i, n in enumerate(lengths)]
        return Batch(ids, lengths, turn, self.vocab, answers)

    def run(self, name: str, batch: Batch) -> Row:
        """Answer a batch with a feature, "plain" for none.

        step_us: of a step in which all decode, with what reads its outputs: the first decile, since other processes,
        which share the caches, only add. text_us: of that, what reads outputs. all_ms: from prompts to outputs.
        clock_s: the same on the double's clock.
        """
        feature, card, engine = FEATURES.get(name, PLAIN), self.card, self.engine
        structure = feature.structure and feature.structure(0)
        self.steps.script = self.script(name, max(batch.new))
        fields = [{"structured_outputs": structure, **feature.fields(batch, i)} for i in range(len(batch.new))]
        asked = [(ids, params(n, **more)) for ids, n, more in zip(batch.prompts, batch.new, fields, strict=True)]
        engine.reset_prefix_cache()
        began, clock = card.host(), card.now()
        jobs = {job.request.id: job for ids, sampling in asked for job in self.jobs(name, ids, sampling)}
        for job in jobs.values():
            engine.add(job.request, job.constraint)
        steps, texts, done = list[float](), list[float](), list[RequestOutput]()

        def step() -> int:
            before = card.host()
            outputs = engine.step()
            made = card.host()
            ended = read(jobs, outputs)
            done.extend([request_output(job.call, [job.deltas], self.tokenizer) for job in ended])
            if all_run and not ended and len(outputs) == len(jobs):
                texts.append(card.host() - made)
                steps.append(card.host() - before)
            return len(ended)

        while engine.has_pending_work:
            all_run = len(self.scheduler.running) == len(jobs) and not self.scheduler.waiting
            (self.steady if all_run else call)(step)
        ended, clock_end = card.host(), card.now()
        made = sorted(len(each.outputs[0].token_ids) for each in done)
        assert made == sorted(batch.new), f"an answer to {name} ended early"
        return {
            "step_us": 1e6 * least(steps),
            "text_us": 1e6 * least(texts),
            "all_ms": 1e3 * (ended - began),
            "clock_s": clock_end - clock,
        }

    def jobs(self, name: str, ids: list[int], sampling: SamplingParams) -> list[Asked]:
        """What `LLM` makes of a prompt."""
        call = Call(id=f"{next(self.names)}", prompt=tuple(ids), text=None, sampling=sampling)
        stops = StopStrings(sampling.stop)
        return [
            Asked(
                call, request, self.constraint(name), output_processor(request, self.tokenizer, stops, whole=True), []
            )
            for request in requests(call, tokenizer=self.tokenizer, limit=self.length, seed=0)
        ]


def least(seconds: Sequence[float]) -> float:
    """The first decile; 0: there are too few."""
    return statistics.quantiles(seconds, n=10)[0] if len(seconds) > 1 else 0.0


def call(step: Callable[[], int]) -> int:
    return step()


def read(jobs: Mapping[str, Asked], outputs: Sequence[RequestStepOutput]) -> list[Asked]:
    """What `LLM` does with the outputs of a step, in the engine's thread; the answers that ended."""
    ended = list[Asked]()
    for event in outputs:
        job = jobs[event.id]
        delta = job.processor.process(event)
        if delta is not None:
            job.deltas.append(delta)
            if delta.finish_reason is not None:
                ended.append(job)
    return ended


def text_of(folder: Path, vocab: int) -> Tokenizer:
    """The tokenizer of `benchmarks.price`, whose masks were measured on a card."""
    byte_words(vocab).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": vocab - 2, "eos_token_id": vocab - 1}))
    return Tokenizer.from_folder(folder)


# ---------------------------------------------------------------- the command

PAIR: Mapping[str, Any] = {"nargs": 2, "type": float, "show_default": True}
SPAN: Mapping[str, Any] = {"nargs": 2, "type": int, "show_default": True}


@click.command("host")
@click.option("--size", "sizes", multiple=True, type=int, default=SIZES, show_default=True, help="Sequences at once.")
@click.option("--feature", "names", multiple=True, type=click.Choice(MEASURED), default=MEASURED, help="Only these.")
@click.option("--repeat", default=3, show_default=True, help="Turns; medians count.")
@click.option("--prompt", default=(100, 300), help="Prompt tokens.", **SPAN)
@click.option("--new", default=(60, 90), help="New tokens.", **SPAN)
@click.option("--forward", default=(1.0, 0.01), help="Milliseconds of the card's forward, and for each token.", **PAIR)
@click.option("--head", default=(0.15, 0.003), help="Milliseconds of its sampling, and for each row.", **PAIR)
@click.option("--slower", default=1.0, show_default=True, help="How much slower the host beside the card is than this.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store the rows there.")
def command(
    sizes: Sequence[int],
    names: Sequence[str],
    repeat: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    forward: tuple[float, float],
    head: tuple[float, float],
    slower: float,
    path: Path | None,
) -> None:
    """Measure the host's work of features, in turns with plain requests."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = text_of(Path(folder), VOCAB)
    host = Host(tokenizer, max(sizes), Card(forward, head, slower))
    heap.settled()
    rows: list[Row] = []
    for size in sizes:
        found: dict[str, list[Row]] = {}
        for turn in range(repeat):
            batch = host.batch(size, turn, prompt, new)
            short = replace(batch, prompts=[ids[: prompt[0]] for ids in batch.prompts])
            for name in (PLAIN_SHORT, "plain", *names):
                gc.collect()
                found.setdefault(name, []).append(host.run(name, short if reference(name) == PLAIN_SHORT else batch))
        rows += [compared(name, size, turns, found[reference(name)]) for name, turns in found.items()]
    show(rows)
    if path:
        path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


def reference(name: str) -> str:
    """The plain requests that a feature is compared with: `prompt_logprobs` has short prompts."""
    return PLAIN_SHORT if name == PLAIN_SHORT or FEATURES.get(name, PLAIN).short else "plain"


def compared(name: str, size: int, turns: Sequence[Row], plain: Sequence[Row]) -> Row:
    """Medians of turns, and of ratios to plain requests of the same turn: of host time, and of speed on the clock."""
    pairs = [*zip(turns, plain, strict=True)]
    row = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
    row["step_ratio"] = statistics.median(a["step_us"] / b["step_us"] for a, b in pairs)
    row["all_ratio"] = statistics.median(a["all_ms"] / b["all_ms"] for a, b in pairs)
    row["speed"] = statistics.median(b["clock_s"] / a["clock_s"] for a, b in pairs)
    return {"feature": name, "size": size, **{key: round(value, 3) for key, value in row.items()}}


def show(rows: Sequence[Row]) -> None:
    table = Table(title="the host's work", title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "feature" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    command()
