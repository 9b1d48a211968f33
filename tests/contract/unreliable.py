"""A server whose engine fails on purpose: `python -m tests.contract.unreliable serve`.

What a request meets depends on its seed. The engine's process is this module too, with a number for its argument.
"""

from __future__ import annotations

import sys
import time
from enum import IntEnum
from typing import Any, cast

import torch

from quire.assembly.engine_child import main as child
from quire.assembly.server import serve
from quire.config import Settings
from quire.engine.executor import Executor, StepHandle
from quire.executors.local import LocalExecutor
from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.sampler import Sampled, Sampler
from quire.scheduler.plan import Plan, Result


class Fate(IntEnum):
    """Seeds, and what they do to the steps that their requests are in."""

    MEMORY = 666_001
    KERNEL = 666_002
    NAN = 666_003
    STUCK = 666_004


SECRET = "/srv/models/secret.bin at 0x7f00dead"
"""What a library may well write into an error, and no client may read."""


class Broken:
    """A step that was launched, and did not come home."""

    def __init__(self, inner: StepHandle) -> None:
        self.sample, self.is_done = inner.sample, inner.is_done

    def result(self) -> Result:
        raise RuntimeError(f"CUDA error: an illegal memory access was encountered, {SECRET}")


class Unreliable:
    """An executor that fails as its rows' seeds tell it to."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.describe, self.close = inner, inner.describe, inner.close
        self.seeds: dict[int, int] = {}
        runner = cast(LocalExecutor, inner).runner
        runner.sampler = cast(Sampler, Spoilt(runner.sampler, self.seeds))

    def launch(self, plan: Plan) -> StepHandle:
        for opened in plan.new_sequences:
            self.seeds[opened.row] = opened.seed
        fates = {self.seeds[span.row] for span in plan.spans}
        if Fate.MEMORY in fates:
            raise torch.OutOfMemoryError(f"tried to allocate 80 GiB for {SECRET}")
        if Fate.STUCK in fates:
            time.sleep(3600)
        handle = self.inner.launch(plan)
        return Broken(handle) if Fate.KERNEL in fates else handle

    def reset(self) -> None:
        self.seeds.clear()
        self.inner.reset()


class Spoilt:
    """A sampler whose logits are NaN for some."""

    def __init__(self, inner: Sampler, seeds: dict[int, int]) -> None:
        self.inner, self.seeds, self.vocab_size = inner, seeds, inner.vocab_size

    def __call__(self, logits: torch.Tensor, rows: RowState, shape: StepShape, masks: Any = ()) -> Sampled:
        for i, row in enumerate(shape.sample_row.tolist()):
            if self.seeds[row] == Fate.NAN:
                logits[i] = torch.nan
        return self.inner(logits, rows, shape, masks)


def main() -> int:
    if sys.argv[1] != "serve":
        return child(Unreliable)
    serve(Settings.of(dtype="float32", port=0, num_gpu_blocks_override=512), child="tests.contract.unreliable")
    return 0


if __name__ == "__main__":
    sys.exit(main())
