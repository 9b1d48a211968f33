"""Work of this thread's stream as a CUDA graph, whatever other threads do with the card meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Recorded and not done. pool: torch's handle of memory that graphs share which never run at the same time; None:
    the graph has its own."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph
