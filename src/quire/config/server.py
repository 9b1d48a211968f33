"""Options of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.")
    port: int = option(8000, "Port to listen on; 0 lets the system choose.", low=0, high=65535)
    api_key: tuple[str, ...] = option(
        (),
        "A key that clients must send; several are allowed (repeat the flag, or use commas).",
        secret=True,
        unset="none",
    )
    address_file: str | None = option(
        None,
        "File that holds the server's address (https://127.0.0.1:8000, say) while it answers, for health checks.",
        unset="none",
    )
    root_path: str = option("", "Path prefix that a proxy in front removes.")
    max_body_bytes: int = option(4 << 20, "Largest request body accepted (4MiB works).", low=1024, high=1 << 40)
    batch_dir: str | None = option(
        None, "Folder for files and batches, this server's alone; none: there are no batches.", unset="none"
    )
    batch_concurrency: int = option(16, "Lines of a batch that are answered at once, in the gaps.", low=1, high=4096)
    max_header_bytes: int = option(
        32 << 10, "Largest head of a request accepted, first line and header fields together.", low=1024, high=1 << 30
    )
    max_n: int = option(128, "Most answers to one prompt: the largest n.", low=1, high=1024)
    max_connections: int = option(
        4096,
        "Clients connected at once, as far as the process may open descriptors (ulimit -n, raised to its hard limit at "
        "the start); one more is refused with 503 and a Retry-After.",
        low=1,
        high=1 << 20,
    )
    timeout_keep_alive: float = option(5.0, "Seconds a connection may wait between two requests.", low=0.1, high=86400)
    read_timeout: float = option(
        20.0, "Seconds a client may take to send a request's head, and each KiB of its body.", low=0.1, high=86400
    )
    write_timeout: float = option(
        60.0, "Seconds a client may take to read each KiB of an answer that waits for it.", low=0.1, high=86400
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests may still take after SIGTERM.", low=0, high=86400
    )
    standby_engine: bool = option(
        True,
        "Keep a second process that has imported what an engine needs, so that requests are answered again within "
        "seconds when the engine's process dies; it takes some 200 MiB of memory.",
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "How much the HTTP server logs."
    )
    disable_log_stats: bool = option(False, "Do not log throughput and load every ten seconds while there is work.")
    enable_log_requests: bool = option(False, "Log how each answer ended, with counts and times; never its text.")
    log_format: Literal["text", "json"] = option("text", "How log lines look; json: an object a line, for programs.")
    otlp_traces_endpoint: str | None = option(
        None,
        "Where a trace of each request is sent, OTLP over HTTP (http://127.0.0.1:4318/v1/traces); "
        "needs quire-llm[otel].",
        unset="none",
    )
