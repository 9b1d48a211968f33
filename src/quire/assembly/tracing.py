"""Traces to an OpenTelemetry collector: the optional packages, put together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

from quire import __version__
from quire.errors import InvalidConfig
from quire.observability.trace import Api, Explain, Traces

_PATIENCE = 5
"""Seconds that a collector may take for a batch; a server that ends waits no longer."""


def build_tracing(endpoint: str | None, explain: Explain, *, model: str) -> Tracing | NoTracing:
    """Traces to `endpoint`, or none. Raises InvalidConfig for no address, and where the packages are missing."""
    if endpoint is None:
        return NoTracing()
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise InvalidConfig(
            f"otlp_traces_endpoint must look like http://127.0.0.1:4318/v1/traces, not {endpoint!r}",
            param="otlp_traces_endpoint",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise InvalidConfig(
            f"otlp_traces_endpoint: OpenTelemetry is not installed ({missing.name}): pip install 'quire-llm[otel]'"
        ) from missing
    resource = Resource.create({"service.name": "quire", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_PATIENCE)))
    return Tracing(provider, explain, model=model)


class Tracing:
    """A provider of tracers, and the observer that uses it."""

    def __init__(self, provider: Any, explain: Explain, *, model: str) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        start = provider.get_tracer("quire", __version__).start_span
        api = Api(start, TraceContextTextMapPropagator().extract, set_span_in_context, SpanKind.SERVER)
        self.observer = Traces(api, explain, model=model)
        self.observers = (self.observer,)

    async def around(self, running: Coroutine[Any, Any, None]) -> None:
        """Run, and send the last traces at the end."""
        try:
            await running
        finally:
            await self.observer.told()
            await asyncio.to_thread(self._provider.shutdown)


class NoTracing:
    """Nothing is traced."""

    observers: tuple[Traces, ...] = ()

    async def around(self, running: Coroutine[Any, Any, None]) -> None:
        """Run."""
        await running
