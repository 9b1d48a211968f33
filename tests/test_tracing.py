"""A served request leaves a trace at the collector and lines in the log that programs can read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire.errors import InvalidConfig
from quire.observability.tracing import build_traces
from tests.live import serving, standing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Where traces are sent, and the spans that came."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_is_traced_and_logged_by_its_id(collector: tuple[str, list[Any]], tmp_path: Path) -> None:
    endpoint, spans = collector
    wanted = ("--otlp-traces-endpoint", endpoint, "--log-format", "json", "--enable-log-requests")
    with serving(tmp_path, *wanted) as live:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
        asked = {"model": "embedded", "prompt": "A tale", "max_tokens": 5, "ignore_eos": True}
        answer = live.http.post("/v1/completions", json=asked, headers=headers)
        live.http.post("/v1/completions", json=asked, headers={"x-request-id": 'x"} {"level":"critical'})
    ours = [span for span in spans if span.trace_id.hex() == TRACE]
    assert {span.name for span in ours} == {
        "text_completion embedded",
        *("queue", "prefill", "decode", "detokenise"),
    }
    root = next(span for span in ours if span.parent_span_id.hex() == PARENT)
    about = {attribute.key: attribute.value for attribute in root.attributes}
    assert about["gen_ai.response.id"].string_value == answer.json()["id"]
    assert about["gen_ai.usage.output_tokens"].int_value == 5
    lines = [json.loads(line) for line in live.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    [line] = [line for line in lines if line.get("request_id") == "mine-1"]
    assert line["id"] == answer.json()["id"] and line["completion_tokens"] == 5
    assert not any(line["level"] == "critical" for line in lines)


def test_a_request_that_is_passed_on_is_traced_too(collector: tuple[str, list[Any]], tmp_path: Path) -> None:
    endpoint, spans = collector
    with standing("upstream", tmp_path, front=("--otlp-traces-endpoint", endpoint)) as live:
        asked = {"model": "embedded", "prompt": "A tale", "max_tokens": 5, "temperature": 0.5, "ignore_eos": True}
        answer = live.http.post("/v1/completions", json=asked, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    root = next(span for span in spans if span.parent_span_id.hex() == PARENT)
    about = {attribute.key: attribute.value for attribute in root.attributes}
    assert root.name == "text_completion upstream" and root.trace_id.hex() == TRACE
    assert about["gen_ai.response.id"].string_value == answer.json()["id"]
    assert about["gen_ai.usage.output_tokens"].int_value == 5
    assert about["gen_ai.request.temperature"].double_value == 0.5


@pytest.mark.parametrize("endpoint", ["notaurl", "ftp://x/y", "http://", "http://a b/c", "127.0.0.1:4318"])
def test_an_address_that_is_none_is_refused_at_the_start(endpoint: str) -> None:
    async def explain(id: str) -> bytes:
        return b"null"

    with pytest.raises(InvalidConfig, match="otlp_traces_endpoint must look like"):
        build_traces(endpoint, explain, model="m")
