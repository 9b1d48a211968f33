"""The server's process: the rim and HTTP here, the engine in a process of its own. No torch."""

from __future__ import annotations

import logging
import math
import sys
import time
from functools import partial
from pathlib import Path
from types import MappingProxyType

import uvloop

from quire import __version__, heap
from quire.assembly.text import Text, build_text
from quire.config import OPTIONS, Settings
from quire.config.settings import AccessConfig, ServerConfig, check_files
from quire.engine.client import EngineProcess
from quire.frontend.interface import ModelCard
from quire.frontend.native import NativeBackend
from quire.frontend.observer import ObserverGroup
from quire.observability.engine_metrics import render
from quire.observability.frontend_metrics import FrontendMetrics
from quire.observability.live_view import Broadcaster
from quire.observability.logs import RequestLogger, log_config, telling
from quire.observability.recording_format import recording_folder
from quire.observability.tracing import build_tracing
from quire.server.access import BATCHES, Hosts, Keys, Rates, loopback
from quire.server.app import create_app
from quire.server.batch_api.runner import Answer, BatchService
from quire.server.connection import Timeouts
from quire.server.endpoints import answerer
from quire.server.limits import Limits
from quire.server.serve import listen
from quire.server.serve import serve as answer
from quire.types import UNLIMITED

_ENGINE = MappingProxyType({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"})
"""On a CPU, oneDNN keeps 1,024 products of matrices ready, one a shape, and torch's layer above it 1,024 of its own,
some 280 kB each: memory grew for thousands of requests, and they were no faster for it."""

log = logging.getLogger("uvicorn.error")


_STANDBY_AFTER = 10.0
"""Seconds for which an engine has been ready before another process stands by to replace it."""


def serve(settings: Settings, *, child: str = "quire.assembly.engine_child") -> None:
    """Serve until SIGTERM or Ctrl-C. Raises InvalidModel or InvalidConfig before anything listens.

    child: the module that the engine's process runs.
    """
    began = time.monotonic()
    text = build_text(settings)
    server = settings.server
    name = settings.model.served_model_name or settings.model.model
    port = engine_process(settings, name, child)
    tracing = build_tracing(server.otlp_traces_endpoint, port.explain, model=name)
    backend = NativeBackend(
        engine=port,
        tokenizer=text.tokenizer,
        chat=text.template,
        card=_card(name, settings.model.model, text),
        observer=ObserverGroup(
            FrontendMetrics(name), *([RequestLogger(log)] if server.enable_log_requests else []), *tracing.observers
        ),
        max_queued=settings.scheduler.max_num_queued_reqs,
    )
    limits = Limits(
        max_body_bytes=server.max_body_bytes,
        max_n=server.max_n,
        max_answers=min(1024, settings.scheduler.max_num_queued_reqs),
        priorities=settings.scheduler.scheduling_policy != "fcfs",
    )
    keys = build_keys(settings)
    batch_service = _batch_service(
        server, answerer(backend, limits, f"quire-{__version__}", keys.tenant(BATCHES)), limits
    )
    app = create_app(
        backend,
        limits=limits,
        keys=keys,
        rates=build_rates(settings.access),
        version=__version__,
        view=Broadcaster(port),
        batch_service=batch_service,
        recording=recording_folder(settings.execution.recording_dir),
        hosts=build_hosts(settings),
        origins=settings.access.allowed_origins,
    )
    running = answer(
        app,
        backend,
        listen(server.host, server.port),
        timeouts=connection_timeouts(server),
        shutdown_timeout=server.shutdown_timeout,
        log_level=server.uvicorn_log_level,
        log_config=log_config(server.log_format),
        root_path=server.root_path,
        tls=build_tls(settings.access),
        batch_service=batch_service,
        address_file=server.address_file,
        on_ready=partial(_ready, text, backend, began),
    )
    sent = tracing.around(running)
    heap.settled()
    uvloop.run(sent if server.disable_log_stats else telling(sent, backend.stats, log))


def _ready(text: Text, backend: NativeBackend, began: float, url: str) -> None:
    card = backend.model()
    if doubts := text.tokenizer.doubts(card.vocab_size):
        log.warning(doubts)
    log.info(
        "%s is ready at %s after %.1f s; calls of tools: %s, thoughts: %s",
        *(card.id, url, time.monotonic() - began, text.tool_parser, text.reasoning_parser),
    )


def _card(name: str, root: str, text: Text) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(time.time()),
        max_model_len=UNLIMITED,
        root=root,
        defaults=text.defaults,
        tool_parser=text.tool_parser,
        reasoning_parser=text.reasoning_parser,
    )


def build_keys(settings: Settings) -> Keys:
    return Keys(settings.server.api_key, settings.access.admin_key)


def build_hosts(settings: Settings) -> Hosts:
    """The names by which the server may be asked.

    Where none are given: this machine's, for a server on loopback that anybody may use without a key. A server with
    keys is of no use to a page that has none, and one on a network is asked by names that only its owner knows.
    """
    host, allowed = settings.server.host, settings.access.allowed_hosts
    any_name = not allowed and (settings.server.api_key or not loopback(host))
    return Hosts(("*",) if any_name else (*allowed, host))


def build_rates(access: AccessConfig) -> Rates:
    return Rates(access.max_requests_per_minute or math.inf, access.max_tokens_per_minute or math.inf)


def build_tls(access: AccessConfig) -> tuple[str, str] | None:
    """(key file, certificate file). Raises InvalidConfig unless they can be used."""
    check_files(access)
    return (
        None if access.ssl_keyfile is None or access.ssl_certfile is None else (access.ssl_keyfile, access.ssl_certfile)
    )


def _batch_service(server: ServerConfig, answer: Answer, limits: Limits) -> BatchService | None:
    if server.batch_dir is None:
        return None
    return BatchService(Path(server.batch_dir).expanduser(), answer, limits, width=server.batch_concurrency)


def engine_process(settings: Settings, name: str, child: str = "quire.assembly.engine_child") -> EngineProcess:
    """The engine these settings describe, in a process of its own. Secrets stay here."""
    told = {key: value for key, value in settings.flat().items() if not OPTIONS[key].secret}
    return EngineProcess(
        [sys.executable, "-m", child],
        told,
        partial(render, model=name),
        environment=_ENGINE,
        standby_after=_STANDBY_AFTER if settings.server.standby_engine else None,
    )


def connection_timeouts(server: ServerConfig, *, relays: bool = False) -> Timeouts:
    """What these settings say of connections. relays: each may need another, to a server behind this one.

    Where there are files, one may be read or written for each connection.
    """
    return Timeouts(
        connections=server.max_connections,
        descriptors=2 if relays or server.batch_dir is not None else 1,
        header_bytes=server.max_header_bytes,
        keep_alive=server.timeout_keep_alive,
        read=server.read_timeout,
        write=server.write_timeout,
    )
