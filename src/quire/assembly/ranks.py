"""Tensor parallelism from settings: the engine's side, and what each rank builds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from quire.assembly.engine import build_local
from quire.assembly.limits import BuiltExecutor, Limits, choose_device
from quire.assembly.place import for_child, of_parent
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.executors.ranks import RankedExecutor, Ranks
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
    size = settings.execution.tensor_parallel_size
    if choose_device(settings.execution.device).type == "cuda" and torch.cuda.device_count() < size:
        raise InvalidConfig(
            f"--tensor-parallel-size {size}: torch sees {torch.cuda.device_count()} GPUs here; use as many at most",
            param="tensor_parallel_size",
        )
    argv = [sys.executable, "-m", RANK_MODULE]
    executor = RankedExecutor(lambda: Ranks(argv, for_child(settings), size, {**ENVIRONMENT, **os.environ}))
    return BuiltExecutor(executor, Limits(**executor.ready.limits), executor.ready.gauges)


def device_of(settings: Mapping[str, Any]) -> torch.device:
    """What a rank computes on, without its number."""
    return choose_device(of_parent(settings).execution.device)


def build_rank(settings: Mapping[str, Any]) -> BuiltExecutor:
    """This rank's executor, in a process that has joined the others."""
    made = of_parent(settings)
    cpu = choose_device(made.execution.device).type == "cpu"
    return build_local(made, DistributedGroup(in_rank_order=cpu or bool(made.execution.deterministic)))
