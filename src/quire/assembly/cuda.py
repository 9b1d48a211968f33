"""What an engine on a GPU is made of: kernels, graphs, and a KV pool sized by computation. Needs Triton."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from quire.assembly.progress import compiling
from quire.assembly.speculate import VERIFIED, WIDTHS, build_proposer, draft_layers, load_draft, speculative
from quire.assembly.working_memory import LARGEST_GEMM_WORKSPACE, working_bytes
from quire.config import Settings
from quire.config.speculative import parse
from quire.engine.executor import Executor
from quire.executors.local import CudaExecutor
from quire.model_runner.graphs import CudaQueue, GraphKey, Works, bucket_seqs, bucket_tokens, no_precompile, padding
from quire.model_runner.memory import GIB, block_bytes, layer_shapes, plan_blocks
from quire.model_runner.sampling.features import PENALISED, RANDOM, TRUNCATED
from quire.model_runner.triton_steps import ForcedSteps, TritonSteps
from quire.models.base import Model
from quire.ops.base import Ops
from quire.ops.gemm import autotuning
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.ops.triton.precompile import Precompiler
from quire.scheduler.speculation import draft_counts

log = logging.getLogger(__name__)

PRODUCTS = "quire-products.json"
"""Where it is kept which products were fastest, beside the kernels that Triton keeps."""


def make_ops(device: torch.device, deterministic: bool = False) -> Ops:
    return BatchInvariantTritonOps(device) if deterministic else TritonOps(device)


def make_steps(settings: Settings, device: torch.device) -> TritonSteps:
    """Deterministic, whatever is drawn is drawn by the host: a crowd may have rows that only it can sample, and the two
    round otherwise."""
    asked = parse(settings.scheduler.speculative_config)
    forced = None if asked is None else asked.chance()
    if forced is not None:
        return ForcedSteps(device, forced)
    return TritonSteps(device, supported_features=0) if settings.execution.deterministic else TritonSteps(device)


def make_executor(
    settings: Settings,
    model: Model,
    device: torch.device,
    *,
    page_size: int,
    cap: int,
    rows: int,
    max_model_len: int,
    tokens: int,
    depth: int,
) -> Executor:
    """tokens: the most a step feeds; the rest as `Limits`. Raises InvalidConfig when K/V does not fit."""
    cache, spec = settings.cache, model.spec
    draft = load_draft(settings, model, device, make_ops(device))
    asked = parse(settings.scheduler.speculative_config)
    drafts = 0 if asked is None else asked.num_speculative_tokens
    layers = layer_shapes(spec.kv_shapes, model.dtype) + draft_layers(draft)
    largest = 0 if settings.execution.enforce_eager else LARGEST_GEMM_WORKSPACE
    free, total = torch.cuda.mem_get_info(device)
    work = working_bytes(spec, model.dtype, tokens=tokens, captured=largest, rows=cap * (1 + drafts))
    left = int(free - (1 - cache.gpu_memory_utilization) * total) - work
    pages = cache.num_gpu_blocks_override or plan_blocks(
        layers,
        page_size=page_size,
        rows=cap,
        max_model_len=max_model_len,
        budget=cache.kv_cache_memory_bytes or left,
    )
    began = time.monotonic()
    with autotuning(Path(knobs.cache.dir) / PRODUCTS):
        executor = CudaExecutor(
            model,
            pages=pages,
            page_size=page_size,
            rows=rows,
            max_model_len=max_model_len,
            tokens=tokens,
            dtype=model.dtype,
            device=device,
            steps=make_steps(settings, device),
            queue=CudaQueue(device, largest, make_precompiler()),
            proposer=build_proposer(settings, draft, pages=pages, page_size=page_size, rows=rows, device=device),
            depth=depth,
            warm=kinds(cap, tokens, largest)
            + speculative(cap, min(tokens, LARGEST_GEMM_WORKSPACE), drafts, draft is not None),
            paces=[
                (n, d) for d in draft_counts(drafts) for n in WIDTHS if n <= cap and n * (1 + d) <= VERIFIED and drafts
            ],
            catch_up=None
            if draft is None
            else GraphKey(
                most := bucket_tokens(min(tokens, LARGEST_GEMM_WORKSPACE)), bucket_seqs(1), most, 0, "follow"
            ),
        )
    held = (pages + 1) * block_bytes(layers, page_size)
    after = torch.cuda.mem_get_info(device)[0]
    log.info(
        "K/V: %d blocks of %d tokens, %.2f GiB; beside it %.2f GiB set aside, %.2f GiB taken so far; warm in %.1f s",
        *(pages, page_size, held / GIB, work / GIB, (free - after - held) / GIB, time.monotonic() - began),
    )
    return executor


def make_precompiler() -> Callable[[Works], None]:
    """Compiles with a thread a core; more than a few wait for Python's lock. The interpreter compiles nothing."""
    return no_precompile if knobs.runtime.interpret else Precompiler(min(16, os.cpu_count() or 1), compiling)


def kinds(cap: int, tokens: int, largest: int) -> list[GraphKey]:
    """Every step that is captured, so that none is after the start; largest first, so that smaller graphs fit into the
    memory of larger ones. Beyond, one of each size that kernels are compiled for."""
    decode = sorted({padding(n) for n in range(1, cap + 1)}, reverse=True)
    mixed = sorted({bucket_tokens(n) for n in range(1, min(tokens, largest) + 1)}, reverse=True)
    crowds = sorted({bucket_seqs(n) for n in range(1, cap + 1)}, reverse=True)
    most, every = bucket_tokens(tokens), RANDOM | TRUNCATED | PENALISED
    bodies = dict.fromkeys([GraphKey(most, crowds[0], most)] + [GraphKey(t, s, t) for t in mixed for s in crowds])
    heads = [GraphKey.head(n, asked) for asked in (0, RANDOM, RANDOM | TRUNCATED) for n in decode]
    return [*bodies, *(GraphKey(n, n, 1) for n in decode), GraphKey.head(decode[0], every), *heads]


def count_compiles() -> Callable[[], int]:
    """Counts the kernels that Triton compiles, or reads from its cache, from now on in this process."""
    seen: list[str] = []

    def heard(*, src: Any, **rest: Any) -> None:
        seen.append(src.name)
        log.warning("a kernel was compiled after the engine was ready: %s", src.name)

    knobs.compilation.listener = heard
    return lambda: len(seen)
