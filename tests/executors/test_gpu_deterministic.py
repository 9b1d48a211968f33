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
from tests.test_kv_offload import MANY_SLOTS, PRESSED, SLOTS, TieredAhead

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


class TieredOnCard(TieredAhead, OnCard):
    """With K/V tiers: saves in the order of steps, loads on streams of their own."""


@pytest.mark.parametrize("slots", [SLOTS, MANY_SLOTS])
@pytest.mark.parametrize("situation", [PRESSED, PRESSED._replace(depth=1), PRESSED._replace(drafts=4, depth=1)])
@pytest.mark.parametrize("shape", ["llama-gqa-tied", "gemma2-gqa", "deepseek_v2-groups-yarn"])
def test_answers_have_the_bits_that_they_have_without_tiers(
    shape: str, situation: Situation, slots: int, tmp_path: Path
) -> None:
    checkpoints.make(tmp_path, shape)
    device = OnCard.device
    model = load_model(tmp_path, dtype="bfloat16", device=device, ops=fixed.BatchInvariantTritonOps(device))
    subject = TieredOnCard(model)
    subject.slots = slots
    engine = subject.converse(tmp_path / "kv", 100, situation=situation)
    stats = engine.scheduler.kv.offload.stats
    assert stats.num_hit["host"] > 0 and stats.failures.keys() <= {"no_room", "timeout"}


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
        "deepseek_v32-groups-yarn",
    ],
)
def test_an_answer_has_the_same_bits_in_every_situation(shape: str, dtype: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, shape)
    device = OnCard.device
    model = load_model(tmp_path, dtype=dtype, device=device, ops=fixed.BatchInvariantTritonOps(device))  # type: ignore[arg-type]
    seen_in_every_situation(OnCard(model))
