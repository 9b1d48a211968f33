"""On a GPU: deterministic mode gives the same bits whatever happens, captured too, in every dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.executor import Executor
from quire.model_runner.graphs import CudaQueue
from quire.weights.load import load_model
from tests import checkpoints
from tests.test_deterministic import Ahead, Situation, seen_in_every_situation

fixed = pytest.importorskip("quire.ops.triton.ops")
kernels = pytest.importorskip("quire.model_runner.triton_steps")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OnCard(Ahead):
    """Captured as a server has it."""

    device = torch.device("cuda")

    def executor(self, s: Situation, pages: int) -> Executor:
        self.steps = kernels.TritonSteps(self.device)
        self.queue = CudaQueue(self.device, 64)
        return super().executor(s, pages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [
        "llama-gqa-tied",
        "gemma2-gqa",
        "qwen3-gqa",
        "qwen3_moe-gqa",
        "gpt2-odd-heads",
        "qwen3_next-shared-keys",
        "nemotron_h-gqa",
    ],
)
def test_an_answer_has_the_same_bits_in_every_situation(shape: str, dtype: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, shape)
    device = OnCard.device
    model = load_model(tmp_path, dtype=dtype, device=device, ops=fixed.BatchInvariantTritonOps(device))  # type: ignore[arg-type]
    seen_in_every_situation(OnCard(model))
