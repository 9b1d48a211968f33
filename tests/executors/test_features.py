"""Every request feature, alone and with every other: what the device samples is what the CPU's runner samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.engine.engine import Engine
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.device_steps import DeviceSteps, TorchSteps
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.lookahead_runner import PIECES
from quire.model_runner.sampling.features import RANDOM
from quire.model_runner.speculative import NgramDrafter, NgramProposer
from quire.ops.operands import VocabularyPart
from quire.scheduler.constraint import FREE
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import Request, SamplingParams, TokenLogprobs
from tests.executors.driver import MODEL, STOP, Alternate
from tests.model_runner.tiny import VOCAB

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "random": {"temperature": 1.2},
    "truncated": {"temperature": 1.1, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {4: 3.0, 11: -5.0, 8: 1.5}},
    "allowed": {"allowed_token_ids": tuple(range(2, 52))},
    "bad words": {"bad_words_token_ids": ((3,), (7, 9), (4, 4), (8, 2, 5))},
    "min_tokens": {"min_tokens": 5},
    "logprobs": {"logprobs": 3},
    "many logprobs": {"logprobs": 50},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "every prompt_logprob": {"prompt_logprobs": -1},
    "mask": {},
}
PAIRS = [*((name,) for name in FEATURES), *itertools.combinations(FEATURES, 2)]
NEW = 7


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


def request(names: tuple[str, ...], index: int) -> Request:
    asked: dict[str, Any] = {"temperature": 0.0}
    for name in names:
        asked |= FEATURES[name]
    prompt = tuple((index * 7 + 3 * j) % (VOCAB - 1) for j in range(3 + index % 9))
    return Request(
        id="+".join(names),
        prompt=prompt,
        max_new_tokens=NEW,
        sampling=SamplingParams(**asked),
        stop=STOP,
        seed=index - 20,
    )


def answers(executor: LocalExecutor, lookahead: int, every: int = 1) -> dict[str, Answer]:
    """Of each feature, and of one in `every` pairs."""
    about = executor.describe()
    scheduler = Scheduler(
        KVCacheManager(about.num_blocks, about.block_size, make_prefix_cache(about.block_size, True)),
        rows=about.num_rows,
        max_num_batched_tokens=32,
        max_chunk_tokens=5,
        speculation=FixedDrafts(about.num_drafts),
    )
    engine = Engine(scheduler, executor, lookahead=lookahead)
    out: dict[str, Answer] = {}
    for index, names in enumerate(PAIRS):
        if index >= len(FEATURES) and index % every:
            continue
        engine.add(request(names, index), Alternate() if "mask" in names else FREE)
        out["+".join(names)] = Answer([], [], [])
    while engine.has_pending_work:
        for event in engine.step():
            assert event.error is None, (event.id, event.error)
            answer = out[event.id]
            answer.tokens.extend(event.tokens)
            answer.logprobs.extend(event.logprobs)
            answer.prompt_logprobs.extend(event.prompt_logprobs)
    assert not engine.failures  # a step that failed and was done again would answer as well
    return out


def on_device(steps: DeviceSteps, drafts: int, device: str = "cpu", part: VocabularyPart | None = None) -> CudaExecutor:
    return CudaExecutor(
        MODEL,
        pages=400,
        page_size=4,
        rows=9,
        max_model_len=24,
        tokens=64,
        dtype=torch.float64,
        device=torch.device(device),
        steps=steps,
        queue=WorkQueue(),
        proposer=NgramProposer(drafts, shortest=1) if drafts else None,
        depth=2,
        part=part,
    )


def on_host(drafts: int = 0) -> LocalExecutor:
    drafter = NgramDrafter(drafts) if drafts else None
    return LocalExecutor(MODEL, pages=400, page_size=4, rows=9, max_model_len=24, dtype=torch.float64, drafter=drafter)


def agree(got: dict[str, Answer], want: dict[str, Answer], tolerance: float) -> None:
    assert {name: answer.tokens for name, answer in got.items()} == {name: each.tokens for name, each in want.items()}
    for name, answer in got.items():
        for mine, other in (
            (answer.logprobs, want[name].logprobs),
            (answer.prompt_logprobs, want[name].prompt_logprobs),
        ):
            assert [(s.token, s.rank, [t for t, _ in s.top]) for s in mine] == [
                (s.token, s.rank, [t for t, _ in s.top]) for s in other
            ], name
            assert [s.logprob for s in mine] == pytest.approx([s.logprob for s in other], abs=tolerance)
            tops = [[value for s in scores for _, value in s.top] for scores in (mine, other)]
            assert tops[0] == pytest.approx(tops[1], abs=tolerance)


@cache
def wanted() -> dict[str, Answer]:
    """What the CPU answers."""
    return answers(on_host(), 0)


def test_what_the_cpu_answers_has_every_feature() -> None:
    for name, answer in wanted().items():
        names = name.split("+")
        assert len(answer.tokens) >= (5 if "min_tokens" in names else 1)
        assert (len(answer.logprobs) == len(answer.tokens)) is any("logprobs" in one.split() for one in names)
        assert bool(answer.prompt_logprobs) is any("prompt" in one for one in names)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_every_pair_of_features_answers_as_on_the_cpu(lookahead: int, drafts: int) -> None:
    agree(answers(on_device(TorchSteps(), drafts), lookahead), wanted(), 1e-6)


@pytest.mark.parametrize("drafts", [0, 2])
def test_where_ranks_divide_the_vocabulary_each_samples_from_its_part_what_tokens_decide_alone(drafts: int) -> None:
    halves, steps = list[Tensor](), TorchSteps()
    sampled: Any = steps.sample

    def logits(hidden: Tensor) -> Tensor:
        first, second = MODEL.logits(hidden).tensor_split(2, 1)
        halves.append(second)
        return first

    def sample(*given: Any) -> None:
        *_, features, _, part = given
        assert (part is None) is bool(features & ~RANDOM)
        sampled(*given)

    steps.sample = sample  # type: ignore[method-assign]
    part = VocabularyPart(0, 2, logits, lambda first: torch.cat([first, halves.pop()], 1))
    agree(answers(on_device(steps, drafts, part=part), 1), wanted(), 1e-6)
    assert not halves


def test_prompts_are_scored_in_sizes_that_were_there_when_the_engine_started() -> None:
    """Any other would compile kernels while requests wait."""
    steps, sizes = TorchSteps(), list[int]()
    score = steps.score

    def counted(logits: Tensor, tokens: Tensor, which: Tensor, scores: Tensor) -> None:
        assert len(logits) == len(tokens) == len(which) == len(scores)
        sizes.append(len(tokens))
        score(logits, tokens, which, scores)

    steps.score = counted  # type: ignore[method-assign]
    executor = on_device(steps, 0)
    executor.runner.precompile([GraphKey(16, 16, 1)])
    known = {*sizes}
    sizes.clear()
    agree(answers(executor, 1), wanted(), 1e-6)
    assert known == {*PIECES} and {*sizes} == {16}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # hashes wrap around, as they do on a card
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/executors/test_gpu.py does it on the card")
@pytest.mark.parametrize(
    ("lookahead", "drafts", "every"),
    [(1, 0, 4), pytest.param(1, 0, 1, marks=pytest.mark.nightly), pytest.param(2, 2, 1, marks=pytest.mark.nightly)],
)
def test_every_pair_of_features_by_interpreted_kernels(lookahead: int, drafts: int, every: int) -> None:
    """Every feature and one pair in four in CI: the same steps in torch have all pairs above."""
    kernels = pytest.importorskip("quire.model_runner.triton_steps")
    got = answers(on_device(kernels.TritonSteps(torch.device("cpu")), drafts), lookahead, every)
    agree(got, {name: wanted()[name] for name in got}, 1e-5)
