"""The engine's share of /metrics, under vLLM's names: an observer that adds integers, rendered elsewhere.

It lives in the engine's process; `snapshot` is plain data that travels to the front, `render` makes Prometheus text
of it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.events import Completed, Gauges, StepRecord
from quire.engine.ledger import Ledger
from quire.observe.histogram import Histogram
from quire.values import Request

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5)
_SECONDS: tuple[float, ...] = (*_SHORT, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_COUNTS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_ITERATION = tuple(1 << i for i in range(15))

_COUNTER_HELP: Mapping[str, str] = {
    "vllm:prompt_tokens": "Prompt tokens of requests whose first token was made.",
    "vllm:prompt_tokens_cached": "Prompt tokens whose K/V came from the prefix cache.",
    "vllm:generation_tokens": "Tokens made.",
    "vllm:num_preemptions": "Sequences that lost their pages to another and were queued again.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found there.",
    "vllm:spec_decode_num_drafts": "Times drafts were verified.",
    "vllm:spec_decode_num_draft_tokens": "Drafts fed.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts that were right.",
    "quire:steps": "Steps committed.",
    "quire:discarded_spans": "Spans whose result came after their request had ended.",
    "quire:page_evictions": "Cached pages given to somebody else.",
    "quire:step_failures": "Steps that could not be run.",
}
_GAUGE_HELP: Mapping[str, str] = {
    "vllm:num_requests_running": "Requests with a place on the device.",
    "vllm:num_requests_waiting": "Requests waiting for one.",
    "vllm:kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
    "vllm:gpu_cache_usage_perc": "Old name of vllm:kv_cache_usage_perc.",
    "quire:pages_used": "KV blocks that sequences hold.",
    "quire:pages_free": "KV blocks that can be taken, cached ones included.",
    "quire:canary_top1_agreement": "Share of a probe's positions whose likeliest token quantising the weights kept.",
    "quire:canary_kl_nats": "How far quantising the weights moved next-token distributions, mean KL divergence.",
    "quire:canary_loss_nats": "Mean negative log-likelihood of the probe with quantised weights.",
    "quire:canary_reference_loss_nats": "The same in higher precision.",
    "quire:canary_kv_top1_agreement": "As quire:canary_top1_agreement, for K/V in float8.",
    "quire:canary_kv_kl_nats": "As quire:canary_kl_nats, for K/V in float8.",
    "quire:canary_kv_loss_nats": "As quire:canary_loss_nats, for K/V in float8.",
    "quire:canary_kv_reference_loss_nats": "The same with K/V as the model makes it.",
    "quire:kv_cache_float8_layers": "Layers whose K/V is kept in float8.",
}
_HISTOGRAM_HELP: Mapping[str, str] = {
    "vllm:iteration_tokens_total": "Tokens fed a step.",
    "vllm:request_queue_time_seconds": "From submission to a place on the device.",
    "vllm:request_prefill_time_seconds": "From a place on the device to the first token.",
    "vllm:request_decode_time_seconds": "From the first token to the last.",
    "vllm:request_inference_time_seconds": "From a place on the device to the last token.",
    "vllm:request_prompt_tokens": "Prompt tokens a request.",
    "vllm:request_generation_tokens": "Tokens made a request.",
    "vllm:request_num_preemptions": "Preemptions a request.",
    "quire:step_seconds": "From launch to commit of a step.",
}
_BUCKETS: Mapping[str, tuple[float, ...]] = {
    "vllm:iteration_tokens_total": _ITERATION,
    "vllm:request_prompt_tokens": _COUNTS,
    "vllm:request_generation_tokens": _COUNTS,
    "vllm:request_num_preemptions": (0, 1, 2, 5, 10, 20, 50),
    "quire:step_seconds": _STEP,
}


class EngineMetrics:
    """Watches what the engine does. Costs a few microseconds a step."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(_BUCKETS.get(name, _SECONDS)) for name in _HISTOGRAM_HELP}
        self.failures = 0
        self.facts: Mapping[str, float] = MappingProxyType({})
        """Gauges that stay as they are: `Description.facts`."""

    def on_submit(self, request: Request, now: float) -> None:
        """Counted when it ends."""

    def on_step(self, record: StepRecord) -> None:
        self.histograms["vllm:iteration_tokens_total"].observe(sum([span[1] for span in record.plan.spans]))
        self.histograms["quire:step_seconds"].observe(record.committed - record.launched)
        for ended in record.ended:
            self.on_end(ended)

    def on_end(self, ended: Completed) -> None:
        observe, opened, first = self.histograms, ended.opened, ended.first_token
        if opened is not None:
            observe["vllm:request_queue_time_seconds"].observe(opened - ended.submitted)
            observe["vllm:request_inference_time_seconds"].observe(ended.finished - opened)
            if first is not None:
                observe["vllm:request_prefill_time_seconds"].observe(first - opened)
                observe["vllm:request_decode_time_seconds"].observe(ended.finished - first)
        observe["vllm:request_prompt_tokens"].observe(ended.prompt_tokens)
        observe["vllm:request_generation_tokens"].observe(len(ended.tokens))
        observe["vllm:request_num_preemptions"].observe(ended.preemptions)

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        self.failures += 1

    def snapshot(self, ledger: Ledger, gauges: Gauges) -> dict[str, Any]:
        """Plain data: everything /metrics says of the engine, as things stand now."""
        pages = gauges.used_pages + gauges.free_pages
        usage = gauges.used_pages / pages if pages else 0.0
        return {
            "counters": {
                "vllm:prompt_tokens": ledger.prompted,
                "vllm:prompt_tokens_cached": ledger.cached,
                "vllm:generation_tokens": ledger.generated,
                "vllm:num_preemptions": gauges.preemptions,
                "vllm:prefix_cache_queries": gauges.prefix_queried,
                "vllm:prefix_cache_hits": gauges.prefix_hit,
                "vllm:spec_decode_num_drafts": gauges.drafted[0],
                "vllm:spec_decode_num_draft_tokens": gauges.drafted[1],
                "vllm:spec_decode_num_accepted_tokens": gauges.drafted[2],
                "quire:steps": ledger.steps,
                "quire:discarded_spans": gauges.discarded_spans,
                "quire:page_evictions": gauges.evictions,
                "quire:step_failures": self.failures,
            },
            "gauges": {
                "vllm:num_requests_running": gauges.running,
                "vllm:num_requests_waiting": gauges.waiting,
                "vllm:kv_cache_usage_perc": usage,
                "vllm:gpu_cache_usage_perc": usage,
                "quire:pages_used": gauges.used_pages,
                "quire:pages_free": gauges.free_pages,
                **self.facts,
            },
            "histograms": {name: [h.counts, h.sum] for name, h in self.histograms.items()},
            "accepted_at": list(gauges.accepted_at),
        }


class _Snapshot(Collector):
    def __init__(self, snapshot: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        self.snapshot, self.labels = snapshot, labels

    def collect(self) -> Iterator[Metric]:
        names, values = list(self.labels), list(self.labels.values())
        for name, value in self.snapshot["counters"].items():
            counter = CounterMetricFamily(name, _COUNTER_HELP[name], labels=names)
            counter.add_metric(values, value)
            yield counter
        for name, value in self.snapshot["gauges"].items():
            gauge = GaugeMetricFamily(name, _GAUGE_HELP[name], labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, (counts, total) in self.snapshot["histograms"].items():
            histogram = HistogramMetricFamily(name, _HISTOGRAM_HELP[name], labels=names)
            histogram.add_metric(values, list(_cumulative(name, counts)), total)
            yield histogram
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        positions = CounterMetricFamily(name, "Drafts that were right, by position.", labels=[*names, "position"])
        for position, count in enumerate(self.snapshot["accepted_at"]):
            positions.add_metric([*values, str(position)], count)
        yield positions


def _cumulative(name: str, counts: list[int]) -> Iterator[tuple[str, float]]:
    seen = 0
    bounds = [str(float(b)) for b in _BUCKETS.get(name, _SECONDS)]
    for bound, count in zip([*bounds, "+Inf"], counts, strict=True):
        seen += count
        yield bound, seen


def render(snapshot: Mapping[str, Any], model: str, engine: str = "0") -> bytes:
    """Prometheus text of a snapshot."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(snapshot, {"model_name": model, "engine": engine}))
    return bytes(generate_latest(registry))
