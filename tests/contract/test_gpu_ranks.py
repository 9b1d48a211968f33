"""On two GPUs: a rank is killed, stopped, or out of memory under 64 streams, and what clients are told."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.test_ranks import LOSSES, OUT_OF_MEMORY, STARVING, lose_a_rank, signalled, starve
from tests.live import Live

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ON_CARDS = ("--device", "cuda", "--gpu-memory-utilization", "0.1", "--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("lose", "said", "seconds"),
    [
        *((signalled(number), said, 10.0 if number == signal.SIGSTOP else 2.0) for number, said in LOSSES),
        (starve, OUT_OF_MEMORY, 2.0),
    ],
    ids=["killed", "stopped", "out of memory"],
)
def test_a_lost_rank_on_a_card_is_named_and_its_memory_comes_back(
    lose: Callable[[Live, int], object], said: str, seconds: float, tmp_path: Path
) -> None:
    free = [torch.cuda.mem_get_info(card)[0] for card in range(2)]
    refused, answered = lose_a_rank(lose, said, tmp_path, *ON_CARDS, streams=64, module=STARVING)
    print(f"{said}: 64 streams refused after {refused:.2f} s, answered after {answered:.2f} s")
    left = [torch.cuda.mem_get_info(card)[0] for card in range(2)]
    assert all(before - after < 1 << 28 for before, after in zip(free, left, strict=True)), (free, left)
    assert refused < seconds and answered < 30.0
