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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.price import FEATURES, Batch, Row, json_schema, params, regex, tools, usual_ids
from benchmarks.shapes import byte_words
from benchmarks.workloads import prompts
from quire import heap
from quire.bench.monitor import environment
from quire.engine.engine import Engine
from quire.engine.timing import LatencyController
from quire.executors.local import CudaExecutor
from quire.frontend.interface import Call, Delta
from quire.frontend.outputs import request_output
from quire.frontend.processor import output_processor, requests
from quire.model_runner.device_state import DeviceState, StepInputs
from quire.model_runner.device_steps import SCORE_WIDTH, TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.sampling.features import MAX_LOGPROBS
from quire.models.registry import Model
from quire.ops.ragged import KVShape
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.structured_output.llguidance import LlguidanceCompiler, ParallelMasks
from quire.tokenization.detokenizer import StopStrings
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, RequestStepOutput, StructuredOutputsParams

Ints = npt.NDArray[np.int32]

VOCAB = 151_936
SIZES = (1, 16, 64, 256)
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

FORMS: Mapping[str, Callable[[int], StructuredOutputsParams]] = {
    "JSON schema": json_schema,
    "regex": regex,
    "tools": tools,
}


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
        self.scored[:, 1:] = random.integers(1, VOCAB, self.scored[:, 1:].shape)
        floats = self.scored.view(np.float32)
        floats[:, 0] = floats[:, 2 + MAX_LOGPROBS :] = -random.random()
        floats[:, 2 + MAX_LOGPROBS :] = -np.sort(random.random(floats[:, 2 + MAX_LOGPROBS :].shape))

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


class NoModel:
    """A model that computes nothing."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(
            vocab=VOCAB,
            kv_shapes=(KVShape(1, 1, 1),),
            state_shapes=(),
            token_types=1,
            bidirectional=False,
            generates=True,
            recurrent=False,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


# ---------------------------------------------------------------- one engine, and batches of requests


class Host:
    """An engine over the double, and what `LLM` does around it."""

    def __init__(self, tokenizer: Tokenizer, sequences: int, card: Card, length: int = 4096) -> None:
        self.card, self.tokenizer, self.length = card, tokenizer, length
        self.steps = Scripted(card)
        rows = 2 * sequences
        executor = CudaExecutor(
            cast(Model, NoModel()),
            pages=rows * 16,
            page_size=64,
            rows=rows,
            max_model_len=length,
            tokens=8192,
            dtype=torch.float32,
            device=torch.device("cpu"),
            steps=self.steps,
            queue=card,
        )
        runner = executor.runner
        # Masks are copied to pinned memory's other side by the card.
        runner.state.masks = runner.state.masks.to("meta")
        runner.hidden = torch.zeros(runner.state.max_samples, 1)
        runner.every = torch.zeros(len(runner.batch.tokens), 1)
        runner.scores.numpy()[:] = self.steps.scored[: len(runner.scores)]
        card.on_sample = lambda key: self.steps.draw(runner.state, runner.state.step, runner.tokens[: key.tokens])
        self.masks = ParallelMasks()
        self.scheduler = Scheduler(
            KVCacheManager(rows * 16, 64, make_prefix_cache(64, True)),
            rows=rows,
            max_num_seqs=sequences,
            max_num_batched_tokens=8192,
            compute_masks=self.masks,
        )
        self.engine = Engine(
            self.scheduler, executor, lookahead=1, clock=card, step_budget=LatencyController(0.1), keep=0
        )
        self.compiler = LlguidanceCompiler(lambda: tokenizer)
        self.made: dict[str, Callable[[], Constraint]] = {}
        self.scripts: dict[str, Ints] = {}
        self.names = itertools.count()

    def constraint(self, name: str) -> Constraint:
        """A constraint for a new sequence of a feature."""
        if name not in FORMS:
            return FREE
        if name not in self.made:
            self.made[name] = self.compiler(FORMS[name](0))
        return self.made[name]()

    def script(self, name: str, most: int) -> Ints:
        """Answers [8, most] that a feature's structure allows, chosen at random."""
        key = name if name in FORMS else ""
        if key not in self.scripts:
            random = np.random.default_rng(3)
            made = random.integers(1000, min(50000, VOCAB), (8, most)).astype(np.int32)
            for line in made if key else ():
                constraint, tokens = self.constraint(name), list[int]()
                for at in range(most):
                    mask = np.frombuffer(constraint.masks(tokens, ())[0] or b"", np.uint8)
                    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
                    tokens.append(int(random.choice(allowed)))
                    line[at] = tokens[-1]
            self.scripts[key] = made
        return self.scripts[key]

    def run(self, name: str, batch: Batch) -> Row:
        """Answer a batch with a feature, "plain" for none.

        step_us: of a step in which all decode, and none comes or goes; the median, with what follows it. text_us: of
        that, output processing. all_ms: from the calls to the outputs. clock_s: on the double's clock. read_ms: reading
        all log-probabilities afterwards.
        """
        feature, card, engine, size = FEATURES.get(name), self.card, self.engine, len(batch.new)
        most = max(batch.new)
        self.steps.script = self.script(name, most)
        engine.reset_prefix_cache()
        before, clock = card.host(), card.now()
        asked = (
            [
                (
                    batch.prompts[i],
                    params(
                        batch.new[i],
                        **(feature.fields(batch, i) if feature else {}),
                        structured_outputs=FORMS[name](0) if name in FORMS else None,
                    ),
                )
                for i in range(size)
            ]
            if False
            else self.asked(name, batch)
        )
        before, clock = card.host(), card.now()
        readers = self.submit(name, asked)
        submitted = card.host()
        steps, texts = list[float](), list[float]()
        while engine.has_pending_work:
            began, steady = card.host(), len(self.scheduler.running) == size and not self.scheduler.waiting
            outputs = engine.step()
            stepped = card.host()
            ended = self.read(readers, outputs)
            if steady and len(outputs) == size and not ended:
                texts.append(card.host() - stepped)
                steps.append(card.host() - began)
        done = [request_output(call, [deltas]) for call, deltas in self.calls]
        after, clock_end = card.host(), card.now()
        assert all(len(each.outputs[0].token_ids) == n for each, n in zip(done, batch.new, strict=True)), name
        for each in done:
            _ = (
                [one.top for one in each.outputs[0].logprobs or ()],
                [one and one.top for one in each.prompt_logprobs or ()],
            )
        read = card.host()
        steps, texts = steps[2:], texts[2:]
        return {
            "step_us": 1e6 * statistics.median(steps) if steps else 0.0,
            "text_us": 1e6 * statistics.median(texts) if texts else 0.0,
            "submit_ms": 1e3 * (submitted - before),
            "all_ms": 1e3 * (after - before),
            "clock_s": clock_end - clock,
            "read_ms": 1e3 * (read - after),
        }

    def asked(self, name: str, batch: Batch) -> list[tuple[list[int], Any]]:
        feature = FEATURES.get(name)
        structure = FORMS[name](0) if name in FORMS else None
        return [
            (
                batch.prompts[i],
                params(n, structured_outputs=structure, **(feature.fields(batch, i) if feature else {})),
            )
            for i, n in enumerate(batch.new)
        ]

    def submit(self, name: str, asked: Sequence[tuple[list[int], Any]]) -> dict[str, tuple[Any, list[Delta]]]:
        """What `LLM` does with prompts."""
        readers: dict[str, tuple[Any, list[Delta]]] = {}
        self.calls: list[tuple[Call, list[Delta]]] = []
        queued: list[tuple[Request, Constraint]] = []
        for ids, sampling in asked:
            call = Call(id=f"{next(self.names)}", prompt=tuple(ids), text=None, sampling=sampling)
            stops = StopStrings(sampling.stop)
            for request in requests(call, tokenizer=self.tokenizer, limit=self.length, seed=0):
                deltas: list[Delta] = []
                self.calls.append((call, deltas))
                readers[request.id] = output_processor(request, self.tokenizer, stops), deltas
                queued.append((request, self.constraint(name)))
        for request, constraint in queued:
            self.engine.add(request, constraint)
        return readers

    def read(self, readers: dict[str, tuple[Any, list[Delta]]], outputs: Sequence[RequestStepOutput]) -> int:
        """What `LLM`'s readers do with the outputs of a step; how many answers ended."""
        ended = 0
        for event in outputs:
            processor, deltas = readers[event.id]
            delta = processor.process(event)
            if delta is not None:
                deltas.append(delta)
                ended += delta.finish_reason is not None
        return ended


# ---------------------------------------------------------------- the command


@click.command("host")
@click.option("--size", "sizes", multiple=True, type=int, default=SIZES, show_default=True, help="Sequences at once.")
@click.option("--feature", "names", multiple=True, type=click.Choice(MEASURED), default=MEASURED, help="Only these.")
@click.option("--repeat", default=3, show_default=True, help="Turns; medians count.")
@click.option("--prompt", nargs=2, type=int, default=(100, 300), show_default=True, help="Prompt tokens.")
@click.option("--new", nargs=2, type=int, default=(60, 90), show_default=True, help="New tokens.")
@click.option(
    "--forward",
    nargs=2,
    type=float,
    default=(1.0, 0.01),
    show_default=True,
    help="Of the card: ms, and for each token.",
)
@click.option("--head", nargs=2, type=float, default=(0.15, 0.003), show_default=True, help="ms, and for each row.")
@click.option("--slower", default=1.0, show_default=True, help="How much slower the host beside the card is.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store rows there.")
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
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        byte_words(VOCAB).save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "config.json").write_text('{"eos_token_id": 151645, "bos_token_id": 151643}')
        tokenizer = Tokenizer.from_folder(Path(folder))
    host = Host(tokenizer, max(sizes), Card(forward, head, slower))
    heap.settled()
    rows: list[Row] = []
    for size in sizes:
        found: dict[str, list[Row]] = {}
        for turn in range(repeat):
            ids, lengths = prompts(size, prompt, new, seed=1000 * size + turn, ids=usual_ids(VOCAB))
            answers = [tuple(range(60_000 + 200 * i, 60_000 + 200 * i + n)) for i, n in enumerate(lengths)]
            batch = Batch(ids, lengths, turn, VOCAB, answers)
            short = Batch([each[: prompt[0]] for each in ids], lengths, turn, VOCAB, answers)
            for name in ("plain", "plain, short", *names):
                gc.collect()
                is_short = name == "plain, short" or (name in FEATURES and FEATURES[name].short)
                found.setdefault(name, []).append(host.run(name, short if is_short else batch))
        for name, turns in found.items():
            mid = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
            base = "plain, short" if name in FEATURES and FEATURES[name].short else "plain"
            mid["step_ratio"] = statistics.median(a["step_us"] / b["step_us"] for a, b in zip(turns, found[base]))
            mid["all_ratio"] = statistics.median(a["all_ms"] / b["all_ms"] for a, b in zip(turns, found[base]))
            mid["clock_ratio"] = statistics.median(b["clock_s"] / a["clock_s"] for a, b in zip(turns, found[base]))
            rows.append({"feature": name, "size": size, **{k: round(v, 3) for k, v in mid.items()}})
    show(rows)
    if path:
        path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


def show(rows: Sequence[Row]) -> None:
    table = Table(title="the host's work", title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "feature" else "right")
    for row in rows:
        table.add_row(
            *(
                f"{v:,.3f}" if "ratio" in k or k == "clock_s" else f"{v:,.0f}" if isinstance(v, float) else str(v)
                for k, v in row.items()
            )
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    command()
