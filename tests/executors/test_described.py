"""What the executors describe of one model, whether or not steps are launched ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.device_steps import TorchSteps
from quire.model_runner.graphs import WorkQueue
from quire.weights.load import load_model
from tests import checkpoints


def test_states_of_recurrent_layers_are_described_alike(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "qwen3_next-shared-keys")
    sizes: dict[str, Any] = {"pages": 8, "page_size": 16, "rows": 2, "max_model_len": 64, "snapshots": 3}
    cpu, model = torch.device("cpu"), load_model(tmp_path, dtype="float32")
    local = LocalExecutor(model, **sizes, dtype=torch.float32).describe()
    queue: dict[str, Any] = {"tokens": 32, "device": cpu, "steps": TorchSteps(), "queue": WorkQueue()}
    ahead = CudaExecutor(model, **sizes, dtype=torch.float32, **queue).describe()
    assert local.state_bytes == ahead.state_bytes > 0
    assert (local.recurrent, local.num_snapshots) == (ahead.recurrent, ahead.num_snapshots) == (True, 3)
