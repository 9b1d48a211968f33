"""How each row is sampled, as numpy columns, and which rows want anything special at all. No torch.

One bit a trait: a step ORs the bits of its rows and runs only what some row asks for, so that a greedy batch is an
argmax without a feature being asked about.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.model_runner.sampling.noise import stream
from quire.scheduler.plan import NewSequence

RANDOM, TRUNCATED, ALLOWED, BANNED, BIASED, PENALISED, SCORED = (1 << i for i in range(7))
"""Samples at a temperature; truncates (top_k, top_p, min_p); allowed_token_ids; tokens that may be forbidden
(bad words, min_tokens); logit_bias; penalties; log-probabilities wanted."""

ALL_FEATURES = -1
"""`logprobs` -1: of the whole vocabulary."""


class SamplingExtras(NamedTuple):
    """The settings of one row that are lists. Empty for almost everybody."""

    allowed: bytes | None = None
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] = (np.zeros(0, np.int64), np.zeros(0, np.float32))
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: npt.NDArray[np.int64] = np.zeros(0, np.int64)


NO_EXTRAS = SamplingExtras()


class SamplingFeatures:
    """Columns over `count` rows."""

    def __init__(self, count: int) -> None:
        self.bits = np.zeros(count, dtype=np.int32)
        self.temperature = np.ones(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.top_p = np.ones(count, dtype=np.float64)
        self.min_p = np.zeros(count, dtype=np.float32)
        self.presence = np.zeros(count, dtype=np.float32)
        self.frequency = np.zeros(count, dtype=np.float32)
        self.repetition = np.ones(count, dtype=np.float32)
        self.min_tokens = np.zeros(count, dtype=np.intp)
        self.logprobs = np.zeros(count, dtype=np.intp)
        self.stream = np.zeros(count, dtype=np.uint32)
        self.prompt_logprobs: list[int | None] = [None] * count
        self.extras: list[SamplingExtras] = [NO_EXTRAS] * count

    def open(self, one: NewSequence) -> None:
        row, s = one.row, one.sampling
        penalised = bool(s.presence_penalty or s.frequency_penalty) or s.repetition_penalty != 1.0
        banned = bool(s.bad_words_token_ids) or (s.min_tokens > 0 and bool(one.stop_token_ids))
        truncated = s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0
        self.bits[row] = (
            (0 if s.greedy else RANDOM | truncated * TRUNCATED)
            | (s.allowed_token_ids is not None) * ALLOWED
            | banned * BANNED
            | bool(s.logit_bias) * BIASED
            | penalised * PENALISED
            | (s.logprobs is not None) * SCORED
        )
        self.temperature[row] = s.temperature
        self.top_k[row] = max(s.top_k, 0)
        self.top_p[row], self.min_p[row] = s.top_p, s.min_p
        self.presence[row], self.frequency[row] = s.presence_penalty, s.frequency_penalty
        self.repetition[row] = s.repetition_penalty
        self.min_tokens[row] = s.min_tokens
        self.logprobs[row] = 0 if s.logprobs is None else s.logprobs
        self.stream[row] = 0 if s.greedy else stream(one.seed, one.choice)
        self.prompt_logprobs[row] = s.prompt_logprobs
        plain = not (banned or s.logit_bias) and s.allowed_token_ids is None
        self.extras[row] = NO_EXTRAS if plain else extras(one)

    def reset(self) -> None:
        self.bits[:] = 0
        self.extras = [NO_EXTRAS] * len(self.extras)


def extras(one: NewSequence) -> SamplingExtras:
    s = one.sampling
    return SamplingExtras(
        allowed=None if s.allowed_token_ids is None else bitmask(s.allowed_token_ids),
        bias=(np.array(list(s.logit_bias), np.int64), np.array(list(s.logit_bias.values()), np.float32)),
        bad_words=tuple(s.bad_words_token_ids),
        stop=np.array(sorted(one.stop_token_ids), np.int64),
    )


def bitmask(tokens: tuple[int, ...]) -> bytes:
    """A `Mask` that allows `tokens`: bit t of the little-endian bit string is token t."""
    bits = np.zeros(max(tokens) + 1, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()
