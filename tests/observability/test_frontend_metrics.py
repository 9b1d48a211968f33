from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from quire.observability.frontend_metrics import WINDOW, FrontendMetrics
from quire.observability.observer import FrontendObserver, ObserverGroup
from quire.types import NO_TRACE_CONTEXT, FinishedRequest, SamplingParams

VLLM_BOUNDS = {
    "vllm:time_to_first_token_seconds": (
        ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    ),
    "vllm:inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "vllm:request_time_per_output_token_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "vllm:e2e_request_latency_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "vllm:request_params_n": "1 2 5 10 20",
}


def samples(metrics: FrontendMetrics) -> dict[tuple[str, str], float]:
    """Values by (name, the label in which samples of a name differ)."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
            found[sample.name, next(iter(rest.values()), "")] = sample.value
    return found


def end(metrics: FrontendObserver, reason: str = "stop", choice: int = 0, *, id: str = "c", tokens: int = 11) -> None:
    sampling = SamplingParams(n=2)
    metrics.on_end(
        FinishedRequest(
            id,
            choice,
            reason,
            sampling,
            NO_TRACE_CONTEXT,
            5,
            cached=0,
            tokens=tokens,
            max_tokens=64,
            first=0.1,
            seconds=1.1,
        )
    )


def test_what_clients_saw_is_what_is_counted() -> None:
    metrics = FrontendMetrics("tiny")
    metrics.on_first(0.0015)
    metrics.on_gap(0.006, 3)
    metrics.on_surplus(4)
    metrics.on_refused("max_num_queued_reqs")
    end(metrics)
    end(metrics, "length", choice=1)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_bucket", "0.001"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", "0.002"] == 1
    assert found["vllm:inter_token_latency_seconds_count", ""] == 3
    assert found["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(0.006)
    assert found["vllm:time_per_output_token_seconds_count", ""] == 3
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_params_n_count", ""] == 1
    assert found["vllm:request_time_per_output_token_seconds_sum", ""] == pytest.approx(0.2)
    assert found["quire:surplus_tokens_total", ""] == 4
    assert found["vllm:admission_rejections_total", "max_num_queued_reqs"] == 1


def test_recent_latencies_are_percentiles_of_the_latest_answers() -> None:
    metrics = FrontendMetrics("tiny")
    nothing = {"count": 0, "p50": None, "p99": None}
    assert metrics.latencies() == {"ttft": nothing, "itl": nothing, "e2e": nothing}
    for _ in range(WINDOW):
        metrics.on_first(9.0)
    for number in range(1, WINDOW + 1):
        metrics.on_first(number / 1000)
    end(metrics)
    end(metrics, tokens=1)
    found = ObserverGroup(FrontendObserver(), metrics).latencies()
    assert found["ttft"] == {"count": WINDOW, "p50": 513.0, "p99": 1014.0}
    assert found["e2e"] == {"count": 2, "p50": 1100.0, "p99": 1100.0}
    assert found["itl"] == {"count": 1, "p50": 100.0, "p99": 100.0}, "an answer of one token has no time between tokens"


def test_of_a_requests_answers_the_longest_is_counted_once() -> None:
    metrics = FrontendMetrics("tiny")
    end(metrics, tokens=7)
    end(metrics, id="d", tokens=30)
    end(metrics, choice=1, tokens=5)
    found = samples(metrics)
    name = "vllm:request_max_num_generation_tokens"
    assert (found[name + "_count", ""], found[name + "_sum", ""]) == (1, 7)
    end(metrics, "abort", id="d", choice=1, tokens=0)
    found = samples(metrics)
    assert (found[name + "_count", ""], found[name + "_sum", ""]) == (2, 37)


def test_every_reason_is_there_from_the_start() -> None:
    found = samples(FrontendMetrics("tiny"))
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert found["vllm:request_success_total", reason] == 0


def test_buckets_are_vllms_and_finer_ones_below() -> None:
    found = samples(FrontendMetrics("tiny"))
    for name, bounds in VLLM_BOUNDS.items():
        for bound in bounds.split():
            assert (name + "_bucket", str(float(bound))) in found
    below = [key for key in found if key[0] == "vllm:inter_token_latency_seconds_bucket" and float(key[1]) < 0.01]
    assert len(below) >= 5


def test_two_of_them_share_nothing() -> None:
    before = set(REGISTRY._names_to_collectors)
    one, other = FrontendMetrics("tiny"), FrontendMetrics("tiny")
    one.on_first(1.0)
    assert samples(other)["vllm:time_to_first_token_seconds_count", ""] == 0
    assert set(REGISTRY._names_to_collectors) == before


def test_a_group_without_observers_ignores_everything() -> None:
    end(ObserverGroup())
    assert ObserverGroup().text() == b""


def test_several_hear_the_same() -> None:
    one, other = FrontendMetrics("tiny"), FrontendMetrics("tiny")
    both = ObserverGroup(one, other)
    both.on_first(0.1)
    both.on_gap(0.2, 2)
    both.on_surplus(1)
    both.on_refused("draining")
    end(both)
    assert one.text() == other.text() != FrontendMetrics("tiny").text()
    assert both.text() == 2 * one.text()


def test_a_group_passes_on_each_call_as_it_came() -> None:
    calls: list[tuple[object, ...]] = []

    class Noting(FrontendObserver):
        def __getattribute__(self, name: str) -> object:
            return lambda *given: calls.append((name, *given))

    group, ended = ObserverGroup(Noting(), Noting()), object()
    asked = [("on_first", 0.1), ("on_gap", 0.2, 3, 2), ("on_end", ended), ("on_refused", "why"), ("on_surplus", 4)]
    asked.append(("on_omitted_tool", "kind"))
    for name, *given in asked:
        getattr(group, name)(*given)
    assert calls == [call for call in asked for _ in range(2)]
