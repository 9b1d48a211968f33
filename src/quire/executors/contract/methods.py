"""The contract's two methods by name, and the channel options that both sides use."""

from __future__ import annotations

SERVICE = "quire.executors.contract.Executor"
DESCRIBE, RUN = "Describe", "Run"

LARGEST = 64 << 20
"""Bytes of one message: a step that opens hundreds of rows with long prompts."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
"""Keepalive finds a machine that vanished; without it a half-open connection holds its executor for ever."""
