"""The server's process: frontend and HTTP here, the engine in a process of its own. Needs no torch."""

from __future__ import annotations

import json
import logging
import math
import random
import shlex
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import uvloop
from starlette.types import ASGIApp

from quire import __version__, heap
from quire.assembly.backend import build_backend, engine_process, model_names
from quire.assembly.early_engine import ENGINE_MODULE
from quire.assembly.images import build_fetcher, build_images
from quire.assembly.place import located
from quire.assembly.text import Text, build_text
from quire.config import Settings
from quire.config.option import amount
from quire.config.settings import ServerConfig
from quire.config.tls import check_files
from quire.engine.client import EngineClient, LiveViewClient
from quire.engine.executor import Description
from quire.engine.spawn import Spawned
from quire.frontend.native import NativeBackend
from quire.frontend.upstream import UpstreamBackend
from quire.observability.frontend_metrics import FrontendMetrics
from quire.observability.live_view import Broadcaster
from quire.observability.logs import RequestLogger, ToolLogger, log_config, run_with_stats
from quire.observability.observer import ObserverGroup
from quire.observability.recording_format import recording_folder
from quire.observability.tracing import Traces, build_traces
from quire.ops.stages import stage_table
from quire.server.access import BATCHES, Hosts, Keys, Rates
from quire.server.app import create_app
from quire.server.batch_api.runner import BatchService
from quire.server.connection import Timeouts, raise_descriptor_limit
from quire.server.endpoints import answerer
from quire.server.hosts import loopback
from quire.server.limits import Limits
from quire.server.response_state import ResponseState
from quire.server.response_store import ResponseStore
from quire.server.serve import UNIX, listen, listen_unix
from quire.server.serve import serve as serve_app
from quire.server.upstream_pages import LivePage
from quire.tokenization.prompt_header import PromptHeader
from quire.weights.details import read_details

log = logging.getLogger("uvicorn.error")


class Server(NamedTuple):
    """What answers HTTP, before it listens: the application, its backend, and what runs beside them."""

    app: ASGIApp
    backend: NativeBackend
    traces: Traces | None
    batch_service: BatchService | None
    state: ResponseState
    log_ready: Callable[[str], None]


class Engine(EngineClient, LiveViewClient, Protocol):
    """An engine and its live view."""


def serve(settings: Settings, *, child: str = ENGINE_MODULE, begun: Spawned | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises InvalidModel or InvalidConfig before the port is opened.

    child: the module that the engine's process runs. begun: that process, if it has been started.
    """
    started = time.monotonic()
    settings = located(settings)
    text = build_text(settings)
    serve_built(settings, build_server(settings, text, engine_process(settings, child, begun), started))


def serve_built(settings: Settings, server: Server) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    sock = listen_socket(settings.server)
    run(
        settings,
        server.app,
        server.backend,
        sock,
        server.log_ready,
        server.traces,
        batch_service=server.batch_service,
        state=server.state,
    )


def listen_socket(server: ServerConfig) -> socket.socket:
    """The socket that settings name. Raises InvalidConfig where it cannot be used."""
    return listen(server.host, server.port) if server.uds is None else listen_unix(server.uds)


def build_server(
    settings: Settings, text: Text, engine: Engine, started: float, pages: Sequence[LivePage] = ()
) -> Server:
    """The server of an engine, wherever that runs.

    started: the clock's time when its start began. pages: live pages of its parts, which the live page shows.
    """
    server, scheduler = settings.server, settings.scheduler
    name = model_names(settings)[0]
    traces = build_traces(server.otlp_traces_endpoint, engine.explain, model=name)
    observer = build_observer(settings, name, traces)
    backend = build_backend(
        settings,
        text,
        engine,
        observer=observer,
        max_queued=scheduler.max_num_queued_reqs,
        max_image_bytes=settings.multimodal.max_pending_image_bytes,
        seeds=partial(random.Random(settings.model.seed).getrandbits, 63),
    )
    limits = build_limits(settings)
    state_dir = None if server.state_dir is None else Path(server.state_dir).expanduser()
    stored = ResponseStore(server.max_stored_responses, server.max_stored_bytes, state_dir, observer)
    state = ResponseState(stored, limits)
    keys = Keys(server.api_key, settings.access.admin_key, stored.salt)
    batches = None
    if server.batch_dir is not None:
        answer = answerer(backend, limits, f"quire-{__version__}", keys.tenant(BATCHES))
        folder = Path(server.batch_dir).expanduser()
        batches = BatchService(folder, answer, limits, width=server.batch_concurrency)
    parts = app_parts(settings, keys, limits, Broadcaster(engine))
    recording = recording_folder(settings.execution.recording_dir)
    info = text.info() if server.enable_tokenizer_info_endpoint else None
    details = partial(read_details, text.folder)
    parts |= {"batch_service": batches, "state": state, "recording": recording, "pages": pages}
    app = create_app(backend, **parts, tokenizer_info=info, details=details)
    return Server(app, backend, traces, batches, state, partial(_log_ready, text, backend, started))


def build_limits(settings: Settings) -> Limits:
    """What requests may ask for."""
    server, scheduler = settings.server, settings.scheduler
    return Limits(
        max_body_bytes=server.max_body_bytes,
        max_n=server.max_n,
        max_answers=min(1024, scheduler.max_num_queued_reqs),
        priorities=scheduler.reads_priorities,
        closed_schemas=server.closed_schemas,
        strict_tools=server.strict_tools,
        force_usage=server.enable_force_include_usage,
        prompt_header=PromptHeader(server.prompt_header),
        max_new_tokens=server.max_new_tokens,
        default_max_new_tokens=server.default_max_new_tokens,
        images=build_images(settings),
        fetch_media=build_fetcher(settings).fetch,
    )


def app_parts(settings: Settings, keys: Keys, limits: Limits, view: Broadcaster) -> dict[str, Any]:
    """Arguments that `create_app` and `create_relay_app` have in common."""
    access = settings.access
    return {
        "limits": limits,
        "keys": keys,
        "rates": Rates(access.max_requests_per_minute or math.inf, access.max_tokens_per_minute or math.inf),
        "version": __version__,
        "view": view,
        "hosts": build_hosts(settings),
        "origins": access.allowed_origins,
    }


def run(
    settings: Settings,
    app: ASGIApp,
    backend: NativeBackend | UpstreamBackend,
    sock: socket.socket,
    on_ready: Callable[[str], None],
    traces: Traces | None,
    *,
    batch_service: BatchService | None = None,
    state: ResponseState | None = None,
) -> None:
    """Serve `app` on `sock` to the end, with traces and statistics in the log as settings say.

    on_ready: called with the server's address. Raises InvalidConfig if the files for TLS cannot be used.
    """
    server, access = settings.server, settings.access
    check_files(access)
    raise_descriptor_limit()  # before the event loop takes some
    running = serve_app(
        app,
        backend,
        sock,
        timeouts=connection_timeouts(server, relays=settings.upstream.backend != "native"),
        shutdown_timeout=server.shutdown_timeout,
        log_level=server.uvicorn_log_level,
        log_config=log_config(server.log_format),
        root_path=server.root_path,
        tls=(access.ssl_keyfile, access.ssl_certfile) if access.ssl_keyfile and access.ssl_certfile else None,
        batch_service=batch_service,
        address_file=server.address_file,
        on_ready=on_ready,
    )
    running = beside(settings, running, backend, traces, state)
    heap.settled()
    uvloop.run(running)


def beside(
    settings: Settings,
    running: Coroutine[Any, Any, None],
    backend: NativeBackend | UpstreamBackend,
    traces: Traces | None,
    state: ResponseState | None,
) -> Coroutine[Any, Any, None]:
    """`running`, with what runs beside a server to its end: stored responses, traces, and statistics in the log."""
    if state is not None:
        running = state.run(running)
    if traces is not None:
        running = traces.run(running)
    if not settings.server.disable_log_stats:
        running = run_with_stats(running, backend.stats, log)
    return running


def build_observer(settings: Settings, model: str, traces: Traces | None) -> ObserverGroup:
    """Metrics, and traces and request logs if they are on."""
    logger = [RequestLogger(log)] if settings.server.enable_log_requests else []
    return ObserverGroup(FrontendMetrics(model), ToolLogger(log), *logger, *([] if traces is None else [traces]))


def _log_ready(text: Text, backend: NativeBackend, started: float, url: str) -> None:
    card = backend.model()
    if doubts := text.tokenizer.doubts(card.vocab_size):
        log.warning(doubts)
    log.info(
        "%s is ready at %s after %.1f s; tool calls: %s (%s), reasoning: %s",
        *(card.id, url, time.monotonic() - started, text.tool_parser, text.tools_from, text.reasoning_parser),
    )
    if backend.description is not None:
        log.info("%s", capacity(backend.description, card.max_model_len))
        if ranks := backend.description.start_seconds:
            for line in stage_table(ranks):
                log.info("%s", line)
    if not url.startswith(UNIX):
        log.info("chat and live view: %s/ui; routes and their fields: %s/docs", url, url)
    log.info("try: %s", first_request(card.id, url, chats=backend.chat is not None))


def capacity(about: Description, length: int) -> str:
    """Where a model runs, and how many sequences of `length` tokens its K/V cache holds."""
    held = about.num_blocks // -(-length // about.block_size)
    most = min(held, about.num_rows // (1 + about.lookahead))
    return (
        f"on {about.device} in {about.dtype}; context {length:,} tokens; KV cache of {about.num_blocks:,} blocks of "
        f"{about.block_size} tokens ({amount(about.num_blocks * about.block_bytes)}): "
        f"{most} {'sequence' if most == 1 else 'sequences'} of that length at once"
    )


def first_request(model: str, url: str, *, chats: bool) -> str:
    """A command that asks the server something."""
    path, what = "completions", {"prompt": "Once upon a time", "max_tokens": 32}
    if chats:
        path, what = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    body = shlex.quote(json.dumps({"model": model, **what}))
    if url.startswith(UNIX):
        url = f"--unix-socket {shlex.quote(url.removeprefix(UNIX))} http://localhost"
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d {body}"


def build_hosts(settings: Settings) -> Hosts:
    """The host names that requests may name.

    By default those of this machine, for a server on loopback without a key. With keys a web page that rebinds its name
    gains nothing, and the names of a server on a network are known only to its owner: there any name is accepted.
    """
    host, allowed = settings.server.host, settings.access.allowed_hosts
    any_name = not allowed and (settings.server.api_key or not loopback(host))
    return Hosts(("*",) if any_name else (*allowed, host))


def connection_timeouts(server: ServerConfig, *, relays: bool = False) -> Timeouts:
    """Timeouts and limits of connections. relays: each connection may need another one, to an upstream.

    With a batch folder, a file may be open for each connection.
    """
    return Timeouts(
        connections=server.max_connections,
        descriptors=2 if relays or server.batch_dir is not None else 1,
        header_bytes=server.max_header_bytes,
        keep_alive=server.timeout_keep_alive,
        read=server.read_timeout,
        write=server.write_timeout,
    )
