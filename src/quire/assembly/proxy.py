"""The server in front of other servers: no engine, no tokenizer, no torch."""

from __future__ import annotations

import logging
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import uvloop

from quire import __version__, heap
from quire.assembly.server import build_hosts, build_keys, build_rates, build_tls, connection_timeouts
from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig
from quire.frontend.http_client import Origin
from quire.frontend.observer import FrontendObserver, ObserverGroup
from quire.frontend.supervisor import NoSupervisor, PrivateServer, Supervisor, free_port
from quire.frontend.upstream import UpstreamBackend
from quire.observability.frontend_metrics import FrontendMetrics
from quire.observability.live_view import Broadcaster, RequestTimeline
from quire.observability.logs import RequestLogger, log_config, telling
from quire.observability.tracing import build_tracing
from quire.server.limits import Limits
from quire.server.proxy import create_relay_app
from quire.server.serve import listen
from quire.server.serve import serve as answer

log = logging.getLogger("uvicorn.error")

OURS = frozenset({"debug"})
"""Options outside `server` and `upstream` that mean something without an engine."""

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "batch_dir": "batches are answered in the gaps of our own engine; send them where the upstream takes some",
        "max_n": "requests are passed on as they are; the upstream has a bound of its own",
    }
)
"""Options of the HTTP side that only our own engine can keep."""

VLLM: Mapping[str, str] = MappingProxyType(
    {
        name: "--" + name.replace("_", "-")
        for name in (
            *("served_model_name", "dtype", "load_format", "quantization", "max_model_len", "seed", "tokenizer"),
            *("chat_template", "revision", "download_dir", "block_size", "num_gpu_blocks_override"),
            *("kv_cache_memory_bytes", "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching"),
            *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold"),
            *("scheduling_policy", "enforce_eager", "speculative_config"),
        )
    }
)
"""Options that vLLM has by the same name and meaning: they are handed on."""


def relay(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises InvalidConfig or Unavailable before anything listens."""
    began, server, upstream = time.monotonic(), settings.server, settings.upstream
    handed = _handed_on(settings)
    sock = listen(server.host, server.port)
    key = upstream.upstream_api_key
    keeper: Supervisor = NoSupervisor()
    urls = tuple(url.strip() for several in upstream.upstream for url in several.split(",") if url.strip())
    if upstream.backend == "vllm":
        port = free_port()
        key = key or secrets.token_urlsafe(24)
        keeper = _vllm(settings, port, key, handed)
        urls = (f"http://127.0.0.1:{port}",)
    lanes = RequestTimeline(f"answered by {', '.join(urls)}")
    tracing = build_tracing(server.otlp_traces_endpoint, lanes.explain, model=_name(settings))
    backend = _backend(settings, urls, key, keeper, lanes, tracing.observers)
    app = create_relay_app(
        backend,
        limits=Limits(max_body_bytes=server.max_body_bytes),
        keys=build_keys(settings),
        rates=build_rates(settings.access),
        version=__version__,
        view=Broadcaster(lanes),
        hosts=build_hosts(settings),
        origins=settings.access.allowed_origins,
    )
    running = answer(
        app,
        backend,
        sock,
        timeouts=connection_timeouts(server, relays=True),
        shutdown_timeout=server.shutdown_timeout,
        log_level=server.uvicorn_log_level,
        log_config=log_config(server.log_format),
        root_path=server.root_path,
        tls=build_tls(settings.access),
        address_file=server.address_file,
        on_ready=lambda url: log.info(
            "%s is ready at %s after %.1f s; answers come from %s",
            *(backend.name, url, time.monotonic() - began, ", ".join(urls)),
        ),
    )
    sent = tracing.around(running)
    heap.settled()
    uvloop.run(sent if server.disable_log_stats else telling(sent, backend.stats, log))


def _backend(
    settings: Settings,
    urls: Sequence[str],
    key: str | None,
    keeper: Supervisor,
    lanes: RequestTimeline,
    traces: Sequence[FrontendObserver],
) -> UpstreamBackend:
    upstream = settings.upstream
    logged = [RequestLogger(log)] if settings.server.enable_log_requests else []
    return UpstreamBackend(
        [Origin.parse(url) for url in dict.fromkeys(urls)],
        supervisor=keeper,
        observer=ObserverGroup(FrontendMetrics(_name(settings)), *logged, *traces),
        request_observer=lanes,
        kind=upstream.backend,
        headers=[] if key is None else [(b"authorization", b"Bearer " + key.encode())],
        max_outstanding=upstream.upstream_most,
        affinity=upstream.upstream_affinity,
        start_timeout=upstream.upstream_start_timeout,
    )


def _name(settings: Settings) -> str:
    """What metrics and traces call the model: known before an upstream says it."""
    model = settings.model
    return model.served_model_name or (model.model if settings.upstream.backend == "vllm" else "upstream")


def _handed_on(settings: Settings) -> list[str]:
    """Flags for `vllm serve`. Raises InvalidConfig for an option that would do nothing."""
    kind, flags = settings.upstream.backend, []
    for name in settings.sources:
        known, value = OPTIONS[name], settings.get(name)
        if name in NOT_HERE and value != known.default:
            raise InvalidConfig(f"{known.flag}: {NOT_HERE[name]}", param=name)
        if known.section in ("server", "access", "upstream") or name in OURS or settings.source(name) == "default":
            continue
        if (kind, name) in (("vllm", "model"), ("openai", "served_model_name")):
            continue
        if kind != "vllm" or name not in VLLM:
            where = "give vLLM's own option after --" if kind == "vllm" else "set it where the upstream is started"
            raise InvalidConfig(f"{known.flag} is for our own engine, and backend is {kind}: {where}", param=name)
        if known.kind == "switch":
            flags.append(VLLM[name] if value else "--no-" + VLLM[name].removeprefix("--"))
        elif value is not None:
            flags += [VLLM[name], str(value)]
    return flags


def _vllm(settings: Settings, port: int, key: str, handed: list[str]) -> PrivateServer:
    """`vllm serve` on loopback, with a key that only we know."""
    upstream = settings.upstream
    if settings.source("model") == "default":
        raise InvalidConfig("backend vllm needs a model: name it with --model", param="model")
    argv = [*shlex.split(upstream.vllm_command), "serve", settings.model.model, *handed]
    argv += ["--host", "127.0.0.1", "--port", str(port), *upstream.vllm_args]
    kept = upstream.vllm_log or tempfile.mkstemp(prefix="quire-vllm-", suffix=".log")[1]
    return PrivateServer(argv, {"VLLM_API_KEY": key}, Path(kept).expanduser())
