"""Whole answers: deltas gathered, and the JSON that clients get when they do not stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.backends.base import Delta
from quire.server.calls import Job
from quire.server.logprobs import Score, TextLogprobs, TokenText, chat_logprobs, prompt_logprobs
from quire.values import TokenLogprobs


class Usage:
    """Tokens of one HTTP request: prompts once each, answers all."""

    __slots__ = ("_cached", "_counted", "completion", "prompt")

    def __init__(self, job: Job) -> None:
        self.prompt = sum(len(call.prompt) for call in job.calls)
        self.completion = 0
        self._counted = not job.scored_only
        self._cached: dict[int, int] = {}

    def add(self, delta: Delta) -> None:
        if self._counted:
            self.completion += len(delta.tokens)
        if delta.cached:
            self._cached[delta.index] = delta.cached

    def cached(self, n: int) -> int:
        """Prompt tokens that were not computed: of each prompt's first answer, for the others share its pages."""
        return sum(tokens for index, tokens in self._cached.items() if index % n == 0)

    def of(self, n: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached(n)},
        }


class Gathered:
    """One choice, put together from its deltas."""

    __slots__ = ("_texts", "finish_reason", "logprobs", "prompt_logprobs", "stop_reason", "tokens")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def text(self) -> str:
        return "".join(self._texts)


def completion(job: Job, choices: Sequence[Gathered], usage: Usage, token_text: TokenText, by: str) -> dict[str, Any]:
    """A text_completion object. `by` is the system fingerprint."""
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": [
            _completion_choice(job, i, one, choices[i - i % job.n].prompt_logprobs, token_text)
            for i, one in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": by,
        "usage": usage.of(job.n),
        "kv_transfer_params": None,
        "metrics": None,
    }


def _completion_choice(
    job: Job, index: int, made: Gathered, before: Sequence[Score], token_text: TokenText
) -> dict[str, Any]:
    call = job.calls[index // job.n]
    prompt, text, tokens, scores = call.prompt, made.text, made.tokens, made.logprobs
    if job.scored_only:
        text, tokens, scores = "", [], []
    logprobs = None
    if job.top is not None:
        teller = TextLogprobs(token_text, as_ids=job.as_ids)
        logprobs = teller.of([*prompt, *tokens], [*before, *scores]) if job.echo else teller.of(tokens, scores)
    return {
        "index": index,
        "text": (call.text or "") + text if job.echo else text,
        "logprobs": logprobs,
        "finish_reason": "length" if job.scored_only else made.finish_reason,
        "stop_reason": None if job.scored_only else made.stop_reason,
        "token_ids": list(tokens) if job.token_ids else None,
        "prompt_logprobs": _of_prompt(job, before, token_text),
        "prompt_token_ids": list(prompt) if job.token_ids else None,
    }


def chat(job: Job, choices: Sequence[Gathered], usage: Usage, token_text: TokenText, by: str) -> dict[str, Any]:
    """A chat.completion object. `by` is the system fingerprint."""
    return {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": [_chat_choice(job, i, one, token_text) for i, one in enumerate(choices)],
        "service_tier": None,
        "system_fingerprint": by,
        "usage": usage.of(job.n),
        "prompt_logprobs": _of_prompt(job, choices[0].prompt_logprobs, token_text),
        "prompt_token_ids": list(job.calls[0].prompt) if job.token_ids else None,
        "kv_transfer_params": None,
        "metrics": None,
    }


def _chat_choice(job: Job, index: int, made: Gathered, token_text: TokenText) -> dict[str, Any]:
    logprobs = None
    if job.top is not None:
        logprobs = chat_logprobs(made.logprobs, job.top, token_text, as_ids=job.as_ids)
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": (job.calls[0].text or "") + made.text if job.echo else made.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        },
        "logprobs": logprobs,
        "finish_reason": made.finish_reason,
        "stop_reason": made.stop_reason,
        "token_ids": made.tokens if job.token_ids else None,
    }


def generated(job: Job, made: Gathered, seconds: float) -> dict[str, Any]:
    """The answer of /v1/generate."""
    return {
        "request_id": job.id,
        "text": made.text,
        "generated_tokens": len(made.tokens),
        "latency_ms": round(seconds * 1000, 3),
        "finish_reason": made.finish_reason,
        "model": job.model,
    }


def _of_prompt(job: Job, scores: Sequence[Score], token_text: TokenText) -> list[dict[str, Any] | None] | None:
    return None if job.prompt_top is None else prompt_logprobs(scores, job.prompt_top, token_text)
