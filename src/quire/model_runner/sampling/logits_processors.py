"""What some rows do to their logits before anything is drawn: masks, bans, bias, penalties, in vLLM's order.

An edit changes the logits of the rows it is given, in place. Its settings come from the row's traits, and what depends
on the output so far from the row's history, drafts fed before the row included: there is nothing to keep in step, and
a preempted row that is opened again is penalised as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.features import ALLOWED, BANNED, BIASED, PENALISED
from quire.model_runner.sampling.noise import Floats, Ids
from quire.scheduler.plan import Mask

LogitsProcessor = Callable[[Floats, RowState, StepShape, Ids], None]
"""(logits [R, V], rows, shape, which of the R rows)."""


def mask(logits: Floats, masks: Iterable[tuple[int, Mask]]) -> None:
    """Forbid what each (row, bit string) does not allow; a mask shorter than the vocabulary allows nothing past it."""
    some = [(r, allowed) for r, allowed in masks if allowed is not None]
    if not some:
        return
    vocab = logits.shape[1]
    width = -(-vocab // 8)
    joined = b"".join([allowed[:width].ljust(width, b"\0") for _, allowed in some])
    forbidden = ~np.frombuffer(joined, np.uint8).reshape(len(some), width)
    bits = np.unpackbits(forbidden, axis=1, count=vocab, bitorder="little").view(np.bool_)
    for (r, _), where in zip(some, bits, strict=True):
        np.copyto(logits[r], -np.inf, where=where)  # several times as fast as an index


def allow(logits: Floats, rows: RowState, shape: StepShape, which: Ids) -> None:
    """allowed_token_ids."""
    mask(logits, ((r, rows.features.extras[shape.sample_row[r]].allowed) for r in which.tolist()))


def ban(logits: Floats, rows: RowState, shape: StepShape, which: Ids) -> None:
    """No stop token before min_tokens; no token that would complete a bad word of the output."""
    vocab = logits.shape[1]
    for r, row, output in _outputs(rows, shape, which):
        extras = rows.features.extras[row]
        if len(output) < rows.features.min_tokens[row]:
            logits[r, extras.stop[extras.stop < vocab]] = -np.inf
        for *head, tail in extras.bad_words:
            if tail < vocab and output[len(output) - len(head) :].tolist() == head:
                logits[r, tail] = -np.inf


def bias(logits: Floats, rows: RowState, shape: StepShape, which: Ids) -> None:
    """logit_bias."""
    vocab = logits.shape[1]
    for r in which.tolist():
        tokens, amounts = rows.features.extras[shape.sample_row[r]].bias
        logits[r, tokens[tokens < vocab]] += amounts[tokens < vocab]


def penalise(logits: Floats, rows: RowState, shape: StepShape, which: Ids) -> None:
    """Repetition (prompt and output: positive logits divided, negative multiplied), frequency, presence (output)."""
    columns = rows.features.columns
    for r, row, output in _outputs(rows, shape, which):
        line = logits[r]
        seen = rows.tokens[row, : rows.prompt_length[row] + len(output)]
        repeated = line[seen]
        by = columns["repetition_penalty"][row]
        line[seen] = np.where(repeated > 0, repeated / by, repeated * by)
        said, times = np.unique(output, return_counts=True)
        line[said] -= columns["frequency_penalty"][row] * times.astype(np.float32) + columns["presence_penalty"][row]


def _outputs(rows: RowState, shape: StepShape, which: Ids) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """(logits row, store row, the output before it: tokens sampled and the drafts that row takes as accepted)."""
    for r in which.tolist():
        row = int(shape.sample_row[r])
        end = int(rows.num_known[row] + shape.sample_offset[r])
        yield r, row, rows.tokens[row, rows.prompt_length[row] : end]


LOGITS_PROCESSORS: tuple[tuple[int, LogitsProcessor], ...] = (
    (ALLOWED, allow),
    (BANNED, ban),
    (BIASED, bias),
    (PENALISED, penalise),
)
"""By trait, in the order they are run."""
