"""Rows and a plan's shape become the RaggedBatch that the model is fed. Array arithmetic only: no per-token Python."""

from __future__ import annotations

import numpy as np
import torch

from quire.ops.ragged import RaggedBatch
from quire.runner.rows import Ints, Rows, Shape


def ragged(rows: Rows, shape: Shape, device: torch.device, length: Ints | None = None) -> RaggedBatch:
    """What each span feeds: `(history + drafts)[length : length + n]`, and where its K/V goes.

    A row past its limit may reach past its pages, where the table says SPARE, and past the model's context, where
    positions stay at the last one: nobody reads what it computes. length: by row, where spans begin, if that is not
    what the rows have computed: a draft model is somewhere else.
    """
    size = rows.page_size
    start = (rows.length if length is None else length)[shape.row]
    kv_len = start + shape.n
    place = start[shape.token_span] + shape.token_at
    page = rows.pages[shape.token_row, place // size].astype(np.int64)
    longest = int(kv_len.max())
    host = (
        rows.tokens[shape.token_row, place].astype(np.int64),
        np.minimum(place, rows.max_model_len - 1),
        page * size + place % size,
        shape.query_start,
        kv_len.astype(np.int32),
        rows.pages[shape.row, : -(-longest // size)],
    )
    tokens, positions, slots, query_start, lengths, table = (torch.from_numpy(a).to(device) for a in host)
    return RaggedBatch(tokens, positions, slots, query_start, lengths, table, size, shape.max_query, longest)
