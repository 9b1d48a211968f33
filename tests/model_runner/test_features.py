"""What a row's settings ask of a step: no more than they need, for every bit costs the whole step work."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from quire.engine.engine import in_vocabulary
from quire.model_runner.sampling.features import (
    ALLOWED,
    BANNED,
    BIASED,
    COLUMNS,
    PENALISED,
    RANDOM,
    SCORED,
    TRUNCATED,
    SamplingFeatures,
    bitmask,
)
from quire.scheduler.plan import NewSequence
from quire.types import SamplingParams

ASKED: list[tuple[dict[str, Any], int]] = [
    ({"temperature": 0.0}, 0),
    ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.5}, 0),
    ({"temperature": 1.0}, RANDOM),
    ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, RANDOM),
    ({"temperature": 1.0, "top_k": -1}, RANDOM),
    ({"temperature": 1.0, "top_p": 0.99}, RANDOM | TRUNCATED),
    ({"temperature": 1.0, "top_k": 1}, RANDOM | TRUNCATED),
    ({"temperature": 1.0, "min_p": 0.01}, RANDOM | TRUNCATED),
    ({"temperature": 0.0, "logprobs": 0}, SCORED),
    ({"temperature": 0.0, "logit_bias": {3: 1.0}}, BIASED),
    ({"temperature": 0.0, "allowed_token_ids": (1, 2)}, ALLOWED),
    ({"temperature": 0.0, "presence_penalty": 0.1}, PENALISED),
    ({"temperature": 0.0, "frequency_penalty": -0.1}, PENALISED),
    ({"temperature": 0.0, "repetition_penalty": 1.1}, PENALISED),
    ({"temperature": 0.0, "min_tokens": 2}, 0),
]


@pytest.mark.parametrize(("asked", "bits"), ASKED)
def test_a_row_has_the_features_that_its_settings_need_and_no_others(asked: dict[str, Any], bits: int) -> None:
    traits = SamplingFeatures(3)
    traits.open(NewSequence(1, (5, 6), 0, 2, SamplingParams(max_tokens=9, **asked)))
    assert traits.bits.tolist() == [0, bits, 0]


def test_min_tokens_bans_tokens_only_where_there_are_stop_tokens() -> None:
    traits = SamplingFeatures(2)
    least = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9)
    traits.open(NewSequence(0, (5,), 0, 1, least, stop_token_ids=frozenset({1})))
    traits.open(NewSequence(1, (5,), 0, 1, least))
    assert traits.bits.tolist() == [BANNED, 0]


def test_a_row_that_is_opened_again_keeps_nothing_of_the_one_before() -> None:
    traits, fresh = SamplingFeatures(1), SamplingFeatures(1)
    before = {"temperature": 0.7, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "presence_penalty": 1.0, "logprobs": 3}
    traits.open(
        NewSequence(0, (5,), 0, 1, SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.5, **before), seed=9)
    )
    after = NewSequence(0, (6,), 0, 1, SamplingParams(temperature=0.9), seed=4)
    traits.open(after)
    fresh.open(after)
    for name, value in (vars(fresh) | fresh.columns).items():
        if name != "columns":
            ours = traits.columns[name] if name in COLUMNS else getattr(traits, name)
            assert np.array_equal(ours, value) if isinstance(value, np.ndarray) else ours == value, name


def test_thousands_of_allowed_ids_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the check of their range and the row's mask, of each answer to a prompt."""
    packed, pack = list[int](), struct.pack

    def counted(form: str, *values: int) -> bytes:
        packed.append(len(values))
        return pack(form, *values)

    ids = range(3, 8003, 2)
    sampling = SamplingParams(allowed_token_ids=tuple(ids))
    allowed = sampling.allowed_token_ids
    assert allowed == tuple(ids)
    monkeypatch.setattr(struct, "pack", counted)
    for _ in range(2):
        assert in_vocabulary(allowed, 8002) and not in_vocabulary(allowed, 8001)
        mask = int.from_bytes(bitmask(allowed), "little")
    assert packed == [4000] and mask == sum(1 << each for each in ids)
