"""Rows and a plan's shape become the RaggedBatch that the model is fed. Array arithmetic only: no per-token Python."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.ops.ragged import RaggedBatch


def ragged(rows: RowState, shape: StepShape, device: torch.device, length: Ints | None = None) -> RaggedBatch:
    """What each span feeds: `(history + drafts)[length : length + n]`, and where its K/V goes.

    A row past its limit may reach past its pages, where the table says SPARE, and past the model's context, where
    positions stay at the last one: nobody reads what it computes. length: by row, where spans begin, if that is not
    what the rows have computed: a draft model is somewhere else.
    """
    size = rows.block_size
    start = (rows.num_computed if length is None else length)[shape.row]
    kv_len = start + shape.num_tokens
    place = start[shape.token_span] + shape.token_offset
    page = rows.block_table[shape.token_row, place // size].astype(np.int64)
    longest = int(kv_len.max())
    host = (
        rows.tokens[shape.token_row, place].astype(np.int64),
        np.minimum(place, rows.max_model_len - 1),
        page * size + place % size,
        shape.query_start,
        kv_len.astype(np.int32),
        rows.block_table[shape.row, : -(-longest // size)],
    )
    tokens, positions, slots, query_start, lengths, table = (torch.from_numpy(a).to(device) for a in host)
    return RaggedBatch(tokens, positions, slots, query_start, lengths, table, size, shape.max_query, longest)


def blank(arena: DeviceState, rows: RowState, tokens: int) -> RaggedBatch:
    """A batch of the most that a step has, at a fixed place on the arena's device, for `DeviceSteps.stage` to fill."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=arena.device)

    return RaggedBatch(
        tokens=zeros(tokens),
        positions=zeros(tokens),
        slots=zeros(tokens),
        query_start=arena.step.query_start,
        kv_len=zeros(arena.spans, dtype=torch.int32),
        page_table=zeros(arena.spans, arena.num_table_columns, dtype=torch.int32),
        page_size=rows.block_size,
        max_query=tokens,
        max_kv=rows.max_model_len,
    )


def part(whole: RaggedBatch, tokens: int, spans: int, most: int, wanted: Tensor | None) -> RaggedBatch:
    """The first so many tokens and spans of a batch, none of which has more than `most`."""
    return RaggedBatch(
        tokens=whole.tokens[:tokens],
        positions=whole.positions[:tokens],
        slots=whole.slots[:tokens],
        query_start=whole.query_start[: spans + 1],
        kv_len=whole.kv_len[:spans],
        page_table=whole.page_table[:spans],
        page_size=whole.page_size,
        max_query=most,
        max_kv=whole.max_kv,
        output_indices=wanted,
    )
