"""One trace a request, inside of the caller's, with what it waited for."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.errors import Unavailable
from quire.observability.tracing import Explain, Traces
from quire.types import NO_TRACE_CONTEXT, FinishedRequest, SamplingParams, TraceContext

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def ended(id: str = "chatcmpl-1", origin: TraceContext = NO_TRACE_CONTEXT, **about: Any) -> FinishedRequest:
    fields: dict[str, Any] = {
        "choice": 0,
        "reason": "stop",
        "sampling": SamplingParams(temperature=0.5, seed=3),
        "origin": origin,
        "prompt": 9,
        "cached": 4,
        "tokens": 5,
        "max_tokens": 20,
        "first": 0.4,
        "seconds": 1.0,
        "detokenize_seconds": 0.01,
    }
    return FinishedRequest(id, **fields | about)


def traced(*answers: FinishedRequest, known: bool = True, explain: Explain | None = None) -> list[ReadableSpan]:
    """The spans of these answers; unless `explain` says something else, each waited 0.1 s."""

    async def waited(id: str) -> bytes:
        if not known:
            raise Unavailable("gone")
        seconds = {"queued": 0.1, "prefill": 0.3, "decode": 0.6}
        return json.dumps({"answers": [{"choice": i, "seconds": seconds} for i in range(len(answers))]}).encode()

    async def story() -> None:
        for one in answers:
            traces.on_end(one)

    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    traces = Traces(provider, explain or waited, model="tiny")
    asyncio.run(traces.run(story()))
    return list(kept.get_finished_spans())


def parts(spans: list[ReadableSpan]) -> dict[str, float]:
    return {s.name: ((s.end_time or 0) - (s.start_time or 0)) / 1e9 for s in spans}


def test_a_request_is_one_trace_with_its_parts() -> None:
    spans = traced(ended())
    root = spans[-1]
    assert root.name == "chat tiny" and root.kind.name == "SERVER" and root.parent is None
    assert {s.context.trace_id for s in spans if s.context} == {root.context.trace_id if root.context else 0}
    assert all(s.parent and root.context and s.parent.span_id == root.context.span_id for s in spans[:-1])
    found = parts(spans)
    for name, seconds in (("queue", 0.1), ("prefill", 0.3), ("decode", 0.6), ("detokenise", 0.01), ("chat tiny", 1.0)):
        assert math.isclose(found[name], seconds, abs_tol=2e-3), name


def test_attributes_are_the_conventions_and_tell_no_text() -> None:
    about = dict(traced(ended(origin=TraceContext("mine")))[-1].attributes or {})
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.request.model"] == "tiny"
    assert about["gen_ai.request.temperature"] == 0.5 and about["gen_ai.request.seed"] == 3
    assert about["gen_ai.usage.input_tokens"] == 9 and about["gen_ai.usage.output_tokens"] == 5
    assert about["gen_ai.usage.cache_read.input_tokens"] == 4
    assert about["gen_ai.response.finish_reasons"] == ("stop",)
    assert about["gen_ai.response.time_to_first_chunk"] == 0.4
    assert about["http.request.header.x-request-id"] == ("mine",)
    assert not any("message" in name or "prompt" in name for name in about)


def test_it_follows_the_callers_trace() -> None:
    root = traced(ended(origin=TraceContext("", f"00-{TRACE}-{PARENT}-01", "a=b")))[-1]
    assert root.context and f"{root.context.trace_id:032x}" == TRACE
    assert root.parent and f"{root.parent.span_id:016x}" == PARENT
    assert root.context.trace_state.get("a") == "b"


def test_a_caller_that_does_not_sample_is_obeyed() -> None:
    assert traced(ended(origin=TraceContext("", f"00-{TRACE}-{PARENT}-00"))) == []


@pytest.mark.parametrize("given", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "\n\x1b[2J"])
def test_nonsense_begins_a_new_trace(given: str) -> None:
    root = traced(ended(origin=TraceContext("", given)))[-1]
    assert root.parent is None


def test_choices_are_parts_of_one_trace() -> None:
    two = SamplingParams(n=2)
    late = ended("cmpl-7", choice=1, sampling=two, tokens=2, cached=8, first=0.2, reason="length")
    spans = traced(late, ended("cmpl-7", sampling=two))
    assert [s.name for s in spans].count("queue") == 2 and [s.name for s in spans].count("text_completion tiny") == 1
    about = dict(spans[-1].attributes or {})
    assert about["gen_ai.usage.output_tokens"] == 7
    assert about["gen_ai.usage.input_tokens"] == 9, "they have one prompt"
    assert about["gen_ai.usage.cache_read.input_tokens"] == 8, "the most that one of them found"
    assert about["gen_ai.response.time_to_first_chunk"] == 0.2
    assert about["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert about["gen_ai.request.choice.count"] == 2


def test_a_prompts_trace_has_the_times_of_its_own_answers() -> None:
    async def explain(id: str) -> bytes:
        asked.append(id)
        known = [{"prompt": i, "choice": 0, "seconds": {"queued": queued}} for i, queued in enumerate((0.1, 0.2))]
        return json.dumps({"answers": known if id == "cmpl-7" else known[1:]}).encode()

    asked = list[str]()
    spans = traced(ended("cmpl-7"), ended("cmpl-7.1"), explain=explain)
    assert asked == ["cmpl-7", "cmpl-7.1"]
    queues = [(s.attributes or {}, (s.end_time or 0) - (s.start_time or 0)) for s in spans if s.name == "queue"]
    found = {str(about["gen_ai.response.id"]): took / 1e9 for about, took in queues}
    assert found == {"cmpl-7": pytest.approx(0.1), "cmpl-7.1": pytest.approx(0.2)}


def test_an_engine_that_has_gone_leaves_what_the_frontend_knows() -> None:
    assert sorted(parts(traced(ended(), known=False))) == ["chat tiny", "decode", "detokenise"]


def test_an_answer_without_a_token_has_no_decoding_and_a_failed_one_says_so() -> None:
    spans = traced(ended(first=None, tokens=0, reason="error"))
    assert sorted(parts(spans)) == ["chat tiny", "prefill", "queue"]
    assert dict(spans[-1].attributes or {})["error.type"] == "error"
