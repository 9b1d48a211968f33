"""An engine from settings: 'auto' is resolved here, where device and checkpoint are known, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch

from quire.build.progress import loading
from quire.build.quality import build_canary, build_kv, found
from quire.build.speculate import build_drafter, build_speculation, draft_layers, load_draft
from quire.config import Settings
from quire.core.kv import KV, prefix_index
from quire.core.policy import ADMISSIONS, ORDERS, SHELVES
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.executor import Description, Executor
from quire.engine.pacer import LatencyPace, NoPace, Pacer
from quire.errors import InvalidConfig
from quire.executors.local import LocalExecutor
from quire.models.base import Model
from quire.models.registry import parameters
from quire.models.spec import ModelSpec
from quire.ops.base import Ops
from quire.ops.reference import ReferenceOps
from quire.runner.memory import LayerShape, cpu_budget, plan_pages
from quire.values import MANY
from quire.weights.canary import Canary
from quire.weights.load import load_model
from quire.weights.locate import locate

_SMALL = 20_000_000


class Limits(NamedTuple):
    """Resolved sizes. cap: sequences at once. rows: places on the device. budget, chunk: tokens a step, a span."""

    max_model_len: int
    page_size: int
    cap: int
    rows: int
    depth: int
    budget: int
    chunk: int


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
    device = choose_device(settings.execution.device)
    canary = build_canary(settings)
    model = _load(settings, device, canary)
    torch.set_num_threads(settings.execution.threads or choose_threads(parameters(model.spec)))
    limits = resolve(settings, model.spec, device)
    layers, kept = build_kv(settings, model, device)
    executor = wrap(_executor(settings, model, limits, device, layers))
    engine = Engine(
        build_scheduler(settings, executor.describe(), limits),
        executor,
        depth=limits.depth,
        observers=observers,
        pacer=build_pacer(settings.scheduler.latency_target_ms),
        keep=keep,
    )
    engine.about = replace(engine.about, facts=found(canary) | kept)
    return engine


def build_scheduler(settings: Settings, about: Description, limits: Limits) -> Scheduler:
    """The scheduler for an executor that says this about itself."""
    index = prefix_index(about.page_size, settings.cache.enable_prefix_caching)
    return Scheduler(
        KV(about.pages, about.page_size, index, SHELVES[settings.cache.eviction_policy]()),
        rows=about.rows,
        cap=limits.cap,
        budget=limits.budget,
        gap=MANY if limits.chunk == MANY else max(limits.cap, limits.budget // 8),
        chunk=limits.chunk,
        admit=ADMISSIONS[settings.scheduler.batching],
        order=ORDERS[settings.scheduler.scheduling_policy],
        speculation=build_speculation(settings, about),
    )


def build_pacer(milliseconds: float) -> Pacer:
    """The pacer for a latency target; 0 for none."""
    return LatencyPace(milliseconds / 1e3) if milliseconds else NoPace()


def choose_device(name: str) -> torch.device:
    """The device for 'auto', 'cpu' or 'cuda'. Raises InvalidConfig when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("--device cuda: torch sees no GPU here; use --device cpu, or install torch with CUDA")
    return torch.device(name)


def choose_threads(parameters: int) -> int:
    """CPU threads for a model of this many parameters: torch's own choice, but one for a small one.

    Below about 20 M parameters a second thread gains nothing alone, and costs up to five times wherever another process
    keeps its core busy: every operation ends in a barrier (docs/benchmarks/cpu-threads).
    """
    return 1 if parameters < _SMALL else torch.get_num_threads()


def resolve(settings: Settings, spec: ModelSpec, device: torch.device) -> Limits:
    """Every 'auto' that depends on device or model. Raises InvalidConfig for a context the model does not have."""
    cpu = device.type == "cpu"
    scheduler, asked = settings.scheduler, settings.model.max_model_len
    if asked is not None and asked > spec.context:
        raise InvalidConfig(
            f"max_model_len {asked} is above the {spec.context} tokens this model was made for: lower it"
        )
    length = asked or spec.context
    cap = scheduler.max_num_seqs or (64 if cpu else 256)
    depth = scheduler.lookahead if scheduler.lookahead is not None else (0 if cpu else 1)
    budget = max(cap, scheduler.max_num_batched_tokens or (512 if cpu else 8192))
    chunk = scheduler.long_prefill_token_threshold or budget
    return Limits(
        max_model_len=length,
        page_size=settings.cache.block_size or (16 if cpu else 64),
        cap=cap,
        rows=cap * (1 + depth),
        depth=depth,
        budget=budget if scheduler.enable_chunked_prefill else max(budget, length),
        chunk=chunk if scheduler.enable_chunked_prefill else MANY,
    )


def _load(settings: Settings, device: torch.device, canary: Canary | None) -> Model:
    model = settings.model
    with loading(model.model) as progress:
        return load_model(
            locate(model.model, revision=model.revision, cache=model.download_dir),
            dtype=model.dtype,
            device=device,
            ops=choose_ops(device),
            load_format=model.load_format,
            quantization=model.quantization,
            canary=canary,
            seed=model.seed,
            progress=progress,
        )


def _gpu() -> Any:
    """The module that knows GPUs, asked for by name: it needs Triton, which is there where they are."""
    return import_module("quire.build.cuda")


def count_compiles(device: str) -> Callable[[], int]:
    """How many kernels have been compiled since this was called; on a CPU none is."""
    return int if device == "cpu" else cast(Callable[[], int], _gpu().count_compiles())


def choose_ops(device: torch.device) -> Ops:
    """The kernels for a device."""
    return ReferenceOps() if device.type == "cpu" else cast(Ops, _gpu().make_ops(device))


def _executor(
    settings: Settings, model: Model, limits: Limits, device: torch.device, layers: Sequence[LayerShape]
) -> Executor:
    if device.type == "cpu":
        return _local(settings, model, limits, layers)
    sizes = {name: getattr(limits, name) for name in ("page_size", "cap", "rows", "max_model_len", "depth")}
    return cast(Executor, _gpu().make_executor(settings, model, device, tokens=limits.budget, **sizes))


def _local(settings: Settings, model: Model, limits: Limits, layers: Sequence[LayerShape]) -> Executor:
    cache, draft = settings.cache, load_draft(settings, model, torch.device("cpu"), ReferenceOps())
    pages = cache.num_gpu_blocks_override or plan_pages(
        (*layers, *draft_layers(draft)),
        page_size=limits.page_size,
        rows=limits.cap,
        max_model_len=limits.max_model_len,
        budget=cache.kv_cache_memory_bytes or cpu_budget(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
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
