"""What a rank's process does once it knows which rank it is: `rank_child` is its program."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from quire import heap
from quire.assembly.ranks import START_TIMEOUT, build_rank, device_of
from quire.engine.executor import Executor
from quire.errors import QuireError
from quire.executors.rank_loop import RankLink, RankLoop
from quire.executors.ranks import BuildRank, RankReady, RankRefused
from quire.ops.stages import START_TIMES, StartTimes

Wrap = Callable[[Executor], Executor]


def run(link: RankLink, asked: BuildRank, listener: int | None, wrap: Wrap = lambda executor: executor) -> None:
    """As a rank, until the engine closes the link, which ends the process. listener: rank 0's descriptor, on which the
    others find it. wrap: applied to the executor, for tests."""
    if asked.rank:
        logging.disable(logging.WARNING)  # rank 0 says the same
    times = StartTimes(asked.began or time.monotonic())
    START_TIMES.set(times)
    times.ended("imports")
    use_card(asked)
    try:
        built = build_rank(asked, partial(join, asked, listener))
    except QuireError as error:
        link.send(RankRefused(type(error).__name__, str(error)))
        os._exit(2)
    heap.settled()
    times.ended("rest")
    link.send(RankReady(built.executor.describe(), built.limits._asdict(), built.static_gauges, times.seconds))
    RankLoop(wrap(built.executor), link, asked.rank, asked.shape, built.prepare).run()


def use_card(asked: BuildRank) -> bool:
    """Have this thread use the rank's GPU. Returns whether it computes on one."""
    cuda = device_of(asked.settings).type == "cuda"
    if cuda:
        # Of those that this process sees: Ray shows each rank its own.
        torch.cuda.set_device(asked.rank % torch.cuda.device_count())
    return cuda


def join(asked: BuildRank, listener: int | None) -> None:
    """Join the other ranks."""
    cuda = use_card(asked)
    listens: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
    place, timeout = asked.place, START_TIMEOUT
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.host, place.port, is_master=asked.rank == 0, wait_for_workers=False, timeout=timeout, **listens
    )
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=asked.rank, world_size=asked.shape.size, timeout=timeout
    )
