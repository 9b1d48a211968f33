"""The local executor under the real scheduler and engine: tokens equal a dense loop's, whatever the settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from quire.engine.engine import Engine
from quire.errors import StepFailed
from quire.executors.local import LocalExecutor
from quire.model_runner.row_state import Ints, RowState
from quire.model_runner.speculative import Drafter, NoDrafts
from quire.scheduler.constraint import FREE
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.policy import Batching, SchedulingPolicy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import GREEDY, UNLIMITED, Request, RequestStepOutput, SamplingParams
from tests.model_runner.oracle import naive
from tests.model_runner.tiny import POISON, VOCAB, Tiny

MODEL = Tiny()
STOP = frozenset(range(0, VOCAB, 17))
EVEN, ODD = (sum(1 << t for t in range(parity, VOCAB, 2)).to_bytes(8, "little") for parity in (0, 1))


def alternate(output: Sequence[int]) -> bytes:
    """A grammar: odd and even tokens take turns, so a late or stale mask shows."""
    return ODD if not output or output[-1] % 2 == 0 else EVEN


class Alternate:
    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        said = [*output, *drafts]
        return [alternate(said[: len(output) + i]) for i in range(len(drafts) + 1)]

    def why(self) -> str:
        return ""


SAMPLING = (
    GREEDY,
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.8, top_k=5, logprobs=2),
    SamplingParams(temperature=1.5, top_p=0.7, min_tokens=6),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.7),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7, prompt_logprobs=1),
    SamplingParams(temperature=0.0, bad_words_token_ids=((3,), (7, 9)), logit_bias={4: 3.0, 11: -5.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(5, 50)), top_k=20, top_p=0.9),
)


def workload() -> list[Request]:
    """Shared prefixes and duplicates, so that pages are shared; every sampling setting, stop tokens in most."""
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(VOCAB - 1) for _ in range(n))  # noqa: E731
    shared = draw(19)
    prompts = [(shared if i % 2 else ()) + draw(rng.randrange(1, 14)) for i in range(12)] + [shared, shared]
    return [
        Request(
            id=str(i),
            prompt=prompt,
            max_new_tokens=rng.randrange(4, 16),
            stop=frozenset() if i % 3 == 0 else STOP,
            sampling=SAMPLING[i % len(SAMPLING)],
            seed=rng.randrange(-(1 << 40), 1 << 40),
            choice=i % 3,
        )
        for i, prompt in enumerate(prompts)
    ]


REQUESTS = workload()
RULED = {"1", "4", "10"}
WANT = {r.id: naive(MODEL, r, alternate if r.id in RULED else None) for r in REQUESTS}
LONGEST = max(len(r.prompt) + r.max_new_tokens for r in REQUESTS)


class Scripted:
    """Drafts what the answers really are, wrong now and then."""

    def __init__(self, depth: int) -> None:
        self.num_drafts = depth
        self.rng = random.Random(depth)
        self.texts = [[*r.prompt, *WANT[r.id]] for r in REQUESTS]

    def propose(self, rows: RowState, which: Ints, depth: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        out = np.zeros((len(which), self.num_drafts), np.int32)
        for q, row in enumerate(which.tolist()):
            known = int(rows.num_known[row])
            history = rows.tokens[row, :known].tolist()
            found = next((t for t in self.texts if t[:known] == history), [])[known : known + self.num_drafts]
            for i, token in enumerate(found):
                out[q, i] = token if self.rng.random() < 0.8 else 1
        return out

    def reset(self) -> None:
        """The script stays."""


class House:
    """Scheduler, engine and executor around the tiny model."""

    def __init__(
        self,
        *,
        size: int = 4,
        pages: int = 400,
        cap: int = UNLIMITED,
        budget: int = UNLIMITED,
        chunk: int = UNLIMITED,
        depth: int = 0,
        reuse: bool = True,
        admit: Batching = "continuous",
        drafter: Drafter | None = None,
        model: Tiny = MODEL,
    ) -> None:
        drafter = drafter or NoDrafts()
        self.executor = LocalExecutor(
            model, pages=pages, page_size=size, rows=16, max_model_len=LONGEST + 1, dtype=torch.float64, drafter=drafter
        )
        kv = KVCacheManager(pages, size, make_prefix_cache(size, reuse))
        self.scheduler = Scheduler(
            kv,
            rows=16,
            max_num_seqs=cap,
            max_num_batched_tokens=budget,
            max_chunk_tokens=chunk,
            policy=SchedulingPolicy(batching=admit),
            speculation=FixedDrafts(drafter.num_drafts),
        )
        self.engine = Engine(self.scheduler, self.executor, lookahead=depth)
        self.events: dict[str, list[RequestStepOutput]] = {}

    def answer(self, requests: Sequence[Request], late: Callable[[], int] = lambda: UNLIMITED) -> dict[str, list[int]]:
        todo = list(requests)
        while todo or self.engine.has_pending_work:
            for request in todo[: late()]:
                self.engine.add(request, Alternate() if request.id in RULED else FREE)
                todo.remove(request)
            for event in self.engine.step():
                self.events.setdefault(event.id, []).append(event)
        return {id: [t for e in events for t in e.tokens] for id, events in self.events.items()}


AXES = {
    "depth": (0, 1, 2),
    "size": (1, 4, 64),
    "tight": (1, 2, 14),
    "reuse": (False, True),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (9, UNLIMITED)),
    "admit": ("continuous", "static"),
    "drafts": (0, 3),
    "cap": (3, 16),
}
COMBOS = [dict(zip(AXES, v, strict=True)) for v in itertools.product(*AXES.values())]
CHOSEN = random.Random(1).sample(COMBOS, 216)


@pytest.mark.parametrize(
    "combo", CHOSEN, ids=lambda c: "-".join(str(v) for v in c.values()).replace(str(UNLIMITED), "all")
)
def test_every_combination_gives_the_dense_loops_tokens(combo: dict[str, object]) -> None:
    kw = dict(combo)
    size, tight, drafts = int(str(kw["size"])), int(str(kw.pop("tight"))), int(str(kw.pop("drafts")))
    kw["budget"], kw["chunk"] = kw.pop("feed")
    rng = random.Random(str(combo))
    house = House(pages=-(-LONGEST // size) * tight, drafter=Scripted(drafts) if drafts else None, **kw)  # type: ignore[arg-type]
    assert house.answer(REQUESTS, late=lambda: rng.randrange(3)) == WANT
    assert house.scheduler.kv.block_pool.num_free == house.scheduler.kv.block_pool.num_blocks


def test_the_workload_tells_settings_apart() -> None:
    plain = {r.id: naive(MODEL, Request(id=r.id, prompt=r.prompt, max_new_tokens=r.max_new_tokens)) for r in REQUESTS}
    assert sum(plain[r.id] != WANT[r.id] for r in REQUESTS) >= 10
    assert len({t for answer in WANT.values() for t in answer}) > VOCAB // 2
    assert max(len(answer) for answer in WANT.values()) >= 10


@pytest.mark.parametrize("drafts", [0, 3])
def test_logprobs_are_those_of_the_dense_model(drafts: int) -> None:
    house = House(chunk=5, budget=32, drafter=Scripted(drafts) if drafts else None)
    house.answer(REQUESTS)
    request = next(r for r in REQUESTS if r.sampling.logprobs == 2)
    told = [each for e in house.events[request.id] for each in e.logprobs]
    tokens = [*request.prompt, *WANT[request.id]]
    want = MODEL.dense(tokens).log_softmax(-1)[len(request.prompt) - 1 : -1]
    assert [each.token for each in told] == WANT[request.id]
    for each, row in zip(told, want, strict=True):
        values, ids = row.topk(2)
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-5)
        assert each.rank == int((row > row[each.token]).sum()) + 1
        assert [t for t, _ in each.top] == ids.tolist()
        assert [x for _, x in each.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, UNLIMITED])
def test_prompt_logprobs_come_whole_whatever_the_chunks(chunk: int) -> None:
    house = House(chunk=chunk)
    request = next(r for r in REQUESTS if r.sampling.prompt_logprobs is not None)
    house.answer([request])
    told = [each for e in house.events[request.id] for each in e.prompt_logprobs]
    want = MODEL.dense(request.prompt).log_softmax(-1)
    assert [each.token for each in told] == list(request.prompt[1:])
    assert [each.logprob for each in told] == pytest.approx(
        [float(want[i, t]) for i, t in enumerate(request.prompt[1:])], abs=1e-5
    )


def test_a_row_with_nan_logits_fails_alone() -> None:
    house = House(depth=1, chunk=7)
    sick = [Request(id=f"sick-{i}", prompt=(*range(i), POISON), max_new_tokens=5) for i in (0, 5, 20)]
    mixed = [r for pair in itertools.zip_longest(REQUESTS, sick) for r in pair if r]
    answers = house.answer(mixed, late=lambda: 2)
    assert {id: answers[id] for id in WANT} == WANT
    for each in sick:
        assert answers[each.id] == []
        assert house.events[each.id][-1].error == "the model produced NaN or infinite logits"


class Fragile(Tiny):
    """Fails when it is fed token 13."""

    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        if 13 in batch.tokens.tolist():
            raise RuntimeError("a kernel failed\nwith details")
        return super().forward(batch, kv)


def test_a_step_that_fails_costs_only_the_request_at_fault() -> None:
    harmless = [r for r in REQUESTS if 13 not in (*r.prompt, *WANT[r.id])]
    assert len(harmless) >= 4
    house = House(depth=1, model=Fragile())
    answers = house.answer([*harmless[:3], Request(id="bad", prompt=(1, 13, 2), max_new_tokens=4), *harmless[3:]])
    assert {r.id: answers[r.id] for r in harmless} == {r.id: WANT[r.id] for r in harmless}
    assert house.events["bad"][-1].error == "the engine could not run this request (RuntimeError)"


def executor(model: Tiny = MODEL) -> LocalExecutor:
    return LocalExecutor(model, pages=8, page_size=4, rows=2, max_model_len=16, dtype=torch.float64)


OPENING = Plan((NewSequence(0, (1, 2, 3), 0, 3),), ((0, (5,)),), (Span(0, 3, 1, 1),))


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


@pytest.mark.parametrize(
    "plan",
    [
        Plan((NewSequence(7, (1,), 0, 1),), (), (Span(7, 1, 1, 1),)),
        Plan((NewSequence(0, tuple(range(17)), 0, 17),), (), (Span(0, 17, 1, 1),)),
        Plan((NewSequence(0, (1, 2), 0, 2),), ((0, (5,)),), (Span(0, 1, 1, 1),)),
    ],
    ids=["no such row", "longer than the context", "samples before the prompt is fed"],
)
def test_a_plan_that_cannot_be_is_a_failed_step(plan: Plan) -> None:
    with pytest.raises(StepFailed, match="row"):
        executor().launch(plan).result()


def test_the_forward_runs_ahead_of_the_masks_and_sampling_does_not() -> None:
    model = Tiny()
    it = executor(model)
    step = it.launch(OPENING._replace(masked_spans=(0,)))
    assert model.fed == 3
    with pytest.raises(StepFailed, match="waits for masks"):
        step.result()
    only = 42
    step.sample([[(1 << only).to_bytes(8, "little")]])
    assert step.result().tokens == [[only]]


def test_a_mask_that_allows_nothing_fails_the_row() -> None:
    step = executor().launch(OPENING._replace(masked_spans=(0,)))
    step.sample([[bytes(8)]])
    result = step.result()
    assert result.tokens == [[]]
    assert "no token is allowed" in result.errors[0]


def test_it_describes_itself() -> None:
    about = executor().describe()
    assert (about.num_blocks, about.block_size, about.num_rows, about.max_model_len, about.vocab_size) == (
        8,
        4,
        2,
        16,
        VOCAB,
    )
    assert about.block_bytes == 2 * 2 * 4 * 2 * 8 * 8
    assert (about.dtype, about.device, about.num_drafts, about.lookahead) == ("float64", "cpu", 0, 0)


def test_closing_lets_go_of_the_pool() -> None:
    it = executor()
    it.close()
    assert not it.runner.kv
