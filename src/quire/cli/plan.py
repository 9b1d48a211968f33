"""`quire plan`: what serving would take, and the smallest change that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from quire.assembly.images import find_processor, image_tokens
from quire.assembly.limits import (
    LARGEST_GEMM_WORKSPACE,
    check_stages,
    gathered_tokens,
    host_bytes,
    resolve,
    rows_with_kv,
    working_bytes,
)
from quire.assembly.place import located
from quire.assembly.speculate import most_drafts
from quire.cli.inspect import Fact, ModelFacts, keeps_packed, planned_ops, read_facts
from quire.cli.ranges import size_of
from quire.cli.tables import print_pairs
from quire.config import OPTIONS, Settings
from quire.config.option import amount
from quire.errors import InvalidConfig, InvalidModel
from quire.layers.linear import ONE_RANK, ParallelGroup
from quire.layers.quantization.gguf import StoredBlocks, kept_bytes
from quire.layers.stages import Pipeline
from quire.model_runner.memory import block_bytes, cpu_budget, layer_shapes, plan_snapshots, state_bytes, usable_blocks
from quire.models.spec import ModelSpec
from quire.ops.quantized import FLOAT8
from quire.ops.reference import ReferenceOps
from quire.weights.load import stored_blocks
from quire.weights.outline import ModelOutline, slot_bytes
from quire.weights.schemes import AUTO, ONLINE, read_scheme

SHORTEST = 256
"""Tokens. A context shorter than this is nothing to propose."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. weights: all. work: the largest step. page: one block of K/V, of `size` tokens. pool: what K/V would get.
    states: of recurrent layers, for all sequences at once, and `snapshots` of them for the prefix cache.

    least, most: blocks for one sequence of the whole `length`, and for all at once.
    """

    weights: int
    work: int
    page: int
    size: int
    pool: int
    least: int
    most: int
    length: int
    states: int = 0
    snapshots: int = 0

    @property
    def blocks(self) -> int:
        """Of the pool, the spare one not counted."""
        return min(self.pool // self.page - 1, self.most)

    @property
    def fits(self) -> bool:
        """Whether one whole sequence fits."""
        return self.blocks >= self.least

    @property
    def missing(self) -> int:
        """Bytes that the pool lacks for one whole sequence."""
        return (self.least + 1) * self.page - self.pool


def run(settings: Settings, memory: str | None) -> None:
    """`quire plan`, see `quire.cli.late`."""
    settings, device = located(settings), device_of(settings)
    rows = list(plan_lines(settings, read_facts(settings), free(device) if memory is None else size_of(memory), device))
    print_pairs(rows)
    # That line is there only if it does not fit.
    if "fits" in dict(rows):
        raise SystemExit(1)


def device_of(settings: Settings) -> torch.device:
    """As the engine would choose; one that is asked for may be planned for where there is none."""
    asked = settings.execution.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked)


def free(device: torch.device) -> int:
    """Bytes. Raises InvalidConfig for a device that is not here."""
    if device.type == "cpu":
        return host_bytes()
    if not torch.cuda.is_available():
        raise InvalidConfig("--device cuda: torch sees no GPU here; --memory says how much one has", param="device")
    return int(torch.cuda.mem_get_info()[0])


def need(settings: Settings, facts: ModelFacts, room: int, device: torch.device) -> MemoryPlan:
    """What these settings take of `room` bytes, of the rank with least room for blocks. Raises InvalidConfig for a
    context the model does not have, InvalidModel for more ranks or stages than it can be divided among."""
    check_stages(settings, device)
    every = weights(settings, facts)
    if settings.execution.num_ranks == 1:
        return need_of(settings, facts, facts.spec, every, room, device)
    parts = shares(settings, facts)
    asked = [need_of(settings, facts, spec, int(every * share), room, device) for spec, share in parts]
    return min(asked, key=lambda each: (each.blocks, -each.weights))


def need_of(
    settings: Settings, facts: ModelFacts, spec: ModelSpec, held: int, room: int, device: torch.device
) -> MemoryPlan:
    """As `need`, of a rank with `held` bytes of weights. spec: of its part."""
    cache = settings.cache
    limits, cpu = resolve(settings, spec, device, facts.pooler.max_length), device.type == "cpu"
    captured = 0 if cpu or settings.execution.enforce_eager else LARGEST_GEMM_WORKSPACE
    # Ranks on a CPU share its memory.
    room = room // settings.execution.num_ranks if cpu else room
    work = working_bytes(
        spec,
        facts.dtype,
        tokens=limits.max_num_batched_tokens,
        captured=captured,
        rows=limits.max_num_seqs * (1 + most_drafts(settings)) if spec.generates else 0,
        gathered=gathered_tokens(limits, device),
        longest=limits.max_model_len,
        image_tokens=image_tokens(settings, find_processor(settings)) if spec.vision is not None else (0, 0),
    )
    kept = FLOAT8[cache.kv_cache_dtype].dtype if cache.kv_cache_dtype in FLOAT8 else facts.dtype
    size = limits.max_model_len if facts.whole else limits.block_size
    if facts.foreign and kept is not facts.dtype:
        raise InvalidConfig("--kv-cache-dtype does not go with --executor hf", param="kv_cache_dtype")
    layers = facts.layers or () if facts.foreign else layer_shapes(spec.kv_shapes, kept, spec.state_shapes)
    drafts = spec.draft_kv_shapes if spec.own_layers.stop == spec.layers else ()
    page = max(1, block_bytes((*layers, *layer_shapes(drafts, facts.dtype)), size))
    slots = limits.num_rows * (1 + most_drafts(settings))
    left = max(0, int(room * (1 if cpu else cache.gpu_memory_utilization)) - held - work)
    pool = min(left, cpu_budget(max(0, room - held))) if cpu else left
    snapshots = plan_snapshots(
        layers,
        cache.state_snapshots if cache.enable_prefix_caching else 0,
        sequences=limits.max_num_seqs,
        states=slots,
        budget=cache.kv_cache_memory_bytes or pool,
    )
    states = (1 + slots + snapshots) * state_bytes(layers)
    if cache.num_gpu_blocks_override or cache.kv_cache_memory_bytes:
        asked = cache.kv_cache_memory_bytes or ((cache.num_gpu_blocks_override or 0) + 1) * page + states
        pool = min(left, asked)
    pool = max(0, pool - states)
    return MemoryPlan(
        held,
        work,
        page,
        size,
        pool,
        least=usable_blocks(1, limits.max_model_len, size),
        most=usable_blocks(rows_with_kv(spec, limits), limits.max_model_len, size),
        length=limits.max_model_len,
        states=states,
        snapshots=snapshots,
    )


def weights(settings: Settings, facts: ModelFacts) -> int:
    """Bytes once loaded: as stored where they are quantised, else at the dtype they are computed in."""
    spec, checkpoint = facts.spec, facts.checkpoint
    if read_scheme(facts.config) is not None:
        entries = {} if checkpoint is None else checkpoint.entries
        build = ModelOutline(facts.config, spec, settings.model.quantization, facts.dtype, entries).build()
        if checkpoint is not None:
            loaded = (name for name in entries if not any(fnmatchcase(name, pattern) for pattern in build.skipped))
            return sum(entries[name].size for name in loaded)
        return slot_bytes(build)
    ops, chosen = planned_ops(settings) or ReferenceOps(), ONLINE.get(settings.model.quantization)
    if chosen is None:
        blocks = stored_blocks(checkpoint.entries) if checkpoint and keeps_packed(settings) else {}
        if not blocks or checkpoint is None:
            return facts.parameters * facts.dtype.itemsize
        each = {kind: kept_bytes(kind, ops) for kind in set(blocks.values())}
        sizes = {name: each[kind] for name, kind in blocks.items()}
        stored = checkpoint.entries.items()
        return int(sum(math.prod(e.shape) * sizes.get(name, facts.dtype.itemsize) for name, e in stored))
    heads = spec.vocab * spec.hidden * (1 if spec.tie else 2)
    size = kept_bytes(chosen, ops) if isinstance(chosen, StoredBlocks) else 1
    return int(heads * facts.dtype.itemsize + (facts.parameters - heads) * size)


def shares(settings: Settings, facts: ModelFacts) -> list[tuple[ModelSpec, float]]:
    """Of each stage, the shape of a rank's part and its share of the weights, of the rank that has most. Raises
    InvalidModel where ranks or stages are too many."""
    execution = settings.execution
    entries = {} if facts.checkpoint is None else facts.checkpoint.entries
    outline = ModelOutline(facts.config, facts.spec, settings.model.quantization, facts.dtype, entries)
    size, stages = execution.tensor_parallel_size, execution.pipeline_parallel_size
    cut = [None] if stages == 1 else outline.cut_stages(stages)
    groups = [(facts.spec, ONE_RANK)]
    groups += [(replace(facts.spec, ranks=size, stage=own), LastRank(size, i, stages)) for i, own in enumerate(cut)]
    whole, *parts = (
        outline._replace(spec=spec).nbytes(group, expert_parallel=execution.enable_expert_parallel)
        for spec, group in groups
    )
    return [(spec, part / whole) for (spec, _), part in zip(groups[1:], parts, strict=True)]


class LastRank(ParallelGroup):
    """The rank of a stage that has one thing more than others where they cannot be divided evenly; it only says what it
    has."""

    def __init__(self, size: int, stage: int = 0, stages: int = 1) -> None:
        self.rank, self.size, self.pipeline = size - 1, size, Pipeline(stage, stages)


def _sequences(count: float) -> str:
    shown = f"{count:,.1f}".removesuffix(".0")
    return f"{shown} sequence" if shown == "1" else f"{shown} sequences"


MOST_CARDS = (1, 2, 4, 8, 16, 32, 64)
"""Ranks that are tried."""


def cards(settings: Settings, facts: ModelFacts, room: int, device: torch.device) -> str:
    """How many GPUs of `room` bytes hold one sequence of the whole length, and as many as the limits allow."""
    found: dict[str, int] = {}
    for size in MOST_CARDS:
        try:
            asked = need(settings.changed(tensor_parallel_size=size), facts, room, device)
        except InvalidModel:
            continue
        if asked.fits:
            found.setdefault("one", size)
        if asked.fits and asked.blocks >= asked.most:
            found.setdefault("all", size)
            break
    one, every = (found.get(what) for what in ("one", "all"))
    if one is None:
        return f"{MOST_CARDS[-1]} are not enough for one sequence of the whole length"
    most = f"more than {MOST_CARDS[-1]}" if every is None else f"--tensor-parallel-size {every}"
    return f"--tensor-parallel-size {one} for one sequence of the whole length, {most} for all of the limits at once"


def plan_lines(settings: Settings, facts: ModelFacts, room: int, device: torch.device) -> Iterator[Fact]:
    """The plan, line by line; first, what keeps the weights that are there from being loaded."""
    asked = need(settings, facts, room, device)
    if facts.trouble:
        yield "loads", facts.trouble
    if facts.foreign:
        rest = "" if facts.layers is not None and not facts.whole else "; states and K/V of its own are not counted"
        yield "run by", f"transformers (--executor hf){rest}"
    size, stages = settings.execution.num_ranks, settings.execution.pipeline_parallel_size
    if stages > 1:
        yield "ranks", f"{size}, in {stages} stages; what follows is of one in the stage with least room for K/V"
    elif size > 1:
        yield "ranks", f"{size}; what follows is of each"
    room_each = room // size if device.type == "cpu" else room
    yield "memory", f"{amount(room_each)} ({device.type})"
    if device.type == "cuda" and not facts.foreign:
        yield "GPUs", cards(settings, facts, room, device)
    yield "weights", amount(asked.weights)
    yield "activations", f"{amount(asked.work)} at most"
    if asked.states:
        kept = f"and {asked.snapshots:,} snapshots for the prefix cache"
        yield "states", f"{amount(asked.states)} of recurrent layers, for all sequences at once {kept}"
    yield "KV a sequence", f"{amount(asked.least * asked.page)} for {asked.length:,} tokens"
    kept = "; of one layer, and for the prompts of one step" if facts.spec.bidirectional else ""
    yield "KV at most", f"{amount(asked.most * asked.page)}: the limits cannot use more{kept}"
    if asked.fits:
        taken, whole = (asked.blocks + 1) * asked.page, asked.blocks / asked.least
        yield "KV pool", f"{amount(taken)}: {asked.blocks:,} blocks, {_sequences(whole)} of the whole length"
        yield "left", amount(room_each - asked.weights - asked.work - asked.states - taken)
        return
    taken = asked.weights + asked.work + asked.states
    short = f"{amount(asked.missing)} more must be left for K/V"
    yield "fits", f"no: {short if taken < room_each else f'weights and activations take {amount(taken)}'}"
    proposed = next(smaller(settings, facts, room, device), None)
    flags = {OPTIONS[name].flag: value for name, value in (proposed or {}).items()}
    none = f"none is enough: the weights alone are {amount(asked.weights)}"
    yield "smallest change", " ".join(f"{flag} {value}" for flag, value in flags.items()) or none


def smaller(settings: Settings, facts: ModelFacts, room: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Changes of settings that make it fit, the least first."""
    asked = need(settings, facts, room, device)
    plain = read_scheme(facts.config) is None and settings.model.quantization == AUTO and not facts.foreign
    narrow = not facts.foreign and not facts.spec.recurrent and facts.spec.generates
    small_kv: dict[str, Any] = {"kv_cache_dtype": "fp8"} if narrow else {}
    both = {**small_kv, **({"quantization": "fp8"} if plain else {})}
    whole = (
        {}
        if settings.cache.num_gpu_blocks_override
        else {"kv_cache_memory_bytes": (asked.least + 1) * asked.page + asked.states}
    )
    length = longest(asked)
    shorter = {"max_model_len": length}
    for change in (whole, shorter if length > asked.length // 2 else {}, small_kv, shorter, both):
        if not change or change.get("max_model_len", SHORTEST) < SHORTEST:
            continue
        if need(settings.changed(**change), facts, room, device).fits:
            yield change
    last = longest(need(settings.changed(**both), facts, room, device))
    if last >= SHORTEST:
        yield {**both, "max_model_len": min(last, asked.length)}


def longest(asked: MemoryPlan) -> int:
    """Tokens of a sequence that the pool holds."""
    return max(1, (asked.pool // asked.page - 1) * asked.size + 1)
