"""On two GPUs, and on four where there are so many: ranks answer as one does, over NCCL and the GPUs' memory.

One rank is the CPU's executor, with which tests/executors compares one GPU's. The ranks' processes are started once for
each worker of the tests; two workers of every four have the GPUs from number 2 on, where there are four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
            one = make_executor(Settings.of(**{**ON_ONE, **asked})).executor
            closing.callback(one.close)
            several = series.executor(Settings.of(**{**ON_CARDS, **asked, "tensor_parallel_size": size}))
            closing.callback(several.close)
            return one, several

        yield made


def compare(one: Executor, several: Executor, asked: Iterable[str], vocab: int = VOCAB) -> None:
    """Ask both for each of these features."""
    for name in asked:
        situation = {**SITUATION, "asked": name}
        check_equal(*(answers(engine(each, situation, 1), name, vocab) for each in (one, several)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"deterministic": True}], ids=["eager", "deterministic"])
@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen3_moe-gqa"])
def test_without_graphs_and_deterministic(shape: str, options: Mapping[str, Any], size: int, on_cards: Any) -> None:
    compare(*on_cards(shape, size, **options), ["logprobs"])


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_divide_the_vocabulary_evenly_draw_what_one_rank_draws(size: int, on_cards: Any) -> None:
    """Below it is odd. Greedy and drawn tokens are some rank's candidates then; other rows need all logits."""
    vocab, asked = 256, ("prompt_logprobs", "random", "truncated", "logprobs")
    compare(*on_cards("llama-gqa-tied", size, vocab), asked, vocab)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", sorted(FIRST - set(UNDIVIDED)))
def test_every_family_answers_with_every_feature_as_one_rank_does(shape: str, size: int, on_cards: Any) -> None:
    compare(*on_cards(shape, size), FEATURES)
