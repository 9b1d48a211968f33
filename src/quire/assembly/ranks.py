"""Tensor and pipeline parallelism from settings: the engine's side, and what each rank builds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch

from quire.assembly.engine import build_local
from quire.assembly.limits import BuiltExecutor, Limits, check_stages, choose_device
from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig
from quire.executors.ranks import RankedExecutor, Ranks, RankShape
from quire.layers.distributed import DistributedGroup

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
)
"""Of ranks, where they are not set: they talk on this host alone, and without NVLink's multicast."""

RANK_MODULE = "quire.assembly.rank_child"


def make(settings: Settings) -> BuiltExecutor:
    """Start the ranks and wait until all have loaded their part.

    Raises InvalidConfig for more ranks than GPUs, and what a rank raises.
    """
    shape = RankShape(settings.execution.tensor_parallel_size, settings.execution.pipeline_parallel_size)
    check(settings, shape)
    options = {key: value for key, value in settings.flat().items() if not OPTIONS[key].secret}
    argv = [sys.executable, "-m", RANK_MODULE]
    executor = RankedExecutor(lambda: Ranks(argv, options, shape, {**ENVIRONMENT, **os.environ}))
    return BuiltExecutor(executor, Limits(**executor.ready.limits), executor.ready.gauges)


def check(settings: Settings, shape: RankShape) -> None:
    """Raise InvalidConfig for ranks that this host has no room for, and for what several stages do not do."""
    device = choose_device(settings.execution.device)
    check_stages(settings, device)
    if device.type == "cuda" and torch.cuda.device_count() < shape.size:
        raise InvalidConfig(
            f"--tensor-parallel-size {shape.size}: torch sees {torch.cuda.device_count()} GPUs here; use as many at "
            "most",
            param="tensor_parallel_size",
        )


def device_of(settings: Mapping[str, Any]) -> torch.device:
    """What a rank computes on, without its number."""
    return choose_device(Settings.of(**settings).execution.device)


def build_rank(settings: Mapping[str, Any], shape: RankShape, timeout: timedelta) -> BuiltExecutor:
    """This rank's executor, in a process that has joined the others. timeout: of what ranks exchange."""
    made = Settings.of(**settings)
    in_order = choose_device(made.execution.device).type == "cpu" or bool(made.execution.deterministic)
    group = DistributedGroup(shape.tensor, in_rank_order=in_order, timeout=timeout, neighbours=shape.size)
    return build_local(made, group)
