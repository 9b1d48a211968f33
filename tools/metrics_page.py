"""Writes docs/reference/metrics.md from the metrics themselves: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quire.observability import engine_metrics, frontend_metrics

HEAD = """# Metrics

Written by `make docs` from `src/quire/observability`; do not edit.

`GET /metrics` is Prometheus text, under vLLM's names wherever vLLM has one, with its labels and meanings, so that its
dashboards work; what it has no name for begins with `quire:`. Every sample has the labels `model_name` and `engine`.
Buckets are vLLM's and finer ones below, for small models answer faster than its smallest. Three names that vLLM has
dropped are still there, for dashboards that ask for them: `vllm:gpu_cache_usage_perc`,
`vllm:time_per_output_token_seconds`, and `vllm:gpu_prefix_cache_queries_total` with `vllm:gpu_prefix_cache_hits_total`.

Counters say what clients saw. Tokens of an answer that was cut at a stop string, or whose client left, are made but not
seen: `vllm:generation_tokens_total` counts them, and `quire:surplus_tokens_total` says how many they were. When nothing
runs, `vllm:num_requests_running`, `vllm:num_requests_waiting`, `vllm:kv_cache_usage_perc`, `quire:queue_tokens` and
`quire:pages{state="held"}` are 0. When the engine's process is started again, its counters begin at 0.

`docker compose up` serves the embedded model with Prometheus (port 9090) and Grafana (port 3000, no sign-in) beside it.
The dashboard is `deploy/grafana/dashboards/serving.json`; all but its last row works for vLLM too. Alerts and recorded
figures are `deploy/prometheus/rules.yml`. With API keys, give Prometheus one (`authorization` in its configuration).

| name | kind | labels | |
|---|---|---|---|
"""

_PARTS = (engine_metrics.METRICS, frontend_metrics.METRICS)

Row = tuple[str, str, Sequence[str], str]


def rows() -> Iterator[Row]:
    """Every metric that there can be: name in Prometheus, kind, labels besides the common two, meaning."""
    for counters, gauges, histograms in _PARTS:
        for name, (label, about) in counters.items():
            yield f"{name}_total", "counter", [label] if label else [], about
        for name, (label, about) in gauges.items():
            yield name, "gauge", [label] if label else [], about
        for name, (_, about) in histograms.items():
            yield name, "histogram", [], about


def buckets() -> Mapping[str, Sequence[float]]:
    """Upper bounds of each histogram, +Inf left out."""
    return {name: bounds for part in _PARTS for name, (bounds, _) in part.histograms.items()}


def markdown() -> str:
    """The whole page."""
    lines = [
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {about} |\n"
        for name, kind, labels, about in sorted(rows())
    ]
    bounds = [
        f"| `{name}` | {' '.join(f'{bound:g}' for bound in found)} |\n" for name, found in sorted(buckets().items())
    ]
    return HEAD + "".join(lines) + "\n## Buckets\n\n| name | upper bounds |\n|---|---|\n" + "".join(bounds)


if __name__ == "__main__":
    print(markdown(), end="")
