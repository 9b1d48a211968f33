"""The engine's metrics say what happened, under names dashboards know."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quire.engine.timing import VirtualClock
from quire.observability import prometheus
from quire.observability.engine_metrics import METRICS, EngineMetrics
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig, simulate
from quire.sim.workload import uniform


def scrape() -> dict[str, float]:
    metrics = EngineMetrics()
    engine = SimConfig(pages=64, page_size=4, max_num_seqs=8, cost=StepCost(0.01)).build(VirtualClock(), [metrics])
    simulate(engine, uniform(40, shared=8, prompt=(2, 20)))
    text = prometheus.text(METRICS, metrics.snapshot(engine), "m").decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "m" and sample.labels["engine"] == "0"
            le = sample.labels.get("le")
            found[sample.name + (f"[{le}]" if le else "")] = sample.value
    loads = uniform(40, shared=8, prompt=(2, 20))
    assert found["vllm:prompt_tokens_total"] == sum(len(x.prompt) for x in loads)
    assert found["vllm:generation_tokens_total"] == sum(x.new for x in loads)
    return found


def test_counters_gauges_and_histograms_agree_with_the_run() -> None:
    found = scrape()
    assert found["vllm:prompt_tokens_cached_total"] > 0
    assert found["vllm:prefix_cache_hits_total"] <= found["vllm:prefix_cache_queries_total"]
    assert found["vllm:num_requests_running"] == 0 and found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0 == found["vllm:gpu_cache_usage_perc"]
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prompt_tokens"):
        assert found[f"vllm:request_{name}_count"] == 40
    assert found["vllm:request_prompt_tokens_sum"] == found["vllm:prompt_tokens_total"]
    assert found["vllm:request_prompt_tokens_bucket[+Inf]"] == 40
    assert found["vllm:iteration_tokens_total_count"] == found["quire:steps_total"]


def test_buckets_only_grow() -> None:
    found = scrape()
    counts = [v for k, v in found.items() if k.startswith("vllm:request_queue_time_seconds_bucket")]
    assert counts == sorted(counts) and counts[-1] == 40


def test_speculation_is_counted_by_position() -> None:
    metrics = EngineMetrics()
    engine = SimConfig(pages=64, page_size=4).build(observers=[metrics])
    for fed, accepted in ((3, 2), (3, 0), (2, 2)):
        engine.scheduler.draft_stats.record(fed, accepted)
    text = prometheus.text(METRICS, metrics.snapshot(engine), "m").decode()
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0' in text
    assert 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 4.0' in text
    per_position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="%s"} %s'
    assert per_position % (0, "2.0") in text and per_position % (1, "2.0") in text
