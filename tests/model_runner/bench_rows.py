"""A store with rows opened in the middle of their lives, ready to be sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.model_runner.row_state import RowState, StepShape
from quire.scheduler.plan import NewSequence, Plan, Span


def opened(
    opens: Sequence[NewSequence], drafts: Sequence[Sequence[int]] = (), *, context: int = 64, page_size: int = 4
) -> tuple[RowState, StepShape]:
    """Each row has one token to feed, and its drafts."""
    depth = len(drafts[0]) if drafts else 0
    rows = RowState(1 + max(o.row for o in opens), context, page_size, depth)
    rows.apply_plan(Plan(tuple(opens), (), ()))
    which = np.array([o.row for o in opens])
    rows.set_drafts(which, np.array(drafts, np.int32).reshape(len(opens), depth), np.full(len(opens), depth))
    spans = tuple(Span(o.row, 1 + depth, 1 + depth, 1 + depth) for o in opens)
    return rows, rows.apply_plan(Plan((), (), spans))
