"""The server in front of other servers: no engine, no tokenizer, no torch."""

from __future__ import annotations

import logging
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from quire.assembly.server import app_parts, build_observer, listen_socket, run
from quire.config import OPTIONS, Settings
from quire.errors import InvalidConfig
from quire.frontend.http_client import Origin
from quire.frontend.supervisor import PrivateServer, free_port
from quire.frontend.upstream import UpstreamBackend
from quire.observability.live_view import Broadcaster, RequestTimeline
from quire.observability.tracing import build_traces
from quire.scheduler.routing import RoutingPolicy, make_routing_policy
from quire.server.access import Keys
from quire.server.limits import Limits
from quire.server.proxy import create_relay_app

log = logging.getLogger("uvicorn.error")

NATIVE_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "batch_dir": "batches are answered in the gaps of our own engine; send them where the upstream takes some",
        "enable_tokenizer_info_endpoint": "/tokenizer_info is passed on; the upstream has the option",
        "max_stored_responses": "responses are stored by the upstream, which has a bound of its own",
        "max_stored_bytes": "responses are stored by the upstream, which has a bound of its own",
        "state_dir": "responses are stored by the upstream",
        "prompt_header": "requests are passed on as they are; the upstream has the option",
        "max_new_tokens": "requests are passed on as they are; the upstream has bounds of its own",
        "default_max_new_tokens": "requests are passed on as they are; the upstream has a default of its own",
        "enable_force_include_usage": "streams are passed on as they are; the upstream has the option",
        "max_n": "requests are passed on as they are; the upstream has a bound of its own",
    }
)
"""Options of the server that only Quire's own engine supports, and why."""

VLLM_OPTIONS = frozenset(
    (
        *("served_model_name", "dtype", "load_format", "quantization", "max_model_len", "seed", "tokenizer"),
        *("chat_template", "revision", "download_dir", "block_size", "num_gpu_blocks_override"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching"),
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold"),
        *("scheduling_policy", "enforce_eager", "speculative_config", "skip_tokenizer_init"),
        *("default_chat_template_kwargs", "generation_config", "override_generation_config"),
    )
)
"""Options that vLLM has with the same name and meaning: they are passed on."""


def relay(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises InvalidConfig or Unavailable before the port is opened."""
    started, server, upstream = time.monotonic(), settings.server, settings.upstream
    vllm_flags = _vllm_flags(settings)
    sock = listen_socket(server)
    key = upstream.upstream_api_key
    supervisor: PrivateServer | None = None
    urls = tuple(url.strip() for several in upstream.upstream for url in several.split(",") if url.strip())
    if upstream.backend == "vllm":
        port = free_port()
        key = key or secrets.token_urlsafe(24)
        supervisor = _vllm(settings, port, key, vllm_flags)
        urls = (f"http://127.0.0.1:{port}",)
    # In metrics and traces, which need a name before an upstream is asked.
    name = (settings.model.served_model_name or (settings.model.model if supervisor is not None else "upstream",))[0]
    origins = [Origin.parse(url) for url in dict.fromkeys(urls)]
    timeline = RequestTimeline(f"answered by {', '.join(urls)}", servers=list(map(str, origins)))
    traces = build_traces(server.otlp_traces_endpoint, timeline.explain, model=name)
    backend = UpstreamBackend(
        origins,
        supervisor=supervisor,
        observer=build_observer(settings, name, traces),
        request_observer=timeline,
        kind=upstream.backend,
        headers=[] if key is None else [(b"authorization", b"Bearer " + key.encode())],
        max_outstanding=upstream.upstream_most,
        routing=build_routing(settings),
        start_timeout=upstream.upstream_start_timeout,
    )
    keys = Keys(server.api_key, settings.access.admin_key)
    limits = Limits(max_body_bytes=server.max_body_bytes)
    app = create_relay_app(backend, **app_parts(settings, keys, limits, Broadcaster(timeline)))

    def log_ready(url: str) -> None:
        seconds = time.monotonic() - started
        log.info("%s is ready at %s after %.1f s; answers come from %s", backend.name, url, seconds, ", ".join(urls))

    run(settings, app, backend, sock, log_ready, traces)


def build_routing(settings: Settings) -> RoutingPolicy:
    """The policy that chooses among upstreams. Raises InvalidConfig for two that contradict each other."""
    policy = settings.upstream.upstream_policy
    if settings.upstream.upstream_affinity and policy not in ("least_loaded", "prefix_hash"):
        raise InvalidConfig(
            f"--upstream-affinity means --upstream-policy prefix_hash, not {policy}: leave one of them out",
            param="upstream_affinity",
        )
    return make_routing_policy("prefix_hash" if settings.upstream.upstream_affinity else policy)


def _vllm_flags(settings: Settings) -> list[str]:
    """Flags for `vllm serve`. Raises InvalidConfig for an option that has no effect here."""
    kind, flags = settings.upstream.backend, []
    for name in settings.sources:
        option, value = OPTIONS[name], settings.get(name)
        if name in NATIVE_ONLY and value != option.default:
            raise InvalidConfig(f"{option.flag}: {NATIVE_ONLY[name]}", param=name)
        # Without an engine these have an effect.
        if option.section in ("server", "access", "upstream") or name == "debug":
            continue
        if (kind, name) in (("vllm", "model"), ("openai", "served_model_name")):
            continue
        if kind != "vllm" or name not in VLLM_OPTIONS:
            where = "give vLLM's own option after --" if kind == "vllm" else "set it where the upstream is started"
            raise InvalidConfig(f"{option.flag} is for our own engine, and backend is {kind}: {where}", param=name)
        if option.kind == "switch":
            flags.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
        elif value is not None:
            flags += [option.flag, *(value if option.kind == "texts" else (str(value),))]
    return flags


def _vllm(settings: Settings, port: int, key: str, flags: list[str]) -> PrivateServer:
    """`vllm serve` on loopback, with a key of its own."""
    upstream = settings.upstream
    if settings.source("model") == "default":
        raise InvalidConfig("backend vllm needs a model: name it with --model", param="model")
    argv = [*shlex.split(upstream.vllm_command), "serve", settings.model.model, *flags]
    argv += ["--host", "127.0.0.1", "--port", str(port), *upstream.vllm_args]
    log_file = upstream.vllm_log or tempfile.mkstemp(prefix="quire-vllm-", suffix=".log")[1]
    return PrivateServer(argv, {"VLLM_API_KEY": key}, Path(log_file).expanduser())
