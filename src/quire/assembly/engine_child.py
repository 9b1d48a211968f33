"""The engine's own process: `python -m quire.assembly.engine_child FD`, a connected socket inherited from the front."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from quire import heap
from quire.assembly.engine import build_engine, count_compiles
from quire.assembly.text import build_tokenizer
from quire.config import Settings
from quire.engine.executor import Description, Executor
from quire.engine.process import EngineLoop
from quire.engine.protocol import BuildFailed, Configure, FrameReader, Ready, encode_frame
from quire.engine.step_watch import StepWatch
from quire.errors import QuireError
from quire.observability.engine_metrics import EngineMetrics
from quire.observability.history import History
from quire.observability.live_view import EngineLiveView
from quire.structured_output.compiler import GrammarCompiler
from quire.structured_output.llguidance import LlguidanceCompiler


def main(wrap: Callable[[Executor], Executor] = lambda executor: executor) -> int:
    """Build, say so, run until the front goes away. Exit code 2 when the engine cannot be built.

    wrap: what goes around the executor, such as one that fails on purpose.
    """
    heap.settled()
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)  # compilers that libraries start: one that outlived this process would keep it open
    metrics, history = EngineMetrics(), History()
    window = EngineLiveView(history)
    try:
        settings = _settings(link)
        watch = StepWatch(timeout=_step_timeout(settings))
        engine = build_engine(settings, observers=[metrics, watch, history, window], wrap=wrap)
    except QuireError as error:
        _tell(link, BuildFailed(type(error).__name__, str(error)))
        return 2
    metrics.facts, metrics.cache = engine.description.static_gauges, _cache_labels(settings, engine.description)
    metrics.compiles = count_compiles(engine.description.device)
    watch.install_signal_handler(engine)
    history.attach(engine.scheduler.kv)
    grammars = GrammarCompiler(LlguidanceCompiler(partial(build_tokenizer, settings)))
    gc.collect()
    heap.settled()
    _tell(link, Ready(engine.description))
    EngineLoop(engine, link, lambda: metrics.snapshot(engine), watch, grammars, window).run()
    engine.close()
    return 0


def _tell(link: socket.socket, message: Ready | BuildFailed) -> None:
    """A front that has gone away meanwhile is noticed by whoever reads next."""
    with suppress(ConnectionError):
        link.sendall(encode_frame(message))


def _step_timeout(settings: Settings) -> float | None:
    """Seconds. What runs elsewhere may be silent as long as the executor there may."""
    asked, executor = settings.execution.step_timeout, settings.executor
    return executor.executor_step_timeout if asked is None and executor.executor == "grpc" else asked


def _cache_labels(settings: Settings, about: Description) -> dict[str, str]:
    """What vLLM's dashboards know of a KV cache, and our own options beside."""
    asked = {name: str(value) for name, value in asdict(settings.cache).items()}
    known = {"block_size": str(about.block_size), "num_gpu_blocks": str(about.num_blocks)}
    return asked | known | {"cache_dtype": settings.cache.kv_cache_dtype}


def _settings(link: socket.socket) -> Settings:
    frames = FrameReader(Configure)
    while data := link.recv(1 << 16):
        for message in frames.feed(data):
            return Settings.of(**message.settings)
    raise QuireError("the front went away before it said what to build")


if __name__ == "__main__":
    sys.exit(main())
