"""The start of an engine's process, whose program is `engine_main`.

Importing torch takes seconds, so ranks are started first, which import it at the same time: this module does not.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple, cast

from quire.assembly.place import for_child, of_parent
from quire.config import Settings
from quire.engine.protocol import Configure, FrameReader
from quire.errors import QuireError
from quire.executors.ranks import Ranks, RankShape, StartRanks, child_processes

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


class Begun(NamedTuple):
    """What an engine's process has before it imports torch. settings, ranks: if there are any yet."""

    link: socket.socket
    settings: Settings | None = None
    ranks: Ranks | None = None


def main() -> int:
    """Be the engine, see `engine_child.main`. A process that waits for its turn has no settings yet."""
    link = socket.socket(fileno=int(sys.argv[-1]))
    begun = Begun(link)
    if select.select([link], [], [], 0)[0]:
        try:
            settings = received_settings(link)
        except QuireError:
            link.close()
            return 2  # the server has gone
        begun = Begun(link, settings, early_ranks(settings))
    return cast(int, import_module("quire.assembly.engine_child").main(begun=begun))


def received_settings(link: socket.socket) -> Settings:
    """What the server sends first. Raises QuireError where it has gone."""
    frames = FrameReader(Configure)
    while data := link.recv(1 << 16):
        for message in frames.feed(data):
            return of_parent(message.settings)
    raise QuireError("the frontend exited before it sent the settings")


def early_ranks(settings: Settings) -> Ranks | None:
    """The ranks of an executor that will need some, unless it turns out that it cannot have them: they end with this
    process. None without ranks, and where Ray starts them."""
    execution = settings.execution
    needed = execution.ranked and settings.executor.executor in ("auto", "local")
    return start_ranks(settings) if needed and execution.distributed_executor_backend == "mp" else None


def start_ranks(settings: Settings) -> Ranks:
    """Ranks as processes of this host, which begin to load their part."""
    start = child_processes([sys.executable, "-m", RANK_MODULE], {**ENVIRONMENT, **os.environ})
    return begin_ranks(settings, start, for_child(settings))


def begin_ranks(settings: Settings, start: StartRanks, sent: Mapping[str, object]) -> Ranks:
    """Ranks that are started so. sent: the settings as they get them."""
    execution = settings.execution
    return Ranks(start, sent, RankShape(execution.tensor_parallel_size, execution.pipeline_parallel_size))
