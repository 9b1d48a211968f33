"""OpenTelemetry traces: one a request, with what it waited for and how long each part took. Needs the extra `otel`.

Attributes are OpenTelemetry's semantic conventions for generative AI. No text of prompts or answers is told.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple

from quire import __version__
from quire.errors import InvalidConfig
from quire.types import FinishedRequest, SamplingParams

Explain = Callable[[str], Coroutine[Any, Any, bytes]]
"""What happened to a call's answers, as JSON: `Panes.explain`."""

_EXPLAIN_TIMEOUT = 2.0
"""Seconds that the engine may take to explain."""

_CHAT = ("chatcmpl-", "resp_", "msg_")


class Api(NamedTuple):
    """What is needed of OpenTelemetry. start: begins a span. extract: a context of W3C headers. within: a context in
    which a span is the parent. server: the kind of a span that answers a request."""

    start: Callable[..., Any]
    extract: Callable[[Mapping[str, str]], Any]
    within: Callable[[Any], Any]
    server: Any


class Traces:
    """A `RimObserver` that makes a trace of each call once all its answers have ended.

    api: OpenTelemetry, which is optional, handed in. explain: asked for the time in the queue, which the engine knows;
    without an answer the parts it would tell are left out.
    """

    def __init__(self, api: Api, explain: Explain, *, model: str) -> None:
        self._api, self._explain, self._model = api, explain, model
        self._ended: dict[str, list[tuple[int, FinishedRequest]]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def on_first(self, seconds: float) -> None: ...

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None: ...

    def on_refused(self, reason: str) -> None: ...

    def on_surplus(self, tokens: int) -> None: ...

    def text(self) -> bytes:
        return b""

    def on_end(self, ended: FinishedRequest) -> None:
        answers = self._ended.setdefault(ended.id, [])
        answers.append((time.time_ns(), ended))
        if len(answers) == ended.sampling.n:
            del self._ended[ended.id]
            task = asyncio.get_running_loop().create_task(self._tell(answers))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def told(self) -> None:
        """Return when everything that has ended is told."""
        while self._telling:
            await asyncio.gather(*self._telling, return_exceptions=True)

    async def _tell(self, answers: list[tuple[int, FinishedRequest]]) -> None:
        try:
            async with asyncio.timeout(_EXPLAIN_TIMEOUT):
                known = json.loads(await self._explain(answers[0][1].id)) or {}
        except Exception:  # an engine that has just died knows nothing; the rest is told all the same
            known = {}
        stories = {story["choice"]: story["seconds"] for story in known.get("answers", [])}
        first = answers[0][1]
        headers = {"traceparent": first.origin.traceparent, "tracestate": first.origin.tracestate}
        begin = min(at - _ns(ended.seconds) for at, ended in answers)
        operation = "chat" if first.id.startswith(_CHAT) else "text_completion"
        root = self._api.start(
            f"{operation} {self._model}",
            context=self._api.extract({name: value for name, value in headers.items() if value}),
            kind=self._api.server,
            attributes=dict(_asked(first, operation, self._model)),
            start_time=begin,
        )
        root.set_attributes(_answered(answers))
        failed = [ended for _, ended in answers if ended.reason == "error"]
        if failed:
            root.set_attribute("error.type", "error")
        inside = self._api.within(root)
        for at, ended in answers:
            for name, start, end in _parts(at, ended, stories.get(ended.choice, {})):
                about = {"gen_ai.response.id": ended.id, "quire.choice": ended.choice}
                self._api.start(name, context=inside, attributes=about, start_time=start).end(end_time=end)
        root.end(end_time=max(at for at, _ in answers))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _parts(at: int, ended: FinishedRequest, seconds: Mapping[str, float | None]) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of an answer's parts, in nanoseconds of wall time. `at`: when it ended."""
    begin = at - _ns(ended.seconds)
    queued = seconds.get("queued")
    opened = begin if queued is None else min(begin + _ns(queued), at)
    first = at if ended.first is None else begin + _ns(ended.first)
    if queued is not None:
        yield "queue", begin, opened
        if seconds.get("prefill") is not None:
            yield "prefill", opened, max(opened, first)
    if ended.first is not None:
        yield "decode", first, at
        yield "detokenise", at - _ns(min(ended.detokenize_seconds, ended.seconds)), at


def _asked(ended: FinishedRequest, operation: str, model: str) -> Iterator[tuple[str, Any]]:
    sampling: SamplingParams = ended.sampling
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "quire"
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "gen_ai.response.id", ended.id
    yield "gen_ai.request.max_tokens", ended.max_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.top_p", sampling.top_p
    yield "gen_ai.request.frequency_penalty", sampling.frequency_penalty
    yield "gen_ai.request.presence_penalty", sampling.presence_penalty
    if sampling.n > 1:
        yield "gen_ai.request.choice.count", sampling.n
    if sampling.seed is not None and math.fabs(sampling.seed) < 1 << 63:
        yield "gen_ai.request.seed", sampling.seed
    if ended.origin.request_id:
        yield "http.request.header.x-request-id", [ended.origin.request_id]


def _answered(answers: list[tuple[int, FinishedRequest]]) -> dict[str, Any]:
    every = [ended for _, ended in sorted(answers, key=lambda one: one[1].choice)]
    firsts = [ended.first for ended in every if ended.first is not None]
    told: dict[str, Any] = {
        "gen_ai.usage.input_tokens": every[0].prompt,
        "gen_ai.usage.cache_read.input_tokens": max(ended.cached for ended in every),
        "gen_ai.usage.output_tokens": sum(ended.tokens for ended in every),
        "gen_ai.response.finish_reasons": [ended.reason for ended in every],
    }
    return told | ({"gen_ai.response.time_to_first_chunk": min(firsts)} if firsts else {})


_EXPORT_TIMEOUT = 5
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
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT)))
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
