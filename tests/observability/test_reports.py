"""What observers report of answers of every kind: log lines, spans of traces and metrics, as written down."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.observability import tracing
from quire.observability.frontend_metrics import FrontendMetrics
from quire.observability.logs import FORMATS, RequestLogger, log_config, log_stats
from quire.observability.tracing import Traces
from quire.types import FinishedRequest, SamplingParams, TraceContext
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"
PARENT = TraceContext("r-1", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=b", "7")


def ended(id: str, reason: str = "stop", choice: int = 0, **more: Any) -> FinishedRequest:
    fields: dict[str, Any] = {"sampling": SamplingParams(), "origin": TraceContext(), "prompt": 20, "cached": 16}
    fields |= {"tokens": 9, "max_tokens": 30, "first": 0.25, "seconds": 2.25, "detokenize_seconds": 0.125}
    return FinishedRequest(id=id, choice=choice, reason=reason, **(fields | more))


THREE = SamplingParams(n=3, temperature=0.5, top_p=0.25, seed=-7, frequency_penalty=0.5, presence_penalty=-0.5)
ANSWERS = [
    ended("cmpl-1"),
    ended("chatcmpl-2", "length", origin=PARENT, cached=0),
    ended("msg_3", "abort", first=None, tokens=0, seconds=0.5, sampling=SamplingParams(seed=1 << 63)),
    ended("resp_4", "error", first=None, tokens=0, seconds=0.0, detokenize_seconds=0.0),
    ended("cmpl-5", "timeout", tokens=1, first=2.25),
    ended("chatcmpl-6", "stop", 1, sampling=THREE, origin=PARENT, tokens=3, first=0.5),
    ended("chatcmpl-6", "length", 0, sampling=THREE, origin=PARENT, tokens=30, first=0.375, cached=0, seconds=3.0),
    ended("chatcmpl-6", "stop", 2, sampling=THREE, origin=PARENT, tokens=12, detokenize_seconds=5.0),
    ended("gen-7", "repetition", sampling=SamplingParams(seed=(1 << 63) - 1)),
    ended("gen-8", "stop\n", origin=TraceContext("a\x1bb")),
]


def test_log_lines_are_as_written_down(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("quire.test")
    with caplog.at_level(logging.INFO, "quire.test"):
        observer = RequestLogger(log)
        for answer in ANSWERS:
            observer.on_end(answer)
        observer.on_refused("draining")
        try:
            raise ValueError("bad\x1b thing")
        except ValueError:
            log.error("it failed: %s", "why\nnot", exc_info=True, extra={"fields": {"level": "mine", "a": "b\x1b"}})
        log.warning("stack", stack_info=False)
    lines = []
    for record in caplog.records:
        record.created = 1700000000.5
        record.exc_info = record.exc_info and (*record.exc_info[:2], None)  # type: ignore[assignment]
        record.exc_text = None
        lines += [FORMATS[kind]().format(record) for kind in ("text", "json")]
    lines.append(json.dumps({kind: log_config(kind) for kind in FORMATS}, default=lambda kind: kind.__name__, indent=1))
    check(EXPECTED / "log-lines.txt", "\n".join(lines))


def test_metrics_of_answers_are_as_written_down() -> None:
    metrics = FrontendMetrics("m", "1")
    for answer in ANSWERS:
        if answer.first is not None:
            metrics.on_first(answer.first)
        metrics.on_end(answer)
    metrics.on_gap(0.5, 5, 2)
    metrics.on_gap(0.01, 1)
    metrics.on_surplus(4)
    metrics.on_surplus(1)
    for reason in ("draining", "unavailable", "draining", "max_num_queued_reqs"):
        metrics.on_refused(reason)
    check(EXPECTED / "frontend-metrics.txt", metrics.text().decode())
    assert not metrics._unfinished


def test_spans_of_traces_are_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = {
        "cmpl-1": {"answers": [{"choice": 0, "seconds": {"queued": 0.125, "prefill": 0.125}}]},
        "chatcmpl-2": {"answers": [{"choice": 0, "seconds": {"queued": 9.0, "prefill": None}}]},
        "chatcmpl-6": {"answers": [{"choice": i, "seconds": {"queued": 0.1 * i, "prefill": 0.1}} for i in range(2)]},
        "msg_3": None,
    }

    async def explain(id: str) -> bytes:
        if id.startswith("gen"):
            raise OSError("gone")
        return json.dumps(explained.get(id, {})).encode()

    times = iter(range(10**18, 2 * 10**18, 10**9))
    monkeypatch.setattr(tracing.time, "time_ns", lambda: next(times))
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider, explain, model="m")

    async def run() -> None:
        for answer in ANSWERS:
            traces.on_end(answer)
            await asyncio.sleep(0)

    asyncio.run(traces.run(run()))
    names = {span.context.span_id: span.name for span in exporter.get_finished_spans() if span.context}
    lines = []
    for span in exporter.get_finished_spans():
        start, end = ((at or 0) - 10**18 for at in (span.start_time, span.end_time))
        parent = "-" if span.parent is None else names.get(span.parent.span_id, f"{span.parent.span_id:x}")
        lines.append(f"{span.name} in {parent} {span.kind.name} {start / 1e9:.3f} to {end / 1e9:.3f}")
        lines += [f"  {key} {value}" for key, value in dict(span.attributes or {}).items()]
    lines.append(f"left: {len(traces._ended)} {len(traces._exports)}")
    check(EXPECTED / "spans.txt", "\n".join(lines))


def test_traces_end_where_awaiting_those_that_have_ended_calls_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.14, where gathering tasks that have ended does not give way to the event loop."""
    calls = []

    async def gather(*tasks: Any, return_exceptions: bool) -> None:
        calls.append(len(tasks))
        assert len(calls) == 1, "it waits for the same tasks again, without end"

    monkeypatch.setattr(tracing.asyncio, "gather", gather)
    provider = TracerProvider(shutdown_on_exit=False)

    async def explain(id: str) -> bytes:
        return b"{}"

    async def run() -> None:
        traces = Traces(provider, explain, model="m")

        async def server() -> None:
            traces.on_end(ended("cmpl-1"))

        await traces.run(server())

    asyncio.run(run())
    assert calls == [1]


def test_statistics_are_logged_as_written_down(caplog: pytest.LogCaptureFixture) -> None:
    cache = {"utilization": 0.25}
    told = iter(
        [
            {},
            {"generated_tokens": 5, "active_requests": 2, "waiting_requests": 1, "cache": cache},
            {"generated_tokens": 5, "active_requests": 2, "waiting_requests": 1, "cache": cache},
            {"generated_tokens": 6, "active_requests": 1, "waiting_requests": 0},
            {"generated_tokens": 2},
            {"generated_tokens": 4, "cache": {"utilization": 1.0}},
        ]
    )

    async def run() -> None:
        with pytest.raises(RuntimeError):
            await log_stats(lambda: next(told), logging.getLogger("quire.test"), every=0.001)

    with caplog.at_level(logging.INFO, "quire.test"):
        asyncio.run(run())
    check(
        EXPECTED / "statistics.txt", "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)
    )
