"""Whole answers: deltas gathered, and the JSON that clients get when they do not stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import PLAIN, Splitter, TextPart, joined
from quire.parsers.reasoning import ReasoningCounter
from quire.server.calls import Job
from quire.server.logprobs import Score, TextLogprobs, TokenText, chat_logprobs, prompt_logprobs
from quire.types import TokenLogprobs


class Usage:
    """Tokens of one HTTP request: prompts once each, answers all."""

    __slots__ = ("_cached", "_counted", "_details", "_text", "_thinking", "_thoughts", "completion", "prompt")

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._text, self._thinking = token_text, job.thinking
        self._thoughts: dict[int, ReasoningCounter] = {}
        self._details = {} if job.truncated is None else {"truncated_tokens": job.truncated}
        self.prompt = sum(len(call.prompt) for call in job.calls)
        self.completion = 0
        self._counted = not job.scored_only
        self._cached: dict[int, int] = {}

    def add(self, delta: Delta) -> None:
        if self._counted:
            self.completion += len(delta.tokens)
        if delta.num_cached:
            self._cached[delta.index] = delta.num_cached
        if self._thinking is not None:
            thoughts = self._thoughts.get(delta.index)
            if thoughts is None:
                thoughts = self._thoughts[delta.index] = ReasoningCounter(inside=self._thinking)
            if not thoughts.over:
                thoughts.feed([self._text(token)[0] for token in delta.tokens])

    def cached(self, n: int) -> int:
        """Prompt tokens that were not computed: of each prompt's first answer, for the others share its pages."""
        return sum(tokens for index, tokens in self._cached.items() if index % n == 0)

    def to_json(self, n: int) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached(n), **self._details},
        }
        if self._thinking is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage

    @property
    def reasoning(self) -> int:
        """Tokens of thoughts, which `completion` counts too."""
        return sum(thoughts.count for thoughts in self._thoughts.values())


class ChoiceBuilder:
    """One choice, put together from its deltas."""

    __slots__ = (
        "_parts",
        "_splitter",
        "finish_reason",
        "logprobs",
        "pooled",
        "prompt_logprobs",
        "stop_reason",
        "tokens",
    )

    def __init__(self, splitter: Splitter = PLAIN) -> None:
        self._splitter = splitter
        self._parts: list[TextPart] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.pooled = b""
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def add(self, delta: Delta) -> None:
        self.pooled = self.pooled or delta.pooled
        self._parts += self._splitter.feed(delta.text)
        if delta.finish_reason is not None:
            self._parts += self._splitter.flush()
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def text(self) -> str:
        """What is said."""
        return self._of("content")

    @property
    def reasoning(self) -> str:
        return self._of("reasoning")

    def _of(self, kind: str) -> str:
        return "".join(part.text for part in self._parts if part.kind == kind)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each tool called."""
        made: list[tuple[str, list[str]]] = []
        for part in self._parts:
            if part.kind == "call":
                made.append((part.text, []))
            elif part.kind == "arguments":
                made[part.call][1].append(part.text)
        return [(name, "".join(arguments)) for name, arguments in made]

    @property
    def parts(self) -> list[TextPart]:
        """All of it in order, neighbours of a kind as one."""
        return joined(self._parts)


def cost(job: Job, choices: Sequence[ChoiceBuilder]) -> int:
    """About how many bytes telling them is worth (backends.offload)."""
    top = 1 + max(job.top or 0, job.prompt_top or 0)
    tokens = sum(len(one.tokens) for one in choices)
    scores = sum(len(one.logprobs) + job.n * len(one.prompt_logprobs) for one in choices)
    return (
        PER_TOKEN * (tokens + shown_prompt(job) * job.n)
        + PER_SCORE * top * scores
        + sum(len(one.pooled) for one in choices)
    )


def shown_prompt(job: Job) -> int:
    """Tokens of prompts that answers repeat, each of them once a choice."""
    return sum(len(call.prompt) for call in job.calls) if job.echo or job.token_ids else 0


def completion(
    job: Job, choices: Sequence[ChoiceBuilder], usage: Usage, token_text: TokenText, by: str
) -> dict[str, Any]:
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
        "usage": usage.to_json(job.n),
        "kv_transfer_params": None,
        "metrics": None,
        **params_of(job),
    }


def params_of(job: Job) -> dict[str, Any]:
    """The sampling parameters, where they are to be told."""
    return {} if job.params is None else {"sampling_params": job.params}


def _completion_choice(
    job: Job, index: int, made: ChoiceBuilder, before: Sequence[Score], token_text: TokenText
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


def chat(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage, token_text: TokenText, by: str) -> dict[str, Any]:
    """A chat.completion object. `by` is the system fingerprint."""
    return {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": [_chat_choice(job, i, one, token_text) for i, one in enumerate(choices)],
        "service_tier": None,
        "system_fingerprint": by,
        "usage": usage.to_json(job.n),
        "prompt_logprobs": _of_prompt(job, choices[0].prompt_logprobs, token_text),
        "prompt_token_ids": list(job.calls[0].prompt) if job.token_ids else None,
        "kv_transfer_params": None,
        "metrics": None,
        **params_of(job),
    }


def _chat_choice(job: Job, index: int, made: ChoiceBuilder, token_text: TokenText) -> dict[str, Any]:
    logprobs = None
    if job.top is not None:
        logprobs = chat_logprobs(made.logprobs, job.top, token_text, as_ids=job.as_ids)
    calls = [tool_call(job, name, arguments) for name, arguments in made.calls]
    content = (job.calls[0].text or "") + made.text if job.echo else made.text
    thoughts = (made.reasoning or None) if job.reasons else None
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": calls,
            "reasoning": thoughts,
            **({} if job.thinking is None else {"reasoning_content": thoughts}),
        },
        "logprobs": logprobs,
        "finish_reason": finish_reason(made.finish_reason, bool(calls)),
        "stop_reason": made.stop_reason,
        "token_ids": made.tokens if job.token_ids else None,
    }


def tool_call(job: Job, name: str, arguments: str) -> dict[str, Any]:
    return {"id": job.tools.call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def finish_reason(reason: str | None, called: bool) -> str | None:
    """An answer that ended by itself after calls ended for them."""
    return "tool_calls" if called and reason == "stop" else reason


def generated(job: Job, made: ChoiceBuilder, seconds: float) -> dict[str, Any]:
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
