"""CUDA graph capture of one thread's stream, whatever other threads do with the GPU meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NotCapturable(RuntimeError):
    """Something must be done once before the work can be captured: the message says what."""


def captured(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The graph of `work`, which is recorded and not run; kernels that were never launched are loaded. pool: a torch
    handle of memory that graphs share which never run at the same time; None: the graph has its own."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="relaxed")
    try:
        work()
    finally:
        graph.capture_end()
    return graph
