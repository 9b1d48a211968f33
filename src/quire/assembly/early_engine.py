"""The engine's process, started before anything else is imported: it imports torch while the server reads the model's
text. Needs little itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

from quire.assembly.engine_main import LOCAL
from quire.assembly.place import for_child, located, may_use_gpu
from quire.config import Settings
from quire.engine.protocol import Configure, encode_frame
from quire.engine.spawn import Spawned, spawn

ENGINE_ENVIRONMENT = MappingProxyType({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"})
"""On a CPU, oneDNN caches 1,024 matrix products, one for each shape, and so does torch's layer above it, at some 280 kB
each: memory grew over thousands of requests, and they were no faster."""

ENGINE_MODULE = "quire.assembly.engine_main"
"""What the engine's process runs."""


def engine_command(module: str = ENGINE_MODULE) -> list[str]:
    """The command of a process that builds an engine; the number of its socket follows."""
    return [sys.executable, "-m", module]


@contextmanager
def early_engine(settings: Settings) -> Iterator[tuple[Settings, Spawned]]:
    """The settings, and a process for their engine, which ends with the context at the latest. One that has ranks
    starts them before it imports torch: it is sent the settings at once, whose model is looked for before that. Raises
    InvalidModel and Unavailable where it is not found."""
    ranked = settings.execution.ranked
    if ranked:
        settings = located(settings)
    begun = spawn([*engine_command(), *[LOCAL] * may_use_gpu(settings)], ENGINE_ENVIRONMENT)
    try:
        if ranked:
            begun.sock.sendall(encode_frame(Configure(for_child(settings))))
        yield settings, begun._replace(configured=ranked)
    finally:
        if begun.process.poll() is None:
            begun.process.kill()
            begun.process.wait()
            begun.sock.close()
