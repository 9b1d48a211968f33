"""The names of the engine's metrics: vLLM's where it has one, `quire:` where it has none."""

from __future__ import annotations

from collections.abc import Mapping

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5)
SECONDS: tuple[float, ...] = (*_SHORT, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_COUNTS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_ITERATION = tuple(1 << i for i in range(15))

COUNTERS: Mapping[str, str] = {
    "vllm:prompt_tokens": "Prompt tokens of requests whose first token was made.",
    "vllm:prompt_tokens_by_source": "Prompt tokens by where their K/V came from.",
    "vllm:prompt_tokens_cached": "Prompt tokens whose K/V came from the prefix cache.",
    "vllm:prompt_tokens_cached_by_source": "The same, by where it was kept.",
    "vllm:generation_tokens": "Tokens made.",
    "vllm:num_preemptions": "Sequences that lost their pages to another and were queued again.",
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found there.",
    "vllm:gpu_prefix_cache_queries": "Old name of vllm:prefix_cache_queries.",
    "vllm:gpu_prefix_cache_hits": "Old name of vllm:prefix_cache_hits.",
    "vllm:spec_decode_num_drafts": "Times drafts were verified.",
    "vllm:spec_decode_num_draft_tokens": "Drafts fed.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts that were right.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Drafts that were right, by position.",
    "quire:steps": "Steps committed.",
    "quire:decode_steps": "Steps in which at least one request that had its first token got another.",
    "quire:pressure_events": "Times KV blocks were short: a sequence preempted, a step sat out, a wait begun.",
    "quire:jit_compiles_after_ready": "Kernels compiled after the engine was ready: should stay 0.",
    "quire:discarded_spans": "Spans whose result came after their request had ended.",
    "quire:page_evictions": "Cached pages given to somebody else.",
    "quire:step_failures": "Steps that could not be run.",
}
GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "Requests with a place on the device.",
    "vllm:num_requests_waiting": "Requests waiting for one.",
    "vllm:num_requests_waiting_by_reason": "Requests waiting for room (capacity), or for something of their own.",
    "vllm:cache_config_info": "The KV cache's settings, as labels.",
    "vllm:kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
    "vllm:gpu_cache_usage_perc": "Old name of vllm:kv_cache_usage_perc.",
    "quire:pages": "KV blocks by state: held by sequences, cached for later ones, blank.",
    "quire:pages_shared": "KV blocks that more than one sequence holds.",
    "quire:fragmentation_internal": "Share of the slots in held KV blocks that hold no token.",
    "quire:fragmentation_external": "Share of the free KV blocks outside the longest run of them.",
    "quire:queue_tokens": "Tokens that those who wait will need K/V of, before any comes from the prefix cache.",
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
HISTOGRAMS: Mapping[str, str] = {
    "vllm:iteration_tokens_total": "Tokens fed a step.",
    "vllm:request_queue_time_seconds": "From submission to a place on the device.",
    "vllm:request_prefill_time_seconds": "From a place on the device to the first token.",
    "vllm:request_decode_time_seconds": "From the first token to the last.",
    "vllm:request_inference_time_seconds": "From a place on the device to the last token.",
    "vllm:request_prompt_tokens": "Prompt tokens a request.",
    "vllm:request_prefill_kv_computed_tokens": "Prompt tokens a request whose K/V was computed, not found.",
    "vllm:request_generation_tokens": "Tokens made a request.",
    "vllm:request_num_preemptions": "Preemptions a request.",
    "quire:step_seconds": "From launch to commit of a step.",
}
BUCKETS: Mapping[str, tuple[float, ...]] = {
    "vllm:iteration_tokens_total": _ITERATION,
    "vllm:request_prompt_tokens": _COUNTS,
    "vllm:request_prefill_kv_computed_tokens": _COUNTS,
    "vllm:request_generation_tokens": _COUNTS,
    "vllm:request_num_preemptions": (0, 1, 2, 5, 10, 20, 50),
    "quire:step_seconds": _STEP,
}

LABEL: Mapping[str, str] = {
    "vllm:prompt_tokens_by_source": "source",
    "vllm:prompt_tokens_cached_by_source": "source",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "position",
    "vllm:num_requests_waiting_by_reason": "reason",
    "quire:pressure_events": "kind",
    "quire:pages": "state",
}
"""The label by which values of one name are told apart."""
