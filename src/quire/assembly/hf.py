"""An executor on Hugging Face transformers, from settings. Needs transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.assembly.limits import BuiltExecutor, choose_device, reject_options, resolve
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
"""Options that have no effect with this executor, and why."""


def make(settings: Settings) -> BuiltExecutor:
    """Load the model and build its executor.

    Raises InvalidModel for a model that transformers cannot load, InvalidConfig for an option of `FIXED`.
    """
    reject_options(settings, "hf", FIXED)
    config, device = settings.model, choose_device(settings.execution.device)
    folder = locate(config.model, revision=config.revision, cache=config.download_dir)
    model = HfModel(folder, config.dtype, device)
    if settings.execution.threads:
        torch.set_num_threads(settings.execution.threads)
    limits = resolve(settings.changed(lookahead=0), model.spec, device)
    # A block holds a whole sequence.
    limits = limits._replace(block_size=limits.max_model_len)
    executor = LocalExecutor(
        model,
        pages=limits.num_rows,
        page_size=limits.block_size,
        rows=limits.num_rows,
        max_model_len=limits.max_model_len,
        dtype=model.dtype,
        device=device,
        layers=(),
        # The model returns logits in place of hidden states.
        pools=False,
    )
    return BuiltExecutor(executor, limits, {})
