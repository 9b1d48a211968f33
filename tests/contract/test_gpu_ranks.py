"""On two GPUs: a rank is killed, stopped, or out of memory under 64 streams, and what clients are told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.contract.test_ranks import LOSSES, OUT_OF_MEMORY, STARVING, lose_from, signalled, starve
from tests.live import serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ON_CARDS = (
    *("--device", "cuda", "--gpu-memory-utilization", "0.1", "--tensor-parallel-size", "2"),
    *("--max-num-seqs", "72", "--max-num-batched-tokens", "512"),
)
CASES = [
    (starve, OUT_OF_MEMORY, 2.0),
    *((signalled(number), said, 10.0 if number == signal.SIGSTOP else 2.0) for number, said in LOSSES),
]
"""How rank 1 is lost, what the error says, and within how many seconds all streams have it."""


def test_lost_ranks_on_cards_are_named_and_their_memory_comes_back(tmp_path: Path) -> None:
    """One after the other, of one server: a start takes longer than a loss."""
    free = [torch.cuda.mem_get_info(card)[0] for card in range(2)]
    took = []
    with serving(tmp_path, *ON_CARDS, module=STARVING) as live:
        for lose, said, _ in CASES:
            refused, answered, _ = lose_from(live, lose, said, 64)
            took.append((refused, answered))
            print(f"{said}: 64 streams refused after {refused:.2f} s, answered after {answered:.2f} s", flush=True)
    left = [torch.cuda.mem_get_info(card)[0] for card in range(2)]
    assert all(before - after < 1 << 28 for before, after in zip(free, left, strict=True)), (free, left)
    for (_, said, seconds), (refused, answered) in zip(CASES, took, strict=True):
        assert refused < seconds and answered < 30.0, said
