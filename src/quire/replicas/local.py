"""`quire serve --replicas N`: Ray and the deployment of engines on this machine, for as long as the server runs.

SIGHUP restarts the replicas, one after another.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, Thread

import ray
from ray import serve as ray_serve

from quire.assembly.early_engine import ENGINE_MODULE
from quire.assembly.server import serve_built
from quire.assembly.text import build_text
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.replicas.application import build, engines
from quire.replicas.client import Handle

log = logging.getLogger("uvicorn.error")

APPLICATION = "quire"
"""The name of Ray Serve's application."""
_OBJECT_STORE = 100 << 20
"""Bytes of shared memory for Ray's objects: calls to replicas use none."""


def serve(settings: Settings, *, child: str = ENGINE_MODULE) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises InvalidModel or InvalidConfig before the port is opened."""
    started = time.monotonic()
    text = build_text(settings)  # a wrong model or option is found before Ray is started
    with deployed(settings, child) as handle:
        serve_built(settings, build(settings, text, handle, started))


@contextmanager
def deployed(settings: Settings, child: str = ENGINE_MODULE) -> Iterator[Handle]:
    """A handle of the deployment of engines, on a Ray of this machine's loopback, which ends with the context.

    Raises InvalidConfig where the engines cannot be started.
    """
    cores = os.cpu_count() or 1
    most, execution = settings.replicas.most, settings.execution
    if execution.threads is None and "OMP_NUM_THREADS" not in os.environ:
        share = max(1, cores // (most * execution.tensor_parallel_size))
        settings = settings.changed(threads=share)

    def deploy() -> Handle:
        """Start the replicas; where they run, restart them one after another, once each has ended its requests."""
        handle: Handle = ray_serve.run(engines(settings, child=child, starts=1), name=APPLICATION, route_prefix=None)
        return handle

    ray.init(
        address="local",
        # Replicas may have more threads than there are cores, as engines of one machine may.
        num_cpus=max(cores, most * execution.tensor_parallel_size * (settings.execution.threads or 1)) + 2,
        include_dashboard=settings.replicas.ray_dashboard,
        dashboard_host="127.0.0.1",
        object_store_memory=_OBJECT_STORE,
        namespace="serve",
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        ray_serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})
        try:
            handle = deploy()
        except RuntimeError as error:
            raise _refusal() from error
        redeploy = partial(_redeploy, deploy, Lock())
        signal.signal(signal.SIGHUP, lambda *_: Thread(target=redeploy, daemon=True).start())
        yield handle
    finally:
        ray.shutdown()


def _redeploy(deploy: Callable[[], object], turn: Lock) -> None:
    """Restart the replicas once restarts before this one have ended. One that fails is a line in the log."""
    with turn:
        try:
            deploy()
        except RuntimeError:
            log.error("not all replicas were restarted: %s", _refusal())
        except Exception as error:
            log.error("not all replicas were restarted: %s: %s", type(error).__name__, error)
        else:
            log.info("all replicas were restarted")


def _refusal() -> InvalidConfig | InvalidModel:
    """Why the engines could not be started: the last line of what the first replica that failed said."""
    found = ray_serve.status().applications[APPLICATION].deployments
    message = next((each.message for each in found.values() if each.message), "no replica could be started")
    for line in reversed([line.strip() for line in message.splitlines()]):
        for kind in (InvalidConfig, InvalidModel):
            if (mark := f"{kind.__name__}: ") in line:
                return kind(line.partition(mark)[2])
    return InvalidConfig(f"the replicas cannot be started: {message.splitlines()[-1].strip()}")
