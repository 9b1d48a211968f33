"""The executor around a model whose rows and pages this host keeps: its pool sized, its drafter made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.assembly.limits import Limits
from quire.assembly.speculate import build_drafter, draft_layers, load_draft
from quire.assembly.working_memory import host_bytes
from quire.config import Settings
from quire.executors.local import LocalExecutor
from quire.model_runner.memory import LayerShape, cpu_budget, plan_blocks
from quire.models.base import Model
from quire.ops.reference import ReferenceOps


def on_host(settings: Settings, model: Model, limits: Limits, layers: Sequence[LayerShape]) -> LocalExecutor:
    """Raises InvalidConfig when K/V does not fit."""
    cache, draft = settings.cache, load_draft(settings, model, torch.device("cpu"), ReferenceOps())
    pages = cache.num_gpu_blocks_override or plan_blocks(
        (*layers, *draft_layers(draft)),
        page_size=limits.page_size,
        rows=limits.cap,
        max_model_len=limits.max_model_len,
        budget=cache.kv_cache_memory_bytes or cpu_budget(host_bytes()),
    )
    return LocalExecutor(
        model,
        pages=pages,
        page_size=limits.page_size,
        rows=limits.rows,
        max_model_len=limits.max_model_len,
        dtype=model.dtype,
        drafter=build_drafter(settings, draft, pages=pages, page_size=limits.page_size, rows=limits.rows),
        depth=limits.depth,
        layers=layers,
    )
