"""What a request asks for and what comes back: frozen values shared by every room. No torch, no I/O.

Names are vLLM's where users know them (`SamplingParams`, `RequestOutput`, `CompletionOutput`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.errors import InvalidRequest

MANY = 1 << 30
"""'No limit', as a number: off is a degenerate value of the only path."""

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, natural log, of the model's raw distribution (as vLLM's default).

    `top` holds (token id, logprob), best first: as many as were asked for, without the chosen token added.
    `rank` is 1 for the most likely token.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field means what it means in vLLM.

    `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off; `temperature` 0 is greedy. `seed` None lets the engine
    draw one. `stop` strings are found in text and belong to the rim; everything else reaches the executor.
    `max_tokens` None means as many as the context allows. `bad_words` are text too: the rim spells them as
    `bad_words_token_ids`, token sequences of which none may be completed in the output.

    Raises InvalidRequest naming the field, also for NaN and infinities.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # vLLM takes a lone string too
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids or ())))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        for name, low, high in _RANGES:
            _within(name, getattr(self, name), low, high)
        if self.repetition_penalty <= 0:
            raise InvalidRequest("repetition_penalty must be above 0", param="repetition_penalty")
        if self.top_p <= 0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if any(not s for s in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias[{token}]", bias, -100.0, 100.0, param="logit_bias")
        if any(not word for word in self.bad_words_token_ids):
            raise InvalidRequest("bad words must not be empty", param="bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 1024),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, MANY),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("max_tokens", 1, MANY),
    ("min_tokens", 0, MANY),
    ("logprobs", -1, MANY),
    ("prompt_logprobs", -1, MANY),
)


def _within(name: str, value: float | None, low: float, high: float, *, param: str | None = None) -> None:
    """Written so that NaN fails: every comparison with NaN is false."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {type(value).__name__}", param=param or name)
    if not (low <= value <= high):
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=param or name)


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine is asked: token ids in, token ids out. Text lives at the rim.

    prompt: token ids, at least one. max_new: how many tokens at most may follow. stop: token ids that end the
    sequence (end-of-text ids included unless ignored). choice: which of `n` answers this is; noise is keyed by
    (seed, choice, position). leader: id of the first of the n, whose prompt pages the others wait for.
    priority: lower is sooner. deadline: in seconds of the engine's clock. salt: keeps prefix reuse apart.
    """

    id: str
    prompt: tuple[int, ...]
    max_new: int
    sampling: SamplingParams = GREEDY
    stop: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    leader: str | None = None
    priority: int = 0
    deadline: float = math.inf
    salt: str = ""


class Tokens(NamedTuple):
    """What one request got from one step. `finish` is None while it goes on.

    `prompt_logprobs` come with the chunk that computed them (position 0 has none). `cached` counts the prompt
    tokens whose K/V came from the prefix cache; `error` says what went wrong when finish is 'error'.
    """

    id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt (vLLM's shape)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers (vLLM's shape)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
