"""Work of this thread's stream as a CUDA graph, whatever other threads do with the card meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NotCapturable(RuntimeError):
    """Something of it has to be done for once before the work can be captured: it says what."""


def captured(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Recorded and not done; kernels that nobody has launched yet are loaded meanwhile. pool: torch's handle of memory
    that graphs share which never run at the same time; None: the graph has its own."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="relaxed")
    try:
        work()
    finally:
        graph.capture_end()
    return graph
