"""Sizes and devices from settings: every 'auto' that depends on the device or the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from quire.config import OPTIONS, Settings
from quire.engine.executor import Executor
from quire.errors import InvalidConfig
from quire.models.spec import ModelSpec
from quire.types import UNLIMITED

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


class Made(NamedTuple):
    """What runs the steps, its sizes, and what making it showed, as gauges."""

    executor: Executor
    limits: Limits
    facts: dict[str, float]


def refuse(settings: Settings, executor: str, fixed: Mapping[str, str]) -> None:
    """Raises InvalidConfig for an option that was set where it would do nothing. fixed: by name, why."""
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
        chunk=chunk if scheduler.enable_chunked_prefill else UNLIMITED,
    )
