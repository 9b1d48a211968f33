"""The executor that runs ahead, on a CPU: the dense loop's answers, whatever the settings and however far ahead."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.errors import StepFailed
from quire.executors.local import CudaExecutor
from quire.model_runner.device_steps import TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.lookahead_runner import MASK_LINES
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.row_state import StepShape
from quire.model_runner.speculative import ModelProposer, NgramProposer, Proposer
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, draft_counts
from quire.scheduler.step_time import StepTimeModel
from quire.types import UNLIMITED, Request, SamplingParams
from tests.executors.driver import LONGEST, MODEL, OPENING, REQUESTS, WANT, Driver, Fragile
from tests.model_runner.tiny import POISON, VOCAB, Tiny
from tests.pairs import pairwise


class Doubtful(Tiny):
    """Nearly the model: often right."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.head + 0.3 * torch.randn(self.head.shape, generator=torch.Generator().manual_seed(1)).double()


class Repeated(NgramProposer):
    """Finds something almost everywhere."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, shortest=1)


class Ending(Tiny):
    """What it makes of positions from `upto` on is no number."""

    def __init__(self, upto: int) -> None:
        super().__init__()
        self.upto = upto

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> torch.Tensor:
        hidden = super().forward(batch, kv)
        return hidden.masked_fill((batch.positions >= self.upto)[:, None], torch.nan)


class Unforeseen(FixedDrafts):
    """A number of drafts that cannot be predicted."""

    def num_drafts(self, seq: Any) -> int:
        return hash((seq.arrival, len(seq.tokens))) % (self.max_drafts + 1)


def proposer(kind: str, *, pages: int, size: int, rows: int) -> Proposer | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return Repeated(3)
    draft = MODEL if kind == "twin" else Doubtful()
    kv = allocate(layer_shapes(draft.spec.kv_shapes, torch.float64), pages=pages, page_size=size)
    return ModelProposer(draft, kv, num_drafts=3, rows=rows, device=torch.device("cpu"))


def executor(
    model: Tiny = MODEL, *, pages: int = 8, size: int = 4, rows: int = 2, length: int = 16, drafts: str = "none"
) -> CudaExecutor:
    return CudaExecutor(
        model,
        pages=pages,
        page_size=size,
        rows=rows,
        max_model_len=length,
        tokens=rows * length,
        dtype=torch.float64,
        device=torch.device("cpu"),
        steps=TorchSteps(),
        queue=WorkQueue(),
        proposer=proposer(drafts, pages=pages, size=size, rows=rows),
        depth=2,
    )


def driver(
    *, size: int = 4, pages: int = 400, model: Tiny = MODEL, drafts: str = "none", lookahead: int = 1, **settings: Any
) -> Driver:
    it = executor(model, pages=pages, size=size, rows=16, length=LONGEST + 1, drafts=drafts)
    return Driver(it, lookahead=lookahead, **settings)


AXES = {
    "lookahead": (0, 1, 2, -1),
    "size": (1, 4, 64),
    "tight": (1, 2, 14),
    "reuse": (False, True),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (9, UNLIMITED)),
    "admit": ("continuous", "static"),
    "max_num_seqs": (3, 16),
    "drafts": ("none", "ngram", "model", "twin"),
    "policy": (FixedDrafts, Unforeseen),
}
COMBOS = [dict(zip(AXES, v, strict=True)) for v in itertools.product(*AXES.values())]


SHARES = [pairwise(AXES), *(random.Random(share).sample(COMBOS, 26) for share in range(8))]


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.nightly) for share in range(1, 9))])
def test_every_combination_gives_the_dense_loops_tokens(share: int) -> None:
    """Every pair of values in CI, and 208 combinations besides."""
    for combo in SHARES[share]:
        settings = dict(combo)
        tight = int(str(settings.pop("tight")))
        it = driver(pages=-(-LONGEST // int(str(settings["size"]))) * tight, **settings)  # type: ignore[arg-type]
        rng = random.Random(str(combo))
        assert it.answer(REQUESTS, late=lambda rng=rng: rng.randrange(3)) == WANT, combo  # type: ignore[misc]
        assert it.scheduler.kv.block_pool.num_free == it.scheduler.kv.block_pool.num_blocks


class Served(WorkQueue):
    """Each step is done by a larger one."""

    def serving(self, key: GraphKey) -> GraphKey:
        tokens, spans = min(2 * key.tokens, 64), min(2 * key.spans, 16)
        return key._replace(tokens=tokens, spans=spans, max_query=1 if key.max_query == 1 else tokens)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_that_larger_ones_serve_give_the_same_tokens(depth: int) -> None:
    it = driver(lookahead=depth, feed=(16, 5))
    it.executor.runner.queue = Served()
    assert it.answer(REQUESTS, late=lambda: 1) == WANT


class Swinging(FixedDrafts):
    """Another depth for each token, and not one for all rows of a step."""

    def num_drafts(self, seq: Any) -> int:
        return (len(seq.tokens) + seq.arrival) % (self.max_drafts + 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", [FixedDrafts, Unforeseen, Swinging])
def test_every_change_of_the_number_of_drafts_reaches_the_device(depth: int, policy: type[FixedDrafts]) -> None:
    """Answers do not tell: they are the same whatever was drafted."""
    it = driver(lookahead=depth, drafts="ngram", policy=policy)
    runner, asked, heard = it.executor.runner, list[list[int]](), list[list[int]]()
    launch = runner._launch

    def launched(step: Any) -> None:
        launch(step)
        if any(step.plan.num_drafts):
            asked.append([d for span, d in zip(step.plan.spans, step.plan.num_drafts, strict=True) if span.num_samples])
            heard.append(runner.state.wanted_drafts[: len(asked[-1])].tolist())

    runner._launch = launched  # type: ignore[method-assign]
    it.answer([Request(id=str(i), prompt=(3, 1, i), max_new_tokens=30) for i in range(4)])
    assert heard == asked and len({*map(tuple, asked)}) > (0 if policy is FixedDrafts else 3)


def test_a_row_with_nan_logits_fails_alone() -> None:
    it = driver(lookahead=1, feed=(UNLIMITED, 7))
    sick = [Request(id=f"sick-{i}", prompt=(*range(i), POISON), max_new_tokens=5) for i in (0, 5, 20)]
    mixed = [r for pair in itertools.zip_longest(REQUESTS, sick) for r in pair if r]
    answers = it.answer(mixed, late=lambda: 2)
    assert {id: answers[id] for id in WANT} == WANT
    for each in sick:
        assert answers[each.id] == []
        assert it.events[each.id][-1].error == "the model produced NaN or infinite logits"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_failure_in_drafts_past_the_limit_fails_no_request(depth: int) -> None:
    it = driver(lookahead=depth, drafts="twin", model=Ending(9 + 11 - 1))
    answers = it.answer([Request(id="it", prompt=tuple(range(9)), max_new_tokens=11)])
    assert answers == driver().answer([Request(id="it", prompt=tuple(range(9)), max_new_tokens=11)])
    assert it.events["it"][-1].finish == "length"


@pytest.mark.parametrize("drafts", ["none", "twin"])
@pytest.mark.parametrize("upto", [9, 13, 14, 15, 16, 17])
def test_tokens_before_a_failure_are_returned_with_and_without_drafts(upto: int, drafts: str) -> None:
    it = driver(drafts=drafts, model=Ending(upto))
    answers = it.answer([Request(id="it", prompt=tuple(range(9)), max_new_tokens=11)])
    whole = driver().answer([Request(id="it", prompt=tuple(range(9)), max_new_tokens=11)])
    assert answers["it"] == whole["it"][: upto - 8]
    assert it.events["it"][-1].error == "the model produced NaN or infinite logits"


def test_a_failed_step_fails_only_the_request_that_causes_it() -> None:
    harmless = [r for r in REQUESTS if 13 not in (*r.prompt, *WANT[r.id])]
    it = driver(lookahead=1, model=Fragile())
    answers = it.answer([*harmless[:3], Request(id="bad", prompt=(1, 13, 2), max_new_tokens=4), *harmless[3:]])
    assert {r.id: answers[r.id] for r in harmless} == {r.id: WANT[r.id] for r in harmless}
    assert "could not run this request" in str(it.events["bad"][-1].error)


def test_a_failure_keeps_its_cause_and_lasts_until_reset() -> None:
    it = executor(Fragile())
    failed = it.launch(Plan((NewSequence(0, (13,), 0, 1),), ((0, (5,)),), (Span(0, 1, 1, 1),)))
    with pytest.raises(StepFailed, match=r"^the step failed: a kernel failed$") as caught:
        failed.result()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(StepFailed, match="a kernel failed"):
        it.launch(OPENING).result()
    it.reset()
    assert it.launch(OPENING).result().tokens == [[int(MODEL.dense((1, 2, 3))[-1].argmax())]]


def generated(it: CudaExecutor, prompt: tuple[int, ...], steps: int = 3) -> list[list[int]]:
    """What each step brings for a prompt in row 0: tokens that are sampled, with as many drafts as there can be."""
    drafts, size = it.describe().num_drafts, len(prompt)
    first = Plan((NewSequence(0, prompt, 0, size),), ((0, (1, 2, 3, 4)),), (Span(0, size, 1, 1),), num_drafts=(drafts,))
    later = Plan((), (), (Span(0, 1 + drafts, 1 + drafts, 1 + drafts),), num_drafts=(drafts,))
    return [it.launch(plan).result().tokens[0] for plan in (first, *[later] * (steps - 1))]


@pytest.mark.parametrize("drafts", ["none", "ngram", "twin"])
def test_after_a_reset_answers_and_drafts_are_as_at_first(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step that is the same as the one before the reset has the same arrays on the host, object and all:
    the device has forgotten them."""
    prompt, kept = (1, 2, 1, 2, 1), {}
    it, want = executor(drafts=drafts), generated(executor(drafts=drafts), prompt)
    assert drafts != "twin" or len(want[1]) == 4, "every draft is right"

    def admit(plan: Plan) -> Any:
        return kept.setdefault(plan.spans, admitted(plan))

    admitted = it.runner.rows.apply_changes
    monkeypatch.setattr(it.runner.rows, "apply_changes", admit)
    for steps in (1, 3, 2):
        assert generated(it, prompt, steps) == want[:steps]
        if steps == 3:
            it.launch(Plan((), (), (Span(0, 1, 1, 1),)))  # its result is never asked for
        it.reset()
    assert generated(it, prompt) == want


def test_a_reset_forgets_rows_and_what_is_pooled() -> None:
    it, mean = executor(), SamplingParams(pooling="mean")
    chunk = Plan((NewSequence(0, (1, 2, 3), 0, 3, mean),), ((0, (5,)),), (Span(0, 2, 0, 0),))
    it.launch(chunk).result()
    shape = StepShape.of(chunk.spans)
    assert it.runner.pool.wants_all(shape)
    it.reset()
    assert not it.runner.pool.wants_all(shape)
    with pytest.raises(StepFailed, match="plan and rows disagree"):
        it.launch(Plan((), (), (Span(0, 1, 1, 1),))).result()


def test_after_a_reset_a_draft_model_has_missed_nothing() -> None:
    it = executor(drafts="twin")
    generated(it, (1, 2, 3), steps=1)
    it.launch(Plan((), (), (Span(0, 1, 1, 1),))).result()  # without drafts
    assert isinstance(it.runner.proposer, ModelProposer)
    assert it.runner.proposer.num_missing.any()
    it.reset()
    assert not it.runner.proposer.num_missing.any()


def test_a_reset_waits_for_the_device_before_it_clears_what_steps_read(monkeypatch: pytest.MonkeyPatch) -> None:
    it, held = executor(), []
    generated(it, (1, 2, 3))
    monkeypatch.setattr(
        it.runner.queue, "synchronize", lambda: held.append(bool(it.runner.state.columns["known"].any()))
    )
    it.reset()
    assert held == [True]
    assert not it.runner.state.columns["known"].any()


class Far:
    """A point in the order of work that is passed when it is waited for, unless the device breaks before."""

    def __init__(self) -> None:
        self.passed = self.broken = False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self.passed

    def synchronize(self) -> None:
        self.passed = self.query() or True


def test_a_step_is_done_when_the_device_has_passed_it_or_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    it, marks = executor(), [Far(), Far()]
    monkeypatch.setattr(it.runner.queue, "record", iter(marks).__next__)
    step, broken = it.launch(OPENING), it.launch(Plan((), (), (Span(0, 1, 1, 1),)))
    assert not step.is_done()
    marks[0].passed = True
    assert step.is_done() and not broken.is_done()
    marks[1].broken = True
    assert broken.is_done()
    assert step.result().tokens and step.is_done()
    with pytest.raises(StepFailed, match="illegal memory access"):
        broken.result()


@pytest.mark.parametrize(
    "plan",
    [
        Plan((NewSequence(7, (1,), 0, 1),), (), (Span(7, 1, 1, 1),)),
        Plan((NewSequence(0, tuple(range(17)), 0, 17),), (), (Span(0, 17, 1, 1),)),
        Plan((NewSequence(0, (1, 2), 0, 2),), ((0, (5,)),), (Span(0, 1, 1, 1),)),
    ],
    ids=["no such row", "longer than the context", "samples before the prompt is fed"],
)
def test_an_impossible_plan_is_a_failed_step(plan: Plan) -> None:
    with pytest.raises(StepFailed, match="row"):
        executor().launch(plan).result()


def test_the_forward_runs_ahead_of_the_masks_and_sampling_does_not() -> None:
    model = Tiny()
    it = executor(model)
    step = it.launch(OPENING._replace(masked_spans=(0,)))
    assert model.fed >= 3
    with pytest.raises(StepFailed, match="waits for masks"):
        step.result()
    only = 42
    step.sample([[(1 << only).to_bytes(8, "little")]])
    assert step.result().tokens == [[only]]


@pytest.mark.parametrize("masked", [(), (0,)], ids=["without masks", "with masks"])
def test_a_step_that_a_reset_dropped_has_failed(masked: tuple[int, ...]) -> None:
    it = executor()
    dropped = it.launch(OPENING._replace(masked_spans=masked))
    it.reset()
    with pytest.raises(StepFailed, match="dropped by a reset"):
        dropped.result()
    after = it.launch(OPENING)
    dropped.sample([[None]])
    with pytest.raises(StepFailed, match="dropped by a reset"):
        dropped.result()
    assert after.result().tokens == executor().launch(OPENING).result().tokens


def test_steady_decode_sends_nothing_but_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    it = executor(length=64, pages=32)
    sent: list[int] = []
    scatter = it.runner.steps.scatter

    def counted(data: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
        sent.append(len(places))
        scatter(data, places, values)

    monkeypatch.setattr(it.runner.steps, "scatter", counted)
    it.launch(OPENING).result()
    spans = (Span(0, 1, 1, 1),)
    for step in range(9):
        grown = ((0, (6 + step,)),) if step % 4 == 1 else ()
        it.launch(Plan((), grown, spans)).result()
    opening, first, *rest = sent
    assert opening > first > 1
    assert rest == [1, 1]


def test_it_describes_itself_and_closing_releases_the_pool() -> None:
    it = executor()
    about = it.describe()
    assert (about.num_blocks, about.block_size, about.num_rows, about.max_model_len, about.vocab_size) == (
        8,
        4,
        2,
        16,
        VOCAB,
    )
    assert (about.dtype, about.device, about.num_drafts, about.lookahead) == ("float64", "cpu", 0, 2)
    it.close()
    assert not it.runner.kv


class Noted(WorkQueue):
    """Remembers which kinds of step there were."""

    def __init__(self) -> None:
        self.seen: set[GraphKey] = set()

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        self.seen.add(key)
        work()


class NearlyFree(StepTimeModel):
    """Measures that drafts cost next to nothing."""

    def record(self, plan: Plan, seconds: float, **how: Any) -> int:
        return super().record(plan, 1.0 + 0.001 * (plan.spans[0].num_samples - 1))


class Eager(AdaptiveDrafts):
    """Thinks that drafts cost next to nothing."""

    def __init__(self, most: int) -> None:
        super().__init__(most, NearlyFree({(1 << w, d): 1.0 + 0.001 * d for w in range(5) for d in draft_counts(most)}))


@pytest.mark.parametrize(
    "most", [pytest.param(1, marks=pytest.mark.nightly), 3, pytest.param(8, marks=pytest.mark.nightly)]
)
def test_every_graph_key_is_precompiled_with_any_number_of_drafts_and_any_end(most: int) -> None:
    cuda = pytest.importorskip("quire.assembly.cuda")
    rows, length, queue = 4, 40, Noted()
    kv = allocate(layer_shapes(MODEL.spec.kv_shapes, torch.float64), pages=60, page_size=4)
    it = CudaExecutor(
        MODEL,
        pages=60,
        page_size=4,
        rows=rows,
        max_model_len=length,
        tokens=64,
        dtype=torch.float64,
        device=torch.device("cpu"),
        steps=TorchSteps(),
        queue=queue,
        proposer=ModelProposer(MODEL, kv, num_drafts=most, rows=rows, device=torch.device("cpu")),
        depth=1,
    )
    scheduler = Scheduler(
        KVCacheManager(60, 4, make_prefix_cache(4, True)),
        rows=rows,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_chunk_tokens=16,
        speculation=Eager(most),
    )
    engine = Engine(scheduler, it, lookahead=1)
    for i, (prompt, new) in enumerate(itertools.product((1, 5, 9), range(14, 30))):
        engine.submit([2 + i % 7] * prompt, new)
    while engine.has_pending_work:
        engine.step()
    drafted = scheduler.draft_stats
    assert drafted.accepted_by_position[most - 1] > 0, "as deep as it goes"
    made = [*cuda.graph_keys(rows, 64, 64), *cuda.speculative_graph_keys(rows, 64, most, True)]
    known = {*made, *(GraphKey(lines, 0, 0, 0, "masks") for lines in MASK_LINES)}
    assert len(made) + len(MASK_LINES) == len(known), "none is made ready twice"
    assert queue.seen <= known, sorted(queue.seen - known)
