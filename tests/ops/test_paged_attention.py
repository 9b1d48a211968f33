"""Spans attended together: of about one length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.paged_attention import WORTH, PagedAttentionMetadata, alike
from quire.ops.ragged import RaggedBatch


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80))
def test_every_span_is_in_one_group_and_little_is_read_in_vain(lengths: list[int]) -> None:
    groups = alike(list(range(len(lengths))), lengths)
    assert sorted(span for group in groups for span in group) == list(range(len(lengths)))
    for group in groups:
        assert group == sorted(group)
        held = [lengths[span] for span in group]
        joined = len({(n.bit_length(), n >> max(0, n.bit_length() - 2)) for n in held}) - 1
        assert max(held) * len(held) - sum(held) <= sum(held) / 2 + WORTH * joined


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([100] * 8, 1),
        ([100, 101, 140, 120], 1),
        ([100] * 8 + [1900], 2),
        ([40] * 40 + [400] * 40 + [2000] * 2, 3),
        ([1, 500], 1),
        ([1, 1000], 2),
    ],
)
def test_spans_of_very_different_lengths_are_in_different_groups(lengths: list[int], groups: int) -> None:
    assert len(alike(list(range(len(lengths))), lengths)) == groups


def test_a_padded_step_of_no_tokens_has_no_groups() -> None:
    """As an executor that runs ahead measures steps before there are sequences."""
    none, spans = torch.zeros(8, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    table, starts = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    batch = RaggedBatch(
        tokens=none, positions=none, slots=none, query_start=starts, kv_len=spans, page_table=table,
        max_query=1, max_kv=0, page_size=16,
    )  # fmt: skip
    for cut in (PagedAttentionMetadata.of(batch), PagedAttentionMetadata.cut(batch, 64)):
        assert not cut.groups and not len(cut.begun)
