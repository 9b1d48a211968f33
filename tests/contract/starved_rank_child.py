"""A rank that runs out of memory in the step in which a request with a certain seed comes to it: on a GPU because the
rest of the card is taken, on a CPU by an injected error."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from quire.assembly.rank_child import main
from quire.engine.executor import Executor
from quire.executors.local import LocalExecutor
from quire.model_runner.runner import BaseRunner
from quire.scheduler.plan import Plan

STARVED = 1
"""The rank that runs out of memory."""

SEED = 666_101
"""Of the request that makes it do so."""

SECRET = "/srv/models/secret.bin at 0x7f00dead"
"""What a library may well write into an error, and no client may read."""


class Starved:
    """Takes all memory in the step that opens the seed's row. taken: what it holds of a card."""

    def __init__(self, runner: BaseRunner) -> None:
        self.taken: list[torch.Tensor] = []
        self.apply_plan = runner.pool.apply_plan
        runner.pool.apply_plan = self.run_out  # type: ignore[method-assign]

    def run_out(self, plan: Plan) -> None:
        if dist.get_rank() == STARVED and any(opened.seed == SEED for opened in plan.new_sequences):
            self._take_all()
        self.apply_plan(plan)

    def _take_all(self) -> None:
        """Allocate until torch refuses, which is the error of the step."""
        if not torch.cuda.is_available():
            raise torch.OutOfMemoryError(f"tried to allocate 80 GiB for {SECRET}")
        for size in (1 << 30, 1 << 26, 1 << 22):
            try:
                while True:
                    self.taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                continue
        torch.empty(1 << 26, dtype=torch.uint8, device="cuda")


def starved(executor: Executor) -> Executor:
    Starved(cast(LocalExecutor, executor).runner)
    return executor


if __name__ == "__main__":
    main(wrap=starved)
