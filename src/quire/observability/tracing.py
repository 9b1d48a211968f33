"""OpenTelemetry traces: one a request, with what it waited for and how long each part took. Needs the extra `otel`.

Attributes are OpenTelemetry's semantic conventions for generative AI, without text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from quire import __version__
from quire.errors import InvalidConfig
from quire.observability.observer import FrontendObserver
from quire.types import FinishedRequest, prompt_of

Explain = Callable[[str], Coroutine[Any, Any, bytes]]
"""The explanation of a call's answers, as JSON: `LiveViewClient.explain`."""

_EXPLAIN_TIMEOUT = 2.0
"""Seconds to wait for the engine's explanation."""
_EXPORT_TIMEOUT = 5
"""Seconds that a collector may take for a batch; a server that shuts down waits no longer."""
_CHAT = ("chatcmpl-", "resp_", "msg_")


class Traces(FrontendObserver):
    """Makes a trace of each call once all its answers have ended.

    provider: OpenTelemetry's. explain: for the time in the queue, which the engine knows; if it fails, the
    spans `queue` and `prefill` are left out.
    """

    def __init__(self, provider: Any, explain: Explain, *, model: str) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._explain, self._model = provider, explain, model
        self._start_span = provider.get_tracer("quire", __version__).start_span
        self._extract = TraceContextTextMapPropagator().extract
        self._inside = set_span_in_context
        self._server_kind = SpanKind.SERVER
        self._ended: dict[str, list[tuple[int, FinishedRequest]]] = {}
        self._exports: set[asyncio.Task[None]] = set()

    def on_end(self, ended: FinishedRequest) -> None:
        """Trace the call if this was its last answer."""
        answers = self._ended.setdefault(ended.id, [])
        answers.append((time.time_ns(), ended))
        if len(answers) == ended.sampling.n:
            del self._ended[ended.id]
            task = asyncio.get_running_loop().create_task(self._trace(answers))
            self._exports.add(task)
            task.add_done_callback(self._exports.discard)

    async def run(self, server: Coroutine[Any, Any, None]) -> None:
        """Run the server, and send the last traces when it ends."""
        try:
            await server
        finally:
            while self._exports:
                ended = list(self._exports)
                await asyncio.gather(*ended, return_exceptions=True)
                # Where all have ended, Python 3.14 awaits nothing, and their callbacks have not been called.
                self._exports.difference_update(ended)
            await asyncio.to_thread(self._provider.shutdown)

    async def _trace(self, answers: list[tuple[int, FinishedRequest]]) -> None:
        try:
            async with asyncio.timeout(_EXPLAIN_TIMEOUT):
                explained = json.loads(await self._explain(answers[0][1].id)) or {}
        # An engine that has just died explains nothing.
        except Exception:
            explained = {}
        first = answers[0][1]
        mine = prompt_of(first.id)  # the first prompt's call has the id of its request, of which all is explained
        own = (answer for answer in explained.get("answers", []) if answer.get("prompt", mine) == mine)
        seconds = {answer["choice"]: _seconds(answer) for answer in own}
        headers = {"traceparent": first.origin.traceparent, "tracestate": first.origin.tracestate}
        operation = "chat" if first.id.startswith(_CHAT) else "text_completion"
        root = self._start_span(
            f"{operation} {self._model}",
            context=self._extract({name: value for name, value in headers.items() if value}),
            kind=self._server_kind,
            attributes=_attributes(answers, operation, self._model),
            start_time=min(at - _ns(ended.seconds) for at, ended in answers),
        )
        context = self._inside(root)
        for at, ended in answers:
            attributes = {"gen_ai.response.id": ended.id, "quire.choice": ended.choice}
            for name, start, end in _parts(at, ended, seconds.get(ended.choice, {})):
                self._start_span(name, context=context, attributes=attributes, start_time=start).end(end_time=end)
        root.end(end_time=max(at for at, _ in answers))


def _seconds(answer: Mapping[str, Any]) -> dict[str, float | None]:
    """Those of an explanation, with those of its transfer from a prefill engine, if there was one."""
    transfer = answer.get("prefix", {}).get("transfer") or {}
    return {**answer["seconds"], "transfer": transfer.get("seconds")}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _parts(at: int, ended: FinishedRequest, seconds: Mapping[str, float | None]) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of an answer's spans, in nanoseconds of wall time. at: when it ended."""
    begin = at - _ns(ended.seconds)
    queued = seconds.get("queued")
    opened = begin if queued is None else min(begin + _ns(queued), at)
    first = at if ended.first is None else begin + _ns(ended.first)
    if queued is not None:
        yield "queue", begin, opened
        if seconds.get("transfer"):
            yield "kv_transfer", max(begin, opened - _ns(seconds["transfer"] or 0.0)), opened
        if seconds.get("prefill") is not None:
            yield "prefill", opened, max(opened, first)
    if ended.first is not None:
        yield "decode", first, at
        yield "detokenise", at - _ns(min(ended.detokenize_seconds, ended.seconds)), at


def _attributes(answers: list[tuple[int, FinishedRequest]], operation: str, model: str) -> dict[str, Any]:
    """Attributes of a call's span; answers: when each ended, and how."""
    ended = sorted((each for _, each in answers), key=lambda each: each.choice)
    request = answers[0][1]
    sampling, first_tokens = request.sampling, [each.first for each in ended if each.first is not None]
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.usage.input_tokens": ended[0].prompt,
        "gen_ai.usage.cache_read.input_tokens": max(each.cached for each in ended),
        "gen_ai.usage.output_tokens": sum(each.tokens for each in ended),
        "gen_ai.response.finish_reasons": [each.reason for each in ended],
    }
    if sampling.n > 1:
        found["gen_ai.request.choice.count"] = sampling.n
    if sampling.seed is not None and math.fabs(sampling.seed) < 1 << 63:
        found["gen_ai.request.seed"] = sampling.seed
    if request.origin.request_id:
        found["http.request.header.x-request-id"] = [request.origin.request_id]
    if first_tokens:
        found["gen_ai.response.time_to_first_chunk"] = min(first_tokens)
    if "error" in found["gen_ai.response.finish_reasons"]:
        found["error.type"] = "error"
    return found


def build_traces(endpoint: str | None, explain: Explain, *, model: str) -> Traces | None:
    """Traces to `endpoint`, None without one. Raises InvalidConfig for a bad address, and for missing packages."""
    if endpoint is None:
        return None
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
    return Traces(provider, explain, model=model)
