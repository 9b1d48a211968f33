"""What rows do to their logits before anything is drawn, in place: see `runner.edits`."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import DeviceInfo, kernel, release, wait
from quire.ops.triton.sampling_tensors import CHUNK, SamplingTensors


@kernel
def mask_kernel(
    logits, row_of, masked, masks, raw, words, vocab, chunks, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """One chunk of a row: its greatest logit as the model made it to raw [R, chunks] (NaN counts as inf); the mask."""
    r, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    place = logits + r.to(tl.int64) * vocab + at
    x = tl.load(place, mask=at < vocab, other=float("-inf"))
    tl.store(raw + r * chunks + chunk, tl.max(tl.where(x != x, float("inf"), x), 0))
    line = tl.load(masked + row)
    if line >= 0:
        word = tl.load(masks + line.to(tl.int64) * words + at // 32, mask=at // 32 < words, other=0)
        tl.store(place, float("-inf"), mask=(at < vocab) & ((word >> (at % 32)) & 1 == 0))


@kernel
def penalty_bias_kernel(
    logits, row_of, position_of, history, prompt, repetition, frequency, presence, listed, token, amount, until, tally,
    width, vocab, PROMPT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: what its lists add, then penalties.

    Each token of the row is counted at its place in the tally, PROMPT for one of the prompt's. Then whoever finds a
    count there takes it, so that each token is penalised once and nothing stays behind.
    """
    r = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    row = tl.load(row_of + r)
    if row < 0:
        return
    mine, counts = logits + r.to(tl.int64) * vocab, tally + r.to(tl.int64) * vocab
    position, start = tl.load(position_of + r), tl.load(prompt + row)
    stop = tl.load(listed + row + 1)
    for first in range(tl.load(listed + row), stop, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        which = tl.load(token + entry, mask=entry < stop, other=0)
        applies = (entry < stop) & (position - start < tl.load(until + entry, mask=entry < stop, other=0))
        tl.atomic_add(
            mine + which, tl.load(amount + entry, mask=entry < stop, other=0.0), mask=applies & (which < vocab)
        )
    by, often, once = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
    if (by != 1.0) | (often != 0.0) | (once != 0.0):
        tokens = history + row.to(tl.int64) * width
        for first in range(0, position, BLOCK):
            i = first + tl.arange(0, BLOCK)
            known = tl.load(tokens + i, mask=i < position, other=0)
            tl.atomic_add(counts + known, tl.where(i < start, PROMPT, 1), mask=i < position)
        tl.debug_barrier()
        for first in range(0, position, BLOCK):
            i = first + tl.arange(0, BLOCK)
            known = tl.load(tokens + i, mask=i < position, other=0)
            times = tl.atomic_xchg(counts + known, 0, mask=i < position)
            found = (i < position) & (times > 0)
            x = tl.load(mine + known, mask=found, other=0.0, cache_modifier=".cg")
            x = tl.where(x > 0.0, tl.div_rn(x, by), x * by)
            said = (times % PROMPT).to(tl.float32)
            x = tl.where(said > 0.0, x - (often * said + once), x)
            tl.store(mine + known, x, mask=found)


def process_logits(
    logits: Tensor, rows: Tensor, positions: Tensor, history: Tensor, prompt: Tensor, settings: SamplingTensors,
    card: DeviceInfo,
    tally: Tensor, raw: Tensor,
) -> None:  # fmt: skip
    """Mask, lists, penalties; raw [R, chunks] takes the greatest logits as they were. See `sampler.sample`."""
    count, vocab = logits.shape
    s = settings
    mask_kernel[(count, raw.shape[1])](
        *(logits, rows, s.masked, s.masks, raw, s.masks.shape[1], vocab, raw.shape[1]),
        CHUNK=CHUNK, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    penalty_bias_kernel[(count,)](
        *(logits, rows, positions, history, prompt, s.repetition, s.frequency, s.presence, s.listed, s.token, s.amount),
        *(s.until, tally, history.shape[1], vocab),
        PROMPT=1 << 20, BLOCK=1024, DEPENDENT=card.dependent, num_warps=8, **card.options,
    )  # fmt: skip
