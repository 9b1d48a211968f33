"""Sizes and devices from settings: resolves every 'auto' that depends on the device, the model or the memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from quire.config import OPTIONS, Settings
from quire.engine.engine import nothing_left
from quire.engine.executor import Executor
from quire.engine.timing import PlanDelay
from quire.errors import InvalidConfig
from quire.model_runner.memory import GIB, LayerShape, activation_bytes, plan_snapshots, state_bytes
from quire.models.spec import ModelSpec
from quire.ops.ragged import LONG, SCORED_AT_ONCE
from quire.types import UNLIMITED

log = logging.getLogger(__name__)

_SMALL_MODEL = 20_000_000
LARGEST_GEMM_WORKSPACE = 2048
"""Most tokens of a step that is captured on a GPU. A larger step takes longer than its launches."""
GRAPH_BYTES = GIB // 2
"""Set aside for what graphs hold beside tensors, and for the workspaces of libraries."""


class Limits(NamedTuple):
    """Resolved sizes. num_rows: rows of device state, `max_num_seqs` for each step in flight.

    max_num_batched_tokens, max_chunk_tokens: most tokens of a step, and of one sequence's span in it.
    """

    max_model_len: int
    block_size: int
    max_num_seqs: int
    num_rows: int
    lookahead: int
    max_num_batched_tokens: int
    max_chunk_tokens: int


class BuiltExecutor(NamedTuple):
    """An executor, its sizes, and gauges measured while it was built.

    plan_delay: None, for no delay, where the executor is elsewhere: planning then hides the way there. prepare: see
    `Engine.prepare`.
    """

    executor: Executor
    limits: Limits
    static_gauges: dict[str, float]
    plan_delay: PlanDelay | None = None
    prepare: Callable[[], bool] = nothing_left


def reject_options(settings: Settings, executor: str, fixed: Mapping[str, str]) -> None:
    """Raise InvalidConfig for a set option that has no effect with this executor. fixed: reasons by option name."""
    for name, why in fixed.items():
        off = OPTIONS[name].default is None and settings.get(name) is False
        if settings.get(name) != OPTIONS[name].default and not off:
            raise InvalidConfig(f"{OPTIONS[name].flag} does not go with --executor {executor}: {why}", param=name)


def choose_device(name: str) -> torch.device:
    """The device for 'auto', 'cpu' or 'cuda'. Raises InvalidConfig when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("--device cuda: torch sees no GPU here; use --device cpu, or install torch with CUDA")
    return torch.device(name)


def choose_threads(parameters: int) -> int:
    """Number of CPU threads for a model of this many parameters: torch's default, but one for a small model.

    Below about 20 M parameters a second thread gains nothing, and costs up to five times wherever another process
    keeps its core busy: every operation ends in a barrier (docs/benchmarks/cpu-threads).
    """
    return 1 if parameters < _SMALL_MODEL else torch.get_num_threads()


def resolve(settings: Settings, spec: ModelSpec, device: torch.device, longest: int | None = None) -> Limits:
    """Resolve sizes for a model on a device. longest: tokens of a prompt where no option says so.

    Raises InvalidConfig for a context longer than the model's, and for what models with recurrent layers or with
    bidirectional attention do not have.
    """
    cpu = device.type == "cpu"
    check_recurrent(settings, spec)
    check_pooling(settings, spec)
    scheduler, max_model_len = settings.scheduler, settings.model.max_model_len
    if max_model_len is not None and max_model_len > spec.context:
        raise InvalidConfig(
            f"max_model_len {max_model_len} is above the {spec.context} tokens this model was made for: lower it"
        )
    max_model_len = max_model_len or min(spec.context, longest or spec.context)
    if spec.bidirectional:
        check_whole_prompts(settings, max_model_len)
    max_num_seqs = scheduler.max_num_seqs or (64 if cpu and spec.generates else 256)
    stages = settings.execution.pipeline_parallel_size
    lookahead = scheduler.lookahead if scheduler.lookahead is not None else max(stages - 1, 0 if cpu else 1)
    return sized(
        settings,
        default_tokens=(512 if spec.generates else POOLED_TOKENS) if cpu else 8192,
        # The token that ends a prompt has its place, too.
        max_model_len=max_model_len + (not spec.generates),
        whole_prompts=spec.bidirectional,
        block_size=settings.cache.block_size or (16 if cpu else 64),
        max_num_seqs=max_num_seqs,
        num_rows=max_num_seqs * (1 + lookahead),
        lookahead=lookahead,
    )


def check_stages(settings: Settings, device: torch.device) -> None:
    """Raise InvalidConfig for what models that are cut into stages are not served with."""
    stages, kv = settings.execution.pipeline_parallel_size, settings.cache.kv_cache_dtype
    if stages > 1 and device.type == "cuda":
        raise InvalidConfig(
            f"--pipeline-parallel-size {stages} works on a CPU only for now: use --tensor-parallel-size",
            param="pipeline_parallel_size",
        )
    if stages > 1 and kv != "auto":
        raise InvalidConfig(
            f"--kv-cache-dtype {kv} does not go with --pipeline-parallel-size: leave it at auto", param="kv_cache_dtype"
        )


def rows_with_kv(spec: ModelSpec, limits: Limits) -> int:
    """Sequences of the full length that may have K/V at once."""
    if not spec.bidirectional:
        return limits.max_num_seqs
    # Nothing is kept after a step, which has so many whole prompts at most; each sequence may begin a block in vain.
    begun = -(-limits.max_num_seqs * limits.block_size // limits.max_model_len)
    return min(limits.max_num_seqs, -(-limits.max_num_batched_tokens // limits.max_model_len) + begun)


def snapshot_slots(settings: Settings, limits: Limits, layers: Sequence[LayerShape], states: int, budget: int) -> int:
    """Slots for snapshots of recurrent layers' states, see `plan_snapshots`; says so where none fits."""
    cache = settings.cache
    wanted = cache.state_snapshots if cache.enable_prefix_caching else 0
    slots = plan_snapshots(layers, wanted, sequences=limits.max_num_seqs, states=states, budget=budget)
    if state_bytes(layers) and not slots and wanted is None:
        log.warning(
            "the memory for K/V has no room for snapshots of recurrent layers' states, so no prefix is reused: give it "
            "more with --kv-cache-memory-bytes, or lower --max-num-seqs"
        )
    return slots


def check_recurrent(settings: Settings, spec: ModelSpec) -> None:
    """Raise InvalidConfig for K/V that models with recurrent layers are not served with."""
    if spec.recurrent and settings.cache.kv_cache_dtype != "auto":
        raise InvalidConfig(
            f"--kv-cache-dtype {settings.cache.kv_cache_dtype} does not go with models with recurrent layers: leave it "
            "at auto",
            param="kv_cache_dtype",
        )


POOLED_TOKENS = 2048
"""Tokens of a step on a CPU of models that do not generate, whose steps delay no next token."""


def check_pooling(settings: Settings, spec: ModelSpec) -> None:
    """Raise InvalidConfig for what models that do not generate are not served with."""
    if spec.generates:
        return
    if settings.scheduler.speculative_config is not None:
        raise InvalidConfig(
            "--speculative-config drafts tokens of answers, and a pooling model gives none: leave it out",
            param="speculative_config",
        )
    if settings.cache.kv_cache_dtype != "auto":
        raise InvalidConfig(
            f"--kv-cache-dtype {settings.cache.kv_cache_dtype} does not go with pooling models: leave it at auto",
            param="kv_cache_dtype",
        )


def check_whole_prompts(settings: Settings, max_model_len: int) -> None:
    """Raise InvalidConfig for options by which a prompt of `max_model_len` tokens does not fit into one step."""
    scheduler = settings.scheduler
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        value = getattr(scheduler, name)
        if value and value < max_model_len:
            raise InvalidConfig(
                f"--{name.replace('_', '-')} {value} is below the {max_model_len} tokens of the longest prompt, and "
                "bidirectional attention computes a prompt in one step: raise it, or lower --max-model-len",
                param=name,
            )


def sized(
    settings: Settings,
    *,
    default_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    whole_prompts: bool = False,
    **sizes: int,
) -> Limits:
    """Limits of these sizes, and of a step's and a span's tokens from settings. default_tokens: of a step.
    whole_prompts: prompts are never chunked."""
    scheduler = settings.scheduler
    tokens = max(max_num_seqs, scheduler.max_num_batched_tokens or default_tokens)
    chunk = scheduler.long_prefill_token_threshold or tokens
    if whole_prompts or not scheduler.enable_chunked_prefill:
        tokens, chunk = max(tokens, max_model_len), UNLIMITED
    limits = {"max_num_batched_tokens": tokens, "max_chunk_tokens": chunk}
    return Limits(max_num_seqs=max_num_seqs, max_model_len=max_model_len, **limits, **sizes)


def gathered_tokens(limits: Limits, device: torch.device) -> int:
    """The most tokens of a sequence whose K/V a step gathers, a layer at a time: those of long prompts on a GPU."""
    return limits.max_model_len if device.type == "cuda" and limits.max_num_batched_tokens > LONG else 0


def working_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    tokens: int,
    captured: int,
    rows: int,
    gathered: int = 0,
    longest: int = 0,
    image_tokens: tuple[int, int] = (0, 0),
) -> int:
    """Bytes for activations of the largest step, for those of the largest captured step, and for graphs. A layer for
    multi-token prediction reads the hidden states of every token once the step has sampled.

    captured: most tokens of a captured step, 0 without graphs; graphs keep memory of their own. rows: rows of logits.
    gathered: see `gathered_tokens`. longest: tokens of a sequence, which matters where an indexer chooses of them.
    image_tokens: of the largest image, and of all whose embeddings are kept.
    """
    a_token = max((shape.numbers for shape in spec.kv_shapes), default=0) * dtype.itemsize
    projections = [2 * max(spec.layer_mlp, default=spec.mlp)]
    shapes = set(spec.kv_shapes)
    projections += [spec.heads * max(each.key_dim, each.value_dim) + each.numbers for each in shapes]
    if spec.experts is not None:
        # At once there are the inner numbers and the outputs of every expert that a token uses.
        projections.append(spec.experts.num_experts_per_token * (spec.experts.width + spec.hidden) // 2)
    # A recurrent layer has its inputs, what it convolves, outputs in float32, and, of a prompt, changes of its memory.
    projections += [
        2 * each.channels + each.heads * (each.keys + 3 * each.values) for each in set(spec.state_shapes) if each
    ]

    def step_bytes(num_tokens: int) -> int:
        return activation_bytes(
            tokens=num_tokens,
            logits=rows,
            hidden=spec.hidden,
            widest=max(projections, default=0),
            vocab_size=spec.vocab,
            dtype=dtype,
        ) + choice_bytes(spec, num_tokens, longest)

    images = 0
    if spec.vision is not None and any(image_tokens):
        own, (largest, kept) = spec.vision, image_tokens
        # A layer has the residual stream, its norm, queries, keys, values and what the MLP makes, of every patch.
        patches = max(largest * own.merge**2, own.positions if own.pooled else 0)
        made = kept * own.out * (1 + len(own.feature_layers))
        images = (patches * (6 * own.hidden + 2 * own.mlp) + made) * dtype.itemsize
    graphs = step_bytes(min(tokens, captured)) + GRAPH_BYTES if captured else 0
    kept = tokens * spec.hidden * spec.draft_layers * dtype.itemsize
    return images + step_bytes(tokens) + graphs + gathered * a_token + kept


def choice_bytes(spec: ModelSpec, tokens: int, longest: int) -> int:
    """Bytes of what an indexer chooses for every token of a step, and of the scores of some at once for `longest`
    keys."""
    if spec.latent is None or spec.latent.index is None:
        return 0
    return 4 * (tokens * spec.latent.index.top + min(tokens, SCORED_AT_ONCE) * longest)


def host_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory available on this host: free or reclaimable, and within the container's limit.

    Without /proc (macOS) it is all physical memory. root: of the file system.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except OSError:
        name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    available = 1024 * _number(r"^MemAvailable: +(\d+)", meminfo)
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
        cached = _number(r"^inactive_file (\d+)", (group / "memory.stat").read_text())
    except OSError:
        return available
    return available if limit.strip() == "max" else max(0, min(available, int(limit) - used + cached))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else 0
