"""On two GPUs, and on four where there are so many: ranks answer as one does, over NCCL and the GPUs' memory.

One rank is the CPU's executor, with which tests/executors compares one GPU's. The ranks' processes are started once for
each worker of the tests; two workers of every four have the GPUs from number 2 on, where there are four.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import pytest
import torch

from quire.assembly.engine import make_executor
from quire.config import Settings
from quire.engine.executor import Executor
from tests.assembly.series import RankSeries
from tests.assembly.test_ranks import OPTIONS, answers, check_equal, engine
from tests.checkpoints import FIRST, VOCAB, make
from tests.executors.test_features import FEATURES
from tests.weights.test_ranks import UNDIVIDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ON_CARDS: Mapping[str, Any] = MappingProxyType(
    {**OPTIONS, "device": "cuda", "block_size": 16, "num_gpu_blocks_override": 200, "canary": "off"}
    | {"speculative_config": None, "max_model_len": 160, "max_num_batched_tokens": 64, "max_num_seqs": 5}
)
ON_ONE: Mapping[str, Any] = MappingProxyType({**ON_CARDS, "device": "cpu"})
SIZES = [
    pytest.param(
        size, id=f"ranks{size}", marks=pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} GPUs")
    )
    for size in (2, 4)
]
Alone: TypeAlias = Callable[[int], AbstractContextManager[None]]
SITUATION: Mapping[str, Any] = MappingProxyType(
    {"lookahead": 1, "drafts": 0, "blocks": 200, "prefixes": True, "tokens": 64}
)


@pytest.fixture(scope="module")
def series() -> Iterator[RankSeries]:
    made = RankSeries({})
    yield made
    made.close()


@pytest.fixture
def on_cards(tmp_path: Path, series: RankSeries) -> Iterator[Callable[..., tuple[Executor, Executor]]]:
    """Called with a shape, a number of ranks, a vocabulary and options: the executors of one rank and of so many."""
    with ExitStack() as closing:

        def made(shape: str, size: int, vocab: int = VOCAB, **options: Any) -> tuple[Executor, Executor]:
            make(tmp_path, shape, vocab_size=vocab)
            asked = {"model": str(tmp_path), **options}
            one = make_executor(Settings.of(**ON_ONE, **asked)).executor
            closing.callback(one.close)
            several = series.executor(Settings.of(**ON_CARDS, **asked, tensor_parallel_size=size))
            closing.callback(several.close)
            return one, several

        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Called with a number of GPUs: while its context lasts, ranks of no other worker compute on the first so many of
    this one's. They would take turns, of milliseconds, in which most of what a GPU does is to wait for another's."""
    folder = tmp_path_factory.getbasetemp().parent
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")

    @contextmanager
    def held(size: int) -> Iterator[None]:
        with ExitStack() as files:
            for card in sorted(cards[:size]):
                fcntl.flock(files.enter_context((folder / f"card-{card}").open("w")), fcntl.LOCK_EX)
            yield

    return held


def compare(
    one: Executor, several: Executor, alone: AbstractContextManager[None], asked: Iterable[str], vocab: int = VOCAB
) -> None:
    """Ask for these features, all ranks at once after the one."""

    def each(executor: Executor) -> list[dict[str, Any]]:
        return [answers(engine(executor, {**SITUATION, "asked": name}, 1), name, vocab) for name in asked]

    wanted = each(one)
    with alone:
        found = each(several)
    for want, got in zip(wanted, found, strict=True):
        check_equal(want, got)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"deterministic": True}], ids=["eager", "deterministic"])
@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen3_moe-gqa"])
def test_without_graphs_and_deterministic(
    shape: str, options: Mapping[str, Any], size: int, on_cards: Any, alone: Alone
) -> None:
    compare(*on_cards(shape, size, **options), alone(size), ["logprobs"])


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_divide_the_vocabulary_evenly_draw_what_one_rank_draws(
    size: int, on_cards: Any, alone: Alone
) -> None:
    """Below it is odd. Greedy and drawn tokens are some rank's candidates then; other rows need all logits."""
    vocab, asked = 256, ("prompt_logprobs", "random", "truncated", "logprobs")
    compare(*on_cards("llama-gqa-tied", size, vocab), alone(size), asked, vocab)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", sorted(FIRST - set(UNDIVIDED)))
def test_every_family_answers_with_every_feature_as_one_rank_does(
    shape: str, size: int, on_cards: Any, alone: Alone
) -> None:
    compare(*on_cards(shape, size), alone(size), FEATURES)
