"""On two GPUs: a rank is killed and another stopped under 64 streams, and what clients are told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.contract.test_ranks import LOSSES, lose_a_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ON_CARDS = ("--device", "cuda", "--gpu-memory-utilization", "0.1", "--tensor-parallel-size", "2")


@pytest.mark.parametrize(("number", "said"), LOSSES)
def test_a_lost_rank_on_a_card_is_named_and_its_memory_comes_back(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    free = [torch.cuda.mem_get_info(card)[0] for card in range(2)]
    refused, answered = lose_a_rank(number, said, tmp_path, *ON_CARDS, streams=64)
    print(f"{number.name}: 64 streams refused after {refused:.2f} s, answered after {answered:.2f} s")
    left = [torch.cuda.mem_get_info(card)[0] for card in range(2)]
    assert all(before - after < 1 << 28 for before, after in zip(free, left, strict=True)), (free, left)
