"""The frontend's part of /metrics, under vLLM's names: what a client would have measured. No global registry."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, get_args

from quire.observability import prometheus
from quire.observability.histogram import COUNTS, Histogram, Metrics, percentile
from quire.observability.observer import FrontendObserver
from quire.tokenization.prompt_header import HeaderOutcome
from quire.types import FinishedRequest

# vLLM's bounds, for its dashboards, and finer ones below for small models.
_ITL: tuple[float, ...] = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02)
_ITL += (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT: tuple[float, ...] = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.25)
_TTFT += (0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_E2E: tuple[float, ...] = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50)
_E2E += (60, 120, 240, 480, 960, 1920, 7680)

_HISTOGRAMS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "vllm:time_to_first_token_seconds": (_TTFT, "From a request's arrival to its first token."),
    "vllm:inter_token_latency_seconds": (_ITL, "Between one token and the next, per token."),
    "vllm:time_per_output_token_seconds": (_ITL, "Old name of vllm:inter_token_latency_seconds."),
    "vllm:request_time_per_output_token_seconds": (_ITL, "A request's mean time per token after the first."),
    "vllm:e2e_request_latency_seconds": (_E2E, "From a request's arrival to its last token."),
    "vllm:request_params_n": ((1, 2, 5, 10, 20), "The n of a request."),
    "vllm:request_params_max_tokens": (COUNTS, "The most tokens a request may get."),
    "vllm:request_max_num_generation_tokens": (COUNTS, "The longest of a request's answers, in tokens."),
}
METRICS = Metrics(
    {
        "vllm:request_success": ("finished_reason", "Answers that ended, by reason."),
        "vllm:admission_rejections": ("reason", "Requests refused on arrival."),
        "quire:omitted_tools": ("kind", "Tools that requests asked for and this server lacks, by kind."),
        "quire:prompt_headers": (
            "outcome",
            "Prompts with a line that --prompt-header matches: it was removed, or kept, since it was too_long or the "
            "whole message.",
        ),
        "quire:surplus_tokens": ("", "Tokens generated past a stop string, or for a client that had left."),
        "quire:evicted_responses": ("", "Stored responses that were removed for newer ones."),
    },
    {
        "quire:stored_responses": ("", "Responses that are stored."),
        "quire:stored_response_bytes": ("", "Bytes of the responses that are stored."),
    },
    _HISTOGRAMS,
)
_REASONS = ("stop", "length", "abort", "error", "timeout", "repetition")
_REFUSALS = ("max_num_queued_reqs", "max_num_queued_tokens", "draining", "unavailable")

WINDOW = 1024
"""Values of each latency that `/stats` has percentiles of: the latest ones."""


class FrontendMetrics(FrontendObserver):
    """Counts, for one model and one engine."""

    def __init__(self, model: str, engine: str = "0") -> None:
        self._model, self._engine = model, engine
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._first = self._histograms["vllm:time_to_first_token_seconds"]
        self._gap = self._histograms["vllm:inter_token_latency_seconds"]
        self._histograms["vllm:time_per_output_token_seconds"] = self._gap
        self._ended = dict.fromkeys(_REASONS, 0)
        self._refused = dict.fromkeys(_REFUSALS, 0)
        self._omitted_tools: dict[str, int] = {}
        self._headers = dict.fromkeys(get_args(HeaderOutcome), 0)
        self._surplus = 0
        self._evicted = 0
        self._stored = (0, 0)
        self._unfinished: dict[str, tuple[int, int]] = {}
        """By id of a call of which some answers have ended: answers left, and tokens of the longest."""
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("ttft", "itl", "e2e")}
        """Seconds. `itl`: of each answer, its mean time per token after the first."""

    def on_first(self, seconds: float) -> None:
        """An answer got its first token."""
        self._first.observe(seconds)
        self._recent["ttft"].append(seconds)

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        """Answers got more tokens."""
        self._gap.observe(seconds / tokens, tokens * answers)

    def on_end(self, ended: FinishedRequest) -> None:
        """An answer ended."""
        histograms = self._histograms
        self._ended[ended.reason] = self._ended.get(ended.reason, 0) + 1
        histograms["vllm:e2e_request_latency_seconds"].observe(ended.seconds)
        self._recent["e2e"].append(ended.seconds)
        left, longest = self._unfinished.pop(ended.id, (ended.sampling.n, 0))
        longest = max(longest, ended.tokens)
        if left > 1:
            self._unfinished[ended.id] = left - 1, longest
        else:
            histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        if ended.choice == 0:
            histograms["vllm:request_params_n"].observe(ended.sampling.n)
            histograms["vllm:request_params_max_tokens"].observe(ended.max_tokens)
        if ended.first is not None and ended.tokens > 1:
            mean = (ended.seconds - ended.first) / (ended.tokens - 1)
            histograms["vllm:request_time_per_output_token_seconds"].observe(mean)
            self._recent["itl"].append(mean)

    def on_refused(self, reason: str) -> None:
        """A request was refused."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def on_omitted_tool(self, kind: str) -> None:
        """A tool was left out."""
        self._omitted_tools[kind] = self._omitted_tools.get(kind, 0) + 1

    def on_prompt_header(self, outcome: HeaderOutcome) -> None:
        """A prompt had a header."""
        self._headers[outcome] += 1

    def on_surplus(self, tokens: int) -> None:
        """Tokens were generated that no client gets."""
        self._surplus += tokens

    def on_stored_responses(self, responses: int, size: int) -> None:
        """So many responses, of so many bytes, are stored now."""
        self._stored = responses, size

    def on_evicted_response(self) -> None:
        """A stored response was removed for newer ones."""
        self._evicted += 1

    def text(self) -> bytes:
        """Prometheus text."""
        values = {
            "vllm:request_success": self._ended,
            "vllm:admission_rejections": self._refused,
            "quire:omitted_tools": self._omitted_tools,
            "quire:prompt_headers": self._headers,
            "quire:surplus_tokens": self._surplus,
            "quire:evicted_responses": self._evicted,
            "quire:stored_responses": self._stored[0],
            "quire:stored_response_bytes": self._stored[1],
            **{name: histogram.value for name, histogram in self._histograms.items()},
        }
        return prometheus.text(METRICS, values, self._model, self._engine)

    def latencies(self) -> dict[str, Any]:
        """See FrontendObserver. p50 and p99 in ms of the latest WINDOW values, null without any."""
        return {
            name: {
                "count": len(values),
                **{f"p{q}": round(percentile(values, q) * 1000, 3) if values else None for q in (50, 99)},
            }
            for name, values in self._recent.items()
        }
