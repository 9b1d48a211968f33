"""Steps of both runners as written down: what is sent to the device, what is run, what rows then hold, and results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.engine import Engine
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.device_steps import TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue, Works
from quire.model_runner.lookahead_runner import LookaheadRunner
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.sampling.features import COLUMNS
from quire.model_runner.speculative import (
    Drafter,
    ModelDrafter,
    ModelProposer,
    NgramDrafter,
    NgramProposer,
    Proposer,
)
from quire.scheduler.constraint import FREE
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Plan, Result
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import Request, SamplingParams, TokenLogprobs
from tests.executors.driver import Alternate
from tests.expected import check
from tests.model_runner.tiny import POISON, VOCAB, Tiny

EXPECTED = Path(__file__).parent / "expected"
PAGES, SIZE, ROWS, LONGEST = 60, 4, 6, 22
MODEL, DRAFT = Tiny(), Tiny(1)


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **fields})


ASKED: tuple[tuple[SamplingParams, int, int], ...] = (
    (sampled(), 3, 6),
    (sampled(temperature=1.2, logprobs=2), 9, 5),
    (sampled(logprobs=40, prompt_logprobs=2, min_tokens=3, bad_words_token_ids=((3,), (7, 9))), 13, 4),
    (sampled(temperature=1.1, top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.4), 6, 7),
    (sampled(logit_bias={4: 3.0, 11: -5.0}, allowed_token_ids=tuple(range(2, 52))), 5, 4),
    (sampled(presence_penalty=0.6, frequency_penalty=0.3, prompt_logprobs=-1, logprobs=0), 11, 3),
    (sampled(), 16, 6),
    (sampled(pooling="mean"), 12, 1),
    (sampled(pooling="last"), 7, 1),
    (sampled(temperature=0.7, prompt_logprobs=1, logprobs=1), 12, 4),
)
MASKED = {"0", "3"}
"""Requests with a grammar, where there are masks."""


def requests(*, poisoned: bool = False) -> list[Request]:
    """Of every feature; prompts 0 and 6 repeat themselves, 5 and 9 begin alike. poisoned: one has no number."""
    out = []
    for i, (sampling, length, new) in enumerate(ASKED):
        step = 0 if i in (5, 9) else 7 * i
        period = 3 if i in (0, 6) else VOCAB
        prompt = tuple((step + 3 * (at % period)) % (VOCAB - 1) for at in range(length))
        if poisoned and i == 4:
            prompt = (*prompt[:-1], POISON)
        stop = frozenset({17, 34}) if i % 2 else frozenset[int]()
        out.append(
            Request(
                id=str(i), prompt=prompt, max_new_tokens=new, sampling=sampling, stop=stop, seed=i - 5, choice=i % 2
            )
        )
    return out


class Queue(WorkQueue):
    """Writes down what is run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def precompile(self, works: Works) -> None:
        self.ran.append(f"compiles {len(works)}")

    def prepare(self, key: GraphKey, work: Any) -> None:
        self.ran.append("prepares")
        super().prepare(key, work)

    def run(self, key: GraphKey, work: Any) -> None:
        self.ran.append("x".join(map(str, key[:3])) + f" {key.kind} {key.features}")
        work()


class Recorded:
    """An executor whose steps are written down."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor, self.lines, self.count = executor, list[str](), 0
        self.queue = getattr(executor.runner, "queue", None)
        if isinstance(executor.runner, LookaheadRunner):
            state, scatter = executor.runner.state, executor.runner.steps.scatter
            self.lines += [f"{name} at {state.offsets[name]}: {size}" for name, size in state.sizes.items()]

            def noted(data: Tensor, places: Tensor, values: Tensor) -> None:
                self.lines += sent(state.offsets, places.tolist(), values.tolist())
                scatter(data, places, values)

            executor.runner.steps.scatter = noted  # type: ignore[method-assign]

    def describe(self) -> Any:
        return self.executor.describe()

    def launch(self, plan: Plan) -> Any:
        self.count += 1
        self.lines += ["", f"step {self.count}", *plan_lines(plan)]
        handle = self.executor.launch(plan)
        self._ran()
        return Handle(self, handle, self.count)

    def _ran(self) -> None:
        if isinstance(self.queue, Queue) and self.queue.ran:
            self.lines.append(f"ran {', '.join(self.queue.ran)}")
            self.queue.ran.clear()

    def rows(self) -> None:
        rows, runner = self.executor.runner.rows, self.executor.runner
        for name in ("num_blocks", "num_known", "num_computed", "num_drafted", "is_new"):
            self.lines.append(f"  {name} {getattr(rows, name).astype(int).tolist()}")
        self.lines += [
            f"  {r}: {rows.tokens[r, : n + rows.num_drafted[r]].tolist()}" for r, n in enumerate(rows.num_known) if n
        ]
        if isinstance(runner, LookaheadRunner):
            columns = runner.state.columns
            for name in ("known", "length", "done"):
                self.lines.append(f"  device {name} {columns[name][:ROWS].tolist()}")

    def reset(self) -> None:
        self.lines.append("reset")
        self.executor.reset()

    def close(self) -> None:
        self.executor.close()


class Handle:
    def __init__(self, recorded: Recorded, handle: Any, number: int) -> None:
        self.recorded, self.handle, self.number = recorded, handle, number

    def sample(self, masks: Any) -> None:
        lines = self.recorded.lines
        lines.append(f"masks of step {self.number}: {[[m and m.hex() for m in span] for span in masks]}")
        self.handle.sample(masks)
        if isinstance(runner := self.recorded.executor.runner, LookaheadRunner):
            state = runner.state
            lines.append(f"  device masks {state.mask_index.tolist()} of {state.mask_words.tolist()} words")
        self.recorded._ran()

    def is_done(self) -> bool:
        return bool(self.handle.is_done())

    def result(self) -> Result:
        lines = self.recorded.lines
        try:
            result: Result = self.handle.result()
        except Exception as error:
            lines.append(f"step {self.number} failed: {type(error).__name__}: {error}")
            raise
        lines += [f"result of step {self.number}", *result_lines(result)]
        self.recorded.rows()
        return result


def sent(offsets: dict[str, int], places: Sequence[int], values: Sequence[int]) -> list[str]:
    """What is scattered, by the array that it goes to; addresses differ from run to run."""
    names, begins = [*offsets], [*offsets.values()]
    lines: list[str] = []
    last = ("", -2)
    # The upper half of an address may be 0, where an interpreter's heap is in the first 4 GiB.
    pointers: set[int] = set()
    for place, value in zip(places, values, strict=True):
        at = int(np.searchsorted(begins, place, side="right")) - 1
        name, index = names[at], place - begins[at]
        if name in COLUMNS and not COLUMNS[name].is_integer:
            shown = f"{np.array([value], np.int32).view(np.float32)[0]:g}"
        elif name in ("lists_low", "lists_high") and (value or index in pointers):
            shown = "address"
            pointers.add(index)
        else:
            shown = str(value)
        if (name, index) == (last[0], last[1] + 1):
            lines[-1] += f" {shown}"
        else:
            lines.append(f"  sent {name}[{index}]: {shown}")
        last = name, index
    return lines


def plan_lines(plan: Plan) -> list[str]:
    opened = [f"  opens {one.row} for {len(one.tokens)}, {one.num_computed} computed" for one in plan.new_sequences]
    spans = " ".join(f"{s.row}:{s.num_tokens}/{s.num_samples}/{s.num_logits}" for s in plan.spans)
    return [
        *opened,
        f"  blocks {plan.new_blocks} spans {spans} masked {plan.masked_spans} drafts {plan.num_drafts}",
    ]


def score(one: TokenLogprobs) -> str:
    top = " ".join(f"{token}={value:.3f}" for token, value in one.top[:4])
    return f"{one.token}={one.logprob:.3f} rank {one.rank} of {len(one.top)} {top}"


def result_lines(result: Result) -> list[str]:
    lines = [f"  tokens {result.tokens} drafts {result.draft_tokens}"]
    for name, scores in (("", result.logprobs), ("prompt ", result.prompt_logprobs)):
        lines += [f"  {name}scores {s}: {score(one)}" for s, all_of in scores.items() for one in all_of]
    lines += [f"  error {s}: {why}" for s, why in result.errors.items()]
    for s, vector in result.pooled.items():
        lines.append(f"  vector {s}: {np.frombuffer(vector, '<f4').round(3).tolist()}")
    return lines


def run(executor: LocalExecutor, asked: Sequence[Request], *, lookahead: int, masked: bool = False) -> str:
    recorded = Recorded(executor)
    about = executor.describe()
    scheduler = Scheduler(
        KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, True)),
        rows=about.num_rows,
        max_num_seqs=about.num_rows // (1 + about.lookahead),
        max_num_batched_tokens=16,
        max_chunk_tokens=5,
        speculation=FixedDrafts(about.num_drafts),
    )
    engine = Engine(scheduler, recorded, lookahead=lookahead)
    lines = recorded.lines
    lines.insert(0, str(about))
    for request in asked:
        engine.add(request, Alternate() if masked and request.id in MASKED else FREE)
    while engine.has_pending_work:
        for event in engine.step():
            lines.append(f"{event.id} has {list(event.tokens)} {event.finish or ''} {event.error or ''}".rstrip())
    lines.append("closing")
    engine.close()
    lines.append(f"in flight {len(executor.runner.inflight)}, pools {len(executor.runner.kv)}")
    recorded.rows()
    return "\n".join(lines)


def on_host(drafter: Drafter | None) -> LocalExecutor:
    return LocalExecutor(
        MODEL, pages=PAGES, page_size=SIZE, rows=ROWS, max_model_len=LONGEST, dtype=torch.float64, drafter=drafter
    )


def on_device(proposer: Proposer | None, depth: int) -> CudaExecutor:
    return CudaExecutor(
        MODEL,
        pages=PAGES,
        page_size=SIZE,
        rows=ROWS,
        max_model_len=LONGEST,
        tokens=16,
        dtype=torch.float64,
        device=torch.device("cpu"),
        steps=TorchSteps(),
        queue=Queue(),
        proposer=proposer,
        depth=depth,
        warm=[GraphKey(16, 16, 16), GraphKey(4, 4, 1), GraphKey.head(4, 0)],
    )


def draft_pools() -> Any:
    return allocate(layer_shapes(DRAFT.spec.kv_shapes, torch.float64), pages=PAGES, page_size=SIZE)


def model_drafter() -> ModelDrafter:
    return ModelDrafter(DRAFT, draft_pools(), vocab_size=VOCAB, num_drafts=2, rows=ROWS, device=torch.device("cpu"))


def model_proposer() -> ModelProposer:
    return ModelProposer(DRAFT, draft_pools(), num_drafts=2, rows=ROWS, device=torch.device("cpu"))


RUNS: dict[str, Any] = {
    "host": lambda: run(on_host(None), requests(), lookahead=0, masked=True),
    "host-ahead-ngram": lambda: run(on_host(NgramDrafter(3, shortest=1)), requests(), lookahead=1, masked=True),
    "host-drafted": lambda: run(on_host(model_drafter()), requests(), lookahead=0, masked=True),
    "host-broken": lambda: run(on_host(None), requests(poisoned=True), lookahead=1),
    "device": lambda: run(on_device(None, 2), requests(), lookahead=2, masked=True),
    "device-ngram": lambda: run(on_device(NgramProposer(3, shortest=1), 1), requests(), lookahead=1, masked=True),
    "device-drafted": lambda: run(on_device(model_proposer(), 1), requests(), lookahead=1, masked=True),
    "device-broken": lambda: run(on_device(None, 1), requests(poisoned=True), lookahead=1),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_runners_steps_are_as_written_down(name: str) -> None:
    check(EXPECTED / f"steps-{name}.txt", RUNS[name]())
