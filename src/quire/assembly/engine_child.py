"""The engine's process, which `engine_main` begins. Run as a program, with a socket inherited from the server, it does
that itself."""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial

from quire import heap
from quire.assembly.engine import begin_context, build_engine, count_compiles
from quire.assembly.engine_start import Begun, received_settings
from quire.assembly.limits import choose_device
from quire.assembly.tokenizer import build_tokenizer
from quire.config import Settings
from quire.engine.executor import Description, Executor
from quire.engine.process import EngineLoop
from quire.engine.protocol import BuildFailed, Ready, encode_frame
from quire.engine.step_watch import StepWatch
from quire.errors import QuireError
from quire.executors.local import LocalExecutor
from quire.executors.ranks import RankedExecutor
from quire.observability.engine_metrics import EngineMetrics
from quire.observability.history import History
from quire.observability.live_view import EngineLiveView
from quire.structured_output.compiler import GrammarCompiler
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.structured_output.trial import Trials

RANK_LOST = 3
"""Exit code of an engine that ends because a rank or the model was lost: the server starts another."""


def main(wrap: Callable[[Executor], Executor] = lambda executor: executor, begun: Begun | None = None) -> int:
    """Build the engine, report it as ready, and run until the server closes the socket.

    Returns the exit code: 2 if the engine cannot be built, RANK_LOST. wrap: applied to the executor, for tests. begun:
    what there is already.
    """
    heap.settled()
    link, received, ranks = begun or Begun(socket.socket(fileno=int(sys.argv[1])))
    # A compiler that a library starts would keep it open if it outlived this process.
    link.set_inheritable(False)
    metrics, history = EngineMetrics(), History()
    live_view = EngineLiveView(history)
    try:
        settings = received or received_settings(link)
        watch = StepWatch(timeout=_step_timeout(settings))
        grammars = GrammarCompiler(LlguidanceCompiler(partial(build_tokenizer, settings), Trials()))
        begin_context(settings)
        with ends_with_server(link):
            engine = build_engine(settings, observers=[metrics, watch, history, live_view], wrap=wrap, ranks=ranks)
        if choose_device(settings.execution.device).type == "cuda":
            engine.prepare_last(grammars.warm_up)
    except QuireError as error:
        _send(link, BuildFailed(type(error).__name__, str(error)))
        return 2
    metrics.static_gauges = engine.description.static_gauges
    metrics.cache = _cache_labels(settings, engine.description)
    metrics.compiles = count_compiles(engine.description.device)
    watch.install_signal_handler(engine)
    history.attach(engine.scheduler.kv)
    gc.collect()
    heap.settled()
    _send(link, Ready(engine.description))
    exit_fds = engine.executor.exit_fds() if isinstance(engine.executor, RankedExecutor | LocalExecutor) else ()
    loop = EngineLoop(engine, link, lambda: metrics.snapshot(engine), watch, grammars, live_view, exit_fds)
    done = loop.run()
    # Before memory is freed, which takes a while: from now on /health says that there is no engine.
    link.close()
    engine.close()
    return 0 if done else RANK_LOST


@contextmanager
def ends_with_server(link: socket.socket) -> Iterator[None]:
    """If the server goes within the context, this process ends at once. Building an engine takes up to minutes, in
    which nothing reads the link, and the memory that the server's successor needs."""
    stopped, stop = os.pipe()
    poll = select.poll()
    poll.register(link.fileno(), 0)  # hanging up is always said
    poll.register(stopped, select.POLLIN)

    def watch() -> None:
        if any(number != stopped for number, _ in poll.poll()):
            os._exit(0)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.write(stop, b".")  # closing it says nothing while a process that was forked meanwhile has it
        watching.join()
        os.close(stop)
        os.close(stopped)


def _send(link: socket.socket, message: Ready | BuildFailed) -> None:
    """Send to the server. If it has gone, the next read will find out."""
    with suppress(ConnectionError):
        link.sendall(encode_frame(message))


def _step_timeout(settings: Settings) -> float | None:
    """Seconds that a step may take; for an executor elsewhere that executor's timeout."""
    timeout, executor = settings.execution.step_timeout, settings.executor
    return executor.executor_step_timeout if timeout is None and executor.executor == "grpc" else timeout


def _cache_labels(settings: Settings, description: Description) -> dict[str, str]:
    """Labels of vllm:cache_config_info: vLLM's, and the options of the section `cache`."""
    options = {name: str(value) for name, value in asdict(settings.cache).items()}
    sizes = {"block_size": str(description.block_size), "num_gpu_blocks": str(description.num_blocks)}
    return options | sizes | {"cache_dtype": settings.cache.kv_cache_dtype}


if __name__ == "__main__":
    sys.exit(main())
