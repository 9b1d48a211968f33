"""An engine process whose steps take a fixed time: `python -m benchmarks.timed FD`, as `quire.assembly.engine_child`.

QUIRE_BENCH_STEP_MS says how long.
"""

from __future__ import annotations

import os
import sys

from quire.assembly.engine_child import main
from quire.engine.executor import Executor
from quire.executors.synthetic import SyntheticExecutor
from quire.scheduler.step_time import StepCost

STEP = "QUIRE_BENCH_STEP_MS"
PAGES = 1 << 14


def timed(executor: Executor) -> SyntheticExecutor:
    """The same, without a model and with as many pages as a card has."""
    about = executor.describe()
    executor.close()
    return SyntheticExecutor(
        pages=PAGES,
        page_size=about.block_size,
        rows=about.num_rows,
        max_model_len=about.max_model_len,
        vocab_size=about.vocab_size,
        depth=about.lookahead,
        cost=StepCost(float(os.environ[STEP]) / 1e3),
    )


if __name__ == "__main__":
    sys.exit(main(timed))
