"""Real grammars through scheduler, engine and CPU executor: the answers are the naive loop's in every combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.errors import InvalidRequest, StepFailed
from quire.executors.local import LocalExecutor
from quire.executors.synthetic import SyntheticExecutor
from quire.scheduler.constraint import FREE, PENDING
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import Mask, Plan
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import UNLIMITED, Request, RequestStepOutput, SamplingParams, StructuredOutputsParams
from tests.model_runner.oracle import naive
from tests.model_runner.scripted import ScriptedDrafter
from tests.model_runner.tiny import VOCAB, Tiny
from tests.pairs import pairwise
from tests.structured_output.little import END, compiler

MODEL = Tiny()
STRUCTURES = (
    StructuredOutputsParams(regex="(ab|b|12){2,6}(1|c)*"),
    StructuredOutputsParams(
        json={"type": "array", "items": {"enum": ["a", "ab", 12, True]}, "minItems": 2, "maxItems": 5}
    ),
    StructuredOutputsParams(choice=("abc", "ab", "12 a", "true", '{"a":1}')),
    StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["ab", False]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
    StructuredOutputsParams(grammar='start: "{" inner* "}"\ninner: "a" | "[" inner "]"'),
)


def workload() -> list[Request]:
    """Every structure greedy and seeded, among rows without one; duplicates and shared prefixes."""
    rng = random.Random(5)
    shared = tuple(rng.randrange(1, VOCAB - 1) for _ in range(17))
    requests = []
    for i in range(16):
        prompt = (shared if i % 2 else ()) + tuple(rng.randrange(1, VOCAB - 1) for _ in range(rng.randrange(1, 9)))
        structure = STRUCTURES[i % 5] if i % 3 else None
        sampling = SamplingParams(
            temperature=(0.0, 1.0, 1.8)[i % 3], structured_outputs=structure, logit_bias={END: -1.0}
        )
        requests.append(
            Request(
                id=str(i),
                prompt=prompt,
                max_new_tokens=14,
                sampling=sampling,
                stop=frozenset({END}),
                seed=i,
                choice=i % 2,
            )
        )
    return requests


def by_hand(request: Request) -> Callable[[Sequence[int]], Mask] | None:
    """The mask after an output, always from a matcher that has seen nothing."""
    structure = request.sampling.structured_outputs
    if structure is None:
        return None
    compiled = compiler()(structure)
    return lambda output: compiled().masks(output, ())[0]


REQUESTS = workload()
WANT = {r.id: naive(MODEL, r, by_hand(r)) for r in REQUESTS}
LONGEST = max(len(r.prompt) + r.max_new_tokens for r in REQUESTS)


def scripted_drafter(depth: int) -> ScriptedDrafter | None:
    """Drafts the answers, one token in four wrong: sometimes by the grammar, sometimes past the end."""
    texts = [[*r.prompt, *WANT[r.id], END] for r in REQUESTS]
    return ScriptedDrafter(depth, texts, share=0.25, wrong=lambda rng: rng.randrange(VOCAB - 1)) if depth else None


class CoreUnderTest:
    """The core and the CPU executor around the tiny model; every so many launches fail."""

    def __init__(
        self,
        *,
        depth: int,
        size: int,
        tight: int,
        reuse: bool,
        feed: tuple[int, int],
        drafts: int,
        fails: bool,
        cap: int,
    ) -> None:
        pages = -(-LONGEST // size) * tight
        self.executor = LocalExecutor(
            MODEL,
            pages=pages,
            page_size=size,
            rows=16,
            max_model_len=LONGEST + 1,
            dtype=torch.float64,
            drafter=scripted_drafter(drafts),
        )
        self.launched = 0
        launch = self.executor.launch

        def launch_or_fail(plan: Plan) -> Any:
            self.launched += 1
            if fails and self.launched % 37 == 0:
                raise StepFailed("a hiccup")
            return launch(plan)

        self.executor.launch = launch_or_fail  # type: ignore[method-assign]
        kv = KVCacheManager(pages, size, make_prefix_cache(size, reuse))
        self.scheduler = Scheduler(
            kv,
            rows=16,
            max_num_seqs=cap,
            max_num_batched_tokens=feed[0],
            max_chunk_tokens=feed[1],
            speculation=FixedDrafts(self.executor.describe().num_drafts),
        )
        self.engine = Engine(self.scheduler, self.executor, lookahead=depth)
        self.finish: dict[str, str] = {}

    def answer(self, rng: random.Random) -> dict[str, list[int]]:
        """Constraints come late: a while after their requests, in any order."""
        todo, pending = list(REQUESTS), list[Request]()
        made: dict[str, list[int]] = {}
        while todo or pending or self.engine.has_pending_work:
            for request in todo[: rng.randrange(3)]:
                todo.remove(request)
                structured = request.sampling.structured_outputs is not None
                self.engine.add(request, PENDING if structured else FREE)
                pending += [request] if structured else []
            if pending and rng.random() < 0.4:
                request = pending.pop(rng.randrange(len(pending)))
                structure = request.sampling.structured_outputs
                assert structure is not None and request.id not in made
                self.engine.set_constraint(request.id, compiler()(structure)())
            for event in self.engine.step():
                made.setdefault(event.id, []).extend(event.tokens)
                if event.finish:
                    self.finish[event.id] = event.finish
        return made


AXES: dict[str, Sequence[Any]] = {
    "depth": (0, 1, 2),
    "size": (1, 4, 64),
    "tight": (1, 2, 14),
    "reuse": (False, True),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (9, UNLIMITED)),
    "drafts": (0, 3),
    "fails": (False, True),
    "cap": (3, 16),
}
COMBOS = [dict(zip(AXES, v, strict=True)) for v in itertools.product(*AXES.values())]
CHOSEN = pairwise(AXES)


def hold(combo: dict[str, Any]) -> CoreUnderTest:
    core = CoreUnderTest(**combo)
    assert core.answer(random.Random(str(combo))) == WANT
    for id, made in WANT.items():
        assert core.finish[id] == ("stop" if made[-1] == END else "length")
    assert core.scheduler.kv.block_pool.num_free == core.scheduler.kv.block_pool.num_blocks and not len(
        core.scheduler.waiting
    )
    return core


@pytest.mark.parametrize(
    "combo", CHOSEN, ids=lambda c: "-".join(str(v) for v in c.values()).replace(str(UNLIMITED), "all")
)
def test_every_combination_gives_the_naive_loops_tokens(combo: dict[str, Any]) -> None:
    hold(combo)


@pytest.mark.nightly
def test_the_whole_lattice() -> None:
    for combo in COMBOS:
        hold(combo)


@pytest.mark.parametrize(("step", "least"), [(3, 20), pytest.param(1, 60, marks=pytest.mark.nightly)])
def test_pressure_preempts_constrained_rows(step: int, least: int) -> None:
    combos = [c for c in COMBOS if c["tight"] == 1 and c["size"] == 1 and c["cap"] == 16 and c["fails"]]
    assert sum(hold(combo).scheduler.num_preemptions for combo in combos[::step]) > least


def test_the_workload_distinguishes_grammars() -> None:
    free = {
        r.id: naive(
            MODEL, Request(id=r.id, prompt=r.prompt, max_new_tokens=14, stop=r.stop, seed=r.seed, choice=r.choice)
        )
        for r in REQUESTS
    }
    ruled = [r for r in REQUESTS if r.sampling.structured_outputs]
    assert len(ruled) >= 10 and all(free[r.id] != WANT[r.id] for r in ruled)
    assert sum(WANT[r.id][-1] == END for r in ruled) >= 6


# ---------------------------------------------------------------- waiting for a constraint


def engine() -> Engine:
    executor = LocalExecutor(MODEL, pages=64, page_size=4, rows=4, max_model_len=99, dtype=torch.float64)
    return Engine(Scheduler(KVCacheManager(64, 4, make_prefix_cache(4, True)), rows=4), executor)


def ask(id: str, structure: StructuredOutputsParams | None = STRUCTURES[0], **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, structured_outputs=structure, **fields.pop("sampling", {}))
    return Request(id=id, prompt=(5, 6, 7), max_new_tokens=6, sampling=sampling, stop=frozenset({END}), **fields)


def run(engine: Engine) -> list[RequestStepOutput]:
    out = []
    while engine.can_step:
        out += engine.step()
    return out


def test_a_request_that_waits_for_a_grammar_delays_no_other_and_says_why() -> None:
    core, seen = engine(), []
    core.observers = (type("Watch", (), {"on_submit": lambda *_: None, "on_step": lambda _, r: seen.append(r)})(),)
    core.add(ask("late"), PENDING)
    core.add(ask("free", None))
    assert {e.id for e in run(core)} == {"free"}
    assert core.has_pending_work and not core.can_step and core.metrics_snapshot()["waiting_requests"] == 1
    assert all(("waits", "late", "grammar", 0) in record.decisions for record in seen)
    core.set_constraint("late", compiler()(STRUCTURES[0])())
    assert {e.id for e in run(core)} == {"late"}
    assert not core.has_pending_work


def test_a_request_may_end_before_its_grammar_is_made() -> None:
    core = engine()
    for id in ("gone", "refused", "expired"):
        core.add(ask(id, deadline=-1.0 if id == "expired" else float("inf")), PENDING)
    core.abort("gone")
    core.fail("refused", InvalidRequest("no such grammar", param="guided_regex"))
    events = {e.id: e for e in core.step()}
    assert [events[id].finish for id in ("gone", "refused", "expired")] == ["abort", "error", "timeout"]
    assert (events["refused"].param, events["refused"].status) == ("guided_regex", 400)
    assert events["gone"].param is None
    assert not core.has_pending_work and not core.scheduler.waiting.set_aside(), "none is waited for"
    for id in events:
        core.set_constraint(id, compiler()(STRUCTURES[0])())
    assert not core.has_pending_work and not core.can_step


def test_the_choices_of_n_wait_each_for_its_own_constraint() -> None:
    core = engine()
    compiled = compiler()(STRUCTURES[0])
    for choice in range(3):
        core.add(ask(f"c{choice}", choice=choice), PENDING)
    core.set_constraint("c2", compiled())
    assert {e.id for e in run(core) if e.finish} == {"c2"}
    core.set_constraint("c0", compiled())
    core.set_constraint("c1", compiled())
    assert {e.id for e in run(core) if e.finish} == {"c0", "c1"}


def test_an_engine_that_cannot_obey_says_so_rather_than_answer_without() -> None:
    with pytest.raises(InvalidRequest, match="does not support structured output") as caught:
        engine().add(ask("a"))
    assert caught.value.param == "structured_outputs"
    blind = SyntheticExecutor(pages=64, page_size=4, rows=4)
    with pytest.raises(InvalidRequest, match="does not support structured output"):
        Engine(Scheduler(KVCacheManager(64, 4, make_prefix_cache(4, True)), rows=4), blind).add(ask("a"), PENDING)


@pytest.mark.parametrize(
    ("sampling", "structure", "param"),
    [
        ({"allowed_token_ids": (55,)}, STRUCTURES[0], "structured_outputs"),
        ({"allowed_token_ids": (40,), "bad_words_token_ids": ((40,),)}, None, "allowed_token_ids"),
    ],
)
def test_fields_that_exclude_each_other_are_the_requests_fault(
    sampling: dict[str, Any], structure: StructuredOutputsParams | None, param: str
) -> None:
    core = engine()
    request = ask("a", structure, sampling=sampling)
    core.add(request, FREE if structure is None else compiler()(structure)())
    [event] = run(core)
    assert event.finish == "error" and event.param == param and "cannot be used together" in (event.error or "")
