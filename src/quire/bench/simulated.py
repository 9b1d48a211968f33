"""A model on a card, or on a calibrated machine, as an engine that can be simulated: memory and step times from
headers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.assembly.limits import check_stages, resolve
from quire.bench.simulated_engine import SimulatedEngine
from quire.cli.inspect import ModelFacts, read_facts
from quire.cli.plan import MemoryPlan, need, plan_lines, weights
from quire.config import Settings
from quire.config.option import amount
from quire.config.speculative import parse
from quire.errors import InvalidConfig
from quire.layers.stages import cut_layers
from quire.model_runner.memory import block_bytes, layer_shapes
from quire.models.registry import idle_parameters
from quire.ops.quantized import FLOAT8
from quire.sim.calibration import Calibration
from quire.sim.copies import CPU_COPIES, GPU_COPIES
from quire.sim.devices import Device, ModelSizes, step_cost
from quire.sim.shared_reads import NO_SHARING, Sharing
from quire.types import UNLIMITED
from quire.weights.locate import EMBEDDED
from quire.weights.outline import ModelOutline

SHARING_ON_GPUS = Sharing(group=4, step=32)
"""As attention on a GPU does: `attention_schedule.MIN_GROUP`, `attention.MIN_CASCADE_SPANS`."""


def sizes_of(settings: Settings, facts: ModelFacts) -> ModelSizes:
    """What a step's time depends on, from a model's headers."""
    spec, moe, held = facts.spec, facts.spec.experts, weights(settings, facts)
    table = spec.vocab * spec.hidden
    each = (held - (table if spec.tie else 2 * table) * facts.dtype.itemsize) / max(
        1, facts.parameters - (table if spec.tie else 2 * table)
    )
    expert_parameters = 0.0
    if moe is not None:
        expert_parameters = 3.0 * spec.hidden * moe.width * (spec.layers - len(moe.dense_layers))
    quantized = settings.model.quantization if settings.model.quantization != "auto" else ""
    stored = quantized or str((facts.config.get("quantization_config") or {}).get("quant_method", ""))
    name = settings.cache.kv_cache_dtype
    kept = FLOAT8[name].dtype if name in FLOAT8 else facts.dtype
    whole, windowed = 0, 0.0
    for layer, shape in enumerate(layer_shapes(spec.kv_shapes, kept, spec.state_shapes)):
        size = block_bytes((shape,), 1)
        window = spec.windows[layer] if layer < len(spec.windows) else UNLIMITED
        if window < UNLIMITED:
            windowed += size * window
        else:
            whole += size
    unread = 0 if spec.tie else table * facts.dtype.itemsize
    return ModelSizes(
        weights=held - unread - expert_parameters * each * (moe.num_experts if moe else 0),
        expert=expert_parameters * each,
        experts=moe.num_experts if moe else 0,
        used_experts=moe.num_experts_per_token if moe else 0,
        parameters=max(0, facts.parameters - idle_parameters(spec) - (table if spec.tie else 2 * table)),
        head=table,
        width=1 if "fp8" in stored else 2,
        kv=whole,
        windowed=windowed,
        pair=4.0 * spec.heads * max(dim for _, dim in spec.each_heads) * spec.layers,
        layers=spec.layers,
        expert_parameters=expert_parameters * (moe.num_experts_per_token if moe else 0),
    )


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One replica. memory: of its card, in bytes. first_token: see `Calibration`."""

    engine: SimulatedEngine
    plan: MemoryPlan
    memory: int
    first_token: float = 0.0

    def describe(self) -> list[tuple[str, str]]:
        """Lines for people."""
        limits, asked = self.engine.limits, self.plan
        tokens = self.engine.num_blocks * limits.block_size
        return [
            ("weights", amount(asked.weights)),
            ("KV pool", f"{amount(self.engine.num_blocks * asked.page)}: {tokens:,} tokens"),
            ("limits", f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens:,} tokens a step"),
        ]


def build_model(
    settings: Settings,
    *,
    device: Device | None = None,
    calibration: Calibration | None = None,
    memory: int | None = None,
    prefixes: bool = True,
) -> SimulatedModel:
    """A replica of the settings' model on a card. calibration: its step times, in place of those that follow from the
    card's rates. memory: bytes, in place of the card's.

    Raises InvalidConfig where it does not fit, naming the smallest change that does.
    """
    on_card = device is not None and device.name != "cpu"
    where = torch.device("cuda" if on_card else "cpu")
    settings = settings.changed(device=where.type)
    room = memory if memory is not None else device.memory if device is not None else 0
    facts = read_facts(settings)
    if facts.foreign:
        raise InvalidConfig("only models of Quire's own layers can be simulated", param="model")
    if not facts.spec.generates:
        raise InvalidConfig(
            "only answers are simulated: a pooling model, as --runner makes one, gives none", param="runner"
        )
    asked = need(settings, facts, room, where)
    if not asked.fits:
        lines = dict(plan_lines(settings, facts, room, where))
        raise InvalidConfig(
            f"the model does not fit {amount(room)}: {lines['fits'].removeprefix('no: ')}. "
            f"Smallest change: {lines['smallest change']}",
            param="model",
        )
    check_stages(settings, where)
    if calibration is None:
        if device is None:
            raise InvalidConfig("say where steps run: --gpu, or --calibration FILE", param="gpu")
        calibration = Calibration(step_cost(device, sizes_of(settings, facts), draft=_draft(settings)))
    calibration = staged(calibration, settings, facts)
    shares = facts.spec.latent is None and not settings.execution.deterministic
    engine = SimulatedEngine(
        settings,
        resolve(settings, facts.spec, where),
        asked.blocks,
        calibration.cost,
        calibration.noise,
        prefixes=prefixes,
        recurrent=bool(facts.spec.recurrent),
        stages=calibration.costs(),
        hop=calibration.hop,
        block_bytes=asked.page,
        copies={**(GPU_COPIES if on_card else CPU_COPIES), **calibration.copies},
        sharing=SHARING_ON_GPUS if on_card and shares else NO_SHARING,
    )
    return SimulatedModel(engine, asked, room, calibration.first_token)


def staged(calibration: Calibration, settings: Settings, facts: ModelFacts) -> Calibration:
    """Step times of the settings' stages. A model that was measured whole is cut as when it is loaded, and passing
    from stage to stage takes no time. Raises InvalidConfig for another number of stages than was measured."""
    stages = settings.execution.pipeline_parallel_size
    if calibration.stages == stages:
        return calibration
    if calibration.stages > 1:
        raise InvalidConfig(
            f"the calibration is of {calibration.stages} stages, and --pipeline-parallel-size is {stages}: calibrate "
            "with as many, or without",
            param="pipeline_parallel_size",
        )
    mean = calibration.cost.scaled(1 / stages)
    return replace(calibration, cost=mean, stages=stages, hop=0.0, shares=stage_shares(settings, facts, stages))


def layer_shares(settings: Settings, stages: int) -> tuple[float, ...]:
    """See `Calibration.shares`."""
    return () if stages == 1 else stage_shares(settings, read_facts(settings), stages)


def stage_shares(settings: Settings, facts: ModelFacts, stages: int) -> tuple[float, ...]:
    """By the bytes of layers, as they are cut."""
    entries = {} if facts.checkpoint is None else facts.checkpoint.entries
    outline = ModelOutline(facts.config, facts.spec, settings.model.quantization, facts.dtype, entries)
    sizes, ends = outline.layer_bytes()
    cut = cut_layers(sizes, ends, stages, facts.spec.uncut)
    return tuple(stages * sum(sizes[i] for i in layers) / sum(sizes) for layers in cut)


def _draft(settings: Settings) -> ModelSizes | None:
    """Sizes of the draft model, None where none runs."""
    config = parse(settings.scheduler.speculative_config)
    if config is None or config.method != "draft_model" or (config.model is None and settings.model.model == EMBEDDED):
        return None
    if config.model is None:
        raise InvalidConfig(
            "speculative_config needs a model: the folder or hub id of a draft", param="speculative_config"
        )
    drafting = settings.changed(model=config.model, quantization=config.quantization, speculative_config=None)
    return sizes_of(drafting, read_facts(drafting))


def changed(model: SimulatedModel, *, prefixes: bool) -> SimulatedModel:
    """The same replica for a load that says, or does not say, which prompts begin alike."""
    return replace(model, engine=replace(model.engine, prefixes=prefixes))
