"""An executor on Hugging Face transformers, from settings. Needs transformers, and accelerate for --device-map."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from quire.assembly.engine import paged
from quire.assembly.limits import BuiltExecutor, choose_device, host_bytes, reject_options, resolve
from quire.assembly.place import place_of
from quire.assembly.progress import loading
from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig
from quire.executors.hf import HfModel, load
from quire.model_runner.memory import LayerShape, block_bytes, cpu_budget

log = logging.getLogger(__name__)

FIXED: Mapping[str, str] = MappingProxyType(
    {
        "load_format": "transformers reads the weights",
        "quantization": "transformers reads the checkpoint as it is",
        "kv_cache_dtype": "K/V is kept as the model makes it",
        "enforce_eager": "it has no graphs",
        "deterministic": "how transformers sums depends on what else is in the batch",
    }
)
"""Options that have no effect with this executor, and why."""

OWN_PAST = "this model's past is kept by sequence, not in blocks"

OF_BLOCKS: Mapping[str, str] = MappingProxyType(
    {
        "num_gpu_blocks_override": OWN_PAST,
        "block_size": OWN_PAST,
        "speculative_config": f"{OWN_PAST}, and cannot take a draft back",
    }
)
"""Options that have no effect with a model with recurrent layers, or that keeps its past itself."""

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def make(settings: Settings) -> BuiltExecutor:
    """Load the model and build its executor.

    Raises InvalidModel for a model that transformers cannot load, InvalidConfig for an option of `FIXED`, or of
    `OF_BLOCKS` with a model without blocks.
    """
    reject_options(settings, "hf", FIXED)
    config, device = settings.model, choose_device(settings.execution.device)
    folder = place_of(settings)
    if settings.execution.threads:
        torch.set_num_threads(settings.execution.threads)
    with loading(config.model):
        model = HfModel(load(folder, config.dtype, device, **placing(settings)), device)
    log.warning("%s", announce(settings, model))
    limits = resolve(settings.changed(lookahead=settings.scheduler.lookahead or 0), model.spec, model.device)
    if model.past.whole:
        reject_options(settings, "hf", OF_BLOCKS)
        limits = limits._replace(block_size=limits.max_model_len)
        settings = settings.changed(num_gpu_blocks_override=limits.num_rows)
    budget = settings.cache.kv_cache_memory_bytes or kv_budget(model.layers, settings)
    return BuiltExecutor(paged(settings, model, limits, model.layers, model.device, budget, pools=False), limits, {})


def announce(settings: Settings, model: HfModel) -> str:
    """What is logged at the start: why transformers runs the model, how its past is kept, and what that costs."""
    why = "Quire has no layers for it" if settings.executor.executor == "auto" else "as --executor hf says"
    return (
        f"{settings.model.model} ({model.spec.architecture}) is run by transformers, {why}: slower than Quire's own "
        f"layers, {SLOWER}; {model.past.about}"
    )


SLOWER = "about three quarters of their tokens/s on a CPU, and much less on a GPU, where no steps are captured"
"""The first as docs/benchmarks/fallback-cpu-2026-11-23.md has it measured."""


def placing(settings: Settings) -> dict[str, Any]:
    """Arguments of from_pretrained for layers on several devices; none without `device_map`. Raises InvalidConfig."""
    executor = settings.executor
    if executor.device_map is None:
        if executor.max_memory is not None:
            raise InvalidConfig("max_memory says how device_map divides a model: set device_map", param="max_memory")
        return {}
    if find_spec("accelerate") is None:
        raise InvalidConfig(
            "device_map needs a package that is not installed (accelerate): pip install 'quire-llm[hf]'",
            param="device_map",
        )
    chosen: Any = executor.device_map
    if chosen not in DEVICE_MAPS:
        chosen = _object("device_map", chosen, f"one of {', '.join(DEVICE_MAPS)}, or a JSON object of modules")
    memory = None
    if executor.max_memory is not None:
        given = _object("max_memory", executor.max_memory, "a JSON object of devices")
        read = OPTIONS["kv_cache_memory_bytes"].read
        memory = {int(name) if name.isdecimal() else name: read(size, "max_memory") for name, size in given.items()}
    return {"device_map": chosen, "max_memory": memory}


def _object(name: str, text: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidConfig(f"{name} must be {wanted}, not {text!r}", param=name)
    return found


def kv_budget(layers: Sequence[LayerShape], settings: Settings) -> int:
    """Bytes of K/V, all layers together, so that each device has room for those of its own layers."""
    whole = max(1, block_bytes(layers, 1))
    budgets = []
    for name in {layer.device for layer in layers} or {"cpu"}:
        device = torch.device(name)
        if device.type == "cpu":
            free = cpu_budget(host_bytes())
        else:
            # Half of what is left is for the forward, which pads and copies.
            free = int(torch.cuda.mem_get_info(device)[0] * settings.cache.gpu_memory_utilization / 2)
        budgets.append(free * whole // max(1, block_bytes([each for each in layers if each.device == name], 1)))
    return min(budgets)
