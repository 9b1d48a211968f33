"""Sizes that settings leave open follow from the device and the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.assembly.limits import Limits, resolve
from quire.config import Settings
from quire.errors import InvalidConfig
from quire.types import UNLIMITED


def resolved(device: str = "cpu", context: int = 4096, **options: Any) -> Limits:
    spec: Any = SimpleNamespace(
        architecture="LlamaForCausalLM", context=context, recurrent=None, generates=True, bidirectional=False
    )
    return resolve(Settings.of(**options), spec, torch.device(device))


@pytest.mark.parametrize(
    ("device", "want"),
    [
        ("cpu", Limits(4096, 16, 64, 64, 0, 512, 512)),
        ("cuda", Limits(4096, 64, 256, 512, 1, 8192, 8192)),
    ],
)
def test_what_is_not_set_follows_from_device_and_model(device: str, want: Limits) -> None:
    assert resolved(device) == want


@pytest.mark.parametrize(("lookahead", "rows"), [(0, 8), (1, 16), (3, 32)])
def test_each_step_in_flight_may_have_rows_of_its_own(lookahead: int, rows: int) -> None:
    """A sequence that ends keeps its row until the last step in flight is over; another one needs its place before."""
    assert resolved(max_num_seqs=8, lookahead=lookahead).num_rows == rows


@pytest.mark.parametrize(("tokens", "most"), [(None, 4096), (64, 4096), (10_000, 10_000)])
def test_without_chunks_a_step_holds_the_longest_prompt(tokens: int | None, most: int) -> None:
    found = resolved(enable_chunked_prefill=False, max_num_batched_tokens=tokens)
    assert (found.max_num_batched_tokens, found.max_chunk_tokens) == (most, UNLIMITED)


def test_a_step_has_a_token_for_each_sequence_and_chunks_may_be_smaller() -> None:
    found = resolved(max_num_seqs=100, max_num_batched_tokens=100, long_prefill_token_threshold=32)
    assert (found.max_num_batched_tokens, found.max_chunk_tokens) == (100, 32)
    assert resolved(max_num_seqs=600).max_num_batched_tokens == 600


def test_a_context_beyond_the_models_is_refused() -> None:
    assert resolved(max_model_len=4096).max_model_len == 4096
    with pytest.raises(InvalidConfig, match="above the 4096 tokens"):
        resolved(max_model_len=4097)
