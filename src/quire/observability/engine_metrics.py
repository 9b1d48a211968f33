"""The engine's part of /metrics: vLLM's names where it has one, `quire:` where it has none.

`EngineMetrics` counts in the engine's process; its `snapshot` is sent to the server, which makes Prometheus text of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.engine.engine import Engine
from quire.engine.events import Completed, Observer, StepRecord
from quire.observability.histogram import COUNTS, Histogram, Metrics
from quire.scheduler.scheduler import Scheduler

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5)
_SECONDS: tuple[float, ...] = (*_SHORT, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ITERATION = tuple(1 << i for i in range(15))

COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("", "Prompt tokens of requests whose first token was made."),
    "vllm:prompt_tokens_by_source": ("source", "Prompt tokens by where their K/V came from."),
    "vllm:prompt_tokens_cached": ("", "Prompt tokens whose K/V came from the prefix cache."),
    "vllm:prompt_tokens_cached_by_source": ("source", "The same, by where it was kept."),
    "vllm:generation_tokens": ("", "Tokens made."),
    "vllm:num_preemptions": ("", "Sequences that lost their KV blocks to another and were queued again."),
    "vllm:prefix_cache_queries": ("", "Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("", "Tokens found there."),
    "vllm:external_prefix_cache_queries": ("", "Tokens looked up in host memory, on disk and at prefill engines."),
    "vllm:external_prefix_cache_hits": ("", "Tokens whose K/V came back from there and was used."),
    "quire:kv_offload_copied_bytes": (
        "copy",
        "Bytes of KV blocks copied: from the device to host memory (save), back (load), to files (write), back (read), "
        "to a decode engine (send), from a prefill engine (receive).",
    ),
    "quire:kv_offload_evictions": ("tier", "KV blocks that left host memory or the disk for others."),
    "quire:kv_offload_failures": (
        "reason",
        "KV blocks that did not come back or were not kept: bad files (checksum, truncated, format, fingerprint, "
        "missing), io, copy, no_room (all of host memory is in use), timeout, or what quire:remote_prefills names. "
        "They are computed again.",
    ),
    "quire:kv_offload_declined": ("", "Times that computing a prefix was predicted to be faster than copying it."),
    "quire:remote_prefills": (
        "outcome",
        "Prompts that a prefill engine was to compute: done, or why it did not, or not all: down, closed, timeout, "
        "secret, version, fingerprint, format, checksum, refused, busy, failed, cancelled, no_room, images, "
        "slower. The rest was computed here.",
    ),
    "quire:remote_prefill_seconds": (
        "",
        "Seconds from asking prefill engines to the last block, all prompts; of a prefill engine, seconds of sending.",
    ),
    "vllm:mm_cache_queries": ("", "Images looked up among those whose embeddings are kept."),
    "vllm:mm_cache_hits": ("", "Images found there."),
    "quire:images_encoded": ("", "Images that the encoder was run for."),
    "vllm:gpu_prefix_cache_queries": ("", "Old name of vllm:prefix_cache_queries."),
    "vllm:gpu_prefix_cache_hits": ("", "Old name of vllm:prefix_cache_hits."),
    "vllm:spec_decode_num_drafts": ("", "Times drafts were verified."),
    "vllm:spec_decode_num_draft_tokens": ("", "Drafts fed."),
    "vllm:spec_decode_num_accepted_tokens": ("", "Drafts that were right."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position", "Drafts that were right, by position."),
    "quire:steps": ("", "Steps committed."),
    "quire:decode_steps": ("", "Steps in which at least one request that had its first token got another."),
    "quire:pressure_events": (
        "kind",
        "Times KV blocks were short: a sequence preempted, a step skipped, a wait begun.",
    ),
    "quire:jit_compiles_after_ready": ("", "Kernels compiled after the engine was ready: should stay 0."),
    "quire:discarded_spans": ("", "Spans whose result came after their request had ended."),
    "quire:page_evictions": ("", "Cached KV blocks evicted for other requests."),
    "quire:pins_ended": (
        "reason",
        "Pinned KV blocks that are no longer pinned: their time was over (expired), another pin took their place "
        "(displaced), or no other block was left for a sequence (evicted).",
    ),
    "quire:pins_refused": ("", "KV blocks that were to be pinned, and were not for the bound."),
    "quire:state_snapshots_taken": ("", "Snapshots of recurrent layers' states taken for the prefix cache."),
    "quire:state_snapshot_hits": ("", "Times a sequence went on from one."),
    "quire:state_snapshot_evictions": ("", "Snapshots evicted for others, or with their block of K/V."),
    "quire:step_failures": ("", "Steps that could not be run."),
}
GAUGES: Mapping[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("", "Requests that are scheduled on the device."),
    "vllm:num_requests_waiting": ("", "Requests waiting to be scheduled."),
    "vllm:num_requests_waiting_by_reason": (
        "reason",
        "Requests waiting for capacity, or for something of their own (deferred).",
    ),
    "vllm:cache_config_info": ("", "The KV cache's settings, as labels."),
    "vllm:kv_cache_usage_perc": ("", "Share of KV blocks in use, 0 to 1."),
    "vllm:gpu_cache_usage_perc": ("", "Old name of vllm:kv_cache_usage_perc."),
    "quire:pages": ("state", "KV blocks by state: held by sequences, cached for later ones, or free (blank)."),
    "quire:pinned_pages": ("", "KV blocks that are pinned: evicted after all others."),
    "quire:pages_shared": ("", "KV blocks that more than one sequence holds."),
    "quire:state_snapshots": ("", "Snapshots of recurrent layers' states kept for the prefix cache."),
    "quire:state_snapshot_bytes": ("", "Bytes that they take, of those reserved for --state-snapshots."),
    "quire:fragmentation_internal": ("", "Share of the positions in held KV blocks that hold no token."),
    "quire:fragmentation_external": ("", "Share of the free KV blocks outside the longest run of them."),
    "quire:kv_offload_bytes": ("tier", "Bytes of KV blocks in host memory and on disk."),
    "quire:queue_tokens": ("", "Tokens of waiting requests, before any hit in the prefix cache."),
    "quire:canary_top1_agreement": (
        "",
        "Share of a probe's positions whose likeliest token quantising the weights kept.",
    ),
    "quire:canary_kl_nats": ("", "How far quantising the weights moved next-token distributions, mean KL divergence."),
    "quire:canary_loss_nats": ("", "Mean negative log-likelihood of the probe with quantized weights."),
    "quire:canary_reference_loss_nats": ("", "The same in higher precision."),
    "quire:canary_kv_top1_agreement": ("", "As quire:canary_top1_agreement, for K/V in float8."),
    "quire:canary_kv_kl_nats": ("", "As quire:canary_kl_nats, for K/V in float8."),
    "quire:canary_kv_loss_nats": ("", "As quire:canary_loss_nats, for K/V in float8."),
    "quire:canary_kv_reference_loss_nats": ("", "The same with K/V as the model makes it."),
    "quire:kv_cache_float8_layers": ("", "Layers whose K/V is kept in float8."),
}
HISTOGRAMS: Mapping[str, tuple[Sequence[float], str]] = {
    "vllm:iteration_tokens_total": (_ITERATION, "Tokens fed a step."),
    "vllm:request_queue_time_seconds": (_SECONDS, "From submission to being scheduled."),
    "vllm:request_prefill_time_seconds": (_SECONDS, "From being scheduled to the first token."),
    "vllm:request_decode_time_seconds": (_SECONDS, "From the first token to the last."),
    "vllm:request_inference_time_seconds": (_SECONDS, "From being scheduled to the last token."),
    "vllm:request_prompt_tokens": (COUNTS, "Prompt tokens a request."),
    "vllm:request_prefill_kv_computed_tokens": (COUNTS, "Prompt tokens a request whose K/V was computed, not found."),
    "vllm:request_generation_tokens": (COUNTS, "Tokens made a request."),
    "vllm:request_num_preemptions": ((0, 1, 2, 5, 10, 20, 50), "Preemptions a request."),
    "quire:step_seconds": (_STEP, "From launch to commit of a step."),
}
METRICS = Metrics(COUNTERS, GAUGES, HISTOGRAMS)


class PoolState(NamedTuple):
    """Shares of the block pool.

    internal: of the positions in held blocks, those without a token. external: of the free blocks, those outside the
    longest run of them (harmless with paging). shared: number of blocks that more than one sequence holds.
    """

    internal: float
    external: float
    shared: int


def pool_state(scheduler: Scheduler) -> PoolState:
    """Fragmentation and sharing. Looks at every block unless none is held: too slow for every step."""
    pool = scheduler.kv.block_pool
    if not pool.num_used:
        return PoolState(0.0, 0.0, 0)
    positions = sum(len(seq.blocks) for seq in scheduler.running) * scheduler.kv.block_size
    internal = 1 - sum(seq.num_computed for seq in scheduler.running) / positions if positions else 0.0
    refs = pool.ref_counts[1:]
    held = bytes(map(bool, refs))
    longest, free = max(map(len, held.split(b"\1"))), held.count(0)
    return PoolState(internal, 1 - longest / free if free else 0.0, len(refs) - free - refs.count(1))


_POOL_STATE_INTERVAL = 1.0
"""Seconds between two calls of `pool_state`, which takes half a millisecond for 16,000 blocks."""


class EngineMetrics(Observer):
    """Counts what an engine does. Costs a few microseconds a step."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.failures = self.decode_steps = 0
        self.pressure = {"preempted": 0, "sat-out": 0, "waits": 0}
        self.static_gauges: Mapping[str, float] = MappingProxyType({})
        """`Description.static_gauges`."""
        self.cache: Mapping[str, str] = MappingProxyType({})
        """Settings of the KV cache, as labels."""
        self.compiles: Callable[[], int] = int
        """Number of kernels compiled since the engine was ready."""
        self._cached: dict[str, int] = {}
        self._spans: object = None
        self._has_decode = False
        self._waiting = ""
        self._pool = PoolState(0.0, 0.0, 0)
        self._pool_time = float("-inf")

    def on_step(self, record: StepRecord) -> None:
        """A step was committed."""
        spans = record.plan.spans
        if spans is not self._spans:
            self._spans = spans
            self._has_decode = any(span[2] and span[1] == span[2] for span in spans)
        self.decode_steps += self._has_decode
        if record.decisions:
            self._count_decisions(record)
        self.histograms["vllm:iteration_tokens_total"].observe(sum([span[1] for span in spans]))
        self.histograms["quire:step_seconds"].observe(record.committed - record.launched)
        for ended in record.ended:
            self.on_end(ended)

    def _count_decisions(self, record: StepRecord) -> None:
        waiting = ""
        for what, id, by, n in record.decisions:
            if what == "opened":
                self._cached.setdefault(id, n)
            elif what == "waits" and by == "pages":
                waiting = id
                self.pressure["waits"] += id != self._waiting
            elif what in ("preempted", "sat-out"):
                self.pressure[what] += 1
        self._waiting = waiting

    def on_end(self, ended: Completed) -> None:
        """A request finished."""
        histograms, opened, first = self.histograms, ended.opened, ended.first_token
        cached = self._cached.pop(ended.id, 0)
        if opened is not None:
            histograms["vllm:request_queue_time_seconds"].observe(opened - ended.submitted)
            histograms["vllm:request_inference_time_seconds"].observe(ended.finished - opened)
            if first is not None:
                histograms["vllm:request_prefill_time_seconds"].observe(first - opened)
                histograms["vllm:request_decode_time_seconds"].observe(ended.finished - first)
                histograms["vllm:request_prefill_kv_computed_tokens"].observe(ended.prompt_tokens - cached)
        histograms["vllm:request_prompt_tokens"].observe(ended.prompt_tokens)
        histograms["vllm:request_generation_tokens"].observe(len(ended.tokens))
        histograms["vllm:request_num_preemptions"].observe(ended.preemptions)

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """A step failed."""
        self.failures += 1

    def snapshot(self, engine: Engine) -> dict[str, Any]:
        """All metrics of the engine as they are now, plain data for `prometheus.text`."""
        return {
            **self._counters(engine),
            **self._gauges(engine),
            **{name: histogram.value for name, histogram in self.histograms.items()},
            "vllm:cache_config_info": dict(self.cache),
        }

    def _counters(self, engine: Engine) -> dict[str, Any]:
        stats, gauges, images = engine.stats, engine.gauges(), engine.scheduler.encoder_cache
        snapshots = engine.scheduler.kv.snapshots.stats()
        return {
            "vllm:prompt_tokens": stats.num_prompt_tokens,
            **self._sources(engine),
            "vllm:prompt_tokens_cached": stats.num_cached_tokens,
            **self._tiers(engine),
            "vllm:generation_tokens": stats.num_generated_tokens,
            "vllm:num_preemptions": gauges.preemptions,
            "vllm:prefix_cache_queries": gauges.prefix_queried,
            "vllm:prefix_cache_hits": gauges.prefix_hit,
            "vllm:mm_cache_queries": images.num_queried,
            "vllm:mm_cache_hits": images.num_hits,
            "quire:images_encoded": images.num_encoded,
            "vllm:gpu_prefix_cache_queries": gauges.prefix_queried,
            "vllm:gpu_prefix_cache_hits": gauges.prefix_hit,
            "vllm:spec_decode_num_drafts": gauges.draft_totals[0],
            "vllm:spec_decode_num_draft_tokens": gauges.draft_totals[1],
            "vllm:spec_decode_num_accepted_tokens": gauges.draft_totals[2],
            "vllm:spec_decode_num_accepted_tokens_per_pos": {
                str(i): n for i, n in enumerate(gauges.accepted_by_position)
            },
            "quire:steps": stats.num_steps,
            "quire:decode_steps": self.decode_steps,
            "quire:discarded_spans": gauges.discarded_spans,
            "quire:pressure_events": dict(self.pressure),
            "quire:page_evictions": gauges.evictions,
            "quire:pins_ended": dict(engine.scheduler.kv.pins.ended),
            "quire:pins_refused": engine.scheduler.kv.pins.num_refused,
            "quire:state_snapshots_taken": snapshots.num_taken,
            "quire:state_snapshot_hits": snapshots.num_hits,
            "quire:state_snapshot_evictions": snapshots.num_evicted,
            "quire:step_failures": self.failures,
            "quire:jit_compiles_after_ready": self.compiles(),
        }

    def _sources(self, engine: Engine) -> dict[str, Any]:
        """Where the K/V of prompts came from."""
        stats = engine.stats
        tiers = stats.num_host_tokens + stats.num_disk_tokens + stats.num_remote_tokens
        found = stats.num_cached_tokens - tiers
        return {
            "vllm:prompt_tokens_by_source": {
                "local_compute": stats.num_prompt_tokens - stats.num_cached_tokens,
                "local_cache_hit": found,
                "external_kv_transfer": tiers,
            },
            "vllm:prompt_tokens_cached_by_source": {
                "device": found,
                "host": stats.num_host_tokens,
                "disk": stats.num_disk_tokens,
                "remote": stats.num_remote_tokens,
            },
        }

    def _tiers(self, engine: Engine) -> dict[str, Any]:
        """What was copied between tiers."""
        offload = engine.scheduler.kv.offload
        stats, size = offload.stats, offload.block_bytes()
        return {
            "vllm:external_prefix_cache_queries": stats.num_queried,
            "vllm:external_prefix_cache_hits": sum(stats.num_hit.values()),
            "quire:kv_offload_copied_bytes": {kind: count * size for kind, count in stats.copied.items()},
            "quire:kv_offload_evictions": dict(stats.evicted),
            "quire:kv_offload_failures": dict(stats.failures),
            "quire:kv_offload_declined": stats.num_declined,
            "quire:remote_prefills": dict(stats.prefills),
            "quire:remote_prefill_seconds": stats.prefill_seconds,
        }

    def _gauges(self, engine: Engine) -> dict[str, Any]:
        gauges, scheduler = engine.gauges(), engine.scheduler
        pool, queued = scheduler.kv.block_pool, scheduler.waiting.num_queued
        cached = len(pool.eviction_policy)
        usage = gauges.used_blocks / pool.num_blocks if pool.num_blocks else 0.0
        kept = scheduler.kv.snapshots.stats().num_kept
        now = engine.clock.now()
        if not scheduler.running or now - self._pool_time >= _POOL_STATE_INTERVAL:
            self._pool, self._pool_time = pool_state(scheduler), now
        return {
            "vllm:num_requests_running": gauges.running,
            "vllm:num_requests_waiting": gauges.waiting,
            "vllm:num_requests_waiting_by_reason": {"capacity": queued, "deferred": gauges.waiting - queued},
            "vllm:kv_cache_usage_perc": usage,
            "vllm:gpu_cache_usage_perc": usage,
            "quire:pages": {"held": gauges.used_blocks, "cached": cached, "blank": len(pool.free_list)},
            "quire:pinned_pages": len(scheduler.kv.pins.pinned),
            "quire:pages_shared": self._pool.shared,
            "quire:state_snapshots": kept,
            "quire:state_snapshot_bytes": kept * engine.description.state_bytes,
            "quire:fragmentation_internal": self._pool.internal,
            "quire:fragmentation_external": self._pool.external,
            "quire:kv_offload_bytes": {
                tier: count * scheduler.kv.offload.block_bytes()
                for tier, count in scheduler.kv.offload.num_blocks().items()
            },
            "quire:queue_tokens": sum([len(seq.tokens) for seq in scheduler.sequences.values() if seq.row is None]),
            **self.static_gauges,
        }
