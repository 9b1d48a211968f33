"""An engine from settings: 'auto' is resolved here, where device and checkpoint are known, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch

from quire.assembly.extras import extra
from quire.assembly.host import on_host
from quire.assembly.limits import Limits, Made, choose_device, choose_threads, resolve
from quire.assembly.progress import loading
from quire.assembly.quality import build_canary, build_kv, found
from quire.assembly.recording import build_recording
from quire.assembly.speculate import build_speculation
from quire.assembly.working_memory import host_bytes
from quire.config import Settings
from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.executor import Description, Executor
from quire.engine.timing import (
    LatencyController,
    MeasuredPlanDelay,
    NoPlanDelay,
    PlanDelay,
    StepBudget,
    UnlimitedStepBudget,
)
from quire.errors import InvalidConfig
from quire.model_runner.memory import LayerShape
from quire.models.base import Model
from quire.models.registry import parameters
from quire.ops.base import Ops
from quire.ops.batch_invariant import BatchInvariantOps, SteadyOps, has_stable_kernels
from quire.ops.reference import ReferenceOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.policy import ADMISSION_POLICIES, EVICTION_POLICIES, PRIORITY_POLICIES, RESERVE_POLICIES
from quire.scheduler.scheduler import Scheduler
from quire.types import UNLIMITED
from quire.weights.canary import Canary
from quire.weights.load import load_model
from quire.weights.locate import EMBEDDED, locate


def build_engine(
    settings: Settings,
    *,
    observers: Iterable[Observer] = (),
    keep: int = 0,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
) -> Engine:
    """Load the model and put an engine around it. wrap: what goes around its executor.

    Raises InvalidModel or InvalidConfig.
    """
    make = build_recording(settings.execution)
    executor, limits, facts = make_executor(settings)
    executor = wrap(executor)
    engine = make(
        build_scheduler(settings, executor.describe(), limits),
        executor,
        lookahead=limits.depth,
        observers=observers,
        step_budget=build_pacer(settings.scheduler.latency_target_ms),
        plan_delay=build_slack(settings.executor.executor),
        keep=keep,
    )
    engine.description = replace(engine.description, static_gauges=engine.description.static_gauges | facts)
    return engine


def make_executor(settings: Settings) -> Made:
    """What runs the steps, as `executor` says. Raises InvalidModel or InvalidConfig."""
    kind = settings.executor.executor
    try:
        return _torch(settings) if kind == "local" else cast(Made, extra(f"quire.assembly.{kind}", kind).make(settings))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        reason = str(error).split("\n")[0].rstrip(".")
        raise InvalidConfig(
            f"there is not enough memory for this: {reason}. Lower what sets it: num_gpu_blocks_override, "
            "kv_cache_memory_bytes, gpu_memory_utilization, max_num_seqs or max_model_len; or end what else uses it"
        ) from error


def _torch(settings: Settings) -> Made:
    """Our own layers, in this process."""
    device = choose_device(settings.execution.device)
    canary = build_canary(settings)
    model = _load(settings, device, canary)
    torch.set_num_threads(settings.execution.threads or choose_threads(parameters(model.spec)))
    limits = resolve(settings, model.spec, device)
    layers, kept = build_kv(settings, model, device)
    return Made(_executor(settings, model, limits, device, layers), limits, found(canary) | kept)


def build_scheduler(settings: Settings, about: Description, limits: Limits) -> Scheduler:
    """The scheduler for an executor that says this about itself."""
    cache = settings.cache
    index, shelf = (
        make_prefix_cache(about.block_size, cache.enable_prefix_caching),
        EVICTION_POLICIES[cache.eviction_policy](),
    )
    return Scheduler(
        KVCacheManager(
            about.num_blocks, about.block_size, index, shelf, reserve_policy=RESERVE_POLICIES[cache.pressure_policy]
        ),
        rows=about.num_rows,
        max_num_seqs=limits.cap,
        max_num_batched_tokens=limits.budget,
        max_background_tokens=UNLIMITED if limits.chunk == UNLIMITED else max(limits.cap, limits.budget // 8),
        max_chunk_tokens=limits.chunk,
        admission_policy=ADMISSION_POLICIES[settings.scheduler.batching],
        priority_policy=PRIORITY_POLICIES[settings.scheduler.scheduling_policy],
        speculation=build_speculation(settings, about),
    )


def build_pacer(milliseconds: float) -> StepBudget:
    """The pacer for a latency target; 0 for none."""
    return LatencyController(milliseconds / 1e3) if milliseconds else UnlimitedStepBudget()


def build_slack(executor: str) -> PlanDelay:
    """How late steps are planned; at once where the device is elsewhere, for then the way there is what is hidden."""
    return MeasuredPlanDelay() if executor == "local" else NoPlanDelay()


def _load(settings: Settings, device: torch.device, canary: Canary | None) -> Model:
    model = settings.model
    with loading(model.model) as progress:
        return load_model(
            locate(model.model, revision=model.revision, cache=model.download_dir),
            dtype=model.dtype,
            device=device,
            ops=choose_ops(
                device, settings.execution.deterministic, embedded=model.model == EMBEDDED and model.dtype == "auto"
            ),
            load_format=model.load_format,
            quantization=model.quantization,
            canary=canary,
            seed=model.seed,
            progress=progress,
            room=host_bytes() if device.type == "cpu" else math.inf,
        )


def _gpu() -> Any:
    """The module that knows GPUs, asked for by name: it needs Triton, which is there where they are."""
    return import_module("quire.assembly.cuda")


def count_compiles(device: str) -> Callable[[], int]:
    """How many kernels have been compiled since this was called; on a CPU none is."""
    return int if device == "cpu" else cast(Callable[[], int], _gpu().count_compiles())


def choose_ops(device: torch.device, deterministic: bool | None = None, *, embedded: bool = False) -> Ops:
    """The kernels for a device. deterministic: each row's bits are its own; None: for the embedded model as it is
    shipped, on a CPU, where that costs little."""
    if device.type != "cpu":
        return cast(Ops, _gpu().make_ops(device, bool(deterministic)))
    if deterministic is None and embedded:
        return SteadyOps() if has_stable_kernels() else BatchInvariantOps()
    return BatchInvariantOps() if deterministic else ReferenceOps()


def _executor(
    settings: Settings, model: Model, limits: Limits, device: torch.device, layers: Sequence[LayerShape]
) -> Executor:
    if device.type == "cpu":
        return on_host(settings, model, limits, layers)
    sizes = {name: getattr(limits, name) for name in ("page_size", "cap", "rows", "max_model_len", "depth")}
    return cast(Executor, _gpu().make_executor(settings, model, device, tokens=limits.budget, **sizes))
