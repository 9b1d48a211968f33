"""The Ray Serve application: a deployment of engines, and for a cluster one of the server in front of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import ASGIApp

from quire.assembly.backend import model_names
from quire.assembly.early_engine import ENGINE_MODULE
from quire.assembly.place import without_secrets
from quire.assembly.server import Server, beside, build_server
from quire.assembly.text import Text, build_text
from quire.config import Settings, load
from quire.errors import InvalidConfig
from quire.observability import prometheus
from quire.observability.engine_metrics import METRICS
from quire.observability.live_view import RequestTimeline
from quire.replicas.autoscaler import QueuedTokensPolicy
from quire.replicas.client import Handle, ReplicaEngines
from quire.replicas.engine_replica import EngineReplica
from quire.replicas.router import PolicyRouter

ENGINES = "engines"
"""The name of the deployment of engines."""
SERVER = "server"
"""The name of the deployment of the server."""

_MOST_CALLS = 1 << 20
"""Calls that a replica may have: the engine has a queue of its own, and the server bounds it."""
_HEALTH_PERIOD = 2.0
"""Seconds between two health checks of a replica, after which one that is dead is replaced."""
_HEALTH_TIMEOUT = 30.0
_SPARE = 30.0
"""Seconds that a replica may take to end once its requests have."""


def engines(settings: Settings, *, child: str = ENGINE_MODULE, starts: int = 3) -> serve.Application:
    """The deployment of engines. child: the module that an engine's process runs. starts: of one that fails to start,
    until the deployment counts as failed."""
    config = settings.replicas
    size: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas is not None and config.max_replicas > config.replicas:
        delays = {"up_delay": config.replica_up_delay, "down_delay": config.replica_down_delay}
        policy = {"target": config.replica_queued_tokens, "low": config.replicas, "high": config.max_replicas, **delays}
        size = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.replicas,
                max_replicas=config.max_replicas,
                upscale_delay_s=0,
                downscale_delay_s=0,
                policy=AutoscalingPolicy(policy_function=QueuedTokensPolicy, policy_kwargs=policy),
            )
        }
    router = {"policy": config.replica_policy, "max_imbalance": config.replica_max_imbalance}
    deployment = serve.deployment(
        EngineReplica,
        name=ENGINES,
        max_ongoing_requests=_MOST_CALLS,
        ray_actor_options={**resources(settings), "runtime_env": {"env_vars": _REPLICA_ENVIRONMENT}},
        request_router_config=RequestRouterConfig(request_router_class=PolicyRouter, request_router_kwargs=router),
        graceful_shutdown_timeout_s=config.replica_drain_timeout + _SPARE,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        max_constructor_retry_count=starts,
        **size,
    )
    return deployment.bind(engine_options(settings), child)


_REPLICA_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.02",
}
"""A replica counts its queued tokens every 0.6 seconds (this share of 30) and reports them every second; without these,
every 6 and every 10."""


def engine_options(settings: Settings) -> dict[str, Any]:
    """The options of one replica's engine: no secrets, no other replicas."""
    return without_secrets(settings) | {"replicas": 1, "max_replicas": None}


def resources(settings: Settings) -> dict[str, Any]:
    """What Ray reserves for a replica: GPUs for each of its ranks where there are some, else CPUs for its threads."""
    execution = settings.execution
    on_gpus = execution.device == "cuda" or (
        execution.device == "auto" and ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    )
    ranks = execution.tensor_parallel_size
    return {"num_gpus": ranks if on_gpus else 0, "num_cpus": 1 if on_gpus else ranks * (execution.threads or 1)}


def client(settings: Settings, handle: Handle) -> ReplicaEngines:
    """The engines of a deployment, for a server."""
    most = settings.replicas.most
    timeline = RequestTimeline("answered by its replicas", servers=[f"replica {rank}" for rank in range(most)])
    return ReplicaEngines(handle, partial(prometheus.text_of, METRICS, model=model_names(settings)[0]), timeline, most)


def build(settings: Settings, text: Text, handle: Handle, started: float) -> Server:
    """The server of a deployment of engines. started: see `build_server`."""
    of_replicas = client(settings, handle)
    return build_server(settings, text, of_replicas, started, of_replicas.views)


class ServerReplica:
    """The server as a deployment of its own, behind Ray Serve's HTTP proxies: the same application.

    options: settings by name. Keys may be in the environment of its process instead (QUIRE_API_KEY).
    """

    async def __init__(self, options: Mapping[str, Any], handle: Handle) -> None:  # type: ignore[misc]
        settings = cluster_settings(options)
        self._timeout = settings.server.shutdown_timeout
        self._server = build(settings, build_text(settings), handle, time.monotonic())
        await self._server.backend.start()
        if self._server.batch_service is not None:
            await self._server.batch_service.start()
        running = beside(settings, self._until_closed(), self._server.backend, self._server.traces, self._server.state)
        self._closing = asyncio.Event()
        self._running = asyncio.ensure_future(running)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._server.app

    async def _until_closed(self) -> None:
        await self._closing.wait()
        if self._server.batch_service is not None:
            await self._server.batch_service.stop()
        await self._server.backend.drain(self._timeout)
        await self._server.backend.close()

    def check_health(self) -> None:
        """For Ray Serve: the server has no engine of its own that could be stuck."""

    async def __del__(self) -> None:
        self._closing.set()
        await self._running


def cluster_settings(options: Mapping[str, Any]) -> Settings:
    """Settings from a cluster's file and the environment of this process. The server may be asked by any name unless
    they say otherwise, as one that listens to a network."""
    return load({**options, "host": "0.0.0.0"}, environ=os.environ)


def app(options: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and `serve deploy`, `quire.replicas.application:app`: `args` are settings by
    name, such as `model` and `replicas`.

    Raises InvalidConfig for settings that cannot be used, and for those that Ray Serve decides.
    """
    for name in options.keys() & OF_RAY.keys():
        raise InvalidConfig(f"{name}: {OF_RAY[name]}", param=name)
    settings = cluster_settings(options)
    server = serve.deployment(
        serve.ingress(None)(ServerReplica),
        name=SERVER,
        num_replicas=1,
        max_ongoing_requests=_MOST_CALLS,
        ray_actor_options={"num_cpus": 0},  # engines are what needs them
        graceful_shutdown_timeout_s=settings.server.shutdown_timeout + _SPARE,
        health_check_period_s=_HEALTH_PERIOD,
    )
    return server.bind(options, engines(settings))


OF_RAY: Mapping[str, str] = {
    "host": "Ray Serve listens: set http_options.host in its file",
    "port": "Ray Serve listens: set http_options.port in its file",
    "uds": "Ray Serve listens",
    "root_path": "Ray Serve's route_prefix says where the server is",
    "ssl_keyfile": "Ray Serve listens: set http_options.ssl_keyfile in its file",
    "ssl_certfile": "Ray Serve listens: set http_options.ssl_certfile in its file",
    "address_file": "Ray Serve listens, on every node",
    "ray_dashboard": "the dashboard is the cluster's",
}
"""Options that have no meaning where Ray Serve listens, and what has it."""
