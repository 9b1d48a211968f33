"""`LLM` on the card if there is one; else through the same executor, whose kernels the interpreter runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire import LLM
from quire.assembly import engine
from quire.assembly.limits import Limits, rows_with_kv
from quire.assembly.speculate import build_proposer
from quire.config import Settings
from quire.executors.local import CudaExecutor
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.model_runner.graphs import GraphKey, WorkQueue
from quire.model_runner.images import ImageRunner
from quire.model_runner.memory import LayerShape, plan_blocks
from quire.model_runner.pooling import PoolingHeads
from quire.model_runner.triton_steps import TritonSteps
from quire.models.registry import Model
from quire.ops.base import Ops
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps

ON_CARD = torch.cuda.is_available()
CPU = torch.device("cpu")


def interpreted(
    settings: Settings,
    model: Model,
    limits: Limits,
    layers: Sequence[LayerShape],
    *,
    heads: PoolingHeads | None = None,
    images: ImageRunner | None = None,
    parallel: ParallelGroup = ONE_RANK,
    coming: int = 0,
) -> CudaExecutor:
    """As `assembly.cuda.make_executor` builds it for a card. coming: for `assembly.engine.on_host`, which it replaces;
    no memory is measured here."""
    sizes: dict[str, Any] = {"page_size": limits.block_size, "rows": limits.num_rows}
    sizes["pages"] = settings.cache.num_gpu_blocks_override or plan_blocks(
        layers,
        page_size=limits.block_size,
        rows=rows_with_kv(model.spec, limits),
        max_model_len=limits.max_model_len,
        budget=1 << 26,
    )
    return CudaExecutor(
        model,
        **sizes,
        max_model_len=limits.max_model_len,
        tokens=limits.max_num_batched_tokens,
        dtype=model.dtype,
        device=CPU,
        steps=TritonSteps(CPU),
        queue=WorkQueue(),
        proposer=build_proposer(settings, None, **sizes, device=CPU),
        depth=limits.lookahead,
        warm=[GraphKey(16, 16, 16)] if model.spec.generates else [GraphKey(16, 16, 16, 0, "hidden")],
        heads=heads,
        images=images,
    )


def kernels(device: torch.device, deterministic: bool | None = None, **options: Any) -> Ops:
    """As `assembly.cuda.make_ops`."""
    return BatchInvariantTritonOps(device) if deterministic else TritonOps(device)


@contextmanager
def gpu_llm(model: str, **options: Any) -> Iterator[LLM]:
    """An `LLM` whose steps run on a GPU, or as there. It takes 256 MiB for K/V: other tests share the card, and what is
    free says nothing."""
    if ON_CARD:
        memory = {} if "num_gpu_blocks_override" in options else {"kv_cache_memory_bytes": 1 << 28}
        with LLM(model, device="cuda", **{**memory, **options}) as llm:
            yield llm
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "on_host", interpreted)
        patch.setattr(engine, "choose_ops", kernels)
        with LLM(model, device="cpu", **{"lookahead": 1, **options}) as llm:
            assert isinstance(llm._engine.executor, CudaExecutor)
            yield llm
