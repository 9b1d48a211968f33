"""An executor on transformers from settings. Needs transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from quire.assembly.limits import Made, choose_device, refuse, resolve
from quire.config import Settings
from quire.executors.hf import HfModel
from quire.executors.local import LocalExecutor
from quire.weights.locate import locate

FIXED: Mapping[str, str] = MappingProxyType(
    {
        "load_format": "transformers reads the weights",
        "quantization": "transformers reads the checkpoint as it is",
        "kv_cache_dtype": "transformers keeps K/V its own way",
        "kv_cache_memory_bytes": "transformers keeps K/V its own way",
        "num_gpu_blocks_override": "transformers keeps K/V its own way, a block a sequence",
        "block_size": "transformers keeps K/V its own way, a block a sequence",
        "speculative_config": "its caches cannot take a draft back",
        "lookahead": "its steps run at once",
        "enforce_eager": "it has no graphs",
        "deterministic": "how transformers sums depends on what else is in the batch",
    }
)


def make(settings: Settings) -> Made:
    """Raises InvalidModel for what transformers cannot load, InvalidConfig for what it cannot do."""
    refuse(settings, "hf", FIXED)
    asked, device = settings.model, choose_device(settings.execution.device)
    folder = locate(asked.model, revision=asked.revision, cache=asked.download_dir)
    model = HfModel(folder, asked.dtype, device)
    if settings.execution.threads:
        torch.set_num_threads(settings.execution.threads)
    at_once = replace(settings, scheduler=replace(settings.scheduler, lookahead=0))
    limits = resolve(at_once, model.spec, device)
    limits = limits._replace(page_size=limits.max_model_len)
    executor = LocalExecutor(
        model,
        pages=limits.rows,
        page_size=limits.page_size,
        rows=limits.rows,
        max_model_len=limits.max_model_len,
        dtype=model.dtype,
        device=device,
        layers=(),
        pools=False,  # what the model gives for hidden states are logits
    )
    return Made(executor, limits, {})
