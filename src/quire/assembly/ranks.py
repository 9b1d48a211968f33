"""Tensor and pipeline parallelism from settings: the engine's side, and what each rank builds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from quire.assembly import extra
from quire.assembly.engine import build_local
from quire.assembly.limits import BuiltExecutor, Limits, check_stages, choose_device
from quire.assembly.place import for_child, of_parent, without_secrets
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.executors.ranks import BuildRank, RankedExecutor, Ranks, RankShape, StartRanks, child_processes
from quire.layers.distributed import DistributedGroup, SmallReduce

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
)
"""Of ranks, where they are not set: they talk on this host alone, and without NVLink's multicast."""

RANK_MODULE = "quire.assembly.rank_child"


def make(settings: Settings) -> BuiltExecutor:
    """Start the ranks and wait until all have loaded their part.

    Raises InvalidConfig for more ranks than GPUs, and what a rank raises.
    """
    shape = RankShape(settings.execution.tensor_parallel_size, settings.execution.pipeline_parallel_size)
    device = choose_device(settings.execution.device)
    check_stages(settings, device)
    cuda, backend = device.type == "cuda", settings.execution.distributed_executor_backend
    if cuda and backend == "mp" and torch.cuda.device_count() < shape.size:
        raise InvalidConfig(
            f"--tensor-parallel-size {shape.size}: torch sees {torch.cuda.device_count()} GPUs here; use as many at "
            "most",
            param="tensor_parallel_size",
        )
    if backend == "ray":
        start: StartRanks = extra("quire.assembly.ray_ranks", "ray").ray_actors(cuda)
        sent = without_secrets(settings)
    else:
        start = child_processes([sys.executable, "-m", RANK_MODULE], {**ENVIRONMENT, **os.environ})
        sent = for_child(settings)
    executor = RankedExecutor(lambda: Ranks(start, sent, shape))
    return BuiltExecutor(executor, Limits(**executor.ready.limits), executor.ready.gauges)


def device_of(settings: Mapping[str, Any]) -> torch.device:
    """What a rank computes on, without its number."""
    return choose_device(of_parent(settings).execution.device)


def build_rank(asked: BuildRank, timeout: timedelta, join: Callable[[], None]) -> BuiltExecutor:
    """This rank's executor. timeout: of what ranks exchange. join: joins the other ranks, in a thread, while weights
    are loaded."""
    made, shape = of_parent(asked.settings), asked.shape
    cuda = choose_device(made.execution.device).type == "cuda"
    group = DistributedGroup(
        asked.rank,
        shape.tensor,
        shape.size,
        in_rank_order=not cuda or bool(made.execution.deterministic),
        timeout=timeout,
        neighbours=asked.place.neighbours,
        make_small_reduce=_peer_sum if cuda and shape.tensor > 1 else None,
        join=join,
    )
    return build_local(made, group)


def _peer_sum(group: dist.ProcessGroup, rank: int) -> SmallReduce:
    """Sums through the memory of the group's GPUs. Raises RuntimeError where they do not reach each other's."""
    made: SmallReduce = import_module("quire.ops.triton.all_reduce").peer_sum(
        group, rank, torch.device("cuda", torch.cuda.current_device())
    )
    return made
