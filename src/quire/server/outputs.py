"""Whole answers: deltas gathered, and the JSON of completions and chat completions; log-probabilities in three formats.

`token_text` returns how a token is shown, as text, and as its exact bytes (`Backend.token_text`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from quire.frontend.interface import Delta
from quire.frontend.offload import PER_SCORE, PER_TOKEN
from quire.parsers.parts import PLAIN, Splitter, TextPart, joined
from quire.parsers.reasoning import ReasoningCounter
from quire.server.calls import Job
from quire.types import TokenLogprobs

TokenText = Callable[[int], tuple[str, bytes]]
Score = TokenLogprobs | None

# The lowest log-probability shown: JSON has no minus infinity.
_FLOOR = -9999.0


class Usage:
    """Counts the tokens of one HTTP request: each prompt once, and all answers."""

    __slots__ = ("_cached", "_counted", "_details", "_text", "_thinking", "_thoughts", "completion", "prompt")

    def __init__(self, job: Job, token_text: TokenText) -> None:
        self._text = token_text
        self._thinking = job.thinking
        self._thoughts: dict[int, ReasoningCounter] = {}
        self._details = {} if job.truncated is None else {"truncated_tokens": job.truncated}
        self._counted = not job.scored_only
        self._cached: dict[int, int] = {}
        self.prompt = sum(len(call.prompt) for call in job.calls)
        self.completion = 0

    def add(self, delta: Delta) -> None:
        """Count a delta's tokens."""
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
        """Prompt tokens that were not computed. Of n choices only the first counts: the others share its blocks."""
        return sum(tokens for index, tokens in self._cached.items() if index % n == 0)

    @property
    def reasoning(self) -> int:
        """Reasoning tokens, which `completion` includes."""
        return sum(thoughts.count for thoughts in self._thoughts.values())

    def to_json(self, n: int) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached(n), **self._details},
        }
        if self._thinking is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


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
        self.prompt_logprobs: Sequence[Score] = ()

    def add(self, delta: Delta) -> None:
        """Append a delta of this choice."""
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
        """The content."""
        return self._joined("content")

    @property
    def reasoning(self) -> str:
        """The text of the thoughts."""
        return self._joined("reasoning")

    def _joined(self, kind: str) -> str:
        return "".join(part.text for part in self._parts if part.kind == kind)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each tool call."""
        made: list[tuple[str, list[str]]] = []
        for part in self._parts:
            if part.kind == "call":
                made.append((part.text, []))
            elif part.kind == "arguments":
                made[part.call][1].append(part.text)
        return [(name, "".join(arguments)) for name, arguments in made]

    @property
    def parts(self) -> list[TextPart]:
        """All parts in order; neighbours of the same kind are joined."""
        return joined(self._parts)


def cost(job: Job, choices: Sequence[ChoiceBuilder]) -> int:
    """About how many bytes encoding these choices is worth (`frontend.offload`)."""
    top = 1 + max(job.top or 0, job.prompt_top or 0)
    tokens = sum(len(one.tokens) for one in choices)
    scores = sum(len(one.logprobs) + job.n * len(one.prompt_logprobs) for one in choices)
    return (
        PER_TOKEN * (tokens + shown_prompt(job) * job.n)
        + PER_SCORE * top * scores
        + sum(len(one.pooled) for one in choices)
    )


def shown_prompt(job: Job) -> int:
    """Tokens of prompts that answers repeat, once in each choice."""
    return sum(len(call.prompt) for call in job.calls) if job.echo or job.token_ids else 0


def completion(
    job: Job, choices: Sequence[ChoiceBuilder], usage: Usage, token_text: TokenText, by: str
) -> dict[str, Any]:
    """A text_completion object. by: the system fingerprint."""
    made = [
        _completion_choice(job, i, one, choices[i - i % job.n].prompt_logprobs, token_text)
        for i, one in enumerate(choices)
    ]
    return _answer("text_completion", job, made, usage, by)


def _completion_choice(
    job: Job, index: int, made: ChoiceBuilder, prompt_scores: Sequence[Score], token_text: TokenText
) -> dict[str, Any]:
    call = job.calls[index // job.n]
    text = "" if job.scored_only else made.text
    tokens = [] if job.scored_only else made.tokens
    scores = [] if job.scored_only else made.logprobs
    logprobs = None
    if job.top is not None:
        encoder = TextLogprobs(token_text, as_ids=job.as_ids)
        shown = ([*call.prompt, *tokens], [*prompt_scores, *scores]) if job.echo else (tokens, scores)
        logprobs = encoder.of(*shown)
    return {
        "index": index,
        "text": (call.text or "") + text if job.echo else text,
        "logprobs": logprobs,
        "finish_reason": "length" if job.scored_only else made.finish_reason,
        "stop_reason": None if job.scored_only else made.stop_reason,
        "token_ids": list(tokens) if job.token_ids else None,
        "prompt_logprobs": _prompt_logprobs_of(job, prompt_scores, token_text),
        "prompt_token_ids": list(call.prompt) if job.token_ids else None,
    }


def chat(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage, token_text: TokenText, by: str) -> dict[str, Any]:
    """A chat.completion object. by: the system fingerprint."""
    made = [_chat_choice(job, i, one, token_text) for i, one in enumerate(choices)]
    prompt = {
        "prompt_logprobs": _prompt_logprobs_of(job, choices[0].prompt_logprobs, token_text),
        "prompt_token_ids": list(job.calls[0].prompt) if job.token_ids else None,
    }
    return _answer("chat.completion", job, made, usage, by, prompt)


def _chat_choice(job: Job, index: int, made: ChoiceBuilder, token_text: TokenText) -> dict[str, Any]:
    logprobs = None
    if job.top is not None:
        logprobs = chat_logprobs(made.logprobs, job.top, token_text, as_ids=job.as_ids)
    calls = [
        {"id": job.tools.call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in made.calls
    ]
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


def finish_reason(reason: str | None, called: bool) -> str | None:
    """OpenAI's finish_reason of a chat answer. called: whether it calls tools."""
    return "tool_calls" if called and reason == "stop" else reason


def _answer(
    kind: str, job: Job, choices: list[dict[str, Any]], usage: Usage, by: str, prompt: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The object around choices. prompt: fields of the prompt that come after usage."""
    return {
        "id": job.id,
        "object": kind,
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": by,
        "usage": usage.to_json(job.n),
        **(prompt or {}),
        "kv_transfer_params": None,
        "metrics": None,
        **({} if job.params is None else {"sampling_params": job.params}),
    }


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


# ---------------------------------------------------------------- log-probabilities


class TextLogprobs:
    """The format of completions: four parallel lists. One for each choice, since offsets go on from chunk to chunk.

    A token that is part of a character is written `bytes:\\xe2\\x82`, as OpenAI does, so that keys differ.
    """

    __slots__ = ("_as_ids", "_decode", "_offset", "_text")

    def __init__(self, token_text: TokenText, *, as_ids: bool = False) -> None:
        self._text = token_text
        self._as_ids = as_ids
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def of(self, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, list[Any]]:
        """The lists for `tokens`. scores: of each; None where there is none, as for a prompt's first token."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decode(self._text(token)[1]))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "tokens": [self._name(token) for token in tokens],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
        }

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        named = {self._name(score.token): _finite(score.logprob)}
        return named | {self._name(token): _finite(logprob) for token, logprob in score.top}

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text, data = self._text(token)
        if "�" not in text:
            return text
        return text if text.encode() == data else "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def chat_logprobs(
    scores: Sequence[TokenLogprobs], top: int, token_text: TokenText, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """The format of chat completions: an object for each token, with its exact bytes and its `top` alternatives."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(token)
        return {
            "token": f"token_id:{token}" if as_ids else text,
            "logprob": _finite(logprob),
            "bytes": list(data),
        }

    return {
        "content": [
            one(score.token, score.logprob) | {"top_logprobs": [one(*best) for best in score.top[:top]]}
            for score in scores
        ]
    }


def prompt_logprobs(scores: Sequence[Score], top: int, token_text: TokenText) -> list[dict[str, Any] | None]:
    """vLLM's format for prompts: by token id, the token itself and its `top` alternatives."""
    return [None if score is None else _ranked(score, top, token_text) for score in scores]


def _prompt_logprobs_of(job: Job, scores: Sequence[Score], token_text: TokenText) -> list[dict[str, Any] | None] | None:
    return None if job.prompt_top is None else prompt_logprobs(scores, job.prompt_top, token_text)


def _ranked(score: TokenLogprobs, top: int, token_text: TokenText) -> dict[str, Any]:
    ranked = [(score.token, score.logprob, score.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(score.top[:top], 1)]
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token)[0]}
        for token, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    # The floor for NaN too.
    return logprob if logprob > _FLOOR else _FLOOR
