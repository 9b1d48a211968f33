"""Device work that is recorded instead of run: captured as a CUDA graph, whatever other threads do with the GPU
meanwhile, or noted so that its kernels are compiled ahead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from quire.heap import uncollected

PRECOMPILING: ContextVar[Callable[..., None] | None] = ContextVar("quire_heard", default=None)
"""Called with this thread's launches (kernel, grid, arguments) instead of running them: see `triton.precompile`.
Meanwhile nothing is exchanged with other ranks, which may not do the same."""


class NotCapturable(RuntimeError):
    """Something must be done once before the work can be captured: the message says what."""


def captured(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The graph of `work`, which is recorded and not run; kernels that were never launched are loaded. pool: a torch
    handle of memory that graphs share which never run at the same time; None: the graph has its own."""
    graph = torch.cuda.CUDAGraph()
    # The garbage collector may free pinned memory. The allocator records an event on the stream that copied it last,
    # and one that was recorded during capture can never be queried, so that a later copy fails.
    with uncollected():
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            work()
        except BaseException:
            # What could not be captured may have recorded nothing, which torch warns of.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
