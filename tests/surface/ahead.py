"""The run-ahead executor of a GPU where there is none: `quire.assembly.cuda`'s own, its kernels interpreted, on a CPU.

`python -m tests.surface.ahead ...` is `quire ...` with it. The engine's process is this module too, with a number for
its argument. Only what asks the card itself is replaced: its memory, and its queue of work, which is done at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

if not torch.cuda.is_available():  # before any kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from quire.assembly.limits import Limits
from quire.config import Settings
from quire.engine.executor import Executor
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.images import ImageRunner
from quire.model_runner.memory import GIB, LayerShape
from quire.model_runner.pooling import PoolingHeads
from quire.models.registry import Model


class Plain(WorkQueue):
    """`CudaQueue`'s arguments; nothing is captured, so nothing has to be got ready."""

    def __init__(self, device: torch.device, largest: int, *more: object) -> None:
        self.largest = largest

    def prepare(self, key: GraphKey, work: Callable[[], object]) -> None:
        return


def make(
    settings: Settings,
    model: Model,
    limits: Limits,
    layers: Sequence[LayerShape],
    *,
    heads: PoolingHeads | None = None,
    images: ImageRunner | None = None,
    parallel: ParallelGroup = ONE_RANK,
    coming: int = 0,
) -> Executor:
    """As `quire.assembly.engine.on_host`, which this stands in for. coming: bytes of what is packed later."""
    from quire.assembly import cuda

    return cuda.make_executor(settings, model, torch.device("cpu"), limits, heads, parallel, layers, images)


@contextmanager
def installed() -> Iterator[None]:
    """Inside, engines that would run on the CPU run as on a GPU."""
    import tests.ops.triton.conftest  # noqa: F401  the interpreter, as these tests have it
    from quire.assembly import cuda, engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "CudaQueue", Plain)
        patch.setattr(cuda, "STEP_TIME_WIDTHS", (1,))  # what steps cost is measured, and interpreted steps are slow
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIB, GIB))
        # A CPU's operations, whose steps are not padded elsewhere, leave rows of padding as memory was: were it NaN,
        # the null block would have it, and what reads that with a weight of zero.
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        patch.setattr(engine, "on_host", make)
        yield


def main(arguments: Sequence[str]) -> Any:
    from quire.assembly.engine_child import main as child

    with installed():
        if arguments and arguments[0].isdecimal():
            return child()
        from quire.assembly.server import serve
        from quire.cli import main as quire
        from quire.cli import serve as command

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "serve", partial(serve, child=__spec__.name))
            return quire.main(list(arguments), prog_name="quire")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
