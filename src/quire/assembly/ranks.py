"""Tensor and pipeline parallelism from settings: the engine's side, and what each rank builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from quire.assembly import extra
from quire.assembly.engine import build_local
from quire.assembly.engine_start import begin_ranks, start_ranks
from quire.assembly.limits import BuiltExecutor, Limits, check_stages, choose_device
from quire.assembly.place import of_parent, without_secrets
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.executors.ranks import BuildRank, RankedExecutor, Ranks
from quire.layers.distributed import DistributedGroup, SmallReduce


def make(settings: Settings, ranks: Ranks | None = None) -> BuiltExecutor:
    """Start the ranks, or take those that have been started, and wait until all have loaded their part.

    Raises InvalidConfig for more ranks than GPUs, and what a rank raises.
    """
    size, device = settings.execution.num_ranks, choose_device(settings.execution.device)
    check_stages(settings, device)
    cuda, backend = device.type == "cuda", settings.execution.distributed_executor_backend
    if cuda and backend == "mp" and torch.cuda.device_count() < size:
        raise InvalidConfig(
            f"--tensor-parallel-size {size}: torch sees {torch.cuda.device_count()} GPUs here; use as many at most",
            param="tensor_parallel_size",
        )
    start = partial(start_ranks, settings)
    if backend == "ray":
        actors = extra("quire.assembly.ray_ranks", "ray").ray_actors(cuda)
        start = partial(begin_ranks, settings, actors, without_secrets(settings))
    executor = RankedExecutor(start, ranks)
    limits = Limits(**executor.ready.limits)
    return BuiltExecutor(executor, limits, executor.ready.gauges, prepare=executor.prepare_next)


def device_of(settings: Mapping[str, Any]) -> torch.device:
    """What a rank computes on, without its number."""
    return choose_device(of_parent(settings).execution.device)


START_TIMEOUT = timedelta(hours=1)
"""Within which ranks meet: while they load weights, one may be much slower. The engine knows whether they live."""


def build_rank(asked: BuildRank, join: Callable[[], None]) -> BuiltExecutor:
    """This rank's executor. join: joins the other ranks, in a thread, while weights
    are loaded."""
    made, shape = of_parent(asked.settings), asked.shape
    cuda = choose_device(made.execution.device).type == "cuda"
    group = DistributedGroup(
        asked.rank,
        shape.tensor,
        shape.size,
        in_rank_order=not cuda or bool(made.execution.deterministic),
        timeout=START_TIMEOUT,
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
