"""An engine from settings: 'auto' is resolved here, where device and checkpoint are known, and nowhere else."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, cast

import torch

from quire.assembly import extra
from quire.assembly.engine_main import start_driver
from quire.assembly.images import find_processor, image_tokens
from quire.assembly.limits import (
    BuiltExecutor,
    Limits,
    choose_device,
    choose_threads,
    host_bytes,
    reject_options,
    resolve,
    rows_with_kv,
    snapshot_slots,
)
from quire.assembly.place import may_use_gpu, place_of
from quire.assembly.progress import loading
from quire.assembly.speculate import build_drafter, build_speculation, draft_layers, load_draft, most_drafts, wants_mtp
from quire.assembly.tiers import refuse_tiers, tiered
from quire.assembly.tokenizer import build_tokenizer, hf_overrides, pooler_of, word_ids
from quire.config import Settings
from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.executor import Description, Executor
from quire.engine.timing import LatencyController, PlanDelay
from quire.errors import InvalidConfig, InvalidModel, InvalidRequest, QuireError
from quire.executors.local import LocalExecutor
from quire.executors.ranks import Ranks
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.layers.quantization.base import Packable
from quire.layers.quantization.mapped import pack_beside
from quire.layers.stages import Pipeline
from quire.model_runner.images import ImageRunner, Normalization
from quire.model_runner.memory import LayerShape, cpu_budget, layer_shapes, plan_blocks, state_bytes
from quire.model_runner.pooling import PoolingHeads, unchanged
from quire.models.registry import (
    ARCHITECTURES,
    DERIVED,
    Model,
    architecture_name,
    find_architecture,
    parameters,
    vision_of,
)
from quire.multimodal.processor import ImageProcessor
from quire.observability.recorder import recorded
from quire.observability.recording_format import recording_folder
from quire.ops.base import Ops
from quire.ops.batch_invariant import BatchInvariantOps, SteadyOps, stable_rows
from quire.ops.native.library import LEVELS, best_level
from quire.ops.native.ops import InvariantNativeOps, NativeOps
from quire.ops.quantized import FLOAT8
from quire.ops.reference import ReferenceOps
from quire.ops.stages import stage_ended
from quire.scheduler.block_pool import EVICTION_POLICIES
from quire.scheduler.encoder_cache import EncoderCache
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.kv_offload import Offload
from quire.scheduler.policy import SchedulingPolicy, make_policy
from quire.scheduler.scheduler import Scheduler
from quire.structured_output.llguidance import ParallelMasks
from quire.types import UNLIMITED, Pooling
from quire.weights.canary import PROBE, Canary, Threshold, float8_layers
from quire.weights.files import read_config
from quire.weights.kept_result import KeptResult, kept_result
from quire.weights.kv_scales import published_scales
from quire.weights.load import load_model, no_progress
from quire.weights.locate import EMBEDDED, locate
from quire.weights.pooling import GENERATES, PoolerConfig, overridden
from quire.weights.pooling_layers import read_dense_layers

log = logging.getLogger(__name__)

PLACING: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("device_map", "max_memory"), "it places layers of transformers' models, --executor hf")
)
"""Options of one executor, and why others have no use for them."""

TIERS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("kv_offloading_size", "kv_offloading_dir", "disaggregation_mode"),
        "blocks are copied from and to Quire's own layers, --executor local",
    )
)
"""Options of our own layers, and why other executors do not have them."""
DIVIDING: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "enable_expert_parallel",
            "distributed_executor_backend",
        ),
        "it divides Quire's own layers, --executor local",
    )
)
"""Options of several ranks, likewise."""


def build_engine(
    settings: Settings,
    *,
    observers: Iterable[Observer] = (),
    keep: int = 0,
    wrap: Callable[[Executor], Executor] = lambda executor: executor,
    ranks: Ranks | None = None,
) -> Engine:
    """Load the model and build an engine for it. keep: completed requests to remember. wrap: applied to the executor.
    ranks: those of the executor, if they have been started.

    Raises InvalidModel or InvalidConfig.
    """
    folder = recording_folder(settings.execution.recording_dir)
    make = Engine if folder is None else recorded(folder, settings.execution.recording_max_bytes)
    policy = build_policy(settings)
    target = settings.scheduler.latency_target_ms
    executor, limits, static_gauges, plan_delay, prepare = make_executor(settings, ranks)
    offload = import_module("quire.assembly.kv_offload").build_offload(settings, executor) if tiered(settings) else None
    executor = wrap(executor)
    if executor.describe().bidirectional:
        # It bounds what prompts cost answers, and may cut prompts for that.
        target = 0.0
    if folder is not None and executor.describe().encoder_layers:
        raise InvalidConfig(
            "--recording-dir: recordings have no images: leave it out, or turn images off with --limit-mm-per-prompt "
            "'{\"image\": 0}'",
            param="recording_dir",
        )
    engine = make(
        build_scheduler(settings, executor.describe(), limits, policy, offload),
        executor,
        lookahead=limits.lookahead,
        observers=observers,
        step_budget=LatencyController(target / 1e3) if target else None,
        plan_delay=plan_delay,
        keep=keep,
        prepare=prepare,
    )
    engine.description = replace(engine.description, static_gauges=engine.description.static_gauges | static_gauges)
    return engine


def make_executor(settings: Settings, ranks: Ranks | None = None) -> BuiltExecutor:
    """The executor that `executor` names. ranks: those that have been started for it.

    Raises InvalidModel or InvalidConfig.
    """
    kind = choose_executor(settings)
    if kind != "hf":
        reject_options(settings, kind, PLACING)
    if kind != "local":
        reject_options(settings, kind, TIERS)
    if kind not in ("local", "grpc"):
        reject_options(settings, kind, DIVIDING)
    try:
        if kind == "local" and settings.execution.ranked:
            refuse_tiers(settings, "an engine of several ranks")
            return cast(BuiltExecutor, import_module("quire.assembly.ranks").make(settings, ranks))
        if kind == "local":
            return build_local(settings, ONE_RANK)
        return cast(BuiltExecutor, extra(f"quire.assembly.{kind}", kind).make(settings))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        reason = str(error).split("\n")[0].rstrip(".")
        raise InvalidConfig(
            f"there is not enough memory for this: {reason}. Lower what sets it: num_gpu_blocks_override, "
            "kv_cache_memory_bytes, gpu_memory_utilization, max_num_seqs or max_model_len; or stop "
            "what else uses the memory"
        ) from error


def build_local(settings: Settings, parallel: ParallelGroup) -> BuiltExecutor:
    """Quire's own layers, this rank's part of them, in this process."""
    device = choose_device(settings.execution.device)
    alone = device.type == "cpu" and parallel.size == parallel.pipeline.stages == 1
    canary = build_canary(settings, keeps=alone)
    pooler = pooler_of(settings)
    processor = find_processor(settings)
    # What says whose blocks tiers hold reads all weights.
    unpacked: list[Packable] | None = [] if alone and not tiered(settings) else None
    model = _load(
        settings, device, canary, pooler, parallel, vision=isinstance(processor, ImageProcessor), unpacked=unpacked
    )
    stage_ended("weights")
    parallel.connect()
    stage_ended("meeting")
    threads = settings.execution.threads or max(1, choose_threads(parameters(model.spec)) // parallel.neighbours)
    torch.set_num_threads(threads)
    limits = resolve(settings, model.spec, device, pooler.max_length)
    heads = pooling_heads(model, pooler, device)
    layers, kv_gauges = _kv_layers(settings, model, device)
    images = _image_runner(model, processor, device, parallel.pipeline)
    gauges = _canary_gauges(canary) | kv_gauges
    if device.type == "cuda":
        own = settings, model, device, limits, heads, parallel, layers
        executor = _cuda().make_executor(*own, images, image_tokens(settings, processor))
        return BuiltExecutor(executor, limits, gauges, PlanDelay(), _cuda().prepare_quietly(executor))
    coming = sum(each.nbytes for each in unpacked or ())
    on_cpu = on_host(settings, model, limits, layers, heads=heads, images=images, parallel=parallel, coming=coming)
    if unpacked:
        on_cpu.packing = pack_beside(unpacked)
    return BuiltExecutor(on_cpu, limits, gauges, PlanDelay())


def on_host(
    settings: Settings,
    model: Model,
    limits: Limits,
    layers: Sequence[LayerShape],
    *,
    heads: PoolingHeads | None = None,
    images: ImageRunner | None = None,
    parallel: ParallelGroup = ONE_RANK,
    coming: int = 0,
) -> LocalExecutor:
    """An executor for a model on the CPU. heads: what follows pooling. images: its encoder, if any. parallel: of the
    ranks that share this host's memory. coming: bytes of weights that take theirs later.

    Raises InvalidConfig when K/V does not fit.
    """
    cpu, free = torch.device("cpu"), cpu_budget(max(0, host_bytes() - coming)) // parallel.neighbours
    budget = settings.cache.kv_cache_memory_bytes or free
    return paged(settings, model, limits, layers, cpu, budget, heads=heads, images=images, parallel=parallel)


def _image_runner(
    model: Model, processor: ImageProcessor | str, device: torch.device, pipeline: Pipeline
) -> ImageRunner | None:
    """What encodes a model's images; None where it has no encoder, or is used without."""
    tower = vision_of(model)
    if tower is None or isinstance(processor, str):
        return None
    normalization = Normalization(processor.mean, processor.std, processor.scale)
    return ImageRunner(tower, normalization, device, embeds=model.spec.embeds(pipeline))


def paged(
    settings: Settings,
    model: Model,
    limits: Limits,
    layers: Sequence[LayerShape],
    device: torch.device,
    budget: int,
    *,
    pools: bool = True,
    heads: PoolingHeads | None = None,
    images: ImageRunner | None = None,
    parallel: ParallelGroup = ONE_RANK,
) -> LocalExecutor:
    """An executor whose steps run as they are launched. budget: bytes of K/V. pools, heads: as in `LocalExecutor`.
    images: the encoder, if any. parallel: all ranks have as many blocks as the one with the fewest.

    Raises InvalidConfig when K/V does not fit.
    """
    cache, last = settings.cache, parallel.pipeline.last
    draft = load_draft(settings, model, device, ReferenceOps(), parallel) if last else None
    states = limits.num_rows * (1 + most_drafts(settings))
    # Where no layer is recurrent, there is room for any number.
    slots = snapshot_slots(settings, limits, layers, states, budget) if state_bytes(layers) else UNLIMITED
    snapshots = parallel.smallest(slots) * bool(model.spec.recurrent)
    planned = cache.num_gpu_blocks_override or plan_blocks(
        (*layers, *draft_layers(draft)),
        page_size=limits.block_size,
        rows=rows_with_kv(model.spec, limits),
        max_model_len=limits.max_model_len,
        budget=budget,
        states=states + snapshots,
    )
    blocks = parallel.smallest(planned)
    sizes: dict[str, Any] = {"pages": blocks, "page_size": limits.block_size, "rows": limits.num_rows}
    return LocalExecutor(
        model,
        **sizes,
        max_model_len=limits.max_model_len,
        dtype=model.dtype,
        device=device,
        drafter=build_drafter(settings, draft, device=device, **sizes) if last else None,
        num_drafts=most_drafts(settings),
        pipeline=parallel.pipeline,
        depth=limits.lookahead,
        layers=layers,
        pools=pools,
        snapshots=snapshots,
        heads=heads,
        images=images,
    )


def choose_executor(settings: Settings) -> str:
    """What runs the steps: "auto" is our own layers, or transformers for an architecture that only it has.

    Raises InvalidModel for one that neither has, and where transformers is not installed.
    """
    kind = settings.executor.executor
    if kind != "auto":
        return kind
    folder = place_of(settings)
    fields = read_config(folder)
    name = architecture_name(overridden(fields, hf_overrides(settings)))
    if name in ARCHITECTURES or name in DERIVED:
        return "local"
    known = find_spec("transformers") is not None and extra("quire.executors.hf", "hf").knows(fields, name)
    if not known:
        find_architecture(name)
    return "hf"


def build_policy(settings: Settings) -> SchedulingPolicy:
    """The scheduling policy that the options describe. Raises InvalidConfig."""
    scheduler = settings.scheduler
    return make_policy(
        scheduler.scheduling_policy, batching=scheduler.batching, pressure=settings.cache.pressure_policy
    )


def build_scheduler(
    settings: Settings,
    description: Description,
    limits: Limits,
    policy: SchedulingPolicy,
    offload: Offload | None = None,
) -> Scheduler:
    """The scheduler for an executor of this description. offload: where evicted blocks go; None: nowhere."""
    cache = settings.cache
    chunk, tokens = limits.max_chunk_tokens, limits.max_num_batched_tokens
    return Scheduler(
        KVCacheManager(
            description.num_blocks,
            description.block_size,
            make_prefix_cache(
                description.block_size,
                cache.enable_prefix_caching and not description.bidirectional,
                description.num_snapshots if description.recurrent else None,
            ),
            EVICTION_POLICIES[cache.eviction_policy](),
            max_pinned_blocks=int(description.num_blocks * cache.max_pinned_share),
            snapshot_interval=cache.snapshot_interval,
            offload=offload,
        ),
        rows=description.num_rows,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=tokens,
        max_background_tokens=UNLIMITED if chunk == UNLIMITED else max(limits.max_num_seqs, tokens // 8),
        max_chunk_tokens=chunk,
        policy=policy,
        speculation=build_speculation(settings, description),
        # Ranks have memory of their own: here, a context on a GPU would only take some.
        compute_masks=ParallelMasks(),
        encoder_cache=build_encoder_cache(settings, description, limits),
        groups=min(settings.execution.pipeline_parallel_size, 1 + limits.lookahead),
    )


def pooling_heads(model: Model, pooler: PoolerConfig, device: torch.device) -> PoolingHeads | None:
    """What follows pooling of a model; None for nothing."""
    dense = read_dense_layers(pooler.dense, model.dtype, device) if pooler.dense else unchanged
    classify = model.classify
    if classify is None:
        return PoolingHeads(dense) if pooler.dense else None
    return PoolingHeads(dense, lambda x: classify(x.to(model.dtype)), cast(Pooling, model.spec.classifier_pooling))


def build_encoder_cache(settings: Settings, description: Description, limits: Limits) -> EncoderCache | None:
    """The encoder's share of steps and memory; None where there is no encoder."""
    processor, media = find_processor(settings), settings.multimodal
    if isinstance(processor, str) or not description.encoder_layers:
        return None
    return EncoderCache(
        image_tokens(settings, processor)[1],
        media.max_num_encoder_input_tokens or limits.max_num_batched_tokens,
        description.encoder_layers,
        whole_images=description.whole_images,
    )


def _load(
    settings: Settings,
    device: torch.device,
    canary: Canary | None,
    pooler: PoolerConfig = GENERATES,
    parallel: ParallelGroup = ONE_RANK,
    *,
    vision: bool = False,
    unpacked: list[Packable] | None = None,
) -> Model:
    model = settings.model
    by_default = model.model == EMBEDDED and model.dtype == "auto"
    with nullcontext(no_progress) if parallel.rank or parallel.pipeline.stage else loading(model.model) as progress:
        return load_model(
            place_of(settings),
            dtype=model.dtype,
            device=device,
            ops=choose_ops(
                device,
                settings.execution.deterministic,
                embedded=by_default,
                kernels=settings.execution.cpu_kernels,
                rounds_float8=model.fp8_activations == "auto",
            ),
            parallel=parallel,
            expert_parallel=settings.execution.enable_expert_parallel,
            load_format=model.load_format,
            quantization=model.quantization,
            canary=canary,
            seed=model.fixed_seed,
            progress=progress,
            room=host_bytes() // parallel.neighbours if device.type == "cpu" else math.inf,
            max_model_len=model.max_model_len,
            pools=not pooler.generates,
            overrides=hf_overrides(settings),
            words=None if pooler.words is None else word_ids(pooler.words, build_tokenizer(settings)),
            vision=vision,
            mtp=wants_mtp(settings),
            unpacked=unpacked,
        )


def begin_context(settings: Settings) -> None:
    """Where this process will use a GPU, create its context in a thread: reading a model's text takes as long."""

    def create() -> None:
        start_driver()
        with suppress(RuntimeError, QuireError):  # as will be met again
            device = choose_device(settings.execution.device)
            if device.type == "cuda":
                torch.zeros(1, device=device)

    if torch.version.cuda and may_use_gpu(settings):
        threading.Thread(target=create, name="gpu-context", daemon=True).start()


def _cuda() -> Any:
    """`quire.assembly.cuda`, imported by name: it needs Triton, which is installed only with CUDA."""
    return import_module("quire.assembly.cuda")


def count_compiles(device: str) -> Callable[[], int]:
    """A counter of the kernels compiled from now on; none are on a CPU."""
    return int if device == "cpu" else cast(Callable[[], int], _cuda().count_compiles())


def choose_ops(
    device: torch.device,
    deterministic: bool | None = None,
    *,
    embedded: bool = False,
    kernels: str = "auto",
    rounds_float8: bool = True,
) -> Ops:
    """The kernels for a device.

    deterministic: batch-invariant ones; None: only for the embedded model as shipped, on a CPU, where they cost little.
    kernels: of a CPU, `cpu_kernels`. rounds_float8: whether activations may be rounded to float8.
    """
    if device.type != "cpu":
        import_module("quire.ops.triton.precompile").compiler_key()  # beside the imports that follow
        return cast(Ops, _cuda().make_ops(device, bool(deterministic), rounds_float8=rounds_float8))
    if deterministic is None and embedded:
        rows = stable_rows()
        return SteadyOps(rows) if rows else BatchInvariantOps()
    level = choose_level(kernels)
    if deterministic:
        return InvariantNativeOps(level) if level else BatchInvariantOps()
    return NativeOps(level) if level else ReferenceOps()


def choose_level(asked: str) -> str | None:
    """The instruction set whose kernels run, a key of `LEVELS`; None: torch. Raises InvalidConfig for one that this
    machine does not have."""
    best = best_level()
    if asked == "torch":
        return None
    if asked == "auto":
        return best
    if best is None or LEVELS[asked] > LEVELS[best]:
        known = [name for name, level in LEVELS.items() if best and level <= LEVELS[best]]
        raise InvalidConfig(
            f"--cpu-kernels {asked}: this processor has no such instructions; it has "
            f"{', '.join(known) or 'none of them'}. Leave the option out, or use torch"
        )
    return asked


# -------------------------------------------------------------------- quality of quantised weights and K/V


def build_canary(settings: Settings, *, keeps: bool = False) -> Canary | None:
    """The check of quantised weights, None if it is off. keeps: whether what it finds is kept for the next start."""
    if settings.model.canary == "off":
        return None
    keep = partial(kept_canary, settings) if keeps and settings.model.load_format != "dummy" else None
    return Canary(partial(_probe, settings), _threshold(settings), keep)


def kept_canary(settings: Settings) -> KeptResult:
    """Where a canary's result on a CPU is kept, with all that it depends on but thresholds, which it is compared with
    at each start."""
    own, execution = settings.model, settings.execution
    options = {name: value for name, value in asdict(own).items() if not name.startswith("canary")}
    about = {
        "model": options,
        "kernels": choose_level(execution.cpu_kernels),
        "deterministic": execution.deterministic,
        "torch": (torch.__version__, torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")),
    }
    tokenizer = () if own.tokenizer is None else (locate(own.tokenizer, cache=own.download_dir),)
    return kept_result("canary", (place_of(settings), *tokenizer), about)


def _threshold(settings: Settings) -> Threshold | None:
    model = settings.model
    return Threshold(model.canary_min_agreement, model.canary_max_kl) if model.canary == "refuse" else None


def _probe(settings: Settings) -> tuple[int, ...]:
    """Token ids of the probe; empty without a tokenizer, for ids from all over the vocabulary."""
    try:
        return build_tokenizer(settings).encode(PROBE)
    except (InvalidModel, InvalidRequest):
        return ()


def _canary_gauges(canary: Canary | None) -> dict[str, float]:
    """Log what the canary found, and return it as gauges; nothing unless weights are quantised."""
    if canary is None or canary.quality is None:
        return {}
    log.warning("quantized weights: %s%s", canary.quality, "" if canary.known is None else ", at an earlier start")
    for suspect in canary.suspects:
        log.warning("quantized weights: %s", suspect)
    return canary.quality.facts


def _kv_layers(
    settings: Settings, model: Model, device: torch.device
) -> tuple[tuple[LayerShape, ...], dict[str, float]]:
    """The K/V of each layer, and gauges about its quality.

    Raises InvalidConfig where float8 is not supported, InvalidModel where it is below the canary's threshold.
    """
    name = settings.cache.kv_cache_dtype
    if name == "auto":
        return layer_shapes(model.spec.kv_shapes, model.dtype, model.spec.state_shapes), {}
    if device.type != "cpu":
        _cuda().check_float8(name, device)
    published = {} if settings.model.load_format == "dummy" else published_scales(place_of(settings))
    layers, quality = float8_layers(model, _probe(settings), device, published, FLOAT8[name])
    num_float8 = sum(layer.dtype is not model.dtype for layer in layers)
    whose = f"scales of the checkpoint in {len(published)}, " if published else ""
    log.warning("K/V in float8 in %d of %d layers: %s%s", num_float8, len(layers), whose, quality)
    threshold = _threshold(settings)
    if threshold is not None:
        threshold.check(quality, f"--kv-cache-dtype {name}")
    gauges = {f"quire:canary_kv_{name.removeprefix('quire:canary_')}": value for name, value in quality.facts.items()}
    return layers, gauges | {"quire:kv_cache_float8_layers": float(num_float8)}
