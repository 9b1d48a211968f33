"""An engine's executor on a GPU: kernels, graphs, and a KV pool sized from the memory that is left. Needs Triton."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from quire.assembly.limits import (
    LARGEST_GEMM_WORKSPACE,
    Limits,
    gathered_tokens,
    rows_with_kv,
    snapshot_slots,
    working_bytes,
)
from quire.assembly.progress import compiling, preparing
from quire.assembly.speculate import (
    MAX_VERIFIED_TOKENS,
    STEP_TIME_WIDTHS,
    build_proposer,
    draft_layers,
    load_draft,
    most_drafts,
    speculative_graph_keys,
    wants_mtp,
)
from quire.config import Settings
from quire.config.speculative import parse
from quire.errors import InvalidConfig
from quire.executors.local import CudaExecutor
from quire.layers.linear import ParallelGroup
from quire.model_runner.graphs import (
    CudaQueue,
    GraphKey,
    Works,
    bucket_seqs,
    bucket_tokens,
    no_precompile,
    padding,
    stand_ins,
)
from quire.model_runner.images import ImageRunner
from quire.model_runner.memory import GIB, LayerShape, block_bytes, plan_blocks, state_bytes
from quire.model_runner.pooling import PoolingHeads
from quire.model_runner.sampling.features import EDITED, MASKED, RANDOM, SCORED, TRUNCATED
from quire.model_runner.sampling.noise import BLOCK
from quire.model_runner.triton_steps import ForcedSteps, TritonSteps
from quire.models.registry import Model
from quire.models.spec import ModelSpec
from quire.ops.base import Ops
from quire.ops.gemm import autotuning
from quire.ops.quantized import E4M3, FLOAT8
from quire.ops.triton.launch import ADA
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.ops.triton.precompile import Precompiler
from quire.scheduler.speculation import draft_counts

log = logging.getLogger(__name__)

AUTOTUNE_CACHE = "quire-products.json"
"""File of the fastest GEMM for each shape, in Triton's cache folder."""


def make_ops(device: torch.device, deterministic: bool = False, *, rounds_float8: bool = True) -> Ops:
    """The Triton kernels, batch-invariant ones if `deterministic`. rounds_float8: see `TritonOps.rounds`."""
    return BatchInvariantTritonOps(device) if deterministic else TritonOps(device, rounds_float8=rounds_float8)


def check_float8(name: str, device: torch.device) -> None:
    """Raise InvalidConfig where the GPU's kernels do not read K/V of `--kv-cache-dtype` name."""
    found = torch.cuda.get_device_capability(device)
    if FLOAT8[name].dtype is E4M3 and found < ADA:
        raise InvalidConfig(
            f"--kv-cache-dtype {name} needs a GPU of compute capability {ADA[0]}.{ADA[1]} or later, and this one has "
            f"{found[0]}.{found[1]}: use fp8_e5m2, or leave it at auto",
            param="kv_cache_dtype",
        )


def make_steps(settings: Settings, device: torch.device) -> TritonSteps:
    """What runs around the model's forward: inputs, sampling, drafts."""
    speculative = parse(settings.scheduler.speculative_config)
    acceptance = None if speculative is None else speculative.draft_acceptance()
    if acceptance is not None:
        return ForcedSteps(device, acceptance)
    return TritonSteps(device)


def make_executor(
    settings: Settings,
    model: Model,
    device: torch.device,
    limits: Limits,
    heads: PoolingHeads | None,
    parallel: ParallelGroup,
    layers: Sequence[LayerShape],
    images: ImageRunner | None = None,
    image_tokens: tuple[int, int] = (0, 0),
) -> CudaExecutor:
    """The executor on `device`, its graphs captured. layers, heads, images: as in `CudaExecutor`. image_tokens: as in
    `working_bytes`. parallel: all ranks have as many blocks as the one with the fewest.

    Raises InvalidConfig when K/V does not fit.
    """
    cache, spec = settings.cache, model.spec
    max_num_seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    draft = load_draft(
        settings, model, device, make_ops(device, rounds_float8=settings.model.fp8_activations == "auto"), parallel
    )
    drafts = most_drafts(settings)
    every = (*layers, *draft_layers(draft))
    # Loading leaves the memory of repacked matrices in the caching allocator, where it counts as taken.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    work = _work(settings, spec, model.dtype, limits, image_tokens if images else (0, 0))
    left = int(free - (1 - cache.gpu_memory_utilization) * total) - work
    budget, states = cache.kv_cache_memory_bytes or left, limits.num_rows * (1 + drafts)
    # All ranks have as many of each as the one with the least memory.
    snapshots = parallel.smallest(snapshot_slots(settings, limits, every, states, budget))
    sizes: dict[str, Any] = {"page_size": limits.block_size, "rows": limits.num_rows}
    sizes["pages"] = blocks = parallel.smallest(_num_blocks(settings, spec, every, limits, budget, states + snapshots))
    keys = _keys(settings, spec, limits, draft is not None)
    started = time.monotonic()
    with autotuning(Path(knobs.cache.dir) / AUTOTUNE_CACHE):
        executor = CudaExecutor(
            model,
            **sizes,
            max_model_len=limits.max_model_len,
            tokens=tokens,
            dtype=model.dtype,
            layers=layers,
            device=device,
            steps=make_steps(settings, device),
            queue=CudaQueue(device, _captured(settings), make_precompiler(parallel), preparing, agreement(parallel)),
            proposer=build_proposer(settings, draft, **sizes, device=device),
            depth=limits.lookahead,
            warm=keys,
            larger=_postponed(settings, keys),
            paces=_timed_steps(max_num_seqs, drafts),
            heads=heads,
            images=images,
            snapshots=snapshots,
            catch_up=_catch_up(settings, tokens, draft is not None),
            part=None if model.head is None else model.head.part(BLOCK),
        )
    state_slots = states + snapshots + 1
    kv_bytes = (blocks + 1) * block_bytes(every, limits.block_size) + state_slots * state_bytes(every)
    beside = free - torch.cuda.mem_get_info(device)[0] - kv_bytes
    _log_memory(blocks, limits.block_size, [kv_bytes, work, beside], time.monotonic() - started)
    return executor


def _work(
    settings: Settings, spec: ModelSpec, dtype: torch.dtype, limits: Limits, image_tokens: tuple[int, int]
) -> int:
    """Bytes beside weights and K/V."""
    return working_bytes(
        spec,
        dtype,
        tokens=limits.max_num_batched_tokens,
        captured=_captured(settings),
        rows=limits.max_num_seqs * (1 + most_drafts(settings)) if spec.generates else 0,
        gathered=gathered_tokens(limits, torch.device("cuda")),
        longest=limits.max_model_len,
        image_tokens=image_tokens,
    )


def _captured(settings: Settings) -> int:
    """The most tokens of a step that is captured."""
    return 0 if settings.execution.enforce_eager else LARGEST_GEMM_WORKSPACE


def _keys(settings: Settings, spec: ModelSpec, limits: Limits, by_model: bool) -> list[GraphKey]:
    """The steps to prepare at the start. by_model: a model drafts."""
    tokens = limits.max_num_batched_tokens
    keys = graph_keys(limits.max_num_seqs, tokens, _captured(settings))
    if not spec.generates:
        keys = pooling_keys(keys, "hidden" if spec.bidirectional else "feed")
    fed = keys if wants_mtp(settings) else ()
    largest = min(tokens, LARGEST_GEMM_WORKSPACE)
    return keys + speculative_graph_keys(limits.max_num_seqs, largest, most_drafts(settings), by_model, fed)


def _postponed(settings: Settings, keys: Sequence[GraphKey]) -> dict[GraphKey, GraphKey]:
    """Which steps get their graphs later, see `stand_ins`. None of stages, which do not run a step at the same time;
    with drafts, whose steps are timed at the start; and in deterministic mode, where products are compared before they
    are captured."""
    execution = settings.execution
    at_once = execution.pipeline_parallel_size > 1 or execution.deterministic or most_drafts(settings)
    captured = _captured(settings)
    return {} if at_once else stand_ins(key for key in keys if key.tokens <= captured)


def agreement(parallel: ParallelGroup) -> Callable[[bool], bool]:
    """Of `CudaQueue`: whether all ranks have done something."""
    return lambda done: bool(parallel.smallest(done))


def prepare_quietly(executor: CudaExecutor) -> Callable[[], bool]:
    """`executor.prepare_next`, whose kernels were compiled before: `count_compiles` does not count those it reads."""

    def prepare() -> bool:
        with knobs.compilation.scope():
            knobs.compilation.listener = None
            return executor.prepare_next()

    return prepare


def _catch_up(settings: Settings, tokens: int, by_model: bool) -> GraphKey | None:
    """A draft model's forward that is timed at the start."""
    follow = bucket_tokens(min(tokens, LARGEST_GEMM_WORKSPACE))
    return GraphKey(follow, bucket_seqs(1), follow, 0, "follow") if by_model and not wants_mtp(settings) else None


def _log_memory(blocks: int, block_size: int, sizes: Sequence[int], seconds: float) -> None:
    """Say what memory is for. sizes: bytes of K/V, reserved beside it, and allocated beside it so far."""
    log.info(
        "K/V cache: %d blocks of %d tokens, %.2f GiB; reserved beside it %.2f GiB, allocated so far "
        "%.2f GiB; warmed up in %.1f s",
        blocks,
        block_size,
        *(size / GIB for size in sizes),
        seconds,
    )


def _num_blocks(
    settings: Settings, spec: ModelSpec, layers: Sequence[LayerShape], limits: Limits, budget: int, states: int
) -> int:
    """Blocks of K/V in `budget` bytes, or as the options say. states: those of recurrent layers that are kept beside.
    Raises InvalidConfig when not one sequence fits."""
    return settings.cache.num_gpu_blocks_override or plan_blocks(
        layers,
        page_size=limits.block_size,
        rows=rows_with_kv(spec, limits),
        max_model_len=limits.max_model_len,
        budget=budget,
        states=states,
    )


def _timed_steps(max_num_seqs: int, drafts: int) -> list[tuple[int, int]]:
    """(sequences, drafts) of the steps whose time is measured at the start; none without speculation."""
    if not drafts:
        return []
    widths = [n for n in STEP_TIME_WIDTHS if n <= max_num_seqs]
    return [(n, d) for d in draft_counts(drafts) for n in widths if n * (1 + d) <= MAX_VERIFIED_TOKENS]


def make_precompiler(parallel: ParallelGroup) -> Callable[[Works], None]:
    """Compiles kernels in threads, up to 16: more wait for Python's lock. With Triton's interpreter there is nothing to
    compile."""
    if knobs.runtime.interpret:
        return no_precompile
    return Precompiler(min(16, os.cpu_count() or 1), compiling, parallel)


def graph_keys(max_num_seqs: int, tokens: int, captured: int) -> list[GraphKey]:
    """The steps to prepare at the start, so that nothing is compiled later. captured: most tokens of a captured step.

    Largest first, so that smaller graphs fit into the memory of larger ones. Above `captured` it is one step of each
    size that kernels are compiled for.
    """
    decode = sorted({padding(n) for n in range(1, max_num_seqs + 1)}, reverse=True)
    mixed = sorted({bucket_tokens(n) for n in range(1, min(tokens, captured) + 1)}, reverse=True)
    widths = sorted({bucket_seqs(n) for n in range(1, max_num_seqs + 1)}, reverse=True)
    largest = bucket_tokens(tokens)
    forwards = [GraphKey(largest, widths[0], largest)] + [GraphKey(t, s, t) for t in mixed for s in widths]
    draws = (0, RANDOM, RANDOM | TRUNCATED)
    heads = [GraphKey.head(n, features) for features in draws for n in decode]
    # Logits with bias or penalties are float32, for which the kernels are compiled again.
    edited = [GraphKey.head(decode[0], features | EDITED | SCORED) for features in draws]
    edited.append(GraphKey.head(decode[0], MASKED))
    return [*dict.fromkeys(forwards), *(GraphKey(n, n, 1) for n in decode), *edited, *heads]


def pooling_keys(keys: Sequence[GraphKey], kind: str) -> list[GraphKey]:
    """Those of `keys` that a model which does not generate runs: forwards of prompts, of this kind."""
    return [key._replace(kind=kind) for key in keys if key.kind == "feed" and key.max_query > 1]


def count_compiles() -> Callable[[], int]:
    """A counter of the kernels that Triton compiles in this process, or reads from its cache, from now on."""
    names: list[str] = []

    def on_compile(*, src: Any, **rest: Any) -> None:
        names.append(src.name)
        log.warning("a kernel was compiled after the engine was ready: %s", src.name)

    knobs.compilation.listener = on_compile
    return lambda: len(names)
