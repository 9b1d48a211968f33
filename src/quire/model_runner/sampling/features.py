"""How each row is sampled, as numpy columns, and which features it uses. No torch.

A feature is a bit: a step ORs the bits of its rows and runs only what some row asks for, so that a greedy batch is one
argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.model_runner.sampling.noise import stream
from quire.scheduler.plan import NewSequence
from quire.token_masks import token_array
from quire.types import UNLIMITED, SamplingParams

RANDOM, TRUNCATED, ALLOWED, BANNED, BIASED, PENALISED, SCORED, SCORED_WIDE, MASKED = (1 << i for i in range(9))
"""Samples at a temperature; truncates; allowed_token_ids; tokens that may be forbidden (bad words, min_tokens);
logit_bias; penalties; log-probabilities of up to MAX_LOGPROBS tokens; of more; a grammar's mask, of steps only."""

EDITED = ALLOWED | BANNED | BIASED | PENALISED | MASKED
"""Those that change logits before they are sampled from."""

DRAFT_FEATURES = RANDOM | TRUNCATED | (EDITED & ~MASKED)
"""Those that a draft is sampled with."""

MAX_LOGPROBS = 32
"""Most likely tokens whose log-probabilities a device finds by itself. For more, the logits are copied to the host."""


class Column(NamedTuple):
    """A number of every row, on the host and on the device.

    read: its value for a row's parameters. off: the value that changes nothing; with any other, the row has `feature`.
    dtype: on the host; on the device whole numbers are int32 and others float32.
    """

    feature: int
    dtype: type[np.generic]
    off: float
    read: Callable[[SamplingParams], float]

    @property
    def is_integer(self) -> bool:
        """Whether its values are whole numbers."""
        return issubclass(self.dtype, np.integer)


def count_on_device(count: int | None) -> int:
    """`count`, where a device finds log-probabilities of so many likeliest tokens by itself; -1 where there are none to
    find, or too many (`count` -1: of all)."""
    return -1 if count is None or count > MAX_LOGPROBS else count


COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "temperature": Column(RANDOM, np.float32, 0.0, lambda s: 0.0 if s.greedy else s.temperature),
        "top_k": Column(TRUNCATED, np.int64, UNLIMITED, lambda s: s.top_k if s.top_k > 0 else UNLIMITED),
        "top_p": Column(TRUNCATED, np.float64, 2.0, lambda s: s.top_p if s.top_p < 1.0 else 2.0),
        "min_p": Column(TRUNCATED, np.float32, 0.0, attrgetter("min_p")),
        "repetition_penalty": Column(PENALISED, np.float32, 1.0, attrgetter("repetition_penalty")),
        "frequency_penalty": Column(PENALISED, np.float32, 0.0, attrgetter("frequency_penalty")),
        "presence_penalty": Column(PENALISED, np.float32, 0.0, attrgetter("presence_penalty")),
        "repeat_last_n": Column(
            PENALISED, np.int64, UNLIMITED, lambda s: s.repeat_last_n if s.repeat_last_n >= 0 else UNLIMITED
        ),
        "logprobs": Column(SCORED, np.int64, -1, lambda s: count_on_device(s.logprobs)),
    }
)
"""By name, which is that of the field of SamplingParams, and of `ops.triton.sampler.SamplingTensors` or of its
penalties."""


class SamplingExtras(NamedTuple):
    """The parameters of one row that are lists. Most rows have none."""

    allowed: bytes | None = None
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] = (np.zeros(0, np.int64), np.zeros(0, np.float32))
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: npt.NDArray[np.int64] = np.zeros(0, np.int64)


NO_EXTRAS = SamplingExtras()

LISTS = ("allowed_words", "num_bias", "num_stop", "num_bad_words", "bad_word_length")
"""Sizes of the sections of `pack_lists`, in order; the last one is the tokens of the longest bad word."""


class SamplingFeatures:
    """How each of `count` rows is sampled: `bits` of its features, and `columns` [count] by name."""

    def __init__(self, count: int) -> None:
        self.bits = np.zeros(count, dtype=np.int32)
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.full(count, each.off, dtype=each.dtype) for name, each in COLUMNS.items()
        }
        self.min_tokens = np.zeros(count, dtype=np.intp)
        self.logprobs = np.zeros(count, dtype=np.intp)
        self.stream = np.zeros(count, dtype=np.uint32)
        self.prompt_logprobs: list[int | None] = [None] * count
        self.extras: list[SamplingExtras] = [NO_EXTRAS] * count

    def open(self, one: NewSequence) -> None:
        """Set the row of a new sequence."""
        row = one.row
        s = one.sampling
        banned = bool(s.bad_words_token_ids) or (s.min_tokens > 0 and bool(one.stop_token_ids))
        bits = (
            (s.allowed_token_ids is not None) * ALLOWED
            | banned * BANNED
            | bool(s.logit_bias) * BIASED
            | (s.logprobs is not None and count_on_device(s.logprobs) < 0) * SCORED_WIDE
        )
        for name, each in COLUMNS.items():
            value = each.read(s)
            self.columns[name][row] = value
            bits |= (value != each.off) * each.feature
        # Truncation never removes the likeliest token.
        self.bits[row] = bits & ~TRUNCATED if s.greedy else bits
        self.min_tokens[row] = s.min_tokens
        self.logprobs[row] = 0 if s.logprobs is None else s.logprobs
        self.stream[row] = 0 if s.greedy else stream(one.seed, one.choice)
        self.prompt_logprobs[row] = s.prompt_logprobs
        plain = not (banned or s.logit_bias) and s.allowed_token_ids is None
        self.extras[row] = NO_EXTRAS if plain else extras(one)

    def reset(self) -> None:
        """No row has a feature."""
        self.bits[:] = 0
        self.extras = [NO_EXTRAS] * len(self.extras)


def extras(one: NewSequence) -> SamplingExtras:
    """The lists of a new sequence's parameters."""
    s = one.sampling
    return SamplingExtras(
        allowed=None if s.allowed_token_ids is None else bitmask(s.allowed_token_ids),
        bias=(np.array(list(s.logit_bias), np.int64), np.array(list(s.logit_bias.values()), np.float32)),
        bad_words=tuple(s.bad_words_token_ids),
        stop=np.array(sorted(one.stop_token_ids), np.int64),
    )


def pack_lists(extras: SamplingExtras) -> tuple[npt.NDArray[np.int32], tuple[int, ...]]:
    """The lists of a row as one int32 array, as devices read them, and the sizes of its sections (see LISTS).

    Sections: the bits of the allowed tokens; the biased tokens; their biases, float32; stop tokens; and a line for each
    bad word, filled with -1 in front.
    """
    allowed = np.frombuffer(pad_to_words(extras.allowed or b""), dtype=np.int32)
    biased, amounts = extras.bias
    longest = max(map(len, extras.bad_words), default=0)
    words = np.full((len(extras.bad_words), longest), -1, dtype=np.int32)
    for i, word in enumerate(extras.bad_words):
        words[i, longest - len(word) :] = word
    sections = (allowed, biased.astype(np.int32), amounts.view(np.int32), extras.stop.astype(np.int32), words.ravel())
    sizes = (len(allowed), len(biased), len(extras.stop), len(words), longest)
    return np.concatenate(sections), sizes


def pad_to_words(bits: bytes) -> bytes:
    """A bit string of whole 32-bit words."""
    return bits.ljust(-(-len(bits) // 4) * 4, b"\0")


def bitmask(tokens: tuple[int, ...]) -> bytes:
    """A `Mask` that allows `tokens`: bit t of the little-endian bit string is token t."""
    ids = token_array(tokens)
    bits = np.zeros(int(ids.max()) + 1, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()
